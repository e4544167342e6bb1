"""A third party's expert parallelism, in miniature: its axis is one of samples, along which experts are sharded.

Every rank has tokens of its own samples. They are sent to the ranks that hold their experts, and come back, by
``all_to_all``; so autograd gives each expert its gradient from the samples of all ranks along the axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import (
    AxisKind,
    AxisSpec,
    Cut,
    Layout,
    Phase,
    PluginSpec,
    PreparedModel,
    Run,
    StrategyPlugin,
    all_to_all,
)

EXPERTS, WIDTH, HIDDEN, CLASSES = 4, 6, 10, 5


class Experts(nn.Module):
    """Each token goes to one of ``EXPERTS`` experts.

    Args:
        some_unused: whether the biases of a rank's experts take part only if they get tokens.
    """

    def __init__(self, some_unused: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        self.some_unused = some_unused
        self.run: Run | None = None

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """``[N, WIDTH]``, the expert of each ``[N]`` to ``[N, WIDTH]``."""
        mask = F.one_hot(expert, EXPERTS).to(tokens.dtype).t().unsqueeze(-1)  # [EXPERTS, N, 1]
        sent = torch.cat([mask * tokens, mask], -1)
        if self.run is not None:
            self.run.join.collective_only("sending tokens to experts")
            sent = all_to_all(sent, self.run.backend, self.run.group("ep"), 0, 1)  # [mine, N of all, WIDTH + 1]
        inputs, mine = sent[..., :-1], sent[..., -1:]
        result = F.gelu(inputs @ self.up) @ self.down
        if not self.some_unused or mine.any():
            result = result + self.bias.unsqueeze(1)
        result = result * mine
        if self.run is not None:
            result = all_to_all(result, self.run.backend, self.run.group("ep"), 1, 0)
        return result.sum(0)


class Mixture(nn.Module):
    """A classifier with experts between two layers that every rank holds."""

    def __init__(self, some_unused: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.experts = Experts(some_unused)

    def forward(self, x: torch.Tensor, expert: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden + self.experts(hidden, expert)
        return F.cross_entropy(self.last(hidden), labels)


def some_unused() -> Mixture:
    return Mixture(some_unused=True)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelPlugin(StrategyPlugin):
    """Shards experts over ranks with other samples.

    Args:
        size: number of ranks that hold the experts between them.
        kind: what the axis is.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="test_expert_parallel", api_version=4, phase=Phase.LAYOUT, provides=frozenset({"gathered-weights"})
    )

    size: int = 2

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name="ep", degree=self.size, kind=AxisKind.DATA),)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        for prefix, module in model.module.named_modules():
            if not isinstance(module, Experts):
                continue
            module.run = run
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = Cut(dim=0, axis="ep", degree=self.size, size=EXPERTS)
                layout = Layout(shape=tuple(parameter.shape), dtype="float32", cuts=(cut,))
                model.parameters.set_layout(f"{prefix}.{name}", layout)
                setattr(module, name, nn.Parameter(layout.shard(parameter, run.coordinates)))


def batches(steps: int, size: int = 8, lopsided: bool = False) -> list[dict[str, torch.Tensor]]:
    """Global batches; ``lopsided``: the first goes to all experts, the others to expert 0 only."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for step in range(steps):
        expert = torch.randint(EXPERTS, (size,), generator=generator)
        expert[0], expert[-1] = 0, EXPERTS - 1
        result.append(
            {
                "x": torch.randn(size, WIDTH, generator=generator),
                "expert": expert * (not (lopsided and step)),
                "labels": torch.randint(CLASSES, (size,), generator=generator),
            }
        )
    return result

# SPDX-License-Identifier: Apache-2.0
"""How evenly tokens are spread over experts and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.errors import UsageError
from neuron_accel_expert_parallel.plugin import dispatchers_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """How many tokens chose each expert.

    Args:
        tokens: for each module of experts, by name, the tokens of each expert, int64 ``[experts]`` on the host.
        dropped: for each, the fraction of these choices that had no effect, being above the capacity.
        ranks: number of ranks that hold the experts.
    """

    tokens: dict[str, torch.Tensor]
    dropped: dict[str, float]
    ranks: int

    def metrics(self, prefix: str = "experts/") -> dict[str, float]:
        """The load as numbers to log, each of the layer in which it is worst; empty if no tokens were counted.

        Args:
            prefix: put before the names.

        Returns:
            ``busiest_expert`` and ``busiest_rank``, the tokens of the busiest one over the mean (1: even; a step takes
            as long as its busiest rank), ``unused``, the fraction of experts without tokens, and ``dropped``, that of
            dropped choices.
        """
        counts = [each.double() for each in self.tokens.values() if each.any()]
        if not counts:
            return {}
        ranks = [each.view(self.ranks, -1).sum(1) for each in counts]
        return {
            f"{prefix}busiest_expert": max(float(each.max() / each.mean()) for each in counts),
            f"{prefix}busiest_rank": max(float(each.max() / each.mean()) for each in ranks),
            f"{prefix}unused": max(float((each == 0).double().mean()) for each in counts),
            f"{prefix}dropped": max(self.dropped.values()),
        }


def expert_load(accelerator: Any, model: nn.Module) -> ExpertLoad:
    """Returns how many tokens of all data-parallel ranks chose each expert in training since the last call.
    Collective. Tokens that activation checkpointing computes again count again.

    Args:
        accelerator: the accelerator that prepared ``model``.
        model: the prepared model.

    Raises:
        UsageError: if ``model`` was not prepared with expert parallelism.
    """
    run = accelerator.run
    dispatchers = dispatchers_of(run, model)
    if not dispatchers:
        raise UsageError(
            f"This {type(model).__name__} was not prepared with expert parallelism.",
            where="expert_load",
            why="its tokens are not counted",
            fix="call it with the model that `prepare` returned, and with an expert_parallel_size above 1",
        )
    counts = [torch.cat([each.tokens.to(run.device), each.dropped.to(run.device)[None]]) for each in dispatchers]
    own = torch.stack(counts)
    total = run.backend.to_host(run.backend.all_reduce(own, run.group(*run.mesh.data_axes)))
    for each in dispatchers:
        each.reset()
    return ExpertLoad(
        tokens={each.name: row[:-1] for each, row in zip(dispatchers, total, strict=True)},
        dropped={
            each.name: float(row[-1]) / max(int(row[:-1].sum()), 1)
            for each, row in zip(dispatchers, total, strict=True)
        },
        ranks=dispatchers[0].experts // dispatchers[0].local,
    )

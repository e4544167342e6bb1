# SPDX-License-Identifier: Apache-2.0
"""What an owner of gradient reduction and clipping promises to the other plugins and to the loop, each promise tried on
a tiny model: one function for each sentence of "Owning a responsibility" in docs/writing-a-plugin.md.

All of them run in one call on ranks, :func:`broken`. The reference is a plain PyTorch loop on the same rank, over the
samples of all data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from neuron_accel.backends.autograd import gather_from_group, reduce_scatter_to_group
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec
from neuron_accel.engine.plan.plugin import Claim, Phase, PluginSpec, StrategyPlugin
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.errors import UsageError

from .xla_ranks import one_at_a_time

AXIS = "within"
"""The axis of the plugins below. Two ranks are along it."""


# ---- what is trained -------------------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Two experts, whose outputs are added. :class:`_ShardsExperts` gives each rank one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 2))
        self.ranks: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return sum((torch.tanh(x @ weight) for weight in self.weight), torch.zeros(()))
        backend, group = self.ranks
        samples = gather_from_group(x, backend, group, 0, grad="reduce_scatter")
        return reduce_scatter_to_group(torch.tanh(samples @ self.weight[0]), backend, group, 0)


def block() -> nn.Module:
    """A layer of a class by which strategies find a model's repeated blocks."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Block(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    return Block()


class Branches(nn.Module):
    """A model in which a batch uses one of two layers, with a layer that is never used, and a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.every, self.never = (block() for _ in range(4))
        self.experts = Experts()
        self.rows = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor, goes_left: bool) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        found = (self.left if goes_left else self.right)(x) + self.every(x) + self.experts(x)
        return found.square().mean() + self.rows.square().mean()


@dataclass(frozen=True, kw_only=True)
class _ShardsExperts(StrategyPlugin):
    """Shards the experts over ranks with other samples, as expert parallelism does."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="kit_shards_experts", api_version=4, phase=Phase.LAYOUT, provides=frozenset({"weights-in-passes"})
    )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=2, kind=AxisKind.DATA),)

    def transform_model(self, model: Any, run: Any) -> None:
        experts = model.module.experts
        cut = Cut(dim=0, axis=AXIS, degree=2, size=2)
        layout = replace(Layout.of(experts.weight), cuts=(cut,))
        model.parameters.set_layout("experts.weight", layout)
        experts.weight = nn.Parameter(layout.shard(experts.weight.detach(), run.coordinates))
        experts.ranks = run.backend, run.group(AXIS)


@dataclass(frozen=True, kw_only=True)
class _HoldsTwice(StrategyPlugin):
    """Ranks along an axis of kind MODEL hold the same elements: one parameter by its holders, one by its layout."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="kit_holds_twice", api_version=4, phase=Phase.LAYOUT, provides=frozenset({"weights-in-passes"})
    )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=2, kind=AxisKind.MODEL),)

    def transform_model(self, model: Any, run: Any) -> None:
        model.parameters.set_holders("every.linear.weight", AXIS, (0, 1))


@dataclass(frozen=True, kw_only=True)
class _ReducesInBF16(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(
        name="kit_reduces_in_bf16", api_version=4, phase=Phase.PRECISION, provides=frozenset({"weights-in-passes"})
    )

    def transform_model(self, model: Any, run: Any) -> None:
        for record in model.parameters:
            record.reduce_dtype = torch.bfloat16


# ---- a training and its reference ------------------------------------------------------------------------------------
class Trial:
    """A prepared model on this rank, and the same model in one process.

    Args:
        plugins: of the run.
        backend: the kind of ranks.
        lr, weight_decay: of SGD.
    """

    def __init__(
        self, plugins: Sequence[StrategyPlugin], backend: str, *, lr: float = 0.1, weight_decay: float = 0.5
    ) -> None:
        from neuron_accel import NeuronAccelerator

        config = {"backend": "xla"} if backend == "xla" else None
        self.accelerator = NeuronAccelerator(plugins=plugins, config=config)
        with one_at_a_time():
            self.plain, self.plain_optimizer = _made(lr, weight_decay)
            built, optimizer = _made(lr, weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(built, optimizer)
        self.run = self.accelerator.run
        self.size, self.rank = self.run.data_parallel_size, self.run.data_parallel_rank
        record = self.run.prepared(self.model)
        assert record is not None
        # Ranks of a lazy device run the same graph, and ranks that gather weights for their use run the same layers.
        self.same_layers = self.run.backend.is_lazy or record.gathers_weights

    def end(self) -> None:
        self.accelerator.free_memory()

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, bool]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(4, 3, generator=generator), (step + (0 if self.same_layers else rank)) % 2 == 0

    def loss(self, step: int) -> torch.Tensor:
        x, goes_left = self.batch(step, self.rank)
        return self.model(x.to(self.accelerator.device), goes_left)

    def backward(self, step: int, *, num_items: int | None = None) -> None:
        self.accelerator.backward(self.loss(step), num_items=num_items)

    def plain_backward(self, step: int, weights: Sequence[float] | None = None) -> None:
        """The same passes of all ranks in one process, whose buffer is that of the first rank."""
        weights = weights or [1.0] * self.size
        before, first = self.plain.mean.clone(), None
        for rank, weight in enumerate(weights):
            self.plain.mean.copy_(before)
            loss = self.plain(*self.batch(step, rank)) * (weight / self.size)
            if weight:
                loss.backward()
            first = self.plain.mean.clone() if first is None else first
        self.plain.mean.copy_(before if first is None else first)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_step(self) -> None:
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> list[str]:
        """Clips both; what differs between the norms."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        found = float(self.run.backend.to_host(norm))  # which ranks that are threads do together
        expected = float(nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type))
        same = math.isclose(found, expected, rel_tol=1e-4)
        return [] if same else [f"the {norm_type:g}-norm is {found:.5g} instead of {expected:.5g}"]

    def differences(self) -> list[str]:
        """Which weights and buffers of the main process are not those of the reference."""
        found = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return []
        wrong = [name for name, value in self.plain.state_dict().items() if not _close(found[name], value)]
        return [f"wrong values after the step: {', '.join(wrong)}"] if wrong else []


def _made(lr: float, weight_decay: float) -> tuple[Branches, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branches()
    return model, torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found = found.detach().cpu()
    return found.shape == expected.shape and torch.allclose(found, expected.detach(), rtol=1e-4, atol=1e-5)


# ---- the promises ----------------------------------------------------------------------------------------------------
Make = Callable[..., Trial]


def no_sync(make: Make) -> list[str]:
    """Gradients accumulate on each rank in passes inside `no_sync`, and the next pass reduces their sum. (One that
    reduces in every pass gets the same gradients, so that collectives are counted, too.)"""
    trial, summed = make(), 0
    with trial.accelerator.no_sync(trial.model):
        for step in range(2):
            loss = trial.loss(step)
            with trial.run.backend.record() as traffic:
                trial.accelerator.backward(loss)
            summed += traffic.count(op="all_reduce") + traffic.count(op="reduce_scatter")
    trial.backward(2)
    for step in range(3):
        trial.plain_backward(step)
    trial.step()
    trial.plain_step()
    return ([f"{summed} reductions inside `no_sync`"] if summed else []) + trial.differences()


def _left(use: Callable[[Trial], Iterable[str] | None], *, items: bool = False) -> Callable[[Make], list[str]]:
    """A promise about gradients that a pass inside `no_sync` has left, of which ``use`` is the first use."""

    def promise(make: Make) -> list[str]:
        trial = make()
        counts = [3 + 4 * rank for rank in range(trial.size)]
        with trial.accelerator.no_sync(trial.model):
            trial.backward(0, num_items=counts[trial.rank] if items else None)
        trial.plain_backward(0, [count * trial.size / sum(counts) for count in counts] if items else None)
        found = list(use(trial) or ())
        trial.step()
        trial.plain_step()
        return found + trial.differences()

    return promise


def _clip_value(trial: Trial) -> None:
    trial.accelerator.clip_grad_value_(trial.model.parameters(), 0.05)
    nn.utils.clip_grad_value_(trial.plain.parameters(), 0.05)


def _read(trial: Trial) -> list[str]:
    found = {name: value.cpu() for name, value in trial.accelerator.get_gradients(trial.model).items()}
    expected = {name: p.grad for name, p in trial.plain.named_parameters() if p.grad is not None}
    wrong = [name for name, value in expected.items() if name not in found or not _close(found[name], value)]
    more = sorted(found.keys() - expected.keys())
    return [f"wrong gradients: {', '.join([*wrong, *more])}"] if wrong or more else []


def step_inside_no_sync(make: Make) -> list[str]:
    """A step inside `no_sync` is that of each data-parallel rank by itself."""
    trial = make()
    with trial.accelerator.no_sync(trial.model):
        trial.backward(0)
        trial.step()
    trial.plain_backward(0, [trial.size * (rank == trial.rank) for rank in range(trial.size)])
    trial.plain_step()
    found = dict(trial.accelerator.unwrap_model(trial.model).named_parameters())
    wrong = [name for name, value in trial.plain.named_parameters() if not _close(found[name], value)]
    return [f"wrong values on rank {trial.rank}: {', '.join(wrong)}"] if wrong else []


def sharded_over_samples(make: Make) -> list[str]:
    """The gradient of a parameter that is sharded over ranks with other samples is not summed over these, but divided
    by the number of ranks along all gradient axes."""
    trial = make(_ShardsExperts())
    trial.backward(0)
    trial.plain_backward(0)
    trial.step()
    trial.plain_step()
    return trial.differences()


def kept(make: Make) -> list[str]:
    """A gradient that was reduced before and is still there (a loop that does not zero gradients) is not reduced
    again."""
    trial = make(_ShardsExperts())
    for step in range(2):
        trial.backward(step)
        trial.plain_backward(step)
    trial.step()
    trial.plain_step()
    return trial.differences()


def reduce_dtype(make: Make) -> list[str]:
    """Gradients are sent and summed in the dtype that a plugin has set as `reduce_dtype`."""
    trial = make(_ReducesInBF16(), lr=1.0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trial.plain.named_parameters()}
    trial.backward(0)
    trial.plain_backward(0)
    trial.step()
    trial.plain_step()
    weights = trial.accelerator.get_state_dict(trial.model)
    if not trial.accelerator.is_main_process:
        return []
    unrounded, wrong = 0.0, []
    for name, parameter in trial.plain.named_parameters():
        update, expected = before[name] - weights[name].cpu(), before[name] - parameter.detach()
        unrounded = max(unrounded, (update - update.bfloat16().float()).abs().max().item())
        if not torch.allclose(update, expected, rtol=0.02, atol=0.02 * expected.abs().max().item()):
            wrong.append(name)
    found = [f"wrong gradients: {', '.join(wrong)}"] if wrong else []
    return found + ([f"gradients are off bfloat16 values by {unrounded:.2g}"] if unrounded > 1e-5 else [])


def missing(make: Make) -> list[str]:
    """A gradient that is missing on this rank counts as zeros, and one that no rank has stays None. Which parameters
    train can change between steps."""
    trial = make()
    every = trial.accelerator.unwrap_model(trial.model).every
    found = []
    for step in range(3):
        for layer in (every, trial.plain.every):
            layer.requires_grad_(step != 1)
        trial.backward(step)
        trial.plain_backward(step)
        trial.step()
        trial.plain_step()
        found += [f"step {step}: {what}" for what in trial.differences()]
    return found


def uneven(make: Make) -> list[str]:
    """Inside `join_uneven_inputs` ranks without data take part in what those with data do, and averages still divide by
    the number of all ranks."""
    trial = make()
    steps = [3] + [1] * (trial.size - 1)
    with trial.accelerator.join_uneven_inputs([trial.model], even_batches=False):
        for step in range(steps[trial.rank]):
            trial.backward(step, num_items=4)
            trial.accelerator.clip_grad_norm_(trial.model.parameters(), 0.5)
            trial.step()
    for step in range(max(steps)):
        present = [float(step < count) for count in steps]
        trial.plain_backward(step, [weight * trial.size / sum(present) for weight in present])
        nn.utils.clip_grad_norm_(trial.plain.parameters(), 0.5)
        trial.plain_step()
    return trial.differences()


def uneven_averages(make: Make) -> list[str]:
    """The same without numbers of items: an average over ranks some of which have no data."""
    trial = make()
    steps = [2] + [1] * (trial.size - 1)
    with trial.accelerator.join_uneven_inputs([trial.model], even_batches=False):
        for step in range(steps[trial.rank]):
            trial.backward(step)
            trial.step()
    for step in range(max(steps)):
        trial.plain_backward(step, [float(step < count) for count in steps])
        trial.plain_step()
    return trial.differences()


def items(make: Make) -> list[str]:
    """With `num_items` gradients are averages over items: `run.gradients.scale` multiplies all, once reduced."""
    trial = make()
    counts = [[1 + rank, 5 + 2 * rank] for rank in range(trial.size)]
    total = sum(map(sum, counts))
    with trial.accelerator.no_sync(trial.model):
        trial.backward(0, num_items=counts[trial.rank][0])
    trial.backward(1, num_items=counts[trial.rank][1])
    for step in range(2):
        trial.plain_backward(step, [count[step] * trial.size / total for count in counts])
    trial.step()
    trial.plain_step()
    return trial.differences()


def buffers(make: Make) -> list[str]:
    """Buffers that training changes are those of the first rank after a step."""
    trial = make()
    trial.backward(0)
    trial.plain_backward(0)
    trial.step()
    found = trial.accelerator.unwrap_model(trial.model).mean
    return [] if _close(found, trial.plain.mean) else [f"the buffer of rank {trial.rank} is not that of the first rank"]


def not_finite(make: Make) -> list[str]:
    """Gradients that are not finite, and that the loop drops, leave nothing behind in memory of the owner."""
    trial = make()
    trial.accelerator.backward(trial.loss(0) * math.nan)
    trial.plain_backward(0)
    for optimizer in (trial.optimizer, trial.plain_optimizer):
        optimizer.zero_grad()
    trial.backward(1)
    trial.plain_backward(1)
    trial.step()
    trial.plain_step()
    return trial.differences()


def reshaped(make: Make) -> list[str]:
    """After parameters have changed their shapes, their gradients are reduced as before."""
    trial = make()
    trial.same_layers = True  # so that an owner with buckets of the old shapes raises on every rank, or on none
    trial.backward(0)
    trial.plain_backward(0)
    trial.step()
    trial.plain_step()
    record = trial.run.prepared(trial.model)
    assert record is not None
    mine, rows = record.parameters["rows"], torch.linspace(-1, 1, 6)
    assert mine.current is not None
    try:
        with trial.run.hooks.around("reshape", record, trial.run):
            trial.plain.rows.data = rows
            record.parameters.set_layout("rows", replace(mine.layout, shape=(6,)))
            mine.current.data = rows.to(trial.accelerator.device)
    except UsageError:
        return []
    trial.backward(1)
    trial.plain_backward(1)
    trial.step()
    trial.plain_step()
    return trial.differences()


def held_twice(make: Make) -> list[str]:
    """The norm counts each element once, also one that several ranks hold."""
    trial = make(_HoldsTwice())
    trial.backward(0)
    trial.plain_backward(0)
    return trial.clip(0.05)


PROMISES: dict[str, Callable[[Make], list[str]]] = {
    "sharded_over_samples": sharded_over_samples,
    "kept": kept,
    "no_sync": no_sync,
    "reduced_before_clipping": _left(lambda trial: trial.clip(0.05)),
    "reduced_before_clipping_inf": _left(lambda trial: trial.clip(0.05, math.inf)),
    "reduced_before_clipping_values": _left(_clip_value),
    "reduced_before_scaling": _left(lambda trial: None, items=True),
    "reduced_before_reading": _left(_read),
    "reduced_before_the_step": _left(lambda trial: None),
    "step_inside_no_sync": step_inside_no_sync,
    "reduce_dtype": reduce_dtype,
    "missing": missing,
    "uneven": uneven,
    "uneven_averages": uneven_averages,
    "items": items,
    "buffers": buffers,
    "not_finite": not_finite,
    "reshaped": reshaped,
    "held_twice": held_twice,
}
"""The promises by name, in the order of the documentation."""

ON_XLA = (
    "sharded_over_samples",
    "kept",
    "no_sync",
    "reduced_before_clipping",
    "reduced_before_the_step",
    "missing",
    "buffers",
    "items",
)
"""Those that are tried on lazy devices, where owners reduce in another way. The core refuses some of the others there,
and each graph takes seconds to compile."""


def promised(plugin: StrategyPlugin, backend: str) -> list[str]:
    """The names of what a plugin promises by its claims."""
    claims = plugin.spec.claims
    if Claim.GRADIENT_REDUCTION not in claims:
        return []
    left_out = {
        *((name for name in PROMISES if name not in ON_XLA) if backend == "xla" else ()),
        # who shards the optimizer's state cannot let ranks step by themselves
        *(("step_inside_no_sync",) if Claim.OPTIMIZER_STATE in claims else ()),
    }
    return [name for name in PROMISES if name not in left_out]


def broken(plugins: Sequence[StrategyPlugin], names: Sequence[str], backend: str) -> dict[str, list[str]]:
    """Tries promises on this rank; returns what is wrong with each. Collective.

    Args:
        plugins: the owner, and what it needs.
        names: of the promises.
        backend: the kind of ranks.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        with contextlib.ExitStack() as stack:

            def make(*more: StrategyPlugin, stack: contextlib.ExitStack = stack, **options: float) -> Trial:
                trial = Trial((*plugins, *more), backend, **options)
                stack.callback(trial.end)
                return trial

            try:
                found[name] = PROMISES[name](make)
            except Exception as error:  # if only this rank raises it, the others wait for it until their time is up
                found[name] = [f"raised {type(error).__name__}: {error}"]
    return found


def told(results: Sequence[dict[str, list[str]]]) -> list[str]:
    """The results of all ranks as sentences, one for each promise that is broken."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, wrong in result.items():
            found[name] = list(dict.fromkeys([*found.get(name, []), *wrong]))
    return [f"{name}: {'; '.join(wrong)}" for name, wrong in found.items() if wrong]

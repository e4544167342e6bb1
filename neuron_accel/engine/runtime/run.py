"""The state of one run: a plan with ranks and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.engine.plan.plugin import HOOKS, Phase, overrides
from neuron_accel.engine.runtime.join import Join
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
from neuron_accel.errors import CheckpointError, NeuronAccelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Group
    from neuron_accel.engine.plan.plan import Plan
    from neuron_accel.engine.plan.plugin import Claim, StrategyPlugin


@dataclass
class PreparedModel:
    """A model and the map of its parameters.

    Args:
        original: the object the user passed.
        module: the object that trains.
        optimizable: whether it was prepared for training.
    """

    original: nn.Module
    module: nn.Module
    parameters: ParameterMap
    optimizable: bool = True
    sync_enabled: bool = True
    """False inside ``no_sync``."""
    synchronises: bool = True
    """Whether the next backward pass sums gradients over ranks; determined in the forward pass, as in
    DistributedDataParallel."""
    in_backward: bool = False
    """Whether the run itself drives the backward pass, and reports its end."""

    handles: list[Any] = field(default_factory=list)
    """Hooks to be removed when the run releases the model."""

    @property
    def inner(self) -> nn.Module:
        """The module whose parameters have the original names, below a compiled one."""
        return getattr(self.module, "_orig_mod", self.module)

    def settle_synchronisation(self, *_: Any) -> None:
        """Called at the start of a forward pass that will be followed by a backward pass."""
        if torch.is_grad_enabled():
            self.synchronises = self.sync_enabled


class BoundHooks:
    """The hooks of a plan, each bound to the plugins that implement it, in the order in which they are called.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._bound = {
            name: tuple(getattr(plugin, name) for plugin in plan.plugins if overrides(plugin, name)) for name in HOOKS
        }

    def __getitem__(self, name: str) -> tuple[Callable[..., Any], ...]:
        """The methods to call, in order."""
        return self._bound[name]

    def transform(self, name: str, value: Any, run: Run) -> Any:
        """Applies the hooks of that name to ``value``, one after another."""
        for hook in self._bound[name]:
            value = hook(value, run)
        return value


def _unwatched(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Run:
    """The explicit state of a run. Plugins receive it in every hook and keep their state in :meth:`state`.

    Args:
        plan: the plan.
        backend: performs collectives.
    """

    plan: Plan
    backend: Backend
    models: list[PreparedModel] = field(default_factory=list)
    unprepared: list[ParameterMap] = field(default_factory=list, init=False)
    """Parameters of no prepared model that optimizers hold, which is possible in one process only."""
    backward_scale: Callable[[], float] = lambda: 1.0
    """The factor of a loss before its backward pass: one over the number of accumulated micro-batches. For plugins that
    run backward passes before the loss is returned."""
    hooks: BoundHooks = field(init=False)
    """The plugins' hooks, called by the code that drives the run."""
    calling: Callable[[str], AbstractContextManager[None]] = field(init=False)
    """A context for operations that every rank must call, by name: if others wait too long, an error names rank and
    operation."""
    join: Join = field(init=False)
    """How a rank that has run out of data takes part with the others."""
    watchers: list[Any] = field(default_factory=list, init=False)
    """The watchers that reduce gradients as they arrive: one for each optimizer or model that owns some."""

    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    _state: dict[str, dict[str, Any]] = field(default_factory=dict)
    _randomness: dict[str, RankRandomness] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hooks = BoundHooks(self.plan)
        self.join, self.calling = Join(self), _unwatched

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process: mesh and rank, without anything that was prepared."""
        return {"plan": self.plan, "backend": self.backend, "_groups": self._groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["plan"], state["backend"])  # type: ignore[misc]
        self._groups = state["_groups"]

    @property
    def mesh(self):
        return self.plan.mesh

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's position along every axis."""
        return self.mesh.coordinates(self.backend.rank)

    def group(self, *axes: str) -> Group:
        """The group of ranks that differ from this one only along ``axes``. Created at the first request, collectively:
        every rank asks for the same groups in the same order.

        Raises:
            UsageError: if the mesh has no axis of that name.
        """
        for axis in axes:
            if axis not in self.mesh.axis_names:
                raise UsageError(
                    f"The mesh has no axis {axis!r}.",
                    why="a group of one rank instead would silently omit sums",
                    fix=did_you_mean(axis, self.mesh.axis_names),
                )
        key = tuple(axis.name for axis in self.mesh.axes if axis.name in axes and axis.degree > 1)
        if key not in self._groups:
            self._groups[key] = self.backend.new_group(self.mesh.groups(*key), " x ".join(key) or "self")
        return self._groups[key]

    def set_known_groups(self, other: Run) -> None:
        """Uses the groups that another run has created."""
        self._groups = dict(other._groups)

    def set_groups(self, axes: Sequence[str], partition: Sequence[Sequence[int]]) -> None:
        """Uses these groups of ranks for ``axes`` instead of the mesh's own; collective, before they are asked for."""
        key = tuple(axis.name for axis in self.mesh.axes if axis.name in axes and axis.degree > 1)
        if len(key) == len(axes):
            self._groups[key] = self.backend.new_group(partition, " x ".join(key))

    def randomness(self, axis: str) -> RankRandomness:
        """The random state of ranks along ``axis``: equal, or different on each. If a strategy lets them differ
        temporarily, that also holds for other users of it."""
        if axis not in self._randomness:
            index = self.group(axis).index
            self._randomness[axis] = RankRandomness(self.device, index, self.backend.generator)
        return self._randomness[axis]

    @property
    def world(self) -> Group:
        return self.group(*(axis.name for axis in self.mesh.axes))

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different samples."""
        return self.group(*self.mesh.data_axes).size

    @property
    def data_parallel_rank(self) -> int:
        return self.group(*self.mesh.data_axes).index

    def owner(self, claim: Claim) -> StrategyPlugin | None:
        """The plugin that owns a responsibility."""
        name = self.plan.owners.get(claim)
        return None if name is None else self.plan.plugin(name)

    def state(self, plugin: StrategyPlugin) -> dict[str, Any]:
        """A dict for the run-time state of one plugin."""
        return self._state.setdefault(plugin.spec.name, {})

    def prepared(self, model: nn.Module) -> PreparedModel | None:
        """The record of a model, by the object the user passed, the one that trains, or the latter compiled."""
        inner = getattr(model, "_orig_mod", model)
        return next((m for m in self.models if m.module is model or m.original is model or m.module is inner), None)

    def find_parameter(self, parameter: torch.Tensor) -> ParameterRecord | None:
        """The record of a parameter of any prepared model, or of one that only an optimizer holds."""
        return next((r for r in (each.find(parameter) for each in self.parameter_maps) if r is not None), None)

    @property
    def parameter_maps(self) -> list[ParameterMap]:
        """The parameters of every prepared model, and those that only an optimizer holds."""
        return [*(model.parameters for model in self.models), *self.unprepared]

    @contextmanager
    def driving_backward(self) -> Iterator[None]:
        """Marks a backward pass whose end the run announces to the plugins itself."""
        for model in self.models:
            model.in_backward = True
        try:
            yield
        finally:
            for model in self.models:
                model.in_backward = False


def transform_model(model: PreparedModel, run: Run, *, since: Phase | None = None, before: Phase | None = None) -> None:
    """Lets the plugins of these phases transform a model, one after another, and checks its parameters after each.

    Raises:
        NeuronAccelError: what a plugin raises.
    """
    for hook in run.hooks["transform_model"]:
        plugin = hook.__self__  # type: ignore[attr-defined]  # a bound method
        phase = plugin.spec.phase
        if (since is not None and phase < since) or (before is not None and phase >= before):
            continue
        with model.parameters.changed_by(plugin.spec.name):
            hook(model, run)
            model.parameters.follow(model.inner)


# ---- Ranks that fail together: if one rank fails, none continues -----------------------------------------------------
T = TypeVar("T")


def agreed(run: Run, work: Callable[[], T]) -> T:
    """``work()``, if it succeeds on every rank; its first error otherwise, on every rank. Collective."""
    result: Any = None
    error: NeuronAccelError | None = None
    try:
        result = work()
    except NeuronAccelError as e:
        error = e
    except Exception as e:
        error = CheckpointError(f"Unexpected: {e!r}", where=f"rank {run.backend.rank}")
        error.__cause__ = e
    errors = run.backend.all_gather_object(error, run.world) if run.world.size > 1 else [error]
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise error if error is not None else first
    return result

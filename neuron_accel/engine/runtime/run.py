# SPDX-License-Identifier: Apache-2.0
"""The state of one run: a plan, a backend, the prepared models, and the state of plugins."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.engine.optim.norms import Gradients
from neuron_accel.engine.plan import version_3
from neuron_accel.engine.plan.plugin import HOOKS, Claim, Phase, hooks_of
from neuron_accel.engine.runtime.join import Join
from neuron_accel.engine.runtime.shared_inputs import SharedInputs
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
from neuron_accel.errors import NeuronAccelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.backends.events import Events
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.plan.hardware import Hardware
    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.plan.plan import Plan
    from neuron_accel.engine.plan.plugin import StrategyPlugin


@dataclass
class PreparedModel:
    """A prepared model.

    Args:
        original: the module that the user passed.
        module: the module that trains.
        parameters: the parameters, with their layouts, by FQN in the original model.
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
    """Whether the run itself runs the backward pass, and notifies the plugins of its end."""

    gathers_weights: bool = False
    """Whether a strategy shards the values of parameters and gathers them for their use
    (:attr:`ParameterRecord.weights`), now or once their optimizer is prepared."""

    runs_backward: bool = False
    """Whether calling the model in training runs forward and backward of several micro-batches (a pipeline), so that no
    backward pass is left to the loss that it returns."""

    defers_gradients: bool = False
    """Whether gradients of weights may arrive after the backward pass of their module, at any time before
    ``backward_pass`` is resumed."""

    reader: Callable[[Mapping[str, tuple[int, torch.Tensor]]], None] | None = None
    """Reads weights for :meth:`read_weights`, while some of them are unread."""

    initial_weights: dict[str, str | os.PathLike[str]] = field(default_factory=dict)
    """A checkpoint, or a folder of transformers, from which the first prepared model of a run loads its weights after
    it is sharded, by the plugin that names it in ``transform_model``. One may."""
    handles: list[Any] = field(default_factory=list)
    """Handles whose ``remove()`` is called when the run releases the model."""

    forward_is_event: bool = False
    """Whether each forward pass is an event: :meth:`make_events` was called."""
    is_changed: bool = field(default=False, init=False)
    """Whether a module of the model has got a parameter or a part since :attr:`check_changes` was called."""
    check_changes: Callable[[], bool] = field(default=lambda: False, init=False)
    """Is called before a forward pass if :attr:`is_changed`, and returns whether it is to be called again."""

    def __repr__(self) -> str:
        use = "for training" if self.optimizable else "for evaluation"
        return f"<{type(self).__name__}: {type(self.original).__name__}, {use}; {self.parameters!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of a model, which hooks of its module bring this along to. It is neither watched nor released."""
        kept = {name: value for name, value in vars(self).items() if name not in ("is_changed", "check_changes")}
        return {**kept, "handles": []}

    @property
    def inner(self) -> nn.Module:
        """The module whose parameters have the original names, without the wrapper of ``torch.compile``."""
        return getattr(self.module, "_orig_mod", self.module)

    def read_weights(self, wanted: Mapping[str, tuple[int, torch.Tensor]]) -> None:
        """Reads elements of parameters of a model that was built without memory for weights
        (:attr:`ParameterRecord.is_unread`), and nothing else. Collective over all ranks, each with what it wants; those
        named have been read then.

        Args:
            wanted: by FQN, a range of the parameter's shard by its layout, flattened: its first element, and a 1-D
                tensor on the CPU, as long as the range, which gets the values. An empty one means that other ranks have
                the parameter's values.

        Raises:
            UsageError: if all weights have been read.
            CheckpointError: on every rank, if a file cannot be read, or has changed.
        """
        if self.reader is None:
            raise UsageError(
                f"The weights of {type(self.original).__name__} have been read.",
                why="it was built with memory for them, or not prepared together with its optimizer",
                fix="ask ParameterRecord.is_unread",
            )
        self.reader(wanted)
        for name in wanted:
            self.parameters[name].is_unread = False

    def make_events(self, events: Events) -> None:
        """Makes each following forward pass of the module an event, if it is not one yet: ``"forward"``, or
        ``"evaluation"`` without gradients."""
        if self.forward_is_event:
            return
        self.forward_is_event = True
        opened: list[AbstractContextManager[Any]] = []

        @torch.compiler.disable(reason=OUTSIDE_GRAPHS)
        def begin(*_: Any) -> None:
            name = "forward" if torch.is_grad_enabled() else "evaluation"
            opened.append(events.open(name, "part", part=name))
            opened[-1].__enter__()

        @torch.compiler.disable(reason=OUTSIDE_GRAPHS)
        def end(*_: Any) -> None:
            if opened:
                opened.pop().__exit__(None, None, None)

        self.handles.append(self.module.register_forward_pre_hook(begin, prepend=True))
        self.handles.append(self.module.register_forward_hook(end, always_call=True))

    def watch_changes(self, check: Callable[[PreparedModel], bool]) -> None:
        """Calls ``check`` before the next forward pass once a module of the model has got a parameter or a part, and
        again while it returns True. torch calls a hook at each such change, so that a step costs nothing."""
        reference, inside = weakref.ref(self), weakref.WeakSet(self.inner.modules())

        def changed(module: nn.Module, *_: Any) -> None:
            if module in inside and (model := reference()) is not None:
                model.is_changed = True

        def checked() -> bool:
            model = reference()
            if model is None:
                return False
            inside.update(model.inner.modules())
            return check(model)

        self.check_changes = checked
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            handle = register(changed)
            self.handles.append(handle)
            weakref.finalize(self, handle.remove)

    def set_synchronises(self, *_: Any) -> None:
        """Sets :attr:`synchronises`; called at the start of a forward pass."""
        if self.is_changed:
            self.is_changed = self.check_changes()
        if torch.is_grad_enabled():
            self.synchronises = self.sync_enabled


OUTSIDE_GRAPHS = "forward passes are measured between compiled graphs"
"""What torch.compile says of a graph that ends where a forward pass begins or ends."""


class _HookEvent:
    """A bound hook each call of which is an event, named after plugin and hook.

    Args:
        hook: the bound method.
        events: of the run.
        call: what is called; None: the hook.
    """

    def __init__(self, hook: Callable[..., Any], events: Events, call: Callable[..., Any] | None = None) -> None:
        self._hook, self._events = call or hook, events
        self.__self__: StrategyPlugin = hook.__self__  # type: ignore[attr-defined]  # a bound method
        self._name = f"{self.__self__.spec.name}.{hook.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._events.open(self._name, "hook"):
            return self._hook(*args, **kwargs)


class BoundHooks:
    """The hooks of a plan, each bound to the plugins that implement it, in the order in which they are called.

    Args:
        plan: the plan.
        events: of the run. While hooks have observers, each call of one is an event.
    """

    def __init__(self, plan: Plan, events: Events) -> None:
        self._events = events
        self._bound = {
            name: tuple(hooks[name] for hooks in map(hooks_of, plan.plugins) if name in hooks) for name in HOOKS
        }
        self._as_events = {name: tuple(_HookEvent(hook, events) for hook in self._bound[name]) for name in HOOKS}

    def __getitem__(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Returns the bound methods to call, in order."""
        return self._as_events[name] if self._events.of["hook"] else self._bound[name]

    @contextmanager
    def around(self, name: str, first: Any, *rest: Any) -> Iterator[Any]:
        """Runs what the generators of that name do before their ``yield``, the block, and what they do after it, both
        in the order of the plan. What one yields takes the place of their first argument, which the block gets. If the
        block, or one of them, fails, they are closed; also if one yields False, which the block gets then."""
        with ExitStack() as closing:
            started = []
            for hook in self._bound[name]:
                generator = hook(first, *rest)
                closing.callback(generator.close)
                changed = self._advance(hook, generator)
                if changed is False:
                    yield False
                    return
                first = first if changed is None else changed
                started.append((hook, generator))
            yield first
            for hook, generator in started:
                self._advance(hook, generator)

    def _advance(self, hook: Callable[..., Any], generator: Iterator[Any]) -> Any:
        if not self._events.of["hook"]:
            return next(generator, None)
        return _HookEvent(hook, self._events, partial(next, generator, None))()

    def transform(self, name: str, value: Any, run: Run) -> Any:
        """Passes ``value`` through the hooks of that name, one after another, and returns the result."""
        for hook in self[name]:
            value = hook(value, run)
        return value


@dataclass
class Run:
    """The state of a run. Plugins receive it in every hook, and keep their own state in :meth:`state`.

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
    """Returns the factor of a loss before its backward pass: one over the number of accumulated micro-batches. For
    plugins that run backward passes before the loss is returned."""
    num_items: int | torch.Tensor | None = field(default=None, init=False)
    """``num_items`` of the call of ``accelerator.backward`` that runs: the number of items that its loss is the mean
    of. None if the loop gives none, or outside of such a call. A plugin that weights losses itself refuses it in
    ``backward_pass``."""
    norm: torch.Tensor | None = field(default=None, init=False)
    """Norm of the gradients of this step before they were clipped, 0-dim; None if they were not. Reading it would
    execute the pending graph of a lazy device."""
    may_skip: bool = field(default=False, init=False)
    """Whether a plugin may skip the step of an optimizer, in ``step``: not with a closure or a gradient scaler."""
    hardware: Hardware | None = None
    """Limits of the instance that the run is on, or is meant for; None on other machines."""
    log: Callable[[Mapping[str, float], int], None] = lambda values, step: None
    """Logs figures of a step to the trackers of the training. Does nothing without trackers, or on ranks that have
    none."""
    is_precompiling: bool = False
    """Whether the run only collects graphs, and every value is zero."""
    has_trackers: Callable[[], bool] = lambda: False
    """Returns whether this rank has trackers, so that figures need not be made where :attr:`log` does nothing."""
    mesh: Mesh = field(init=False)
    device: torch.device = field(init=False)
    events: Events = field(init=False)
    """What happens: parts of a step, hooks of plugins, collectives. Plugins observe events, and have their own."""
    hooks: BoundHooks = field(init=False)
    """The plugins' hooks, called by the code that drives the run."""
    join: Join = field(init=False)
    """Lets ranks that have run out of data take part in the collectives of the others."""
    _undo: ExitStack = field(default_factory=ExitStack, init=False)
    until_released: ExitStack = field(default_factory=ExitStack, init=False)
    """Settings of the process, which end when the prepared models are released."""
    shared_inputs: SharedInputs = field(init=False)
    """Compares inputs and random numbers between the ranks that compute a forward pass together."""
    regularly: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Functions that a thread calls about once a second (with thousands of ranks, every few), also while the loop waits
    for other ranks. None is called on one rank, or if the environment disables the watchdog."""
    watchers: list[Any] = field(default_factory=list, init=False)
    """The watchers that reduce gradients as they arrive: one for each optimizer or model that owns some."""

    backward_task: int | None = field(default=None, init=False)
    """Autograd's number of the backward pass that the run executes, 0 until it has begun; None: not known."""

    _optimizers: list[weakref.ref[Any]] = field(default_factory=list, init=False)
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    _requested: dict[tuple[str, ...], Group] = field(default_factory=dict, init=False)  # the same, by axes in any order
    _state: dict[str, dict[str, Any]] = field(default_factory=dict)
    _randomness: dict[str, RankRandomness] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh, self.device, self.events = self.plan.mesh, self.backend.device, self.backend.events
        self.hooks = BoundHooks(self.plan, self.events)
        self.join, self.shared_inputs = Join(self), SharedInputs(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles plan, backend and groups, without anything that was prepared."""
        return {"plan": self.plan, "backend": self.backend, "_groups": self._groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["plan"], state["backend"])  # type: ignore[misc]
        self._groups = state["_groups"]

    def __repr__(self) -> str:
        models = ", ".join(type(model.original).__name__ for model in self.models) or "none"
        return f"<{type(self).__name__}: {self.plan!r}; {self.backend!r}; models: {models}>"

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Index of this rank along each axis, by the axis' name."""
        return self.mesh.coordinates(self.backend.rank)

    def group(self, *axes: str) -> Group:
        """Returns the group of ranks that differ from this one only along ``axes``. The first call creates it,
        collectively: all ranks must request the same groups in the same order.

        Raises:
            UsageError: if the mesh has no axis of that name.
        """
        if (known := self._requested.get(axes)) is not None:
            return known
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
        self._requested[axes] = self._groups[key]
        return self._groups[key]

    def set_known_groups(self, other: Run) -> None:
        """Uses the groups that another run has created."""
        self._groups = dict(other._groups)

    def set_groups(self, axes: Sequence[str], partition: Sequence[Sequence[int]]) -> None:
        """Uses the groups of ``partition`` for ``axes`` instead of those of the mesh. Collective; must be called before
        the groups are first requested."""
        key = tuple(axis.name for axis in self.mesh.axes if axis.name in axes and axis.degree > 1)
        if len(key) == len(axes):
            self._groups[key] = self.backend.new_group(partition, " x ".join(key))

    def randomness(self, axis: str) -> RankRandomness:
        """Returns the object that makes random numbers equal or different on ranks along ``axis``. It is shared by all
        plugins."""
        if axis not in self._randomness:
            index = self.group(axis).index
            self._randomness[axis] = RankRandomness(self.device, index, self.backend.generator)
        return self._randomness[axis]

    @property
    def world(self) -> Group:
        return self.group(*(axis.name for axis in self.mesh.axes))

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, which process different samples."""
        return self.group(*self.mesh.data_axes).size

    @property
    def data_parallel_rank(self) -> int:
        return self.group(*self.mesh.data_axes).index

    def owner(self, claim: Claim) -> StrategyPlugin | None:
        """Returns the plugin that owns a responsibility, or None."""
        return self._owners.get(claim)

    @property
    def gradients(self) -> Gradients:
        """The reduced gradients, wherever their owner stores them."""
        owner = self.owner(Claim.GRADIENT_REDUCTION)
        for hook in self.hooks["gradients"]:
            if hook.__self__.spec is owner.spec:  # type: ignore[attr-defined, union-attr]  # a bound method of the owner
                return hook(self)
        return Gradients(self)

    @cached_property
    def _owners(self) -> dict[Claim, StrategyPlugin]:
        return {claim: self.plan.plugin(name) for claim, name in self.plan.owners.items()}

    def state(self, plugin: StrategyPlugin) -> dict[str, Any]:
        """Returns the dict for the run-time state of one plugin."""
        return self._state.setdefault(plugin.spec.name, {})

    def undo(self, action: Callable[[], object]) -> None:
        """Calls ``action`` when what was prepared is released, the last one first. Then plugins lose their state."""
        self._undo.callback(action)

    def end(self) -> None:
        """Undoes what plugins have done with what was prepared."""
        self._undo.close()
        version_3.end(self.plan.plugins, self)
        self._state.clear()

    def prepared(self, model: nn.Module) -> PreparedModel | None:
        """Returns the record of a model, given the module that the user passed, the one that trains, or the latter
        compiled; None if it is not prepared."""
        inner = getattr(model, "_orig_mod", model)
        return next((m for m in self.models if m.module is model or m.original is model or m.module is inner), None)

    @property
    def optimizers(self) -> list[Any]:
        """The prepared optimizers, in the order in which they were prepared. The loop and its accelerator keep them."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def add_optimizer(self, optimizer: Any) -> None:
        """Adds a prepared optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    def forget(self, kept: Sequence[PreparedModel] = ()) -> None:
        """Drops all that was prepared, but for the models ``kept``."""
        self.models[:] = kept
        self.unprepared.clear()
        self._optimizers.clear()
        self.join.forget()

    def find_parameter(self, parameter: torch.Tensor) -> ParameterRecord | None:
        """Returns the record of a parameter of a prepared model, or of one that only an optimizer holds; None for any
        other."""
        for model in self.models:
            if (record := model.parameters.find(parameter)) is not None:
                return record
        for parameters in self.unprepared:
            if (record := parameters.find(parameter)) is not None:
                return record
        return None

    def name_of(self, record: ParameterRecord) -> str:
        """Returns the FQN of a parameter, behind the number of its model if an earlier model has one of that name."""
        maps = self.parameter_maps
        number = next(i for i, m in enumerate(maps) if record.fqn in m and m[record.fqn] is record)
        return f"{number}.{record.fqn}" if any(record.fqn in earlier for earlier in maps[:number]) else record.fqn

    @property
    def parameter_maps(self) -> list[ParameterMap]:
        """The parameters of every prepared model, and those that only an optimizer holds."""
        return [*(model.parameters for model in self.models), *self.unprepared]

    @contextmanager
    def driving_backward(self, loss: torch.Tensor | None = None) -> Iterator[None]:
        """Context for a backward pass that the run itself executes, and of whose end it notifies the plugins. With
        ``loss`` a backward pass that a hook runs inside of this one is told apart from it."""
        for model in self.models:
            model.in_backward = True
        if loss is not None:
            self.backward_task = 0
            if loss.grad_fn is not None:
                loss.grad_fn.register_prehook(self._note_task)
        try:
            yield
        finally:
            self.backward_task = None
            for model in self.models:
                model.in_backward = False

    def _note_task(self, _: Any) -> None:
        self.backward_task = torch._C._current_graph_task_id()


def transform_model(model: PreparedModel, run: Run, *, since: Phase | None = None, before: Phase | None = None) -> None:
    """Calls ``transform_model`` of the plugins from phase ``since`` on and before phase ``before``, one after another,
    and checks the model's parameters after each.

    Raises:
        NeuronAccelError: the errors of plugins, and ParameterError if parameters do not match their layouts.
    """
    for hook in run.hooks["transform_model"]:
        plugin = hook.__self__  # type: ignore[attr-defined]  # a bound method
        phase = plugin.spec.phase
        if (since is not None and phase < since) or (before is not None and phase >= before):
            continue
        with model.parameters.changed_by(plugin.spec.name):
            hook(model, run)
            model.parameters.follow(model.inner)


# ---- Errors on all ranks: if one rank fails, none continues ----------------------------------------------------------
T = TypeVar("T")


def agreed(run: Run, work: Callable[[], T]) -> T:
    """Returns ``work()`` if it succeeds on all ranks. Otherwise raises its own error on ranks where it failed. On the
    others raises the first such error if it is one of this package, else one that names the rank. Collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as e:
        error = e
    failed = error
    if error is not None and not isinstance(error, NeuronAccelError):  # of another class, which may not be pickled
        failed = NeuronAccelError(f"Rank {run.backend.rank} failed: {error!r}", why="no rank continues if one fails")
    first = failed
    if run.world.size > 1:
        first = run.backend.gather_object(failed, run.world, lambda one, other: other if one is None else one)
        first = run.backend.broadcast_object(first, run.world)
    if first is not None:
        raise error if error is not None else first
    return result

# SPDX-License-Identifier: Apache-2.0
"""When the parameters of a model are gathered and freed: hooks on its modules.

A unit is a module whose parameters are gathered together: a repeated block, and the model itself with what is in no
block. The method is that of "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (Zhao et al., VLDB
2023).

Every rank gathers and reduces in the same order, whatever gradients it has: a unit is gathered where its forward or
backward pass begins, and its gradients are reduced where its backward pass ends. So ranks run the same modules in the
same order (:mod:`~neuron_accel.strategies.fully_sharded.order` compares it).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from neuron_accel.contract.families import Architecture, matches_fqn
from neuron_accel.contract.sharded import Unit, UnitsOfModel
from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterRecord, PreparedModel, Run
    from neuron_accel.strategies.fully_sharded.order import UnitOrder

BLOCKS = "blocks"
_MARKS = "_is_fsdp_managed_module", "_fsdp_use_orig_params"
"""What torch's FSDP sets on modules, by which transformers knows that all ranks have to take part in a forward pass."""


class Units(UnitsOfModel):
    """The units of one model.

    Args:
        model: after all rewrites, on its device.
        run: the run.
        modules: which modules are units, see :class:`~neuron_accel.strategies.fully_sharded.FullyShardedPlugin`.
        reshard: whether parameters are freed after the forward pass.
        prefetch: how many units are gathered ahead of the one that computes.
        persistence_threshold: parameters of fewer elements are kept on every rank.
        order: in which the units of all models are called.
        number: of the model among those of the run, from 1; the same on every rank.
        plugin: name of the plugin, for messages.

    Attributes:
        root: the unit of the model itself.
        before_units: functions that are called with :attr:`root` when the backward pass of the first other unit begins,
            unless the gradients of the pass are not reduced yet or at its end.
    """

    def __init__(
        self,
        model: PreparedModel,
        run: Run,
        *,
        modules: str | tuple[str, ...],
        reshard: bool,
        prefetch: int,
        persistence_threshold: int = 0,
        order: UnitOrder,
        number: int,
        plugin: str,
    ) -> None:
        self._order, self._of_model = order, f" (model {number})" if number > 1 else ""
        self._model, self._run = model, run
        self._reshard, self._prefetch, self._plugin = reshard, prefetch, plugin
        self._threshold = persistence_threshold
        found = find_units(model.inner, modules, plugin)
        self.root = Unit("", model.inner, 0)
        self.units = [self.root, *(Unit(name, module, i) for i, (name, module) in enumerate(found, start=1))]
        self._last: dict[bool, Unit | None] = {False: None, True: None}
        self._in_pass, self._in_units = False, False
        self.before_units: list[Callable[[Unit], None]] = []
        self._handed_on: tuple[Unit, list[tuple[torch.Tensor, Any]]] | None = None  # the last unit's outputs and hooks
        self._handles: list[Any] = []
        self._marked: list[nn.Module] = []
        self._unit_of = {id(record): self._unit_around(record) for record in model.parameters}
        self._action = run.join.register("a gather of parameters", self._gather_along, compares=True)
        for unit in self.units:
            self._watch(unit)
        if order.is_on:
            self._mark(model.inner)

    def unit_of(self, record: ParameterRecord) -> Unit | None:
        """The unit of a parameter; None if it is of another model."""
        if id(record) not in self._unit_of and record in list(self._model.parameters):
            self._unit_of[id(record)] = self._unit_around(record)
        return self._unit_of.get(id(record))

    @property
    def records(self) -> Iterable[ParameterRecord]:
        """The parameters of the model, in its order."""
        return self._model.parameters

    def keeps(self, record: ParameterRecord) -> bool:
        """Whether every rank keeps a parameter, because it is too small to be gathered for each use, or is on several
        pipeline stages, which synchronise it after a step."""
        if record.current is None:
            return False
        return record.current.numel() < self._threshold or record.completed_late

    def _unit_around(self, record: ParameterRecord) -> Unit:
        """The unit in which all uses of a parameter are; one that is tied across units belongs to the model."""
        around = {self._unit_with(name).index for name in record.names}
        return self.units[around.pop()] if len(around) == 1 else self.root

    def _unit_with(self, name: str) -> Unit:
        inside = [unit for unit in self.units[1:] if name.startswith(f"{unit.name}.")]
        return max(inside, key=lambda unit: len(unit.name), default=self.root)

    # ---- hooks -------------------------------------------------------------------------------------------------------
    def _watch(self, unit: Unit) -> None:
        module, keep = unit.module, self._handles.append
        keep(module.register_forward_pre_hook(Hook(self._before_forward, unit), prepend=True, with_kwargs=True))
        keep(module.register_forward_hook(Hook(self._after_forward, unit)))
        keep(module.register_state_dict_pre_hook(Hook(self._refuse_state_dict, unit)))
        keep(module.register_load_state_dict_pre_hook(Hook(self._refuse_load, unit)))
        own = unit.name + "." if unit.name else ""
        for name, inside in module.named_modules():
            if inside is not module and inside._parameters and self._unit_with(f"{own}{name}.x") is unit:
                keep(inside.register_forward_pre_hook(Hook(self._before_part, unit), prepend=True))

    def _mark(self, model: nn.Module) -> None:
        """Marks modules as PyTorch's ``fully_shard`` does. From this transformers knows that all ranks must call them
        equally often: its ``generate`` continues until all ranks have their texts, and models that drop layers at
        random call these too."""
        self._marked = list(model.modules())
        for module in self._marked:
            for mark in _MARKS:
                setattr(module, mark, True)

    def _before_part(self, unit: Unit, *_: Any) -> None:
        """A part of a unit may be called by itself."""
        if unit.is_idle and not in_backward():
            self._called(unit, False)
        self.gather(unit)

    def _before_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        inside = in_backward()
        if unit is self.root and not inside:
            self._last[False] = None
            self._in_units = False  # a backward pass that raised an error has not ended
            unit.reopen()
        if not inside:
            self._called(unit, False)
        self.gather(unit)
        if inside:
            return None  # it is recomputed, and its backward pass follows
        self._fetch_following(unit, False)
        if torch.is_grad_enabled():
            args, kwargs = _computed(args), {name: _computed(value) for name, value in kwargs.items()}
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
            unit.trains = bool(inputs) or any(parameter.requires_grad for parameter in unit.module.parameters())
        if torch.is_grad_enabled() and unit is not self.root:
            unit.forwards += 1
            if inputs:  # else it is over when the whole pass is
                ended = Hook(self._after_backward, unit)
                ended.handle = register_multi_grad_hook(inputs, ended)
                self._put_last(inputs)
        return args, kwargs

    def _after_forward(self, unit: Unit, _: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        if not self._run.backend.is_lazy:
            # Autocast keeps casted weights, in full, until its context ends: they are to be freed, and if the call for
            # another micro-batch used them, too, they would have gradients only after all of this module.
            torch.clear_autocast_cache()
        if not torch.is_grad_enabled():
            if self._reshard or not self._model.runs_backward:
                unit.release()
            elif unit is self.root:  # all micro-batches have been evaluated
                self.release()
            return
        self._handed_on = None
        if unit is self.root and self._model.runs_backward:
            return  # `end_backward` follows
        # Where an output is not a plain tensor (logits that are sharded over ranks), parameters are kept for backward.
        outputs = [t for t in tree_leaves(output) if type(t) is torch.Tensor and t.requires_grad]
        handles = [tensor.register_hook(Hook(self._before_backward, unit)) for tensor in outputs]
        self._handed_on = None if unit is self.root else (unit, list(zip(outputs, handles, strict=True)))
        if not unit.trains and (self._reshard or not self._model.runs_backward):
            unit.release()
        elif outputs and self._reshard and unit is not self.root:
            if self._action.announced:
                unit.release()  # a rank that has run out of data has no part of what was gathered
            else:
                unit.reshard()

    def _put_last(self, inputs: Sequence[torch.Tensor]) -> None:
        """Where an output of the last unit is an input of this one, the backward pass of this one ends, and frees what
        it has gathered, before that of the last one begins, and gathers: hooks run in the order in which they were
        registered."""
        if self._handed_on is None or self._run.backend.is_lazy:  # a compiler orders a graph itself
            return
        unit, handed = self._handed_on
        for tensor, handle in handed:
            if any(tensor is given for given in inputs):
                handle.remove()
                tensor.register_hook(Hook(self._before_backward, unit))
        self._handed_on = None

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> torch.Tensor | None:
        if not self._in_pass:
            self._in_pass, self._last[True] = True, None
            if not self._model.in_backward:  # a plain loss.backward(): autograd itself reports its end
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if unit is not self.root and not self._in_units:
            self._in_units = True
            if self.sends_ahead and not self._action.announced:
                for function in self.before_units:
                    function(self.root)
        if not unit.in_backward:
            self._called(unit, True)
        self.gather(unit)
        if not unit.in_backward:
            unit.in_backward = True
            self._fetch_following(unit, True)
        return None

    def _after_backward(self, unit: Unit, _: Sequence[torch.Tensor | None]) -> None:
        unit.forwards -= 1
        if unit.forwards > 0:  # a block that is called several times, or another micro-batch of a pipeline
            if self._reshard and self._model.runs_backward:
                unit.in_backward = False
                unit.release()
            return
        unit.in_backward = False
        if self._reshard or self._model.synchronises:
            unit.release()  # first: gradients are received into as much memory
        if self._completes_early:
            for shard, complete in unit.shards:
                complete(shard)

    @property
    def _completes_early(self) -> bool:
        """Whether gradients of a unit are reduced when its backward pass ends."""
        return not self._model.defers_gradients

    @property
    def sends_ahead(self) -> bool:
        """Whether :attr:`before_units` are called: a compiler orders a graph itself, and a pipeline has many passes."""
        return self._completes_early and not self._model.runs_backward and not self._run.backend.is_lazy

    def end_backward(self) -> None:
        """A backward pass is over: frees what it has not freed. Without resharding, parameters are kept for the next
        micro-batch."""
        self._in_pass, self._in_units = False, False
        for unit in self.units:
            unit.end_backward()
            if self._reshard or self._model.synchronises:
                unit.release()

    def release(self) -> None:
        """Frees all that was gathered."""
        for unit in self.units:
            unit.release()

    # ---- gathering ---------------------------------------------------------------------------------------------------
    def gather(self, unit: Unit) -> None:
        """Gathers a unit, unless it is. Collective, also with ranks that have run out of data."""
        if self._action.announced and unit.is_idle:
            self._action(unit.name)
        unit.gather()

    def _called(self, unit: Unit, backward: bool) -> None:
        """Compares what is called with other ranks."""
        name = f"{type(self._model.inner).__name__}{unit.name and '.'}{unit.name}"
        chain = (id(self), backward) if self._model.runs_backward else None  # a schedule orders the passes of stages
        self._order.call(f"the {'backward' if backward else 'forward'} pass of {name!r}{self._of_model}", chain)

    def _gather_along(self, name: str) -> None:
        """A rank with data gathers this unit."""
        unit = next(unit for unit in self.units if unit.name == name)
        unit.release()
        unit.gather()
        unit.release()

    def _fetch_following(self, unit: Unit, backward: bool) -> None:
        """Starts to gather the units that followed this one the last time."""
        before, self._last[backward] = self._last[backward], unit
        if self._action.announced:  # ranks that have run out of data see no order
            return
        if before is not None and (not self._model.runs_backward or (unit.index > before.index) != backward):
            before.following[backward] = unit
        for _ in range(self._prefetch):
            following = unit.following.get(backward)
            if following is None:
                return
            following.start_gather()
            unit = following

    # ---- what would see NaN ------------------------------------------------------------------------------------------
    def _refuse_state_dict(self, unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars and any(shard.is_sharded and not shard.is_held for shard, _ in unit.shards):
            self._refuse(
                "state_dict()",
                "use `accelerator.get_state_dict(model)`, `save_model` or `save_state`, or call it inside `with "
                "accelerator.full_weights(model):`",
            )

    def _refuse_load(self, unit: Unit, *_: Any) -> None:
        if any(shard.is_sharded and not shard.is_held for shard, _ in unit.shards):
            self._refuse(
                "load_state_dict()",
                "call it inside `with accelerator.full_weights(model):`, or use `accelerator.load_state`",
            )

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise UsageError(
            f"{what} is not possible on a model whose parameters are sharded.",
            where=f"plugin {self._plugin!r}",
            why="each rank keeps some elements of every parameter, and gathers the others only for the forward and "
            "backward pass",
            fix=fix,
        )

    def is_of(self, model: PreparedModel) -> bool:
        """Whether these are the units of ``model``."""
        return self._model is model

    def explain(self) -> str:
        """What is gathered together, and how large it is."""
        sizes: dict[int, int] = {unit.index: 0 for unit in self.units}
        for record in self._model.parameters:
            unit = self.unit_of(record)
            if record.current is not None and unit is not None and not self.keeps(record):
                sizes[unit.index] += record.current.numel()
        blocks = [sizes[unit.index] for unit in self.units[1:]]
        rest = f"{sizes[0]:,} in no block" if blocks else f"{sizes[0]:,}"
        inside = f"{len(blocks)} units of up to {max(blocks):,}, and " if blocks else ""
        return f"elements of parameters, gathered together on this rank: {inside}{rest}"

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        for module in self._marked:
            for mark in _MARKS:
                vars(module).pop(mark, None)
        self._handles, self._marked = [], []


def _computed(value: Any) -> Any:
    """An argument, with a view of each leaf that has a gradient, such as what a pipeline stage receives. Gradients of
    parameters arrive before that of the result of an operation, but those that are computed together with the gradient
    of a leaf may arrive after it."""
    if type(value) is tuple:
        return tuple(map(_computed, value))
    is_leaf = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    return value.view_as(value) if is_leaf else value


def in_backward() -> bool:
    """Whether this is called from a backward pass, which recomputes activations."""
    return torch._C._current_graph_task_id() != -1


@torch.compiler.disable
def _refuse_to_be_compiled() -> NoReturn:
    raise UsageError(
        "A model whose parameters are sharded cannot be compiled.",
        where="plugin 'fully_sharded', torch.compile",
        why="parameters are gathered by hooks on its modules, which are not part of a graph",
        fix="train without compiling, or with ZeRO-1 (Zero1Plugin)",
    )


class Hook:
    """A hook of one unit. A copy of the model has no values of its parameters, so there is none.

    Attributes:
        handle: removed by the first call, if it is set. A hook for gradients of several tensors holds the nodes of
            autograd that hold it, and in each garbage collection only those of one unit are found to be garbage.
    """

    def __init__(self, function: Callable[..., Any], unit: Unit) -> None:
        self._function, self._unit = function, unit
        self.handle: Any = None

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_to_be_compiled()
        if self.handle is not None:
            self.handle.remove()
        return self._function(self._unit, *args)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A model whose parameters are sharded cannot be copied or pickled.",
            where="plugin 'fully_sharded'",
            why="each rank keeps some elements of every parameter, and gathers the others only for the forward and "
            "backward pass",
            fix="copy the model before `prepare`, or save it with `accelerator.save_model`",
        )


# ---- which modules ---------------------------------------------------------------------------------------------------
def find_units(model: nn.Module, wanted: str | tuple[str, ...], plugin: str) -> list[tuple[str, nn.Module]]:
    """FQN and module of the units beside the model itself, in the model's order; none inside another.

    Raises:
        ConfigurationError: if a pattern matches no module.
        UnsupportedModelError: if the model's blocks are not known.
    """
    where = f"plugin {plugin!r}, modules"
    if wanted == BLOCKS:
        return _outermost(_blocks(model, where))
    patterns = (wanted,) if isinstance(wanted, str) else wanted
    known = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(matches_fqn(pattern, name) for name in known):
            kinds = {re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) for name in known}
            raise ConfigurationError(
                f"{type(model).__name__} has no module {pattern!r}.",
                where=where,
                fix=did_you_mean(pattern, {*kinds, BLOCKS}),
            )
    return _outermost([(n, m) for n, m in known.items() if any(matches_fqn(pattern, n) for pattern in patterns)])


def _blocks(model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    """The layers that transformers can checkpoint, else the blocks of the family's plan."""
    layers = sys.modules.get("transformers.modeling_layers")
    kind = getattr(layers, "GradientCheckpointingLayer", ())
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, kind)]
    if found:
        return found
    try:
        return Architecture.of(model).blocks
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"The repeated blocks of {type(model).__name__} are not known.",
            where=where,
            why="it has no GradientCheckpointingLayer of transformers, and its family has no plan",
            fix="name them by a pattern: FullyShardedPlugin(modules='layers.*')",
        ) from error


def _outermost(found: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leaves out modules inside another one of the list."""
    found = list(found)
    names = {name for name, _ in found}

    def is_inside(name: str) -> bool:
        return any(name[: dot.start()] in names for dot in re.finditer(r"\.", name))

    return [(name, module) for name, module in found if not is_inside(name)]

# SPDX-License-Identifier: Apache-2.0
"""When the parameters of a model are gathered and freed: hooks on its modules.

A unit is a module whose parameters are gathered together: a repeated block, and the model itself with what is in no
block. The method is that of "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (Zhao et al., VLDB
2023).

Every rank gathers and reduces in the same order, whatever gradients it has: a unit is gathered where its forward or
backward pass begins, and its gradients are reduced where its backward pass ends. So ranks run the same modules in the
same order (:mod:`~neuron_accel.strategies.fully_sharded.order` compares it).

On a device that compiles a whole step into one graph, an operation may run as soon as its operands exist. Shards of
parameters exist from the beginning of the graph, so a compiler could gather all of them first, and hold the full model.
Every gather is therefore behind an optimization barrier (:meth:`Backend.fence`) together with what it must wait for: in
the forward pass the input of the unit that is computed meanwhile, in the backward pass the gradient of its output. The
barrier also keeps the compiler from merging the two gathers of one unit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from neuron_accel.contract import (
    Architecture,
    ConfigurationError,
    Unit,
    UnitsOfModel,
    UnsupportedModelError,
    UsageError,
    did_you_mean,
    matches_fqn,
)
from neuron_accel.strategies.fully_sharded.saved_weights import SavedWeights

if TYPE_CHECKING:
    from neuron_accel.contract import GatheredShard, ParameterRecord, PreparedModel, Run
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
        self._saved = SavedWeights(run, self.unit_of, self.gather) if run.backend.is_lazy else None
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
        if self._saved is not None:
            keep(module.register_forward_hook(Hook(self._saved.leave, unit), always_call=True))
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
        args, kwargs = self._gather_for_inputs(unit, args, kwargs, ahead=not inside)
        if not inside:  # else it is recomputed, and its backward pass follows
            args, kwargs = self._watch_inputs(unit, args, kwargs)
        if self._saved is not None:
            self._saved.enter(unit)
        return args, kwargs

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
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

    def _after_forward(self, unit: Unit, _: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        self._release_after_forward(unit, output)
        if self._saved is None:
            return None
        kept = [shard for shard, _ in unit.shards if shard.near_part is not None]
        if kept:
            return self._behind_parts(kept, output)
        if unit is self.root and not torch.is_grad_enabled():
            self.release()  # also what was gathered ahead, and not called
        return None

    def _release_after_forward(self, unit: Unit, output: Any) -> None:
        if self._saved is None:
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
        if self._handed_on is None or self._saved is not None:  # a compiler orders a graph itself
            return
        unit, handed = self._handed_on
        for tensor, handle in handed:
            if any(tensor is given for given in inputs):
                handle.remove()
                tensor.register_hook(Hook(self._before_backward, unit))
        self._handed_on = None

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._in_pass:
            self._in_pass, self._last[True] = True, None
            if not self._model.in_backward:  # a plain loss.backward(): autograd itself reports its end
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if unit is not self.root and not self._in_units:
            self._in_units = True
            if self.sends_ahead and not self._action.announced:
                for function in self.before_units:
                    function(self.root)
        begins, unit.in_backward = not unit.in_backward, True
        if begins:
            self._called(unit, True)
        after = [] if self._saved is None else [gradient.detach()]
        behind = self._gather_for(unit, after, backward=True, ahead=begins)
        return behind[0] if behind else None

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
        late = self._saved is not None and self._model.runs_backward  # stages run their passes at other times
        return not self._model.defers_gradients and not late

    @property
    def sends_ahead(self) -> bool:
        """Whether :attr:`before_units` are called: a compiler orders a graph itself, and a pipeline has many passes."""
        return self._completes_early and not self._model.runs_backward and self._saved is None

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

    def _gather_for(
        self, unit: Unit, after: Sequence[torch.Tensor], *, backward: bool, ahead: bool
    ) -> list[torch.Tensor]:
        """Gathers a unit for a pass, and, if ``ahead``, starts to gather the following ones; in a graph once the
        tensors ``after`` exist.

        Returns:
            These tensors behind the barrier; none if there is no barrier.
        """
        if self._saved is None or self._action.announced:
            self.gather(unit)
            if self._saved is None and ahead:
                self._fetch_following(unit, backward)
            return []
        wanted = [unit]
        if unit is self.root and self._model.runs_backward and not self._reshard:
            wanted = self.units  # in a graph of their own, so that those of all micro-batches are the same
        elif self._prefetch and ahead:
            wanted += self._following(unit, backward)
        idle = [shard for each in wanted for shard in each.idle]
        if not idle:
            return []
        with torch.no_grad():
            own = [shard.own() for shard in idle]
            behind = self._run.backend.fence([*own, *after]) if after else own
        for shard, mine in zip(idle, behind, strict=False):
            shard.start_gather(mine)
        unit.gather()
        return behind[len(idle) :]

    def _gather_for_inputs(self, unit: Unit, args: Any, kwargs: Any, *, ahead: bool) -> tuple[Any, Any]:
        """Gathers a unit for its forward pass. Returns its arguments, in a graph behind the same barrier."""
        leaves, structure = ([], None) if self._saved is None else tree_flatten((args, kwargs))
        place = _activation(leaves)
        behind = self._gather_for(unit, [] if place is None else [leaves[place]], backward=False, ahead=ahead)
        if structure is None or place is None or not behind:
            return args, kwargs
        leaves[place] = _Identity.apply(leaves[place], behind[0]) if torch.is_grad_enabled() else behind[0]
        return tree_unflatten(leaves, structure)

    def _behind_parts(self, kept: Sequence[GatheredShard], output: Any) -> Any:
        """The output of a unit, once ``kept`` have their parts for the backward pass: else the compiler could take them
        out of what was gathered when they are used, and hold that until then."""
        leaves, structure = tree_flatten(output)
        place = _activation(leaves)
        if place is None:
            return output
        with torch.no_grad():
            parts = [shard.near_part for shard in kept if shard.near_part is not None]
            *behind, last = self._run.backend.fence([*parts, leaves[place].detach()])
        for shard, part in zip(kept, behind, strict=True):
            shard.near_part = part
        leaves[place] = _Identity.apply(leaves[place], last)
        return tree_unflatten(leaves, structure)

    def _following(self, unit: Unit, backward: bool) -> list[Unit]:
        """The units that are used next in the order of the model: with that of the last pass, the first step would be a
        graph of its own. The model's own parameters are gathered first, and kept."""
        ahead = self.units[:0:-1] if backward else self.units[1:]
        begin = 0 if unit is self.root else ahead.index(unit) + 1
        return ahead[begin : begin + self._prefetch]

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


class _Identity(torch.autograd.Function):
    """``behind``, which has the values of ``tensor``, with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        return behind.view_as(behind)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _activation(leaves: Sequence[Any]) -> int | None:
    """Position of what a unit computes with: a tensor with a gradient, else one of floating-point numbers."""
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return next((i for i in floats if leaves[i].requires_grad), next(iter(floats), None))


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

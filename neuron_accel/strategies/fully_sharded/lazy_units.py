# SPDX-License-Identifier: Apache-2.0
"""The units of a model on a device that compiles a whole step into one graph.

A compiler may run an operation as soon as its operands exist. Shards of parameters exist from the beginning of the
graph, so it could gather all of them first, and hold the full model. Every gather is therefore behind an optimization
barrier (:meth:`Backend.fence`) together with what it must wait for: in the forward pass the input of the unit that is
computed meanwhile, in the backward pass the gradient of its output. The barrier also keeps the compiler from merging
the two gathers of one unit.

Autograd must not save gathered weights either. While a unit's forward pass runs, saved tensors that are a weight, a
transpose of it or a cast of it are replaced by a note of what they are (:class:`SavedWeight`), which reads the values
that are gathered for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from neuron_accel.strategies.fully_sharded.units import Hook, Units, in_backward

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.contract.sharded import GatheredShard, Unit


@dataclass(frozen=True)
class SavedWeight:
    """A tensor that autograd saved: a weight, after some operations.

    Args:
        unit: the unit in which it is gathered.
        shard: its shard.
        index: of the parameter in the shard.
        steps: the operations, each a method of a tensor and its arguments.
        view: a view of a weight that does not train, of which autograd has no operations; None for all others.
    """

    unit: Unit
    shard: GatheredShard
    index: int
    steps: tuple[tuple[str, tuple[Any, ...]], ...]
    view: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """Its value. The unit is gathered."""
        value = self.shard.values[self.index] if self.shard.is_sharded else self.shard.parameters[self.index].detach()
        for method, arguments in self.steps:
            value = getattr(value, method)(*arguments)
        return value if self.view is None else self.view._view_func(value)  # type: ignore[attr-defined]


class LazyUnits(Units):
    """See :class:`Units`; each gather waits for the computation before it."""

    def _watch(self, unit: Unit) -> None:
        super()._watch(unit)
        leave = Hook(self._leave, unit)
        self._handles.append(unit.module.register_forward_hook(leave, always_call=True))  # also after an error

    # ---- the forward pass --------------------------------------------------------------------------------------------
    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        place = _activation(leaves)
        behind = self._gather_behind(unit, [] if place is None else [leaves[place]], backward=False)
        if place is not None and behind:
            leaves[place] = _Identity.apply(leaves[place], behind[0]) if torch.is_grad_enabled() else behind[0]
        args, kwargs = tree_unflatten(leaves, structure)
        changed = super()._before_forward(unit, module, args, kwargs)
        self._enter(unit)
        return changed or (args, kwargs)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        super()._after_forward(unit, module, args, output)
        shards = [shard for shard, _ in unit.shards]
        kept = [shard for shard in shards if shard.near_part is not None]
        if kept and not in_backward():
            return self._behind_parts(kept, output)
        if unit is self.root and not torch.is_grad_enabled():
            self.release()  # also what was gathered ahead, and not called
        return None

    def _behind_parts(self, kept: Sequence[GatheredShard], output: Any) -> Any:
        """The output of a unit, once ``kept`` have their parts for the backward pass: else the compiler could take them
        out of what was gathered when they are used, and hold that until then."""
        leaves, structure = tree_flatten(output)
        place = _activation(leaves)
        if place is None:
            return output
        with torch.no_grad():
            parts = [cast(torch.Tensor, shard.near_part) for shard in kept]
            *behind, last = self._run.backend.fence([*parts, leaves[place].detach()])
        for shard, part in zip(kept, behind, strict=True):
            shard.near_part = part
        leaves[place] = _Identity.apply(leaves[place], last)
        return tree_unflatten(leaves, structure)

    # ---- the backward pass -------------------------------------------------------------------------------------------
    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor:
        behind = self._gather_behind(unit, [gradient.detach()], backward=True)
        super()._before_backward(unit, gradient)
        return behind[0] if behind else gradient

    @property
    def _completes_early(self) -> bool:
        return super()._completes_early and not self._model.runs_backward  # stages run their passes at other times

    # ---- gathering ---------------------------------------------------------------------------------------------------
    def _gather_behind(self, unit: Unit, after: Sequence[torch.Tensor], *, backward: bool) -> list[torch.Tensor]:
        """Gathers a unit, and starts to gather the following one, once the tensors ``after`` exist.

        Returns:
            These tensors behind the barrier; none if there was nothing to gather.
        """
        if self._action.announced:
            self.gather(unit)
            return []
        wanted = [unit]
        if unit is self.root and self._model.runs_backward and not self._reshard:
            wanted = self.units  # in a graph of their own, so that those of all micro-batches are the same
        elif self._prefetch and (backward or not in_backward()):
            wanted += self._following(unit, backward)
        idle = [cast("GatheredShard", shard) for each in wanted for shard in each.idle]
        if not idle:
            return []
        with torch.no_grad():
            own = [shard.own() for shard in idle]
            behind = self._run.backend.fence([*own, *after]) if after else own
        for shard, mine in zip(idle, behind, strict=False):
            shard.start_gather(mine)
        unit.gather()
        return behind[len(idle) :]

    def _following(self, unit: Unit, backward: bool) -> list[Unit]:
        """The units that are used next in the order of the model: with that of the last pass, the first step would be a
        graph of its own. The model's own parameters are gathered first, and kept."""
        ahead = self.units[:0:-1] if backward else self.units[1:]
        begin = 0 if unit is self.root else ahead.index(unit) + 1
        return ahead[begin : begin + self._prefetch]

    def _fetch_following(self, unit: Unit, backward: bool) -> None:
        """Was started behind the same barrier."""

    # ---- what autograd saves -----------------------------------------------------------------------------------------
    def _enter(self, unit: Unit) -> None:
        unit.saving = None
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            # Hooks that are there are those of the model's own forward pass, or of activation checkpointing, which
            # saves nothing.
            unit.saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            unit.saving.__enter__()

    def _leave(self, unit: Unit, *_: Any) -> None:
        saving, unit.saving = unit.saving, None
        if saving is not None:
            saving.__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        if not tensor.requires_grad:
            origin = tensor._base if tensor._is_view() else tensor
            place = None if origin is None or origin.requires_grad else self._place_of(origin)
            return tensor if place is None else SavedWeight(*place, (), None if origin is tensor else tensor)
        steps: list[tuple[str, tuple[Any, ...]]] = []
        origin = tensor if tensor.is_leaf else origin_of(tensor, steps)
        place = None if origin is None else self._place_of(origin)
        return tensor if place is None else SavedWeight(*place, tuple(reversed(steps)))

    def _place_of(self, tensor: torch.Tensor) -> tuple[Unit, GatheredShard, int] | None:
        record = self._run.find_parameter(tensor)
        unit = None if record is None else self.unit_of(record)
        if unit is None:
            return None
        for shard, _ in unit.shards:
            for index, parameter in enumerate(shard.parameters):
                if parameter is tensor:
                    return unit, shard, index
        return None

    def _unpack(self, saved: torch.Tensor | SavedWeight) -> torch.Tensor:
        """What autograd saved, in the backward pass."""
        if not isinstance(saved, SavedWeight):
            return saved
        self.gather(saved.unit)
        with torch.no_grad():
            return saved.value()


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


def origin_of(tensor: torch.Tensor, steps: list[tuple[str, tuple[Any, ...]]]) -> torch.Tensor | None:
    """The leaf from which ``tensor`` was computed by transposes and casts alone; None if by anything else.

    Args:
        steps: gets these operations, the last one first.
    """
    node: Any = tensor.grad_fn
    while node is not None:
        name = type(node).__name__
        if name == "AccumulateGrad":
            return node.variable
        if name == "TBackward0":
            steps.append(("t", ()))
        elif name == "TransposeBackward0":
            steps.append(("transpose", (_signed(node._saved_dim0), _signed(node._saved_dim1))))
        elif name == "PermuteBackward0":
            steps.append(("permute", (tuple(map(_signed, node._saved_dims)),)))
        elif name == "ToCopyBackward0":
            steps.append(("to", (tensor.dtype,)))
        else:
            return None
        node = node.next_functions[0][0]
    return None


def _signed(dim: int) -> int:
    """A dim as it was given: autograd shows negative ones as unsigned numbers."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim

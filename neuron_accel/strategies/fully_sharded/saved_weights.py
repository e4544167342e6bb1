# SPDX-License-Identifier: Apache-2.0
"""What autograd saves of gathered weights on a device that compiles a whole step into one graph.

A value is in memory there as long as something reads it. Therefore autograd must not save gathered weights. While a
unit's forward pass runs, saved tensors that are a weight, a transpose of it or a cast of it are replaced by a note of
what they are (:class:`SavedWeight`), which reads the values that are gathered for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import GatheredShard, ParameterRecord, Run, Unit


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


class SavedWeights:
    """Replaces weights that autograd saves in the forward pass of a unit.

    Args:
        run: the run.
        unit_of: returns the unit of a parameter; None if it has none.
        gather: gathers a unit.
    """

    def __init__(
        self, run: Run, unit_of: Callable[[ParameterRecord], Unit | None], gather: Callable[[Unit], None]
    ) -> None:
        self._run, self._unit_of, self._gather = run, unit_of, gather

    def enter(self, unit: Unit) -> None:
        """The forward pass of a unit begins."""
        unit.saving = None
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            # Hooks that are there are those of the model's own forward pass, or of activation checkpointing, which
            # saves nothing.
            unit.saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            unit.saving.__enter__()

    def leave(self, unit: Unit, *_: Any) -> None:
        """It has ended, or raised an error."""
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
        unit = None if record is None else self._unit_of(record)
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
        self._gather(saved.unit)
        with torch.no_grad():
            return saved.value()


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

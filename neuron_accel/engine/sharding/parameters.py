# SPDX-License-Identifier: Apache-2.0
"""Parameters by their name in the original model.

A parameter is identified by its FQN in the original model only. A :class:`ParameterMap` is created before any
transformation and updated after each. It still knows the parameters that were replaced, as long as something else, such
as an optimizer, holds them, which can then be given the new ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import LayoutError, ParameterError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.engine.plan.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """What a rank keeps of a parameter whose values a strategy shards over further axes than those of its layout, and
    gathers only where the model uses them. Between uses the parameter itself has its shape and reads as NaN; on a lazy
    device reading it is an error.

    Args:
        read: returns the elements that this rank keeps, see :attr:`tensor`.
        start, stop: their range in the parameter's shard by its layout, flattened.
        axes: axes along which ranks keep the other elements.
        gather: returns the values of the full range, in the parameter's local shape, to be read until another parameter
            is gathered. Collective over ``axes``.
        changed: drops what was gathered; called by what writes ``tensor``, and after parameters were read.
        hold: with True, gives the parameter its values, which may be read and written; with False, takes them. None if
            the strategy cannot. Collective over ``axes``.
    """

    read: Callable[[], torch.Tensor]
    start: int
    stop: int
    axes: tuple[str, ...]
    gather: Callable[[], torch.Tensor]
    changed: Callable[[], None]
    hold: Callable[[bool], None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: elements {self.start} to {self.stop}, others along {self.axes}>"

    @property
    def tensor(self) -> torch.Tensor:
        """The elements that this rank keeps, ``[stop - start]``, in the parameter's dtype; none of a parameter that
        other ranks keep. They may be written to. On a lazy device a copy on the CPU, whose changes are taken over when
        the parameter is used the next time; collective there, since the device is read."""
        return self.read()


@dataclass(eq=False)  # another model has parameters of the same names
class ParameterRecord:
    """One parameter of the original model; tied weights are one parameter.

    Args:
        fqn: its first name.
        aliases: further names that are tied to it.
        layout: its layout over the mesh.
        current: the object that trains now; None if this rank holds no shard of it.
        partial_axes: axes over which the gradient that autograd computes is a partial sum. The owner of gradient
            reduction sums it over them and over :meth:`reduction_axes`, and divides it by the number of ranks along all
            of the mesh's gradient axes.
        rule: the rule of a plan that shards it, for ``explain``; empty if there is none.
        holders: for axes along which not every rank holds the parameter, the indices of those that do, ascending; all
            of them hold the same values.
        added: whether a strategy added it to the model; earlier weights do not contain it.
        reduce_dtype: dtype in which the owner of gradient reduction sends and sums its gradient; None: that of the
            gradient, or what an option of the owner says. A plugin sets it in ``transform_model``, before phase
            ``GRADIENTS``.
        weights: this rank's elements, if the values are sharded over further axes and only gathered for use; None:
            ``current`` has its values all the time.
        is_unread: whether ``current`` has no values, and no memory for them, because they were not read yet
            (:meth:`PreparedModel.read_weights`).
    """

    fqn: str
    layout: Layout
    current: nn.Parameter | None
    aliases: tuple[str, ...] = ()
    partial_axes: tuple[str, ...] = ()
    rule: str = ""
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    added: bool = False
    reduce_dtype: torch.dtype | None = None
    weights: WeightShard | None = None
    is_unread: bool = False

    def __repr__(self) -> str:
        held = "not on this rank" if self.current is None else f"{tuple(self.current.shape)} on this rank"
        cuts = "; ".join(f"Shard({cut.dim}) over {cut.axis} {cut.degree}" for cut in self.layout.cuts)
        full = f"{self.layout.shape} {self.layout.dtype}"
        return f"<{type(self).__name__} {self.fqn!r}: {full}, {cuts or 'unsharded'}, {held}>"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fqn, *self.aliases)

    @property
    def trains(self) -> bool:
        """Whether this rank holds a shard of it that currently requires a gradient."""
        return self.current is not None and self.current.requires_grad

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold different shards of the parameter, or none."""
        return (*self.layout.axes, *self.holders)

    @property
    def replicas(self) -> int:
        """Number of ranks along :attr:`axes` that hold each element."""
        return self.layout.replicas * math.prod(len(indices) for indices in self.holders.values())

    def reduction_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The gradient axes whose ranks hold the same shard of this parameter, over which its gradient is summed.

        Ranks along a sample axis over which the parameter is sharded (for example experts over data-parallel ranks)
        hold different elements, which are not summed. The computation itself collects for each of them the
        contributions of the others' samples.
        """
        return tuple(axis for axis in mesh.gradient_axes if axis not in self.layout.axes)

    @property
    def completed_late(self) -> bool:
        """Whether the gradient is complete only after the full backward pass, because the strategy that lets several
        ranks along an axis hold the parameter sums their gradients then."""
        return any(len(indices) > 1 for indices in self.holders.values())


class ParameterMap:
    """The parameters of one model, by FQN.

    Args:
        model: the model as the user created it, or its parameters with their names.
        mesh: the mesh, whose axes layouts must use; None to not check them.
    """

    def __init__(self, model: nn.Module | Iterable[tuple[str, nn.Parameter]], mesh: Mesh | None = None) -> None:
        self._mesh, self._author = mesh, ""
        self._records: dict[str, ParameterRecord] = {}
        self._by_name: dict[str, ParameterRecord] = {}
        self._by_object: dict[nn.Parameter, ParameterRecord] = {}
        self._replaced: MutableMapping[nn.Parameter, ParameterRecord] = WeakTensorKeyDictionary()
        named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model
        for name, parameter in named:
            self._add(name, parameter)

    def _add(self, name: str, parameter: nn.Parameter, *, added: bool = False) -> None:
        record = self.find(parameter)
        if record is None:
            record = ParameterRecord(fqn=name, layout=Layout.of(parameter), current=parameter, added=added)
            self._records[name] = self._by_object[parameter] = record
        else:
            record.aliases += (name,)
        self._by_name[name] = record

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: not the replaced parameters, which the optimizers of the original hold."""
        return {name: value for name, value in vars(self).items() if name != "_replaced"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _replaced=WeakTensorKeyDictionary())

    def __repr__(self) -> str:
        sharded = sum(bool(record.layout.cuts) for record in self)
        return f"<{type(self).__name__}: {len(self)} parameters, {sharded} of them sharded>"

    def __iter__(self) -> Iterator[ParameterRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> ParameterRecord:
        """Returns the record of a parameter, given any of its names.

        Raises:
            ParameterError: if there is no parameter of that name.
        """
        record = self._by_name.get(name)
        if record is None:
            raise ParameterError(
                f"The model has no parameter {name!r}.",
                where=self._author or None,
                why="a parameter has its name in the original model, also after transformations",
                fix=did_you_mean(name, self._by_name),
            )
        return record

    @contextmanager
    def changed_by(self, plugin: str) -> Iterator[None]:
        """Context in which errors name ``plugin``."""
        self._author = f"plugin {plugin!r}"
        try:
            yield
        finally:
            self._author = ""

    def _check_axes(self, axes: Iterable[str], name: str) -> None:
        known = None if self._mesh is None else self._mesh.axis_names
        for axis in axes:
            if known is not None and axis not in known:
                raise LayoutError(
                    f"The mesh has no axis {axis!r}, over which {name!r} would be sharded or summed.",
                    where=self._author or None,
                    fix=did_you_mean(axis, known),
                )

    def find(self, parameter: torch.Tensor) -> ParameterRecord | None:
        """Returns the record of a parameter object, original or transformed; None if it is not in this model."""
        record = self._by_object.get(parameter)  # type: ignore[call-overload]  # keys hash by identity
        return self._replaced.get(parameter) if record is None else record  # type: ignore[call-overload]

    def set_layout(self, name: str, layout: Layout) -> None:
        """Sets the layout of a parameter.

        Raises:
            ParameterError: if there is no parameter of that name.
            LayoutError: if the mesh has no such axis.
        """
        record = self[name]
        self._check_axes(layout.axes, name)
        record.layout = layout

    def add_partial_axis(self, name: str, axis: str) -> None:
        """Declares that the gradient autograd computes for a parameter is a partial sum over ``axis``; the owner of the
        reduction completes it.

        Raises:
            ParameterError: if there is no parameter of that name.
            LayoutError: if the mesh has no such axis.
        """
        record = self[name]
        self._check_axes([axis], name)
        if axis not in record.partial_axes:
            record.partial_axes += (axis,)

    def set_holders(self, name: str, axis: str, indices: Iterable[int]) -> None:
        """Sets which ranks along ``axis`` hold a parameter. The caller sums the gradients of several holders.

        Raises:
            ParameterError: if there is no parameter of that name.
            LayoutError: if the mesh has no such axis, or its ranks see different samples.
        """
        record = self[name]
        self._check_axes([axis], name)
        if self._mesh is not None and axis in self._mesh.gradient_axes:
            raise LayoutError(
                f"{name!r} cannot be held by some ranks along axis {axis!r} only.",
                where=self._author or None,
                why="these ranks see different samples and reduce gradients together, so each of them has a shard of "
                "every parameter",
                fix="stack the parameters that different ranks hold (for example experts) into one, and shard that: "
                f"`set_layout` with a `Cut` along {axis!r}",
            )
        record.holders[axis] = tuple(sorted(indices))

    def follow(self, model: nn.Module, absent: Iterable[str] = ()) -> None:
        """Updates the map after a transformation of the model.

        Args:
            model: the transformed model.
            absent: FQNs of which this rank holds no shard any more.

        Raises:
            ParameterError: if a parameter vanished, or its shape is not that of its layout.
        """
        absent, moved = set(absent), set[str]()
        found = dict(model.named_parameters(remove_duplicate=False))
        for record in self:
            present = [name for name in record.names if name in found]
            if not present:
                if record.current is not None and not absent.intersection(record.names):
                    raise ParameterError(
                        f"Parameter {record.fqn!r} is no longer in the model.",
                        why="a strategy that transforms a model keeps the names of its parameters",
                    )
                self._set_current(record, None)
                moved.add(record.fqn)
                continue
            parameter = found[present[0]]
            for name in present[1:]:
                if found[name] is not parameter:
                    raise ParameterError(
                        f"{name!r} was tied to {record.fqn!r} and is not any more.",
                        why="a tied weight is one parameter; two copies would diverge",
                    )
            if tuple(parameter.shape) != record.layout.local_shape:
                raise ParameterError(
                    f"Parameter {record.fqn!r} has shape {tuple(parameter.shape)}, but its layout says "
                    f"{record.layout.local_shape}.",
                    why="a plugin that changes a parameter's shape sets its layout",
                )
            if record.current is not None and record.current is not parameter:
                own = {k: v for k, v in vars(record.current).items() if not isinstance(v, torch.Tensor)}
                vars(parameter).update({k: v for k, v in own.items() if k not in vars(parameter)})
            self._set_current(record, parameter)
        for parameter, record in self._replaced.items():
            if record.fqn in moved:  # an optimizer holds it, but its memory is no longer needed
                parameter.data = parameter.data.new_empty(0)
        for name, parameter in found.items():
            if name not in self._by_name:
                self._add(name, parameter, added=True)

    def _set_current(self, record: ParameterRecord, parameter: nn.Parameter | None) -> None:
        if parameter is record.current:
            return
        if record.current is not None:
            del self._by_object[record.current]
            self._replaced[record.current] = record
        if parameter is not None:
            self._by_object[parameter] = record
        record.current = parameter

    def add(self, name: str, parameter: nn.Parameter) -> ParameterRecord:
        """Adds a further parameter of the original model, or a further name of a known one."""
        self._add(name, parameter)
        return self[name]

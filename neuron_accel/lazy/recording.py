# SPDX-License-Identifier: Apache-2.0
"""Records operations on tensors without memory, so that they can be replayed later.

Inside a :class:`Recorder` tensors are created on the meta device, and all operations on them are recorded: the
initialisation of a model that is built from its configuration, and the slices of files that a loaded model consists of.
Operations on other tensors are executed as usual.

The method is that of torchdistx (https://pytorch.org/torchdistx, "Deferred Module Initialization").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.errors import UsageError
from neuron_accel.lazy.mapped import MappedTensor


@dataclass(frozen=True)
class View:
    """A tensor as a view of a storage.

    Args:
        memory: number of the storage in the recording.
        dtype, size, stride, offset: as of a tensor; stride and offset in elements.
    """

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Call:
    """A recorded operation.

    Args:
        function: the operator; None if ``source`` is read.
        args, kwargs: its arguments, with a :class:`View` in place of each tensor without memory.
        outputs: the returned tensors that have new storage.
        written: numbers of the storages that it changes, other than those of its outputs.
        read: numbers of the storages that it reads.
        draws: whether it draws random numbers.
        state: index, in the recording, of the generator's state before the call; None if it is the state after the
            previous call.
        source: the tensor in a file that is read.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View, ...]
    written: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()
    draws: bool = False
    state: int | None = None
    source: MappedTensor | None = None


@dataclass(frozen=True)
class Signature:
    """What the schema of an operator says.

    Args:
        chooses_device: whether it has an argument ``device``.
        written: position and name of each argument that it changes in place.
    """

    chooses_device: bool
    written: tuple[tuple[int, str], ...]


@dataclass
class Recording:
    """Operations in the order in which they were called.

    Args:
        degrees: number of ranks along the axes of a kind that the model was built for; empty if it was not given.
    """

    degrees: dict[AxisKind, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    """States of the default generator, one for each call that did not start from the state after the previous call."""
    phantoms: set[int] = field(default_factory=set)
    """Storages of parameters that are on the meta device also without this context. No random numbers are drawn for
    them."""
    _memory: list[torch.UntypedStorage] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _signatures: dict[Any, Signature] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        return self  # a copied model is loaded from the same recording

    def size_of(self, memory: int) -> int:
        """Returns the size of a storage in bytes."""
        return self._memory[memory].nbytes()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns whether the storage of ``tensor`` belongs to this recording."""
        return tensor.is_meta and id(tensor.untyped_storage()) in self._numbers

    def view(self, tensor: torch.Tensor) -> View:
        """Returns ``tensor`` as a :class:`View`; adds its storage to the recording if needed."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:  # the storage is kept, so that its id is not reused
            number = self._numbers[id(storage)] = len(self._memory)
            self._memory.append(storage)
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def source_of(self, tensor: torch.Tensor) -> MappedTensor | None:
        """Returns the tensor in a file that ``tensor`` is read from without change, or None if there is none."""
        if not self.knows(tensor):
            return None
        view = self.view(tensor)
        return next((call.source for call in self.calls if call.source is not None and view in call.outputs), None)

    def add_source(self, source: MappedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Records a tensor that will be read from a file, and returns it."""
        result = torch.empty(source.shape, dtype=dtype, device="meta")
        self.calls.append(Call(None, (), {}, (self.view(result),), source=source))
        return result

    def signature(self, function: Any) -> Signature:
        """Returns what the schema of an operator says."""
        if function not in self._signatures:
            arguments = list(enumerate(function._schema.arguments))
            self._signatures[function] = Signature(
                any(argument.name == "device" for _, argument in arguments),
                tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
            )
        return self._signatures[function]

    def written(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensor arguments that an operator changes in place."""
        changed = self.signature(function).written
        return tensors_in([args[place] if place < len(args) else kwargs.get(name) for place, name in changed])

    def add_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        given: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor],
    ) -> None:
        """Records an operator that was called on meta tensors, of which ``given`` are its arguments, and ``changed``
        those that it changes in place."""
        outputs = [t for t in tensors_in([result]) if not self.knows(t)]
        written = [self.view(t).memory for t in changed]
        if not outputs and not written:
            return  # a view of a storage that is known
        read = frozenset(self.view(t).memory for t in given if t.is_meta)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        self.calls.append(
            Call(
                function,
                tuple(exchanged(a, self._without_tensor) for a in args),
                {name: exchanged(value, self._without_tensor) for name, value in kwargs.items()},
                tuple(self.view(t) for t in outputs),
                frozenset(written),
                read,
                draws,
                self._state() if draws else None,
            )
        )

    def add_initialisation(self, function: Callable[..., Any], tensor: torch.Tensor, options: dict[str, Any]) -> None:
        """Records a call ``function(tensor, **options)`` that initialises a tensor, as one operation."""
        view = self.view(tensor)
        memory = frozenset({view.memory})
        self.calls.append(Call(function, (view,), options, (), memory, memory, draws=True, state=self._state()))

    def _without_tensor(self, tensor: torch.Tensor) -> Any:
        return self.view(tensor) if tensor.is_meta else tensor.detach().clone()

    def _state(self) -> int | None:
        state = torch.get_rng_state()
        if self.states and torch.equal(self.states[-1], state):
            return None
        self.states.append(state)
        return len(self.states) - 1


class Recorder(TorchDispatchMode):
    """Creates tensors on the meta device, and records the operations on them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs.values()))
        chooses = self._recording.signature(func).chooses_device
        if given:
            recorded = any(t.is_meta for t in given)
        else:
            asked = kwargs.get("device")
            here = asked is None or asked.type == "cpu"
            recorded = chooses and (not _stays_as_it_is(func, args) if here else asked.type == "meta")
        if not recorded:
            return func(*args, **kwargs)
        written = self._recording.written(func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                raise UsageError(
                    f"{func} writes values of a tensor without memory into a tensor that has memory.",
                    where="lazy_load_for_parallelism",
                    why="inside the context, weights and tensors computed from them have no values yet",
                )
        options = {**kwargs, "device": torch.device("meta")} if chooses else kwargs
        if all(t.is_meta for t in given):
            result = func(*args, **options)
        else:
            result = func(*exchanged(args, _to_meta), **{n: exchanged(v, _to_meta) for n, v in options.items()})
        self._recording.add_call(func, args, kwargs, result, given, written)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which operations are executed without being recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors among ``values``, and in nested lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, ValuesView)):
            found += tensors_in(value)
    return found


def exchanged(value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """Returns nested lists and tuples with ``change`` applied to the values of type ``kind``."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(exchanged(item, change, kind) for item in value)
    return value


def _stays_as_it_is(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operator is executed although it creates a tensor: a tensor without elements needs no memory,
    and some models read the values of ``torch.linspace`` in their constructor."""
    nothing = bool(args) and isinstance(args[0], (list, tuple)) and 0 in args[0]
    return nothing or function._schema.name == "aten::linspace"


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta or tensor.dim() == 0 else tensor.to("meta")

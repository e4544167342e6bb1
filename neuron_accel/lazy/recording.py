"""What was done to tensors that have no memory, written down so that it can be done later.

Inside a :class:`Recorder` tensors are made on the meta device, and every operation on them is recorded: where a model
is built from its configuration, what initialises it; where it is loaded, which slice of which file goes where.
Operations on tensors with memory are carried out as ever.

The idea of recording an initialisation to run it later is that of torchdistx's deferred initialisation
(https://pytorch.org/torchdistx, "Deferred Module Initialization").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A tensor in terms of its memory.

    Args:
        memory: which memory, by its number in the recording.
        dtype, size, stride, offset: as of a tensor; stride and offset in elements.
    """

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Call:
    """An operation.

    Args:
        function: the operator; None for reading ``source``.
        args, kwargs: what it was called with; tensors without memory are :class:`View`.
        outputs: what it returned in new memory.
        written: the memory that it changes, besides that of its outputs.
        read: the memory that it reads.
        draws: whether it draws random numbers.
        state: number, in the recording, of the state in which the generator was before; None if it went on from the
            call before.
        source: what is read.
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


@dataclass
class Recording:
    """Calls in their order.

    Args:
        degrees: for how many ranks along all axes of a kind the model is meant; empty if nothing was said.
    """

    degrees: dict[AxisKind, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    """States of the default generator, each where it was not where the call before had left it."""
    phantoms: set[int] = field(default_factory=set)
    """Memory of parameters that would have had none without this context, either: nothing is drawn for them."""
    _memory: list[torch.UntypedStorage] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        return self  # a copied model is filled with the same

    def size_of(self, memory: int) -> int:
        """Bytes of a memory."""
        return self._memory[memory].nbytes()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in memory of this recording."""
        return tensor.device.type == "meta" and id(tensor.untyped_storage()) in self._numbers

    def view(self, tensor: torch.Tensor) -> View:
        """``tensor`` in terms of its memory."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:  # a storage is kept, so that its id stays its own
            number = self._numbers[id(storage)] = len(self._memory)
            self._memory.append(storage)
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def source_of(self, tensor: torch.Tensor) -> MappedTensor | None:
        """What a tensor is read from, if it is as it is in a file."""
        if not self.knows(tensor):
            return None
        view = self.view(tensor)
        return next((call.source for call in self.calls if call.source is not None and view in call.outputs), None)

    def add_source(self, source: MappedTensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that will be read from a file."""
        result = torch.empty(source.shape, dtype=dtype, device="meta")
        self.calls.append(Call(None, (), {}, (self.view(result),), source=source))
        return result

    def add_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation that was carried out without memory."""
        outputs = [t for t in tensors_in(result) if not self.knows(t)]
        written = [self.view(t).memory for t in _written(function, args, kwargs)]
        if not outputs and not written:
            return  # another view of memory that is known
        read = frozenset(self.view(t).memory for t in tensors_in((args, list(kwargs.values()))) if _is_meta(t))
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
        """A function ``function(tensor, **options)`` that gives a tensor new values, and is not to be looked into."""
        view = self.view(tensor)
        memory = frozenset({view.memory})
        self.calls.append(Call(function, (view,), options, (), memory, memory, draws=True, state=self._state()))

    def _without_tensor(self, tensor: torch.Tensor) -> Any:
        return self.view(tensor) if _is_meta(tensor) else tensor.detach().clone()

    def _state(self) -> int | None:
        state = torch.get_rng_state()
        if self.states and torch.equal(self.states[-1], state):
            return None
        self.states.append(state)
        return len(self.states) - 1


class Recorder(TorchDispatchMode):
    """Makes tensors without memory, and records what is done with them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        given = list(tensors_in((args, list(kwargs.values()))))
        chooses = any(argument.name == "device" for argument in func._schema.arguments)
        asked = kwargs.get("device")
        if given:
            recorded = any(_is_meta(t) for t in given)
        else:
            here = asked is None or asked.type == "cpu"
            recorded = chooses and (not _stays_as_it_is(func, args) if here else asked.type == "meta")
        if not recorded:
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            if not _is_meta(tensor):
                raise UsageError(
                    f"{func} writes into a tensor that has memory what has none.",
                    where="lazy_load_for_parallelism",
                    why="inside the context weights and what is computed from them have no values yet",
                )
        options = {**kwargs, "device": torch.device("meta")} if chooses else kwargs
        result = func(*exchanged(args, _to_meta), **{n: exchanged(v, _to_meta) for n, v in options.items()})
        self._recording.add_call(func, args, kwargs, result)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations are carried out as ever."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def exchanged(value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """Nested lists and tuples with ``change`` applied to what is of ``kind``."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(exchanged(item, change, kind) for item in value)
    return value


def _stays_as_it_is(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor gets its memory at once: one without elements needs none, and some models look at the values
    that linspace gives, to give each layer its own."""
    nothing = bool(args) and isinstance(args[0], (list, tuple)) and 0 in args[0]
    return nothing or function._schema.name == "aten::linspace"


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_meta(tensor) or tensor.dim() == 0 else tensor.to("meta")


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator changes."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))

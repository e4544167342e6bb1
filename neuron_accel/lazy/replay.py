# SPDX-License-Identifier: Apache-2.0
"""Replays a recording for given tensors, with one of them in memory at a time if possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from neuron_accel.errors import UsageError
from neuron_accel.lazy.recording import Call, Recording, View, exchanged

_OVERWRITE = frozenset({
    "aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::random_",
    "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_",
})  # fmt: skip
"""Operators that overwrite the tensor without reading it."""


def replay(
    recording: Recording,
    wanted: set[int],
    deliver: Callable[[int, torch.UntypedStorage], None],
    reader: Any,
) -> None:
    """Computes the contents of the storages ``wanted``.

    Random numbers are drawn in the order of the recording, also those of other tensors, so that the values of a tensor
    do not depend on which others are wanted. The state of the default generator is restored.

    Args:
        recording: the recording.
        wanted: numbers of storages in the recording.
        deliver: is called with the number and each complete storage, which is released afterwards.
        reader: reads files, or any other sources of the recording.

    Raises:
        UsageError: if a tensor was created outside of the recording.
    """
    if not wanted:
        return
    plan = _Plan(recording, wanted)
    saved = torch.get_rng_state()
    try:
        with torch.no_grad():
            _Replay(recording, plan, deliver, reader).run()
    finally:
        torch.set_rng_state(saved)


class _Plan:
    """The calls that have to be made, and the last use of each storage."""

    def __init__(self, recording: Recording, wanted: set[int]) -> None:
        self.wanted = wanted
        count = len(recording.calls)
        self.needed = [False] * count
        live = set(wanted)
        last_draw = -1
        for index in reversed(range(count)):
            call = recording.calls[index]
            made = {view.memory for view in call.outputs}
            if not live & (made | call.written):
                continue
            self.needed[index] = True
            if call.draws:
                last_draw = max(last_draw, index)
            live -= made
            if _overwrites(recording, call):
                live -= call.written
                live |= call.read - call.written
            else:
                live |= call.read
        if live:
            raise UsageError(
                "A tensor without memory was created outside of the context.",
                where="lazy_load_for_parallelism",
                why="its values are unknown",
                fix="build the full model inside the context, and do not change it before it is prepared",
            )
        # Calls that draw random numbers for other tensors are repeated too, if a needed call draws after them.
        self.drawn = [
            not self.needed[i] and i < last_draw and call.draws and not self._of_phantoms(recording, call)
            for i, call in enumerate(recording.calls)
        ]
        self.last_use: dict[int, int] = {}
        for index in range(count):
            if self.needed[index]:
                call = recording.calls[index]
                for memory in (*call.read, *call.written, *(view.memory for view in call.outputs)):
                    self.last_use[memory] = index

    @staticmethod
    def _of_phantoms(recording: Recording, call: Call) -> bool:
        return {view.memory for view in call.outputs} | call.written <= recording.phantoms


def _overwrites(recording: Recording, call: Call) -> bool:
    """Returns whether a call overwrites all of the storage that it writes, without reading it."""
    target = call.args[0] if call.args else None
    if len(call.written) != 1 or not isinstance(target, View) or call.function is None:
        return False
    schema = getattr(call.function, "_schema", None)  # an initialisation has none, and overwrites the tensor
    is_full = math.prod(target.size) * target.dtype.itemsize == recording.size_of(target.memory)
    return is_full and (schema is None or schema.name in _OVERWRITE)


class _Replay:
    def __init__(
        self, recording: Recording, plan: _Plan, deliver: Callable[[int, torch.UntypedStorage], None], reader: Any
    ) -> None:
        self._recording, self._plan, self._deliver, self._reader = recording, plan, deliver, reader
        self._memory: dict[int, torch.UntypedStorage] = {}

    def run(self) -> None:
        for index, call in enumerate(self._recording.calls):
            needed = self._plan.needed[index]
            if call.state is not None:
                torch.set_rng_state(self._recording.states[call.state])
            if needed:
                self._make(call)
            elif self._plan.drawn[index]:
                self._draw(call)
            if needed:
                touched = {*call.read, *call.written, *(view.memory for view in call.outputs)}
                for memory in touched:
                    if self._plan.last_use[memory] == index:
                        storage = self._memory.pop(memory)
                        if memory in self._plan.wanted:
                            self._deliver(memory, storage)

    def _make(self, call: Call) -> None:
        if call.source is not None:
            (view,) = call.outputs
            self._reader.read(call.source, tuple((0, size) for size in view.size), self._tensor(view))
            return
        result = self._called(call, self._tensor)
        fresh = [t for t in _flat(result) if not any(t.untyped_storage() is s for s in self._memory.values())]
        for view, tensor in zip(call.outputs, fresh, strict=True):
            as_recorded = (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset)
            if as_recorded and tensor.untyped_storage().nbytes() == self._recording.size_of(view.memory):
                self._memory[view.memory] = tensor.untyped_storage()
            else:
                self._tensor(view).copy_(tensor)

    def _draw(self, call: Call) -> None:
        """Repeats a call only to draw its random numbers."""
        written = next(iter(call.written), None)

        def scratch(view: View) -> torch.Tensor:
            if view.memory == written:
                return torch.empty_strided(view.size, view.stride, dtype=view.dtype)
            raise UsageError(
                f"{call.function} draws numbers that depend on another tensor.",
                where="lazy_load_for_parallelism",
                why="that tensor would have to be kept in memory",
                fix="build this model outside of the context",
            )

        self._called(call, scratch)

    @staticmethod
    def _called(call: Call, tensor: Callable[[View], torch.Tensor]) -> Any:
        kwargs = {name: exchanged(value, tensor, View) for name, value in call.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return call.function(*exchanged(call.args, tensor, View), **kwargs)  # type: ignore[misc]

    def _tensor(self, view: View) -> torch.Tensor:
        if view.memory not in self._memory:
            self._memory[view.memory] = torch.UntypedStorage(self._recording.size_of(view.memory))
        return tensor_of(view, self._memory[view.memory])


def tensor_of(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor with the storage and the size, stride and offset of ``view``."""
    return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.size, view.stride)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _flat(item)] if isinstance(value, (list, tuple)) else []

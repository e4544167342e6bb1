# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a step, in order: kernels with their operations and bytes, and when collectives start and are
waited for. The time of a step is predicted from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from neuron_accel_plan.shapes import tensors_in

if TYPE_CHECKING:
    from neuron_accel.contract import Traffic

PRODUCT = "product"
BATCHED_PRODUCT = "batched product"
ATTENTION = "attention"
ELEMENTWISE = "element-wise"
SPECIAL = "special functions"
REDUCTION = "reduction"
INDEXED = "indexed"
COMPUTING = (PRODUCT, BATCHED_PRODUCT, ATTENTION)
KINDS = (*COMPUTING, ELEMENTWISE, SPECIAL, REDUCTION, INDEXED)
"""Kinds of kernels: products of two matrices and convolutions; of batches of matrices; attention kernels; and, bound by
memory, element-wise ones, those with exponentials, roots or divisions, reductions, and those that read or write by
index."""

_PATTERNS = (
    (ATTENTION, r"attention"),
    (BATCHED_PRODUCT, r"^_?(\w*bmm|grouped_mm)$"),
    (PRODUCT, r"mm$|matmul|linear|conv|addmv|^mv$|^dot$"),
    (INDEXED, r"embedding|index|gather|scatter|nll_loss|cumsum|sort|topk|masked_select|nonzero|take"),
    (
        SPECIAL,
        r"softmax|exp|log|silu|gelu|tanh|sigmoid|sqrt|pow|cos|sin|erf|softplus|(^|_)div|reciprocal|addcdiv|norm_backward",
    ),
    (REDUCTION, r"^(sum|mean|amax|amin|max|min|var|std|prod|any|all|argmax|logsumexp)$|norm"),
)
_NO_DATA = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "alias",
    "lift_fresh",
    "set",
}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""Operations that write to their first argument and do not read it."""


@dataclass(frozen=True)
class Kernel:
    """Operations on tensors that are alike.

    Args:
        kind: one of :data:`KINDS`.
        dtype: dtype of what it writes, such as ``"bfloat16"``.
        operations: floating-point operations of one, if it multiplies matrices; else 0.
        moved: bytes that one reads and writes.
    """

    kind: str
    dtype: str
    operations: int
    moved: int


@dataclass(frozen=True)
class Work:
    """What a rank computes between two events of communication.

    Args:
        phase: the phase of the step.
        kernels: the kernels, with their number.
        fused: bytes that the memory-bound ones move if each run of them between two products is one kernel: what is
            read from outside of the run, and what is written and outlives it.
    """

    phase: str
    kernels: tuple[tuple[Kernel, int], ...]
    fused: int


@dataclass(frozen=True)
class Message:
    """A collective.

    Args:
        op: its name.
        axis: the axis, or axes, of the mesh.
        ranks: the ranks of the group.
        sent: bytes that this rank sends.
        dtype: dtype of the tensor.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    sent: int
    dtype: str


@dataclass(frozen=True)
class Event:
    """The start of a message, or the wait for it.

    Args:
        what: which of the two.
        message: its index.
    """

    what: Literal["start", "wait"]
    message: int


@dataclass(frozen=True)
class Trace:
    """What a rank does in a step.

    Args:
        events: work, and starts and waits of messages, in order.
        messages: the messages.
    """

    events: tuple[Work | Event, ...]
    messages: tuple[Message, ...]


def kind_of(name: str) -> str:
    """Returns the kind of the operation with this name, such as ``"mm"`` of ``aten.mm``."""
    plain = name.rstrip("_")
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, plain)), ELEMENTWISE)


class Place(Protocol):
    """A storage, as the tracer sees it. ``died`` is None while it is alive."""

    nbytes: int
    died: int | None


class Tracer:
    """Collects the kernels of a step between events of communication.

    Args:
        traffic: where the collectives of the step are recorded, with their order.
        find: returns the storage of a tensor on the device, or None for other tensors.
        imitates: whether the operation that runs stands for a collective, and is none of the step.
    """

    def __init__(
        self,
        traffic: Traffic,
        find: Callable[[torch.Tensor], Place | None],
        imitates: Callable[[], bool] = lambda: False,
    ) -> None:
        self._traffic, self._find, self._imitates = traffic, find, imitates
        self._events: list[Work | Event] = []
        self._seen = 0
        self._phase = ""
        self._kernels: Counter[Kernel] = Counter()
        self._fused = 0
        # Of this run of memory-bound kernels, by storage and offset in it: a reference keeps the id.
        self._read: dict[tuple[int, int], tuple[Place, int]] = {}
        self._written: dict[tuple[int, int], tuple[Place, int]] = {}
        self._kinds: dict[Any, str | None] = {}

    def operation(self, func: Any, inputs: Any, result: Any, operations: int, phase: str) -> None:
        """Records an operation.

        Args:
            func: the overload, as a dispatch mode receives it.
            inputs, result: arguments and result of the call.
            operations: its floating-point operations.
            phase: the phase of the step.
        """
        kind = self._kind(func)
        if kind is None or self._imitates():
            return
        if phase != self._phase or len(self._traffic.order) > self._seen:
            self._end_work()
            self._phase = phase
        name = func._schema.name.partition("::")[2]
        sources = tensors_in(inputs)
        if name in _OVERWRITES:
            sources = sources[1:]
        targets = tensors_in(result)
        if all(self._find(tensor) is None for tensor in targets):
            return
        rows = sum(_nbytes(tensor) for tensor in targets)
        is_table = kind == INDEXED and "backward" not in name  # of which some rows are read
        read = [(tensor, min(_nbytes(tensor), rows) if is_table else _nbytes(tensor)) for tensor in sources]
        written = [(tensor, _nbytes(tensor)) for tensor in targets]
        dtype = str(targets[0].dtype).removeprefix("torch.")
        self._kernels[Kernel(kind, dtype, operations, sum(size for _, size in (*read, *written)))] += 1
        if kind in COMPUTING:
            self._end_run()
            return
        for places, found in ((self._read, read), (self._written, written)):
            for tensor, size in found:
                place = self._find(tensor)
                if place is None:
                    continue
                key = id(place), int(tensor.storage_offset())
                if places is self._written or key not in self._written:
                    places[key] = (place, max(size, places.get(key, (place, 0))[1]))

    def _kind(self, func: Any) -> str | None:
        """The kind of an operation; None for views and operations that move no data."""
        if func not in self._kinds:
            name = func._schema.name.partition("::")[2]
            views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            moves = not views and name.rstrip("_") not in _NO_DATA and func.namespace != "profiler"
            self._kinds[func] = kind_of(name) if moves else None
        return self._kinds[func]

    def _end_run(self) -> None:
        self._fused += sum(size for _, size in self._read.values())
        self._fused += sum(size for place, size in self._written.values() if place.died is None)
        self._read.clear()
        self._written.clear()

    def _end_work(self) -> None:
        """Adds what was recorded, and then what was communicated since."""
        self._end_run()
        if self._kernels:
            self._events.append(Work(self._phase, tuple(self._kernels.items()), self._fused))
        self._kernels.clear()
        self._fused = 0
        for what, message in self._traffic.order[self._seen :]:
            self._events.append(Event(what, message))
        self._seen = len(self._traffic.order)

    def trace(self) -> Trace:
        """Returns what was recorded."""
        self._end_work()
        messages = tuple(
            Message(
                op=transfer.op,
                axis=transfer.group,
                ranks=transfer.ranks,
                sent=transfer.sent,
                dtype=str(transfer.dtype).removeprefix("torch."),
            )
            for transfer in self._traffic.transfers
        )
        return Trace(tuple(self._events), messages)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else 1
    return distinct * tensor.element_size() if tensor.numel() else 0

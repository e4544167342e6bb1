# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a step, in order: kernels with their operations and bytes, and when collectives start and are
waited for. The time of a step is predicted from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from neuron_accel_plan.shapes import tensors_in

if TYPE_CHECKING:
    from neuron_accel.contract.events import Traffic

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
        self._kernels: Counter[tuple[str, str, int, int]] = Counter()  # see `Kernel`
        self._fused = 0
        # Of this run of memory-bound kernels, by storage and offset in it: a reference keeps the id.
        self._read: dict[tuple[int, int], tuple[Place, int]] = {}
        self._written: dict[tuple[int, int], tuple[Place, int]] = {}
        self._kinds: dict[Any, tuple[str, bool, bool] | None] = {}
        self._dtypes: dict[torch.dtype, str] = {}

    def operation(
        self,
        func: Any,
        inputs: Any,
        results: Sequence[tuple[torch.Tensor, Place | None]],
        operations: int,
        phase: str,
    ) -> None:
        """Records an operation.

        Args:
            func: the overload, as a dispatch mode receives it.
            inputs: arguments of the call.
            results: the tensors that it returns, each with its storage on the device, if it has one there.
            operations: its floating-point operations.
            phase: the phase of the step.
        """
        known = self._kinds[func] if func in self._kinds else self._learn(func)
        if known is None or self._imitates():
            return
        kind, overwrites, is_table = known
        if phase != self._phase or len(self._traffic.order) > self._seen:
            self._end_work()
            self._phase = phase
        if all(place is None for _, place in results):
            return
        sources = tensors_in(inputs)
        if overwrites:
            del sources[0]
        written = [_nbytes(tensor) for tensor, _ in results]
        read = [_nbytes(tensor) for tensor in sources]
        if is_table:
            read = [min(size, sum(written)) for size in read]
        dtype = results[0][0].dtype
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        self._kernels[kind, self._dtypes[dtype], operations, sum(read) + sum(written)] += 1
        if kind in COMPUTING:
            self._end_run()
            return
        for tensor, size in zip(sources, read, strict=True):
            place = self._find(tensor)
            if place is not None:
                key = id(place), int(tensor.storage_offset())
                if key not in self._written:
                    self._read[key] = (place, max(size, self._read.get(key, (place, 0))[1]))
        for (tensor, place), size in zip(results, written, strict=True):
            if place is not None:
                key = id(place), int(tensor.storage_offset())
                self._written[key] = (place, max(size, self._written.get(key, (place, 0))[1]))

    def _learn(self, func: Any) -> tuple[str, bool, bool] | None:
        """The kind of an operation, whether it writes to its first argument and does not read it, and whether it reads
        as many rows of its arguments as it writes; None for views and operations that move no data."""
        name = func._schema.name.partition("::")[2]
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if views or name.rstrip("_") in _NO_DATA or func.namespace == "profiler":
            found = None
        else:
            kind = kind_of(name)
            found = kind, name in _OVERWRITES, kind == INDEXED and "backward" not in name
        self._kinds[func] = found
        return found

    def _end_run(self) -> None:
        self._fused += sum(size for _, size in self._read.values())
        self._fused += sum(size for place, size in self._written.values() if place.died is None)
        self._read.clear()
        self._written.clear()

    def _end_work(self) -> None:
        """Adds what was recorded, and then what was communicated since."""
        self._end_run()
        if self._kernels:
            kernels = tuple((Kernel(*kernel), number) for kernel, number in self._kernels.items())
            self._events.append(Work(self._phase, kernels, self._fused))
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
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    distinct = 1
    for size, stride in zip(tensor.shape, strides, strict=True):
        distinct *= size if stride else 1
    return distinct * tensor.element_size() if tensor.numel() else 0

"""The interface between strategies and the machine."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    import torch

    from neuron_accel.backends.movement import ReduceOp
    from neuron_accel.backends.randomness import DeviceGenerator


# ---- Looking on while collectives are issued, and a board for notes beside them --------------------------------------
class CollectiveObserver(ABC):
    """Is called just before every collective. If it raises, the collective is not issued."""

    @abstractmethod
    def issued(self, op: str, group: Group, sent: int, *, deferred: bool) -> None:
        """A collective is about to be issued.

        Args:
            op: its name.
            group: the ranks that take part; more than one.
            sent: bytes that this rank sends; 0 where objects travel.
            deferred: whether it is only added to a graph, which :meth:`executing` announces.
        """

    @abstractmethod
    def executing(self, ranks: tuple[int, ...]) -> None:
        """A lazy device is about to execute what was deferred, as are those of all ``ranks``, among them this one's."""


class Board(ABC):
    """Short notes that ranks write for each other, outside of all collectives and without waiting for other ranks."""

    @abstractmethod
    def put(self, key: str, note: bytes) -> None:
        """Leaves a note, in place of an earlier one under the same key."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The note under ``key``, or None as long as there is none."""


class LocalBoard(Board):
    """For ranks that are threads of one process, or for one rank."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, note: bytes) -> None:
        with self._lock:
            self._notes[key] = note

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._notes.get(key)


class StoreBoard(Board):
    """For ranks that are processes: a key-value store of torch.distributed.

    Args:
        store: the store; a prefix of its own keeps keys apart from those of others.
    """

    def __init__(self, store: Any) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore("neuron_accel_board", store)

    @classmethod
    def of_default_group(cls) -> StoreBoard:
        """On the store that the default process group was made with."""
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(_get_default_store())

    def put(self, key: str, note: bytes) -> None:
        self._store.set(key, note)  # type: ignore[arg-type]  # bytes are what it keeps

    def get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None


# ---- The interface between strategies and the machine ----------------------------------------------------------------
# Strategies see devices and collectives only through a :class:`Backend`. Collectives are functional: they return
# their result and leave their input alone unless they say otherwise, because a lazy device has no other way. A result
# may be the input itself where nothing had to be moved: treat both as read-only, or clone. They are not
# differentiable; :mod:`neuron_accel.backends.autograd` builds the differentiable ones once on top.
#
# Every collective of a group of one rank is the identity and sends nothing.


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective with this rank.

    Args:
        ranks: their global ranks, ascending.
        index: this rank's position among them.
        partition: all groups of the same kind over all ranks, this one included.
        name: what the group is for, in messages: ``"tp"``, ``"dp x tp"``.
        handle: the implementation's own object; None for a group of one.
    """

    ranks: tuple[int, ...]
    index: int
    partition: tuple[tuple[int, ...], ...]
    name: str
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}  # connections stay in their process

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # copies of a model communicate as the original does


class Pending(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Waits for the collective and returns its result."""


class Done(Pending):
    """A collective that is complete already."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result


class Then(Pending):
    """A collective under way and what is to be done with its result.

    Args:
        pending: the collective.
        finish: called once, by the first ``wait()``.
    """

    def __init__(self, pending: Pending, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._result = self._finish(pending.wait())
        assert self._result is not None
        return self._result


@dataclass(frozen=True)
class Transfer:
    """One collective as it was issued: ``sent`` is the number of bytes that this rank had to send."""

    op: str
    group: str
    size: int
    sent: int


@dataclass
class Traffic:
    """The collectives issued while recording, in order."""

    transfers: list[Transfer] = field(default_factory=list)

    def sent(self, *, op: str | None = None, group: str | None = None) -> int:
        """Bytes sent by this rank, of one kind of collective or group only where given."""
        return sum(t.sent for t in self._select(op, group))

    def count(self, *, op: str | None = None, group: str | None = None) -> int:
        """Number of collectives, of one kind or group only where given."""
        return len(self._select(op, group))

    def _select(self, op: str | None, group: str | None) -> list[Transfer]:
        return [t for t in self.transfers if op in (None, t.op) and group in (None, t.group)]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def communicates(method: _Method) -> _Method:
    """Marks a method of :class:`Backend` that other ranks take part in: what a preview of a plan must not call."""
    method.communicates = True  # type: ignore[attr-defined]
    return method


class Backend(ABC):
    """A device and the collectives between its ranks."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._recordings: list[Traffic] = []
        self._observers: list[CollectiveObserver] = []

    # ---- who and where -----------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def generator(self) -> DeviceGenerator:
        """Of random numbers on the device."""
        from neuron_accel.backends.randomness import DeviceGenerator

        return DeviceGenerator(self.device)

    # ---- what strategies may count on --------------------------------------------------------------------------------
    @property
    def is_lazy(self) -> bool:
        """Whether operations collect in a graph that :meth:`step_boundary` executes. Every rank runs the same one
        unless :meth:`run_apart` said otherwise, and views and in-place updates cost copies."""
        return False

    @property
    def reads_are_free(self) -> bool:
        """Whether reading a tensor's value costs nothing, so that control flow may depend on it."""
        return False

    @property
    def has_point_to_point(self) -> bool:
        """Whether ranks can :meth:`start_send` and :meth:`start_receive`."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether what is computed between ``start_*`` and ``wait()`` overlaps with the collective."""
        return False

    @property
    def sums_integers_exactly(self) -> bool:
        """Whether the device adds up integers and booleans as such. Where it goes through float32, exact to 2**24 only,
        collectives of this interface send them as float32 digits or gather them: results are exact either way."""
        return True

    @property
    def capabilities(self) -> frozenset[str]:
        """The same for a plan, which knows a backend by names: what specs of plugins may require or conflict with."""
        offered = {
            "lazy": self.is_lazy,
            "host-reads": self.reads_are_free,
            "point-to-point": self.has_point_to_point,
            "async": self.overlaps,
        }
        return frozenset(name for name, there in offered.items() if there)

    @property
    def missing(self) -> Mapping[str, str]:
        """Why capabilities are missing, by name, where that was tried; the same on every rank."""
        return {}

    # ---- groups ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        """Makes every group of ``partition`` (which covers all ranks) and returns this rank's. Collective."""

    def number(self, value: float) -> torch.Tensor:
        """A number on the device, float32 without dims, that no graph takes for a constant."""
        import torch

        return torch.tensor(value, dtype=torch.float32, device=self.device)

    # ---- collectives on tensors --------------------------------------------------------------------------------------
    @communicates
    def all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> torch.Tensor:
        """The element-wise reduction over the group, same shape, on every rank. **May reuse the input's memory**: the
        caller gives ``tensor`` up."""
        return self.start_all_reduce(tensor, group, op).wait()

    @communicates
    def all_reduce_together(
        self, tensors: Sequence[torch.Tensor], group: Group, scale: float = 1.0
    ) -> list[torch.Tensor]:
        """The sums over the group of several tensors of one dtype, times ``scale``, in one collective. **May reuse the
        inputs' memory.**"""
        import torch

        flat = self.all_reduce(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), group)
        flat = flat * scale if scale != 1.0 else flat
        parts = flat.split([tensor.numel() for tensor in tensors])
        # Changing a view in place would rewrite all of them, each by itself, on a lazy device.
        return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]

    @communicates
    def all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """The concatenation along ``dim`` of the group's tensors, which have equal shapes."""
        return self.start_all_gather(tensor, group, dim).wait()

    @communicates
    def reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """This rank's chunk along ``dim`` of the sum over the group; ``group.size`` divides the dim."""
        return self.start_reduce_scatter(tensor, group, dim).wait()

    @abstractmethod
    @communicates
    def start_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> Pending: ...

    @abstractmethod
    @communicates
    def start_all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending: ...

    @communicates
    def start_all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, group: Group) -> Pending:
        """An all-gather along dim 0 into memory of the caller's; the result is ``out``.

        Args:
            out: contiguous, with ``group.size`` times the elements of ``tensor``, the same dtype.
            tensor: contiguous; may be this rank's own chunk of ``out``.
        """
        pending = self.start_all_gather(tensor.reshape(-1), group)
        return Then(pending, lambda gathered: out.copy_(gathered.view(out.shape)))

    @abstractmethod
    @communicates
    def start_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending: ...

    @communicates
    def start_reduce_scatter_into(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        group: Group,
        *,
        scale: float = 1.0,
        scratch: torch.Tensor | None = None,
    ) -> Pending:
        """A reduce-scatter along dim 0 into memory of the caller's; the result is ``out``.

        Args:
            out: flat, with one ``group.size``-th of the elements of ``tensor``; the sum is rounded to the dtype of
                ``tensor``, as by :meth:`reduce_scatter`, then converted to that of ``out``.
            tensor: flat; stays as it is until then.
            scale: what ``out`` is multiplied by at the end.
            scratch: memory like ``tensor`` that may be overwritten until then, so that none has to be made.
        """
        pending = self.start_reduce_scatter(tensor, group)
        return Then(pending, lambda reduced: out.copy_(reduced).mul_(scale))

    @abstractmethod
    @communicates
    def all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> torch.Tensor:
        """Sends chunk i along ``split_dim`` to the i-th rank, returns what was received along ``concat_dim``."""

    @abstractmethod
    @communicates
    def permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> torch.Tensor:
        """What the rank ``shift`` positions before this one in the group's ring holds."""

    def limit_rings(  # noqa: B027  most machines connect any two ranks
        self, problem: Callable[[Sequence[tuple[int, int]]], str | None]
    ) -> None:
        """Says which permutations the machine cannot make by sending from rank to rank: :meth:`permute` gathers then.

        Args:
            problem: of pairs of source and target, why not; None if it can.
        """

    @communicates
    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """:meth:`permute`, started: what is computed before ``wait()`` overlaps with it where the backend
        :attr:`overlaps`. ``tensor`` stays as it is until then."""
        return Done(self.permute(tensor, group, shift))

    @abstractmethod
    @communicates
    def broadcast(self, tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
        """The tensor of the rank at position ``source``; shapes and dtypes agree on all ranks."""

    # ---- integers and booleans where the backend does not :attr:`sums_integers_exactly`: for its collectives ---------
    def _start_exact_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp) -> Pending:
        """An all-reduce of integers, or of booleans, whose sum is "any"."""
        import torch

        from neuron_accel.backends.movement import from_digits, reduce_rows, to_digits

        dtype, ranks = tensor.dtype, group.size
        if dtype == torch.bool:
            return Then(self.start_all_reduce(tensor.to(torch.float32), group, op), lambda result: result > 0)
        if op == "sum" and _has_digits(tensor):
            digits = self.start_all_reduce(to_digits(tensor, ranks), group)
            return Then(digits, lambda result: from_digits(result, dtype, ranks))
        gathered = self.start_all_gather(tensor.unsqueeze(0), group)
        if op == "sum":
            return Then(gathered, lambda rows: rows.sum(0, dtype=dtype))
        return Then(gathered, lambda rows: reduce_rows(rows, op))

    def _start_exact_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int) -> Pending:
        """A reduce-scatter of integers, or of booleans, whose sum is "any"; ``dim`` counted from the front."""
        import torch

        from neuron_accel.backends.movement import from_digits, to_digits

        dtype, ranks = tensor.dtype, group.size
        if dtype == torch.bool:
            return Then(self.start_reduce_scatter(tensor.to(torch.float32), group, dim), lambda result: result > 0)
        if not _has_digits(tensor):
            summed = self._start_exact_all_reduce(tensor, group, "sum")
            return Then(summed, lambda total: self.chunk(total, group, dim).contiguous())
        digits = self.start_reduce_scatter(to_digits(tensor, ranks), group, dim + 1)
        return Then(digits, lambda result: from_digits(result, dtype, ranks))

    def _exact_broadcast(self, tensor: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        """A broadcast of integers or booleans that would be made of a sum."""
        from neuron_accel.backends.movement import from_digits, to_digits

        if not _has_digits(tensor):
            return self.all_gather(tensor.unsqueeze(0), group)[source]
        return from_digits(self.broadcast(to_digits(tensor, 1), group, source), tensor.dtype, 1)

    @abstractmethod
    def chunk(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """This rank's of ``group.size`` equal chunks along ``dim``; no communication. May be a view of the input. On a
        lazy device the rank is data, not a constant, so that all ranks trace the same graph."""

    # ---- point to point, where the backend :attr:`has_point_to_point` ------------------------------------------------
    @communicates
    def start_send(self, tensor: torch.Tensor, group: Group, target: int) -> Pending:
        """Sends to the rank at position ``target``, which receives the same shape and dtype. Messages between two ranks
        of a group arrive in order. Waiting returns ``tensor``, which may then be written again."""
        raise UsageError(f"The {self.name} backend cannot send from rank to rank.")

    @communicates
    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, group: Group, source: int) -> Pending:
        """Receives what the rank at position ``source`` sends to this one, in new memory."""
        raise UsageError(f"The {self.name} backend cannot receive from a single rank.")

    # ---- activation checkpointing ------------------------------------------------------------------------------------
    def recompute(self, function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        """Calls a function whose activations are not kept: in the backward pass it is called again, and they are there.

        The second call gets the same inputs, random numbers and autocast, and stays a second one on a device that has
        a compiler. The gradient of a parameter arrives once, as it would without (this is not the re-entrant form of
        :func:`torch.utils.checkpoint.checkpoint`). Without gradients (:func:`torch.no_grad`) it is a plain call.

        Args:
            function: depends on ``inputs``, ``keywords``, parameters and buffers only. What it changes elsewhere, it
                changes twice (the running statistics of a batch norm, say).
            inputs, keywords: of the function; tensors among them, in tuples, lists and dicts too, may require
                gradients or not.

        Returns:
            What the function returned.

        Raises:
            UsageError: in the backward pass, on a lazy device, if the function did something else the second time;
                PyTorch's own error elsewhere.
        """
        from neuron_accel.backends.recompute import checkpoint_eagerly

        return checkpoint_eagerly(function, inputs, keywords)

    # ---- collectives on objects --------------------------------------------------------------------------------------
    @abstractmethod
    @communicates
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        """Every rank's picklable ``value``, in the order of the group."""

    @abstractmethod
    @communicates
    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        """The ``value`` of the rank at position ``source``."""

    @abstractmethod
    @communicates
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    # ---- steps and values --------------------------------------------------------------------------------------------
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` on the CPU. On a lazy device, which executes all that it has collected first, every rank
        calls it in the same place."""
        return tensor.detach().to("cpu", copy=True)

    @communicates  # noqa: B027  most devices have nothing to do
    def step_boundary(self) -> None:
        """A training step is complete; a lazy device executes what it has collected."""

    def run_apart(self, group: Group) -> None:  # noqa: B027  eager devices meet wherever ranks do
        """From now on ranks at different positions of ``group`` compute different things, ranks at one position of all
        groups of its partition the same. A lazy device makes every collective between such ranks a graph of its own,
        because what they compute beside it would make different graphs of it, and those never meet."""

    def collects(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether reading one of them would execute a graph that still collects; never on eager devices."""
        return False

    def after_step(self, action: Callable[[], None], *, reads_graph: bool) -> None:
        """Calls ``action`` at once, or on a lazy device after the next :meth:`step_boundary`: if ``reads_graph``, which
        says that it reads what still collects, or if an earlier action waits. Actions keep their order."""
        action()

    @property
    def compilations(self) -> int | None:
        """Number of graphs compiled so far; None where nothing is compiled."""
        return None

    def board(self) -> Board:
        """Where ranks leave notes for each other; the same board on all of them."""
        return LocalBoard()

    def shutdown(self) -> None:  # noqa: B027  most devices have nothing to release
        """Releases groups and connections. Idempotent."""

    # ---- counting ----------------------------------------------------------------------------------------------------
    @contextmanager
    def record(self) -> Iterator[Traffic]:
        """Counts the collectives on tensors issued inside the context; those on objects are not counted."""
        traffic = Traffic()
        self._recordings.append(traffic)
        try:
            yield traffic
        finally:
            self._recordings.remove(traffic)

    def observe(self, observer: CollectiveObserver) -> Callable[[], None]:
        """Tells ``observer`` of every collective from now on, until the function that is returned is called."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer) if observer in self._observers else None

    def announce(self, op: str, group: Group) -> None:
        """Tells observers that the group is about to do something together without a collective on tensors."""
        if group.size > 1:
            for observer in self._observers:
                observer.issued(op, group, 0, deferred=False)

    def _note(self, op: str, group: Group, sent: int) -> None:
        for observer in self._observers:
            observer.issued(op, group, sent, deferred=self.is_lazy)
        for traffic in self._recordings:
            traffic.transfers.append(Transfer(op=op, group=group.name, size=group.size, sent=sent))


COLLECTIVES = frozenset(name for name, value in vars(Backend).items() if hasattr(value, "communicates"))
"""Names of the methods that other ranks take part in."""


def _has_digits(tensor: torch.Tensor) -> bool:
    """Whether integers are sent digit by digit. Those of 64 bits are gathered: the compiler refuses to shift them."""
    return tensor.dtype.itemsize < 8

# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: a device, process groups, and collectives between the ranks."""

from __future__ import annotations

import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from neuron_accel.backends.ranges import Ranges
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    import torch

    from neuron_accel.backends.movement import ReduceOp
    from neuron_accel.backends.randomness import DeviceGenerator


# ---- Observing collectives, and a key-value board beside them --------------------------------------------------------
class CollectiveObserver(ABC):
    """Receives a call before each collective is issued. If the observer raises, the collective is not issued."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def issued(self, op: str, group: Group, sent: int, *, deferred: bool) -> None:
        """Is called before a collective is issued.

        Args:
            op: name of the collective.
            group: the participating ranks, at least two.
            sent: bytes that this rank sends; 0 for collectives on objects.
            deferred: True if the collective is only added to a graph; :meth:`executing` is called before the graph
                runs.
        """

    @abstractmethod
    def executing(self, ranks: tuple[int, ...]) -> None:
        """Is called before a lazy device executes its pending graph.

        Args:
            ranks: all ranks that execute their graph together, including this rank.
        """

    def summing(
        self, group: Group, sent: Sequence[torch.Tensor], *, scattered: bool
    ) -> Callable[[Sequence[torch.Tensor], float], None] | None:
        """Is called after :meth:`issued` if the collective sums floating-point or complex numbers, before they are
        sent. Must neither change the tensors nor read values of a lazy device.

        Args:
            group: the ranks whose tensors are summed.
            sent: what this rank contributes.
            scattered: whether row i of each tensor, ``[group.size, ...]``, is summed on the i-th rank only; otherwise
                every rank receives all sums.

        Returns:
            A function that is called with this rank's sums and the factor by which they have been multiplied, before
            the caller of the collective receives them; None if it is not needed.
        """
        return None


class Board(ABC):
    """A key-value store for short notes between ranks. Reading and writing involves no collective and does not wait."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def put(self, key: str, note: bytes) -> None:
        """Stores ``note`` under ``key``, replacing an earlier note."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Returns the note stored under ``key``, or None if there is none yet."""


class LocalBoard(Board):
    """A board for ranks that are threads of one process, or for a single rank."""

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
    """A board for ranks that are processes, on a :class:`torch.distributed.Store`.

    Args:
        store: the store; keys get a prefix of their own.
    """

    def __init__(self, store: Any) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore("neuron_accel_board", store)

    @classmethod
    def of_default_group(cls) -> StoreBoard:
        """Returns a board on the store of the default process group."""
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(_get_default_store())

    def put(self, key: str, note: bytes) -> None:
        self._store.set(key, note)  # type: ignore[arg-type]  # the store keeps bytes

    def get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None


# ---- The interface between strategies and the machine ----------------------------------------------------------------
# Strategies use devices and collectives only through a :class:`Backend`. Collectives are functional: they return their
# result and do not change their input unless they say so, since a lazy device requires this. The result may be the
# input itself if nothing had to be sent: treat both as read-only, or clone. These collectives are not differentiable;
# :mod:`neuron_accel.backends.autograd` has differentiable ones built on them. In a group of one rank every collective
# is the identity and sends nothing.


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, as seen by this rank.

    Args:
        ranks: the global ranks of the group, ascending.
        index: position of this rank in ``ranks``.
        partition: all groups of the same kind, this one included; together they contain every rank once.
        name: name of the group in messages, such as ``"tp"`` or ``"dp x tp"``.
        handle: the backend's own object for the group; None for a group of one rank.
    """

    ranks: tuple[int, ...]
    index: int
    partition: tuple[tuple[int, ...], ...]
    name: str
    handle: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, rank: int, partition: Sequence[Sequence[int]], name: str, world_size: int) -> Group:
        """Returns the group of ``partition`` in which ``rank`` is, without a handle. The order of groups, and of the
        ranks in each, does not matter.

        Raises:
            ValueError: if ``partition`` does not name every rank exactly once.
        """
        groups = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        if sorted(each for ranks in groups for each in ranks) != list(range(world_size)):
            raise ValueError(f"{groups} does not partition the ranks 0 to {world_size - 1}")
        ranks = next(ranks for ranks in groups if rank in ranks)
        return cls(ranks=ranks, index=ranks.index(rank), partition=groups, name=name)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}  # a connection cannot be moved to another process

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # copies of a model communicate in the same groups


class Pending(ABC):
    """A collective that has been started and may not be complete."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Waits for the collective and returns its result."""


class Done(Pending):
    """A :class:`Pending` whose result is already available."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {tuple(self._result.shape)} of {self._result.dtype}>"

    def wait(self) -> torch.Tensor:
        return self._result


class Then(Pending):
    """A :class:`Pending` whose result is passed through a function.

    Args:
        pending: the collective.
        finish: maps the result of ``pending`` to the result of this object; called once, by the first ``wait()``.
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
    """Record of one collective.

    Args:
        op: name of the collective.
        group: name of the group.
        size: number of ranks in the group.
        sent: bytes that this rank sends.
        dtype: dtype of the tensor that is sent, on backends that record it; not compared.
        ranks: the ranks of the group; not compared.
    """

    op: str
    group: str
    size: int
    sent: int
    dtype: torch.dtype | None = field(default=None, compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass
class Traffic:
    """The collectives issued inside :meth:`Backend.record`, in order.

    Args:
        transfers: the collectives.
        order: ``("start", i)`` and ``("wait", i)`` for ``transfers[i]``, in the order in which they happened; in a dry
            run only.
    """

    transfers: list[Transfer] = field(default_factory=list)
    order: list[tuple[Literal["start", "wait"], int]] = field(default_factory=list)

    def __repr__(self) -> str:
        by_op = ", ".join(f"{op} {self.count(op=op)}" for op in dict.fromkeys(t.op for t in self.transfers))
        return f"<{type(self).__name__}: {self.sent()} bytes sent; collectives: {by_op or 'none'}>"

    def sent(self, *, op: str | None = None, group: str | None = None) -> int:
        """Returns the bytes sent by this rank, optionally of one collective ``op`` or one ``group`` only."""
        return sum(t.sent for t in self._select(op, group))

    def count(self, *, op: str | None = None, group: str | None = None) -> int:
        """Returns the number of collectives, optionally of one ``op`` or one ``group`` only."""
        return len(self._select(op, group))

    def _select(self, op: str | None, group: str | None) -> list[Transfer]:
        return [t for t in self.transfers if op in (None, t.op) and group in (None, t.group)]


class TrafficTotals:
    """Number and bytes of the collectives that are issued inside :meth:`Backend.record_totals`. It costs less than
    :class:`Traffic`, which describes each of them."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], list[int]] = {}

    def __repr__(self) -> str:
        totals = ", ".join(f"{op} over {group} {count}" for (op, group), (count, _) in self._totals.items())
        return f"<{type(self).__name__}: {totals or 'none'}>"

    def add(self, op: str, group: str, sent: int) -> None:
        """Counts a collective.

        Args:
            op: its name.
            group: name of the group.
            sent: bytes that this rank sends.
        """
        total = self._totals.get((op, group))
        if total is None:
            self._totals[op, group] = [1, sent]
        else:
            total[0] += 1
            total[1] += sent

    def take(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Returns the totals since the last call, and begins again at zero.

        Returns:
            The number of collectives and the bytes that this rank has sent, by the name of the collective and that of
            the group, in the order of first use.
        """
        totals, self._totals = self._totals, {}
        return {key: (count, sent) for key, (count, sent) in totals.items()}


class _Observed(Pending):
    """A :class:`Pending` whose wait is a range.

    Args:
        pending: the collective.
        ranges: of the run.
        op: name of the collective.
        group: name of the group.
    """

    def __init__(self, pending: Pending, ranges: Ranges, op: str, group: str) -> None:
        self._pending, self._ranges, self._op, self._group = pending, ranges, op, group

    def wait(self) -> torch.Tensor:
        with self._ranges.open(
            f"wait for {self._op}", "collective", part="communication", op=self._op, group=self._group, waits=True
        ):
            return self._pending.wait()


OUTSIDE_GRAPHS = "ranks communicate between compiled graphs"
"""What torch.compile says of a graph that ends at a collective."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


def communicates(method: _Method) -> _Method:
    """Marks a method of :class:`Backend` in which other ranks take part. A preview of a plan must not call it, and
    torch.compile ends a graph there."""
    method.communicates = True  # type: ignore[attr-defined]
    return method


class Backend(ABC):
    """A device and the collectives between its ranks."""

    name: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets torch.compile end its graph before a collective and begin another one after it. It would trace into the
        process group and the exchange of objects otherwise, which fails or not with what they are made of."""
        super().__init_subclass__(**options)
        import torch

        for name in COLLECTIVES:
            method = getattr(cls, name)
            if name in vars(cls) or method is getattr(Backend, name):
                setattr(cls, name, torch.compiler.disable(_in_range(name, method), reason=OUTSIDE_GRAPHS))

    def __init__(self) -> None:
        self._recordings: list[Traffic] = []
        self._totals: list[TrafficTotals] = []
        self._observers: list[CollectiveObserver] = []
        self.ranges = Ranges()
        """Named ranges of time. Each collective is one, and each wait for a collective that was started; on a lazy
        device, whose collectives are part of a graph, those on objects and :meth:`step_boundary`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.world_size} on {self.device}>"

    # ---- rank and device ---------------------------------------------------------------------------------------------
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
    def timeout(self) -> timedelta:
        """The time that a collective may take."""
        return timedelta(minutes=30)

    @property
    def generator(self) -> DeviceGenerator:
        """The random number generator of the device."""
        from neuron_accel.backends.randomness import DeviceGenerator

        return DeviceGenerator(self.device)

    # ---- capabilities ------------------------------------------------------------------------------------------------
    @property
    def is_lazy(self) -> bool:
        """Whether operations are recorded in a graph that :meth:`step_boundary` executes. All ranks must record the
        same graph, unless :meth:`run_apart` was called. Views and in-place updates cost copies."""
        return False

    @property
    def reads_are_free(self) -> bool:
        """Whether reading a tensor's value costs nothing, so that control flow may depend on it."""
        return False

    @property
    def has_point_to_point(self) -> bool:
        """Whether :meth:`start_send` and :meth:`start_receive` are available."""
        return False

    @property
    def has_uneven_all_to_all(self) -> bool:
        """Whether :meth:`all_to_all_uneven` is available."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether computation between ``start_*`` and ``wait()`` overlaps with the collective."""
        return False

    @property
    def has_values(self) -> bool:
        """Whether tensors have memory and values. Not in a dry run, whose tensors are on the meta device."""
        return True

    @property
    def sums_integers_exactly(self) -> bool:
        """Whether the device sums integers and booleans exactly. On a device that sums them in float32, which is exact
        to 2**24 only, the collectives of this class send them as float32 digits or gather them, so that results are
        exact in both cases."""
        return True

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the capabilities, which a :class:`PluginSpec` may require or conflict with: ``"lazy"``,
        ``"host-reads"``, ``"point-to-point"``, ``"uneven-all-to-all"``, ``"async"``."""
        offered = {
            "lazy": self.is_lazy,
            "host-reads": self.reads_are_free,
            "point-to-point": self.has_point_to_point,
            "uneven-all-to-all": self.has_uneven_all_to_all,
            "async": self.overlaps,
        }
        return frozenset(name for name, there in offered.items() if there)

    @property
    def missing(self) -> Mapping[str, str]:
        """Reasons why capabilities are missing, by name, for those that were probed; the same on every rank."""
        return {}

    # ---- groups ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        """Creates every group of ``partition`` and returns the group of this rank. Collective over all ranks.

        Args:
            partition: groups of global ranks that together contain every rank once.
            name: name of the group in messages.
        """

    def number(self, value: float) -> torch.Tensor:
        """Returns ``value`` as a float32 tensor without dims on the device. In a graph it is an input, not a
        constant."""
        import torch

        return torch.tensor(value, dtype=torch.float32, device=self.device)

    # ---- collectives on tensors --------------------------------------------------------------------------------------
    @communicates
    def all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> torch.Tensor:
        """Returns the element-wise reduction over the group, of the shape of ``tensor``, on every rank. **May reuse the
        memory of ``tensor``**, which must not be used afterwards."""
        return self.start_all_reduce(tensor, group, op).wait()

    @communicates
    def all_reduce_together(
        self, tensors: Sequence[torch.Tensor], group: Group, scale: float = 1.0
    ) -> list[torch.Tensor]:
        """Returns the sums over the group of several tensors of one dtype, times ``scale``, in one collective. **May
        reuse the memory of ``tensors``.**"""
        import torch

        flat = self.all_reduce(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), group)
        flat = flat * scale if scale != 1.0 else flat
        parts = flat.split([tensor.numel() for tensor in tensors])
        # Clone: on a lazy device, changing one view in place would rewrite all the others too.
        return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]

    @communicates
    def all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """Returns the concatenation along ``dim`` of the ranks' tensors, which must have equal shapes."""
        return self.start_all_gather(tensor, group, dim).wait()

    @communicates
    def reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """Returns this rank's chunk along ``dim`` of the sum over the group. The dim must be divisible by
        ``group.size``."""
        return self.start_reduce_scatter(tensor, group, dim).wait()

    @abstractmethod
    @communicates
    def start_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> Pending:
        """Starts :meth:`all_reduce`. ``tensor`` must not be changed before ``wait()``."""

    @abstractmethod
    @communicates
    def start_all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """Starts :meth:`all_gather`. ``tensor`` must not be changed before ``wait()``."""

    @communicates
    def start_all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, group: Group) -> Pending:
        """Starts an all-gather along dim 0 into a given tensor; the result is ``out``.

        Args:
            out: contiguous, with ``group.size`` times the elements of ``tensor`` and the same dtype.
            tensor: contiguous; may be this rank's chunk of ``out``.
        """
        pending = self.start_all_gather(tensor.reshape(-1), group)
        return Then(pending, lambda gathered: out.copy_(gathered.view(out.shape)))

    @abstractmethod
    @communicates
    def start_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """Starts :meth:`reduce_scatter`. ``tensor`` must not be changed before ``wait()``."""

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
        """Starts a reduce-scatter along dim 0 into a given tensor; the result is ``out``.

        Args:
            out: flat, with one ``group.size``-th of the elements of ``tensor``; the sum is rounded to the dtype of
                ``tensor``, as by :meth:`reduce_scatter`, then converted to that of ``out``.
            tensor: flat; must not be changed before ``wait()``.
            scale: factor that ``out`` is multiplied by at the end.
            scratch: memory like ``tensor`` that may be overwritten until then, so that none has to be allocated.
        """
        pending = self.start_reduce_scatter(tensor, group)
        return Then(pending, lambda reduced: out.copy_(reduced).mul_(scale))

    @abstractmethod
    @communicates
    def all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> torch.Tensor:
        """Sends chunk i along ``split_dim`` to the i-th rank and returns the received chunks, concatenated along
        ``concat_dim``."""

    @communicates
    def start_all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Pending:
        """Starts :meth:`all_to_all`. Computation before ``wait()`` overlaps with it if the backend :attr:`overlaps`.
        ``tensor`` must not be changed before ``wait()``."""
        return Done(self.all_to_all(tensor, group, split_dim, concat_dim))

    @communicates
    def all_to_all_uneven(
        self, tensor: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Sends ``sent[i]`` rows to the i-th rank, the first rows to the first rank and so on, and returns the
        ``received[i]`` rows of each, in the order of ranks. Available if the backend :attr:`has_uneven_all_to_all`.

        Args:
            tensor: ``[sum(sent), ...]``; the other dims and the dtype are equal on all ranks.
            group: the ranks.
            sent, received: numbers of rows, for each rank of the group; what one rank sends to another is what that one
                receives from it.

        Returns:
            ``[sum(received), ...]``.

        Raises:
            UsageError: if the backend does not have it.
            ValueError: if the counts do not fit the group or the tensor.
        """
        if group.size == 1:
            return tensor
        raise UsageError(
            f"The {self.name} backend cannot send a different number of rows to each rank.",
            why="shapes must be known before the values are, or the device's collectives send equal chunks",
            fix="pad the chunks to equal sizes and use all_to_all",
        )

    @abstractmethod
    @communicates
    def permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> torch.Tensor:
        """Returns the tensor of the rank ``shift`` positions before this one in the ring of the group's ranks."""

    def limit_rings(  # noqa: B027  most machines connect any two ranks
        self, problem: Callable[[Sequence[tuple[int, int]]], str | None]
    ) -> None:
        """Registers a function that says which permutations the machine cannot make by point-to-point messages.
        :meth:`permute` uses an all-gather for them.

        Args:
            problem: maps pairs of source and target rank to the reason why not, or to None if the permutation can be
                made.
        """

    @communicates
    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """Starts :meth:`permute`. Computation before ``wait()`` overlaps with it if the backend :attr:`overlaps`.
        ``tensor`` must not be changed before ``wait()``."""
        return Done(self.permute(tensor, group, shift))

    @abstractmethod
    @communicates
    def broadcast(self, tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
        """Returns the tensor of the rank at position ``source``. Shapes and dtypes must be equal on all ranks."""

    # ---- integers and booleans on devices without :attr:`sums_integers_exactly` --------------------------------------
    def _start_exact_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp) -> Pending:
        """Starts an exact all-reduce of integers or booleans; the sum of booleans is "any"."""
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
        """Starts an exact reduce-scatter of integers or booleans; the sum of booleans is "any". ``dim`` is not
        negative."""
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
        """Broadcasts integers or booleans on a device that implements a broadcast as a sum."""
        from neuron_accel.backends.movement import from_digits, to_digits

        if not _has_digits(tensor):
            return self.all_gather(tensor.unsqueeze(0), group)[source]
        return from_digits(self.broadcast(to_digits(tensor, 1), group, source), tensor.dtype, 1)

    @abstractmethod
    def chunk(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """Returns this rank's chunk of ``group.size`` equal chunks along ``dim``, without communication. May be a view
        of the input. On a lazy device the position is an input of the graph, not a constant, so that all ranks trace
        the same graph."""

    # ---- point to point, if the backend :attr:`has_point_to_point` ---------------------------------------------------
    @communicates
    def start_send(self, tensor: torch.Tensor, group: Group, target: int) -> Pending:
        """Starts sending ``tensor`` to the rank at position ``target``, which must receive the same shape and dtype.
        Messages between two ranks of a group arrive in order. ``wait()`` returns ``tensor``, which may then be written
        again."""
        raise UsageError(f"The {self.name} backend cannot send from rank to rank.")

    @communicates
    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, group: Group, source: int) -> Pending:
        """Starts receiving a tensor that the rank at position ``source`` sends to this rank. The result is a new
        tensor."""
        raise UsageError(f"The {self.name} backend cannot receive from a single rank.")

    # ---- activation checkpointing ------------------------------------------------------------------------------------
    def recompute(self, function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        """Calls ``function`` with activation checkpointing: its activations are not kept but recomputed in the backward
        pass.

        The second call gets the same inputs, random numbers and autocast state, and a compiler does not merge it with
        the first. As with ``use_reentrant=False`` of :func:`torch.utils.checkpoint.checkpoint`, each parameter's
        gradient is accumulated once. Under :func:`torch.no_grad` this is a plain call.

        Args:
            function: a function that depends on ``inputs``, ``keywords``, parameters and buffers only. Its side effects
                happen twice (updates of a batch norm's running statistics, for example).
            inputs, keywords: arguments of the function. Tensors among them, also inside tuples, lists and dicts, may
                require gradients or not.

        Returns:
            The return value of ``function``.

        Raises:
            UsageError: in the backward pass, on a lazy device, if the second call saved other tensors than the first.
                On other devices PyTorch raises its own error.
        """
        from neuron_accel.backends.recompute import checkpoint_eagerly

        return checkpoint_eagerly(function, inputs, keywords)

    # ---- the order of a compiled graph, and tensors without memory in it ---------------------------------------------
    def fence(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies of ``tensors`` behind one optimization barrier: a compiler computes none of them before all of
        ``tensors`` exist, and does not merge what is computed from them with the same computation elsewhere. Not
        differentiable. On devices that run one operation after another, the tensors themselves."""
        return list(tensors)

    def placeholder(self, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape and dtype of ``like`` on this device, without values and without memory for
        them: reading it is an error.

        Raises:
            UsageError: if the device has no such tensors.
        """
        raise UsageError(
            f"The {self.name} backend has no tensors without memory.", fix="use it on lazy devices (Backend.is_lazy)"
        )

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` has no values: it is a :meth:`placeholder` that was not written to since."""
        return False

    # ---- collectives on objects --------------------------------------------------------------------------------------
    @abstractmethod
    @communicates
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        """Returns the picklable ``value`` of every rank, in the order of the group."""

    @abstractmethod
    @communicates
    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        """Returns the ``value`` of the rank at position ``source``."""

    @abstractmethod
    @communicates
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    # ---- steps and values --------------------------------------------------------------------------------------------
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``tensor`` on the CPU. A lazy device executes its pending graph first, so every rank must
        call this at the same point."""
        return tensor.detach().to("cpu", copy=True)

    @communicates  # noqa: B027  most devices have nothing to do
    def step_boundary(self) -> None:
        """Marks the end of a training step. A lazy device executes its pending graph."""

    def run_apart(self, group: Group) -> None:  # noqa: B027  eager devices need nothing for this
        """Declares that from now on ranks at different positions of ``group`` run different computations, as the stages
        of a pipeline do; ranks at the same position of all groups of its partition run the same one. A lazy device then
        makes each collective between different positions a graph of its own: a collective completes only if all
        participants execute the same graph."""

    def collects(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether reading one of ``tensors`` would execute a pending graph. Always False on eager devices."""
        return False

    def after_step(self, action: Callable[[], None], *, reads_graph: bool) -> None:
        """Calls ``action``, at once or, on a lazy device, after the next :meth:`step_boundary`.

        Args:
            action: is called without arguments; actions keep their order.
            reads_graph: whether ``action`` reads a tensor of the pending graph. If it does, or if an earlier action is
                still waiting, a lazy device defers the call.
        """
        action()

    @property
    def device_memory(self) -> tuple[int, int] | None:
        """Bytes in use on the device, and the largest number so far; None if the device does not say, or is the
        host."""
        return None

    @property
    def compilations(self) -> int | None:
        """Number of graphs compiled so far; None on devices without a compiler."""
        return None

    def board(self) -> Board:
        """Returns the :class:`Board` that all ranks share."""
        return LocalBoard()

    def shutdown(self) -> None:  # noqa: B027  most devices have nothing to release
        """Releases groups and connections. Idempotent."""

    # ---- counting ----------------------------------------------------------------------------------------------------
    @contextmanager
    def record(self) -> Iterator[Traffic]:
        """Records the collectives on tensors that are issued inside the context. Collectives on objects are not
        recorded."""
        traffic = Traffic()
        self._recordings.append(traffic)
        try:
            yield traffic
        finally:
            self._recordings.remove(traffic)

    @contextmanager
    def record_totals(self) -> Iterator[TrafficTotals]:
        """Counts the collectives that :meth:`record` records, by collective and group, without keeping each of them:
        for measurements that last as long as a training."""
        totals = TrafficTotals()
        self._totals.append(totals)
        try:
            yield totals
        finally:
            self._totals = [each for each in self._totals if each is not totals]

    def observe(self, observer: CollectiveObserver) -> Callable[[], None]:
        """Registers ``observer`` for all following collectives. Returns a function that removes it."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer) if observer in self._observers else None

    def announce(self, op: str, group: Group) -> None:
        """Notifies the observers of an operation ``op`` of the group that is not a collective on tensors."""
        if group.size > 1:
            sys.audit("neuron_accel.collective", op)
            for observer in self._observers:
                observer.issued(op, group, 0, deferred=False)

    def _note(self, op: str, group: Group, sent: int, dtype: torch.dtype | None = None) -> None:
        sys.audit("neuron_accel.collective", op)
        for observer in self._observers:
            observer.issued(op, group, sent, deferred=self.is_lazy)
        opened = self.ranges.collective
        if opened is not None:
            found = opened.arguments
            found["op"], found["group"], found["bytes"] = op, group.name, sent
        for totals in self._totals:
            totals.add(op, group.name, sent)
        for traffic in self._recordings:
            traffic.transfers.append(
                Transfer(op=op, group=group.name, size=group.size, sent=sent, dtype=dtype, ranks=group.ranks)
            )

    def _begin_sum(
        self, group: Group, sent: Sequence[torch.Tensor], *, scattered: bool = False
    ) -> Callable[[Sequence[torch.Tensor], float], None]:
        """Notifies the observers of a sum. Returns a function to be called with its result and the factor by which it
        was multiplied."""
        if not self._observers or not (sent[0].is_floating_point() or sent[0].is_complex()):
            return _ignore
        asked = [observer.summing(group, sent, scattered=scattered) for observer in self._observers]
        ends = [end for end in asked if end is not None]

        def finish(received: Sequence[torch.Tensor], scale: float) -> None:
            for end in ends:
                end(received, scale)

        return finish if ends else _ignore


def _ignore(received: Sequence[torch.Tensor], scale: float) -> None:
    """Of a sum that no observer watches."""


def _in_range(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a range of each call of a method in which other ranks take part."""
    op = name.removeprefix("start_").removesuffix("_into").removesuffix("_together")
    on_tensors = op not in _ON_OBJECTS

    @functools.wraps(method)
    def call(self: Backend, *args: Any, **kwargs: Any) -> Any:
        ranges = self.ranges
        if not ranges.observers:
            return method(self, *args, **kwargs)
        if op == "step_boundary":
            if not self.is_lazy:
                return method(self, *args, **kwargs)
            with ranges.open("execute the graph", "part", part="device"):
                return method(self, *args, **kwargs)
        group = None
        for each in (*args, *kwargs.values()):
            if isinstance(each, Group):
                group = each
                break
        alone = self.world_size == 1 if group is None else len(group.ranks) == 1
        if alone or (on_tensors and self.is_lazy):
            return method(self, *args, **kwargs)
        outer, where = ranges.collective, "world" if group is None else group.name
        if outer is not None:  # a collective that is made of this one
            result = method(self, *args, **kwargs)
            found = outer.arguments
        else:
            with ranges.open(op, "collective", part="communication", op=op, group=where) as opened:
                result = method(self, *args, **kwargs)
            found = opened.arguments
        if isinstance(result, Pending) and not isinstance(result, (Done, _Observed)):
            return _Observed(result, ranges, found["op"], found["group"])
        return result

    return call


_ON_OBJECTS = frozenset({"all_gather_object", "broadcast_object", "barrier"})
COLLECTIVES = frozenset(name for name, value in vars(Backend).items() if hasattr(value, "communicates"))
"""Names of the methods in which other ranks take part."""


def _has_digits(tensor: torch.Tensor) -> bool:
    """Whether the integers of ``tensor`` are sent as digits. 64-bit integers are gathered, as the Neuron compiler does
    not support shifting them."""
    return tensor.dtype.itemsize < 8

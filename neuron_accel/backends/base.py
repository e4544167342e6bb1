# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: a device, process groups, and collectives between the ranks."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from neuron_accel.backends.board import Board, LocalBoard
from neuron_accel.backends.events import Events, Traffic
from neuron_accel.backends.group import Group, Pending, Then
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    import torch

    from neuron_accel.backends.movement import ReduceOp
    from neuron_accel.backends.randomness import DeviceGenerator


# ---- The interface between strategies and the machine ----------------------------------------------------------------
# Strategies use devices and collectives only through a :class:`Backend`. Collectives are functional: they return their
# result and do not change their input unless they say so, since a lazy device requires this. The result may be the
# input itself if nothing had to be sent: treat both as read-only, or clone. These collectives are not differentiable;
# :mod:`neuron_accel.backends.autograd` has differentiable ones built on them. In a group of one rank every collective
# is the identity and sends nothing.


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

    rank: int
    world_size: int
    device: torch.device
    """The device of tensors."""

    is_lazy: bool = False
    """Whether operations are recorded in a graph that :meth:`step_boundary` executes. All ranks must record the same
    graph, unless :meth:`run_apart` was called. Views and in-place updates cost copies."""
    reads_are_free: bool = False
    """Whether reading a tensor's value costs nothing, so that control flow may depend on it."""
    has_point_to_point: bool = False
    """Whether :meth:`start_send` and :meth:`start_receive` are available."""
    has_uneven_all_to_all: bool = False
    """Whether :meth:`all_to_all_uneven` is available."""
    overlaps: bool = False
    """Whether computation between ``start_*`` and ``wait()`` overlaps with the collective."""
    has_values: bool = True
    """Whether tensors have memory and values. Not in a dry run, whose tensors are on the meta device."""
    sums_integers_exactly: bool = True
    """Whether the device sums integers and booleans exactly. On a device that sums them in float32, which is exact to
    2**24 only, the collectives of this class send them as float32 digits or gather them, so that results are exact in
    both cases."""

    imitating: bool = False
    """Whether this is inside a collective of a dry run, where operations on tensors stand for other ranks and the
    network."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets torch.compile end its graph before a collective and begin another one after it. It would trace into the
        process group and the exchange of objects otherwise, which fails or not with what they are made of."""
        super().__init_subclass__(**options)
        import torch

        for name in COLLECTIVES:
            method = getattr(cls, name)
            if name in vars(cls) or method is getattr(Backend, name):
                setattr(cls, name, torch.compiler.disable(method, reason=OUTSIDE_GRAPHS))

    def __init__(self) -> None:
        self.events = Events()
        """What happens in the run. Each collective is an event, and each wait for one that was started."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.world_size} on {self.device}>"

    # ---- device and capabilities -------------------------------------------------------------------------------------
    @property
    def timeout(self) -> timedelta:
        """The time that a collective may take."""
        return timedelta(minutes=30)

    @property
    def generator(self) -> DeviceGenerator:
        """The random number generator of the device."""
        from neuron_accel.backends.randomness import DeviceGenerator

        return DeviceGenerator(self.device)

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
            partition: groups of global ranks that together contain every rank once; anything else is a ValueError.
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
        ``group.size``, or a LayoutError is raised."""
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

    @communicates
    def all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> torch.Tensor:
        """Sends chunk i along ``split_dim`` to the i-th rank and returns the received chunks, concatenated along
        ``concat_dim``. ``split_dim`` must be divisible by ``group.size``, or a LayoutError is raised."""
        return self.start_all_to_all(tensor, group, split_dim, concat_dim).wait()

    @abstractmethod
    @communicates
    def start_all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Pending:
        """Starts :meth:`all_to_all`. ``tensor`` must not be changed before ``wait()``."""

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

    @communicates
    def permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> torch.Tensor:
        """Returns the tensor of the rank ``shift`` positions before this one in the ring of the group's ranks."""
        return self.start_permute(tensor, group, shift).wait()

    def limit_rings(  # noqa: B027  most machines connect any two ranks
        self, problem: Callable[[Sequence[tuple[int, int]]], str | None]
    ) -> None:
        """Registers a function that says which permutations the machine cannot make by point-to-point messages.
        :meth:`permute` uses an all-gather for them.

        Args:
            problem: maps pairs of source and target rank to the reason why not, or to None if the permutation can be
                made.
        """

    @abstractmethod
    @communicates
    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """Starts :meth:`permute`. ``tensor`` must not be changed before ``wait()``."""

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

    @communicates
    def gather_object(self, value: Any, group: Group, join: Callable[[Any, Any], Any] | None = None) -> Any:
        """Returns the picklable ``value`` of every rank on the first rank, and None on the others: a list, in the order
        of the group, or all joined in pairs, in this order. Where the backend can do that, the work of the other ranks
        does not grow with the group, or if they ``join`` (which may change its first argument), as its logarithm."""
        everyone = self.all_gather_object(value, group)
        if group.index:
            return None
        return everyone if join is None else functools.reduce(join, everyone)

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

    def after_step(self, action: Callable[[], object], *, reads_graph: bool) -> None:
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

    @property
    def compile_seconds(self) -> float | None:
        """Seconds that the compiler has taken so far; None on devices that do not say."""
        return None

    def graph_of(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The fingerprint of the pending graph that computes ``tensors``; None on devices that are not lazy."""
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
        leave = self.events.observe(traffic)
        try:
            yield traffic
        finally:
            leave()


COLLECTIVES = frozenset(name for name, value in vars(Backend).items() if hasattr(value, "communicates"))
"""Names of the methods in which other ranks take part."""


def _has_digits(tensor: torch.Tensor) -> bool:
    """Whether the integers of ``tensor`` are sent as digits. 64-bit integers are gathered, as the Neuron compiler does
    not support shifting them."""
    return tensor.dtype.itemsize < 8

"""Activation checkpointing: results are not kept for the backward pass, but computed again in it.

On eager devices PyTorch's own does it, in its non-re-entrant form. It cannot be used on a lazy device, for two reasons.
It asks torch for a module of the device's name (``torch.xla``), which does not exist. And what it computes again is
written into the graph a second time with the same operands, so the compiler's common-subexpression elimination merges
both, and every activation is kept after all.

:class:`Recomputation` does the same for a lazy device. It is not re-entrant either: autograd records the original call,
the tensors that it saves are dropped (:class:`torch.autograd.graph.saved_tensors_hooks`), and when the backward pass
asks for the first of them, the call is repeated to get them back. So a parameter's gradient arrives once, where and
when it would without. What is repeated starts from copies of the inputs that went through an optimization barrier
together with the gradient of the output: the compiler neither merges it with the original nor begins it before that
gradient exists. It draws the same random numbers as the original, under the same autocast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuron_accel.backends.randomness import DeviceGenerator

Barrier = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Copies of tensors of the device that the compiler takes for other ones than the originals, and makes together."""


def checkpoint_eagerly(function: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Activation checkpointing by PyTorch, non-re-entrant."""
    from torch.utils.checkpoint import checkpoint

    # All are positional: checkpoint has keywords of its own, and reads the device off positional arguments.
    names = list(keywords)

    def call(*given: Any) -> Any:
        return function(*given[len(names) :], **dict(zip(names, given, strict=False)))

    return checkpoint(call, *keywords.values(), *inputs, use_reentrant=False)


def checkpoint_lazily(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    barrier: Barrier,
    generator: DeviceGenerator,
) -> Any:
    """Activation checkpointing on a lazy device.

    Args:
        barrier: of the device.
        generator: of the device's random numbers.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **keywords)
    return Recomputation(function, barrier, generator).run(inputs, keywords)


class Recomputation:
    """One call, recorded by autograd without the tensors that it saves.

    Args:
        function: what is called, once now and once in each backward pass.
        barrier: of the device.
        generator: of the device's random numbers.
    """

    def __init__(self, function: Callable[..., Any], barrier: Barrier, generator: DeviceGenerator) -> None:
        self._function, self._barrier = function, barrier
        self._surroundings = Surroundings(generator)
        self._saved: list[tuple[torch.Size, torch.dtype]] = []  # what autograd saved, without the values
        self._inputs: Inputs | None = None
        self._fenced: list[torch.Tensor] | None = None  # the inputs behind the barrier, during a backward pass
        self._again: list[torch.Tensor] = []  # what autograd saved, computed again, during a backward pass

    def run(self, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Calls the function. What it returns keeps this object alive as long as a backward pass may need it."""
        self._inputs = Inputs(inputs, keywords)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            outputs = self._function(*inputs, **keywords)
        self._surroundings.leave()
        given = {id(tensor) for tensor in tree_leaves((list(inputs), dict(keywords)))}
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None and id(output) not in given:
                output.register_hook(_arrival(weakref.ref(self)))
        return outputs

    # ---- the forward pass --------------------------------------------------------------------------------------------
    def _pack(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    # ---- the backward pass -------------------------------------------------------------------------------------------
    def fence(self, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """Puts the inputs behind a barrier, with the gradient that arrived first; returns that gradient."""
        if self._fenced is not None:
            return gradient
        assert self._inputs is not None
        kept = self._inputs.tensors
        lazy = [tensor for tensor in kept if self._is_lazy(tensor)]
        with_gradient = gradient is not None and self._is_lazy(gradient)
        with torch.no_grad():
            behind = self._barrier([*lazy, *([gradient] if with_gradient else [])])  # type: ignore[list-item]
        if with_gradient:
            gradient = behind.pop()
        copies = iter(behind)
        self._fenced = [next(copies) if self._is_lazy(tensor) else tensor for tensor in kept]
        if torch._C._current_graph_task_id() != -1:
            # Weakly: autograd's thread may release callbacks, and of what they hold, after backward has returned.
            torch.autograd.Variable._execution_engine.queue_callback(_end(weakref.ref(self)))
        return gradient

    def _is_lazy(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def _unpack(self, index: int) -> torch.Tensor:
        if not self._again:
            self.fence()
            self._repeat()
        tensor = self._again[index]
        if torch._C._current_graph_task_id() == -1:
            self.forget()  # asked for outside of a backward pass, whose end would be the time
        return tensor

    def _repeat(self) -> None:
        assert self._inputs is not None
        assert self._fenced is not None
        inputs, keywords = self._inputs.rebuild(self._fenced)
        found: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.detach())
            if len(found) == len(self._saved):
                raise _Complete(self)
            return found[-1]

        try:
            with (
                self._surroundings.restored(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(collect, lambda tensor: tensor),
            ):
                self._function(*inputs, **keywords)
        except _Complete as complete:
            if complete.of is not self:
                raise
        if [(tensor.shape, tensor.dtype) for tensor in found] != self._saved:
            raise UsageError(
                "A function computed something else when it was run again in the backward pass.",
                where=f"activation checkpointing of {_name(self._function)}",
                why=f"autograd saved {len(self._saved)} tensors the first time and {len(found)} the second, or of "
                "other shapes or dtypes; it depends on something that changed between the two",
                fix="checkpoint only what depends on its inputs and parameters only",
            )
        self._again = found

    def forget(self) -> None:
        """A backward pass is over. Tensors that stayed alive would become outputs of the device's graph."""
        self._again, self._fenced = [], None


class _Complete(BaseException):
    """All that autograd saved is there; the rest of the function need not run. No function catches it by accident."""

    def __init__(self, of: Recomputation) -> None:
        super().__init__()
        self.of = of


def _arrival(recomputation: weakref.ref[Recomputation]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """A hook of an output. It holds the recomputation weakly: what autograd saved holds it as long as it is needed, and
    the graph of a loss that the caller keeps would hold it, and its inputs, longer."""

    def arrived(gradient: torch.Tensor) -> torch.Tensor | None:
        found = recomputation()
        return gradient if found is None else found.fence(gradient)

    return arrived


def _end(recomputation: weakref.ref[Recomputation]) -> Callable[[], None]:
    def ended() -> None:
        found = recomputation()
        if found is not None:
            found.forget()

    return ended


class Inputs:
    """The arguments of a call: snapshots of tensors, which later in-place changes do not reach, and the rest as it is.

    Snapshots are saved as autograd saves tensors, so that a call inside another one that is recomputed does not keep
    them either. Tensors in tuples, lists and dicts are found; those in other objects are not, and go in as they are.
    """

    def __init__(self, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        self._arguments = (list(inputs), dict(keywords))
        found: dict[int, torch.Tensor] = {}
        _map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), self._arguments)
        self._requires_grad = [tensor.requires_grad for tensor in found.values()]
        with torch.no_grad():
            snapshots = [tensor.detach().clone() for tensor in found.values()]
        self._holder = _Keep.apply(torch.empty(0, requires_grad=True), *snapshots)
        places = {key: _Place(index) for index, key in enumerate(found)}
        self._arguments = _map_tensors(lambda tensor: places[id(tensor)], self._arguments)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The snapshots; a tensor that was given twice is there once."""
        return list(self._holder.grad_fn.saved_tensors)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these tensors in place of the snapshots, as leaves of a new graph."""
        leaves = [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self._requires_grad, strict=True)
        ]
        return tree_map_only(_Place, lambda place: leaves[place.index], self._arguments, is_leaf=_is_foreign)


class _Place:
    """Stands for a tensor among arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Keep(torch.autograd.Function):
    """Saves tensors in a node that no backward pass visits."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this node leads nowhere")


def _map_tensors(change: Callable[[torch.Tensor], Any], arguments: Any) -> Any:
    return tree_map_only(torch.Tensor, change, arguments, is_leaf=_is_foreign)


def _is_foreign(value: Any) -> bool:
    """Whether a value is not a plain container: others (a cache) may be changed by a call, and are not rebuilt."""
    return not (isinstance(value, (tuple, list)) or type(value) is dict)


class Surroundings:
    """What a call finds beside its arguments: random numbers of host and device, and autocast.

    Generators are only set back if the call drew from them: on XLA that costs a transfer.

    Args:
        generator: of the device.
    """

    def __init__(self, generator: DeviceGenerator) -> None:
        self._generator = generator
        self._host, self._device = torch.get_rng_state(), generator.get_state()
        self._draws = (False, False)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "xla")
        ]

    def leave(self) -> None:
        """The call has returned."""
        self._draws = (
            not torch.equal(self._host, torch.get_rng_state()),
            self._device != self._generator.get_state(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The same inside as when this object was made; outside, nothing changes."""
        host, device = self._draws
        now: tuple[Any, Any] = (
            torch.get_rng_state() if host else None,
            self._generator.get_state() if device else None,
        )
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            try:
                if host:
                    torch.set_rng_state(self._host)
                if device:
                    self._generator.set_state(self._device)
                yield
            finally:
                if host:
                    torch.set_rng_state(now[0])
                if device:
                    self._generator.set_state(now[1])


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__

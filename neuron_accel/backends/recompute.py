# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations are not kept for the backward pass but recomputed in it.

On eager devices this is :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``. It cannot be used on a
lazy device, for two reasons. It requires a module of torch with the name of the device (``torch.xla``), which does not
exist. And the recomputation is recorded in the same graph with the same operands, so the compiler's
common-subexpression elimination merges it with the original, and all activations are kept after all.

:class:`Recomputation` does the same on a lazy device. It is not re-entrant either: autograd records the original call,
the tensors that autograd saves are dropped (:class:`torch.autograd.graph.saved_tensors_hooks`), and when the backward
pass needs the first of them, the call is repeated to recompute them. A parameter's gradient is thus accumulated once,
at the same point as without checkpointing. The recomputation starts from copies of the inputs that passed an
optimization barrier together with the gradient of the output, so that the compiler neither merges it with the original
nor schedules it before that gradient exists. It draws the same random numbers as the original, under the same autocast
state.
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
"""Returns copies of tensors that passed one optimization barrier: the compiler does not merge them with the
originals."""


def checkpoint_eagerly(function: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls ``function`` under :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``."""
    from torch.utils.checkpoint import checkpoint

    # All arguments are positional: checkpoint has keywords of its own, and infers the device from positional arguments.
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
    """Calls ``function`` with activation checkpointing on a lazy device.

    Args:
        barrier: optimization barrier of the device.
        generator: random number generator of the device.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **keywords)
    return Recomputation(function, barrier, generator).run(inputs, keywords)


class Recomputation:
    """One call of a function that autograd records without keeping the saved tensors.

    Args:
        function: the function, called once in the forward pass and once in each backward pass.
        barrier: optimization barrier of the device.
        generator: random number generator of the device.
    """

    def __init__(self, function: Callable[..., Any], barrier: Barrier, generator: DeviceGenerator) -> None:
        self._function, self._barrier = function, barrier
        self._surroundings = Surroundings(generator)
        self._saved: list[tuple[torch.Size, torch.dtype]] = []  # shape and dtype of the tensors that autograd saved
        self._inputs: Inputs | None = None
        self._fenced: list[torch.Tensor] | None = None  # the inputs behind the barrier, during a backward pass
        self._again: list[torch.Tensor] = []  # the saved tensors, recomputed, during a backward pass

    def run(self, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Calls the function and returns its result, whose autograd graph keeps this object alive."""
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
        """Passes the inputs through a barrier together with ``gradient``, the first one that arrives; returns that
        gradient."""
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
            # A weak reference: autograd's thread may release callbacks, and what they hold, after backward has
            # returned.
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
            self.forget()  # outside of a backward pass no callback at its end does this
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
                "A checkpointed function ran differently when it was called again in the backward pass.",
                where=f"activation checkpointing of {_name(self._function)}",
                why=f"autograd saved {len(self._saved)} tensors in the first call and {len(found)} in the second, or "
                "tensors of other shapes or dtypes; the function depends on something that changed between the two",
                fix="checkpoint only functions that depend on nothing but their inputs and parameters",
            )
        self._again = found

    def forget(self) -> None:
        """Releases the recomputed tensors after a backward pass; otherwise they would be outputs of the device's
        graph."""
        self._again, self._fenced = [], None


class _Complete(BaseException):
    """Raised when all saved tensors are recomputed, so that the rest of the function is skipped. A BaseException, so
    that the function does not catch it."""

    def __init__(self, of: Recomputation) -> None:
        super().__init__()
        self.of = of


def _arrival(recomputation: weakref.ref[Recomputation]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Returns a hook for an output. It has a weak reference to the recomputation, which autograd's saved tensors keep
    alive as long as needed; otherwise a loss that the caller keeps would keep the inputs alive."""

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
    """The arguments of a call: copies of tensors, which later in-place changes do not affect, and all other arguments.

    The copies are saved by autograd, so that a call nested in another checkpointed call does not keep them either.
    Tensors in tuples, lists and dicts are copied; those in other objects are passed as they are.
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
        """The copies, one for each distinct tensor."""
        return list(self._holder.grad_fn.saved_tensors)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments with ``tensors`` in place of the copies, as leaves of a new autograd graph."""
        leaves = [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self._requires_grad, strict=True)
        ]
        return tree_map_only(_Place, lambda place: leaves[place.index], self._arguments, is_leaf=_is_foreign)


class _Place:
    """Placeholder of a tensor among the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Keep(torch.autograd.Function):
    """Saves tensors in an autograd node that no backward pass visits."""

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
    """Returns whether ``value`` is not a plain container. Other containers, such as a cache, may be changed by the call
    and are not rebuilt."""
    return not (isinstance(value, (tuple, list)) or type(value) is dict)


class Surroundings:
    """Global state of a call: the random number generators of CPU and device, and autocast.

    Generators are restored only if the call drew from them, since restoring costs a transfer on XLA.

    Args:
        generator: random number generator of the device.
    """

    def __init__(self, generator: DeviceGenerator) -> None:
        self._generator = generator
        self._host, self._device = torch.get_rng_state(), generator.get_state()
        self._draws = (False, False)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "xla")
        ]

    def leave(self) -> None:
        """Is called after the call has returned, and records which generators it drew from."""
        self._draws = (
            not torch.equal(self._host, torch.get_rng_state()),
            self._device != self._generator.get_state(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context with the state that this object was created in; the state before is restored at its end."""
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

# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop uses between forward passes, backward passes and steps, while a rank has a shard of them, or the
gradient of their use is a partial sum.

There, and only there, such a parameter has the class :class:`Outside`. Element-wise functions compute with the shard, a
loss of a sum, mean or norm with that of all shards; any other function of values is an error, which says what to do.
A parameter that every rank has in full, and whose gradient is summed over ranks that compute different positions,
counts once. Within a step parameters are of torch's class, so that it costs two assignments for each of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from neuron_accel.backends.autograd import reduce_from_group
from neuron_accel.engine.shards.released import METADATA, VALUES
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord

_NAMES = """
    __set__ bfloat16 clone contiguous copy cpu cuda detach divide double float grad half multiply rdiv rpow subtract to
    type where
"""
_ELEMENTWISE = frozenset(_NAMES.split())
"""Functions of one element at a time that torch's tags do not name so."""

_LIBRARIES = frozenset({"accelerate", "peft", "torch", "transformers"})
"""Packages whose code acts for its caller."""


def acting(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames, from the innermost on, of code that does not only act for its caller."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def is_of_this_package(frame: FrameType) -> bool:
    """Whether a frame is of this package or of one of its plugins."""
    return str(frame.f_globals.get("__name__")).startswith("neuron_accel")


@dataclass(frozen=True, eq=False)
class _Use:
    """What a parameter is, where it is used.

    Args:
        record: the parameter.
        run: the run.
    """

    record: ParameterRecord
    run: Run

    def total(self, local: torch.Tensor) -> torch.Tensor:
        """The sum of the elements of all shards, each counted once, 0-dim. Collective."""
        layout, run = self.record.layout, self.run
        parts = [local[piece.local_slices].sum() for piece in layout.pieces(run.coordinates)]
        mine = torch.stack(parts).sum() if parts else local.sum() * 0
        total = reduce_from_group(mine, run.backend, run.group(*layout.axes))
        return total - (total * (1 - 1 / layout.replicas)).detach()  # each replica has the gradient in full

    def once(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter, for a use that is equal on the ranks over which its gradient is summed."""
        size = self.run.group(*self.record.partial_axes).size
        return parameter if size == 1 else parameter / size + (parameter * (1 - 1 / size)).detach()

    def is_inside(self) -> bool:
        """Whether this package, a plugin or the module of the parameter uses it."""
        frame: FrameType | None = sys._getframe(2)
        if is_of_this_package(next(acting(frame))):
            return True
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and any(p is self.record.current for p in module._parameters.values()):
                return True
            frame = frame.f_back
        return False

    def refuse(self, name: str, of: str, why: str = "each rank keeps a shard of it") -> NoReturn:
        record = self.record
        gradient = of == "gradient"
        raise UsageError(
            f"The {of} {record.fqn!r}, of which this rank has a shard, is used outside of its module, by `{name}`.",
            where=f"{tuple(record.layout.local_shape)} of {record.layout.shape}, sharded over "
            f"{', '.join(record.layout.axes)}",
            why=f"{why}; the result would be another one on each of them",
            fix="take norms from accelerator.clip_grad_norm_(parameters, max_norm), with max_norm=inf to clip nothing, "
            "and full gradients from accelerator.get_gradients(model)"
            if gradient
            else "call the module in place of a product with its weight; take full weights from "
            "accelerator.get_state_dict(model), and save with accelerator.save_model or save_state; element-wise "
            "functions of the weight, and sums, means and norms of these in a loss, are possible",
        )


class _ShardValues:
    _use: _Use

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        used = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, _ShardValues)]
        first = next((each for each in used if each._use.record.layout.axes), used[0])
        use, sharded = first._use, bool(first._use.record.layout.axes)
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA or (name == "__reduce_ex__" and not sharded):
                return func(*args, **kwargs)
            if name == "__get__" and func not in VALUES:
                result = func(*args, **kwargs)
                return _as_shard(result, use) if sharded and func is _DATA else result
            partial = any(each._use.record.partial_axes for each in used) and torch.is_grad_enabled()
            if partial and not name.endswith("_") and not use.is_inside():
                args, kwargs = tree_map_only(Outside, lambda p: p._use.once(p), (args, kwargs))
            if not sharded:
                return func(*args, **kwargs)
            if _is_elementwise(name):
                try:
                    result = func(*args, **kwargs)
                except RuntimeError as error:
                    if "size of tensor" not in str(error):
                        raise
                    use.refuse(name, _kind(first), "the other tensor is not of the shard's shape")
                return tree_map_only(
                    torch.Tensor, lambda t: t if any(t is a for a in args) else _as_shard(t, use), result
                )
            if use.is_inside():
                return func(*args, **kwargs)
            reduced = _reduced(name, args, kwargs, use)
            return use.refuse(name, _kind(first)) if reduced is None else reduced


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], use: _Use) -> torch.Tensor | None:
    """The sum, mean or norm of all elements of a weight, in a loss, which all ranks compute; else None."""
    values, options = args[0], (*args[1:], *kwargs.values())
    wanted = isinstance(values, torch.Tensor) and values.requires_grad and torch.is_grad_enabled()
    if not wanted or values.shape != use.record.layout.local_shape:
        return None
    if name in ("sum", "mean") and not options:
        return use.total(values) / (1 if name == "sum" else math.prod(use.record.layout.shape))
    if name in ("norm", "linalg_vector_norm") and all(option in (2, "fro", None, False) for option in options):
        return use.total(values.square()).sqrt()
    return None


def _is_elementwise(name: str) -> bool:
    plain = name.removeprefix("_foreach").strip("_")
    operator = None if plain in ("max", "min") else getattr(torch.ops.aten, plain, None)  # of one tensor
    return (
        plain in _ELEMENTWISE
        or name in _ELEMENTWISE
        or (
            operator is not None
            and any(torch.Tag.pointwise in getattr(operator, each).tags for each in operator.overloads())
        )
    )


def _kind(values: Any) -> str:
    return "gradient" if isinstance(values, ShardTensor) and values._is_gradient else "weight"


def _as_shard(tensor: torch.Tensor, use: _Use, *, is_gradient: bool = False) -> ShardTensor:
    shard = tensor.as_subclass(ShardTensor)
    shard._use, shard._is_gradient = use, is_gradient
    return shard


class Outside(_ShardValues, nn.Parameter):
    """A parameter between steps."""

    @property
    def grad(self) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = torch.Tensor.grad.__get__(self)  # type: ignore[union-attr]
            if type(gradient) is not torch.Tensor or not self._use.record.layout.axes:
                return gradient
            return _as_shard(gradient, self._use, is_gradient=True)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.as_subclass(torch.Tensor) if isinstance(value, ShardTensor) else value
            torch.Tensor.grad.__set__(self, plain)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            values = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = copied = nn.Parameter(values, self.requires_grad)
        return copied


class ShardTensor(_ShardValues, torch.Tensor):
    """What an element-wise function returns for a shard, and the gradient of one."""

    _is_gradient: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return memo.setdefault(id(self), _as_shard(self.detach().clone(), self._use, is_gradient=self._is_gradient))


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class OutsideUse:
    """The parameters of a run's models that have the class :class:`Outside` while none of its code runs.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._uses: list[_Use] = []
        self._depth = 0

    def watch(self, model: PreparedModel) -> None:
        """Begins for the parameters of a model. Not on lazy devices, whose ranks all record one graph."""
        run = self._run
        if not run.backend.has_values or run.backend.is_lazy or model.gathers_weights:
            return
        uses = [
            _Use(record, run)
            for record in model.parameters
            if record.weights is None
            and {*record.layout.axes} <= {*run.mesh.model_axes}
            and run.group(*record.layout.axes, *record.partial_axes).size > 1
        ]
        if uses:
            self._uses += uses
            inside = _Passes(torch.compiler.disable(self._begin), torch.compiler.disable(self._end))
            model.handles.append(model.module.register_forward_pre_hook(inside.begin, prepend=True))
            model.handles.append(model.module.register_forward_hook(inside.end, always_call=True))
            model.handles.append(_Watched(self, uses))
            self._end(0)

    def forget(self, uses: Sequence[_Use]) -> None:
        """Ends for parameters of a model that is released."""
        with self.suspended():
            self._uses = [use for use in self._uses if not any(use is each for each in uses)]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which parameters have torch's class."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        self._depth += 1
        for use in self._uses if self._depth == 1 else ():
            if type(parameter := use.record.current) is Outside:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                del parameter._use

    def _end(self, by: int = 1) -> None:
        self._depth = max(0, self._depth - by)
        for use in self._uses if not self._depth else ():
            if type(parameter := use.record.current) is nn.Parameter:
                parameter.__class__ = Outside
                parameter._use = use  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Watched:
    """A handle of the uses of one model's parameters."""

    outside_use: OutsideUse
    uses: Sequence[_Use]

    def remove(self) -> None:
        self.outside_use.forget(self.uses)


class _Passes:
    """The hooks of a model's forward passes, which a copy of the model does not have in effect."""

    def __init__(self, begin: Callable[[], None] | None = None, end: Callable[[], None] | None = None) -> None:
        self._begin, self._end = begin, end

    def begin(self, *_: Any) -> None:
        if self._begin is not None:
            self._begin()

    def end(self, *_: Any) -> None:
        if self._end is not None:
            self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Passes:
        return _Passes()

    def __reduce__(self) -> Any:
        if self._begin is None:
            return _Passes, ()
        raise UsageError(
            "A prepared model, of which this rank has a shard, cannot be pickled.",
            why="a file with one rank's shard would not be loaded by others",
            fix="save with accelerator.save_model or save_state",
        )

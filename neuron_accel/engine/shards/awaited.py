# SPDX-License-Identifier: Apache-2.0
"""Weights that are still being gathered when the optimizer's step returns, and are waited for where they are used.

All buckets are sent at the end of the step, in the order in which the model needs them: first what is in no block. So
what is sent does not depend on what a rank does next. A forward pass waits for the weights of a block where that block
begins. A read through the model (``model.parameters()``, ``state_dict()``, ``layer.weight``) waits for what it reads:
modules keep their parameters in a dict that does, as DeepSpeed's do for ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.shards.shard import BucketShard

WEIGHTS_IN_PASSES = "weights-in-passes"
"""The capability of plugins that read and write values of parameters in forward and backward passes only."""


def may_be_awaited(run: Run, plugin: str) -> bool:
    """Whether a forward pass comes before all other uses of weights: no plugin but ``plugin`` may use them in between,
    and no pipeline runs parts of a pass on its own."""
    in_passes = all(each.spec.name == plugin or WEIGHTS_IN_PASSES in each.spec.provides for each in run.plan.plugins)
    is_pipeline = any(axis.kind is AxisKind.STAGE and axis.degree > 1 for axis in run.mesh.axes)
    return in_passes and not is_pipeline and not run.backend.is_lazy


class AwaitedWeights:
    """The weights of one optimizer's parameters, while they are being gathered."""

    def __init__(self) -> None:
        self._finish: dict[int, Callable[[], Any]] = {}  # by number of the bucket
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._watched: list[tuple[nn.Module, _Parameters]] = []
        self._needed: dict[nn.Parameter, int] = {}  # 0 in no block, else the number of the block
        self._count = 0  # of buckets
        self._handles: list[Any] = []

    # ---- what travels ------------------------------------------------------------------------------------------------
    def start(self, shards: Iterable[BucketShard], models: Iterable[PreparedModel]) -> None:
        """Starts to gather the weights of all ``shards``. Collective."""
        shards, models = list(shards), list(models)
        if any(_is_compiled(model) for model in models):  # a compiled graph calls no hooks
            self.close()
            for finish in [shard.send_weights() for shard in shards]:
                finish()
            return
        if len(shards) != self._count:  # at first, and when further parameters train, perhaps of further modules
            self.close()
            self._count = len(shards)
            for model in models:
                self._watch(model)
        first = [min(self._needed.get(p, 0) for p in shard.parameters) for shard in shards]
        for number in sorted(range(len(shards)), key=lambda index: (first[index], index)):
            for parameter in shards[number].parameters:
                self._bucket_of[parameter] = number
            self._finish[number] = shards[number].send_weights()

    def wait_for_all(self) -> None:
        """Waits for all weights."""
        while self._finish:
            self._finish.pop(next(iter(self._finish)))()

    def wait_for(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Waits for the weights of these parameters."""
        if not self._finish:
            return
        for parameter in parameters:
            finish = None if parameter is None else self._finish.pop(self._bucket_of.get(parameter, -1), None)
            if finish is not None:
                finish()

    # ---- where weights are used --------------------------------------------------------------------------------------
    def _watch(self, model: PreparedModel) -> None:
        listed = list(_blocks(model.inner))
        blocks = set(listed)
        for position, module in enumerate([model.inner, *listed]):
            for inside in _used_with(module, blocks - {module}):
                for parameter in dict.values(inside._parameters):
                    if parameter is not None:
                        self._needed.setdefault(parameter, position)
        for module in model.inner.modules():
            if module._parameters or module in blocks or module is model.inner:
                hook = _Wait(self, list(_used_with(module, blocks)))
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if module._parameters or module is model.inner:
                awaited = _Parameters(module._parameters, self)
                module.__dict__["_parameters"] = awaited
                self._watched.append((module, awaited))

    def close(self) -> None:
        """Waits for all weights, and removes hooks."""
        self.wait_for_all()
        for handle in self._handles:
            handle.remove()
        for module, awaited in self._watched:
            if module.__dict__.get("_parameters") is awaited:
                module.__dict__["_parameters"] = dict(awaited)
        self._handles, self._watched, self._needed, self._count = [], [], {}, 0


def _is_compiled(model: PreparedModel) -> bool:
    modules = model.module.modules()
    return model.inner is not model.module or any(m._compiled_call_impl is not None for m in modules)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the entries of lists and sequences of modules, none inside another."""
    for module in model.children():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from module.children()
        else:
            yield from _blocks(module)


def _used_with(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields ``module`` and the modules inside it, but for those inside blocks below it."""
    yield module
    for inside in module.children():
        if inside not in blocks:
            yield from _used_with(inside, blocks)


class _Wait:
    """A hook: before a module's forward pass, waits for the weights of some modules. A copy waits for nothing."""

    def __init__(self, awaited: AwaitedWeights | None = None, modules: Iterable[nn.Module] = ()) -> None:
        self._awaited, self._modules = awaited, list(modules)

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _refuse_compiling()
        if self._awaited is not None and self._awaited._finish:
            for module in self._modules:
                self._awaited.wait_for(dict.values(module._parameters))

    def __reduce__(self) -> Any:
        return _Wait, ()


def _refuse_compiling() -> NoReturn:
    raise UsageError(
        "A model whose weights are gathered when they are used cannot be compiled later.",
        where="plugin 'zero1', overlap_gather=True",
        why="hooks wait for the weights, which are no part of a graph",
        fix="compile the model before `prepare`, or leave overlap_gather out",
    )


class _Parameters(dict[str, Any]):
    """The parameters of a module, by name; waits for the weights of those that are read."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], awaited: AwaitedWeights) -> None:
        super().__init__(parameters)
        self._awaited = awaited

    def __iter__(self) -> Iterator[str]:
        """Without it, ``dict(self)`` would copy values and not ask for them."""
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._awaited.wait_for([parameter])
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        self._awaited.wait_for([super().get(name)])
        return super().get(name, default)

    def values(self) -> Any:
        self._awaited.wait_for(super().values())
        return super().values()

    def items(self) -> Any:
        self._awaited.wait_for(super().values())
        return super().items()

    def pop(self, name: str, *default: Any) -> Any:
        self._awaited.wait_for([super().get(name)])
        return super().pop(name, *default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copied or pickled module has a plain dict. Hooks of a module may refer to parameters of others, and are
        copied before these."""
        self._awaited.wait_for_all()
        return dict, (self.copy(),)

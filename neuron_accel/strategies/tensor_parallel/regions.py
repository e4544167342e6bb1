# SPDX-License-Identifier: Apache-2.0
"""Hooks on the inputs and outputs of tensor-parallel regions, and on the outputs of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import chunk_to_group, gather_from_group
from neuron_accel.contract.families import Architecture
from neuron_accel.errors import LayoutError, UsageError
from neuron_accel.strategies.tensor_parallel.embedding import VocabularyParallelHead
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit
from neuron_accel.strategies.tensor_parallel.overlap import replace_hidden
from neuron_accel.strategies.tensor_parallel.tp_region import TpRegion


class Dropouts:
    """The dropout rates of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Rates are attributes of attention modules or of nn.Dropout. They may change, so their names are kept.
        self._rates = [
            (module, name)
            for outer in modules
            for module in outer.modules()
            for name, value in vars(module).items()
            if isinstance(value, (int, float))
            and not isinstance(value, bool)
            and ("drop" in name or (isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"))
        ]

    @property
    def active(self) -> bool:
        return any(module.training and getattr(module, name) > 0 for module, name in self._rates)

    @property
    def possible(self) -> bool:
        """Whether a rate is above zero."""
        return any(getattr(module, name) > 0 for module, name in self._rates)


class _Region:
    def __init__(self, module: nn.Module, tp_region: TpRegion, inputs: tuple[str, ...] = ()) -> None:
        self._tp_region, self._dropouts, self._inputs = tp_region, Dropouts([module]), inputs

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = self._dropouts.active
        further = {name: kwargs[name] for name in self._inputs if kwargs.get(name) is not None}
        kwargs = {**kwargs, **{name: self._tp_region.flow.enter(value) for name, value in further.items()}}
        return replace_hidden(args, kwargs, lambda hidden: self._tp_region.enter(hidden, draws=draws, region=module))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._tp_region.leave()  # needed after an error, or if the region does not end in a row-wise projection
        self._tp_region.flow.left(module, completed=output is not None)

    def sum(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return change_first(output, self._tp_region.exit)


def change_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the output of a module with the hidden states, alone or first in a tuple or list, replaced."""
    if not isinstance(output, (tuple, list)):
        return change(output)
    changed = (change(output[0]), *output[1:])
    return changed if isinstance(output, tuple) else list(changed)


def install_regions(architecture: Architecture, tp_region: TpRegion, partial: Iterable[str] = ()) -> None:
    """Installs hooks that pass the input of every region of a model through ``tp_region``, and the output of regions
    that contain a module of ``partial`` (FQNs)."""
    partial = tuple(partial)
    for fqn, module in architecture.regions:
        region = _Region(module, tp_region, architecture.plan.region_inputs)
        module.tp_region = tp_region  # type: ignore[assignment]  # torch: Tensor | Module
        module.register_forward_pre_hook(region.enter, with_kwargs=True)
        if any(name.startswith(fqn + ".") for name in partial):
            module.register_forward_hook(region.sum)
        module.register_forward_hook(region.leave, always_call=True)


def count_once(module: nn.Module, tp_region: TpRegion) -> None:
    """Divides the output of a module that is equal on all ranks by the degree, so that it counts once in the sum over
    ranks."""
    degree = tp_region.group.size
    module.register_forward_hook(lambda _module, _args, output: output / degree)


def shard_arguments(architecture: Architecture, tp_region: TpRegion, heads: HeadSplit) -> None:
    """Installs hooks that give each rank the entries of its heads of per-head arguments, [batch x heads, ...] or, with
    four dims, [batch, heads, ...]. None, and arguments that are equal for all heads, are not changed.

    Raises:
        LayoutError: if heads are padded.
    """

    def own(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        if value.dim() == 4:
            return value if value.shape[1] == 1 else backend.chunk(value, tp_region.group, 1)
        each = value.unflatten(0, (-1, heads.count))
        return backend.chunk(each, tp_region.group, 1).flatten(0, 1)

    backend = tp_region.backend
    arguments = [(pattern, name) for pattern, names in architecture.plan.per_head.items() for name in names]
    for pattern, argument in arguments:
        if heads.padded:
            raise LayoutError(
                f"{heads.name} = {heads.count} is not divisible by {heads.degree}.",
                why=f"{argument!r} is different for each head, and padded heads have none",
                fix="choose a tensor_parallel_size that divides it",
            )
        for _, module in architecture.find(pattern):
            place = list(inspect.signature(module.forward).parameters).index(argument)

            def slice_heads(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: int = place, name: str = argument
            ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                if name in kwargs:
                    return args, {**kwargs, name: own(kwargs[name])}
                if place >= len(args):
                    return args, kwargs
                return (*args[:place], own(args[place]), *args[place + 1 :]), kwargs

            module.register_forward_pre_hook(slice_heads, with_kwargs=True)


def span_features(module: nn.Module, tp_region: TpRegion, split: HeadSplit | None = None) -> None:
    """Applies a module, such as a norm, to the gathered features (the last dim) of all ranks; each rank continues with
    its own.

    Every rank computes the same, so that the module's gradients are complete on each.

    Args:
        module: the module.
        tp_region: the region object of the model.
        split: how the heads of its features are split; None for evenly. If several ranks hold the same features, one
            copy is used, whose rank receives the gradient. Padding is removed before and restored as zeros after.
    """
    backend, group = tp_region.backend, tp_region.group
    replicas = 1 if split is None else split.replicas

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = gather_from_group(args[0], backend, group, args[0].dim() - 1, grad="chunk")
        if replicas > 1:
            features = features.unflatten(-1, (-1, replicas, args[0].shape[-1]))[..., 0, :].flatten(-2)
        if split is not None and split.padded:
            features = features.narrow(-1, 0, features.shape[-1] // (split.local * split.shards) * split.count)
        return (features, *args[1:])

    def own(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if split is not None and split.padded:
            output = F.pad(output, (0, output.shape[-1] // split.count * split.local * split.shards - output.shape[-1]))
        if replicas > 1:
            shards = output.unflatten(-1, (group.size // replicas, 1, -1))
            output = shards.expand(*shards.shape[:-2], replicas, -1).flatten(-3)
        return chunk_to_group(output, backend, group, output.dim() - 1)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(own)


class _LogitsSwitch:
    """Keeps logits sharded if the model itself computes a loss from them in training."""

    def __init__(self, owner: nn.Module, head: VocabularyParallelHead) -> None:
        self._head, self._signature = head, inspect.signature(type(owner).forward)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(module, *args, **kwargs).arguments
        labels = given.get("labels", kwargs.get("labels"))
        self._head.sharded_logits = module.training and labels is not None

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._head.sharded_logits = False


def install_logits_switch(owner: nn.Module, head: VocabularyParallelHead) -> None:
    """Installs hooks that decide at each call of ``owner`` whether its logits are gathered."""
    switch = _LogitsSwitch(owner, head)
    owner.register_forward_pre_hook(switch.before, with_kwargs=True)
    owner.register_forward_hook(switch.after, always_call=True)


class _OutputField:
    """Changes the tensors of one optional field of a model's output."""

    def __init__(self, config: Any, field: str, change: Callable[[torch.Tensor], torch.Tensor], keep: str) -> None:
        self._config, self._field, self._change, self._keep = config, field, change, keep

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, dict):
            self._refuse_if_requested(kwargs)
            return output
        tensors = output.get(self._field)
        if tensors is not None:
            kept = output.get(self._keep)
            output[self._field] = tuple(t if t is None or t is kept else self._change(t) for t in tensors)
        return output

    def _refuse_if_requested(self, kwargs: dict[str, Any]) -> None:
        option = f"output_{self._field}"
        if kwargs.get(option, getattr(self._config, option, None)):
            raise UsageError(
                f"{option} is not possible with return_dict=False under tensor parallelism.",
                why=f"the ranks' {self._field} are changed, and a plain tuple does not name its elements",
                fix="use return_dict=True",
            )


def change_output(
    architecture: Architecture, field: str, change: Callable[[torch.Tensor], torch.Tensor], keep: str = ""
) -> None:
    """Installs a hook that applies ``change`` to every tensor of ``field`` (``"attentions"``, ``"hidden_states"``) in
    the output of the base model, except one that is also its field ``keep``."""
    hook = _OutputField(architecture.config, field, change, keep)
    architecture.base.register_forward_hook(hook, with_kwargs=True)


def gather_heads(tp_region: TpRegion, heads: HeadSplit | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that gathers attention weights [batch, heads / degree, query, key] of all ranks, in the order
    of the model and without padding."""
    return functools.partial(_gather_heads, tp_region, heads)


def _gather_heads(tp_region: TpRegion, heads: HeadSplit | None, weights: torch.Tensor) -> torch.Tensor:
    full = gather_from_group(weights, tp_region.backend, tp_region.group, 1, grad="chunk")
    if heads is None or (full.shape[1] == heads.count and heads.groups == 1):
        return full
    each = full.unflatten(1, (tp_region.group.size, heads.groups, -1)).transpose(1, 2).flatten(2, 3)
    return each.narrow(2, 0, heads.count // heads.groups).flatten(1, 2)


class _Fraction(torch.autograd.Function):
    """The identity, whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, degree: int) -> torch.Tensor:
        ctx.degree = degree
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient / ctx.degree, None


def fraction_of_gradient(tp_region: TpRegion) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that leaves a tensor as it is and divides its gradient by the degree.

    It is for tensors that every rank computes alike in a region and uses alike outside of it, as a load-balancing loss
    does the logits of routers: the gradient is the full one on every rank, while the gradients of everything before it
    in the region are summed over ranks."""
    degree = tp_region.group.size
    return lambda tensor: _Fraction.apply(tensor, degree)

# SPDX-License-Identifier: Apache-2.0
"""Adapters of layers: parameters that are added to a layer, and a hook that adds the adapter's output to the
layer's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import AxisKind, copy_to_group, register_product_hook
from neuron_accel.errors import UsageError
from neuron_accel_lora.layouts import Factors, shard
from neuron_accel_lora.options import WHERE
from neuron_accel_lora.survey import ADAPTER, Survey, Target

if TYPE_CHECKING:
    from neuron_accel.contract import Cut, Group, ParameterMap, RankRandomness, Run


class Factor(nn.Module):
    """One factor of an adapter, with the parameter name of peft.

    Args:
        weight: this rank's shard.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def attach(survey: Survey, model: nn.Module, run: Run, parameters: ParameterMap) -> None:
    """Adds adapters to the layers of ``model``, and frees their unsharded initial values in ``survey``. Collective."""
    layers = {target.fqn: model.get_submodule(target.fqn) for target in survey.targets}
    factors_of = {target.fqn: shard(target, parameters[target.weight]) for target in survey.targets}
    for target in survey.targets:
        forms = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in _values(target))
        _register(layers[target.fqn], target, *forms)
    parameters.follow(model)  # adds the factors as unsharded parameters
    alike = _ReplicaGroups(run)
    for target in survey.targets:
        layer, factors = layers[target.fqn], factors_of[target.fqn]
        layouts, partial = (factors.a, factors.b), (factors.partial_a, factors.partial_b)
        for name, layout, axes in zip(target.names, layouts, partial, strict=True):
            parameters.set_layout(name, layout)
            for axis in axes:
                parameters.add_partial_axis(name, axis)
        parts = (layout.shard(value, run.coordinates) for layout, value in zip(layouts, _values(target), strict=True))
        _register(layer, target, *parts)
        target.a = target.b = torch.empty(0)
        hook = EmbeddingAdapter if target.embedding else LinearAdapter
        register_product_hook(layer, hook(target, factors, run, alike.of(factors.outputs)))


def _values(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return target.a, target.b


def _register(layer: nn.Module, target: Target, a: torch.Tensor, b: torch.Tensor) -> None:
    if target.embedding:
        layer.lora_embedding_A = nn.ParameterDict({ADAPTER: nn.Parameter(a)})
        layer.lora_embedding_B = nn.ParameterDict({ADAPTER: nn.Parameter(b)})
    else:
        layer.lora_A = nn.ModuleDict({ADAPTER: Factor(a)})
        layer.lora_B = nn.ModuleDict({ADAPTER: Factor(b)})


class _ReplicaGroups:
    """Groups of ranks that hold the same shard of a tensor with fewer shards than ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._made: dict[tuple[str, int], Group] = {}

    def of(self, cut: Cut | None) -> Group | None:
        """This rank's group for ``cut``; None if it is the only holder of its shard. Collective at the first call."""
        if cut is None or cut.replicas == 1:
            return None
        key = (cut.axis, cut.replicas)
        if key not in self._made:
            parts = [
                group[start : start + cut.replicas]
                for group in self._run.mesh.groups(cut.axis)
                for start in range(0, len(group), cut.replicas)
            ]
            self._made[key] = self._run.backend.new_group(parts, f"{cut.axis} (same adapters)")
        return self._made[key]


class _Adapter:
    """A hook that adds the output of an adapter to that of its layer, before it is reduced over ranks.

    Args:
        target: the layer and its adapter.
        factors: layouts of the adapter.
        run: the run.
        alike: the ranks with the same shard of B, over which its gradient is summed; None if there is one.
    """

    def __init__(self, target: Target, factors: Factors, run: Run, alike: Group | None) -> None:
        self._fqn, self._scaling, self._dropout = target.fqn, target.scaling, target.dropout
        self._backend, self._alike = run.backend, alike

    def __deepcopy__(self, memo: dict[int, Any]) -> _Adapter:
        return self  # a copied model runs on the same ranks

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], product: torch.Tensor) -> torch.Tensor:
        if not args:
            raise UsageError(
                f"{self._fqn!r} was called with its input by keyword.", where=WHERE, fix="pass it by position"
            )
        reduced, b = self._reduce(layer, args[0])
        if self._alike is not None:
            b = copy_to_group(b, self._backend, self._alike)
        return (product + F.linear(reduced, b) * self._scaling).to(product.dtype)

    def _reduce(self, layer: Any, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``A x`` [..., r], and B."""
        raise NotImplementedError


class LinearAdapter(_Adapter):
    """The adapter of a linear layer."""

    def __init__(self, target: Target, factors: Factors, run: Run, alike: Group | None) -> None:
        super().__init__(target, factors, run, alike)
        axes = run.mesh.names(AxisKind.MODEL)
        self._drop = Dropout(target, factors.own_inputs, [run.randomness(axis) for axis in axes])

    def _reduce(self, layer: Any, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        input = input.to(a.dtype)
        return F.linear(self._drop(input) if layer.training else input, a), b


class Dropout:
    """Dropout of the inputs of an adapter. Ranks with the same inputs drop the same elements, ranks with different
    inputs different ones.

    Args:
        target: the layer and its adapter.
        own_inputs: whether ranks have different inputs.
        randomness: the random states of the axes that shard the model.
    """

    def __init__(self, target: Target, own_inputs: bool, randomness: list[RankRandomness]) -> None:
        self._fqn, self._rate, self._own, self._randomness = target.fqn, target.dropout, own_inputs, randomness
        self._differed = False

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if not self._rate:
            return input
        self._check()
        with ExitStack() as stack:
            for source in self._randomness:
                stack.enter_context(source.apart() if self._own else source.together())
            return F.dropout(input, self._rate)

    def _check(self) -> None:
        differs = any(source.differs for source in self._randomness)
        if torch._C._current_graph_task_id() == -1:
            self._differed = differs
        elif differs != self._differed:
            raise UsageError(
                f"The dropout of the adapter of {self._fqn!r} cannot be recomputed.",
                where=WHERE,
                why="with activation checkpointing, dropout of the model on a sharded sequence, and lora_dropout, the "
                "random state of the forward pass cannot be restored",
                fix="set the model's dropout or lora_dropout to zero, or leave activation checkpointing out",
            )


class EmbeddingAdapter(_Adapter):
    """The adapter of an embedding, whose entries may be sharded over ranks."""

    def __init__(self, target: Target, factors: Factors, run: Run, alike: Group | None) -> None:
        super().__init__(target, factors, run, alike)
        self._held = None if factors.inputs is None else (factors.inputs, run.group(factors.inputs.axis))

    def _reduce(self, layer: Any, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        row, elsewhere = input, None
        if self._held is not None:
            cut, group = self._held
            row = input - self._start(cut, group, input.device)
            elsewhere = (row < 0) | (row >= cut.local_size)
            row = row.masked_fill(elsewhere, 0)
        found = F.embedding(row, a.t())
        if layer.padding_idx is not None:  # this entry gets no gradient
            found = torch.where(input.eq(layer.padding_idx).unsqueeze(-1), found.detach(), found)
        return (found if elsewhere is None else found.masked_fill(elsewhere.unsqueeze(-1), 0)), b

    def _start(self, cut: Cut, group: Group, device: torch.device) -> torch.Tensor:
        """The first entry of this rank as a tensor; a constant would make the graphs of ranks differ."""
        starts = torch.arange(0, cut.local_size * cut.degree, cut.local_size, device=device)
        return self._backend.chunk(starts, group, 0).squeeze(0)

# SPDX-License-Identifier: Apache-2.0
"""Linear layers with sharded features, which replace a module keeping its hooks, training mode and attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import WithProductHooks, copy_to_group
from neuron_accel.strategies.tensor_parallel.overlap import ColumnWise, Operands
from neuron_accel.strategies.tensor_parallel.tp_region import TpRegion

if TYPE_CHECKING:
    from neuron_accel.contract import Group


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class FeatureDims:
    """The dims of input and output features of a weight."""

    input: int
    output: int


def feature_dims(module: nn.Module) -> FeatureDims | None:
    """Returns the dims of the weight of a plain linear layer; None for any other module, also for a subclass with
    another forward."""
    if "forward" in vars(module):
        return None
    if type(module).forward in (nn.Linear.forward, _forward("transformers.models.falcon.modeling_falcon.FalconLinear")):
        return FeatureDims(input=1, output=0)
    if type(module).forward is _forward("transformers.pytorch_utils.Conv1D"):
        return FeatureDims(input=0, output=1)
    return None


def _forward(name: str) -> Callable[..., torch.Tensor] | None:
    """Returns the forward of a class that computes the same as ``nn.Linear``, if its module is imported."""
    # A model with such a layer has imported its class; other models need not import it.
    module, _, cls = name.rpartition(".")
    return getattr(getattr(sys.modules.get(module), cls, None), "forward", None)


def take_over(cls: type[M], source: nn.Module) -> M:
    """Returns a module of class ``cls`` with all attributes of ``source``. Allocates nothing."""
    module = cls.__new__(cls)
    module.__dict__.update(vars(source))
    for name in ("_parameters", "_buffers", "_modules"):
        module.__dict__[name] = dict(vars(source)[name])
    return module


class ColumnParallelLinear(ColumnWise, nn.Linear):
    """A linear layer with sharded output features. Input [..., in], output [..., out / degree].

    The input enters the region once for all its column-wise layers, so this layer does not communicate, unless several
    ranks hold the same features. ``replica_group`` is the group of these ranks, over which gradients are summed in the
    backward pass, so that the gradient of a parameter is complete.
    """

    tp_region: TpRegion
    replica_group: Group | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input)

    def operands(self) -> Operands:
        if self.replica_group is None:
            return self.weight, self.bias
        backend = self.tp_region.backend
        bias = None if self.bias is None else copy_to_group(self.bias, backend, self.replica_group)
        return copy_to_group(self.weight, backend, self.replica_group), bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.tp_region.group.size}"


class RowParallelLinear(WithProductHooks, nn.Linear):
    """A linear layer with sharded input features, at the exit of a region. Input [..., in / degree], output [..., out]
    after the reduction; the replicated bias is added after it."""

    tp_region: TpRegion

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _leave(self._product(input, F.linear(input, self.weight)), self.bias, self.tp_region)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.tp_region.group.size}"


class PartialLinear(nn.Linear):
    """A linear layer with sharded input features and without bias, whose output [..., out] is a partial sum that is
    reduced later."""

    tp_region: TpRegion


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """A block of output features, for example of all queries, in a replicated weight.

    Args:
        start: index of its first row.
        size: number of its rows.
        local: number of rows that a rank uses, in equal consecutive shards; the last shards may be padded.
        replicas: number of neighbouring ranks that use the same rows.
        run, stride: the block consists of runs of ``run`` rows every ``stride`` rows; by default of one run.
    """

    start: int
    size: int
    local: int
    replicas: int = 1
    run: int = 0
    stride: int = 0


class OwnRowsLinear(WithProductHooks, nn.Linear):
    """A linear layer with a replicated weight, of which each rank computes some output features of each block. Input
    [..., in], output [..., sum of ``local``]. Each rank uses only its rows, so gradients are partial sums. Padding is
    zero.
    """

    tp_region: TpRegion
    blocks: tuple[RowBlock, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, missing = self._rows(input.device)
        if self.has_product_hooks:  # hooks receive the product of all rows
            product = self._product(input, F.linear(input, self.weight, self.bias)).index_select(-1, rows)
        else:
            bias = None if self.bias is None else self.bias.index_select(0, rows)
            product = F.linear(input, self.weight.index_select(0, rows), bias)
        return product.masked_fill(missing, 0) if self.padded else product

    @property
    def padded(self) -> bool:
        """Whether some ranks have fewer rows than others."""
        return any(block.local * self._parts(block) > block.size for block in self.blocks)

    def padding(self, device: torch.device) -> torch.Tensor:
        """Returns which features of this rank's output are padding: bool of shape [sum of ``local``]."""
        return self._rows(device)[1]

    def _parts(self, block: RowBlock) -> int:
        return self.tp_region.group.size // block.replicas

    def _rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices of the rows that this rank uses, and which of them are padding. In a graph both are
        computed from inputs, so that all ranks have the same graph."""
        rows, missing = [], []
        for block in self.blocks:
            shards = torch.arange(block.local * self._parts(block), device=device).view(-1, 1, block.local)
            each = shards.expand(-1, block.replicas, -1).reshape(-1)
            own = self.tp_region.backend.chunk(each, self.tp_region.group, 0)
            missing.append(own >= block.size)
            own = own.clamp(max=block.size - 1)
            if block.run:
                own = own.div(block.run, rounding_mode="floor") * block.stride + own % block.run
            rows.append(own + block.start)
        return torch.cat(rows), torch.cat(missing)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows={sum(block.local for block in self.blocks)}"


class ColumnParallelConv1D(ColumnWise):
    """:class:`ColumnParallelLinear` for a layer whose weight is [in, out], as GPT-2's are."""

    tp_region: TpRegion
    weight: nn.Parameter
    bias: nn.Parameter
    nx: int
    nf: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input)

    def operands(self) -> Operands:
        return self.weight.t(), self.bias

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[0]}, out={self.weight.shape[1]}, degree={self.tp_region.group.size}"


class RowParallelConv1D(WithProductHooks):
    """:class:`RowParallelLinear` for a layer whose weight is [in, out], as GPT-2's are."""

    tp_region: TpRegion
    weight: nn.Parameter
    bias: nn.Parameter
    nx: int
    nf: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _leave(self._product(input, F.linear(input, self.weight.t())), self.bias, self.tp_region)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[0]}, out={self.weight.shape[1]}, degree={self.tp_region.group.size}"


def _leave(partial: torch.Tensor, bias: torch.Tensor | None, tp_region: TpRegion) -> torch.Tensor:
    output = tp_region.exit(partial, given_up=True)
    return output if bias is None else output + bias.to(output.dtype)  # autocast leaves parameters in full precision


def parallel_linear(source: nn.Module, kind: str, tp_region: TpRegion) -> nn.Module:
    """Returns the module that replaces a linear layer of style ``kind``, still with the full parameters."""
    transposed = not isinstance(source, nn.Linear)
    if kind == "partial":
        cls: Any = PartialLinear
    elif kind == "colwise":
        cls = ColumnParallelConv1D if transposed else ColumnParallelLinear
    else:
        cls = RowParallelConv1D if transposed else RowParallelLinear
    module = take_over(cls, source)
    module.tp_region = tp_region
    return module


def own_rows_linear(source: nn.Module, tp_region: TpRegion, blocks: tuple[RowBlock, ...]) -> OwnRowsLinear:
    """Returns the module that replaces a linear layer of which each rank computes its rows of ``blocks``."""
    module = take_over(OwnRowsLinear, source)
    module.tp_region, module.blocks = tp_region, blocks
    return module


def refresh_features(module: nn.Module) -> None:
    """Updates the attributes of a layer with its numbers of features to those of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, (ColumnParallelConv1D, RowParallelConv1D)):
        module.nx, module.nf = module.weight.shape


def is_row_parallel(module: nn.Module) -> bool:
    """Returns whether a module is a row-wise projection, whose bias is added after the exit of the region."""
    return isinstance(module, (RowParallelLinear, RowParallelConv1D))

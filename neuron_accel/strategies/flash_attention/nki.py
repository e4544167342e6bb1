# SPDX-License-Identifier: Apache-2.0
"""Flash attention of the Neuron Kernel Interface (NKI), as a differentiable function.

Kernels ``attention_cte`` and ``attention_bwd`` of the NKI library (package ``nkilib`` beside ``nki``; Trn2 and Trn3),
with the layouts that their documentation gives: at most 128 dims, positions a multiple of the backward kernel's tile of
512 keys, and a launch grid of as many physical cores as a logical core has. The kernels of ``neuronxcc.nki`` before
them no longer compile since SDK 2.30 (error NCC_EVRF065). Not run on Trainium: tests call a stand-in with this
interface.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import Backend

TILE, MOST_DIMS = 512, 128
_FORWARD, _BACKWARD = "nkilib.core.attention.attention_cte", "nkilib.core.attention.attention_bwd"


def why_not_nki_here(backend: Backend, instance: str) -> str:
    """Returns the reason why no layer can use the kernel; empty if layers can.

    Args:
        instance: the instance type; empty if it is not known.
    """
    if not backend.is_lazy and backend.device.type != "neuron":
        return "its kernels run on Neuron devices"
    if instance.startswith("trn1"):
        return "NKI has no kernels for Trn1, only for Trn2 and Trn3"
    if importlib.util.find_spec("nki") is None:
        if importlib.util.find_spec("neuronxcc") is None:
            return "the package nki is not installed"
        return "kernels of neuronxcc.nki no longer compile since SDK 2.30, and the package nki is not installed"
    try:
        for module in (_FORWARD, _BACKWARD):
            importlib.import_module(module)
    except ImportError as error:
        return f"nki has no library of kernels, nkilib ({error})"
    return ""


def why_not_nki(query: torch.Tensor, key: torch.Tensor, masked: bool, other_scores: bool) -> str:
    """Returns the reason why the kernel cannot compute this attention; empty if it can.

    Args:
        query, key: [batch, heads, positions, dim].
        masked: whether there is a mask beside the causal one.
        other_scores: whether there are softcaps, sinks or dropout.
    """
    if masked:
        return "it has a mask beside the causal one (if that is padding on the right: right_padded=True)"
    if other_scores:
        return "its scores have a softcap, sinks or dropout"
    if query.shape[2] != key.shape[2] or query.shape[2] % TILE:
        return f"{query.shape[2]} queries and {key.shape[2]} keys; the kernel needs the same multiple of {TILE}"
    if query.shape[3] > MOST_DIMS or key.shape[3] > MOST_DIMS:
        return f"heads have {query.shape[3]} dims, more than {MOST_DIMS}"
    return ""


def nki_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """Computes attention with the kernel. Inputs and output are [batch, heads, positions, dim]."""
    return _NkiAttention.apply(query, key, value, scale, causal)  # type: ignore[no-any-return]


def _kernel(module: str) -> Any:
    """The kernel, for the physical cores of a logical core: the compiler refuses another number (NCC_EVRF066)."""
    kernel = getattr(importlib.import_module(module), module.rpartition(".")[2])
    return kernel[int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "").strip() or 2)]


class _NkiAttention(torch.autograd.Function):
    """[batch, heads, positions, dim] to the same."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        output, negative_max, reciprocal = _kernel(_FORWARD)(
            query.flatten(0, 1).contiguous(),
            key.flatten(0, 1).transpose(1, 2).contiguous(),
            value.flatten(0, 1).contiguous(),
            scale=scale,
            causal_mask=causal,
            cache_softmax=True,
        )
        log_sum = -(negative_max + torch.log(reciprocal))  # [batch * heads, 128, positions / 128]
        output = output.unflatten(0, query.shape[:2])
        ctx.save_for_backward(query, key, value, output, log_sum.unflatten(0, query.shape[:2]))
        ctx.options = {"use_causal_mask": causal, "mixed_precision": True, "softmax_scale": scale}
        return output  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        *tensors, log_sum = ctx.saved_tensors
        given = [tensor.transpose(2, 3).contiguous() for tensor in (*tensors, gradient)]
        gradients = _kernel(_BACKWARD)(*given, log_sum, **ctx.options)
        return (*(each.transpose(2, 3) for each in gradients), None, None)

# SPDX-License-Identifier: Apache-2.0
"""Flash attention of the Neuron Kernel Interface (NKI), as a differentiable function.

Kernels ``flash_fwd`` and ``flash_attn_bwd`` of ``neuronxcc.nki.kernels``, with the layouts that their documentation
gives: query, key, value and their gradients [batch, heads, dim, positions], positions a multiple of the tile of 2,048
keys, at most 128 dims, as many key/value heads as heads in the backward pass, one launch for each (sample, head).
Not run on Trainium: tests call a stand-in with this interface.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import Backend

TILE, MOST_DIMS = 2048, 128
_KERNELS = "neuronxcc.nki.kernels"


def why_not_nki_here(backend: Backend) -> str:
    """Returns the reason why no layer can use the kernel; empty if layers can."""
    if not backend.is_lazy:
        return "its kernels are called through torch-neuronx on XLA"
    if importlib.util.find_spec("neuronxcc") is None:
        return "neuronxcc is not installed"
    try:
        importlib.import_module(_KERNELS)
    except ImportError as error:
        return f"neuronxcc has no kernels ({error})"
    return ""


def why_not_nki(query: torch.Tensor, key: torch.Tensor, masked: bool, other_scores: bool) -> str:
    """Returns the reason why the kernel cannot compute this attention; empty if it can.

    Args:
        query, key: [batch, heads, positions, dim].
        masked: whether there is a mask beside the causal one.
        other_scores: whether there are softcaps or sinks.
    """
    if masked:
        return "it has a mask beside the causal one (if that is padding on the right: right_padded=True)"
    if other_scores:
        return "its scores have a softcap or sinks"
    if query.shape[2] != key.shape[2] or query.shape[2] % TILE:
        return f"{query.shape[2]} queries and {key.shape[2]} keys; the kernel needs the same multiple of {TILE}"
    if query.shape[3] > MOST_DIMS or key.shape[3] > MOST_DIMS:
        return f"heads have {query.shape[3]} dims, more than {MOST_DIMS}"
    return ""


def nki_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool, dropout: float
) -> torch.Tensor:
    """Computes attention with the kernel. Inputs and output are [batch, heads, positions, dim]. The seed of dropout is
    drawn on the device."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seed = torch.zeros(1, dtype=torch.int32, device=query.device)
    if dropout:
        seed = torch.rand(1, device=query.device).mul(2**24).to(torch.int32)
    output: torch.Tensor = _NkiAttention.apply(
        query.transpose(2, 3), key.transpose(2, 3), value.transpose(2, 3), seed, scale, causal, dropout
    )
    return output


class _NkiAttention(torch.autograd.Function):
    """[batch, heads, dim, positions] to [batch, heads, positions, dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seed: torch.Tensor,
        scale: float,
        causal: bool,
        dropout: float,
    ) -> torch.Tensor:
        kernels: Any = importlib.import_module(_KERNELS)
        options = {"use_causal_mask": causal, "mixed_precision": True, "dropout_p": dropout, "softmax_scale": scale}
        launch = kernels.flash_fwd[query.shape[0], query.shape[1]]
        # Values are transposed, as the kernel expects them without a configuration.
        output, log = launch(query, key, value.transpose(2, 3), seed, **options)
        ctx.save_for_backward(query, key, value, output, log, seed)
        ctx.options = options
        return output  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log, seed = ctx.saved_tensors
        kernels: Any = importlib.import_module(_KERNELS)
        launch = kernels.flash_attn_bwd[query.shape[0], query.shape[1]]
        gradients = launch(
            query, key, value, output.transpose(2, 3), gradient.transpose(2, 3), log, seed, **ctx.options
        )
        return (*gradients, None, None, None, None)

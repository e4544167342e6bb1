# SPDX-License-Identifier: Apache-2.0
"""Attention for models of transformers that does not keep scores for the backward pass.

Attention layers of transformers call a function that the model's configuration names, which is a public interface, so
that no module has to be replaced. The function here computes attention for blocks of queries, which the backend
recomputes in the backward pass, so that only the scores of one block are in memory at a time. The formula is that of
transformers' ``attn_implementation="eager"``.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021), section 2; Dao et al., "FlashAttention"
(2022), for recomputing the scores instead of keeping them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend

NAME = "neuron_accel_blockwise"
"""Name under which the attention function is registered in transformers."""

_SETTINGS = "_neuron_accel_attention"
_STANDARD = {"eager", "sdpa", None}
# Further arguments of attention functions, which are not supported here.
_NOT_UNDERSTOOD = ("position_bias", "head_mask", "cache")

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
"""Attention of query, key and value [batch, heads, positions, dim] with a scale, and whether it is causal, to
[batch, heads, positions, dim]."""


@dataclass(frozen=True, eq=False)
class BlockwiseAttention:
    """Settings of the attention of one model.

    They are kept in the model's modules; copies of the model have the same object. They are pickled without the
    backend: an unpickled model uses PyTorch's activation checkpointing.

    Args:
        backend: recomputes blocks.
        block_size: number of queries in a block; None for one block.
        kernel: computes attention without a mask other than the causal one; None if there is no kernel.
        why_no_kernel: returns the reason why the kernel cannot be used, given query, key, whether there is a mask, and
            whether there are a softcap, sinks or dropout; an empty string if it can.
        kernel_only: whether to raise an error if the kernel cannot be used.
        ignores_padding: whether to ignore the padding mask, because padding only follows the tokens of a sequence and
            causal attention does not use it.
    """

    backend: Backend | None
    block_size: int | None = None
    kernel: Kernel | None = None
    why_no_kernel: Callable[[torch.Tensor, torch.Tensor, bool, bool], str] = lambda *_: ""
    kernel_only: bool = False
    ignores_padding: bool = False

    def __repr__(self) -> str:
        kernel = "torch" if self.kernel is None else getattr(self.kernel, "__name__", "a kernel")
        return f"<BlockwiseAttention: {kernel}, block_size {self.block_size}>"

    def __deepcopy__(self, memo: Any) -> BlockwiseAttention:
        return self

    def __reduce__(self) -> Any:
        return functools.partial(BlockwiseAttention, ignores_padding=self.ignores_padding), (None, self.block_size)

    def recompute(self, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """Calls ``function`` with activation checkpointing."""
        if self.backend is not None:
            return self.backend.recompute(function, *inputs)  # type: ignore[no-any-return]
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *inputs, use_reentrant=False)  # type: ignore[no-any-return]

    def install(self, model: nn.Module, where: str) -> Callable[[], None]:
        """Makes every model of transformers in ``model`` compute attention with these settings.

        Args:
            model: the model.
            where: the plugin, for messages.

        Returns:
            A function that restores the previous attention function.

        Raises:
            UnsupportedModelError: if there is no such model, or the attention of one cannot be replaced; nothing is
                changed then.
            UsageError: if another plugin has replaced it.
        """
        found = list(_outermost_models(model))
        if not found:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no attention that can be replaced.",
                where=where,
                why="only models of transformers have a configurable attention function",
                fix="name modules to recompute by a pattern: ActivationCheckpointingPlugin(modules='blocks.*.attn')",
            )
        _register()
        before = [each.config._attn_implementation for each in found]
        for each, implementation in zip(found, before, strict=True):
            if implementation not in _STANDARD:
                raise UsageError(
                    f"{type(each).__name__} has the attention function {implementation!r} already.",
                    where=where,
                    why="a model has one attention function, and another plugin or the model's author has replaced it",
                    fix="load the model with attn_implementation='eager', and use one plugin that computes attention",
                )

        def undo() -> None:
            for each, implementation in zip(found, before, strict=True):
                if each.config._attn_implementation == NAME:
                    each.set_attn_implementation(implementation or "eager")
                for module in each.modules():
                    vars(module).pop(_SETTINGS, None)

        for each in found:
            each.set_attn_implementation(NAME)
            if each.config._attn_implementation != NAME:
                undo()
                raise UnsupportedModelError(
                    f"The attention of {type(each).__name__} cannot be replaced.",
                    where=where,
                    why="its attention layers do not call the function that the configuration names",
                    fix="use ActivationCheckpointingPlugin(modules='attention'), which recomputes the full layer",
                )
            for module in each.modules():
                setattr(module, _SETTINGS, self)
        return undo


# ---- replacing the attention of a model ------------------------------------------------------------------------------
def _outermost_models(model: nn.Module) -> Iterator[Any]:
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from _outermost_models(child)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, blockwise_attention)
    AttentionMaskInterface.register(NAME, blockwise_mask)


# ---- the mask --------------------------------------------------------------------------------------------------------
def blockwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """Returns the mask for :func:`blockwise_attention`; a function of transformers' mask interface. No value of a
    tensor is read.

    Returns:
        None for the causal mask only, or no mask; a bool tensor [batch, keys], True for tokens, for the causal mask and
        padding; or a bool tensor [batch or 1, 1, queries or 1, keys] for the complete mask.
    """
    from transformers.masking_utils import sdpa_mask

    plain = local_size is None and all(type(offset) is int and offset == 0 for offset in (q_offset, kv_offset))
    padding = None if attention_mask is None or attention_mask.ndim != 2 else attention_mask.bool()
    if plain and allow_is_bidirectional_skip and (padding is None or padding.shape[1] == kv_length):
        return None if padding is None else padding[:, None, None, :]
    if plain and allow_is_causal_skip and q_length == kv_length and (padding is None or padding.shape[1] == kv_length):
        return padding
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **others,
    )


# ---- attention -------------------------------------------------------------------------------------------------------
def blockwise_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, key/value heads, keys, dim]; heads are a multiple of them.
        value: [batch, key/value heads, keys, value dim].
        attention_mask: from :func:`blockwise_mask`, or a user's mask [batch or 1, heads or 1, queries or 1, keys], bool
            or added to the scores.
        scaling: factor of the scores; by default dim ** -0.5.
        dropout: probability of dropout of the weights.
        softcap: limits scores to (-softcap, softcap) by tanh.
        is_causal: whether attention is causal, if there is no mask.
        s_aux: an additional score for each head [heads] in the softmax, without a value ("sinks").

    Returns:
        [batch, queries, heads, value dim], and no weights.

    Raises:
        UsageError: if the model was not prepared with :meth:`BlockwiseAttention.install`.
        UnsupportedModelError: for arguments that are not supported, or if only the kernel may be used and cannot.
    """
    attention = getattr(module, _SETTINGS, None)
    if attention is None:
        raise UsageError(
            f"{type(module).__name__} was not prepared for attn_implementation={NAME!r}.",
            why="the block size is set when a model is prepared",
            fix="load the model with attn_implementation='eager' and use FlashAttentionPlugin",
        )
    unknown = [name for name in _NOT_UNDERSTOOD if others.get(name) is not None]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention.",
            where="attention in blocks",
            why="the scores would be computed without it",
            fix="leave out FlashAttentionPlugin (or modules='core_attention'); modules='attention' of "
            "ActivationCheckpointingPlugin recomputes the full layer",
        )
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    causal, mask = _visible(module, query, key, attention_mask, is_causal, attention.ignores_padding)
    if attention.kernel is not None:
        other_scores = softcap is not None or s_aux is not None or dropout > 0
        why = attention.why_no_kernel(query, key, mask is not None, other_scores)
        if not why:
            return attention.kernel(query, key, value, scale, causal).transpose(1, 2).contiguous(), None
        if attention.kernel_only:
            raise UnsupportedModelError(
                f"The kernel cannot compute the attention of {type(module).__name__}: {why}.",
                where="plugin flash_attention, kernel='nki'",
                fix="choose kernel='auto', which computes such layers in blocks",
            )
    compute = functools.partial(_rows, scale=scale, dropout=dropout, softcap=softcap)
    length, blocks = query.shape[2], []
    size = attention.block_size or length
    for start in range(0, length, size):
        stop = min(start + size, length)
        seen = stop if causal else key.shape[2]
        blocks.append(
            attention.recompute(
                compute,
                query[:, :, start:stop],
                key[:, :, :seen],
                value[:, :, :seen],
                _mask_of(mask, start, stop, seen),
                s_aux,
                start if causal else None,
            )
        )
    return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None


def _visible(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    given: torch.Tensor | None,
    is_causal: bool | None,
    ignores_padding: bool,
) -> tuple[bool, torch.Tensor | None]:
    """Returns whether attention is causal, and a further mask [batch or 1, heads or 1, queries or 1, keys] or None."""
    if given is not None and given.ndim == 2:
        return True, None if ignores_padding else given[:, None, None, :]
    if given is not None:
        return False, given[..., : key.shape[2]]
    wanted = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return bool(wanted) and 1 < query.shape[2] == key.shape[2], None


def _mask_of(mask: torch.Tensor | None, start: int, stop: int, seen: int) -> torch.Tensor | None:
    if mask is None:
        return None
    return (mask if mask.shape[2] == 1 else mask[:, :, start:stop])[..., :seen]


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    first: int | None,
    *,
    scale: float,
    dropout: float,
    softcap: float | None,
) -> torch.Tensor:
    """Computes attention for a block of queries.

    Args:
        first: for causal attention, the position of the first query; that of the last query is the position of the last
            key.

    Returns:
        [batch, heads, rows, value dim], in the dtype of the query.
    """
    heads, rows, groups = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    # The queries of the heads of a group are concatenated, so that keys need not be repeated for each head.
    folded = query.reshape(query.shape[0], key.shape[1], groups * rows, query.shape[3])
    scores = (folded @ key.transpose(-1, -2)) * scale
    scores = scores.view(query.shape[0], heads, rows, key.shape[2])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lowest = torch.finfo(scores.dtype).min
    if first is not None and first + rows > 1:
        positions = torch.arange(key.shape[2], device=query.device)
        later = positions[None, :] > positions[first : first + rows, None]
        scores = scores.masked_fill(later, lowest)
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=torch.float32)
    else:
        beside = sinks.reshape(1, heads, 1, 1).expand(query.shape[0], heads, rows, 1).to(scores.dtype)
        weights = torch.softmax(torch.cat([scores, beside], -1), -1, dtype=torch.float32)[..., :-1]
    weights = nn.functional.dropout(weights.to(value.dtype), dropout, dropout > 0)
    weights = weights.view(query.shape[0], key.shape[1], groups * rows, key.shape[2])
    return (weights @ value).reshape(query.shape[0], heads, rows, value.shape[3])

# SPDX-License-Identifier: Apache-2.0
"""The plugin of flash attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.families import BlockwiseAttention
from neuron_accel.errors import ConfigurationError
from neuron_accel.strategies.flash_attention.nki import nki_attention, why_not_nki, why_not_nki_here

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run

AUTO, TORCH, NKI = "auto", "torch", "nki"
_WHERE = "plugin 'flash_attention'"


@dataclass(frozen=True, kw_only=True)
class FlashAttentionPlugin(StrategyPlugin):
    """Attention of transformers' models without stored scores, whose memory is linear in the length of the sequence.

    By default attention is computed in blocks of queries, in plain PyTorch on every device, and each block is
    recomputed in the backward pass; causal attention skips the keys after a block. Losses and gradients are those of
    ``attn_implementation="eager"``, with padding, sliding windows, packed sequences, softcaps, sinks and dropout.
    Outputs of padded positions are undefined, as they are with ``"sdpa"``, and attention weights
    (``output_attentions=True``) are not available.

    Args:
        kernel: ``"torch"`` uses blocks; ``"auto"`` uses flash attention of the package nki (Trn2 and Trn3) for layers
            for which that is possible, which has **not been run on Trainium**, and blocks elsewhere; ``"nki"`` raises
            an error where nki cannot be used.
        block_size: number of queries in a block. The scores of one block, [batch, heads, block_size, keys], are the
            largest tensor of a layer; smaller blocks make larger graphs.
        right_padded: declares that padding only follows the tokens of a sequence. Causal attention does not use
            positions after a token, so the mask is ignored, and NKI can be used although an ``attention_mask`` is
            given.
    """

    kernel: str = TORCH
    block_size: int = 512
    right_padded: bool = False

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="flash_attention", api_version=4, phase=Phase.MEMORY, provides=frozenset({"weights-in-passes"})
    )

    def __post_init__(self) -> None:
        if self.kernel not in (AUTO, TORCH, NKI):
            raise ConfigurationError(
                f"kernel is {self.kernel!r}.", where=_WHERE, fix=f"give {AUTO!r}, {TORCH!r} or {NKI!r}"
            )
        if self.block_size < 1:
            raise ConfigurationError(
                f"block_size is {self.block_size}; it must be at least 1.", where=_WHERE, fix="give 512 if unsure"
            )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Replaces the function that computes attention.

        Raises:
            ConfigurationError: if only NKI may be used and cannot be.
            UnsupportedModelError: if it cannot be replaced.
            UsageError: if another plugin has replaced it.
        """
        why = "" if self.kernel == TORCH else self._why_not_nki(run)
        if why and self.kernel == NKI:
            raise ConfigurationError(
                "NKI flash attention cannot be used here.",
                where=_WHERE,
                why=why,
                fix="leave kernel='torch', which computes attention in blocks on every device",
            )
        with_kernel = self.kernel != TORCH and not why
        attention = BlockwiseAttention(
            run.backend,
            self.block_size,
            kernel=nki_attention if with_kernel else None,
            why_no_kernel=why_not_nki,
            kernel_only=self.kernel == NKI,
            ignores_padding=self.right_padded,
        )
        run.undo(attention.install(model.module, _WHERE))

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Describes how attention is computed on this rank."""
        blocks = f"attention in blocks of {self.block_size} queries"
        if self.kernel == TORCH:
            return blocks
        why = self._why_not_nki(run)
        return f"{blocks} (not NKI: {why})" if why else f"attention by NKI where it can be, else {blocks}"

    def _why_not_nki(self, run: Run) -> str:
        return why_not_nki_here(run.backend, run.hardware.name if run.hardware else "")

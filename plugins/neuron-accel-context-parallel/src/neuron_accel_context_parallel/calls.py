# SPDX-License-Identifier: Apache-2.0
"""Shards the arguments of a model's call along the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.contract import chunk_to_group
from neuron_accel.errors import UsageError
from neuron_accel_context_parallel import documents
from neuron_accel_context_parallel.gradients import scale_gradient

if TYPE_CHECKING:
    from neuron_accel_context_parallel.ring import Ring
    from neuron_accel_context_parallel.zigzag import Zigzag

RING = "context_parallel_ring"
"""Name of the argument with which attention layers receive the ring."""
IGNORED = -100
"""The label that losses ignore."""

_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_ALONG = {"token_type_ids": 0, "input_ids": 0}  # by name, the value of padding
_CACHED = ("past_key_values", "cache", "use_cache", "cache_position", "logits_to_keep")
_EVERY_LAYER = {
    "output_attentions": "no rank has all attention weights of a query",
    "output_router_logits": "the load-balancing loss is not a mean over tokens, which ranks could compute separately",
}


class Splitter:
    """Shards the arguments of a model's calls along the sequence.

    Args:
        forward: the model's forward.
        config: the model's configuration.
        zigzag: shards sequences.
        ring: passed to attention layers.
        own_loss: why the model's loss cannot be computed on shards; None if it is the mean over next tokens.
        reads: whether reading values on the host is free.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: Any,
        zigzag: Zigzag,
        ring: Ring,
        *,
        own_loss: str | None,
        reads: bool,
    ) -> None:
        self._signature, self._config = inspect.signature(forward), config
        self._zigzag, self._ring, self._own_loss, self._reads = zigzag, ring, own_loss, reads

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, without those that are None."""
        bound = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(parameter.name, {})
        return {name: value for name, value in bound.items() if value is not None}

    def split(self, given: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Returns the arguments for this rank's shard, and the length of the full sequence.

        Raises:
            UsageError: if an argument is not supported or cannot be sharded.
        """
        self._refuse(given)
        tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
        batch, length = tokens.shape[:2]
        rest = {name: given[name] for name in given if name not in _PACKING}
        result: dict[str, Any] = {}  # tokens first, where models look for the batch size
        for name, fill in reversed(_ALONG.items()):
            if name in rest:
                result[name] = self._zigzag.shard(rest.pop(name), 1, fill)
        if "inputs_embeds" in rest:
            result["inputs_embeds"] = self._share_embeddings(rest.pop("inputs_embeds"))
        if "labels" in rest or "shift_labels" in rest:
            result |= self._labels(rest)
        positions = self._positions(rest.pop("position_ids", None), rest.pop("attention_mask", None), length, tokens)
        codes = self._codes(given, batch, length)
        result["position_ids"] = self._zigzag.shard(positions, 1, 0)
        result["attention_mask"] = self._in_place_of_a_mask(codes, tokens.device)
        for name, value in rest.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and length in value.shape[1:]:
                raise UsageError(
                    f"{name!r} of shape {list(value.shape)} cannot be sharded along the sequence.",
                    where="plugin context_parallel",
                    why="it is not known which of its dims is the sequence",
                    fix="leave it out, or train without ContextParallelPlugin",
                )
        result |= rest
        result["use_cache"], result[RING] = False, self._ring
        return result, length

    def is_cached(self, given: Mapping[str, Any]) -> bool:
        """Whether a call uses a key/value cache."""
        return any(name in given and not _is_off(given[name]) for name in _CACHED)

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _refuse(self, given: Mapping[str, Any]) -> None:
        if ("input_ids" in given) == ("inputs_embeds" in given):
            raise UsageError(
                "Context parallelism shards `input_ids` or `inputs_embeds`, but the model received "
                + ("both." if "input_ids" in given else "neither."),
                where="plugin context_parallel",
            )
        for name in _CACHED:
            if name in given and not _is_off(given[name]):
                raise UsageError(
                    f"{name} is not possible in training with context parallelism.",
                    where="plugin context_parallel",
                    why="no rank has consecutive positions of the full sequence",
                    fix="leave it out, or evaluate under torch.no_grad(), where each rank computes full sequences",
                )
        for name, why in _EVERY_LAYER.items():
            if given.get(name, getattr(self._config, name, False)):
                raise UsageError(
                    f"{name} is not possible with context parallelism.",
                    where="plugin context_parallel",
                    why=why,
                    fix=f"leave it out, and set config.{name} to False",
                )
        if ("labels" in given or "shift_labels" in given) and self._own_loss:
            raise UsageError(
                "This model cannot compute its loss on a shard of a sequence.",
                where="plugin context_parallel",
                why=self._own_loss,
                fix="leave `labels` out, and compute the loss from the outputs, which are those of full sequences",
            )

    # ---- arguments ---------------------------------------------------------------------------------------------------
    def _share_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        zigzag = self._zigzag
        order = zigzag.order(embeddings.shape[1], embeddings.device)
        ordered = zigzag.pad(scale_gradient(embeddings, 1 / zigzag.degree), 1, 0.0).index_select(1, order)
        return chunk_to_group(ordered, zigzag.backend, zigzag.group, 1)

    def _labels(self, rest: dict[str, Any]) -> dict[str, Any]:
        """This rank's shard of the labels, which are shifted before they are sharded, and the divisor of the sum of
        their
        losses: the number of labels that are not ignored, divided by the number of ranks, over which gradients are
        averaged."""
        shifted, labels = rest.pop("shift_labels", None), rest.pop("labels", None)
        if shifted is None:
            shifted = torch.full_like(labels, IGNORED)
            shifted[:, :-1] = labels[:, 1:]
        items = rest.pop("num_items_in_batch", None)
        if items is None:
            items = (shifted != IGNORED).sum()
        shard = self._zigzag.shard(shifted, 1, IGNORED)
        # a loss function that ignores `shift_labels` sees ignored labels only, and returns NaN or zero
        return {
            "labels": torch.full_like(shard, IGNORED),
            "shift_labels": shard,
            "num_items_in_batch": items / self._zigzag.degree,
        }

    def _codes(self, given: Mapping[str, Any], batch: int, length: int) -> torch.Tensor | None:
        """The codes of full sequences; see :mod:`.documents`."""
        document = visible = None
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None:
            visible = documents.from_mask(mask, (batch, length), reads=self._reads)
        elif positions is not None:
            document = documents.from_positions(positions, reads=self._reads)
        elif "cu_seq_lens_q" in given:
            document = documents.from_lengths(given["cu_seq_lens_q"], length)
        codes = documents.encode(document, visible)
        if codes is None:
            return None
        return self._zigzag.pad(codes.expand(batch, -1), 1, documents.UNSEEN)

    def _positions(self, given: Any, mask: Any, length: int, tokens: torch.Tensor) -> torch.Tensor:
        if given is not None:
            if given.dim() != 2 or given.shape[1] != length:
                raise UsageError(
                    f"position_ids of shape {list(given.shape)} cannot be sharded along the sequence.",
                    where="plugin context_parallel",
                    fix=f"pass the shape [batch, {length}]",
                )
            return given
        if mask is not None and self._config.model_type in _POSITIONS_FROM_MASK:
            return mask.long().cumsum(1) * mask.long() - 1
        return torch.arange(length, device=tokens.device)[None]

    def _in_place_of_a_mask(self, codes: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The codes as a tensor of four dims, which models pass to their layers unchanged."""
        if codes is None:
            return torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        return codes[:, None, None]


_POSITIONS_FROM_MASK = ("opt",)


def codes_of(mask: torch.Tensor) -> torch.Tensor | None:
    """The codes that :class:`Splitter` passed as the mask: int64 [batch, padded length], or None."""
    return None if mask.shape[-1] == 1 else mask[:, 0, 0]


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, (bool, int)) and not value)

# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with ring attention.

Their attention layers call the function that the configuration names, through transformers' public
``AttentionInterface``; no code of a model is replaced. The function receives the ring as an argument that models pass
on to their layers, and codes of documents and padding as the attention mask.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError
from neuron_accel_context_parallel.blocks import Scores
from neuron_accel_context_parallel.calls import RING, Splitter, codes_of
from neuron_accel_context_parallel.outputs import Joiner
from neuron_accel_context_parallel.ring import AttentionOptions, Ring
from neuron_accel_context_parallel.zigzag import Zigzag

if TYPE_CHECKING:
    from neuron_accel.contract import Run

ATTENTION = "neuron_accel_context_parallel"
"""The name of the attention function."""

_LAYERS = {"full_attention", "sliding_attention"}
# arguments of attention functions that change scores or masks and are not supported
_OTHER_SCORES = ("position_bias", "s_aux", "sinks", "head_mask", "cache")


class Attached:
    """Shards the calls of a model along the sequence, until :meth:`detach`.

    Args:
        model: the model, changed in place.
        run: the run.
        axis: the mesh axis of the sequence.
        keeps_logits: whether to gather logits in training although the model returns a loss.
        staged: whether the model is split into pipeline stages.

    Raises:
        UnsupportedModelError: if the model's attention is not supported; the model is then unchanged.
    """

    def __init__(self, model: nn.Module, run: Run, axis: str, *, keeps_logits: bool, staged: bool) -> None:
        wrapper: Any = model
        inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else wrapper  # adapters wrap a model
        check_model(inner)
        register_attention()
        self._config, self._model = inner.config, inner
        self._before = inner.config._attn_implementation
        ring, zigzag = Ring(run.backend, run.group(axis)), Zigzag(run.backend, run.group(axis))
        self._splitter = Splitter(
            inner.forward,
            inner.config,
            zigzag,
            ring,
            own_loss=own_loss(inner),
            reads=run.backend.reads_are_free,
        )
        self._joiner = Joiner(zigzag, keeps_logits=keeps_logits)
        self._ring, self._staged = ring, staged
        self._length: int | None = None
        self._as_tuple = False
        inner.set_attn_implementation(ATTENTION)
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave),
            model.register_forward_hook(self._ended, always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks and restores the attention implementation."""
        for handle in self._handles:
            handle.remove()
        self._model.set_attn_implementation(self._before)

    # ---- around a call -----------------------------------------------------------------------------------------------
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._splitter.bind(args, kwargs)
        if self._splitter.is_cached(given) and not torch.is_grad_enabled():
            self._model.set_attn_implementation(self._before)  # every rank computes full sequences
            return None
        self._as_tuple = not given.pop("return_dict", getattr(self._config, "return_dict", True))
        sharded, self._length = self._splitter.split(given)
        self._ring.visits, self._ring.windows = 0, 0
        return (), sharded if not self._as_tuple else {**sharded, "return_dict": True}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._length is None:
            return output
        self._check_visits()
        joined = self._joiner.join(output, self._length, training=module.training and torch.is_grad_enabled())
        return joined.to_tuple() if self._as_tuple else joined

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._length is None:
            self._model.set_attn_implementation(ATTENTION)
        self._length = None

    def _check_visits(self) -> None:
        """Checks that every layer has called the attention function."""
        config = self._config.get_text_config()
        layers, visits = config.num_hidden_layers, self._ring.visits
        windows = has_windows(config)
        if not visits or (not self._staged and visits != layers):
            raise UnsupportedModelError(
                f"{visits} of the {layers} layers of {type(self._model).__name__} called the attention function.",
                where="plugin context_parallel",
                why="a layer that mixes positions in another way would use only the positions of its rank",
                fix="train this model without ContextParallelPlugin",
            )
        if windows and not self._ring.windows and not self._staged:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} has sliding windows, but its layers do not pass their size on.",
                where="plugin context_parallel",
                fix="train this model without ContextParallelPlugin",
            )


def has_windows(config: Any) -> bool:
    """Whether some layers use sliding windows."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) is not None


def check_model(model: nn.Module) -> None:
    """Checks that layers of a model mix positions only through the attention function.

    Raises:
        UnsupportedModelError: if they do not, with the reason.
    """
    name = type(model).__name__

    def refuse(why: str, fix: str = "train this model without ContextParallelPlugin") -> UnsupportedModelError:
        return UnsupportedModelError(
            f"The attention of {name} cannot be sharded along the sequence.",
            where="plugin context_parallel",
            why=why,
            fix=fix,
        )

    try:
        from transformers import PreTrainedModel
    except ImportError:
        PreTrainedModel = None  # type: ignore[assignment,misc]
    if PreTrainedModel is None or not isinstance(model, PreTrainedModel):
        raise refuse(
            "it is not a model of transformers, so its attention function cannot be replaced",
            "derive it from transformers.PreTrainedModel and call the function that its configuration names",
        )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise refuse(f"layers of kind {', '.join(sorted(kinds))} mix positions in another way")
    both_ways = any(getattr(module, "is_causal", True) is False for module in model.modules())
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True) or both_ways:
        raise refuse("only causal attention is supported")
    if getattr(config, "attention_chunk_size", None) and "chunked_attention" in str(getattr(config, "layer_types", "")):
        raise refuse("chunked attention is not supported")
    forward = inspect.signature(model.forward).parameters
    if "position_ids" not in forward:
        raise refuse("it has no argument position_ids, so positions would start at zero on every rank")
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.values()):
        raise refuse("it has no **kwargs, with which the ring is passed to its layers")
    before = config._attn_implementation
    register_attention()
    model.set_attn_implementation(ATTENTION)
    taken = model.config._attn_implementation == ATTENTION
    model.set_attn_implementation(before)
    if not taken:
        raise refuse("its attention layers do not call the function that its configuration names")


def own_loss(model: nn.Module) -> str | None:
    """Why a model's loss is not the mean over tokens of shifted labels; None if it is."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not hasattr(type(model), "loss_function"):
        return "it has no loss_function of transformers"
    if model.loss_function is not ForCausalLMLoss:
        return "it has its own loss function; only the mean over next tokens can be computed from shards"
    return None


def register_attention() -> None:
    """Registers the attention function with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, ring_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


def ring_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Ring attention, with the interface of an attention function of transformers.

    Args:
        module: the attention layer.
        query: [batch, heads, positions, dim].
        key, value: [batch, key/value heads, positions, dim].
        attention_mask: the codes of :class:`~neuron_accel_context_parallel.calls.Splitter`.
        scaling: factor of the scores; None: ``dim ** -0.5``.
        dropout: probability of dropout of attention weights.
        sliding_window: size of the sliding window; None: no window.
        softcap: limit of the scores; None: no limit.
        is_causal: whether attention is causal; None: as the layer is.
        others: the ring, and arguments that are not supported.

    Returns:
        the output [batch, positions, heads, dim], and None for the weights.

    Raises:
        UsageError: if it is called outside of the prepared model's call.
        UnsupportedModelError: for arguments that are not supported, and for dropout on lazy devices.
    """
    ring = others.get(RING)
    if ring is None or attention_mask is None:
        raise UsageError(
            f"{type(module).__name__} was called without the ring of context parallelism.",
            where="plugin context_parallel",
            why="a module of the model was called directly, or the model does not pass its arguments on to its layers",
            fix="call the model that `prepare` returned; otherwise train it without ContextParallelPlugin",
        )
    unknown = [name for name in _OTHER_SCORES if others.get(name) is not None]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if unknown or not causal or (ring.is_lazy and dropout):
        raise UnsupportedModelError(
            f"{type(module).__name__} uses features that context parallelism does not support: "
            + ", ".join(
                [*unknown, *([] if causal else ["attention to later tokens"]), *(["dropout"] if dropout else [])]
            )
            + ".",
            where="plugin context_parallel",
            why="dropout masks cannot be regenerated in the backward pass on lazy devices"
            if ring.is_lazy and dropout
            else "its scores would be computed without them",
            fix="set the attention dropout of its configuration to 0"
            if ring.is_lazy and dropout
            else "train this model without ContextParallelPlugin",
        )
    ring.visits += 1
    ring.windows += sliding_window is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    look = AttentionOptions(scores=Scores(scale=float(scale), cap=softcap), window=sliding_window, dropout=dropout)
    return ring.attention(query, key, value, look, codes_of(attention_mask)), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function for transformers, which raises an error: sharded calls pass codes instead of a mask."""
    raise UsageError(
        "An attention mask was requested outside of a sharded call.",
        where="plugin context_parallel",
        why="masks of queries by keys are not sharded",
        fix="call the model that `prepare` returned, not one of its modules; generate with a dynamic cache",
    )

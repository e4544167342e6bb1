# SPDX-License-Identifier: Apache-2.0
"""Plans of layers of linear attention with the delta rule (Gated DeltaNet, Kimi Delta Attention), which are recognised
by their submodules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from neuron_accel.models.plan import Style, colwise, rowwise, sharded, shared

_KEYS, _VALUES, _HEADS = "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"
_KEY, _VALUE = "linear_key_head_dim", "linear_value_head_dim"


@dataclass(frozen=True, kw_only=True)
class DeltaForm:
    """One form of such a layer. Each head is independent, from its projections to its norm.

    Args:
        styles: styles of all its submodules and parameters.
        counters: attributes of the layer and its submodules that count the heads or features of a rank, with the
            configuration attribute that counts those of the model.
        heads: the attribute of the layer that counts each kind of head, by the configuration attribute. All of them
            must be divisible by the degree, since a value head stays with its key head.
    """

    styles: Mapping[str, Style]
    counters: Mapping[str, Mapping[str, str]]
    heads: Mapping[str, str]


def _convolution(*units: str) -> dict[str, dict[str, str]]:
    return {"conv1d": dict.fromkeys(("in_channels", "out_channels", "groups"), units[0])}


_BLOCKS: dict[str, Any] = {"units": (_KEYS, _KEYS, _VALUES), "widths": (_KEY, _KEY, _VALUE)}
"""Queries, keys and values in consecutive blocks."""
_GATED = {
    "conv1d": sharded(**_BLOCKS),
    "A_log": sharded(units=_VALUES),
    "dt_bias": sharded(units=_VALUES),
}
_GATED_COUNTERS = {
    "": {"num_k_heads": _KEYS, "key_dim": _KEYS, "num_v_heads": _VALUES, "value_dim": _VALUES},
    **_convolution(_KEYS),
}
_GATED_HEADS = {_KEYS: "num_k_heads", _VALUES: "num_v_heads"}

_KIMI = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "b_proj"), colwise(units=_HEADS)),
    "conv1d": sharded(units=(_HEADS,) * 3),
    "forget_gate.dt_bias": sharded(units=_HEADS),
    "o_norm": shared(),
    "o_proj": rowwise(units=_HEADS),
}
_KIMI_COUNTERS = {
    **{part: {"num_heads": _HEADS, "qkv_dim": _HEADS} for part in ("", "forget_gate")},
    **_convolution(_HEADS),
}

_FORMS = (
    DeltaForm(  # Qwen3-Next: what belongs to a key head side by side
        styles={
            **_GATED,
            **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), colwise(units=_KEYS)),
            "norm": shared(),
            "out_proj": rowwise(units=_VALUES),
        },
        counters=_GATED_COUNTERS,
        heads=_GATED_HEADS,
    ),
    DeltaForm(  # Qwen3.5
        styles={
            **_GATED,
            "in_proj_qkv": colwise(**_BLOCKS),
            **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a"), colwise(units=_VALUES)),
            "norm": shared(),
            "out_proj": rowwise(units=_VALUES),
        },
        counters=_GATED_COUNTERS,
        heads=_GATED_HEADS,
    ),
    DeltaForm(  # OLMo Hybrid
        styles={
            **_GATED,
            **dict.fromkeys(("q_proj", "k_proj"), colwise(units=_KEYS)),
            **dict.fromkeys(("v_proj", "a_proj", "b_proj", "g_proj"), colwise(units=_VALUES)),
            "o_norm": shared(),
            "o_proj": rowwise(units=_VALUES),
        },
        counters=_GATED_COUNTERS,
        heads=_GATED_HEADS,
    ),
    DeltaForm(  # Kimi Linear: gates over latent features
        styles={
            **_KIMI,
            **dict.fromkeys(("g_a_proj", "forget_gate.f_a_proj"), shared()),
            **dict.fromkeys(("g_b_proj", "forget_gate.f_b_proj"), colwise(units=_HEADS)),
            "forget_gate.A_log": sharded(units=_HEADS, dim=2),
        },
        counters=_KIMI_COUNTERS,
        heads={_HEADS: "num_heads"},
    ),
    DeltaForm(  # Ling
        styles={
            **_KIMI,
            **dict.fromkeys(("g_proj", "forget_gate.f_proj"), colwise(units=_HEADS)),
            "forget_gate.A_log": sharded(units=_HEADS),
        },
        counters=_KIMI_COUNTERS,
        heads={_HEADS: "num_heads"},
    ),
)


def delta_form(module: nn.Module, config: Any) -> DeltaForm | None:
    """Returns the form of a layer of linear attention; None if it is another layer, or does not match its
    configuration."""
    names = {name for name, _ in module.named_parameters()}
    for form in _FORMS:
        parts = {next((part for part in form.styles if f"{name}.".startswith(f"{part}.")), name) for name in names}
        counts = {attribute: getattr(config, name, None) for name, attribute in form.heads.items()}
        if parts == form.styles.keys() and all(
            count and getattr(module, attribute, None) == count for attribute, count in counts.items()
        ):
            return form
    return None

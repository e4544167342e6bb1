# SPDX-License-Identifier: Apache-2.0
"""Precision on Neuron: disables casts by the compiler under autocast, and detects weight updates lost to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping

from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.flags import VARIABLE

LEGACY = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Variables with which torch_xla computes in bf16 while torch reports fp32."""

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_FALSE = ("", "0", "false", "no", "off", "n", "f")


def set_precision_flags(environ: MutableMapping[str, str], *, mixed_precision: str, compiles_for_neuron: bool) -> None:
    """Disables casts by the Neuron compiler under autocast, and warns of legacy variables; called before compilation.

    Args:
        environ: environment variables; with ``"bf16"``, ``--auto-cast=none`` is added to ``NEURON_CC_FLAGS``.
        mixed_precision: as in Accelerate.
        compiles_for_neuron: whether graphs are compiled for a Neuron device (XLA path).

    Raises:
        ConfigurationError: if ``NEURON_CC_FLAGS`` contains another value of ``--auto-cast``.
    """
    for name in LEGACY:
        if _is_on(environ, name):
            warnings.warn(
                f"{name} computes in bf16 what torch, and dtypes in checkpoints, report as fp32, and torch_xla will "
                "remove it. Unset it, and use mixed_precision='bf16' (autocast, fp32 weights), or "
                f"model.to(torch.bfloat16) with Zero1Plugin() (fp32 master weights) or with {ROUNDING}=1.",
                FutureWarning,
                stacklevel=4,
            )
    if compiles_for_neuron and mixed_precision == "bf16":
        environ[VARIABLE] = CompilerOptions(auto_cast="none").merge(environ)


def lost_updates(
    environ: Mapping[str, str], *, low_precision: bool, masters: bool, autocast: bool = False
) -> str | None:
    """Returns a warning if weight updates are lost to rounding, or stochastic rounding only adds noise; else None.

    Args:
        environ: environment variables.
        low_precision: whether the model has bf16 parameters.
        masters: whether the optimizer updates fp32 master weights.
        autocast: whether operations run in bf16 on fp32 weights.
    """
    rounds = _is_on(environ, ROUNDING)
    if low_precision and not masters and not rounds:
        return (
            "Parameters are bf16 and the optimizer updates them in bf16: updates below 1/256 of a weight are rounded "
            f"away. Use Zero1Plugin(), which keeps fp32 master weights, or set {ROUNDING}=1 before the start "
            "(neuron_accel.neuron.RuntimeOptions(stochastic_rounding=True), `neuron-accel launch`)."
        )
    if rounds and autocast and not low_precision:
        return (
            f"{ROUNDING}=1 rounds values that autocast casts to bf16 stochastically. Weights are fp32, so no update is "
            "lost without it, and it only adds noise: unset it."
        )
    if low_precision and masters and rounds:
        return (
            f"{ROUNDING}=1 rounds fp32 master weights to bf16 parameters stochastically. No update is lost without it, "
            "and it only adds noise: unset it."
        )
    return None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _FALSE

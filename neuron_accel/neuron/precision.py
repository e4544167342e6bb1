"""What dtypes ask of Neuron's compiler and runtime: casts are torch's to decide, and rounding must not lose updates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping

from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.flags import VARIABLE

LEGACY = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Variables with which torch_xla makes bf16 of what torch calls fp32."""

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_FALSE = ("", "0", "false", "no", "off", "n", "f")


def settle_precision(environ: MutableMapping[str, str], *, mixed_precision: str, compiles_for_neuron: bool) -> None:
    """Before anything is compiled: under autocast, Neuron's compiler casts nothing of its own accord; legacy variables
    are recognised, with a warning.

    Args:
        environ: environment variables; ``NEURON_CC_FLAGS`` gets ``--auto-cast=none`` under ``"bf16"``.
        mixed_precision: Accelerate's.
        compiles_for_neuron: whether the device is Neuron's, through XLA.

    Raises:
        ConfigurationError: if ``NEURON_CC_FLAGS`` asks for another cast.
    """
    for name in LEGACY:
        if _is_on(environ, name):
            warnings.warn(
                f"{name} makes bf16 of everything that torch calls fp32, without a word in dtypes or checkpoints, and "
                "torch_xla will drop it. Unset it, and use mixed_precision='bf16' (autocast, fp32 weights), or "
                f"model.to(torch.bfloat16) with Zero1Plugin() (fp32 master weights) or with {ROUNDING}=1.",
                FutureWarning,
                stacklevel=4,
            )
    if compiles_for_neuron and mixed_precision == "bf16":
        environ[VARIABLE] = CompilerOptions(auto_cast="none").merge(environ)


def lost_updates(
    environ: Mapping[str, str], *, low_precision: bool, masters: bool, autocast: bool = False
) -> str | None:
    """Why updates of weights will not arrive as they should; None if they will.

    Args:
        environ: environment variables.
        low_precision: whether the model has bf16 parameters.
        masters: whether the optimizer updates fp32 copies of them.
        autocast: whether operations run in bf16 on fp32 weights.
    """
    rounds = _is_on(environ, ROUNDING)
    if low_precision and not masters and not rounds:
        return (
            "Parameters are bf16 and the optimizer updates them as they are: updates below 1/256 of a weight are "
            f"rounded away. Use Zero1Plugin(), which keeps fp32 master weights, or set {ROUNDING}=1 before the start "
            "(neuron_accel.neuron.RuntimeOptions(stochastic_rounding=True), `neuron-accel launch`)."
        )
    if rounds and autocast and not low_precision:
        return (
            f"{ROUNDING}=1 rounds what autocast casts to bf16 at random. Weights are fp32 and lose no update, so it "
            "adds noise and gains nothing: unset it."
        )
    if low_precision and masters and rounds:
        return (
            f"{ROUNDING}=1 rounds the fp32 master weights to the model's bf16 at random. They are exact, so it adds "
            "noise and gains nothing: unset it."
        )
    return None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _FALSE

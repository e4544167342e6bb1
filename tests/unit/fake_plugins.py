"""Plugins that do nothing but declare things."""

from __future__ import annotations

from copy import copy
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any

from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec
from neuron_accel.engine.plan.plugin import API_VERSION, Claim, Phase, PluginSpec, StrategyPlugin

KINDS = {
    "pp": AxisKind.STAGE,
    "dp": AxisKind.DATA,
    "cp": AxisKind.SEQUENCE,
    "tp": AxisKind.MODEL,
    "island": AxisKind.REPLICA,
}

WORK: dict[Claim, dict[str, Any]] = {
    Claim.BACKWARD: {"backward_pass": lambda self, loss, run: (yield)},
    Claim.GRADIENT_REDUCTION: {"backward_pass": lambda self, loss, run: (yield), "gradients": lambda self, run: None},
    Claim.OPTIMIZER_STATE: {"transform_optimizer": lambda self, optimizer, run: optimizer},
}
"""What owners must implement."""


def fake(
    name: str, phase: Phase = Phase.MEMORY, *, axes: dict[str, int] | None = None, options: Any = None, **spec: Any
) -> StrategyPlugin:
    """A plugin called ``name``; names in ``axes`` are those of :data:`KINDS`, ``options`` are its fields and values."""
    spec.setdefault("api_version", API_VERSION)
    sets = {key: frozenset(value) if isinstance(value, (set, list, tuple)) else value for key, value in spec.items()}
    brought = tuple(AxisSpec(name=axis, degree=n, kind=KINDS[axis]) for axis, n in (axes or {}).items())
    cls = make_dataclass(
        f"{name.title()}Plugin",
        [(key, Any, field(default_factory=partial(copy, value))) for key, value in (options or {}).items()],
        bases=(StrategyPlugin,),
        namespace={
            "spec": PluginSpec(name=name, phase=phase, **sets),
            "axes": lambda self: brought,
            **{hook: value for claim in sets.get("claims", ()) for hook, value in WORK[claim].items()},
        },
        frozen=True,
        kw_only=True,
    )
    cls.__module__ = __name__
    return cls()


REDUCER = fake("reducer", Phase.GRADIENTS, claims={Claim.GRADIENT_REDUCTION})
"""What :data:`DEFAULTS` names."""

DEFAULTS = {Claim.GRADIENT_REDUCTION: REDUCER}

"""Plugins that do nothing but declare things."""

from __future__ import annotations

from copy import copy
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any

from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec
from neuron_accel.engine.plan.plugin import Claim, Phase, PluginSpec, StrategyPlugin

KINDS = {"pp": AxisKind.STAGE, "dp": AxisKind.DATA, "cp": AxisKind.SEQUENCE, "tp": AxisKind.MODEL}


def fake(
    name: str, phase: Phase = Phase.MEMORY, *, axes: dict[str, int] | None = None, options: Any = None, **spec: Any
) -> StrategyPlugin:
    """A plugin called ``name``; names in ``axes`` are those of :data:`KINDS`, ``options`` are its fields and values."""
    sets = {key: frozenset(value) if isinstance(value, (set, list, tuple)) else value for key, value in spec.items()}
    brought = tuple(AxisSpec(name=axis, degree=n, kind=KINDS[axis]) for axis, n in (axes or {}).items())
    cls = make_dataclass(
        f"{name.title()}Plugin",
        [(key, Any, field(default_factory=partial(copy, value))) for key, value in (options or {}).items()],
        bases=(StrategyPlugin,),
        namespace={"spec": PluginSpec(name=name, phase=phase, **sets), "axes": lambda self: brought},
        frozen=True,
        kw_only=True,
    )
    cls.__module__ = __name__
    return cls()


REDUCER = fake("reducer", Phase.GRADIENTS, claims={Claim.GRADIENT_REDUCTION, Claim.GRADIENT_CLIPPING})
"""What :data:`DEFAULTS` names."""

DEFAULTS = {Claim.GRADIENT_REDUCTION: REDUCER, Claim.GRADIENT_CLIPPING: REDUCER}

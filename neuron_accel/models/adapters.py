# SPDX-License-Identifier: Apache-2.0
"""Layers that peft has wrapped to add low-rank adapters: how their factors are sharded follows from the layer's style.

A layer computes ``W x + B A x``. Where the output features of ``W`` are sharded, so are those of ``B``, and every rank
applies ``A`` to the input of the region. Where its input features are sharded, so are those of ``A``, whose output is
summed over ranks, and ``B`` is applied behind the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from neuron_accel.models.plan import ArchitecturePlan, Style, named_modules, replicated, shared

_WRAPPED, _A, _B = "base_layer", "lora_A", "lora_B"


def with_adapters(plan: ArchitecturePlan, base: nn.Module) -> ArchitecturePlan:
    """Returns the plan with the styles of wrapped layers, and of the factors of their adapters, by FQN; the plan itself
    if none is wrapped."""
    styles: dict[str, Style] = {}
    behind = ""
    for pattern, style in plan.styles.items():
        found = named_modules(base, pattern)
        if style.kind not in ("colwise", "rowwise") or not any(_is_wrapped(module) for _, module in found):
            styles[pattern] = style
            continue
        for name, module in found:
            styles.update(_styles(name, module, style) if _is_wrapped(module) else {name: style})
            if style.kind == "rowwise" and _is_wrapped(module):
                behind = name
    if behind and not plan.sequence:
        plan = replace(
            plan, sequence=f"the adapter of {behind!r} ends behind its region, where ranks differ in positions"
        )
    return replace(plan, styles=styles)


def _is_wrapped(module: Any) -> bool:
    return all(hasattr(module, name) for name in (_WRAPPED, _A, _B))


def _styles(name: str, module: Any, style: Style) -> Iterator[tuple[str, Style]]:
    yield f"{name}.{_WRAPPED}", style
    for adapter in module.lora_A:
        if style.kind == "colwise":
            yield f"{name}.{_A}.{adapter}", shared()
            yield f"{name}.{_B}.{adapter}", style
        else:
            yield f"{name}.{_A}.{adapter}", style
            yield f"{name}.{_B}.{adapter}", replicated()

# SPDX-License-Identifier: Apache-2.0
"""The layouts that may be tried: all that the installed plugins offer, and what each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from neuron_accel.commands import plugin_classes, to_config
from neuron_accel.contract import AxisKind, Phase, StrategyPlugin
from neuron_accel_plan.spaces import LayoutSpace, layouts_by

_REST = frozenset({Phase.STAGES, Phase.GRADIENTS, Phase.OPTIMIZER})
"""Phases of plugins that do not change what a block computes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that may be tried.

    Args:
        plugins: the strategies.
        accumulation: number of calls of the model per optimizer step.
    """

    plugins: tuple[StrategyPlugin, ...]
    accumulation: int

    def __str__(self) -> str:
        parts = [text(plugin) for plugin in self.plugins]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join(parts) or "data parallelism"

    def configuration(self) -> dict[str, Any]:
        """Returns the keys of a configuration file."""
        found: dict[str, Any] = {}
        if self.accumulation > 1:
            found["gradient_accumulation_steps"] = self.accumulation
        found["plugins"] = [_entry(plugin) for plugin in self.plugins]
        return found


def layouts_of(space: LayoutSpace) -> Iterator[Layout]:
    """Yields the layouts that may be tried, each with the numbers of micro-batches that its samples allow."""
    classes = offering()
    excluded = {(one, other) for one in classes for other in classes if exclude(one, other)}
    for chosen in _combinations(classes, excluded, space):
        rows, rest = divmod(space.global_batch, dataclasses.replace(space, chosen=chosen).data_ranks)
        if rest or not rows:
            continue  # fewer samples than ranks: the plugins' degrees are too small
        if any(axis.kind is AxisKind.STAGE and axis.degree > 1 for plugin in chosen for axis in plugin.axes()):
            yield Layout(plugins=chosen, accumulation=1)
            continue
        yield from (Layout(plugins=chosen, accumulation=rows // size) for size in _micro_batches(rows))


def _micro_batches(rows: int) -> list[int]:
    """Sizes of micro-batches that are tried: the powers of two that divide a rank's samples, and all of them."""
    powers = [1 << n for n in range(rows.bit_length()) if rows % (1 << n) == 0]
    return powers if powers[-1] == rows else [*powers, rows]


def family_of(plugins: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...]:
    """Returns the plugins that change what a block computes."""
    return tuple(plugin for plugin in plugins if plugin.spec.phase not in _REST)


def offering() -> list[type[StrategyPlugin]]:
    """The plugin classes that offer layouts, in the order in which they act. Packages that cannot be loaded are left
    out, as they are for training."""
    found = [cls for cls in plugin_classes() if layouts_by(cls)]
    return sorted(found, key=lambda cls: (cls.spec.phase, cls.spec.name))


def configurations(cls: type[StrategyPlugin], space: LayoutSpace) -> Sequence[StrategyPlugin]:
    """The configurations of a class that may be tried."""
    offered = layouts_by(cls)
    return [] if offered is None else list(offered(space))


def _combinations(
    classes: Sequence[type[StrategyPlugin]],
    excluded: Set[tuple[type[StrategyPlugin], type[StrategyPlugin]]],
    space: LayoutSpace,
) -> Iterator[tuple[StrategyPlugin, ...]]:
    if not classes:
        yield space.chosen
        return
    first, *others = classes
    yield from _combinations(others, excluded, space)
    if any((first, type(plugin)) in excluded for plugin in space.chosen):
        return
    for plugin in configurations(first, space):
        yield from _combinations(others, excluded, dataclasses.replace(space, chosen=(*space.chosen, plugin)))


def exclude(one: type[StrategyPlugin], other: type[StrategyPlugin]) -> bool:
    """Whether plugins of two classes cannot run together."""
    a, b = one.spec, other.spec
    return bool(a.claims & b.claims or b.name in a.conflicts or a.name in b.conflicts)


def text(plugin: StrategyPlugin) -> str:
    """Returns the name of a plugin, with the options that are not the defaults."""
    options = ", ".join(f"{name}={value}" for name, value in _options(plugin).items())
    return f"{plugin.spec.name}({options})" if options else plugin.spec.name


def _options(plugin: StrategyPlugin) -> dict[str, Any]:
    """The options that are not the defaults."""
    ((options,),) = (entry.values() for entry in to_config([plugin])["plugins"])
    changed = {field.name for field in dataclasses.fields(plugin) if getattr(plugin, field.name) != field.default}
    return {name: value for name, value in options.items() if name in changed}


def _entry(plugin: StrategyPlugin) -> str | Mapping[str, Any]:
    options = _options(plugin)
    return {plugin.spec.name: options} if options else plugin.spec.name

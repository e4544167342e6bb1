"""The order in which plugins act: by phase, then by declaration, then by name; never by that of a list."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from neuron_accel.engine.errors import PlanError
from neuron_accel.engine.plugin import StrategyPlugin

Edges = dict[str, dict[str, str]]
"""Successor to its predecessors, each with the declaration that says so."""


def in_order(plugins: Mapping[str, StrategyPlugin]) -> list[tuple[StrategyPlugin, str]]:
    """The plugins in acting order, each with the reason for its place.

    Raises:
        PlanError: if declarations go round in a circle, or contradict the phases.
    """
    result = []
    edges = _edges(plugins)
    for phase in sorted({plugin.spec.phase for plugin in plugins.values()}):
        waiting = {name: set(edges[name]) for name, plugin in plugins.items() if plugin.spec.phase == phase}
        alone = len(waiting) == 1
        while waiting:
            ready = sorted(name for name, predecessors in waiting.items() if not predecessors & waiting.keys())
            if not ready:
                raise _cycle_error({name: edges[name] for name in waiting})
            name = ready[0]
            del waiting[name]
            result.append((plugins[name], _reason(plugins[name], edges[name], alone)))
    return result


def _edges(plugins: Mapping[str, StrategyPlugin]) -> Edges:
    edges: Edges = {name: {} for name in plugins}
    for name, plugin in sorted(plugins.items()):
        for first in sorted(plugin.spec.after & plugins.keys()):
            _add_edge(edges, plugins, first, name, f"{name!r} declares after={first!r}")
        for second in sorted(plugin.spec.before & plugins.keys()):
            _add_edge(edges, plugins, name, second, f"{name!r} declares before={second!r}")
    return edges


def _add_edge(edges: Edges, plugins: Mapping[str, StrategyPlugin], first: str, second: str, declaration: str) -> None:
    early, late = plugins[first].spec.phase, plugins[second].spec.phase
    if early > late:
        raise PlanError(
            f"Plugin {first!r} cannot act before {second!r}.",
            where=declaration,
            why=f"phase {early.name.lower()} of {first!r} comes after phase {late.name.lower()} of {second!r}",
            fix="'after' and 'before' order plugins of the same phase; change the declaration or the phase",
        )
    if early == late:
        edges[second].setdefault(first, declaration)


def _reason(plugin: StrategyPlugin, predecessors: Mapping[str, str], alone: bool) -> str:
    phase = f"phase {plugin.spec.phase.name.lower()}"
    if predecessors:
        return f"{phase}; {'; '.join(predecessors[name] for name in sorted(predecessors))}"
    return phase if alone else f"{phase}; by name where nothing else is declared"


def _cycle_error(edges: Edges) -> PlanError:
    """Every one of ``edges`` waits for another one: walking back from any of them ends in a circle."""
    walk = [min(edges)]
    while True:
        before = min(name for name in edges[walk[-1]] if name in edges)
        if before in walk:
            break
        walk.append(before)
    cycle = walk[walk.index(before) :][::-1]
    start = cycle.index(min(cycle))
    cycle = [*cycle[start:], *cycle[:start], cycle[start]]
    return PlanError(
        f"Plugins cannot be put in order: {' -> '.join(cycle)}.",
        where="; ".join(edges[second][first] for first, second in itertools.pairwise(cycle)),
        why="each of them must act before the next, and the last before the first",
        fix=f"leave one of {', '.join(sorted(set(cycle)))} out, or drop one of these declarations",
    )

# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of a run. Plugins are ordered by phase, then by their declarations, then by name, not as they are
given."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from neuron_accel.engine.plan import version_3
from neuron_accel.engine.plan.hardware import Hardware
from neuron_accel.engine.plan.mesh import DATA_AXIS, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.plan.plugin import Claim, PlanContext, StrategyPlugin, check_contract
from neuron_accel.errors import PlanError, PluginError

Edges = dict[str, dict[str, str]]
"""Predecessors of each plugin, each with the declaration that makes it one."""


def in_order(plugins: Mapping[str, StrategyPlugin]) -> list[tuple[StrategyPlugin, str]]:
    """Returns the plugins in the order in which they act, each with the reason for its place.

    Raises:
        PlanError: if declarations form a cycle, or contradict the phases.
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
            early, late, declaration = (
                plugins[first].spec.phase,
                plugin.spec.phase,
                f"{name!r} declares after={first!r}",
            )
            if early > late:
                raise PlanError(
                    f"Plugin {first!r} cannot act before {name!r}.",
                    where=declaration,
                    why=f"phase {early.name.lower()} of {first!r} comes after phase {late.name.lower()} of {name!r}",
                    fix="'after' orders plugins of the same phase; change the declaration or the phase",
                )
            if early == late:
                edges[name][first] = declaration
    return edges


def _reason(plugin: StrategyPlugin, predecessors: Mapping[str, str], alone: bool) -> str:
    phase = f"phase {plugin.spec.phase.name.lower()}"
    if predecessors:
        return f"{phase}; {'; '.join(predecessors[name] for name in sorted(predecessors))}"
    return phase if alone else f"{phase}; by name where nothing else is declared"


def _cycle_error(edges: Edges) -> PlanError:
    """Returns the error for a cycle. Every plugin in ``edges`` waits for another one, so following predecessors leads
    into a cycle."""
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


# ---- The planner, a pure function ------------------------------------------------------------------------------------
# It uses no process group, no tensor and no environment variable, and does not depend on the order in which plugins are
# given, so that every rank makes the same plan, or raises the same error.
BACKEND = "the backend"
"""Represents the backend among the providers of a capability."""

AXIS = "axis:"
"""The prefix of capabilities that represent an axis of more than one rank."""

Provenance = Callable[[type[StrategyPlugin]], str]


def module_of(cls: type[StrategyPlugin]) -> str:
    """Returns the provenance of a class of which only the module is known."""
    return f"module {cls.__module__}"


def make_plan(
    plugins: Iterable[StrategyPlugin],
    *,
    world_size: int,
    backend_capabilities: Iterable[str] = frozenset(),
    backend_missing: Mapping[str, str] = MappingProxyType({}),
    default_owners: Mapping[Claim, StrategyPlugin] = MappingProxyType({}),
    provenance: Provenance = module_of,
    hardware: Hardware | None = None,
) -> Plan:
    """Makes the plan of a run.

    Args:
        plugins: the requested plugins, in any order.
        world_size: number of ranks.
        backend_capabilities: capabilities of the backend.
        backend_missing: reasons why it lacks a capability, by its name, if it was probed.
        default_owners: the plugins that own responsibilities which no other plugin claims. A default owner owns only
            those, also if it is among ``plugins``; one that owns nothing is not part of the plan.
        provenance: returns the distribution and version of a plugin class.
        hardware: limits of the machines; None for no limits.

    Raises:
        PluginError: if an object is not a plugin, or was written for another version of the contract.
        PlanError: if the plugins cannot be combined, or cannot run on this number of ranks.
    """
    given = _by_name(_with_companions(plugins), provenance)
    defaults = {claim: given.get(plugin.spec.name, plugin) for claim, plugin in sorted(default_owners.items())}
    known = {plugin.spec.name: plugin for plugin in defaults.values()} | given
    sources = {name: provenance(type(plugin)) for name, plugin in known.items()}

    owners, reasons = _owners(given, defaults, sources)
    taking_part = {name: known[name] for name in sorted({*given, *owners.values()})}
    _check_responsibilities(taking_part, owners, sources)
    mesh = _mesh(taking_part, world_size, sources)
    if hardware is not None:
        hardware.check_mesh(mesh)
    _check_gradients(mesh, owners)
    providers = _providers(taking_part, mesh, backend_capabilities)
    for plugin in taking_part.values():
        _check_requirements(plugin, taking_part, providers, sources)
        _check_conflicts(plugin, taking_part, providers, sources)

    ordered = in_order(taking_part)
    reasons |= {f"plugins.{plugin.spec.name}": reason for plugin, reason in ordered}
    plan = Plan(
        mesh=mesh,
        plugins=tuple(plugin for plugin, _ in ordered),
        owners=owners,
        capabilities=frozenset(providers),
        reasons=reasons,
        provenance={name: sources[name] for name in taking_part},
    )
    for plugin in plan.plugins:
        by_name = {other.spec.name: other for other in plan.plugins}
        plugin.validate(
            PlanContext(mesh=mesh, plugins=by_name, capabilities=plan.capabilities, missing=backend_missing)
        )
    return plan


def _with_companions(plugins: Iterable[StrategyPlugin]) -> Iterator[StrategyPlugin]:
    for plugin in plugins:
        yield plugin
        if isinstance(plugin, StrategyPlugin):
            yield from _with_companions(plugin.companions())


def _by_name(plugins: Iterable[StrategyPlugin], provenance: Provenance) -> dict[str, StrategyPlugin]:
    """Returns plugins by name, sorted, after checking that each is a plugin and none is given twice."""
    plugins = list(plugins)
    for plugin in plugins:
        _check_object(plugin, provenance)
    for name, count in sorted(Counter(plugin.spec.name for plugin in plugins).items()):
        if count > 1:
            same_name = [plugin for plugin in plugins if plugin.spec.name == name]
            raise PlanError(
                f"Plugin {name!r} is given {count} times.",
                where=", ".join(sorted(f"{type(p).__qualname__} of {provenance(type(p))}" for p in same_name)),
                why="a strategy acts once, and two configurations of it contradict each other",
                fix="keep one of them",
            )
    return {plugin.spec.name: plugin for plugin in sorted(plugins, key=lambda plugin: plugin.spec.name)}


def _check_object(plugin: object, provenance: Provenance) -> None:
    if isinstance(plugin, type) and issubclass(plugin, StrategyPlugin):
        raise PluginError(
            f"{plugin.__name__} is a class; a plan needs objects.",
            where=provenance(plugin),
            why="the object holds the options",
            fix=f"write {plugin.__name__}(...)",
        )
    if not isinstance(plugin, StrategyPlugin):
        raise PluginError(
            f"{plugin!r} is not a plugin.",
            where="the list of plugins",
            why="strategies derive from neuron_accel.StrategyPlugin",
            fix="give plugin objects; names and options belong in a configuration file",
        )
    check_contract(type(plugin), provenance(type(plugin)))
    if version_3.is_of(type(plugin)):
        version_3.warn(type(plugin), provenance(type(plugin)))


# ---- responsibilities ------------------------------------------------------------------------------------------------
def _owners(
    given: Mapping[str, StrategyPlugin], defaults: Mapping[Claim, StrategyPlugin], sources: Mapping[str, str]
) -> tuple[dict[Claim, str], dict[str, str]]:
    """Returns the name of the owner of each responsibility, and the reasons."""
    owners: dict[Claim, str] = {}
    reasons: dict[str, str] = {}
    for claim in Claim:
        default = defaults[claim].spec.name if claim in defaults else None
        claimants = [name for name, plugin in given.items() if claim in plugin.spec.claims and name != default]
        if len(claimants) > 1:
            raise _two_owners(claim, claimants, sources)
        if claimants:
            owners[claim] = claimants[0]
            rest = f"; otherwise {default!r} would own it by default" if default else ""
            reasons[f"owners.{claim.value}"] = f"claims it{rest}"
        elif default is not None:
            owners[claim] = default
            reasons[f"owners.{claim.value}"] = "owns it by default; no other plugin claims it"
    for name in sorted({plugin.spec.name for plugin in defaults.values()} & set(owners.values())):
        plugin = next(plugin for plugin in defaults.values() if plugin.spec.name == name)
        for claim in sorted(plugin.spec.claims - owners.keys()):
            owners[claim] = name
            reasons[f"owners.{claim.value}"] = "claims it; present as the default owner of another responsibility"
    return owners, reasons


def _two_owners(claim: Claim, names: list[str], sources: Mapping[str, str]) -> PlanError:
    both = " and ".join(repr(name) for name in names)
    return PlanError(
        f"Plugins {both} both claim {claim.value}." if len(names) == 2 else f"Plugins {both} all claim {claim.value}.",
        where="; ".join(_who(name, sources) for name in names),
        why="this responsibility has exactly one owner; performing it twice would be wrong",
        fix=f"leave out all but one of {', '.join(names)}",
    )


def _check_responsibilities(
    plugins: Mapping[str, StrategyPlugin], owners: Mapping[Claim, str], sources: Mapping[str, str]
) -> None:
    for name, plugin in plugins.items():
        if plugin.spec.claims and name not in owners.values():
            claims = sorted(plugin.spec.claims)
            taken = ", ".join(f"{claim.value} is owned by {owners[claim]!r}" for claim in claims)
            raise PlanError(
                f"Plugin {name!r} has nothing left to own.",
                where="; ".join(_who(n, sources) for n in dict.fromkeys([name, *(owners[claim] for claim in claims)])),
                why=f"it is a default owner, which takes only what no other plugin claims: {taken}",
                fix=f"leave {name!r} out; its options would have no effect",
            )
        for claim in sorted(plugin.spec.refines):
            if claim not in owners:
                raise PlanError(
                    f"Plugin {name!r} takes part in {claim.value}, which no plugin owns.",
                    where=_who(name, sources),
                    why="it refines what an owner does, and cannot do it alone",
                    fix=f"add a plugin that claims {claim.value}",
                )


def _check_gradients(mesh: Mesh, owners: Mapping[Claim, str]) -> None:
    if mesh.gradient_axes and Claim.GRADIENT_REDUCTION not in owners:
        raise PlanError(
            f"No plugin owns {Claim.GRADIENT_REDUCTION.value}.",
            where=f"mesh {mesh}",
            why=f"ranks along {', '.join(mesh.gradient_axes)} hold the same parameters, which would diverge",
            fix=f"add a plugin that claims {Claim.GRADIENT_REDUCTION.value}, or give a default owner of it",
        )


# ---- mesh and capabilities -------------------------------------------------------------------------------------------
def _mesh(plugins: Mapping[str, StrategyPlugin], world_size: int, sources: Mapping[str, str]) -> Mesh:
    brought_by: dict[str, str] = {}
    axes = []
    for name, plugin in plugins.items():
        for axis in plugin.axes():
            if axis.name in brought_by:
                both = list(dict.fromkeys([brought_by[axis.name], name]))
                raise PlanError(
                    f"Axis {axis.name!r} is added twice, by {' and by '.join(repr(n) for n in both)}.",
                    where="; ".join(_who(n, sources) for n in both),
                    why="an axis has one degree and one meaning",
                    fix="keep one of them" if len(both) > 1 else "report it to the authors of this plugin",
                )
            brought_by[axis.name] = name
            axes.append(axis)
    return Mesh.build(axes, world_size)


def _providers(
    plugins: Mapping[str, StrategyPlugin], mesh: Mesh, backend_capabilities: Iterable[str]
) -> dict[str, set[str]]:
    """Returns the names of the providers of each capability."""
    bringing = {axis.name: name for name, plugin in plugins.items() for axis in plugin.axes()}
    providers: dict[str, set[str]] = {}
    for capability in backend_capabilities:
        providers.setdefault(capability, set()).add(BACKEND)
    for name, plugin in plugins.items():
        for capability in plugin.spec.provides:
            providers.setdefault(capability, set()).add(name)
    for axis in mesh.axes:
        if axis.degree > 1:
            providers.setdefault(f"{AXIS}{axis.name}", set()).add(bringing.get(axis.name, "the number of ranks"))
    return providers


def _check_requirements(
    plugin: StrategyPlugin,
    plugins: Mapping[str, StrategyPlugin],
    providers: Mapping[str, set[str]],
    sources: Mapping[str, str],
) -> None:
    name = plugin.spec.name
    for need in sorted(plugin.spec.requires):
        if need in plugins or need in providers:
            continue
        what, why, fix = f"{need!r}", "there is no plugin of that name, and none provides it", None
        if need.startswith(AXIS):
            axis = need.removeprefix(AXIS)
            what = f"an axis {axis!r} of more than one rank"
            why, fix = _missing_axis(axis, plugins)
            why = f"it needs the capability {need!r}: {why}"
        raise PlanError(
            f"Plugin {name!r} requires {what}.",
            where=_who(name, sources),
            why=why,
            fix=fix or f"add the plugin {need!r} or one that provides {need!r}, or leave {name!r} out",
        )


def _missing_axis(axis: str, plugins: Mapping[str, StrategyPlugin]) -> tuple[str, str]:
    """Returns why no axis of that name has several ranks, and what to do."""
    for name, plugin in plugins.items():
        if any(brought.name == axis for brought in plugin.axes()):
            return f"{name!r} adds that axis with degree 1", f"raise the degree of axis {axis!r} in {name!r} above 1"
    if axis == DATA_AXIS:
        return "the other degrees use up every rank", "start more ranks, or lower another degree"
    return "no plugin of this run adds that axis", f"add a plugin that adds axis {axis!r}, with a degree above 1"


def _check_conflicts(
    plugin: StrategyPlugin,
    plugins: Mapping[str, StrategyPlugin],
    providers: Mapping[str, set[str]],
    sources: Mapping[str, str],
) -> None:
    name = plugin.spec.name
    for enemy in sorted(plugin.spec.conflicts):
        others = sorted((providers.get(enemy, set()) | ({enemy} & plugins.keys())) - {name})
        if others:
            subject = repr(enemy) if others == [enemy] else f"{enemy!r}, which comes from {', '.join(others)}"
            raise PlanError(
                f"Plugin {name!r} cannot run together with {subject}.",
                where="; ".join(_who(n, sources) for n in [name, *others]),
                why=f"{name!r} declares this conflict",
                fix=f"leave out {name!r} or the provider of {enemy!r}",
            )


def _who(name: str, sources: Mapping[str, str]) -> str:
    return f"plugin {name!r} of {sources[name]}" if name in sources else name

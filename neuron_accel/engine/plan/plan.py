# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: mesh, plugins in order, and owners of responsibilities; its comparison between ranks, and its
description as text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from neuron_accel.engine.plan.coerce import to_plain
from neuron_accel.engine.plan.mesh import Mesh
from neuron_accel.engine.plan.plugin import HOOKS, Claim, StrategyPlugin, overrides
from neuron_accel.errors import DesyncError, PlanError, PluginError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


WIDTH = 110
SHOWN_GROUPS = 4
SHOWN_RANKS = 8
ABSENT = "<absent>"
"""Represents a missing value in a :class:`Difference`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run. Created by :func:`~neuron_accel.engine.plan.planner.make_plan`.

    Args:
        mesh: the mesh of ranks.
        plugins: the plugins in the order in which they act.
        owners: name of the plugin that owns each responsibility.
        capabilities: the capabilities of plugins and backend.
        reasons: explanations: ``"plugins.NAME"`` for a plugin's place, ``"owners.CLAIM"`` for the owner of a
            responsibility.
        provenance: plugin name to the distribution and version, or the module, that it comes from.
    """

    mesh: Mesh
    plugins: tuple[StrategyPlugin, ...]
    owners: Mapping[Claim, str] = field(hash=False)
    capabilities: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("owners", "reasons", "provenance"):
            object.__setattr__(self, name, MappingProxyType(dict(sorted(getattr(self, name).items()))))

    def __reduce__(self):  # a mapping proxy cannot be pickled or copied
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _rebuild, ({name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in values.items()},)

    def plugin(self, name: str) -> StrategyPlugin:
        """Returns the plugin of that name.

        Raises:
            PlanError: if the plan has none.
        """
        for plugin in self.plugins:
            if plugin.spec.name == name:
                return plugin
        names = [plugin.spec.name for plugin in self.plugins]
        raise PlanError(
            f"This plan has no plugin {name!r}.", where=f"plan over {self.mesh}", fix=did_you_mean(name, names)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data, which ranks compare. Reasons are left out.

        Raises:
            PluginError: if a plugin's configuration cannot be written as plain data.
        """
        return {
            "world_size": self.mesh.world_size,
            "mesh": {axis.name: {"degree": axis.degree, "kind": axis.kind.value} for axis in self.mesh.axes},
            "mesh_order": [axis.name for axis in self.mesh.axes],
            "order": [plugin.spec.name for plugin in self.plugins],
            "plugins": {plugin.spec.name: self._plugin_dict(plugin) for plugin in self.plugins},
            "owners": {claim.value: name for claim, name in self.owners.items()},
            "capabilities": sorted(self.capabilities),
        }

    def _plugin_dict(self, plugin: StrategyPlugin) -> dict[str, Any]:
        name, cls = plugin.spec.name, type(plugin)
        config = {}
        for f in dataclasses.fields(plugin):
            if not (f.init and f.metadata.get("in_plan", True)):
                continue
            key, value = f.name, getattr(plugin, f.name)
            try:
                config[key] = to_plain(value, _reference)
            except TypeError as error:
                raise PluginError(
                    f"Option {key!r} of plugin {name!r} cannot become part of the plan's fingerprint.",
                    where=self.provenance.get(name, cls.__module__),
                    why=str(error),
                    fix="give the field metadata={'in_plan': False} if ranks may differ in it",
                ) from error
        return {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "provenance": self.provenance.get(name),
            "config": config,
        }

    def fingerprint(self) -> str:
        """Returns the SHA-256 of :meth:`to_dict` as canonical JSON, in hexadecimal."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self) -> str:
        """Returns a readable description of the mesh, the plugins in order, and the owners of responsibilities, with
        reasons."""
        return explain(self)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        names = ", ".join(plugin.spec.name for plugin in self.plugins)
        return f"<Plan: {self.mesh}; plugins: {names or 'none'}; fingerprint {self.fingerprint()[:8]}>"


def _rebuild(values: dict[str, Any]) -> Plan:
    return Plan(**values)


def _reference(value: Any) -> str:
    """Returns the name of a function or class, or the type of a device, which is the same on every rank."""
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        return value.type
    if hasattr(value, "__module__") and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared between ranks")


class Difference(NamedTuple):
    """A value in which two plans differ; :data:`ABSENT` if one of them does not have it."""

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.left!r} against {self.right!r}"


def difference(a: Any, b: Any, path: str = "") -> list[Difference]:
    """Returns the differences between two results of :meth:`Plan.to_dict`, as dotted paths with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        result = []
        for key in sorted({*a, *b}):
            below = f"{path}.{key}" if path else str(key)
            result += difference(a.get(key, ABSENT), b.get(key, ABSENT), below)
        return result
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [item for i in range(len(a)) for item in difference(a[i], b[i], f"{path}[{i}]")]
    return [] if json.dumps(a) == json.dumps(b) else [Difference(path, a, b)]


# ---- description as text ---------------------------------------------------------------------------------------------
def explain(plan: Plan) -> str:
    """Returns a readable description of ``plan`` in sections: mesh, plugins, owners, and what each plugin does in
    order."""
    ranks = plan.mesh.world_size
    lines = [f"Plan for {ranks} rank{'s' if ranks > 1 else ''}: {plan.mesh}", ""]
    lines += ["Mesh, outer to inner axis", *_mesh(plan.mesh), ""]
    lines += ["Plugins, in the order in which they act", *(_plugins(plan) or ["  none"]), ""]
    lines += ["Responsibilities and their owners", *_owners(plan), ""]
    lines += ["What each plugin does, in the order in which it happens", *(_moments(plan) or ["  nothing"]), ""]
    lines += [f"Fingerprint {plan.fingerprint()[:16]}"]
    return "\n".join(lines)


def _mesh(mesh: Mesh) -> list[str]:
    rows = [("axis", "degree", "kind", "groups of ranks")]
    for axis in mesh.axes:
        groups = mesh.groups(axis.name) if axis.degree > 1 else ()
        rows.append((axis.name, str(axis.degree), axis.kind.value, _groups(groups) if groups else "-"))
    return table(rows)


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) <= SHOWN_GROUPS:
        return " ".join(_group(group) for group in groups)
    first, second, last = (_group(group) for group in (groups[0], groups[1], groups[-1]))
    return f"{first} {second} ... {last} ({len(groups)} groups of {len(groups[0])})"


def _group(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > SHOWN_RANKS:
        shown = [*shown[:3], "...", shown[-1]]
    return "{" + " ".join(shown) + "}"


def _plugins(plan: Plan) -> list[str]:
    lines = []
    for number, plugin in enumerate(plan.plugins, start=1):
        name = plugin.spec.name
        source = plan.provenance.get(name)
        lines.append(f"  {number}. {name}" + (f"  ({source})" if source else ""))
        lines += _indented(f"order: {plan.reasons.get(f'plugins.{name}', 'not recorded')}")
        axes = ", ".join(f"{axis.name} {axis.degree}" for axis in plugin.axes())
        lines += _indented(f"axes: {axes}") if axes else []
        options = ", ".join(_options(plugin))
        lines += _indented(f"options: {options or 'all at their defaults'}")
    return lines


def _options(plugin: StrategyPlugin) -> Iterable[str]:
    for f in dataclasses.fields(plugin):
        value = getattr(plugin, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if f.init and f.repr and (default is dataclasses.MISSING or value != default):
            yield f"{f.name}={value!r}"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 9, break_long_words=False)


def _moments(plan: Plan) -> list[str]:
    rows = [("when", "plugin", "what it does")]
    for name, moment in HOOKS.items():
        acting = (
            plan.plugins
            if moment.owner is None
            else [p for p in plan.plugins if plan.owners.get(moment.owner) == p.spec.name]
        )
        rows += [(moment.text, p.spec.name, _first_sentence(p, name)) for p in acting if overrides(p, name)]
    return table(rows) if len(rows) > 1 else []


def _first_sentence(plugin: StrategyPlugin, name: str) -> str:
    """Returns the first sentence of a hook's docstring, or the hook's name if it has none."""
    doc = getattr(type(plugin), name).__doc__ or name
    sentence = re.split(r"(?<=[a-z)`])[.:](?:\s|$)", " ".join(doc.split()), maxsplit=1)[0]
    return textwrap.shorten(sentence, WIDTH - 45, placeholder=" ...")


def _owners(plan: Plan) -> list[str]:
    rows = [("responsibility", "owner", "why")]
    for claim in Claim:
        owner = plan.owners.get(claim)
        # A responsibility without an owner is handled as in plain PyTorch.
        default = "autograd (default)" if claim is Claim.BACKWARD else "no plugin claims it"
        why = plan.reasons.get(f"owners.{claim.value}", "not recorded" if owner else default)
        rows.append((claim.value, owner or "-", why))
    return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


# ---- Comparing plans between ranks -----------------------------------------------------------------------------------
def agree_on_plan(decide: Callable[[], Plan], backend: Backend) -> Plan:
    """Returns this rank's plan if it is equal on all ranks, of which the main process compares the fingerprints.
    Collective, also if ``decide`` fails.

    Args:
        decide: returns this rank's plan.
        backend: the backend.

    Raises:
        DesyncError: on every rank, if plans differ, or ``decide`` failed on another rank.
        NeuronAccelError: the error of ``decide``, on the rank where it failed.
    """
    plan: Plan | None = None
    failure: Exception | None = None
    message: str | None = None
    try:
        plan = decide()
    except Exception as error:
        failure, message = error, f"{type(error).__name__}: {error}"
    world = backend.new_group([range(backend.world_size)], "world")
    mine = backend.rank, plan and plan.fingerprint(), None if plan else backend.rank, message
    _, _, odd, message = backend.broadcast_object(backend.gather_object(mine, world, _first_odd) or mine, world)
    if failure is not None:
        raise failure
    assert plan is not None
    if odd is None:
        return plan
    if message is not None:
        raise DesyncError(f"Rank {odd} cannot run.", where=f"rank {odd} of {backend.world_size}", why=message)
    reference, theirs = (backend.broadcast_object(plan.to_dict(), world, rank) for rank in (0, odd))
    raise DesyncError(
        f"Rank {odd} has another configuration than rank 0.",
        where="; ".join(
            f"{p.path}: {p.left!r} on rank 0, {p.right!r} on rank {odd}" for p in difference(reference, theirs)[:5]
        ),
        why="ranks that follow different plans wait for each other forever",
        fix="give every rank the same plugins and options",
    )


def _first_odd(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Joins what ranks and higher ranks say of their plans: the first rank, its fingerprint, and the first rank that
    has another one or, with a message, none."""
    failed = next((each for each in (one, other) if each[3] is not None), None)
    if failed is not None or one[2] is not None:
        return failed or one
    return *one[:2], other[2] if one[1] == other[1] else other[0], None

# SPDX-License-Identifier: Apache-2.0
"""Finds plugins: entry points, classes registered in this process, and ``"package.module:Class"``.

Entry points are loaded only when they are used, so that an installed but unused plugin costs nothing, and one that
cannot be imported does not affect others. Built-in plugins are found in the same way, except that installed
distributions cannot replace their names and responsibilities.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint
from typing import Any

from neuron_accel.doors import PLUGINS as PLUGIN_GROUP
from neuron_accel.doors import entry_points, how_to_install, offered_by
from neuron_accel.engine.plan.planner import module_of
from neuron_accel.engine.plan.plugin import Claim, PluginSpec, StrategyPlugin, check_contract
from neuron_accel.errors import PluginError, did_you_mean

DEFAULT_OWNER_GROUP = "neuron_accel.default_owners"
"""Group of entry points of default owners of responsibilities; the name is that of the claim."""

SWITCH_GROUP = "neuron_accel.switches"
"""Group of entry points of plugins that an argument of the accelerator adds when it is True; the name is that of the
argument. Those of other distributions are ignored."""

DISABLE_VARIABLE = "NEURON_ACCEL_DISABLE_PLUGINS"
"""Environment variable: names of plugins, separated by commas, that must not be used."""

TRUST_VARIABLE = "NEURON_ACCEL_TRUST"
"""Environment variable: which names in configurations may import code; every one by default."""

ENTRY_POINTS = "entry-points"
"""Value of :data:`TRUST_VARIABLE` with which names never import a module that is not an entry point."""

IN_PROCESS = "registered in this process"

OWN_DISTRIBUTION = "neuron-accel"
"""The distribution whose plugins other installed distributions cannot replace."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """A known plugin, which may not be loaded yet.

    Args:
        name: its name in configuration files.
        value: ``"package.module:Class"``.
        distribution: the installed distribution that provides it; None if it was registered in this process.
        version: version of that distribution.
        disabled: whether the environment variable disables it.
    """

    name: str
    value: str
    distribution: str | None
    version: str | None
    disabled: bool = False
    loaded: type[StrategyPlugin] | None = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """Distribution and version, for messages."""
        if self.distribution is None:
            return f"{self.value} ({IN_PROCESS})"
        return f"{self.distribution} {self.version}"

    @property
    def built_in(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION

    def stands_for(self, cls: type) -> bool:
        """Returns whether ``cls`` is the class of this entry, also if a package exports it under another name. Imports
        nothing."""
        if self.value == _value(cls):
            return True
        module, _, path = self.value.partition(":")
        try:
            return module in sys.modules and _attribute(sys.modules[module], path) is cls
        except AttributeError:
            return False

    def load(self) -> type[StrategyPlugin]:
        """Imports and returns the class.

        Raises:
            PluginError: if that fails, or the class is not a plugin of this name.
        """
        if self.loaded is not None:
            return self.loaded
        cls = _import(self.value, f"plugin {self.name!r} of {self.source}")
        check_contract(cls, self.source)
        if cls.spec.name != self.name:
            raise PluginError(
                f"Plugin {self.name!r} has the name {cls.spec.name!r} in its spec.",
                where=f"{self.value} of {self.source}",
                why="configuration files and messages use one name for a plugin",
                fix="the name of its entry point and of its spec must be the same; report it to its authors",
            )
        return cls


class Registry:
    """The plugins known in a process.

    Args:
        entry_points: the installed ones; groups other than this project's are ignored.
        disabled: names that must not be used.
        only_entry_points: whether to refuse ``"package.module:Class"``, which imports any module. Classes that the
            program itself registers or constructs are its own code, and are not refused.
    """

    def __init__(
        self,
        entry_points: Iterable[EntryPoint] = (),
        disabled: Iterable[str] = (),
        *,
        only_entry_points: bool = False,
    ) -> None:
        self._disabled = frozenset(disabled)
        self._only_entry_points = only_entry_points
        self._registered: dict[str, type[StrategyPlugin]] = {}
        points = list(entry_points)
        found = [self._entry(point) for point in points if point.group == PLUGIN_GROUP]
        names = {entry.name for entry in found if entry.built_in}
        self._installed = tuple(entry for entry in found if entry.built_in or entry.name not in names)
        self._hidden = tuple(entry for entry in found if entry not in self._installed)
        self._default_owners = tuple(self._entry(point) for point in points if point.group == DEFAULT_OWNER_GROUP)
        switches = [self._entry(point) for point in points if point.group == SWITCH_GROUP]
        self._switches = {entry.name: entry for entry in switches if entry.built_in}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Returns a registry of the installed plugins. Those in :data:`DISABLE_VARIABLE` of ``environ``, by default
        ``os.environ``, are disabled, and :data:`TRUST_VARIABLE` says which names may import code.

        Raises:
            PluginError: if :data:`TRUST_VARIABLE` has another value than :data:`ENTRY_POINTS`.
        """
        environ = os.environ if environ is None else environ
        value, strict = environ.get(DISABLE_VARIABLE, ""), _trusts_entry_points_only(environ)
        disabled = [name.strip() for name in value.split(",") if name.strip()]
        groups = (PLUGIN_GROUP, DEFAULT_OWNER_GROUP, SWITCH_GROUP)
        points = [point for group in groups for point in entry_points(group)]
        return cls(points, disabled=disabled, only_entry_points=strict)

    def _entry(self, point: EntryPoint) -> PluginEntry:
        name, version = _distribution(point.dist)
        return PluginEntry(
            name=point.name,
            value=point.value.partition("[")[0].replace(" ", ""),
            distribution=name,
            version=version,
            disabled=point.name in self._disabled,
        )

    def register(self, cls: type[StrategyPlugin], *, override: bool = False) -> type[StrategyPlugin]:
        """Registers a class under the name of its spec, in this process only, and returns it.

        Args:
            override: whether it may replace another plugin of that name.

        Raises:
            PluginError: if it is not a plugin class, or the name is taken.
        """
        check_contract(cls, module_of(cls) if isinstance(cls, type) else IN_PROCESS)
        name = cls.spec.name
        others = [entry for entry in self.entries() if entry.name == name and not entry.stands_for(cls)]
        if others and not override:
            raise PluginError(
                f"There is already a plugin {name!r}.",
                where=", ".join(entry.source for entry in others),
                why=f"a name belongs to one plugin; {_value(cls)} would replace it",
                fix="choose another name, or pass override=True",
            )
        self._registered[name] = cls
        return cls

    def entries(self) -> list[PluginEntry]:
        """Returns all known plugins, sorted by name, without importing them. A class registered here replaces installed
        ones."""
        registered = [
            PluginEntry(
                name=name,
                value=_value(cls),
                distribution=None,
                version=None,
                disabled=name in self._disabled,
                loaded=cls,
            )
            for name, cls in self._registered.items()
        ]
        installed = [entry for entry in self._installed if entry.name not in self._registered]
        return sorted([*registered, *installed], key=lambda entry: (entry.name, entry.source))

    def problems(self) -> list[PluginError]:
        """Returns errors of installed plugins that cannot be used as declared, and of unknown names in
        :data:`DISABLE_VARIABLE`. Imports default owners only."""
        known = {entry.name for entry in self.entries()}
        return [
            *(_taken(entry) for entry in self._hidden),
            *self._default_owners_and_problems()[1],
            *(
                PluginError(
                    f"{DISABLE_VARIABLE} names {name!r}, and there is no such plugin.",
                    fix=did_you_mean(name, known),
                )
                for name in sorted(self._disabled - known)
            ),
        ]

    def get(self, name: str) -> type[StrategyPlugin]:
        """Returns the plugin class for ``name``: a known name, or ``"package.module:Class"``.

        Raises:
            PluginError: if it is unknown, ambiguous, disabled, not trusted, or cannot be loaded.
        """
        if ":" in name and self._only_entry_points:
            raise _not_trusted(
                name,
                f"plugin {name!r}",
                "use the name of an installed plugin (`neuron-accel plugins` lists them); for your own class add an "
                f"entry point of the group {PLUGIN_GROUP}",
            )
        if ":" in name:
            cls = _import(name, f"plugin {name!r}")
            check_contract(cls, name)
            self._refuse_disabled(cls.spec.name, name)
            return cls
        entries = [entry for entry in self.entries() if entry.name == name]
        if not entries and (package := offered_by(PLUGIN_GROUP, name)) is not None:
            raise PluginError(f"Plugin {name!r} is in a package of its own.", fix=how_to_install(package))
        if not entries:
            raise PluginError(
                f"There is no plugin {name!r}.",
                why="no installed distribution provides it, and it was not registered in this process",
                fix=did_you_mean(name, {entry.name for entry in self.entries()})
                + " Name a class of your own as 'package.module:Class'.",
            )
        self._refuse_disabled(name, entries[0].source)
        if len(entries) > 1:
            raise _ambiguous(f"plugins {name!r}", entries)
        return entries[0].load()

    def switched_on(self, argument: str) -> StrategyPlugin:
        """Returns the plugin, with default options, that the accelerator's ``argument=True`` adds.

        Raises:
            PluginError: if it is disabled or cannot be loaded.
        """
        entry = self._switches[argument]
        cls = _import(entry.value, f"the plugin of {argument}=True")
        check_contract(cls, entry.source)
        return self.get(cls.spec.name)()

    def refuse_disabled(self, cls: type[StrategyPlugin]) -> None:
        """Raises PluginError if a plugin class is disabled. Classes without a spec are not checked here."""
        if isinstance(getattr(cls, "spec", None), PluginSpec):
            self._refuse_disabled(cls.spec.name, self.provenance(cls))

    def _refuse_disabled(self, name: str, source: str) -> None:
        if name in self._disabled:
            raise PluginError(
                f"Plugin {name!r} is disabled.",
                where=source,
                why=f"the environment variable {DISABLE_VARIABLE} lists it",
                fix=f"remove it from {DISABLE_VARIABLE}, or from the configuration",
            )

    def default_owners(self) -> dict[Claim, StrategyPlugin]:
        """Returns the default owners of responsibilities that no plugin claims, with default options. Disabled plugins
        are left out.

        Other distributions may provide default owners for responsibilities that have no built-in one. If one cannot be
        loaded, or two have the same responsibility, it is left out with a warning.

        Raises:
            PluginError: if a built-in one cannot be loaded.
        """
        owners, problems = self._default_owners_and_problems()
        for problem in problems:
            _log.warning("%s", problem)
        return owners

    def _default_owners_and_problems(self) -> tuple[dict[Claim, StrategyPlugin], list[PluginError]]:
        owners: dict[Claim, StrategyPlugin] = {}
        by_class: dict[type[StrategyPlugin], StrategyPlugin] = {}
        problems: list[PluginError] = []
        for entry in sorted(self._default_owners, key=lambda entry: not entry.built_in):
            try:
                claim, cls = self._default_owner(entry)
                if cls.spec.name in self._disabled:
                    continue
                if cls not in by_class:
                    by_class[cls] = _with_defaults(cls, entry)
            except PluginError as error:
                if entry.built_in:
                    raise
                problems.append(error)
                continue
            owners[claim] = by_class[cls]
        return owners, problems

    def _default_owner(self, entry: PluginEntry) -> tuple[Claim, type[StrategyPlugin]]:
        known = {claim.value: claim for claim in Claim}
        if entry.name not in known:
            raise PluginError(
                f"{entry.name!r} is not a responsibility that can have a default owner.",
                where=f"entry point of {entry.source} in {DEFAULT_OWNER_GROUP}",
                fix=did_you_mean(entry.name, known),
            )
        rivals = [other for other in self._default_owners if other.name == entry.name]
        if any(rival.built_in for rival in rivals) and not entry.built_in:
            raise _taken(entry)
        if len(rivals) > 1 and not entry.built_in:
            raise _ambiguous(f"default owners of {entry.name}", rivals)
        cls = _import(entry.value, f"default owner of {entry.name} of {entry.source}")
        check_contract(cls, entry.source)
        return known[entry.name], cls

    def provenance(self, cls: type[StrategyPlugin]) -> str:
        """Returns the distribution and version of a plugin class, or its module. Imports nothing."""
        entry = next((e for e in (*self._installed, *self._default_owners) if e.stands_for(cls)), None)
        return entry.source if entry else module_of(cls)


@functools.cache
def default_registry() -> Registry:
    """Returns the registry of this process, which the first call creates."""
    return Registry.from_environment()


def register_plugin(cls: type[StrategyPlugin], *, override: bool = False) -> type[StrategyPlugin]:
    """Registers a plugin class by name in this process, without an installed entry point. Usable as a decorator.

    Args:
        cls: the class; its spec has the name.
        override: whether it may replace another plugin of that name.

    Raises:
        PluginError: if it is not a plugin class, or the name is taken.
    """
    return default_registry().register(cls, override=override)


def plugin_classes() -> list[type[StrategyPlugin]]:
    """Returns the classes of all plugins that are installed or registered, sorted by name. Those that cannot be loaded
    are left out, as they are for runs that do not name them."""
    registry, found = default_registry(), []
    for entry in registry.entries():
        try:
            found.append(registry.get(entry.name))
        except PluginError:
            continue
    return found


def _value(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


@functools.cache
def _distribution(distribution: Distribution | None) -> tuple[str, str]:
    """Returns name and version of the distribution of an entry point, whose metadata may be damaged. Each reading of
    either parses all metadata."""
    try:
        metadata = distribution.metadata if distribution else None
        name, version = (metadata["Name"], metadata["Version"]) if metadata else (None, None)
    except Exception:  # parsers raise various types for damaged metadata
        name, version = None, None
    return name or "an unnamed distribution", version or "of unknown version"


def _attribute(module: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


def import_object(name: str, what: str) -> Any:
    """Imports ``"package.module:Object"``, which an option of a plugin names.

    Args:
        name: the name. Options come from configurations, so this runs code that a configuration chooses.
        what: description of the object in messages, such as ``"outer_optimizer 'my.module:Class'"``.

    Raises:
        PluginError: if it cannot be imported, or the environment variable ``NEURON_ACCEL_TRUST`` forbids it.
    """
    if _trusts_entry_points_only(os.environ):
        raise _not_trusted(name, what, "choose one that needs no import")
    return _import(name, what)


def _trusts_entry_points_only(environ: Mapping[str, str]) -> bool:
    trust = environ.get(TRUST_VARIABLE, "").strip()
    if trust not in ("", ENTRY_POINTS):
        raise PluginError(
            f"{TRUST_VARIABLE}={trust} is not a valid value.",
            where=f"environment variable {TRUST_VARIABLE}",
            why="it restricts which names in configurations import code, and would restrict nothing",
            fix=f"set it to {ENTRY_POINTS}, or unset it",
        )
    return trust == ENTRY_POINTS


def _not_trusted(name: str, what: str, instead: str) -> PluginError:
    return PluginError(
        f"{what[0].upper()}{what[1:]} is refused: it would import {name.partition(':')[0]!r}.",
        why=f"with the environment variable {TRUST_VARIABLE}={ENTRY_POINTS} names import nothing but entry points",
        fix=f"{instead}, or unset {TRUST_VARIABLE} if you trust the configuration",
    )


def _import(value: str, what: str) -> Any:
    module, _, path = value.partition(":")
    try:
        return _attribute(importlib.import_module(module), path)
    except (Exception, SystemExit) as error:  # a module may fail in any way while it is imported
        raise PluginError(
            f"Could not load {what}.",
            where=value,
            why=f"{type(error).__name__}: {error}",
            fix="install what it needs, or check the name"
            if isinstance(error, ImportError)
            else "report it to its authors",
        ) from error


def _with_defaults(cls: type[StrategyPlugin], entry: PluginEntry) -> StrategyPlugin:
    try:
        return cls()
    except Exception as error:
        raise PluginError(
            f"The default owner of {entry.name} cannot be created without options.",
            where=f"{entry.value} of {entry.source}",
            why=f"{type(error).__name__}: {error}",
            fix="give every option of a default owner a default; report it to its authors",
        ) from error


def _ambiguous(what: str, entries: Iterable[PluginEntry]) -> PluginError:
    sources = sorted({f"{entry.value} of {entry.source}" for entry in entries})
    return PluginError(
        f"There are several {what}.",
        where="; ".join(sources),
        why="a name belongs to one plugin",
        fix="uninstall one of these distributions, or name the class as 'package.module:Class'",
    )


def _taken(entry: PluginEntry) -> PluginError:
    return PluginError(
        f"{entry.name!r} of {entry.source} is left out: {OWN_DISTRIBUTION} has a plugin of that name.",
        where=f"{entry.value} of {entry.source}",
        why="an installed package does not change runs that do not name it",
        fix="name the class as 'package.module:Class'; its authors should choose another name",
    )

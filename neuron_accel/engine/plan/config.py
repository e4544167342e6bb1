# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run, from a YAML file or a mapping.

    mixed_precision: "no"
    gradient_accumulation_steps: 2
    dataloader: {even_batches: false}
    plugins:
      - some_strategy: {degree: 2}
      - another_strategy
      - my_package.my_module:MyStrategy: {strength: 0.5}

The order of plugins does not matter. ``plugins: auto`` (or ``auto`` among them) lets a search choose the layout of what
``plan_for`` describes. Keys other than ``plugins``, ``plan_for``, ``dataloader`` and ``backend`` are arguments of
``accelerate.Accelerator`` of the same name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from neuron_accel.engine.plan.auto import AUTO
from neuron_accel.engine.plan.coerce import build, field_type, to_plain
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.engine.plan.registry import Registry, default_registry
from neuron_accel.engine.plan.source import Location, open_document
from neuron_accel.errors import ConfigurationError, PluginError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run.

    Args:
        plugins: the strategies, configured.
        accelerate: the given arguments of ``accelerate.Accelerator``.
        dataloader: the given arguments of ``accelerate.utils.DataLoaderConfiguration``.
        backend: name of the backend; None to choose it by the available devices.
        plan_for: of a layout that is to be chosen, what is known of the training; None if it is not to be chosen.
    """

    plugins: tuple[StrategyPlugin, ...] = ()
    accelerate: Mapping[str, Any] = field(default_factory=dict)
    dataloader: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    plan_for: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accelerate", MappingProxyType(dict(self.accelerate)))
        object.__setattr__(self, "dataloader", MappingProxyType(dict(self.dataloader)))


@dataclass(frozen=True, kw_only=True)
class _DataLoaderKeys:
    """The keys under ``dataloader``. Defaults are not used: only given keys are passed on."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The keys at the top level. Defaults are not used: only given keys are passed on."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    device_placement: bool = True
    step_scheduler_with_optimizer: bool = True
    rng_types: list[str] | None = None
    log_with: str | list[str] | None = None
    project_dir: str | None = None
    backend: str | None = None
    dataloader: _DataLoaderKeys = field(default_factory=_DataLoaderKeys)
    plugins: list[Any] = field(default_factory=list)
    plan_for: dict[str, Any] = field(default_factory=dict)


def option_type(name: str) -> Any:
    """Returns the type of a key at the top level, which is also that of the accelerator's argument of that name."""
    return field_type(_Keys, next(f for f in dataclasses.fields(_Keys) if f.name == name))


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any], *, registry: Registry | None = None, searches: bool = False
) -> RunConfig:
    """Reads and checks a configuration.

    Args:
        source: the path of a YAML file, or a mapping of the same form.
        registry: where plugins are looked up; by default those installed and registered in this process.
        searches: whether the caller has the layout chosen that ``plugins: auto`` asks for. It is an error otherwise.

    Raises:
        ConfigurationError: for an unknown key, or an invalid type or value; the message has file, line, key and valid
            values.
        PluginError: if a plugin cannot be loaded.
    """
    data, root = open_document(source)
    if not isinstance(data, Mapping):
        raise root.error(
            "A configuration must be a mapping of keys to values.", fix="write 'plugins:' and a list below it"
        )
    if isinstance(data.get("plugins"), Mapping):
        raise (root / "plugins").error("'plugins' must be a list, not a mapping.", fix="begin each plugin with a dash")
    if data.get("plugins") == AUTO:
        data = {**data, "plugins": [AUTO]}
    keys = build(_Keys, data, root, "the configuration")
    if keys.gradient_accumulation_steps < 1:
        raise (root / "gradient_accumulation_steps").error(
            f"'gradient_accumulation_steps' is {keys.gradient_accumulation_steps}.",
            why="an optimizer step needs at least one micro-batch",
            fix="give an integer of at least 1",
        )
    registry = default_registry() if registry is None else registry
    named = [(index, entry) for index, entry in enumerate(keys.plugins) if entry != AUTO]
    plugins = [_plugin(entry, root / "plugins" / index, registry) for index, entry in named]
    auto = len(named) < len(keys.plugins)
    if auto and not searches:
        raise (root / "plugins").error(
            "'auto' is for NeuronAccelerator only.",
            why="the layout is searched when an accelerator is made, for its ranks",
            fix="name the plugins; neuron-accel plan --instances N --write FILE finds and writes them",
        )
    if keys.plan_for and not auto:
        raise (root / "plan_for").error("'plan_for' has no effect without 'plugins: auto'.", fix="leave it out")
    elsewhere = {"plugins", "plan_for", "dataloader", "backend"}
    return RunConfig(
        plugins=tuple(plugins),
        accelerate={name: getattr(keys, name) for name in data if name not in elsewhere},
        dataloader={name: getattr(keys.dataloader, name) for name in data.get("dataloader", ())},
        backend=keys.backend,
        plan_for=keys.plan_for if auto else None,
    )


def _plugin(entry: Any, at: Location, registry: Registry) -> StrategyPlugin:
    """Returns the plugin of one item of the list: ``name`` or ``{name: options}``."""
    name, options = _name_and_options(entry, at)
    at = at / name
    try:
        cls = registry.get(name)
    except PluginError as error:
        where = f"{at}: {error.where}" if error.where else str(at)
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from error
    return build(cls, options, at, f"plugin {name!r}")


def _name_and_options(entry: Any, at: Location) -> tuple[str, Any]:
    if isinstance(entry, str):
        return entry, None
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, options),) = entry.items()
        if isinstance(name, str):
            return name, options
    if isinstance(entry, StrategyPlugin):
        raise at.error("A configuration cannot contain a plugin object.", fix="give it in the argument 'plugins'")
    if isinstance(entry, Mapping) and len(entry) > 1:
        raise at.error(
            f"One item of 'plugins' has the keys {', '.join(map(repr, entry))}.",
            why="an item is one plugin: 'name', or 'name: {option: value, ...}'",
            fix="begin each plugin with a separate dash, and indent its options below its name",
        )
    raise at.error(f"{entry!r} is not a plugin.", fix="write 'name', or 'name: {option: value, ...}'")


def to_config(plugins: Iterable[StrategyPlugin], *, registry: Registry | None = None) -> dict[str, Any]:
    """Inverse of :func:`load_config` for plugins: returns a configuration that creates equal plugins.

    All options are included, so that the result does not depend on defaults. A plugin whose class is not registered
    under its name in ``registry`` is given by its class.

    Raises:
        ConfigurationError: if an option has a value that cannot be written in a configuration.
    """
    registry = default_registry() if registry is None else registry
    return {"plugins": [{_config_name(type(plugin), registry): _options(plugin)} for plugin in plugins]}


def _config_name(cls: type[StrategyPlugin], registry: Registry) -> str:
    entries = [entry for entry in registry.entries() if entry.name == cls.spec.name]
    if len(entries) == 1 and entries[0].stands_for(cls):
        return cls.spec.name
    return f"{cls.__module__}:{cls.__qualname__}"


def _options(plugin: StrategyPlugin) -> dict[str, Any]:
    options = {}
    for f in dataclasses.fields(plugin):
        if f.init:
            value = getattr(plugin, f.name)
            try:
                options[f.name] = to_plain(value)
            except TypeError as error:
                if f.default is not dataclasses.MISSING and value == f.default:
                    continue
                raise ConfigurationError(
                    f"Option {f.name!r} of plugin {plugin.spec.name!r} cannot be written into a configuration.",
                    where=f"{type(plugin).__module__}:{type(plugin).__qualname__}",
                    why=str(error),
                    fix="give this plugin as an object in Python",
                ) from error
    return options

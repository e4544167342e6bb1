# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of ``NeuronAccelerator``, as strict as those of a configuration file."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)

from neuron_accel.backends.select import flag
from neuron_accel.engine.plan.auto import AUTO
from neuron_accel.engine.plan.coerce import convert
from neuron_accel.engine.plan.config import RunConfig, load_config, option_type
from neuron_accel.engine.plan.plugin import Claim, StrategyPlugin
from neuron_accel.engine.plan.registry import Registry
from neuron_accel.engine.plan.source import Location
from neuron_accel.errors import ConfigurationError, UsageError


class _NotGiven:
    def __repr__(self) -> str:
        return "accelerates_default"  # a name: tools that read signatures parse it


NOT_GIVEN: Any = _NotGiven()
"""Default of arguments for which None is not the default: they take that of the configuration or of Accelerate."""

ACCELERATES = tuple(name for name in inspect.signature(Accelerator.__init__).parameters if name != "self")
"""The arguments of ``accelerate.Accelerator``."""

_WHERE = "NeuronAccelerator(...)"

# Accelerate's own strategies, and the plugins to use instead. Accelerate ignores some of them on some devices.
_REFUSED = {
    "deepspeed_plugin": "Zero1Plugin, ModelParallelismPlugin",
    "deepspeed_plugins": "Zero1Plugin, ModelParallelismPlugin",
    "fsdp_plugin": "FullyShardedPlugin",
    "megatron_lm_plugin": "ModelParallelismPlugin, SequenceParallelPlugin",
    "torch_tp_plugin": "ModelParallelismPlugin",
    "parallelism_config": "ModelParallelismPlugin, SequenceParallelPlugin",
}
# Environment variables by which `accelerate launch` and the file of `accelerate config` enable them.
_REFUSED_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_CHECKED = (
    "mixed_precision",
    "gradient_accumulation_steps",
    "cpu",
    "device_placement",
    "step_scheduler_with_optimizer",
)


class _MapLocationError(UsageError, TypeError):
    """A ``map_location`` that Accelerate refuses with a TypeError."""


def check_map_location(value: Any) -> None:
    """Checks the ``map_location`` of ``load_state``.

    Raises:
        UsageError: if it is not one of the values that Accelerate accepts.
    """
    if value not in (None, "cpu", "on_device"):
        raise _MapLocationError(
            f"Unsupported optimizer map location passed: {value!r}.",
            where="load_state(..., map_location=...)",
            why="every tensor is loaded to the device of the parameter that it belongs to",
            fix='leave it out; None, "cpu" and "on_device" are accepted and do the same',
        )


def checked_plugins(plugins: Any, mp_plugin: Any) -> list[StrategyPlugin]:
    """Returns ``plugins`` and ``mp_plugin``, where it is given, as one list. Mappings among ``plugins`` are read as in
    a configuration.

    Raises:
        ConfigurationError: if one of them is neither a plugin object nor such a mapping.
    """
    if isinstance(plugins, (StrategyPlugin, type, str)) or not isinstance(plugins, Iterable):
        raise ConfigurationError(
            f"'plugins' must be a list of plugins, not {_named(plugins)}.",
            where=f"{_WHERE}, plugins",
            fix=f"write plugins=[{_written(plugins)}]" if not isinstance(plugins, str) else _by_name([plugins]),
        )
    plugins = [_read(plugin) if isinstance(plugin, Mapping) else plugin for plugin in plugins]
    for index, plugin in enumerate([*plugins, *([] if mp_plugin is None else [mp_plugin])]):
        if not isinstance(plugin, StrategyPlugin):
            raise ConfigurationError(
                f"Expected a plugin object, got {_named(plugin)}.",
                where=f"{_WHERE}, " + (f"plugins[{index}]" if index < len(plugins) else "mp_plugin"),
                fix=_by_name([plugin]) if isinstance(plugin, str) else f"write {_written(plugin)}",
            )
    return [*plugins, *([] if mp_plugin is None else [mp_plugin])]


def planned_training(
    plugins: Any, plan_for: Mapping[str, Any] | None, configured: RunConfig, *, has_config: bool
) -> tuple[dict[str, Any] | None, Any]:
    """Returns what is known of the training whose layout is to be chosen, or None if it is not, and the other plugins.

    Args:
        plugins, plan_for: the arguments.
        configured: the configuration.
        has_config: whether there is one: it may name a layout, or "auto".

    Raises:
        ConfigurationError: if ``plan_for`` has no effect, or names a key that the configuration has.
    """
    given = dict(plan_for or {})
    listed, auto = plugins, plugins == AUTO
    if auto or (isinstance(plugins, Iterable) and not isinstance(plugins, (str, Mapping, StrategyPlugin))):
        entries = [AUTO] if auto else list(plugins)  # an iterator can be read once
        listed = [each for each in entries if each != AUTO]
        auto = len(listed) < len(entries)
    if configured.plan_for is None and not auto:
        if plan_for is not None and not has_config:
            raise ConfigurationError(
                "'plan_for' has no effect without plugins=\"auto\".", where=_WHERE, fix="leave it out"
            )
        return None, listed
    of_file = configured.plan_for or {}
    if twice := sorted(given.keys() & of_file.keys()):
        raise ConfigurationError(
            f"'plan_for' has {', '.join(map(repr, twice))} twice, as an argument and in the configuration.",
            fix="keep one of them",
        )
    return {**of_file, **given}, listed


def _read(plugin: Mapping[str, Any]) -> StrategyPlugin:
    return load_config({"plugins": [plugin]}).plugins[0]


def _named(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {value!r}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _written(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, StrategyPlugin):
        return f"{value.__name__}()"
    return f"{type(value).__name__}(...)" if isinstance(value, StrategyPlugin) else "Zero1Plugin()"


def _by_name(names: list[str]) -> str:
    return f"pass names in a configuration: config={{'plugins': {names!r}}}"


def merged_options(configured: RunConfig, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments for ``Accelerator``: those of the configuration and those given.

    Args:
        configured: the configuration.
        given: arguments by name; those that are None or :data:`NOT_GIVEN` are left out.
        environ: environment variables.

    Raises:
        ConfigurationError: if an argument has a wrong type or value, is given twice, or is replaced by a plugin.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not NOT_GIVEN}
    for name, value in given.items():
        if name in _REFUSED:
            raise _refused(f"{name!r}", name)
        if name in _CHECKED:
            given[name] = _checked(name, value)
    for variable, name in _REFUSED_VARIABLES.items():
        if flag(environ, variable):
            raise _refused(
                f"{variable}={environ[variable]}",
                name,
                where=f"environment variable {variable}: from `accelerate launch`, or the file of `accelerate config`",
            )
    if given.pop("split_batches", False):
        warnings.warn(
            "split_batches=True is ignored, as Accelerate does: the batch size of a loader is that of one rank. With "
            "dataloader_config=DataLoaderConfiguration(split_batches=True) it is that of all ranks together.",
            stacklevel=4,
        )
    options = dict(configured.accelerate)
    if configured.dataloader:
        options["dataloader_config"] = DataLoaderConfiguration(**configured.dataloader)
    for name in given:
        if name in options:
            raise ConfigurationError(
                f"{name!r} is given twice, as an argument and in the configuration.", fix="keep one of them"
            )
    if "gradient_accumulation_plugin" in given and options.get("gradient_accumulation_steps", 1) != 1:
        raise ConfigurationError(
            "The number of gradient accumulation steps is given twice.",
            where="gradient_accumulation_steps of the configuration, and gradient_accumulation_plugin",
            fix="keep one of them",
        )
    from_environ = environ.get("ACCELERATE_MIXED_PRECISION") or None
    from_environ = _checked("mixed_precision", from_environ, "ACCELERATE_MIXED_PRECISION")
    options |= given
    if "fp8" in (options.get("mixed_precision"), from_environ):
        raise ConfigurationError(
            "mixed_precision='fp8' is not possible here.",
            where=_WHERE if options.get("mixed_precision") == "fp8" else "ACCELERATE_MIXED_PRECISION",
            why="Accelerate's fp8 replaces modules by those of TransformerEngine, torchao or MS-AMP, which no plan "
            "shards and Trainium cannot run; and the compiler for torch 2.9 supports fp8 training on no instance",
            fix="use mixed_precision='bf16'",
        )
    return options


class Accumulation(GradientAccumulationPlugin):
    """Accelerate's settings of gradient accumulation, whose values are read without an effect on other threads.

    Accelerate's ``to_kwargs``, which its constructor calls, empties ``os.environ`` for a moment. Ranks that are threads
    of one process (:func:`neuron_accel.testing.run_ranks` on XLA) may read it at that moment, or lose it for good.
    """

    def to_kwargs(self) -> dict[str, Any]:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


def with_accumulation(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns arguments for ``Accelerator`` that give the settings of gradient accumulation as an
    :class:`Accumulation`, wherever they came from.

    Args:
        options: the arguments. Two numbers of steps are left to Accelerate to refuse, and a class of the user's own is
            left as it is.
        environ: environment variables, which come before the number of steps in ``options``.

    Raises:
        ConfigurationError: if the number of steps in the environment is not an integer of at least 1.
    """
    plugin = options.get("gradient_accumulation_plugin")
    if plugin is None:
        name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        steps: Any = environ.get(name)
        if steps is None:
            steps = options.get("gradient_accumulation_steps", 1)
        elif steps.strip().isdecimal():
            steps = _checked("gradient_accumulation_steps", int(steps), f"environment variable {name}")
        else:
            raise ConfigurationError(
                f"{name}={steps} is not a number of steps.",
                where=f"environment variable {name}",
                fix="set it to an integer of at least 1",
            )
        settings = {"num_steps": steps}
    elif type(plugin) is GradientAccumulationPlugin and options.get("gradient_accumulation_steps", 1) == 1:
        settings = plugin.to_dict()
    else:
        return dict(options)
    rest = {name: value for name, value in options.items() if name != "gradient_accumulation_steps"}
    return {**rest, "gradient_accumulation_plugin": Accumulation(**settings)}


def check_precision(wanted: str | None) -> None:
    """Checks that ``mixed_precision`` is that of earlier accelerators, which share Accelerate's state in a process.

    Args:
        wanted: the precision that this accelerator asks for; None: any.

    Raises:
        ConfigurationError: if an earlier accelerator of this process has another precision.
    """
    if wanted is None or not is_initialized():
        return
    settled = AcceleratorState().mixed_precision
    if wanted != settled:
        raise ConfigurationError(
            f"mixed_precision={wanted!r} differs from the {settled!r} of an earlier accelerator.",
            where=_WHERE,
            why="all accelerators of a process share Accelerate's state, which includes the precision",
            fix=f"leave mixed_precision out here, or pass the same to both; to change from {settled!r} to {wanted!r}, "
            "start a new process, or restart the notebook's kernel",
        )


def check_dry_precision(precision: str, backend: str) -> None:
    """Raises :class:`ConfigurationError` for autocast in a dry run: torch casts nothing on the meta device."""
    if backend == "dryrun" and precision != "no":
        raise ConfigurationError(
            f"mixed_precision={precision!r} is not possible in a dry run.",
            why="torch's autocast does not act on tensors without memory, so that memory and traffic would be those of "
            "the model's own dtype",
            fix='convert the model to bfloat16 and leave mixed_precision out (or "no"); ZeRO-1 keeps fp32 masters',
        )


def warn_of_unused_precision(precision: str, device_type: str) -> None:
    """Warns that Accelerate ignores ``mixed_precision="fp16"`` on the CPU. On other devices it has an effect."""
    if precision == "fp16" and device_type == "cpu":
        warnings.warn(
            "mixed_precision='fp16' has no effect on the CPU, where Accelerate leaves it out: models train in the "
            "dtype of their parameters. mixed_precision='bf16' has one.",
            stacklevel=3,
        )


def _refused(what: str, name: str, where: str = _WHERE) -> ConfigurationError:
    return ConfigurationError(
        f"{what} is not possible here.",
        where=where,
        why="it would bypass the plugins' plan, or have no effect",
        fix=f"use these plugins instead: {_REFUSED[name]}",
    )


def _checked(name: str, value: Any, where: str = _WHERE) -> Any:
    if name == "mixed_precision" and value is not None:
        value = str(value).lower()  # a member of Accelerate's enumeration prints as its value
    if name == "gradient_accumulation_steps" and not isinstance(value, bool) and hasattr(value, "__index__"):
        value = operator.index(value)
    value = convert(value, option_type(name), Location(source=where, path=(name,)))
    if name == "gradient_accumulation_steps" and value < 1:
        raise ConfigurationError(
            f"'gradient_accumulation_steps' is {value}.",
            where=where,
            why="an optimizer step needs at least one micro-batch",
            fix="pass an integer of at least 1",
        )
    return value


# ---- kwargs handlers -------------------------------------------------------------------------------------------------
def checked_handlers(handlers: Any) -> list[KwargsHandler]:
    """Returns ``kwargs_handlers`` as a list.

    Raises:
        ConfigurationError: if it is not a list of Accelerate's handlers, or has two of one class.
    """
    if handlers is None:
        return []
    if isinstance(handlers, KwargsHandler) or not isinstance(handlers, Iterable):
        raise ConfigurationError(
            f"'kwargs_handlers' must be a list, not {_named(handlers)}.",
            where=_WHERE,
            fix=f"write kwargs_handlers=[{type(handlers).__name__}(...)]",
        )
    handlers = list(handlers)
    instead = {
        GradientAccumulationPlugin: "gradient_accumulation_plugin=GradientAccumulationPlugin(...)",
        TorchDynamoPlugin: "dynamo_plugin=TorchDynamoPlugin(...)",
    }
    for index, handler in enumerate(handlers):
        if not isinstance(handler, KwargsHandler) or type(handler) in instead:
            raise ConfigurationError(
                f"Expected a kwargs handler of Accelerate, got {_named(handler)}.",
                where=f"{_WHERE}, kwargs_handlers[{index}]",
                fix=instead.get(type(handler), "use a class of accelerate.utils, such as InitProcessGroupKwargs"),
            )
        if any(type(handler) is type(other) for other in handlers[:index]):
            raise ConfigurationError(
                f"There are two {type(handler).__name__} in 'kwargs_handlers'.", where=_WHERE, fix="keep one of them"
            )
    return handlers


def timeout_of(handlers: Iterable[KwargsHandler]) -> Any:
    """The timeout of an ``InitProcessGroupKwargs``, which Accelerate applies to its own group only, or None."""
    given = [handler.to_kwargs() for handler in handlers if isinstance(handler, InitProcessGroupKwargs)]
    return given[0].get("timeout") if given else None


def with_ddp_options(
    plugins: list[StrategyPlugin], handlers: Iterable[KwargsHandler], registry: Registry
) -> list[StrategyPlugin]:
    """Returns ``plugins`` with the options of a ``DistributedDataParallelKwargs`` applied.

    ``bucket_cap_mb`` and ``broadcast_buffers`` become options of the plugin that reduces gradients.
    ``find_unused_parameters``, ``gradient_as_bucket_view`` and ``static_graph`` are accepted: what they enable is
    always the case here.

    Raises:
        ConfigurationError: if an option has no effect here, or contradicts what that plugin was given.
    """
    handler = next((h for h in handlers if isinstance(h, DistributedDataParallelKwargs)), None)
    if handler is None:
        return plugins
    asked = handler.to_kwargs()  # what is not the default
    no_effect = {
        "dim": "the loader shards batches, along the first dim",
        "check_reduction": "torch ignores it as well",
        "comm_hook": "gradients are reduced in the dtype of the parameters: train in bf16 to send fewer bytes",
        "comm_wrapper": "gradients are reduced in the dtype of the parameters: train in bf16 to send fewer bytes",
        "comm_state_option": "there is no communication hook",
    }
    for name, why in no_effect.items():
        if getattr(handler, name) != getattr(DistributedDataParallelKwargs(), name):
            raise ConfigurationError(
                f"{name}={getattr(handler, name)!r} has no effect here.",
                where="DistributedDataParallelKwargs",
                why=why,
                fix="leave it out",
            )
    wanted = {name: asked[name] for name in ("bucket_cap_mb", "broadcast_buffers") if name in asked}
    if not wanted:
        return plugins
    owner = next((p for p in plugins if Claim.GRADIENT_REDUCTION in p.spec.claims), None)
    if owner is None:
        default = registry.default_owners()[Claim.GRADIENT_REDUCTION]
        return [*plugins, dataclasses.replace(default, **_coerced(default, wanted))]
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    asked = _coerced(owner, wanted)
    for name, value in asked.items():
        has = name in defaults
        if not has or getattr(owner, name) not in (defaults[name], value):
            raise ConfigurationError(
                f"{name}={value!r} of DistributedDataParallelKwargs "
                + ("differs from the plugin that reduces gradients." if has else "has no effect here."),
                where=f"plugin {owner.spec.name!r}",
                why="it reduces gradients in this run" + ("" if has else ", and has no such option"),
                fix=f"leave it out there, and write {type(owner).__name__}({name}={value!r})"
                if has
                else "leave it out",
            )
    return [dataclasses.replace(plugin, **asked) if plugin is owner else plugin for plugin in plugins]


def _coerced(plugin: StrategyPlugin, wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {n: float(v) if isinstance(getattr(plugin, n, None), float) else v for n, v in wanted.items()}

# SPDX-License-Identifier: Apache-2.0
"""Checks of the options of peft's ``LoraConfig``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from peft import LoraConfig

WHERE = "plugin 'lora'"

_UNDERSTOOD = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "lora_dropout",
        "use_rslora",
        "bias",
        "modules_to_save",
        "init_lora_weights",
        "fan_in_fan_out",
    }
)
_ABOUT = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
    }
)
"""Options that describe an adapter and do not change what is computed."""

_PEFTS_OWN = ("peft_type", "peft_version", "runtime_config")
"""Options that peft sets itself."""

_INITS = (True, False, "gaussian", "orthogonal")


def lora_config(options: Mapping[str, Any]) -> LoraConfig:
    """Builds peft's configuration from its options.

    Raises:
        ConfigurationError: if peft does not have an option, or an option is not supported here.
    """
    from peft import LoraConfig

    known = {f.name for f in dataclasses.fields(LoraConfig)}
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"{name!r} is not an option of peft's LoraConfig.", where=WHERE, fix=did_you_mean(name, known)
            )
    try:
        config = LoraConfig(**options)
    except (ValueError, TypeError) as error:
        raise ConfigurationError("peft does not accept these options.", where=WHERE, why=str(error)) from error
    check(config)
    return config


def check(config: LoraConfig) -> None:
    """Checks that all options are supported.

    Raises:
        ConfigurationError: for one that is not.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name not in _UNDERSTOOD | _ABOUT and value != _default(f) and value:
            raise ConfigurationError(
                f"{f.name}={value!r} is not possible.",
                where=WHERE,
                why="it changes the function or the parameters of an adapter, for which sharding is not implemented",
                fix="leave it out: plain LoRA, rank-stabilised LoRA (use_rslora), patterns of ranks and alphas, "
                "modules_to_save and biases are supported",
            )
    if not any(config.init_lora_weights is value or config.init_lora_weights == value for value in _INITS):
        raise ConfigurationError(
            f"init_lora_weights={config.init_lora_weights!r} is not possible.",
            where=WHERE,
            why="it changes the weights of the base model, or needs data",
            fix="use True, False, 'gaussian' or 'orthogonal'",
        )
    check_numbers(vars(config))


def check_numbers(options: Mapping[str, Any]) -> None:
    """Checks the ranges of numbers in ``options``. Does not import peft.

    Raises:
        ConfigurationError: for one that is out of range.
    """
    for name, kind, least, below in (
        ("r", int, 1, None),
        ("lora_alpha", float, 0, None),
        ("lora_dropout", float, 0, 1),
    ):
        value = options.get(name)
        if value is None:
            continue
        kinds = (int,) if kind is int else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or value < least or (below is not None and value >= below):
            span = f"at least {least}" if below is None else f"at least {least} and below {below}"
            raise ConfigurationError(f"{name} is {value!r}; expected a number of {span}.", where=WHERE)


def plain(config: LoraConfig) -> dict[str, Any]:
    """The options of ``config`` that differ from peft's defaults, as values that YAML supports."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _PEFTS_OWN}
    defaults = {f.name: _default(f) for f in dataclasses.fields(config)}
    return {name: _plain(value) for name, value in given.items() if value != defaults[name]}


def _default(f: dataclasses.Field) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value

"""The options of peft's ``LoraConfig``: which are understood, and what they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from neuron_accel.contract import ConfigurationError, did_you_mean

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
"""What describes an adapter, or where it is used, and changes nothing of what is computed."""

_PEFTS_OWN = ("peft_type", "peft_version", "runtime_config")
"""What peft sets itself, or uses on the machine at hand only."""

_INITS = (True, False, "gaussian", "orthogonal")


def lora_config(options: Mapping[str, Any]) -> LoraConfig:
    """peft's configuration from its options.

    Raises:
        ConfigurationError: for an option that peft does not have, or one that would not be exact here.
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
    """Refuses what would not be exact.

    Raises:
        ConfigurationError: naming the option.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name not in _UNDERSTOOD | _ABOUT and value != _default(f) and value:
            raise ConfigurationError(
                f"{f.name}={value!r} is not possible.",
                where=WHERE,
                why="it changes what an adapter computes, or which parameters it has, in a way that is not sharded "
                "over ranks",
                fix="leave it out: plain LoRA, rank-stabilised LoRA (use_rslora), patterns of ranks and alphas, "
                "modules_to_save and biases are possible",
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
    """Checks the ranges of what numbers there are in ``options``. Does not import peft.

    Raises:
        ConfigurationError: naming the option.
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
            raise ConfigurationError(f"{name} is {value!r}; it must be a number of {span}.", where=WHERE)


def plain(config: LoraConfig) -> dict[str, Any]:
    """The options in which ``config`` differs from peft's defaults, as plain data."""
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

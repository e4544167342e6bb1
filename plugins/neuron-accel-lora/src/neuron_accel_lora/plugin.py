# SPDX-License-Identifier: Apache-2.0
"""The plugin: its options and hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from neuron_accel.contract import Phase, PlanContext, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, ParameterError, UsageError
from neuron_accel_lora.options import WHERE, check_numbers, lora_config, plain

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

    from neuron_accel.contract import ParameterMap, PreparedModel, Run
    from neuron_accel_lora.survey import Survey

_SHORT = ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "bias", "modules_to_save")
"""Options of peft that are also options of the plugin."""


@dataclass(frozen=True, kw_only=True)
class LoraPlugin(StrategyPlugin):
    """Trains LoRA adapters of a model (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022).

    Adapted layers and initial values are those of ``peft`` for the same options. Adapters are sharded over ranks like
    the layers that they adapt, with the result of training in one process. Prepare the model without adapters; an
    optimizer over ``model.parameters()`` receives each adapter in the group of the weight that it adapts. Parameters of
    the base model keep their FQNs and are frozen.

    The defaults of options are those of peft.

    Args:
        r: rank of the adapters.
        lora_alpha: the output of adapters is scaled by ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with
            ``use_rslora``.
        target_modules: suffixes of the names of layers to adapt, a regular expression for full names, or
            ``"all-linear"``; None: peft's default for the model type.
        lora_dropout: probability of dropout of the inputs of adapters.
        use_rslora: whether to use rank-stabilised scaling (Kalajdzievski, 2023).
        bias: biases of the base model that are trained as well.
        modules_to_save: suffixes of the names of modules that are trained without adapters.
        peft_config: a ``peft.LoraConfig``, or its options as a mapping, instead of the options above.
        adapter: folder of an adapter that peft or :func:`~neuron_accel_lora.save_adapter` wrote, to continue training;
            instead of the options above.
        trainable_parameters: expected number of trained elements over all ranks; another number is an error.

    Raises:
        ConfigurationError: if an option is out of range, or adapters are configured in two ways.
    """

    r: int | None = None
    lora_alpha: float | None = None
    target_modules: str | tuple[str, ...] | None = None
    lora_dropout: float | None = None
    use_rslora: bool | None = None
    bias: Literal["none", "all", "lora_only"] | None = None
    modules_to_save: tuple[str, ...] | None = None
    peft_config: Mapping[str, Any] | None = None
    adapter: str | None = None
    trainable_parameters: int | None = None

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="lora", api_version=4, phase=Phase.ADAPTATION, provides=frozenset({"gathered-weights"})
    )

    def __post_init__(self) -> None:
        for name in ("target_modules", "modules_to_save"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                ordered = sorted(value) if isinstance(value, (set, frozenset)) else value
                object.__setattr__(self, name, tuple(ordered))
        if self.adapter is not None:
            object.__setattr__(self, "adapter", os.fspath(self.adapter))
        if self.peft_config is not None:
            given = self.peft_config if isinstance(self.peft_config, Mapping) else plain(_checked(self.peft_config))
            object.__setattr__(self, "peft_config", dict(given))
        ways = [name for name in ("peft_config", "adapter") if getattr(self, name) is not None]
        ways += [", ".join(self._given())] if self._given() else []
        if len(ways) > 1:
            raise ConfigurationError(
                f"Adapters are configured in two ways: by {' and by '.join(ways)}.",
                where=WHERE,
                why="only one of them could have an effect",
                fix="pass peft_config, adapter, or single options",
            )
        check_numbers({**self._given(), **(self.peft_config or {})})

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SHORT if getattr(self, name) is not None}

    def options(self) -> LoraConfig:
        """Returns peft's configuration; a new object in each call, since peft modifies it."""
        if self.adapter is not None:
            from neuron_accel_lora.files import read_config

            return read_config(self.adapter)
        given = self._given() if self.peft_config is None else self.peft_config
        return lora_config({name: list(value) if isinstance(value, tuple) else value for name, value in given.items()})

    def companions(self) -> tuple[StrategyPlugin, ...]:
        return (LoraLayersPlugin(),)

    def validate(self, context: PlanContext) -> None:
        """Checks the options with peft, which must not be imported before the device is chosen.

        Raises:
            ConfigurationError: if peft does not have an option, or an option is not supported.
        """
        if self.adapter is None:
            self.options()

    def surveys(self, run: Run) -> list[tuple[ParameterMap, Survey]]:
        """The surveys of all prepared models."""
        return run.state(self).setdefault("surveys", [])

    def survey_of(self, parameters: ParameterMap, run: Run) -> Survey:
        """The survey of one prepared model."""
        return next(survey for known, survey in self.surveys(run) if known is parameters)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Finds the layers to adapt in the unsharded model, broadcasts the initial values of adapters, and freezes the
        other parameters."""
        from neuron_accel_lora.files import load_adapter
        from neuron_accel_lora.survey import agree_on_values, in_turn, take_survey

        with in_turn(run):
            survey = take_survey(model.module, self.options(), values=run.backend.has_values)
        if self.adapter is not None:
            load_adapter(self.adapter, survey, model.module)
        agree_on_values(survey, run)
        self.surveys(run).append((model.parameters, survey))

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Removes frozen parameters from ``optimizer``, and adds each adapter to the group of the weight that it
        adapts."""
        from neuron_accel_lora.optimizers import hold_adapters

        hold_adapters(optimizer, self.surveys(run), run)
        state = run.state(self)
        state.setdefault("held", set()).update(p for group in optimizer.param_groups for p in group["params"])
        state["checked"] = False
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Before the first step: checks that an optimizer holds every adapter."""
        state = run.state(self)
        if state.get("checked", True):
            return
        held, state["checked"] = state["held"], True
        for parameters, survey in self.surveys(run):
            missing = [
                name
                for name in survey.trained
                if parameters[name].current is not None and parameters[name].current not in held
            ]
            if missing:
                raise ParameterError(
                    f"No optimizer holds {missing[0]!r} and {len(missing) - 1} more adapters.",
                    where=WHERE,
                    why="an optimizer receives the adapters of the weights that it holds, and none holds these weights",
                    fix="build the optimizer from model.parameters(), or after `prepare` from those that require a "
                    "gradient",
                )
        yield

    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Raises an error if an embedding or head with an adapter would be resized; the adapter would keep its
        shape."""
        for parameters, survey in self.surveys(run):
            if model.parameters is parameters:
                _refuse_adapted_ends(model.original, survey)
        yield

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        from neuron_accel_lora.trained import explain

        return explain(model.parameters, self.survey_of(model.parameters, run))


@dataclass(frozen=True, kw_only=True)
class LoraLayersPlugin(StrategyPlugin):
    """Companion of :class:`LoraPlugin`, which adds adapters to layers when their layouts are known."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="lora_layers",
        api_version=4,
        phase=Phase.ACTIVATIONS,
        after=frozenset({"sequence_parallel", "context_parallel"}),
        provides=frozenset({"gathered-weights"}),
    )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Adds adapters to the layers of ``model``.

        Raises:
            ParameterError: if the number of trained elements differs from peft's or from ``trainable_parameters``.
        """
        from neuron_accel_lora.layers import attach
        from neuron_accel_lora.trained import check_trained

        lora = lora_of(run)
        survey = lora.survey_of(model.parameters, run)
        attach(survey, model.module, run, model.parameters)
        check_trained(model.parameters, survey, lora.trainable_parameters)


def lora_of(run: Run) -> LoraPlugin:
    """The :class:`LoraPlugin` of a run."""
    plugin = run.plan.plugin(LoraPlugin.spec.name)
    assert isinstance(plugin, LoraPlugin)  # LoraLayersPlugin is its companion
    return plugin


def _refuse_adapted_ends(model: torch.nn.Module, survey: Survey) -> None:
    getters = (getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output"))
    ends = [get() for get in getters if get is not None]
    for target in survey.targets:
        if any(model.get_submodule(target.fqn) is end for end in ends):
            raise UsageError(
                f"{target.fqn!r} has an adapter and cannot be resized.",
                where=WHERE,
                why="the adapter would keep its shape",
                fix="resize it before `prepare`",
            )


def _checked(config: Any) -> LoraConfig:
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ConfigurationError(
            f"peft_config is a {type(config).__name__}.",
            where=WHERE,
            why="only LoRA is sharded over ranks",
            fix="pass a peft.LoraConfig, or a mapping of its options",
        )
    return config

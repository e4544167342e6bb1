"""The strategy: configuration, and when what happens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from neuron_accel.contract import (
    ConfigurationError,
    ParameterError,
    Phase,
    PlanContext,
    PluginSpec,
    StrategyPlugin,
    UsageError,
)
from neuron_accel_lora.options import WHERE, check_numbers, lora_config, plain

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

    from neuron_accel.contract import ParameterMap, PreparedModel, Run
    from neuron_accel_lora.survey import Survey

_SHORT = ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "bias", "modules_to_save")
"""Options that can be given directly."""


@dataclass(frozen=True, kw_only=True)
class LoraPlugin(StrategyPlugin):
    """Trains LoRA adapters of a model's layers, and nothing else of it.

    Targets and initial values are those of ``peft`` for the same options. Adapters are then sharded over the
    ranks as the layers do that they adapt, so that they compute what they compute in one process. Give the model as it
    is, without adapters; an optimizer over ``model.parameters()`` gets each adapter in the group of the weight that it
    adapts. Parameters of the base model keep their FQNs and are frozen.

    Options that are left out are peft's defaults.

    Args:
        r: rank of the adapters.
        lora_alpha: what they are scaled by, times ``r`` (``sqrt(r)`` with ``use_rslora``).
        target_modules: ends of the names of the layers to adapt, or one regular expression for the full name, or
            ``"all-linear"``; left out, what peft has for the model's type.
        lora_dropout: probability with which inputs of adapters are dropped in training.
        use_rslora: rank-stabilised scaling (Kalajdzievski 2023).
        bias: which biases of the base model train, too.
        modules_to_save: ends of the names of modules that train as they are.
        peft_config: a ``peft.LoraConfig``, or its options as a mapping, in place of all of the above.
        adapter: folder of an adapter that peft or :func:`~neuron_accel_lora.save_adapter` wrote, to go on with; in
            place of all of the above.
        trainable_parameters: how many elements are to be trained over all ranks; another number is an error.
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

    spec: ClassVar[PluginSpec] = PluginSpec(name="lora", phase=Phase.ADAPTATION)

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
                f"Adapters are configured twice: by {' and by '.join(ways)}.",
                where=WHERE,
                why="one would have to be ignored",
                fix="give peft_config, or adapter, or single options",
            )
        check_numbers({**self._given(), **(self.peft_config or {})})

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SHORT if getattr(self, name) is not None}

    def options(self) -> LoraConfig:
        """peft's configuration; a new one each time, since peft writes into it."""
        if self.adapter is not None:
            from neuron_accel_lora.files import read_config

            return read_config(self.adapter)
        given = self._given() if self.peft_config is None else self.peft_config
        return lora_config({name: list(value) if isinstance(value, tuple) else value for name, value in given.items()})

    def companions(self) -> tuple[StrategyPlugin, ...]:
        return (LoraLayersPlugin(),)

    def validate(self, context: PlanContext) -> None:
        """Checks the options, which takes peft: it may be imported only once the device is settled.

        Raises:
            ConfigurationError: for an option that peft does not have, or one that would not be exact.
        """
        if self.adapter is None:
            self.options()

    def surveys(self, run: Run) -> list[tuple[ParameterMap, Survey]]:
        """What was found in each prepared model."""
        return run.state(self).setdefault("surveys", [])

    def survey_of(self, parameters: ParameterMap, run: Run) -> Survey:
        return next(survey for known, survey in self.surveys(run) if known is parameters)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Decides what is adapted, lets adapters begin alike on all ranks, and freezes the rest. The model's layers are
        still unsharded."""
        from neuron_accel_lora.files import load_adapter
        from neuron_accel_lora.survey import agree_on_values, in_turn, take_survey

        with in_turn(run):
            survey = take_survey(model.module, self.options())
        if self.adapter is not None:
            load_adapter(self.adapter, survey, model.module)
        agree_on_values(survey, run)
        self.surveys(run).append((model.parameters, survey))

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Leaves what trains in ``optimizer``, and puts each adapter in the group of the weight that it adapts."""
        from neuron_accel_lora.optimizers import hold_adapters

        hold_adapters(optimizer, self.surveys(run), run)
        state = run.state(self)
        state.setdefault("held", set()).update(p for group in optimizer.param_groups for p in group["params"])
        state["checked"] = False
        return optimizer

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
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
                    f"No optimizer holds {missing[0]!r} and {len(missing) - 1} more that are to be trained.",
                    where=WHERE,
                    why="an adapter goes where the weight is that it adapts, and no optimizer that was prepared has it",
                    fix="build the optimizer from model.parameters(), or from what requires a gradient after `prepare`",
                )

    def before_reshape(self, model: PreparedModel, run: Run) -> None:
        """Refuses other shapes for a table of tokens, or a head, that is adapted: its adapter would keep its own."""
        for parameters, survey in self.surveys(run):
            if model.parameters is parameters:
                _refuse_adapted_ends(model.original, survey)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        from neuron_accel_lora.report import explain

        return explain(model.parameters, self.survey_of(model.parameters, run))

    def teardown(self, run: Run) -> None:
        run.state(self).clear()


@dataclass(frozen=True, kw_only=True)
class LoraLayersPlugin(StrategyPlugin):
    """Part of :class:`LoraPlugin`: gives layers their adapters, once their layouts are known."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="lora_layers", phase=Phase.ACTIVATIONS, after=frozenset({"sequence_parallel", "context_parallel"})
    )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Gives the layers of ``model`` their adapters.

        Raises:
            ParameterError: if other elements would be trained than were asked for.
        """
        from neuron_accel_lora.layers import attach
        from neuron_accel_lora.report import check_trained

        lora = lora_of(run)
        survey = lora.survey_of(model.parameters, run)
        attach(survey, model.module, run, model.parameters)
        check_trained(model.parameters, survey, lora.trainable_parameters)


def lora_of(run: Run) -> LoraPlugin:
    """The plugin that trains adapters in a run."""
    plugin = run.plan.plugin(LoraPlugin.spec.name)
    assert isinstance(plugin, LoraPlugin)  # the planner knows one of that name
    return plugin


def _refuse_adapted_ends(model: torch.nn.Module, survey: Survey) -> None:
    getters = (getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output"))
    ends = [get() for get in getters if get is not None]
    for target in survey.targets:
        if any(model.get_submodule(target.fqn) is end for end in ends):
            raise UsageError(
                f"{target.fqn!r} is adapted, and cannot get another shape any more.",
                where=WHERE,
                why="its adapter has the shape that it had",
                fix="resize it before `prepare`",
            )


def _checked(config: Any) -> LoraConfig:
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ConfigurationError(
            f"peft_config is a {type(config).__name__}.",
            where=WHERE,
            why="only LoRA is sharded over ranks",
            fix="give a peft.LoraConfig, or a mapping of its options",
        )
    return config

# SPDX-License-Identifier: Apache-2.0
"""The plans of all known families, and plans that users register."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from neuron_accel.errors import ConfigurationError
from neuron_accel.models.bart import BART, BIGBIRD_PEGASUS, BIOGPT, MBART, SPEECH_TO_TEXT, WHISPER, XGLM
from neuron_accel.models.bert import (
    BERT,
    ELECTRA,
    MODERNBERT,
    NORM_FIRST,
    ROBERTA,
    ROBERTA_NORM_FIRST,
    XLM_ROBERTA_XL,
)
from neuron_accel.models.gpt import CODEGEN, GPT2, GPT_NEO, GPTJ, MPT, OPENAI_GPT, OPT
from neuron_accel.models.gpt_neox import BLOOM, FALCON, GPT_BIGCODE, GPT_NEOX, PERSIMMON
from neuron_accel.models.hybrid import AFMOE, BAMBA, GRANITE_HYBRID, JAMBA, LFM2_MOE
from neuron_accel.models.llama import BITNET, DIFFLLAMA, GPT_OSS, HUNYUAN, LFM2, LLAMA, QWEN3, STABLELM
from neuron_accel.models.plan import ArchitecturePlan
from neuron_accel.models.t5 import T5
from neuron_accel.models.vit import DINOV2, VIT, WAV2VEC2

_PLANS = (
    AFMOE, BAMBA, BART, BERT, BIGBIRD_PEGASUS, BIOGPT, BITNET, BLOOM, CODEGEN, DIFFLLAMA, DINOV2, ELECTRA, FALCON,
    GPT2, GPTJ, GPT_BIGCODE, GPT_NEO, GPT_NEOX, GPT_OSS, GRANITE_HYBRID, HUNYUAN, JAMBA, LFM2, LFM2_MOE, LLAMA, MBART,
    MODERNBERT, MPT, NORM_FIRST, OPENAI_GPT, OPT, PERSIMMON, QWEN3, ROBERTA, ROBERTA_NORM_FIRST, SPEECH_TO_TEXT,
    STABLELM, T5, VIT, WAV2VEC2, WHISPER, XGLM, XLM_ROBERTA_XL,
)  # fmt: skip


def known_model_types() -> tuple[str, ...]:
    """Returns every ``config.model_type`` that has a plan."""
    return tuple(sorted({*(name for plan in _PLANS for name in plan.model_types), *registered_plans().families}))


def plan_for(model_type: str) -> ArchitecturePlan | None:
    """Returns the plan of a family, or None. A registered plan takes precedence over a built-in one."""
    registered = registered_plans().families.get(model_type)
    if registered is not None:
        return registered
    return next((plan for plan in _PLANS if model_type in plan.model_types), None)


# ---- Plans that users register, for their own modules or for families ------------------------------------------------
@dataclass
class RegisteredPlans:
    """The plans registered in this process.

    Args:
        of_classes: plans as dicts of patterns to styles (:mod:`~neuron_accel.models.user_plan`), by class of module.
        of_types: plans as dicts, by ``config.model_type``.
        families: full descriptions of families, by ``config.model_type``.
    """

    of_classes: dict[type[nn.Module], dict[str, str]] = field(default_factory=dict)
    of_types: dict[str, dict[str, str]] = field(default_factory=dict)
    families: dict[str, ArchitecturePlan] = field(default_factory=dict)

    def find(self, model: nn.Module) -> dict[str, str] | None:
        """Returns the plan of a model, as a dict with patterns relative to ``model``: the plan registered for it, or
        the merged plans of modules in it. Plans of modules inside a module with a plan are ignored. Returns None if
        there is no plan."""
        plans: dict[str, dict[str, str]] = {}
        for name, module in model.named_modules():
            if any(not outer or name.startswith(f"{outer}.") for outer in plans):
                continue
            plan = next((self.of_classes[cls] for cls in type(module).__mro__ if cls in self.of_classes), None)
            if plan is None and self.of_types:
                plan = self.of_types.get(getattr(getattr(module, "config", None), "model_type", None) or "")
            if plan is not None:
                plans[name] = plan
        if not plans:
            return None
        return {
            ".".join(filter(None, (name, pattern))): style
            for name, plan in plans.items()
            for pattern, style in plan.items()
        }


@functools.cache
def registered_plans() -> RegisteredPlans:
    """Returns the plans registered in this process, a global object."""
    return RegisteredPlans()


def register_tensor_parallel_plan(
    target: type[nn.Module] | str, plan: Mapping[str, str] | ArchitecturePlan, *, override: bool = False
) -> None:
    """Registers the tensor-parallel plan of a class of modules or of a model family, for this process.

    Every rank must register the same plans.

    Args:
        target: a class of modules, subclasses included, or a family (``config.model_type``). Modules of the class may
            be inside the prepared model: all of them are sharded. Inside a module with a plan, the plans of further
            classes are ignored.
        plan: a dict of patterns to styles, as for ``ModelParallelismPlugin(tensor_parallel_plan=...)``, with FQNs
            relative to the module; or, for a family, an :class:`~neuron_accel.models.ArchitecturePlan`, which also
            shards vocabulary and sequence.
        override: whether it may replace a plan that is registered or built in.

    Raises:
        ConfigurationError: if the target is neither, or has a plan already.

    Example::

        register_tensor_parallel_plan(MyBlock, {"": "block", "fc1": "colwise", "fc2": "rowwise"})
    """
    plans = registered_plans()
    if isinstance(target, type) and issubclass(target, nn.Module):
        if isinstance(plan, ArchitecturePlan):
            raise _wrong(target, "an ArchitecturePlan describes a family", "give the model_type of its config")
        _check_new(target in plans.of_classes, target.__name__, override)
        plans.of_classes[target] = dict(plan)
    elif isinstance(target, str) and target:
        known = plan_for(target) is not None or target in plans.of_types
        _check_new(known, target, override)
        plans.of_types.pop(target, None)
        plans.families.pop(target, None)
        if isinstance(plan, ArchitecturePlan):
            plans.families[target] = replace(plan, model_types=(target,))
        else:
            plans.of_types[target] = dict(plan)
    else:
        raise _wrong(target, "a plan belongs to a class of modules or to a family", "give a class or a model_type")


def _check_new(known: bool, name: str, override: bool) -> None:
    if known and not override:
        raise ConfigurationError(
            f"There is a plan for {name!r} already.",
            where="register_tensor_parallel_plan",
            why="models that rely on it would be sharded differently",
            fix="pass override=True to replace it",
        )


def _wrong(target: object, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(
        f"{target!r} cannot have this plan.", where="register_tensor_parallel_plan", why=why, fix=fix
    )

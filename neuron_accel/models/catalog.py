"""The families that are known."""

from __future__ import annotations

from neuron_accel.models.gpt2 import GPT2
from neuron_accel.models.gpt_neox import BLOOM, GPT_BIGCODE, GPT_NEOX
from neuron_accel.models.gptj import GPTJ
from neuron_accel.models.llama import LLAMA, QWEN3, STABLELM
from neuron_accel.models.opt import OPT
from neuron_accel.models.plan import ArchitecturePlan

_PLANS = (BLOOM, GPT2, GPT_BIGCODE, GPT_NEOX, GPTJ, LLAMA, OPT, QWEN3, STABLELM)


def known_model_types() -> tuple[str, ...]:
    """Every ``config.model_type`` that has a plan."""
    return tuple(sorted(name for plan in _PLANS for name in plan.model_types))


def plan_for(model_type: str) -> ArchitecturePlan | None:
    """The plan of a family; None if it has none."""
    return next((plan for plan in _PLANS if model_type in plan.model_types), None)

"""The families that are known."""

from __future__ import annotations

from neuron_accel.models.bart import BART, BIOGPT, MBART, XGLM
from neuron_accel.models.bert import (
    BERT,
    ELECTRA,
    MODERNBERT,
    NORM_FIRST,
    ROBERTA,
    ROBERTA_NORM_FIRST,
    XLM_ROBERTA_XL,
)
from neuron_accel.models.gpt2 import GPT2, OPENAI_GPT
from neuron_accel.models.gpt_neo import GPT_NEO
from neuron_accel.models.gpt_neox import BLOOM, FALCON, GPT_BIGCODE, GPT_NEOX, PERSIMMON
from neuron_accel.models.gptj import CODEGEN, GPTJ
from neuron_accel.models.hybrid import AFMOE, BAMBA, GRANITE_HYBRID, JAMBA, LFM2_MOE
from neuron_accel.models.llama import BITNET, DIFFLLAMA, GPT_OSS, HUNYUAN, LFM2, LLAMA, QWEN3, STABLELM
from neuron_accel.models.mpt import MPT
from neuron_accel.models.opt import OPT
from neuron_accel.models.plan import ArchitecturePlan
from neuron_accel.models.registered import registered_plans

_PLANS = (
    AFMOE, BAMBA, BART, BERT, BIOGPT, BITNET, BLOOM, CODEGEN, DIFFLLAMA, ELECTRA, FALCON, GPT2, GPTJ, GPT_BIGCODE,
    GPT_NEO, GPT_NEOX, GPT_OSS, GRANITE_HYBRID, HUNYUAN, JAMBA, LFM2, LFM2_MOE, LLAMA, MBART, MODERNBERT, MPT,
    NORM_FIRST, OPENAI_GPT, OPT, PERSIMMON, QWEN3, ROBERTA, ROBERTA_NORM_FIRST, STABLELM, XGLM, XLM_ROBERTA_XL,
)  # fmt: skip


def known_model_types() -> tuple[str, ...]:
    """Every ``config.model_type`` that has a plan."""
    return tuple(sorted({*(name for plan in _PLANS for name in plan.model_types), *registered_plans().families}))


def plan_for(model_type: str) -> ArchitecturePlan | None:
    """The plan of a family; None if it has none. A registered one comes before one that is built in."""
    registered = registered_plans().families.get(model_type)
    if registered is not None:
        return registered
    return next((plan for plan in _PLANS if model_type in plan.model_types), None)

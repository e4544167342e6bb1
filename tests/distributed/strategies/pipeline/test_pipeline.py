"""Models in pipelines train like one process: families, depths, numbers of micro-batches, schedules; and what pipelines
are combined with."""

from __future__ import annotations

import functools

import pytest

from neuron_accel.testing.parity import Training
from tests.distributed.strategies.pipeline.pipeline_support import FAMILIES, check, gpt2, llama, pipeline

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")
EIGHT_BLOCKS = {name: functools.partial(model_fn, blocks=8) for name, model_fn in FAMILIES.items()}


def matrix():
    """Everything at least once in every run; all combinations in the slow one."""
    at_two = {"gpipe": 2, "1f1b": 8, "zero-bubble": 8, "interleaved": 2}
    for family in FAMILIES:
        for stages in (2, 4):
            for schedule in SCHEDULES:
                counts = (stages, 4 * stages) if schedule == "interleaved" else sorted({1, 2, stages, 4 * stages})
                for count in counts:
                    often = (stages == 2 and count == at_two[schedule]) or (
                        stages == count == 4 and (family == "gpt2-tied" or (family, schedule) == ("llama", "1f1b"))
                    )
                    once = (family, stages, schedule, count) == ("llama", 2, "1f1b", 1)
                    marks = () if often or once else (pytest.mark.slow,)
                    yield pytest.param(family, stages, schedule, count, marks=marks)


@pytest.mark.parametrize(("family", "stages", "schedule", "microbatches"), list(matrix()))
def test_trains_like_one_process(family, stages, schedule, microbatches):
    options = {"virtual_stages": 2} if schedule == "interleaved" else {}
    models = EIGHT_BLOCKS if schedule == "interleaved" and stages == 4 else FAMILIES
    check(models[family], stages, [pipeline(stages, microbatches, schedule=schedule, **options)], size=16)


TP = {"tensor_parallel_size": 2}
COMPOSITIONS = {
    "tp2": (4, [pipeline(2, 4, **TP)]),
    "tp2-sp": (4, [pipeline(2, 4, **TP), "sequence_parallel"]),
    "tp2-sp-zero-bubble": (4, [pipeline(2, 4, schedule="zero-bubble", **TP), "sequence_parallel"]),
    "tp2-sp-zero-bubble-zero1": (4, [pipeline(2, 4, schedule="zero-bubble", **TP), "sequence_parallel", "zero1"]),
    "tp2-sp-interleaved": (
        4,
        [pipeline(2, 4, schedule="interleaved", virtual_stages=2, **TP), "sequence_parallel"],
    ),
    "dp2": (4, [pipeline(2, 4)]),
    "dp2-zero1": (4, [pipeline(2, 4), "zero1"]),
    "dp2-zero1-zero-bubble": (4, [pipeline(2, 4, schedule="zero-bubble"), "zero1"]),
    "dp2-zero1-interleaved": (4, [pipeline(2, 4, schedule="interleaved", virtual_stages=2), "zero1"]),
    "tp2-dp2-sp-zero-bubble-of-one": (8, [pipeline(2, 1, schedule="zero-bubble", **TP), "sequence_parallel"]),
    "tp2-dp2-sp-zero1": (8, [pipeline(2, 4, **TP), "sequence_parallel", "zero1"]),
}
OFTEN = {
    ("gpt2-tied", "tp2"),
    ("llama", "tp2-sp"),
    ("gpt2-tied", "tp2-sp-zero-bubble"),
    ("llama", "tp2-sp-zero-bubble-zero1"),
    ("llama", "tp2-sp-interleaved"),
    ("gpt2-tied", "dp2"),
    ("gpt2-tied", "dp2-zero1"),
    ("mixtral", "dp2-zero1"),
    ("gpt2-tied", "dp2-zero1-interleaved"),
    ("llama", "dp2-zero1-zero-bubble"),
    ("llama", "tp2-dp2-sp-zero-bubble-of-one"),
    ("gpt2-tied", "tp2-dp2-sp-zero1"),
    ("llama", "tp2-dp2-sp-zero1"),
}


def compositions():
    for composition in COMPOSITIONS:
        # Experts are sharded over ranks by another strategy.
        families = [f for f in FAMILIES if "tp2" not in composition or f in ("llama", "gpt2-tied")]
        for family in families:
            marks = () if (family, composition) in OFTEN else (pytest.mark.slow,)
            yield pytest.param(family, composition, marks=marks)


@pytest.mark.parametrize(("family", "composition"), list(compositions()))
def test_with_other_plugins(family, composition):
    ranks, plugins = COMPOSITIONS[composition]
    check(FAMILIES[family], ranks, plugins, size=16)


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp2", "zero1"])
def test_accumulation(plugins):
    check(gpt2, 4, [pipeline(2, 2), *plugins], training=Training(max_norm=0.5, accumulation=2))


def without_cache(model):
    model.config.use_cache = False  # with one, transformers does not look at positions for where a document begins


# ---- batches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("model_fn", [llama, gpt2])
def test_losses_are_averaged_by_tokens_and_documents_stay_apart(model_fn, kind):
    check(model_fn, 2, [pipeline(2, 8)], training=Training(max_norm=0.5, prepare_model=without_cache), kind=kind)


# ---- what is done to models before they are prepared -----------------------------------------------------------------
def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def frozen_beginning(model):
    """No parameter of the first stage learns, and of the second only some do."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name or "lm_head" in name)


def frozen_end(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_gradient_checkpointing(schedule):
    training = Training(max_norm=0.5, prepare_model=checkpointed)
    check(llama, 2, [pipeline(2, 4, schedule=schedule)], training=training)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("freeze", [frozen_beginning, frozen_end])
def test_frozen_parameters(freeze, schedule):
    training = Training(max_norm=0.5, prepare_model=freeze)
    check(llama, 2, [pipeline(2, 4, schedule=schedule)], training=training)

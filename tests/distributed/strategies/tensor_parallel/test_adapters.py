"""Models that peft has wrapped to adapt them train sharded as they do in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.errors import UnsupportedModelError
from neuron_accel.models import Architecture
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, VOCABULARY
from tests.sweeps.tiny import tiny_model

pytest.importorskip("peft")

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(family, layers, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = MODELS[family]() if family in MODELS else tiny_model(family)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(layers), init_lora_weights=False, **options)
    return get_peft_model(model, config)


@pytest.mark.parametrize(
    ("family", "layers", "plugins", "ranks", "options"),
    [
        ("llama", ALL, [TP2, "zero1"], 4, {"layers_to_transform": [0]}),  # other layers are as they were
        ("gpt2", ("c_attn", "c_proj"), [TP2, "fully_sharded"], 4, {"fan_in_fan_out": True}),
        ("gemma3_text", ("q_proj", "v_proj"), [TP2, "sequence_parallel"], 2, {}),  # by transformers' plan
        ("llama", ALL, [{"model_parallelism": {"tensor_parallel_size": 4}}], 4, {}),  # key/value heads that ranks share
    ],
)
def test_adapters_train_as_in_one_process(family, layers, plugins, ranks, options):
    generator = torch.Generator().manual_seed(1)
    batches = [
        {name: torch.randint(3, VOCABULARY, (4, 9), generator=generator) for name in ("input_ids", "labels")}
        for _ in range(2)
    ]
    build = functools.partial(adapted, family, layers, **options)
    assert_parallel_equivalence(build, batches, plugins, ranks=ranks, training=Training(max_norm=0.5))


def test_the_adapter_of_a_row_wise_layer_has_no_sequence_parallelism():
    assert not Architecture.of(adapted("llama", ["q_proj"])).plan.sequence
    assert "the adapter of 'layers.1.self_attn.o_proj' ends" in Architecture.of(adapted("llama", ALL[:4])).plan.sequence


def test_adapters_of_another_kind_are_refused():
    from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards

    with pytest.raises(UnsupportedModelError, match=r"lora_magnitude_vector.* has no style"):
        plan_shards(Architecture.of(adapted("llama", ["q_proj"], use_dora=True)), 2)

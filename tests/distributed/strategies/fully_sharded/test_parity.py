"""Fully sharded parameters train like one process, alone and beside tensor and sequence parallelism."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.errors import PlanError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, token_batches
from tests.distributed.strategies.zero1.test_zero1 import OPTIMIZERS
from tests.guests import guards


def sharded(**options):
    return {"fully_sharded": options}


TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
GUARDS = guards("desync_guard", "finite_guard", {"replica_check": {"every": 1}})
COMPOSITIONS = {
    "3-dp2-accumulates": ("llama", [sharded()], 2, 2),
    "3-dp4-tied": ("gpt2-tied", [sharded()], 4, 1),
    "3-dp2-sharded-accumulation": ("llama", [sharded(use_grad_acc_hook=True)], 2, 2),
    "3-dp2-no-overlap": ("llama", [sharded(overlap=False)], 2, 1),
    "3-dp2-keeps-small": ("llama", [sharded(persistence_threshold=100, prefetch=2)], 2, 2),
    "3-dp2-parameters": ("llama", [sharded(partition="parameters")], 2, 1),
    "3-dp4-in-groups": (
        "llama",
        [sharded(hybrid_shard_size=2, persistence_threshold=100), {"replica_check": {"every": 1}}],
        4,
        2,
    ),
    "3-dp4-resharded-in-groups": ("gpt2-tied", [sharded(reshard_after_forward=2), "activation_checkpointing"], 4, 1),
    "2-dp2-tied": ("llama-tied", [sharded(reshard_after_forward=False)], 2, 1),
    "2-dp2-accumulates": ("gpt2-tied", [sharded(reshard_after_forward=False)], 2, 2),
    "3-dp2-flash": ("llama", [sharded(), "flash_attention"], 2, 1),
    "3-dp2-recomputes": ("gpt2-tied", [sharded(), "activation_checkpointing"], 2, 1),
    "2-dp2-recomputes-every-2": (
        "llama",
        [sharded(reshard_after_forward=False), {"activation_checkpointing": {"every": 2}}],
        2,
        1,
    ),
    "3-dp2-guards": ("llama", [sharded(), *GUARDS], 2, 1),
    "3-tp2-dp2": ("llama", [TP2, sharded()], 4, 1),
    "3-tp2-sp-dp2": ("llama-tied", [TP2, "sequence_parallel", sharded()], 4, 1),
    "2-tp2-sp-dp2": ("gpt2-tied", [TP2, "sequence_parallel", sharded(reshard_after_forward=False)], 4, 2),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins, ranks, accumulation = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=accumulation)
    assert_parallel_equivalence(MODELS[model], token_batches(3 * accumulation), plugins, ranks=ranks, training=training)


# ---- further families ------------------------------------------------------------------------------------------------
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **off, num_attention_heads=4, initializer_range=0.1))


def mixtral():
    """Where a rank's tokens reach no expert, its weights have no gradient on this rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.1))


def albert():
    """One block that is called for every layer."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"vocab_size": 96, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 48}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AlbertForMaskedLM(AlbertConfig(**sizes, **off, num_hidden_layers=3, num_attention_heads=4))


def with_shared_layer():
    """A weight that is tied across two blocks."""
    model = MODELS["llama"]()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def freeze_key_biases(model):
    """Whose gradients are zero but for rounding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))


FAMILIES = {
    "t5": (t5, {}),
    "bert": (bert, {}),
    "mixtral": (mixtral, {}),
    "albert": (albert, {"modules": "albert.encoder.albert_layer_groups.*"}),
    "tied-across-blocks": (with_shared_layer, {}),
    "one-unit": (MODELS["gpt2"], {"modules": "transformer.wte"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model, options = FAMILIES[family]
    training = Training(max_norm=0.5, prepare_model=freeze_key_biases)
    assert_parallel_equivalence(model, token_batches(2), [sharded(**options)], ranks=2, training=training)


# ---- optimizers that need full parameters ----------------------------------------------------------------------------
WHOLE = sharded(partition="parameters")


@pytest.mark.parametrize(
    ("name", "plugins", "ranks"),
    [
        ("adafactor", [WHOLE], 2),
        ("lamb", [TP2, WHOLE], 4),
        ("lamb", [WHOLE], 4),
        ("muon", [sharded(partition="parameters", reshard_after_forward=False)], 2),
    ],
    ids=["adafactor", "lamb-tp2", "lamb-chunks-that-differ", "muon-stage-2"],
)
def test_optimizers_that_need_full_parameters(name, plugins, ranks):
    """Each parameter of a unit is on one rank in full, which updates it; others gather it for its use."""
    optimizer, _ = OPTIMIZERS[name]
    training = Training(optimizer=optimizer, max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(MODELS["llama"], token_batches(4), plugins, ranks=ranks, training=training)


def losses_of_a_model_read(folder, is_lazy):
    from contextlib import nullcontext

    from transformers import AutoModelForCausalLM

    from neuron_accel import FullyShardedPlugin, NeuronAccelerator, lazy_load_for_parallelism

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin(partition="parameters")])
    with lazy_load_for_parallelism() if is_lazy else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder)
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["lamb"][0](model.parameters(), lr=1e-2))
    losses = []
    for batch in token_batches(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_they_update_weights_that_each_rank_reads_by_itself(tmp_path):
    MODELS["llama-tied"]().save_pretrained(tmp_path)
    expected, found = (run_ranks(losses_of_a_model_read, 2, str(tmp_path), is_lazy) for is_lazy in (False, True))
    assert found == expected


def shards_elements():
    from neuron_accel import FullyShardedPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin()])
    model = MODELS["llama"]()
    accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))


def test_they_are_refused_where_ranks_have_some_elements_of_each():
    with pytest.raises(RanksError) as raised:
        run_ranks(shards_elements, 2)
    for error in raised.value.errors.values():
        assert isinstance(error, PlanError)
        assert "partition='parameters'" in str(error)

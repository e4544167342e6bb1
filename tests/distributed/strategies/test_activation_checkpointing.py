"""Recomputed modules train like one process, with every other strategy, and draw the same random numbers twice."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch

from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, gpt2, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import pipeline

NAME = "activation_checkpointing"
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "dp2": ("llama", [NAME], 2),
    "zero1-every-2": ("gpt2-tied", ["zero1", {NAME: {"every": 2}}], 2),
    "tp2-attention": ("llama", [TP2, {NAME: {"modules": "attention"}}], 2),
    "tp2-sp": ("gpt2-tied", [TP2, "sequence_parallel", NAME], 2),
    "tp2-sp-dp2-zero1": ("llama-tied", [TP2, "sequence_parallel", "zero1", NAME], 4),
    "pp2-every-2": ("gpt2", [pipeline(2, 2), {NAME: {"every": 2}}], 2),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins, ranks = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=2 if composition == "dp2" else 1)
    assert_parallel_equivalence(MODELS[model], token_batches(2), plugins, ranks=ranks, training=training)


# ---- random numbers, and that anything is recomputed at all ----------------------------------------------------------
def dropping_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)).train()


def gradients_and_calls(plugins):
    """Loss and gradients of one step, and how often the feed-forward of each block on this rank was called."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = dropping_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    calls = {}
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.act.register_forward_hook(lambda *_, n=name: calls.update({n: calls.get(n, 0) + 1}))
    torch.manual_seed(1)
    loss = model(**token_batches(1)[0]).loss
    accelerator.backward(loss)
    gradients = {name: value.clone() for name, value in accelerator.get_gradients(model).items()}
    text = accelerator.explain(model)
    accelerator.end_training()
    return loss.detach(), gradients, calls, text


@pytest.mark.parametrize(
    ("plugins", "micro_batches"),
    [([], 1), ([TP2, "sequence_parallel"], 1), ([pipeline(2, 2)], 2)],
    ids=["dp", "sp", "pp"],
)
def test_dropout_is_drawn_the_same_again(plugins, micro_batches):
    plain = run_ranks(gradients_and_calls, 2, plugins)
    again = run_ranks(gradients_and_calls, 2, [*plugins, NAME])
    for (loss, gradients, calls, _), (loss_again, gradients_again, calls_again, text) in zip(plain, again, strict=True):
        torch.testing.assert_close(loss, loss_again, rtol=1e-6, atol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(gradients_again[name], value, rtol=1e-5, atol=1e-7, msg=name)
        assert set(calls.values()) == {micro_batches}
        assert calls_again == dict.fromkeys(calls, 2 * micro_batches)
        assert f"computed again in the backward pass ({len(calls)} modules" in text


# ---- which modules ---------------------------------------------------------------------------------------------------
def recomputed(model, **options):
    """FQNs of what a plugin chooses, on one rank."""
    from neuron_accel import ActivationCheckpointingPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[ActivationCheckpointingPlugin(**options)])
    prepared = accelerator.prepare_model(model)
    names = [name for name, module in prepared.named_modules() if "forward" in vars(module)]
    accelerator.end_training()
    assert not [name for name, module in prepared.named_modules() if "forward" in vars(module)], "left behind"
    return names


def choices():
    llama, plain = MODELS["llama"], functools.partial(torch.nn.Sequential, torch.nn.Linear(2, 2), torch.nn.ReLU())
    blocks = ["model.layers.0", "model.layers.1"]
    assert recomputed(llama()) == blocks
    assert recomputed(llama(), every=2) == blocks[:1]
    assert recomputed(llama(), modules="attention") == [f"{name}.self_attn" for name in blocks]
    assert recomputed(llama(), modules=("model.layers.1.*_layernorm", "model.layers.*.mlp"), every=2) == [
        "model.layers.0.mlp",
        "model.layers.1.input_layernorm",
    ]
    assert recomputed(llama(), modules=("model.layers.0", "model.layers.*.mlp")) == [
        "model.layers.0",
        "model.layers.1.mlp",
    ]
    assert recomputed(plain(), modules="0") == ["0"]
    with pytest.raises(
        ConfigurationError, match=r"(?s)no module 'model.layer.\*.mlp'.*Did you mean 'model.layers.\*.mlp'"
    ):
        recomputed(llama(), modules="model.layer.*.mlp")
    with pytest.raises(UnsupportedModelError, match="repeated blocks of Sequential are not known"):
        recomputed(plain())
    checkpointing = llama()
    checkpointing.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="already checkpoints its activations"):
        recomputed(checkpointing)


def test_modules_are_chosen_by_options():
    run_ranks(choices, 1)


def test_options_are_checked():
    from neuron_accel import ActivationCheckpointingPlugin

    for options in ({"every": 0}, {"modules": ""}, {"modules": ()}, {"modules": ("h.*", "")}, {"every": 1.5}):
        with pytest.raises(ConfigurationError):
            ActivationCheckpointingPlugin(**options)


def test_copies_of_a_prepared_model_compute_for_themselves():
    run_ranks(copies, 1)


def copies():
    from neuron_accel import NeuronAccelerator

    model = NeuronAccelerator(config={"plugins": [NAME]}).prepare_model(gpt2())
    batch = token_batches(1)[0]
    for other in (copy.deepcopy(model.train()), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert model(**batch).loss > other(**batch).loss + 0.01 or model(**batch).loss < other(**batch).loss - 0.01

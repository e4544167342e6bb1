"""``accelerator.explain`` compares what training takes at least with the memory of a core."""

from __future__ import annotations

import pytest
import torch


def explained(plugins, layers):
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import DryRun, NeuronAccelerator

    AcceleratorState._reset_state(True)
    accelerator = NeuronAccelerator(plugins=plugins, backend=DryRun(world_size=64))
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=4096, num_hidden_layers=layers, vocab_size=256, intermediate_size=8192)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    before = accelerator.explain(model).splitlines()[-1]
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert accelerator.explain(model).splitlines()[-1] == before
    AcceleratorState._reset_state(True)
    return before, sum(parameter.nbytes for parameter in model.parameters()) / 2**30


@pytest.mark.parametrize(("layers", "fits"), [(4, True), (16, False)])
def test_weights_gradients_and_state_are_compared_with_a_core(monkeypatch, layers, fits):
    from neuron_accel import TensorParallelPlugin, Zero1Plugin

    monkeypatch.setenv("NEURON_ACCEL_INSTANCE", "trn1.32xlarge")
    line, weights = explained([], layers)
    assert line.startswith("A core of trn1.32xlarge has 16 GiB") == fits
    assert line.startswith("Does NOT fit: a core") != fits
    assert f"at least {4 * weights:.3g} GiB are needed with Adam (weights {weights:.3g}," in line
    sharded, own = explained([TensorParallelPlugin(tensor_parallel_size=2), Zero1Plugin()], layers)
    assert own < 0.51 * weights
    state = f"gradients {own / 32:.3g}, optimizer state {2 * own / 32:.3g})"
    assert f"at least {own * (1 + 3 / 32):.3g} GiB are needed with Adam (weights {own:.3g}, {state}" in sharded


def test_without_an_instance_nothing_is_compared():
    assert "core" not in explained([], 1)[0]

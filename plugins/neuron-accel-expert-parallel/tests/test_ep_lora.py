"""LoRA beside experts: adapters of attention, shared experts and the head, and experts that are frozen, or trained as
they are. That LoRA itself trains like peft in one process is tested by its package."""

from __future__ import annotations

import ep_models
import pytest
import torch
from neuron_accel_expert_parallel import ExpertParallelPlugin

from neuron_accel import NeuronAccelerator, TensorParallelPlugin, Zero1Plugin
from neuron_accel.testing import run_ranks

lora = pytest.importorskip("neuron_accel_lora", reason="the package neuron-accel-lora is not installed")
EP2 = ExpertParallelPlugin(expert_parallel_size=2)
TP2 = TensorParallelPlugin(tensor_parallel_size=2)
ATTENTION = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "lm_head"]}
AND_EXPERTS = {**ATTENTION, "modules_to_save": ["mlp.experts"]}
AND_SHARED = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}


def trained(family: str, options: dict, plugins: list) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses, then all weights in full, and the names of those that changed."""
    accelerator = NeuronAccelerator(plugins=[lora.LoraPlugin(**options), *plugins])
    torch.manual_seed(0)
    model = ep_models.build(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6))
    index, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    losses = []
    for batch in ep_models.batches(3):
        loss = model(**{name: value.chunk(size)[index] for name, value in batch.items()}).loss
        accelerator.backward(loss)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        optimizer.step()
        optimizer.zero_grad()
    after = accelerator.get_state_dict(model)
    return losses, after, [name for name, value in before.items() if after and not torch.equal(after[name], value)]


@pytest.mark.parametrize(
    ("family", "options", "plugins", "ranks"),
    [
        ("mixtral", ATTENTION, [EP2, Zero1Plugin()], 4),
        pytest.param("mixtral", AND_EXPERTS, [EP2, TP2], 4, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", AND_SHARED, [EP2, TP2, Zero1Plugin()], 8, marks=pytest.mark.slow),
        pytest.param("llama4_text", ATTENTION, [EP2], 2, marks=pytest.mark.slow),
    ],
    ids=["attention", "experts-as-they-are", "shared-experts", "llama4"],
)
def test_trains_like_one_process(family, options, plugins, ranks):
    losses, weights, changed = run_ranks(trained, 1, family, options, [])[0]
    found = run_ranks(trained, ranks, family, options, plugins)[0]
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[2] == changed, "the same parameters train"
    assert any(".experts." in name for name in changed) == ("modules_to_save" in options)
    assert found[1].keys() == weights.keys()
    assert all(weights[name].any() for name in weights if "lora_B" in name), "they begin at zero, and train"
    assert any("lora_B" in name for name in weights)
    for name in weights:
        torch.testing.assert_close(found[1][name], weights[name], rtol=1e-3, atol=1e-4, msg=name)

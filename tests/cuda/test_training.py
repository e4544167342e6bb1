"""Training on CUDA ranks: the same as in one process on the CPU, and checkpoints that load on another mesh."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.testing import assert_parallel_equivalence, run_ranks
from neuron_accel.testing.parity import Training

ROWS = torch.arange(64).reshape(4, 16) * 7 % 96
TENSOR = {"model_parallelism": {"tensor_parallel_size": 2}}
PIPELINE = {"model_parallelism": {"pipeline_parallel_size": 2}}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def test_ranks_have_a_gpu_each_or_share_one():
    found = run_ranks(whereabouts, 2, backend="cuda", timeout=100)
    assert [rank for rank, *_ in found] == [0, 1]
    for _, device, backend, total in found:
        assert device.startswith("cuda:")
        assert backend == "torch"
        assert total == [3.0, 3.0]


def whereabouts():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    rank = accelerator.process_index
    total = accelerator.reduce(torch.full((2,), rank + 1.0, device=accelerator.device), "sum")
    return rank, str(accelerator.device), accelerator.run.backend.name, total.tolist()


@pytest.mark.parametrize(
    ("plugins", "ranks"),
    [
        ([], 2),
        (["zero1"], 2),
        ([TENSOR], 2),
        ([TENSOR, "sequence_parallel"], 2),
        ([TENSOR, {"sequence_parallel": {"overlap_gather": True}}], 2),
        ([PIPELINE], 2),
        ([TENSOR, "zero1"], 4),
        ([TENSOR, "sequence_parallel", "zero1", "activation_checkpointing"], 4),
        ([PIPELINE, "zero1"], 4),
        (["fully_sharded"], 2),
        (["fully_sharded", "activation_checkpointing"], 2),
        ([TENSOR, "fully_sharded"], 4),
        (["zero1", {"flash_attention": {"block_size": 5}}], 2),
        ([TENSOR, {"chunked_loss": {"chunks": 3}}], 2),
    ],
    ids=[
        "dp2",
        "zero1",
        "tp2",
        "tp2-sp",
        "tp2-sp-overlapping",
        "pp2",
        "tp2-dp2-zero1",
        "tp2-sp-dp2-zero1-ac",
        "pp2-dp2-zero1",
        "fully-sharded",
        "fully-sharded-ac",
        "tp2-fully-sharded",
        "zero1-flash",
        "tp2-chunked",
    ],
)
def test_training_is_that_of_one_process(plugins, ranks):
    batch = {"input_ids": ROWS, "labels": ROWS}
    training = Training(accumulation=2, max_norm=0.5)
    assert_parallel_equivalence(llama, batch, plugins, ranks=ranks, training=training, backend="cuda", timeout=100)


def trained(plugins, folder, saves, steps=2):
    """Trains, saves or loads before, and returns what a further step makes of the weights, on the host."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = ROWS.to(accelerator.device)

    def step():
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()

    if saves:
        for _ in range(steps):
            step()
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    step()
    return {name: tensor.cpu() for name, tensor in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("backend", ["cuda", "gloo"])
def test_a_checkpoint_loads_on_another_mesh_and_device(tmp_path, backend):
    run = functools.partial(run_ranks, trained, 2, timeout=100)
    expected = run(["zero1"], str(tmp_path / "state"), True, backend="cuda")[0]
    found = run([TENSOR], str(tmp_path / "state"), False, backend=backend)[0]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)

"""A user's own script, counted by ``neuron-accel plan``, against the same step on real ranks."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from neuron_accel.cli.main import main
from neuron_accel.testing import run_ranks
from tests.distributed.planning.test_step import count_really

SCRIPT = """
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accel import NeuronAccelerator, TensorParallelPlugin, Zero1Plugin

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
options = parser.parse_args()

plugins = [TensorParallelPlugin(tensor_parallel_size=2), Zero1Plugin()]
accelerator = NeuronAccelerator(plugins=plugins, backend="torch", gradient_accumulation_steps=2)
size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(num_hidden_layers=3, vocab_size=256, attn_implementation="eager", **size)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(16, 64, dtype=torch.int64), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(input_ids=ids, labels=ids).loss) for ids in loader]
    model.train()
    return torch.stack(losses).mean().item()


best = evaluate()
for epoch in range(options.epochs):
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
    best = min(best, evaluate())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_counts_what_real_ranks_do(script, capsys):
    command = ["plan", str(script), "--nproc-per-node", "2", "--nnodes", "2", "--json", "--", "--epochs", "1"]
    assert main(command) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert "loss 0.000" in output.err
    ((peak, parts, flows, operations, weights),) = run_ranks(count_really, 4, [("tp", "zero1")], timeout=110)[0]
    assert found["traffic"] == [asdict(flow) for flow in flows]
    assert found["operations"] == operations
    assert found["memory"]["total"] == pytest.approx(peak, rel=0.03)
    assert found["memory"]["parts"]["weights"] == weights == parts["weights"]
    assert (found["mesh"], found["plugins"]) == ("dp 2 x tp 2", ["tensor_parallel", "zero1"])
    assert (found["micro_batch"], found["accumulation"], found["sequence"], found["tokens"]) == (2, 2, 64, 512)
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), start=1) if "loss {" in text)
    assert found["values_read"][f"{script}:{line}"] == 3

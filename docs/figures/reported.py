"""Trains a small Llama with a run report, for the screenshots: ``python -m docs.figures --report`` launches it."""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, RunReportPlugin, Zero1Plugin

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="run_report")
parser.add_argument("--tensor-parallel-size", type=int, default=1)
parser.add_argument("--predicted")
parser.add_argument("--late", type=int, nargs=2, metavar=("RANK", "STEP"), help="a rank that sleeps before a step")
options = parser.parse_args()

degree = options.tensor_parallel_size
strategies = [ModelParallelismPlugin(tensor_parallel_size=degree)] if degree > 1 else []
report = RunReportPlugin(folder=options.folder, predicted=options.predicted, show="nothing")
accelerator = NeuronAccelerator(plugins=[*strategies, Zero1Plugin(), report])
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, attn_implementation="eager", **sizes))
text = torch.tensor(list(Path("LICENSE").read_bytes()))
starts = torch.randint(len(text) - 128, (60 * 16,))
rows = [{"input_ids": text[start : start + 128], "labels": text[start : start + 128]} for start in starts]
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = torch.utils.data.DataLoader(rows, batch_size=4 * degree)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, batch in enumerate(loader):
    if options.late and options.late == [accelerator.state.process_index, step]:
        time.sleep(1.0)
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
accelerator.end_training()

"""Sharded sequences on real XLA ranks: documents, padding and windows as data, one graph on every rank."""

from __future__ import annotations

import functools
import importlib.util

import cp_models
import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin

from neuron_accel import FullyShardedPlugin, ModelParallelismPlugin, NeuronAccelerator, Zero1Plugin
from neuron_accel.testing import Training, assert_parallel_equivalence, run_ranks

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="torch_xla is not installed"),
    pytest.mark.timeout(300),  # most of it is spent compiling
]

CP2, CP4 = ContextParallelPlugin(context_parallel_size=2), ContextParallelPlugin(context_parallel_size=4)
TP2 = ModelParallelismPlugin(tensor_parallel_size=2)
CASES = {
    "cp4": (functools.partial(cp_models.grouped, num_hidden_layers=1), cp_models.batches, [CP4], 4),
    "packed, cp2-tp2": (cp_models.grouped, cp_models.packed, [CP2, TP2], 4),
    "padded, cp2": (functools.partial(cp_models.gpt2, n_layer=1), cp_models.padded, [CP2], 2),
    "windows, cp2-dp2-zero1": (cp_models.windowed, cp_models.batches, [CP2, Zero1Plugin()], 4),
    "cp2-dp2-fully-sharded": (cp_models.grouped, cp_models.batches, [CP2, FullyShardedPlugin()], 4),
}
SLOW = {"cp2-dp2-fully-sharded"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_trains_like_one_process(case):
    model, data, plugins, ranks = CASES[case]
    batches = cp_models.batches(5, alike=True) if "dp2" in case else data(5)
    training = Training(max_norm=0.5)
    assert_parallel_equivalence(model, batches, plugins, ranks=ranks, training=training, backend="xla", timeout=280)


def count_graphs() -> list[int]:
    accelerator = NeuronAccelerator(config={"backend": "xla"}, plugins=[CP2])
    torch.manual_seed(0)
    model = cp_models.llama().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    graphs = []
    for batch in cp_models.packed(4):
        loss = model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(accelerator.run.backend.compilations)
    return graphs


def test_a_step_is_one_graph_on_every_rank():
    for graphs in run_ranks(count_graphs, 2, backend="xla", timeout=280):
        assert graphs[-1] == graphs[1] <= 2  # the first step makes the optimizer's state

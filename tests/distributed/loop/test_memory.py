"""What is left in memory of a model that was built in full, once it is prepared."""

from __future__ import annotations

import gc

import torch

from neuron_accel import (
    FullyShardedPlugin,
    NeuronAccelerator,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.testing import run_ranks
from neuron_accel.testing._cases import tiny_llama

PLUGINS = {
    "tensor parallel": lambda: TensorParallelPlugin(tensor_parallel_size=2),
    "pipeline": lambda: PipelineParallelPlugin(pipeline_parallel_size=2),
    "fully sharded": FullyShardedPlugin,
    "zero1": Zero1Plugin,
}


def _live_bytes() -> int:
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _live_after_preparing() -> dict[str, float]:
    """Bytes of live tensors after ``prepare``, relative to those of the full weights, by strategy."""
    result = {}
    for name, plugin in PLUGINS.items():
        gc.collect()
        before = _live_bytes()
        accelerator = NeuronAccelerator(plugins=[plugin()])
        model = tiny_llama()
        full = sum(p.numel() * p.element_size() for p in model.parameters())
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gc.collect()
        result[name] = (_live_bytes() - before) / full
        accelerator.free_memory()
        accelerator.state._reset_state()
        del model, optimizer, accelerator
    return result


def test_the_full_weights_are_freed():
    for live in run_ranks(_live_after_preparing, 2):
        assert live["zero1"] < 1.05  # every rank has all weights
        for name in ("tensor parallel", "pipeline", "fully sharded"):
            assert live[name] < 0.6, live

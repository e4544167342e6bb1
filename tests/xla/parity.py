"""Training on an XLA rank for comparison with one process. Nothing is read before a step is complete."""

from __future__ import annotations

import torch

from neuron_accel.testing.parity import Trace
from neuron_accel.testing.xla_ranks import one_at_a_time


def train_on_xla_rank(model_fn, batches, config, training):
    """The trace on rank 0, None elsewhere, and how many graphs there had been after each step."""
    import torch_xla.debug.metrics as metrics

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", **config, "gradient_accumulation_steps": training.accumulation}
    )
    with one_at_a_time():
        torch.manual_seed(0)
        model = model_fn()
        optimizer = training.optimizer(model.parameters())
    model.train()
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms, graphs = [], [], []
    for batch in batches:
        with accelerator.accumulate(model):
            size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
            mine = {name: value.chunk(size)[rank].to(accelerator.device) for name, value in batch.items()}
            loss = model(**mine).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.sync_gradients and training.max_norm is not None:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), training.max_norm))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.wait_for_everyone()  # the counter is the process's: others may still be compiling this step
            graphs.append(metrics.counter_value("UncachedCompile"))
    weights = accelerator.get_state_dict(model)
    trace = None
    if accelerator.is_main_process:
        trace = Trace([float(x) for x in losses], [float(x) for x in norms], {}, weights)
    accelerator.end_training()
    return trace, graphs

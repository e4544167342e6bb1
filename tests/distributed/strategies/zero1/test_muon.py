"""torch's Muon for matrices and AdamW for the rest, as docs/guides/optimizers.md shows, equals one process."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.models import llama, token_batches

ENDS = ("embed_tokens.weight", "lm_head.weight")
LAYOUTS = {
    "zero1": [{"zero1": {"partition": "parameters"}}],
    "fully-sharded": [{"fully_sharded": {"partition": "parameters"}}],
    "tp": [{"model_parallelism": {"tensor_parallel_size": 2}}],
}


def train(plugins):
    from neuron_accel import NeuronAccelerator

    torch.manual_seed(0)
    model = llama()
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.dim() == 2 and not name.endswith(ENDS)]
    others = [p for name, p in named if p.dim() != 2 or name.endswith(ENDS)]
    optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model, *optimizers = accelerator.prepare(model, *optimizers)
    losses = []
    for batch in token_batches(4):
        own = {
            name: value.chunk(accelerator.num_processes)[accelerator.data_parallel_rank]
            for name, value in batch.items()
        }
        loss = model(**own).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return losses, weights


def train_all(layouts):
    return [train(plugins) for plugins in layouts]


def test_two_optimizers_of_one_model():
    ((alone, expected),) = run_ranks(train_all, 1, [[]])[0]
    assert alone[-1] != pytest.approx(alone[0], rel=1e-3)
    for layout, (losses, weights) in zip(LAYOUTS, run_ranks(train_all, 2, list(LAYOUTS.values()))[0], strict=True):
        assert losses == pytest.approx(alone, rel=1e-4), layout
        for name, value in expected.items():
            error = (weights[name] - value).abs().max() / value.abs().max()
            assert error < 5e-3, (layout, name)  # it orthogonalises in bfloat16


def elementwise_only():
    with pytest.raises(Exception, match="partition") as caught:
        train([{"zero1": {}}])
    return str(caught.value)


def test_parts_of_matrices_are_refused():
    assert "Muon" in run_ranks(elementwise_only, 2)[0]

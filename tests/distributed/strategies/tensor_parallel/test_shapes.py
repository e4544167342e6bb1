"""Models whose heads and features are not divisible, or that have fewer key/value heads than there are ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.models import token_batches
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import (
    batch,
    compare_step,
    gpt2,
    llama,
    make_run,
    shard,
)

CASES = {
    "more ranks than key/value heads": (llama, 4, {"num_key_value_heads": 2, "attention_bias": True}),
    "one key/value head": (llama, 2, {"num_key_value_heads": 1}),
    "groups of heads padded": (
        llama,
        2,
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "heads padded, ranks without any": (gpt2, 4, {"n_embd": 20, "n_head": 5}),
    "features padded": (llama, 4, {"num_key_value_heads": 4, "intermediate_size": 21, "mlp_bias": True}),
}


def _step(case: str, sequence_parallel: bool) -> dict[str, Any]:
    family, degree, options = CASES[case]
    return compare_step(
        family(num_hidden_layers=1, **options), batch(7), degree=degree, sequence_parallel=sequence_parallel
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case: str, sequence_parallel: bool) -> None:
    for result in run_ranks(_step, CASES[case][1], case, sequence_parallel):
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-5), result
        assert result["error"] < 1e-4, result


def _padding_after_steps() -> float:
    """The largest entry of padding after steps with everything that moves weights."""
    model = gpt2(num_hidden_layers=1, n_embd=20, n_head=5)
    run = make_run(degree=2)
    parameters = shard(model, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(**batch(8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    worst = 0.0
    for record in parameters:
        if not record.layout.padded:
            continue
        real = torch.zeros(record.layout.local_shape, dtype=torch.bool)
        for piece in record.layout.pieces(run.coordinates):
            real[piece.local_slices] = True
        inside = record.current.detach().masked_fill(real, 0).abs().max().item()
        worst = max(worst, 0.0 if "wte" in record.fqn else inside)
    return worst


def test_padded_heads_stay_zero() -> None:
    assert run_ranks(_padding_after_steps, 2) == [0.0, 0.0]


def grouped():
    return llama(num_key_value_heads=2, num_hidden_layers=1)


def test_shared_heads_train_like_one_process() -> None:
    assert_parallel_equivalence(
        grouped,
        token_batches(3),
        [{"model_parallelism": {"tensor_parallel_size": 4}}, "sequence_parallel"],
        ranks=4,
        training=Training(max_norm=0.5),
    )

"""Whole tiny models, sharded, against themselves in one process."""

from __future__ import annotations

import itertools

import pytest

from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import FAMILIES, batch, compare_step

GRID = [
    {"tie_word_embeddings": tied, "sequence_parallel": sequence, "checkpointing": checkpointing}
    for tied, sequence, checkpointing in itertools.product((False, True), (False, True), (None, False, True))
]


def _steps(family: str, degree: int, cases: list[dict]) -> list[dict]:
    results = []
    for case in cases:
        options = dict(case)
        run_options = {k: options.pop(k) for k in list(options) if k in ("sequence_parallel", "checkpointing")}
        run_options |= {k: options.pop(k) for k in list(options) if k == "parallelize_embeddings"}
        length = options.pop("length", 8)
        if family == "llama" and degree == 4:
            options = {"num_key_value_heads": 4, **options}
        model = FAMILIES[family](**options)
        inputs = batch(length, model.config.vocab_size)
        results.append(case | compare_step(model, inputs, degree=degree, **run_options))
    return results


def _check(results: list[list[dict]]) -> None:
    for of_rank in results:
        for result in of_rank:
            assert result["loss"] == pytest.approx(result["expected"], rel=1e-5), result
            assert result["error"] < 1e-4, result


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_loss_and_gradients(family: str, degree: int) -> None:
    _check(run_ranks(_steps, degree, family, degree, GRID))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_odd_shapes(family: str, degree: int) -> None:
    cases = [
        {"attn_implementation": attention, "length": length, "vocab_size": vocabulary, "sequence_parallel": sequence}
        for attention, length, vocabulary, sequence in [
            ("sdpa", 8, 101, False),
            ("sdpa", 7, 101, True),
            ("eager", 5, 103, True),
            ("eager", 9, 100, False),
        ]
    ]
    cases.append({"parallelize_embeddings": False, "sequence_parallel": True, "length": 7})
    cases.append({"parallelize_embeddings": False, "tie_word_embeddings": True})
    _check(run_ranks(_steps, degree, family, degree, cases))

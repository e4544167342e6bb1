"""What is sent, counted: exactly what the theory says, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_accel import ActivationCheckpointingPlugin
from neuron_accel.backends.events import Traffic
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import FAMILIES, batch, make_run, shard

HIDDEN, BATCH, LENGTH = 16, 2, 8
OPS = ("all_reduce", "all_gather", "reduce_scatter")


def _step_traffic(family: str, layers: int, sequence_parallel: bool, **options: Any) -> Traffic:
    model = FAMILIES[family](**{"num_hidden_layers" if family == "llama" else "n_layer": layers})
    run = make_run(degree=2, sequence_parallel=sequence_parallel, **options)
    shard(model, run)
    with run.backend.record() as traffic:
        model(**batch(LENGTH)).loss.backward()
    return traffic


def _count(family: str, sequence_parallel: bool, **options: Any) -> dict[str, dict[str, tuple[int, int]]]:
    """For each kind of collective how often, and how many bytes: of one layer, and of everything around the layers."""
    one, two = (_step_traffic(family, layers, sequence_parallel, **options) for layers in (1, 2))
    assert {t.op for t in two.transfers} <= set(OPS)
    layer = {op: (two.count(op=op) - one.count(op=op), two.sent(op=op) - one.sent(op=op)) for op in OPS}
    rest = {op: (one.count(op=op) - layer[op][0], one.sent(op=op) - layer[op][1]) for op in OPS}
    return {"layer": layer, "rest": rest}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_traffic_of_a_training_step(family: str) -> None:
    activation = BATCH * LENGTH * HIDDEN * 4  # bytes
    tokens = BATCH * LENGTH * 4
    # a rank of two sends, of an all-reduce, as many bytes as the tensor has; of the others half of the whole tensor
    for result in run_ranks(_count, 2, family, False):
        assert result["layer"] == {"all_reduce": (4, 4 * activation), "all_gather": (0, 0), "reduce_scatter": (0, 0)}
        # embedding forward, head backward; the loss: the largest logit, then target and sum of exponentials together
        assert result["rest"]["all_reduce"] == (4, 2 * activation + 3 * tokens)
        assert result["rest"]["all_gather"] == result["rest"]["reduce_scatter"] == (0, 0)
    half = activation // 2
    kept = {"regather": False}
    recomputed = {"plugins": [ActivationCheckpointingPlugin(modules="attention")]}  # gathers when it is recomputed
    for options, gathers in ((kept, 4), ({"overlap_gather": True, **kept}, 4), ({}, 6), (recomputed, 6)):
        for result in run_ranks(_count, 2, family, True, **options):
            gathered = (gathers, gathers * half)
            assert result["layer"] == {"all_reduce": (0, 0), "all_gather": gathered, "reduce_scatter": (4, 4 * half)}
            assert result["rest"]["all_reduce"] == (4, 2 * activation + 3 * tokens)
            # behind the final norm forward, in front of the first block backward
            assert result["rest"]["all_gather"] == (2, 2 * half)
            assert result["rest"]["reduce_scatter"] == (0, 0)

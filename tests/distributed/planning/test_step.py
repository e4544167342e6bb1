"""What is counted of a dry rank, against the same counters on real ranks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from unittest import mock

import pytest
import torch.distributed as dist

from neuron_accel.testing import run_ranks
from tests.distributed.as_predicted import as_predicted
from tests.distributed.backends.test_dry_run import COMPOSITIONS, plugins_of
from tests.guests import helper

pytest.importorskip("neuron_accel_plan")


def count(names: Sequence[str], dry_run=None):
    return helper("neuron-accel-plan", "plan_support").count(names, dry_run)


class FreedWithIt:
    """A collective of gloo whose tensors are let go of when this object is, as those of a dry run are.

    gloo's thread reports a collective as complete shortly before it lets go of its tensors, and on a busy machine they
    would count as alive for some operations more.
    """

    def __init__(self, call, tensors, arguments):
        views = [tensor.detach() for tensor in tensors]  # Python objects that nothing but the collective refers to
        self.references = [weakref.ref(view) for view in views]
        self.work = call(*views, **arguments)

    def wait(self):
        self.work.wait()

    def __del__(self):
        self.work, deadline = None, time.monotonic() + 10
        while any(reference() is not None for reference in self.references) and time.monotonic() < deadline:
            time.sleep(0.0001)  # releases the GIL, for which the thread may wait


@contextmanager
def buffers_freed_when_waited_for():
    """Makes what is alive on a gloo rank depend on the program alone."""
    names = {"all_reduce": 1, "all_to_all_single": 2, "isend": 1, "irecv": 1}
    names["all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"] = 2
    with ExitStack() as stack:
        for name, count in names.items():
            stack.enter_context(mock.patch.object(dist, name, partial(_started, getattr(dist, name), count)))
        yield


def _started(call, count, *given, **options):
    return FreedWithIt(lambda *views, **more: call(*views, *given[count:], **more), given[:count], options)


def count_really(compositions):
    with as_predicted(), buffers_freed_when_waited_for():
        return [count(names) for names in compositions]


def count_dry(compositions, ranks):
    from neuron_accel.backends.select import DryRun

    return [count(names, DryRun(world_size=ranks)) for names in compositions]


@cache
def counts(ranks: int):
    chosen = {name: names for name, (size, names) in COMPOSITIONS.items() if size == ranks}
    real = run_ranks(count_really, ranks, list(chosen.values()), timeout=110)[0]
    (dry,) = run_ranks(count_dry, 1, list(chosen.values()), ranks, backend=None, timeout=110)
    return {name: (real[index], dry[index]) for index, name in enumerate(chosen)}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_dry_rank_counts_what_a_real_one_does(name):
    (peak, parts, flows, operations, weights), dry = counts(COMPOSITIONS[name][0])[name]
    dry_peak, dry_parts, dry_flows, dry_operations, dry_weights = dry
    assert dry_flows == flows
    assert (dry_operations, dry_weights) == (operations, weights)
    assert dry_peak == pytest.approx(peak, rel=0.03)
    for part in ("weights", "gradients", "master weights", "saved activations"):
        assert dry_parts[part] == pytest.approx(parts[part], rel=0.03)
    # Step counters are on the host, where a dry run does not count.
    assert parts["optimizer state"] - 4000 < dry_parts["optimizer state"] <= parts["optimizer state"]


def test_recomputation_saves_memory_for_operations():
    plain, recomputed = (counts(2)[name][1] for name in ("tp2", "tp2 + recomputation"))
    assert recomputed[1]["saved activations"] < plain[1]["saved activations"] / 2
    assert 1.2 * plain[3] < recomputed[3] < 1.4 * plain[3]


def measure_a_large_run():
    """70 B parameters on 4,096 ranks: the layout, and the largest resident memory of this process, in bytes."""
    import resource

    from transformers import LlamaConfig

    from neuron_accel import plan

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    plugins = plugins_of(("sp", "zero1", "recompute"))
    from neuron_accel import TensorParallelPlugin

    counted = plan(
        config,
        world_size=4096,
        global_batch=512,
        sequence=4096,
        plugins=[TensorParallelPlugin(tensor_parallel_size=8), *plugins],
        instance="trn1.32xlarge",
    )
    return counted, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_thousands_of_ranks_of_a_large_model_take_little_memory():
    ((counted, resident),) = run_ranks(measure_a_large_run, 1, backend=None, timeout=110)
    assert resident < 2 << 30
    assert counted.extrapolated
    assert counted.parameters == pytest.approx(69e9, rel=0.01)
    assert counted.step.weights == pytest.approx(counted.parameters * 2 / 8, rel=0.01)
    # forward, recomputed forward and backward: 8 operations per parameter and token, and those of attention
    assert counted.step.operations * 8 > 8 * counted.parameters * 4096
    assert counted.fits is False  # 16.1 GiB of weights alone

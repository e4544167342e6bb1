"""Parameters sharded along an axis of samples: their gradients are summed over the other axes only, and divided by all
samples, so that training equals that of one process on the global batch."""

from __future__ import annotations

import pytest
import torch

from neuron_accel import FullyShardedPlugin, Zero1Plugin
from neuron_accel.contract import Mesh, ParameterMap
from neuron_accel.errors import LayoutError
from neuron_accel.testing import RanksError, Training, assert_parallel_equivalence, run_ranks
from tests.distributed.strategies.expert_parallel.mixture import (
    ExpertParallelPlugin,
    Mixture,
    batches,
    some_unused,
)
from tests.guests import guards

EP2 = ExpertParallelPlugin(size=2)
SHARDED = FullyShardedPlugin(modules="experts")
ZERO1, GUARDS = Zero1Plugin(), guards({"replica_check": {"every": 1}}, "desync_guard")
CLIPPED = Training(max_norm=0.05)


def sgd(parameters):
    """Momentum and decay: what a parameter without a gradient is spared."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


COMPOSITIONS = {
    "ep2": (2, [], CLIPPED),
    "ep2-dp2": (4, [], Training(max_norm=0.05, accumulation=2)),
    "ep2-zero1": (2, [ZERO1], CLIPPED),
    "ep2-dp2-zero1": (4, [ZERO1, *GUARDS], CLIPPED),
    "ep2-dp2-zero1-hook": (4, [Zero1Plugin(use_grad_acc_hook=True)], Training(accumulation=2)),
    "ep2-dp2-zero1-parameters": (4, [Zero1Plugin(partition="parameters")], CLIPPED),
    "ep2-dp2-fully-sharded": (4, [SHARDED, *GUARDS], CLIPPED),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    ranks, others, training = COMPOSITIONS[composition]
    data = batches(3 * training.accumulation)
    assert_parallel_equivalence(Mixture, data, [EP2, *others], ranks=ranks, training=training)


@pytest.mark.parametrize("others", [[], [ZERO1], [SHARDED]], ids=["plain", "zero1", "fully-sharded"])
def test_experts_that_some_ranks_do_not_use(others):
    training = Training(optimizer=sgd)
    data = batches(3, lopsided=True)
    assert_parallel_equivalence(some_unused, data, [EP2, *others], ranks=2, training=training)


def trained(steps, plugins, *, saved=None, loaded=None):
    """Weights after steps on the batches from ``steps.start`` to ``steps.stop``, in full."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=plugins)
    torch.manual_seed(0)
    model = Mixture()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if loaded:
        accelerator.load_state(loaded)
    index, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    for batch in batches(4)[steps]:
        accelerator.backward(model(**{name: value.chunk(size)[index] for name, value in batch.items()}))
        optimizer.step()
        optimizer.zero_grad()
    if saved:
        accelerator.save_state(saved)
    return {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}


def close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("others", [[], [ZERO1]], ids=["plain", "zero1"])
def test_a_checkpoint_loads_on_any_mesh(tmp_path, others):
    expected = run_ranks(trained, 1, slice(0, 4), [])[0]
    run_ranks(trained, 4, slice(0, 2), [EP2, *others], saved=str(tmp_path / "ep2-dp2"))
    close(run_ranks(trained, 1, slice(2, 4), [], loaded=str(tmp_path / "ep2-dp2"))[0], expected)
    run_ranks(trained, 1, slice(0, 2), [], saved=str(tmp_path / "one"))
    close(run_ranks(trained, 2, slice(2, 4), [EP2, *others], loaded=str(tmp_path / "one"))[0], expected)


def not_zeroed(plugins):
    """Gradients of two passes that a loop adds up without zeroing, in full."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=plugins)
    torch.manual_seed(0)
    model = Mixture()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    index, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    shares = [{name: value.chunk(size)[index] for name, value in batch.items()} for batch in batches(2)]
    for share in shares:
        accelerator.backward(model(**share))
    return accelerator.get_gradients(model)


@pytest.mark.parametrize("others", [[], [ZERO1]], ids=["plain", "zero1"])
def test_gradients_that_a_loop_does_not_zero(others):
    close(run_ranks(not_zeroed, 4, [EP2, *others])[0], run_ranks(not_zeroed, 1, [])[0])


def uneven(exchanged):
    """Two pairs of ranks, the second of which has a batch less; or one pair whose second rank has."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[EP2])
    torch.manual_seed(0)
    model = Mixture()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if not exchanged:  # experts are sharded all the same
        model.experts.run, model.experts.forward = None, lambda tokens, expert: model.experts.up.sum() * tokens
    rank = accelerator.data_parallel_rank
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in batches(2)[: 1 if rank == accelerator.data_parallel_size - 1 else 2]:
            accelerator.backward(model(**{name: value[rank : rank + 2] for name, value in batch.items()}))
            optimizer.step()
            optimizer.zero_grad()
    own = model.experts.up.detach().clone()
    return own, model.first.weight.detach().clone()


def test_uneven_inputs_leave_shards_apart():
    results = run_ranks(uneven, 4, False)
    ups, firsts = zip(*results, strict=True)
    assert all(torch.equal(first, firsts[0]) for first in firsts)
    coordinates = [(rank // 2, rank % 2) for rank in range(4)]  # of ranks along dp and ep
    for (_, ep), up in zip(coordinates, ups, strict=True):
        assert torch.equal(up, ups[ep])
    assert not torch.equal(ups[0], ups[1])


def test_an_exchange_that_a_rank_without_data_would_miss_is_refused():
    with pytest.raises(RanksError, match="sending tokens to experts is not possible while some ranks have run out"):
        run_ranks(uneven, 2, True, timeout=30)


def test_parameters_that_only_some_ranks_along_an_axis_of_samples_hold_are_refused():
    mesh = Mesh.build(EP2.axes(), 2)
    parameters = ParameterMap(Mixture(), mesh=mesh)
    with parameters.changed_by("test_expert_parallel"), pytest.raises(LayoutError, match="stack the parameters"):
        parameters.set_holders("experts.up", "ep", [0])


def local_sgd(others):
    from accelerate.local_sgd import LocalSGD

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[EP2, *others])
    torch.manual_seed(0)
    model = Mixture()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    index, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    (batch,) = batches(1)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        accelerator.backward(model(**{name: value.chunk(size)[index] for name, value in batch.items()}))
        optimizer.step()
        local.step()


@pytest.mark.parametrize("others", [[], [ZERO1]], ids=["plain", "zero1"])
def test_ranks_that_hold_shards_of_one_model_do_not_step_alone(others):
    with pytest.raises(RanksError, match=r"'experts\.up', sharded over ep") as caught:
        run_ranks(local_sgd, 2, others)
    assert sorted(caught.value.errors) == [0, 1]
    assert {type(error).__name__ for error in caught.value.errors.values()} == {"UsageError"}

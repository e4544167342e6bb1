"""Shares that are updated as one tensor, as on devices that compile, on a device that calls itself one."""

from __future__ import annotations

import torch
from torch import nn

from neuron_accel.testing import run_ranks


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 2)

    def forward(self, x, both):
        y = self.first(x).square().sum()
        return y + self.second(x).square().sum() if both else y


def build():
    torch.manual_seed(0)
    model = Two()
    groups = [{"params": [model.first.weight, model.second.weight]}, {"params": [model.first.bias, model.second.bias]}]
    groups[1]["weight_decay"] = 0.0
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), both) for both in (False, True, False, True, True)]


def sharded(changes_state=False):
    from neuron_accel.backends.torch_distributed import TorchBackend
    from neuron_accel.engine.plan.planner import make_plan
    from neuron_accel.engine.plan.registry import default_registry
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterMap
    from neuron_accel.engine.shards.lazy_shard import LazyShard
    from neuron_accel.engine.shards.optimizer import ShardedOptimizer
    from neuron_accel.strategies.zero1 import Zero1Plugin

    class Lazy(TorchBackend):
        is_lazy = True

    backend, registry = Lazy.connect("cpu"), default_registry()
    plan = make_plan(
        [Zero1Plugin()],
        world_size=backend.world_size,
        backend_capabilities=backend.capabilities,
        default_owners=registry.default_owners(),
        provenance=registry.provenance,
    )
    run = Run(plan=plan, backend=backend)
    model, optimizer = build()
    run.models.append(PreparedModel(original=model, module=model, parameters=ParameterMap(model)))
    sharded = ShardedOptimizer(
        optimizer, run, **Zero1Plugin(max_norm=1.0).optimizer_options(), synchronises=lambda: True
    )
    assert [type(shard) for shard in sharded.shards] == [LazyShard] * 2, "one for each group of options"
    for index, (x, both) in enumerate(batches()):
        model(x.chunk(backend.world_size)[backend.rank], both).backward()
        sharded.flush()
        sharded.step()
        sharded.zero_grad()
        if changes_state and index == 3:
            restate(sharded)
    return {name: value.clone() for name, value in model.state_dict().items()}, float(sharded.grad_norm)


def restate(optimizer):
    """What a checkpoint does: everything is read by pieces, dropped, and written again."""
    pieces = optimizer.state_pieces()
    kept = [(p.parameter.detach().clone(), dict(p.read_state(optimizer))) for p in pieces]
    assert all(values["momentum_buffer"].shape == master.shape for master, values in kept)
    for piece in pieces:
        piece.parameter.data.zero_()
        piece.drop_state(optimizer)
    optimizer.take_over()
    assert not any(optimizer.state.values())
    for piece, (master, values) in zip(optimizer.state_pieces(), kept, strict=True):
        piece.parameter.data.copy_(master)
        piece.new_state(optimizer).update(values)
    optimizer.take_over()


def alone():
    model, optimizer = build()
    for x, both in batches():
        # the mean over two ranks of sums over their halves
        (model(x, both) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), float(norm)


def test_parameters_without_a_gradient_keep_their_weights_and_momentum():
    expected, norm = alone()
    for found, found_norm in run_ranks(sharded, 2):
        assert abs(found_norm - norm) < 1e-5 * norm
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_state_can_be_read_and_written_by_pieces():
    untouched = run_ranks(sharded, 2)[0][0]
    for found, _ in run_ranks(sharded, 2, True):
        for name, value in untouched.items():
            assert torch.equal(found[name], value), name

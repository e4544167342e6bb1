"""What islands compute, send, keep and save, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_sgd_support import NESTEROV, Small, samples, sgd, train_islands
from neuron_accel_local_sgd import LocalSGDPlugin, synchronize
from neuron_accel_local_sgd.wire import BLOCK, decode, encode
from torch import nn

from neuron_accel import NeuronAccelerator, Zero1Plugin
from neuron_accel.contract import StrategyPlugin
from neuron_accel.errors import ConfigurationError, NeuronAccelError, PlanError, UsageError
from neuron_accel.testing import RanksError, Trace, Training, compare, run_ranks, train_alone, train_on_rank

PLAIN = Training(optimizer=sgd)
CLIPPED = Training(max_norm=0.5)  # AdamW


# ---- the algorithm ---------------------------------------------------------------------------------------------------
def momentum_sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [sgd, momentum_sgd])
def test_one_inner_step_and_a_mean_is_data_parallelism(optimizer):
    training = Training(optimizer=optimizer)
    expected = train_alone(Small, samples(6), training)
    plugin = LocalSGDPlugin(islands=2, inner_steps=1)
    found = run_ranks(train_on_rank, 2, Small, samples(6), {}, training, [plugin], timeout=60)[0]
    compare(Trace(expected.losses, [], {}, expected.weights), Trace(found.losses, [], {}, found.weights))


ALGORITHMS = {
    "local SGD": ({"inner_steps": 3}, []),
    "Adam": ({"inner_steps": 2, "outer_optimizer": "Adam", "outer_options": {"lr": 0.01}}, []),
    "post-local": ({"inner_steps": 3, "warmup_steps": 2, "outer_options": NESTEROV}, []),
    "overlapped": ({"inner_steps": 3, "delay": 2, "outer_options": NESTEROV}, []),
    "streaming": (
        {"inner_steps": 4, "fragments": 2, "delay": 1, "local_weight": 0.5, "outer_options": NESTEROV},
        [Zero1Plugin()],
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_islands_equal_their_reference(name):
    options, beside = ALGORITHMS[name]
    plugin, ranks = LocalSGDPlugin(islands=2, **options), 4 if beside else 2
    expected = train_islands(
        Small, samples(9), CLIPPED, plugin=plugin, reference=lambda model: model, data_parallel_size=ranks
    )
    found = run_ranks(train_on_rank, ranks, Small, samples(9), {}, CLIPPED, [plugin, *beside], timeout=60)[0]
    compare(expected, found)


# ---- what is sent and kept -------------------------------------------------------------------------------------------
class Island:
    """A prepared model and optimizer on this rank.

    Args:
        plugins: of the accelerator.
        optimizer: of the model.
        dtype: of the model.
    """

    def __init__(self, plugins: list[StrategyPlugin], optimizer=sgd, dtype: torch.dtype = torch.float32) -> None:
        self.accelerator, self.dtype = NeuronAccelerator(plugins=plugins), dtype
        torch.manual_seed(0)
        built = Small().to(dtype)
        self.model, self.optimizer = self.accelerator.prepare(built, optimizer(built.parameters()))
        (self.plugin,) = (p for p in self.accelerator.run.plan.plugins if isinstance(p, LocalSGDPlugin))
        self.done = 0

    def train(self, steps: int) -> None:
        """Trains on samples that are others on every data-parallel rank."""
        size, rank = self.accelerator.data_parallel_size, self.accelerator.run.data_parallel_rank
        for batch in samples(self.done + steps)[self.done :]:
            mine = {name: value.chunk(size)[rank].to(self.dtype) for name, value in batch.items()}
            self.accelerator.backward(self.model(**mine))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.done += steps

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: value.detach().clone()
            for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()
        }

    def differ(self) -> bool:
        """Whether islands have different weights."""
        everyone = self.accelerator.run.backend.all_gather_object(self.weights(), self.accelerator.run.world)
        return any(not torch.equal(one[name], everyone[0][name]) for one in everyone for name in one)

    def anchors(self) -> int:
        """Elements of the outer optimizer's weights on this rank."""
        (loop,) = self.plugin.loops(self.accelerator.run)
        return sum(shard.anchor.numel() for shard in loop.shards.values())


def _traffic(inner_steps: int, wire: str, plugins: list[StrategyPlugin]) -> tuple[int, int, dict[str, torch.Tensor]]:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=inner_steps, wire=wire), *plugins])
    with island.accelerator.run.backend.record() as traffic:
        island.train(4)
    assert not island.differ()
    return traffic.sent(group="island"), island.anchors(), island.weights()


ELEMENTS = sum(p.numel() for p in Small().parameters())


def test_bytes_fall_with_the_steps_between_synchronisations():
    sent = {steps: run_ranks(_traffic, 2, steps, "float32", [], timeout=60)[0][0] for steps in (1, 2, 4)}
    assert sent == {1: 16 * ELEMENTS, 2: 8 * ELEMENTS, 4: 4 * ELEMENTS}  # a ring of two sends each element once


def test_bytes_fall_with_the_dtype_and_the_means_stay_near():
    ((full, _, exact), *_) = run_ranks(_traffic, 2, 2, "float32", [], timeout=60)
    ((half, _, near), *_) = run_ranks(_traffic, 2, 2, "bfloat16", [], timeout=60)
    ((byte, _, also), *_) = run_ranks(_traffic, 2, 2, "int8", [], timeout=60)
    blocks = 2 * -(-ELEMENTS // (2 * BLOCK))  # padded to a multiple of two chunks of blocks
    assert full == 2 * 4 * ELEMENTS  # two rounds
    assert half == 2 * 2 * 2 * -(-ELEMENTS // 2)  # of two chunks, padded
    assert byte == 2 * blocks * (BLOCK + 4)  # integers and scales, half of them in each of two messages
    for found in (near, also):
        moved = max((found[name] - exact[name]).abs().max() for name in exact)
        assert 0 < moved < 2e-3


def test_ranks_of_an_island_share_the_outer_state_and_the_bytes():
    (one, *_) = run_ranks(_traffic, 2, 4, "float32", [], timeout=60)
    (two, *_) = run_ranks(_traffic, 4, 4, "float32", [Zero1Plugin()], timeout=60)
    assert one[1] == ELEMENTS
    padded = sum(-(-p.numel() // 2) for p in Small().parameters())
    assert two[1] == padded < ELEMENTS
    assert two[0] == 4 * padded


def test_int8_rounds_to_half_a_scale_and_hides_no_infinity():
    blocks = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-6], [1.0], [0.0]])
    payload, scales = encode(blocks)
    assert (payload.dtype, payload.shape, scales.shape) == (torch.int8, blocks.shape, (3, 1))
    assert ((decode(payload, scales) - blocks).abs() <= scales * 0.5001).all()
    blocks[1, 0] = torch.inf
    assert not decode(*encode(blocks))[1].isfinite().any()
    assert decode(*encode(blocks))[0].isfinite().all()


# ---- checkpoints -----------------------------------------------------------------------------------------------------
STREAMING = {"inner_steps": 4, "fragments": 2, "delay": 2, "wire": "int8", "outer_options": NESTEROV}


def _resume(folder: str, plugins: list[StrategyPlugin]) -> None:
    first = Island(plugins, torch.optim.AdamW)
    first.train(5)  # an exchange is under way, and used after the sixth step
    first.accelerator.save_state(folder)
    first.train(6)
    end = first.weights()
    first.accelerator.load_state(folder)
    first.done = 5
    first.train(6)
    assert all(torch.equal(end[name], value) for name, value in first.weights().items())
    first.accelerator.free_memory()
    second = Island(plugins, torch.optim.AdamW)
    second.accelerator.load_state(folder)
    second.done = 5
    second.train(6)
    assert all(torch.equal(end[name], value) for name, value in second.weights().items())


def test_resumes_bit_for_bit_while_differences_are_under_way(tmp_path):
    run_ranks(_resume, 4, str(tmp_path / "state"), [LocalSGDPlugin(islands=2, **STREAMING), Zero1Plugin()], timeout=90)


def _save(folder: str, steps: int) -> dict[str, torch.Tensor]:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=2, outer_options=NESTEROV)])
    island.train(steps)
    island.accelerator.save_state(folder)
    return island.weights()


def _go_on(folder: str, islands: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    plugin = LocalSGDPlugin(islands=islands, inner_steps=2, outer_options=NESTEROV)
    island = Island([plugin])
    island.accelerator.load_state(folder)
    loaded, island.done = island.weights(), 4
    island.train(1)
    apart = island.differ()
    island.train(1)
    assert not island.differ()
    return loaded, island.weights(), apart


def test_goes_on_with_another_number_of_islands(tmp_path):
    saved = run_ranks(_save, 2, str(tmp_path / "state"), 4, timeout=60)[0]
    ends = {}
    for ranks, islands in ((2, 2), (4, 4), (2, 1)):
        for loaded, end, apart in run_ranks(_go_on, ranks, str(tmp_path / "state"), islands, timeout=60):
            assert all(torch.equal(saved[name], value) for name, value in loaded.items())
            assert apart == (islands > 1)
            ends[islands] = end
    # All samples of a batch have the same weight on any number of islands, so the outcomes differ only by what two
    # steps apart from each other change. Without the momentum that was saved, they would be far apart.
    moved = max((ends[2][name] - saved[name]).abs().max() for name in saved)
    for islands in (1, 4):
        assert max((ends[islands][name] - ends[2][name]).abs().max() for name in saved) < 0.1 * moved


def _another_outer_optimizer(folder: str) -> None:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=2, outer_optimizer="Adam", outer_options={"lr": 0.1})])
    island.accelerator.load_state(folder)


def test_the_state_of_another_outer_optimizer_is_refused(tmp_path):
    run_ranks(_save, 2, str(tmp_path / "state"), 3, timeout=60)
    with pytest.raises(RanksError, match="the state of SGD, the outer optimizer is Adam"):
        run_ranks(_another_outer_optimizer, 2, str(tmp_path / "state"), timeout=60)


def _replaces_weights(folder: str) -> None:
    torch.manual_seed(0)
    accelerator = NeuronAccelerator()
    built = Small()
    model, _ = accelerator.prepare(built, sgd(built.parameters()))
    accelerator.save_state(folder)  # data parallel
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.free_memory()
    island = Island([LocalSGDPlugin(islands=2, inner_steps=2, outer_options={"lr": 0.0})])  # goes back to the start
    with torch.no_grad():
        island.accelerator.unwrap_model(island.model).up.weight.fill_(0.5)
    island.train(3)
    island.accelerator.load_state(folder)
    island.train(2)
    assert all(torch.equal(weights[name].to(value), value) for name, value in island.weights().items())


def test_a_checkpoint_of_data_parallelism_is_a_new_start(tmp_path):
    run_ranks(_replaces_weights, 2, str(tmp_path / "state"), timeout=60)


# ---- when islands are equal ------------------------------------------------------------------------------------------
def _use() -> None:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=3, delay=1, fragments=2, local_weight=0.5)])
    island.train(4)
    assert island.differ()
    synchronize(island.accelerator)
    assert not island.differ()
    before = island.weights()
    synchronize(island.accelerator)
    assert all(torch.equal(before[name], value) for name, value in island.weights().items())
    frozen = island.accelerator.unwrap_model(island.model).up.weight.requires_grad_(False)
    value = frozen.detach().clone()
    island.train(5)
    assert torch.equal(frozen, value)
    frozen.requires_grad_(True)
    island.train(6)
    assert not torch.equal(frozen, value)
    frozen.requires_grad_(False)
    with pytest.raises(UsageError, match=r"'up.weight' was frozen between two synchronisations"):
        island.train(1)


def test_islands_are_synchronised_on_request_and_before_a_parameter_is_frozen():
    run_ranks(_use, 2, timeout=60)


def _loads_before_training() -> None:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=1, outer_options={"lr": 0.0})])  # goes back to the start
    with torch.no_grad():
        for parameter in island.model.parameters():
            parameter.fill_(0.5)
    island.train(1)
    assert all((value == 0.5).all() for value in island.weights().values())
    assert "local SGD: 2 islands, an outer step of SGD every step, float32" in island.accelerator.explain(island.model)


def test_weights_that_were_loaded_after_prepare_are_the_start():
    run_ranks(_loads_before_training, 2, timeout=60)


def _writes_between_synchronisations() -> None:
    island = Island([LocalSGDPlugin(islands=2, inner_steps=2)], lambda p: torch.optim.SGD(p, lr=0.0))
    island.train(1)
    with torch.no_grad():
        for parameter in island.model.parameters():
            parameter.fill_(0.5)
    island.train(2)
    assert all(torch.allclose(value, torch.full_like(value, 0.5)) for value in island.weights().values())


def test_weights_that_are_written_between_synchronisations_are_kept_by_a_mean():
    run_ranks(_writes_between_synchronisations, 2, timeout=60)


def _master_weights() -> None:
    # Rounds of two steps, after which islands go back to the start: the third step is the first of a round.
    plugin = LocalSGDPlugin(islands=2, inner_steps=2, outer_options={"lr": 0.0})
    island = Island([plugin, Zero1Plugin()], lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), torch.bfloat16)
    start = island.weights()
    island.train(2)
    assert all(torch.equal(start[name], value) for name, value in island.weights().items())
    (optimizer,) = (loop.optimizer for loop in plugin.loops(island.accelerator.run))
    optimizer.param_groups[0]["lr"] = 0.0
    island.train(1)
    assert all(torch.equal(start[name], value) for name, value in island.weights().items())


def test_master_weights_follow_an_outer_step():
    run_ranks(_master_weights, 4, timeout=60)


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"islands": 0}, "islands is 0"),
        ({"delay": 4}, "delay=4"),
        ({"fragments": 5}, "fragments=5"),
        ({"local_weight": 1.0}, "local_weight=1.0"),
        ({"wire": "float16"}, "wire"),
        ({"outer_optimizer": "Adam"}, "needs outer_options"),
        ({"outer_optimizer": "Adm", "outer_options": {}}, "Adam"),
        ({"outer_options": {"rate": 1.0}}, "rate"),
        ({"outer_optimizer": "LBFGS", "outer_options": {}}, "closure"),
        ({"outer_optimizer": "json:loads", "outer_options": {}}, "not a torch.optim.Optimizer"),
    ],
)
def test_options_that_make_no_sense(options, text):
    with pytest.raises(ConfigurationError, match=text):
        LocalSGDPlugin(**{"islands": 2, "inner_steps": 4, **options})


def test_a_class_by_name_is_refused_where_only_entry_points_are_trusted(monkeypatch):
    monkeypatch.setenv("NEURON_ACCEL_TRUST", "entry-points")
    LocalSGDPlugin(islands=2, inner_steps=4, outer_optimizer="Adam", outer_options={"lr": 0.1})
    with pytest.raises(NeuronAccelError, match="would import 'not_imported'"):
        LocalSGDPlugin(islands=2, inner_steps=4, outer_optimizer="not_imported:Class", outer_options={})


class Normalised(torch.optim.Optimizer):
    """A step of the length of the learning rate along each gradient: not element-wise."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(
                        nn.functional.normalize(parameter.grad.reshape(-1), dim=0).view_as(parameter), alpha=group["lr"]
                    )


def _normalised(plugins: list[StrategyPlugin]) -> None:
    options = {"outer_optimizer": f"{__name__}:Normalised", "outer_options": {"lr": 0.1}}
    Island([LocalSGDPlugin(islands=2, inner_steps=1, **options), *plugins]).train(2)


def test_an_outer_optimizer_that_is_not_element_wise_needs_islands_of_one_rank():
    run_ranks(_normalised, 2, [], timeout=60)
    with pytest.raises(RanksError, match="Normalised is not possible as outer optimizer here"):
        run_ranks(_normalised, 4, [], timeout=60)


def test_an_overlap_is_refused_where_nothing_overlaps():
    from neuron_accel.contract import Mesh, PlanContext

    plugin = LocalSGDPlugin(islands=2, inner_steps=4, delay=1)
    context = PlanContext(mesh=Mesh.build(plugin.axes(), 2), plugins={}, capabilities=frozenset())
    with pytest.raises(PlanError, match="delay=1"):
        plugin.validate(context)

"""Replicas that train independently: a plugin as a third party would write it equals its reference, and can be saved
and resumed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from neuron_accel import contract
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.checkpoint.tools.report import inspect, verify
from neuron_accel.contract import AxisKind, AxisSpec, Phase, PluginSpec, ReplicaState, ShardedState, StrategyPlugin
from neuron_accel.engine.runtime.tensors import full_tensor
from neuron_accel.errors import CheckpointError, UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import (
    BATCHES,
    MODELS,
    OPTIMIZERS,
    TP2,
    Trained,
    assert_equal,
)
from tests.guests import guards

ROUND, OUTER_LR, MOMENTUM = 3, 0.7, 0.9
SAVED, STEPS = 4, 7  # in the middle of the second round; after the end of it


@dataclass(frozen=True, kw_only=True)
class DiLoCo(StrategyPlugin):
    """Islands take steps of their own; every so many, the mean of what they learned is one step of an outer SGD with
    Nesterov momentum ("DiLoCo: Distributed Low-Communication Training of Language Models", Douillard et al., 2023)."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="diloco", api_version=4, phase=Phase.OPTIMIZER, after=frozenset({"zero1"})
    )

    islands: int = 2

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name="island", degree=self.islands, kind=AxisKind.REPLICA),)

    def transform_model(self, model: contract.PreparedModel, run: contract.Run) -> None:
        held = {record.fqn: record.current for record in model.parameters if record.current is not None}
        state = run.state(self)
        state["weights"], state["steps"] = held, 0
        state["anchor"] = {fqn: parameter.detach().clone() for fqn, parameter in held.items()}
        state["momentum"] = {fqn: torch.zeros_like(parameter) for fqn, parameter in held.items()}

    def step(self, optimizer: torch.optim.Optimizer, run: contract.Run) -> Iterator[None]:
        yield
        state = run.state(self)
        state["steps"] += 1
        if state["steps"] % ROUND:
            return
        group = run.group("island")
        with torch.no_grad():
            for fqn, weight in state["weights"].items():
                anchor, momentum = state["anchor"][fqn], state["momentum"][fqn]
                mean = run.backend.all_reduce(weight.detach().clone(), group) / group.size
                outer_step(anchor, momentum, mean)
                weight.copy_(anchor)
        contract.take_weights(optimizer, run)

    def save(self, run: contract.Run) -> dict[str, Any]:
        state = run.state(self)
        return {
            "momentum": ShardedState(state["momentum"]),
            "anchor": ShardedState(state["anchor"]),
            "steps": state["steps"],
            "island": ReplicaState(run.group("island").index),
            "weights": ReplicaState(ShardedState({fqn: w.detach() for fqn, w in state["weights"].items()})),
        }

    def load(self, state: dict[str, Any], run: contract.Run) -> None:
        if not state:
            return
        mine = run.state(self)
        mine["steps"], mine["loaded island"] = state["steps"], state["island"].value
        for key in ("momentum", "anchor"):
            assert state[key].tensors.keys() == mine[key].keys()
            for fqn, tensor in state[key].tensors.items():
                mine[key][fqn].copy_(tensor)
        for fqn, tensor in state["weights"].value.tensors.items():
            assert torch.equal(tensor, mine["weights"][fqn].detach())  # of the same replica as the model's


def outer_step(anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
    learned = anchor - mean
    momentum.mul_(MOMENTUM).add_(learned)
    anchor.sub_(learned + MOMENTUM * momentum, alpha=OUTER_LR)


def reference(data_ranks: int, islands: int = 2) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Computes the same in one process, and returns the weights of every island by number of steps. A prepared
    scheduler takes one step for each data-parallel rank, as Accelerate's does."""
    torch.manual_seed(0)
    first = MODELS["llama"]().train()
    models = [first, *(copy.deepcopy(first) for _ in range(islands - 1))]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    anchor = [p.detach().clone() for p in first.parameters()]
    momentum = [torch.zeros_like(p) for p in anchor]
    result = {}
    for step in range(1, STEPS + 1):
        for island, (model, optimizer, scheduler) in enumerate(zip(models, optimizers, schedulers, strict=True)):
            batch = {name: value.chunk(islands)[island] for name, value in BATCHES[step - 1].items()}
            model(**batch).loss.backward()
            optimizer.step()
            for _ in range(data_ranks):
                scheduler.step()
            optimizer.zero_grad()
        if step % ROUND == 0:
            with torch.no_grad():
                for at, held, copies in zip(
                    anchor, momentum, zip(*(m.parameters() for m in models), strict=True), strict=True
                ):
                    outer_step(at, held, torch.stack([w.detach() for w in copies]).mean(0))
                    for weight in copies:
                        weight.copy_(at)
        result[step] = [{n: v.detach().clone() for n, v in m.state_dict().items()} for m in models]
    return result


# ---- on ranks --------------------------------------------------------------------------------------------------------
NAME = f"{__name__}:DiLoCo"


def _state(trained: Trained) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the full weights of this replica and the full state of the plugin."""
    run = trained.accelerator.run
    (model,) = run.models
    mine = next(run.state(p) for p in run.plan.plugins if p.spec.name == "diloco")
    layouts = {record.fqn: record.layout for record in model.parameters}
    kept = {
        key: {n: full_tensor(t.detach(), layouts[n], run).clone() for n, t in mine[key].items()}
        for key in ("weights", "momentum", "anchor")
    }
    return {**kept, "island": mine.get("loaded island")}


def _train_and_resume(folder: str, plugins: list[Any]) -> dict[str, Any]:
    """Trains and saves in the middle of a round, then loads what was saved and trains on from there."""
    trained = Trained("llama", [NAME, *plugins])
    for batch in BATCHES[:SAVED]:
        trained.step(batch)
    saved, steps = _state(trained), trained.optimizer.optimizer
    trained.accelerator.save_state(folder)
    losses = [trained.step(batch) for batch in BATCHES[SAVED:STEPS]]
    end = _state(trained), trained.contents()
    trained.accelerator.load_state(folder)
    loaded = _state(trained)
    again = [trained.step(batch) for batch in BATCHES[SAVED:STEPS]]
    for key in ("weights", "momentum", "anchor"):
        assert_equal(saved[key], loaded[key], key)
        assert_equal(end[0][key], _state(trained)[key], f"{key} at the end")
    assert loaded["island"] == trained.accelerator.run.group("island").index
    assert_equal(end[1], trained.contents(), "the optimizer at the end")
    assert losses == again
    assert steps is trained.optimizer.optimizer
    return {"saved": saved, "end": end[0]}


def _load(folder: str, islands: int) -> dict[str, Any]:
    trained = Trained("llama", [{NAME: {"islands": islands}}], seed=1)
    trained.accelerator.load_state(folder)
    return _state(trained)


def _load_without(folder: str) -> dict[str, torch.Tensor]:
    trained = Trained("llama", [], seed=1)
    trained.accelerator.load_state(folder)
    return dict(trained.accelerator.get_state_dict(trained.model))


def _near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("ranks", "plugins"), [(2, []), (4, [TP2]), (4, ["zero1"])], ids=["alone", "tp2", "zero1 inside an island"]
)
def test_islands_equal_their_reference_and_resume_in_the_middle_of_a_round(tmp_path, ranks, plugins):
    folder = tmp_path / "state"
    results = run_ranks(_train_and_resume, ranks, str(folder), plugins, timeout=100)
    expected, size = reference(2 if plugins == [TP2] else ranks), ranks // 2
    for rank, result in enumerate(results):
        _near(result["saved"]["weights"], expected[SAVED][rank // size])
        _near(result["end"]["weights"], expected[STEPS][rank // size])
    saved = [results[0]["saved"], results[size]["saved"]]
    differing = [n for n, v in saved[0]["weights"].items() if not torch.equal(v, saved[1]["weights"][n])]
    assert differing  # the islands are apart
    assert_equal(saved[0]["momentum"], saved[1]["momentum"])
    # Each copy can be had as a model; the first is what those get who name none.
    assert inspect(folder)["replicas"] == 2
    assert verify(folder) == []
    for island in (0, 1):
        assert_equal(
            _weights(consolidate(folder, tmp_path / f"model-{island}", replica=island)), saved[island]["weights"]
        )
    with pytest.raises(CheckpointError, match="no replica 2"):
        consolidate(folder, tmp_path / "none", replica=2)
    # Another mesh: twice as many islands take the copies in turns, or as many that are not sharded.
    islands = 4 if not plugins else 2
    if plugins != ["zero1"]:
        for rank, result in enumerate(run_ranks(_load, 4, str(folder), islands, timeout=60)):
            number = rank % 2 if islands == 4 else rank // 2
            assert result["island"] == number
            for key in ("weights", "momentum", "anchor"):
                assert_equal(saved[number][key], result[key], key)
    (alone,) = run_ranks(_load_without, 1, str(folder), timeout=60)
    assert_equal({n: alone[n] for n in saved[0]["weights"]}, saved[0]["weights"])


def _weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


# ---- ranks that should be equal and are not --------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Settle(StrategyPlugin):
    """Averages the weights of ranks that took steps independently, before they are saved."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="settle", api_version=4, phase=Phase.OPTIMIZER)

    def save(self, run: contract.Run) -> None:
        group = run.group("dp")
        with torch.no_grad():
            for model in run.models:
                for record in model.parameters:
                    record.current.copy_(run.backend.all_reduce(record.current.detach().clone(), group) / group.size)

    def load(self, state: dict[str, Any], run: contract.Run) -> None:
        run.state(self)["loaded"] = [record.current.detach().clone() for m in run.models for record in m.parameters]


def _apart(folder: str, plugins: list[Any]) -> tuple[str, dict[str, torch.Tensor]]:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    built = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    built[0].weight.requires_grad_(False)  # stays equal; so does the bias, whose gradient the input does not change
    model, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.1))
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.full((2, 4), 1.0 + accelerator.process_index)).sum())
        optimizer.step()
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        accelerator.save_state(folder + "-unseen", check_equal=False)
        return str(error), {}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[1].weight.zero_()
    accelerator.load_state(folder)  # without state of the plugin
    (settle,) = (plugin for plugin in accelerator.run.plan.plugins if plugin.spec.name == "settle")
    loaded = accelerator.run.state(settle)["loaded"]  # when its hook was called, weights were those of the checkpoint
    assert all(torch.equal(one, other) for one, other in zip(loaded, model.parameters(), strict=True))
    return "", {name: value - weights[name] for name, value in model.state_dict().items()}


def test_ranks_that_took_steps_apart_are_not_saved_as_if_they_were_equal(tmp_path):
    for text, _ in run_ranks(_apart, 2, str(tmp_path / "state"), [], timeout=60):
        assert "Ranks 0 and 1 have different values of parameter '1.weight'" in text  # the first that differs
        assert "a plugin: in `save`" in text
        assert "AxisKind.REPLICA" in text
    assert not (tmp_path / "state").exists()
    assert verify(tmp_path / "state-unseen") == []


def test_what_a_plugin_settles_before_a_save_is_what_is_saved(tmp_path):
    for text, difference in run_ranks(_apart, 2, str(tmp_path / "state"), [f"{__name__}:Settle"], timeout=60):
        assert text == ""
        assert all(not value.any() for value in difference.values())


def _refused(folder: str, plugins: list[Any]) -> list[str]:
    trained = Trained("llama", plugins)
    run = trained.accelerator.run
    texts = []
    state = run.state(run.plan.plugin("diloco"))
    for change in ({"model.norm.wieght": torch.zeros(32)}, {"model.norm.weight": torch.zeros(3)}):
        kept, state["momentum"] = state["momentum"], change
        with pytest.raises(CheckpointError) as caught:
            trained.accelerator.save_state(folder)
        texts.append(str(caught.value))
        state["momentum"] = kept
    name = next(iter(state["momentum"]))
    state["momentum"][name] += run.group("island").index  # said to be alike on every island
    with pytest.raises(CheckpointError) as caught:
        trained.accelerator.save_state(folder)
    texts.append(str(caught.value))
    uneven = trained.accelerator.join_uneven_inputs([trained.model], even_batches=False)
    with pytest.raises(UsageError) as refused, uneven:
        pass
    return [*texts, str(refused.value)]


def test_state_of_a_plugin_that_does_not_lie_as_it_says_is_refused(tmp_path):
    plugins = [NAME, *guards("replica_check")]  # weights of islands may differ
    for name, shape, differs, uneven in run_ranks(_refused, 2, str(tmp_path / "state"), plugins, timeout=60):
        assert "'model.norm.wieght' is not a parameter that this rank holds" in name
        assert "model.norm.weight" in name
        assert "has shape (3,), the parameter has (32,)" in shape
        assert "different values of plugin.diloco.momentum" in differs
        assert "Inputs cannot be uneven if replicas train separately" in uneven


def _changed_in_place() -> list[float]:
    trained = Trained("llama", ["zero1"], dtype=torch.bfloat16)
    trained.step(BATCHES[0])
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.fill_(0.5)
    contract.take_weights(trained.optimizer.optimizer, trained.accelerator.run)
    trained.step(BATCHES[1])
    return [(parameter - 0.5).abs().max().item() for parameter in trained.model.parameters()]


def test_an_optimizer_with_master_weights_goes_on_from_what_a_plugin_made_of_them():
    for differences in run_ranks(_changed_in_place, 2, timeout=60):
        assert max(differences) < 0.01  # a step of AdamW at a learning rate of 1e-3

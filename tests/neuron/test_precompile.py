"""What a trial collects is all that training compiles: not one graph is left for the cores to wait for. Strategies one
by one and together, with evaluation, a checkpoint, and training that begins with it."""

from __future__ import annotations

import json

import pytest
from neuron_accel_emulation import emulated_instance
from neuron_accel_emulation._parallel_compile import main as parallel_compile

from tests.neuron.programs import finetune

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
PP2 = {"model_parallelism": {"pipeline_parallel_size": 2}}
TP2_PP2 = {"model_parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
SP, ZERO, RECOMPUTE = "sequence_parallel", "zero1", "activation_checkpointing"
COMPOSITIONS = {
    "dp2": (2, []),
    "zero1": (2, [ZERO]),
    "tp2": (2, [TP2]),
    "tp2-sp": (2, [TP2, SP]),
    "pp2": (2, [PP2]),
    "fully-sharded-recompute": (2, ["fully_sharded", RECOMPUTE]),
    "tp2-zero1-recompute": (4, [TP2, ZERO, RECOMPUTE]),
    "tp2-sp-zero1": (4, [TP2, SP, ZERO]),
    "pp2-zero1": (4, [PP2, ZERO]),
    "pp2-tp2": (4, [TP2_PP2]),
}
ALIKE = [name for name in COMPOSITIONS if not name.startswith("pp2")]


pytestmark = pytest.mark.timeout(300)
SECONDS = 120  # for each run, on a machine that others use, too


def compile_cache(machine, monkeypatch):
    """What neuron_parallel_compile does after the trial."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(machine.cache))
    assert parallel_compile(["--command", "compile"]) == 0


def of(machine, outcome):
    return {c.module for c in machine.compilations if c.outcome == outcome}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_training_compiles_nothing_that_the_trial_did_not_collect(name, tmp_path, monkeypatch):
    ranks, plugins = COMPOSITIONS[name]
    with emulated_instance() as machine:
        machine.run(finetune, ranks, plugins, folder=str(tmp_path), trial=True, timeout=SECONDS)
        collected = of(machine, "collected")
        assert collected
        assert not list(tmp_path.iterdir()), "a trial leaves nothing"
        if name in ALIKE:
            check_alike(machine, ranks)
        compile_cache(machine, monkeypatch)
        losses = machine.run(finetune, ranks, plugins, folder=str(tmp_path), timeout=SECONDS)[0]
        assert of(machine, "compiled") == set()
        assert of(machine, "found") <= collected
        again = machine.run(finetune, ranks, plugins, folder=str(tmp_path), resume=True, epochs=1, timeout=SECONDS)[0]
        assert of(machine, "compiled") == set(), "training that begins with a checkpoint"
        assert again == pytest.approx(losses[len(losses) // 2 :], rel=1e-5), "the second epoch, trained again"


def check_alike(machine, ranks):
    first = [path.read_bytes() for path in machine.graphs(0)]
    assert first
    for rank in range(1, ranks):
        assert [path.read_bytes() for path in machine.graphs(rank)] == first


def test_accumulation_in_the_trial(tmp_path, monkeypatch):
    with emulated_instance() as machine:
        machine.run(finetune, 2, [ZERO], accumulation=2, trial=True, timeout=SECONDS)
        compile_cache(machine, monkeypatch)
        machine.run(finetune, 2, [ZERO], accumulation=2, timeout=SECONDS)
        assert of(machine, "compiled") == set()


def test_a_graph_that_the_trial_did_not_see_is_noticed(monkeypatch):
    with emulated_instance() as machine:
        machine.run(finetune, 2, [], trial=True, timeout=SECONDS)
        compile_cache(machine, monkeypatch)
        machine.run(finetune, 2, [ZERO], timeout=SECONDS)
        assert of(machine, "compiled")


def test_the_cache_is_laid_out_as_documented(monkeypatch):
    with emulated_instance() as machine:
        machine.run(
            finetune, 1, [], env={"NEURON_CC_FLAGS": "--model-type=transformer --cache_dir=" + str(machine.cache)}
        )
        entries = list(machine.cache.glob("neuronxcc-*/MODULE_*"))
        assert entries
        for entry in entries:
            files = {"model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done"}
            assert {path.name for path in entry.iterdir()} == files
            assert json.loads((entry / "compile_flags.json").read_text()) == ["--model-type=transformer"]

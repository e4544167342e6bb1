"""The Trainer on emulated cores: nothing of transformers or Accelerate makes ranks wait on the device."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from neuron_accel_emulation import emulated_instance
from neuron_accel_emulation._parallel_compile import main as parallel_compile

from tests.distributed.trainer.trainer_support import Texts, accuracy, model, options

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "gradient_accumulation_steps": 1}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "max_steps": 2, **EVERY_STEP}
STEPS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "async_save": True}
RUNS = {
    "all": {**STEPS, "consolidate_at_end": True},
    "best": {"save_strategy": "best", "save_only_model": True, "include_num_input_tokens_seen": "non_padding"},
}
FURTHER = {"eval_accumulation_steps": 1, "batch_eval_metrics": False, "include_for_metrics": ["inputs", "loss"]}


def wait_in_every_way(arguments, folder):
    """What examples of transformers, TRL and Accelerate call; each rank writes its number in its turn."""
    from accelerate import PartialState
    from accelerate.utils import wait_for_everyone

    state, path = PartialState(), Path(folder, "order")
    pickle.loads(pickle.dumps(arguments))
    for first in (
        lambda: arguments.main_process_first(desc="tokenize"),
        lambda: arguments.main_process_first(local=False),
        lambda: copy.deepcopy(arguments).main_process_first(),
        state.main_process_first,
        state.local_main_process_first,
    ):
        with first(), path.open("a") as file:
            file.write(str(state.process_index))
        wait_for_everyone()
        PartialState().wait_for_everyone()
    return path.read_text()


def train(folder):
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    found = []
    for name, more in RUNS.items():
        where = Path(folder, name)
        arguments = NeuronTrainingArguments(**options(where, 2, use_cpu=False, zero_1=True, **BEST | FURTHER | more))
        if not found:
            order = wait_in_every_way(arguments, folder)
        trainer = NeuronTrainer(
            model=model(),
            args=arguments,
            train_dataset=Texts(),
            eval_dataset=Texts(8, seed=1),
            compute_metrics=accuracy,
        )
        if not found:
            order += wait_in_every_way(arguments, folder)
        trainer.train()
        trainer.save_model(str(where / "full"))
        state = trainer.state
        best = Path(state.best_model_checkpoint)
        found.append((state.best_global_step, best.name, bool(state.best_global_step), best.exists()))
    trainer.accelerator.end_training()
    return order, found


@pytest.mark.timeout(240)
def test_waiting_saving_evaluating_and_the_best_model_have_the_same_graphs_on_all_ranks(tmp_path):
    """torch_xla's own rendezvous sums integers on the device, in a graph of its own for each rank."""
    from transformers import TrainerState

    with emulated_instance("trn1.2xlarge") as machine:
        found = machine.run(train, 2, str(tmp_path), timeout=220)
        first, second = ([path.read_bytes() for path in machine.graphs(rank)] for rank in range(2))
    assert first
    assert first == second
    assert found[0] == found[1]
    order, runs = found[0]
    assert order[:10] == "01" * 5
    for step, name, is_true, exists in runs:
        assert name == f"checkpoint-{step}"
        assert is_true
        assert exists
    state = TrainerState.load_from_json(str(next((tmp_path / "all").glob("checkpoint-*/trainer_state.json"))))
    assert state.best_global_step == runs[0][0]


def train_and_predict(folder):
    """A training that does not evaluate, and what its script does then."""
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    more = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 5, "gradient_accumulation_steps": 1}
    arguments = NeuronTrainingArguments(**options(folder, 1, use_cpu=False, **more))
    data = {"train_dataset": Texts(13), "eval_dataset": Texts(7, seed=1)}  # the last batches are smaller
    trainer = NeuronTrainer(model=model(), args=arguments, **data)
    trainer.train()
    found = (
        trainer.state.global_step,
        "eval_loss" in trainer.evaluate(),
        len(trainer.predict(Texts(7, seed=2)).predictions),
    )
    trainer.accelerator.end_training()
    return found


@pytest.mark.timeout(300)
def test_a_trial_collects_the_graphs_of_what_follows_the_training(tmp_path, monkeypatch):
    steps = {"NEURON_ACCEL_PRECOMPILE_STEPS": "2"}
    with emulated_instance("trn1.2xlarge") as machine:
        trial = machine.run(train_and_predict, 1, str(tmp_path), trial=True, env=steps, timeout=120)
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(machine.cache))
        assert parallel_compile(["--command", "compile"]) == 0
        assert machine.run(train_and_predict, 1, str(tmp_path), timeout=120) == [(5, True, 7)]
        assert {each.module for each in machine.compilations if each.outcome == "compiled"} == set()
    assert trial == [(2, True, 7)]

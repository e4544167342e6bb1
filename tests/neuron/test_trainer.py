"""The Trainer on emulated cores: nothing of transformers or Accelerate makes ranks wait on the device."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from neuron_accel_emulation import emulated_instance
from neuron_accel_emulation._parallel_compile import main as parallel_compile

from tests.distributed.trainer.test_subclasses import Pairs, t5
from tests.distributed.trainer.trainer_support import GLOBAL_BATCH, Texts, accuracy, model, options

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


def train_and_generate(folder):
    """A training that evaluates by generating, and what its script generates then."""
    from neuron_accel import NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments

    more = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 3, "gradient_accumulation_steps": 1}
    generation = {"predict_with_generate": True, "generation_max_length": 3}
    arguments = NeuronSeq2SeqTrainingArguments(**options(folder, 1, use_cpu=False, **more, **generation))
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    few = torch.utils.data.Subset(Pairs(), range(GLOBAL_BATCH * 3 - 1))
    data = {"train_dataset": Pairs(), "eval_dataset": few, "compute_metrics": metrics}
    trainer = NeuronSeq2SeqTrainer(model=t5(), args=arguments, **data)
    trainer.train()
    trainer.evaluate()
    ids = Pairs()[0]["input_ids"].unsqueeze(0).to(arguments.device)
    shapes.append(trainer.model.generate(ids, max_new_tokens=2).shape)
    trainer.accelerator.end_training()
    return [tuple(shape) for shape in shapes]


def generate_in_a_loop():
    """Trains a causal model, and generates after each epoch."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    built = model()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Texts(GLOBAL_BATCH * 3), batch_size=GLOBAL_BATCH)
    net, optimizer, loader = accelerator.prepare(built, optimizer, loader)
    lengths = []
    for _ in range(2):
        for batch in loader:
            accelerator.backward(net(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        mask = torch.ones(GLOBAL_BATCH, 4, dtype=torch.long)
        mask[0, 0] = 0  # without padding models would read, in a trial, that there is some
        settings = {"attention_mask": mask.to(accelerator.device), "pad_token_id": 0, "do_sample": False}
        made = accelerator.unwrap_model(net).generate(batch["input_ids"][:, :4], max_new_tokens=3, **settings)
        lengths.append(len(made.tolist()[0]))
    accelerator.end_training()
    return lengths


def assert_collected(program, *arguments, trial, run, monkeypatch):
    """Training compiles no graph that the trial did not collect."""
    steps = {"NEURON_ACCEL_PRECOMPILE_STEPS": "2"}
    with emulated_instance("trn1.2xlarge") as machine:
        assert machine.run(program, 1, *arguments, trial=True, env=steps, timeout=120) == [trial]
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(machine.cache))
        assert parallel_compile(["--command", "compile"]) == 0
        assert machine.run(program, 1, *arguments, timeout=120) == [run]
        assert {each.module for each in machine.compilations if each.outcome == "compiled"} == set()


@pytest.mark.timeout(300)
def test_a_trial_collects_the_graphs_of_what_follows_the_training(tmp_path, monkeypatch):
    assert_collected(train_and_predict, str(tmp_path), trial=(2, True, 7), run=(5, True, 7), monkeypatch=monkeypatch)


@pytest.mark.timeout(300)
def test_a_trial_collects_the_graphs_of_each_token_that_a_trainer_generates(tmp_path, monkeypatch):
    """In a trial a device says zero: no text ever ends. In evaluation no sample is repeated, and no graph grows."""
    run = [(11, 20), (1, 3)]
    assert_collected(
        train_and_generate, str(tmp_path), trial=[(8, 20), (8, 20), (1, 3)], run=run, monkeypatch=monkeypatch
    )


@pytest.mark.timeout(300)
def test_a_trial_collects_the_graphs_of_each_token_that_a_loop_generates(monkeypatch):
    assert_collected(generate_in_a_loop, trial=None, run=[7, 7], monkeypatch=monkeypatch)

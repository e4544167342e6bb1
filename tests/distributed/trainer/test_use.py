"""What people do with a Trainer beside training once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import (
    Texts,
    accuracy,
    assert_same,
    model,
    options,
    train_on_rank,
    train_with_stock,
)

COMPOSITIONS = {
    "dp2+zero1": (2, 2, {"zero_1": True}),
    "tp2+sp": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}),
}
SHORT = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


def without_arguments(folder):
    from transformers import Trainer

    from neuron_accel.trainer import NeuronSeq2SeqTrainer, NeuronTrainer

    os.chdir(folder)
    trained = []
    for cls in (Trainer, NeuronTrainer):
        trainer = cls(model(), train_dataset=Texts(4))
        trainer.train()
        trained.append((trainer.args.output_dir, trainer.state.global_step, trainer.model.state_dict()))
    arguments = [type(NeuronTrainer(model()).args).__name__, type(NeuronSeq2SeqTrainer(model()).args).__name__]
    return trained, arguments


def test_without_arguments_it_makes_its_own(tmp_path):
    """As transformers' Trainer does."""
    (theirs, mine), arguments = run_ranks(without_arguments, 1, str(tmp_path))[0]
    assert mine[:2] == theirs[:2] == ("tmp_trainer", 3)
    torch.testing.assert_close(mine[2], theirs[2])
    assert arguments == ["NeuronTrainingArguments", "NeuronSeq2SeqTrainingArguments"]


def everything(folder, ranks_with_data, more, ours):
    """Evaluates, trains, evaluates, predicts, and trains again with the same Trainer."""
    if ours:
        from neuron_accel.trainer import NeuronTrainer as Trainer
        from neuron_accel.trainer import NeuronTrainingArguments as Arguments
    else:
        from transformers import Trainer
        from transformers import TrainingArguments as Arguments

    def make():
        return Trainer(
            model=model(),
            args=Arguments(**options(folder, ranks_with_data, **SHORT | more)),
            train_dataset=Texts(),
            eval_dataset=Texts(10, seed=1),
            compute_metrics=accuracy,
        )

    trainer = make()
    # On several ranks, transformers' own Trainer no longer sums gradients once it has evaluated before it trains.
    metrics = [(trainer if ours else make()).evaluate(), trainer.train().metrics, trainer.evaluate()]
    predicted = trainer.predict(Texts(6, seed=2))
    metrics += [predicted.metrics, trainer.train().metrics, trainer.evaluate()]
    trainer.save_model(f"{folder}/model")
    kept = ("train_loss", "eval_loss", "eval_accuracy", "test_loss", "test_accuracy")
    return [{k: v for k, v in m.items() if k in kept} for m in metrics], predicted.predictions


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_evaluate_train_predict_and_train_again(name, tmp_path):
    from transformers import AutoModelForCausalLM

    ranks, with_data, more = COMPOSITIONS[name]
    stock = str(tmp_path / "stock")
    theirs = run_ranks(everything, 2, stock, 2, {}, False)[0] if with_data == 2 else everything(stock, 1, {}, False)
    for metrics, predictions in run_ranks(everything, ranks, str(tmp_path), with_data, more, True):
        for mine, expected in zip(metrics, theirs[0], strict=True):
            assert mine == pytest.approx(expected, rel=1e-3)
        np.testing.assert_allclose(predictions, theirs[1], rtol=1e-2, atol=1e-3)
    saved, expected = (AutoModelForCausalLM.from_pretrained(f"{f}/model").state_dict() for f in (tmp_path, stock))
    for key, value in expected.items():
        torch.testing.assert_close(saved[key], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_best_model_early_stopping_few_checkpoints_and_the_full_model_at_the_end(name, tmp_path):
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = {
        "learning_rate": 0.02,  # too high: it gets worse soon
        "num_train_epochs": 6,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        "metric_for_best_model": "loss",
    }
    patience = {"early_stopping": 2}
    stock = str(tmp_path / "stock")
    if with_data == 2:
        theirs = run_ranks(train_with_stock, 2, stock, 2, **arguments, **patience)[0]
    else:
        theirs = train_with_stock(stock, **arguments, **patience)
    assert theirs["steps"] < 18
    asynchronous = {"async_save": True, "consolidate_at_end": True}
    for mine in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments | asynchronous | patience):
        assert mine["steps"] == theirs["steps"]
        assert mine["best"] == theirs["best"]
        if mine["weights"]:
            for key, value in theirs["weights"].items():
                torch.testing.assert_close(mine["weights"][key], value, rtol=5e-3, atol=1e-3)
            weights = mine["weights"]
    left = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert left == sorted(p.name for p in Path(stock).glob("checkpoint-*"))

    from transformers import AutoModelForCausalLM

    for key, value in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("name", ["tp2+sp", "dp2+zero1"])
def test_bf16_and_activation_checkpointing(name, tmp_path):
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = SHORT | {"bf16": True, "activation_checkpointing": True}
    theirs = train_with_stock(tmp_path / "stock", **arguments)
    for mine in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments):
        mine["weights"] = {}  # Adam makes noise of gradients that bf16 rounds to nothing
        assert_same(mine, theirs, 2e-2)


def samplers(folder):
    """Samplers that a Trainer must not divide by processes where these share data."""
    seen = {}
    for strategy in ("group_by_length", "batch_rebalance", "sequential"):
        from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

        arguments = options(folder, 2, tensor_parallel_size=2, train_sampling_strategy=strategy, **SHORT)
        trainer = NeuronTrainer(
            model=model(), args=NeuronTrainingArguments(**arguments), train_dataset=Texts(16), eval_dataset=Texts(2)
        )
        rows = [tuple(row.tolist()) for batch in trainer.get_train_dataloader() for row in batch["input_ids"]]
        seen[strategy] = (trainer.accelerator.data_parallel_rank, rows)
    return seen


def test_every_sampling_strategy_gives_each_sample_once(tmp_path):
    results = run_ranks(samplers, 4, str(tmp_path))
    everything = {tuple(row.tolist()) for row in Texts(16).ids}
    for strategy in results[0]:
        by_rank = {}
        for result in results:
            rank, rows = result[strategy]
            assert by_rank.setdefault(rank, rows) == rows  # ranks that share data see the same
        assert len(by_rank) == 2
        rows = [row for part in by_rank.values() for row in part]
        assert len(rows) == 16
        assert set(rows) == everything


def train_with_little_memory(folder, ranks_with_data, more):
    """The device holds two samples."""
    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    class Trainer(NeuronTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = options(folder, ranks_with_data, auto_find_batch_size=True, **SHORT | more)
    arguments["per_device_train_batch_size"] = 3
    trainer = Trainer(
        model=model(), args=NeuronTrainingArguments(**arguments), train_dataset=Texts(), eval_dataset=Texts(2)
    )
    trainer.train()
    return trainer._train_batch_size, trainer.state.global_step, [e["loss"] for e in trainer.state.log_history[:2]]


def test_a_batch_size_that_fits_is_found(tmp_path):
    ranks, with_data, more = COMPOSITIONS["dp2+zero1"]
    results = run_ranks(train_with_little_memory, ranks, str(tmp_path), with_data, more)
    assert results[0] == results[1]
    size, steps, losses = results[0]
    assert 1 <= size <= 2
    assert steps == 2
    assert all(np.isfinite(losses))


@pytest.mark.parametrize("more", [{"eval_strategy": "steps", "eval_steps": 5}, {"eval_strategy": "no"}])
def test_a_training_that_only_collects_graphs_evaluates_before_it_ends(more, tmp_path, monkeypatch):
    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    monkeypatch.setenv("NEURON_ACCEL_PRECOMPILE_STEPS", "2")
    trainer = NeuronTrainer(
        model=model(),
        args=NeuronTrainingArguments(**options(tmp_path, max_steps=8, save_strategy="no") | more),
        train_dataset=Texts(),
        eval_dataset=Texts(4, seed=1),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2]
    assert not any(type(each).__name__ == "EndTrial" for each in trainer.callback_handler.callbacks)
    trainer.push_to_hub()  # does nothing

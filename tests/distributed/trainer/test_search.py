"""Hyperparameter search on several ranks."""

from __future__ import annotations

import pytest

from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import Texts, model, options

SHORT = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
RATES = [1e-2, 1e-3, 1e-4]


def trainer(folder, **more):
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    return NeuronTrainer(
        model_init=model,
        args=NeuronTrainingArguments(**options(folder, 2 if "zero_1" in more else 1, **SHORT | more)),
        train_dataset=Texts(8),
        eval_dataset=Texts(4, seed=1),
    )


def rates(trial):
    return {"learning_rate": trial.suggest_categorical("learning_rate", RATES)}


def loss(metrics):
    return metrics["eval_loss"]


def search(folder, more):
    """The best run, the objective of each trial, and that of a separate training with the best rate."""
    import optuna

    searching, reached = trainer(folder, **more), []

    def objective(metrics):
        reached.append((searching.args.learning_rate, searching.state.global_step, metrics["eval_loss"]))
        return metrics["eval_loss"]

    best = searching.hyperparameter_search(
        rates, objective, n_trials=3, sampler=optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)
    )
    alone = trainer(folder, learning_rate=best.hyperparameters["learning_rate"], **more)
    alone.train()
    return best, reached, alone.evaluate()["eval_loss"]


@pytest.mark.parametrize("more", [{"zero_1": True}, {"tensor_parallel_size": 2}], ids=["dp2+zero1", "tp2"])
def test_all_ranks_train_the_trials_of_the_first(more, tmp_path):
    results = run_ranks(search, 2, str(tmp_path), more)
    assert results[0] == results[1]
    best, reached, alone = results[0]
    final = {rate: value for rate, step, value in reached if step == SHORT["max_steps"]}
    assert sorted(final) == sorted(RATES)
    assert best.objective == final[best.hyperparameters["learning_rate"]] == min(final.values())
    assert alone == pytest.approx(best.objective, rel=1e-6)


def search_and_prune(folder):
    import optuna

    class Pruner(optuna.pruners.BasePruner):
        def __init__(self, from_number):
            self.from_number = from_number

        def prune(self, study, trial):
            return trial.number >= self.from_number

    searching, steps = trainer(folder, tensor_parallel_size=2), []

    def objective(metrics):
        steps.append(searching.state.global_step)
        return metrics["eval_loss"]

    best = searching.hyperparameter_search(rates, objective, n_trials=3, pruner=Pruner(from_number=1))
    with pytest.raises(UsageError, match="No trial was completed"):
        searching.hyperparameter_search(rates, objective, pruner=Pruner(from_number=0), n_trials=2)
    return best.run_id, steps


def test_a_pruned_trial_ends_on_all_ranks(tmp_path):
    assert run_ranks(search_and_prune, 2, str(tmp_path)) == [("0", [1, 2, 1, 1, 1, 1])] * 2


def refused(folder):
    searching, said = trainer(folder, zero_1=True), []
    for wanted in ({"backend": "ray"}, {"backend": "wandb"}, {"n_jobs": 2}, {"catch": (ValueError,)}):
        with pytest.raises(UsageError, match="not possible on 2 ranks") as error:
            searching.hyperparameter_search(rates, loss, **{"backend": "optuna", **wanted})
        said.append(str(error.value))
    return said


def test_what_cannot_be_searched_on_several_ranks_is_refused(tmp_path):
    said = run_ranks(refused, 2, str(tmp_path))[0]
    assert "Ray runs each trial in a separate process" in said[0]
    assert "'n_jobs' is not possible" in said[2]

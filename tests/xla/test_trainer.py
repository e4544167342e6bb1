"""The Trainer on real XLA ranks: what transformers' own does in one process, and each step in one graph."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuron_accel.backends.xla import XlaBackend
from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.trainer.trainer_support import (
    Texts,
    accuracy,
    assert_same,
    facts,
    model,
    options,
    train_with_stock,
)
from tests.xla.watching import compiled, executed, host_fallbacks

# How many ranks see different data, arguments, executions for a batch of an evaluation: on dp2 its loss, logits and
# labels are gathered, each by itself.
COMPOSITIONS = {"dp2+zero1": (2, {"zero_1": True}, 4), "tp2": (1, {"tensor_parallel_size": 2}, 2)}
RANKS, ACCUMULATION = 2, 2
BATCHES = 3  # of an evaluation
# Six batches an epoch, the last of them half empty: three steps. A checkpoint is made in the middle of each epoch.
STEPS = {"num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2}


def watcher(trainer, events):
    """Adds to ``events`` what happened, and how many graphs all ranks had compiled and executed by then."""
    from transformers import TrainerCallback

    def note(name):
        def happened(self, args, state, control, logs=None, **_):
            if name == "log" and "eval_loss" in logs:
                return
            backend = trainer.accelerator.run.backend
            backend.barrier()  # other ranks count into the same counters
            events.append((name, state.global_step, compiled(), executed()))
            backend.barrier()

        return happened

    names = ("step_begin", "substep_end", "step_end", "log", "evaluate", "save")
    return type("Watcher", (TrainerCallback,), {f"on_{name}": note(name) for name in names})()


def train(folder, ranks_with_data, more, resume=None):
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    with one_at_a_time():
        built = model()
        arguments = NeuronTrainingArguments(**options(folder, ranks_with_data, use_cpu=False, **STEPS | more))
    XlaBackend.connect().barrier()  # Accelerate empties the environment for moments, which arguments look at
    trainer = NeuronTrainer(
        model=built,
        args=arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(10, seed=1),
        compute_metrics=accuracy,
    )
    events = []
    trainer.add_callback(watcher(trainer, events))
    result = trainer.train(resume_from_checkpoint=resume)
    tokens = count_tokens(trainer)
    fallbacks = set(host_fallbacks()) - {"aten::_local_scalar_dense"}  # transformers reads what is left at the end
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.accelerator.end_training()
    return facts(trainer, weights, result), events, fallbacks, tokens


def count_tokens(trainer):
    """Tokens without padding, of two micro-batches; they are summed on the device until they are logged."""
    trainer.args.include_num_input_tokens_seen, trainer.state.num_input_tokens_seen = "non_padding", 0
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).to(trainer.args.device)
    backend = trainer.accelerator.run.backend
    backend.barrier()
    before = executed()
    for _ in range(2):
        trainer._track_num_input_tokens({"input_ids": mask, "attention_mask": mask})
    assert executed() == before
    backend.barrier()
    trainer._add_up_tokens()
    return trainer.state.num_input_tokens_seen


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run_ranks(train_with_stock, 1, str(tmp_path_factory.mktemp("stock")), **STEPS)[0]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_same_training_in_one_graph_for_each_step(name, stock, tmp_path):
    """Accumulation, a last batch that is half empty, clipping, a schedule, logs, evaluation, checkpoints; and the same
    from the one in the middle of the second epoch."""
    ranks_with_data, more, runs_of_a_batch = COMPOSITIONS[name]
    results = run_ranks(train, RANKS, str(tmp_path), ranks_with_data, more, backend="xla", timeout=110)
    for mine, events, fallbacks, tokens in results:
        assert_same(mine, stock)
        check_graphs(events, runs_of_a_batch)
        assert not fallbacks
        assert tokens == 2 * 5 * ranks_with_data

    resume = str(tmp_path / "checkpoint-4")
    for mine, events, *_ in run_ranks(
        train, RANKS, str(tmp_path), ranks_with_data, more, resume, backend="xla", timeout=110
    ):
        mine["train_loss"] = None  # of the steps of this call
        assert_same(mine, stock)
        check_graphs(events, runs_of_a_batch)


SHORT = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}


def test_the_flag_of_gradient_checkpointing_trains_the_same(tmp_path):
    (expected,) = run_ranks(train_with_stock, 1, str(tmp_path / "stock"), **STEPS | SHORT)
    more = {"zero_1": True, "gradient_checkpointing": True, **SHORT}
    for mine, events, fallbacks, _ in run_ranks(train, RANKS, str(tmp_path), RANKS, more, backend="xla", timeout=110):
        assert_same(mine, expected)
        assert not fallbacks
        assert events[-1][2] == events[-3][2]  # no graph is compiled for the last step


def check_graphs(events, runs_of_a_batch):
    """One execution for each micro-batch, the last one's with the step; none by logs and checkpoints. No compilation
    from the third step, and the second evaluation, on."""
    first, begin, evaluations = events[0][1], None, 0
    for (_, _, graphs_before, runs_before), (name, step, graphs, runs) in itertools.pairwise([events[0], *events]):
        if name == "step_begin":
            begin = graphs, runs
        elif name == "step_end":
            assert runs - begin[1] == RANKS * ACCUMULATION, events
            assert graphs == begin[0] or step - first <= 2, events
        elif name == "evaluate":
            evaluations += 1
            assert runs - runs_before == RANKS * BATCHES * runs_of_a_batch, events
            assert graphs == graphs_before or evaluations == 1, events
        elif name in ("log", "save"):
            assert (graphs, runs) == (graphs_before, runs_before), events

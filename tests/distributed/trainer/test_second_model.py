"""Trainers that prepare a second model, such as the reference of DPO or a teacher."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from neuron_accel.cli.main import main
from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import Texts, model, options

STEPS = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
COMPOSITIONS = {
    "dp1": (1, {}),
    "dp2+zero1": (2, {"zero_1": True}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "fully-sharded": (2, {"fully_sharded": True}),
}


def distilling(base):
    """A subclass whose loss is the distance to a teacher, which it prepares when it is constructed."""

    class Distil(base):
        def __init__(self, *args, teacher, **named):
            super().__init__(*args, **named)
            self.teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True)
            patched = self.teacher.forward
            self.teacher.forward = lambda *a, **k: patched(*a, **k)  # as TRL does

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = {"input_ids": inputs["input_ids"]}
            with torch.no_grad():
                wanted = self.teacher(**ids).logits
            outputs = model(**ids)
            loss = (outputs.logits.float() - wanted.float()).pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return Distil


def make(folder, ours, ranks_with_data=1, **more):
    from transformers import Trainer, TrainingArguments

    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    teacher = model()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.05)
    return distilling(NeuronTrainer if ours else Trainer)(
        model=model(),
        args=(NeuronTrainingArguments if ours else TrainingArguments)(
            **options(folder, ranks_with_data, gradient_accumulation_steps=1, **STEPS | more)
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(4, seed=1),
        teacher=teacher,
    )


def train(folder, ours, ranks_with_data=1, more=None, *, evaluates=True, resume=None):
    trainer = make(folder, ours, ranks_with_data, **{"load_best_model_at_end": True, **(more or {})})
    if evaluates:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trained, trainer.evaluate()["eval_loss"]


def in_every_order(folder, ranks_with_data, more):
    """Trains and resumes, with and without an evaluation before."""
    found = []
    for evaluates in (True, False):
        found.append(train(folder, True, ranks_with_data, more, evaluates=evaluates))
        resume = f"{folder}/checkpoint-2"
        found.append(train(folder, True, ranks_with_data, more, evaluates=not evaluates, resume=resume))
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    return train(str(folder), False), load_file(folder / "checkpoint-4" / "model.safetensors")


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_model_that_is_trained_is_saved_resumed_and_loaded_as_the_best(name, stock, tmp_path):
    ranks, more = COMPOSITIONS[name]
    with_data = 1 if "tensor_parallel_size" in more else ranks
    (losses, best), weights = stock
    call = in_every_order, ranks, str(tmp_path), with_data, more
    for mine in [in_every_order(*call[2:])] if ranks == 1 else run_ranks(*call):
        for found in mine:
            assert found[0] == pytest.approx(losses, rel=1e-3)
            assert found[1] == pytest.approx(best, rel=1e-3)
    assert main(["consolidate", "-q", str(tmp_path / "checkpoint-4"), str(tmp_path / "full")]) == 0
    (file,) = (tmp_path / "full").glob("*.safetensors")
    torch.testing.assert_close(load_file(file), weights, rtol=2e-3, atol=2e-4)


def dtypes(folder, ours):
    """Computes in bf16; the second training is with a new model, of model_init."""
    trainer = make(folder, ours, bf16=True, eval_strategy="no", save_strategy="no")
    trainer.model_init, seen = model, []
    trainer.teacher.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    for _ in range(2):
        trainer.train()
    return seen, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_second_model_keeps_its_precision_and_its_changed_forward(tmp_path):
    expected, losses = dtypes(str(tmp_path), False)
    mine, found = dtypes(str(tmp_path), True)
    assert mine == expected == [torch.bfloat16] * 8
    assert found == losses


def another_model_in_a_pipeline(folder):
    from neuron_accel.errors import UsageError

    trainer = make(folder, True, pipeline_parallel_size=2, pipeline_parallel_num_microbatches=2)
    trainer._wrap_model(trainer.model)
    with pytest.raises(UsageError, match="cannot begin with a new model"):
        trainer.accelerator.start_over()


def test_a_new_model_beside_a_pipeline_of_another_is_refused(tmp_path):
    run_ranks(another_model_in_a_pipeline, 2, str(tmp_path))


# ---- Batches that are not mappings -----------------------------------------------------------------------------------
def train_on_lists(folder, ours):
    """As TRL's GRPOTrainer, whose batches are lists of samples."""
    from transformers import Trainer, TrainingArguments

    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    class OfLists(NeuronTrainer if ours else Trainer):
        def _prepare_inputs(self, inputs):
            return inputs

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert isinstance(inputs, list)
            ids = torch.stack([sample["input_ids"] for sample in inputs])
            return model(input_ids=ids, labels=ids).loss

    trainer = OfLists(
        model=model(),
        args=(NeuronTrainingArguments if ours else TrainingArguments)(
            **options(folder, max_steps=2, eval_strategy="no", save_strategy="no")
        ),
        train_dataset=Texts(),
        data_collator=list,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_batches_that_are_lists(tmp_path):
    assert train_on_lists(str(tmp_path), True) == train_on_lists(str(tmp_path), False)

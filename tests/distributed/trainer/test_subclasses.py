"""Subclasses of transformers' Trainer with the mixin."""

from __future__ import annotations

import collections
import inspect
import os
from dataclasses import dataclass

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import LENGTH, Texts, assert_same, facts, model, options

SHORT = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3}


# ---- TRL's SFTTrainer ------------------------------------------------------------------------------------------------
def tokens(samples, seed=0):
    import datasets

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(samples):
        ids = torch.randint(3, 90, (LENGTH - index % 4,), generator=generator).tolist()
        rows.append({"input_ids": ids, "completion_mask": [int(i >= index % 5) for i in range(len(ids))]})
    return datasets.Dataset.from_list(rows)


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(96)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1", pad_token="w2")


def fine_tune(folder, ranks_with_data, more, ours):
    from trl import SFTConfig, SFTTrainer

    from neuron_accel import NeuronTrainerMixin
    from neuron_accel.trainer import StrategyArguments

    @dataclass
    class Arguments(StrategyArguments, SFTConfig):
        pass

    class Trainer(NeuronTrainerMixin, SFTTrainer):
        pass

    trainer = (Trainer if ours else SFTTrainer)(
        model=model(),
        args=(Arguments if ours else SFTConfig)(**options(folder, ranks_with_data, **SHORT | more), bf16=False),
        train_dataset=tokens(22),
        eval_dataset=tokens(8, seed=1),
        processing_class=tokenizer(),
    )
    result = trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if ours else trainer.model.state_dict()
    return facts(trainer, {k: v.clone() for k, v in state.items()}, result)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {"tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}),
        (2, {"zero_1": True}),
        (2, {"fully_sharded": True}),
    ],
    ids=["tp2+sp", "pp2", "dp2+zero1", "dp2+fully-sharded"],
)
def test_sft_trainer(ranks, more, tmp_path):
    pytest.importorskip("trl")
    with_data = 2 if {"zero_1", "fully_sharded"} & more.keys() else 1
    theirs = run_ranks(fine_tune, with_data, str(tmp_path / "stock"), with_data, {}, False)[0]
    for mine in run_ranks(fine_tune, ranks, str(tmp_path), with_data, more, True):
        assert_same(mine, theirs, 1e-3)


# ---- Seq2SeqTrainer --------------------------------------------------------------------------------------------------
class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 64, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids.flip(0)}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def translate(folder, ranks_with_data, strategy=None):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from neuron_accel import NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments

    generate = {"predict_with_generate": True, "generation_max_length": 6}
    arguments = options(folder, ranks_with_data, **SHORT, **generate, **({strategy: True} if strategy else {}))
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.tolist())
        return {"accuracy": 0.0}

    trainer = (NeuronSeq2SeqTrainer if strategy else Seq2SeqTrainer)(
        model=t5(),
        args=(NeuronSeq2SeqTrainingArguments if strategy else Seq2SeqTrainingArguments)(**arguments),
        train_dataset=Pairs(),
        eval_dataset=Pairs(),
        compute_metrics=metrics,
    )
    result = trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if strategy else trainer.model.state_dict()
    return facts(trainer, {k: v.clone() for k, v in state.items()}, result), seen


@pytest.mark.parametrize("strategy", ["zero_1", "fully_sharded"])
def test_seq2seq_trainer_with_generation(strategy, tmp_path):
    theirs, generated = run_ranks(translate, 2, str(tmp_path / "stock"), 2)[0]
    for mine, seen in run_ranks(translate, 2, str(tmp_path), 2, strategy):
        assert_same(mine, theirs, 1e-3)
        assert seen == generated


def generate(folder):
    """A causal model that is sharded over ranks generates in evaluation."""
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    ids = torch.arange(4, 10).unsqueeze(0)
    alone = model().eval().generate(ids, max_new_tokens=5, do_sample=False)
    trainer = NeuronTrainer(
        model=model(),
        args=NeuronTrainingArguments(**options(folder, 1, tensor_parallel_size=2, **SHORT)),
        train_dataset=tokens(8),
        eval_dataset=tokens(8),
        processing_class=tokenizer(),
    )
    trainer.evaluate()
    return torch.equal(trainer.model.generate(ids, max_new_tokens=5, do_sample=False), alone)


def test_a_sharded_model_generates(tmp_path):
    assert run_ranks(generate, 2, str(tmp_path)) == [True, True]


# ---- what subclasses override ----------------------------------------------------------------------------------------
OURS = {
    "create_accelerator_and_postprocess",
    "get_total_train_batch_size",
    "is_world_process_zero",
    "_prepare_for_training",
    "_wrap_model",
    "_move_model_to_device",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_load_best_model",
    "_issue_warnings_after_load",  # after a load of transformers' own
}
"""Methods of transformers' Trainer that the mixin replaces; a warning names those of a subclass."""
COUNTED_OTHERWISE = {"get_sp_size", "get_cp_size", "get_tp_size"}
"""Called by `get_total_train_batch_size` of transformers, too."""


def calls_of_overrides(folder, ours):
    """How often each method of transformers' Trainer is called by a training with saves, evaluations and a resumed one,
    if a subclass overrides all of them; and whether what it saves by itself is there."""
    from transformers import Trainer, TrainingArguments

    from neuron_accel import NeuronTrainerMixin, NeuronTrainingArguments

    calls = collections.Counter()

    def counted(name):
        def method(self, *args, **named):
            calls[name] += 1
            result = getattr(super(Counted, self), name)(*args, **named)
            if name == "_save":
                torch.save(self.model.state_dict(), os.path.join(args[0], "own.pt"))
            return result

        return method

    names = [name for name, value in vars(Trainer).items() if inspect.isfunction(value) and not name.startswith("__")]
    Counted = type("Counted", (Trainer,), {name: counted(name) for name in names})
    made = type("Made", (NeuronTrainerMixin, Counted), {}) if ours else Counted
    arguments = options(folder, **SHORT | {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2})
    trainer = made(
        model=model(),
        args=(NeuronTrainingArguments if ours else TrainingArguments)(**arguments, load_best_model_at_end=True),
        train_dataset=Texts(12),
        eval_dataset=Texts(4),
    )
    trainer.train()
    trainer.predict(Texts(4))
    trainer.save_model(f"{folder}/final")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return dict(calls), [os.path.exists(f"{folder}/{each}/own.pt") for each in ("checkpoint-2", "final")]


def test_overridden_methods_are_called_as_by_transformers(tmp_path):
    theirs, saved = run_ranks(calls_of_overrides, 1, str(tmp_path / "stock"), False)[0]
    mine, also_saved = run_ranks(calls_of_overrides, 1, str(tmp_path / "ours"), True)[0]
    assert saved == also_saved == [True, True]
    differ = {name for name in theirs.keys() | mine.keys() if theirs.get(name) != mine.get(name)}
    assert differ - COUNTED_OTHERWISE == OURS
    assert not OURS & mine.keys()


def saved_by_subclass(folder, strategy):
    """What a `_save` that asks its model for its weights writes, and the full weights."""
    from transformers import Trainer

    from neuron_accel import NeuronTrainerMixin, NeuronTrainingArguments

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.model.state_dict(), os.path.join(output_dir, "own.pt"))
            self.model.model.save_pretrained(os.path.join(output_dir, "inner"))

    class Made(NeuronTrainerMixin, Own):
        pass

    arguments = options(folder, 1, **SHORT | strategy | {"eval_strategy": "no"})
    trainer = Made(model=model(), args=NeuronTrainingArguments(**arguments), train_dataset=Texts(12))
    trainer.train()
    trainer.save_model(f"{folder}/final")
    trainer.train()  # it still can
    return list(trainer.accelerator.get_state_dict(trainer.model_wrapped))


@pytest.mark.parametrize("strategy", [{"fully_sharded": True}, {"tensor_parallel_size": 2}], ids=["fs", "tp2"])
def test_a_subclass_that_saves_by_itself_has_full_weights(strategy, tmp_path):
    from safetensors.torch import load_file

    names = run_ranks(saved_by_subclass, 2, str(tmp_path), strategy)[0]
    saved = torch.load(tmp_path / "final" / "own.pt")
    assert list(saved) == names
    assert {n: v.shape for n, v in saved.items()} == {n: v.shape for n, v in model().state_dict().items()}
    inner = load_file(tmp_path / "final" / "inner" / "model.safetensors")
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in inner.items())

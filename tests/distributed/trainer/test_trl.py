"""TRL's trainers of preferences and rewards, made through the mixin, train as they do without it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.models import VOCABULARY
from tests.distributed.trainer.trainer_support import assert_same, facts, model, options

STEPS = {
    "max_steps": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "eval_strategy": "no",
    "save_strategy": "no",
    "bf16": False,
}
COMPOSITIONS = {
    "dp1": (1, {}),
    "dp2+zero1": (2, {"zero_1": True}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2+fully-sharded": (2, {"fully_sharded": True}),
}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w2", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def texts(count, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (lengths[n % len(lengths)],), generator=generator))
        for n in range(count)
    ]


def rows(**columns):
    import datasets

    return datasets.Dataset.from_dict({name: texts(8, *given) for name, given in columns.items()})


def with_mixin(trainer, config):
    """The two classes, as docs/trainer.md derives them."""
    from neuron_accel import NeuronTrainerMixin
    from neuron_accel.trainer import StrategyArguments

    @dataclass
    class Arguments(StrategyArguments, config):
        pass

    class Mixed(NeuronTrainerMixin, trainer):
        pass

    return Mixed, Arguments


def finish(trainer, ours):
    result = trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if ours else trainer.model.state_dict()
    return facts(trainer, {k: v.clone() for k, v in state.items()}, result)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Trains without the mixin, once for each number of data-parallel ranks."""

    @functools.cache
    def train(function, ranks, *given):
        return run_ranks(function, ranks, str(tmp_path_factory.mktemp("stock")), ranks, {}, *given, ours=False)

    return train


# ---- Preferences -----------------------------------------------------------------------------------------------------
def prefer(folder, ranks_with_data, more, ours=True):
    from trl import DPOConfig, DPOTrainer

    kind, arguments = with_mixin(DPOTrainer, DPOConfig) if ours else (DPOTrainer, DPOConfig)
    trainer = kind(
        model=model(),
        ref_model=reference_model(),
        args=arguments(**options(folder, ranks_with_data, **STEPS | more)),
        train_dataset=rows(prompt=((3, 4), 1), chosen=((5, 3, 4), 2), rejected=((4, 6), 3)),
        processing_class=tokenizer(),
    )
    found = finish(trainer, ours)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    found["rewards"] = [entry["rewards/margins"] for entry in history]
    return found


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_dpo(name, stock, tmp_path):
    pytest.importorskip("trl")
    ranks, more = COMPOSITIONS[name]
    theirs = stock(prefer, 1)[0]
    for mine in run_ranks(prefer, ranks, str(tmp_path), ranks // more.get("tensor_parallel_size", 1), more):
        assert_same(mine, theirs, 1e-3)
        assert mine["rewards"] == pytest.approx(theirs["rewards"], rel=1e-3)


def judge(folder, ranks_with_data, more, name, ours=True, **adapted):
    """KTO learns from completions that are good or bad, a reward model which of two is better."""
    import trl

    kinds = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    kind, arguments = with_mixin(*kinds) if ours else kinds
    given = options(folder, ranks_with_data, **STEPS | more)
    pairs = rows(prompt=((3, 4), 1), chosen=((5, 3, 4), 2), rejected=((4, 6), 3))
    if name == "KTO":
        data = pairs.rename_column("chosen", "completion").remove_columns("rejected")
        data = data.add_column("label", [number % 2 == 0 for number in range(len(data))])
        policy = model()
        extra = adapted or {"ref_model": reference_model()}  # a model with adapters is its own reference, without them
    else:
        data, policy, extra = pairs, scorer(), adapted
    trainer = kind(model=policy, args=arguments(**given), train_dataset=data, processing_class=tokenizer(), **extra)
    return finish(trainer, ours)


def reference_model():
    reference = model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.05)
    return reference


def scorer():
    from transformers import LlamaForSequenceClassification

    config = model().config
    config.num_labels, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("trainer", ["KTO", "Reward"])
def test_of_judgements(trainer, name, stock, tmp_path):
    pytest.importorskip("trl")
    ranks, more = COMPOSITIONS[name]
    with_data = ranks // more.get("tensor_parallel_size", 1)
    theirs = stock(judge, with_data, trainer)[0]
    for mine in run_ranks(judge, ranks, str(tmp_path), with_data, more, trainer):
        assert_same(mine, theirs, 1e-3)


# ---- Adapters --------------------------------------------------------------------------------------------------------
def adapt(folder, ranks_with_data, more, name, ours=True):
    """Only the factors of TRL's ``peft_config`` train; a preference is measured against the model without them."""
    import trl
    from peft import LoraConfig

    adapted = {
        "peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    }
    more = {"learning_rate": 1e-2} | more
    if name in ("KTO", "Reward"):
        return judge(folder, ranks_with_data, more, name, ours, **adapted)
    if name in ("GRPO", "RLOO"):
        return reinforce(folder, ranks_with_data, {"beta": 0.1} | more, name, ours=ours, **adapted)
    kinds = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    kind, arguments = with_mixin(*kinds) if ours else kinds
    columns = rows(prompt=((3, 4), 1), chosen=((5, 3, 4), 2), rejected=((4, 6), 3))
    if name == "SFT":
        columns = columns.rename_column("chosen", "completion").remove_columns("rejected")
    trainer = kind(
        model=model(),
        args=arguments(**options(folder, ranks_with_data, **STEPS | more)),
        train_dataset=columns,
        processing_class=tokenizer(),
        **adapted,
    )
    return finish(trainer, ours)


@pytest.mark.parametrize("name", ["dp2+zero1", "tp2", "dp2+fully-sharded"])
@pytest.mark.parametrize("trainer", ["SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_lora_of_trl(trainer, name, stock, tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    ranks, more = COMPOSITIONS[name]
    with_data = ranks // more.get("tensor_parallel_size", 1)
    alike = with_data if trainer in ("KTO", "GRPO", "RLOO") else 1  # batches and generations of a rank are its own
    theirs = stock(adapt, alike, trainer)
    for rank, mine in enumerate(run_ranks(adapt, ranks, str(tmp_path), with_data, more, trainer)):
        assert_same(mine, theirs[rank % alike], 1e-3, atol=1e-6)  # advantages add up to zero, and so do losses


# ---- Rewards of what the model generates -----------------------------------------------------------------------------
ENDS = range(VOCABULARY // 2, VOCABULARY)
"""Tokens that end a completion: so many that completions, and the generations of ranks, differ in length."""


def reinforce(folder, ranks_with_data, more, name, reference=None, ours=True, **adapted):
    """Every data-parallel rank samples with a seed of its own, as TRL sets it. ``reference`` is a folder, from which
    TRL loads the model that the policy is compared with."""
    import trl
    from transformers import set_seed

    seen = []

    def checksum(completion_ids, **_):
        seen.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 7) for ids in completion_ids]

    policy = model()
    policy.generation_config.eos_token_id = list(ENDS)
    policy.config._name_or_path = reference or ""
    kinds = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    kind, arguments = with_mixin(*kinds) if ours else kinds
    own = {"num_generations": 2, "max_completion_length": 4, "beta": 0.5 if reference else 0.0}
    trainer = kind(
        model=policy,
        reward_funcs=checksum,
        args=arguments(**options(folder, ranks_with_data, **STEPS | own | more)),
        train_dataset=rows(prompt=((3, 4), 1)),
        processing_class=tokenizer(),
        **adapted,
    )
    set_seed(trainer.args.seed + trainer.accelerator.process_index)  # TRL adds the index of the process
    found = finish(trainer, ours)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    found["rewards"], found["seen"] = [entry["reward"] for entry in history], seen
    found["divergences"] = [entry["kl"] for entry in history if "kl" in entry]
    return found


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_of_rewards(trainer, name, stock, tmp_path):
    """Completions, rewards, losses and weights are those of stock on as many data-parallel ranks."""
    pytest.importorskip("trl")
    ranks, more = COMPOSITIONS[name]
    sharing = more.get("tensor_parallel_size", 1)
    theirs = stock(reinforce, ranks // sharing, trainer)
    for rank, mine in enumerate(run_ranks(reinforce, ranks, str(tmp_path), ranks // sharing, more, trainer)):
        expected = theirs[rank // sharing]
        assert mine["seen"] == expected["seen"]
        assert mine["rewards"] == pytest.approx(expected["rewards"])
        assert_same(mine, expected, 1e-3)


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reference"))
    reference_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["dp2+zero1", "tp2", "dp2+fully-sharded"])
@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_of_rewards_and_a_reference(trainer, name, stock, reference_folder, tmp_path):
    """The model in a folder is a second one, with full weights; the divergence from it is part of the loss."""
    pytest.importorskip("trl")
    ranks, more = COMPOSITIONS[name]
    with_data = ranks // more.get("tensor_parallel_size", 1)
    given = (trainer, reference_folder)
    theirs = stock(reinforce, with_data, *given)
    for rank, mine in enumerate(run_ranks(reinforce, ranks, str(tmp_path), with_data, more, *given)):
        expected = theirs[rank % with_data]
        assert mine["seen"] == expected["seen"]
        assert mine["divergences"] == pytest.approx(expected["divergences"], rel=1e-3)
        assert min(map(abs, mine["divergences"])) > 1e-3
        assert_same(mine, expected, 1e-3, atol=1e-6)


def refused(folder):
    """The errors of two trainers, as they are made."""
    found = {}
    for trainer in ("GRPO", "RLOO"):
        with pytest.raises(UsageError, match="would train on samples of other ranks") as caught:
            reinforce(folder, 2, {"tensor_parallel_size": 2}, trainer)
        found[trainer] = str(caught.value)
    return found


def test_rewards_of_several_groups_with_the_same_samples(tmp_path):
    """TRL gathers rewards over all processes, and takes its own by the index that counts samples."""
    pytest.importorskip("trl")
    for messages in run_ranks(refused, 4, str(tmp_path)):
        for trainer, message in messages.items():
            assert f"{trainer}Trainer._generate_and_score_completions" in message

"""Trains with TRL's trainers, sharded: SFT, DPO, KTO, a reward model, GRPO, RLOO.

neuron-accel launch --nproc-per-node 2 train.py --method dpo --output_dir out --zero_1
    a tiny model, on a laptop
neuron-accel launch --nproc-per-node 32 train.py --method sft --model base --data chats.jsonl --output_dir out \\
    --tensor_parallel_size 8 --zero_1 --bf16

The arguments of TRL's configuration and of neuron_accel's strategies are options; --help lists those of --method.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronTrainerMixin, lazy_load_for_parallelism  # isort: skip
import datasets
import trl
from rollouts import Rollouts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from neuron_accel.trainer import StrategyArguments


@dataclass
class SFTArguments(StrategyArguments, trl.SFTConfig):
    pass


class SFT(NeuronTrainerMixin, trl.SFTTrainer):
    pass


@dataclass
class DPOArguments(StrategyArguments, trl.DPOConfig):
    pass


class DPO(NeuronTrainerMixin, trl.DPOTrainer):
    pass


@dataclass
class KTOArguments(StrategyArguments, trl.KTOConfig):
    pass


class KTO(NeuronTrainerMixin, trl.KTOTrainer):
    pass


@dataclass
class RewardArguments(StrategyArguments, trl.RewardConfig):
    pass


class Reward(NeuronTrainerMixin, trl.RewardTrainer):
    pass


@dataclass
class GRPOArguments(StrategyArguments, trl.GRPOConfig):
    pass


class GRPO(NeuronTrainerMixin, trl.GRPOTrainer):
    pass


@dataclass
class RLOOArguments(StrategyArguments, trl.RLOOConfig):
    pass


class RLOO(NeuronTrainerMixin, trl.RLOOTrainer):
    pass


METHODS = {
    "sft": (SFT, SFTArguments),
    "dpo": (DPO, DPOArguments),
    "kto": (KTO, KTOArguments),
    "reward": (Reward, RewardArguments),
    "grpo": (GRPO, GRPOArguments),
    "rloo": (RLOO, RLOOArguments),
}
"""Each trainer with the mixin that takes strategies, and its arguments."""


@dataclass
class ScriptArguments:
    """What is trained."""

    method: str = field(metadata={"help": "How: " + ", ".join(METHODS), "choices": [*METHODS]})
    model: str | None = field(default=None, metadata={"help": "A folder or a name of the hub; none: a tiny Llama."})
    data: str | None = field(
        default=None, metadata={"help": "JSON lines in the format of TRL's trainer; none: texts of words from a list."}
    )
    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA adapters of all linear layers; 0: no adapters."})
    server: str | None = field(
        default=None, metadata={"help": "A Python file that generates for GRPO: see rollouts.py."}
    )


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is easy to check: the fraction of tokens that differ from each other. Write your own here."""
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]


WORDS = [f"w{number}" for number in range(64)]


def tiny(method: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A model, a tokenizer and texts for a try without a download."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": WORDS[0], "eos_token": WORDS[1], "pad_token": WORDS[2]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 2, "eos_token_id": 1, "bos_token_id": 1}
    config = LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=2, num_labels=1, **sizes, **special)

    def words(first: int, count: int, step: int = 1) -> str:
        return " ".join(WORDS[3 + (first + step * n) % 60] for n in range(count))

    rows = []
    for n in range(16):
        up, down = words(n + 4, 4), words(n, 4, -1)
        rows.append(
            {
                "sft": {"prompt": words(n, 4), "completion": up},
                "dpo": {"prompt": words(n, 4), "chosen": up, "rejected": down},
                "kto": {"prompt": words(n, 4), "completion": up if n % 2 else down, "label": bool(n % 2)},
                "reward": {"chosen": words(n, 8), "rejected": words(n, 8, -1)},
            }.get(method, {"prompt": words(n, 4)})
        )
    return build(config, method), tokenizer, rows


def build(source: Any, method: str) -> Any:
    """The model of a configuration, or of a folder, of which each rank reads what it holds when it is prepared."""
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    if not isinstance(source, str):
        return kind.from_config(source)
    with lazy_load_for_parallelism():
        return kind.from_pretrained(source, dtype="auto", **({"num_labels": 1} if method == "reward" else {}))


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main() -> int:
    method = next((after for word, after in zip(sys.argv, sys.argv[1:], strict=False) if word == "--method"), "sft")
    trainer_class, arguments_class = METHODS.get(method, METHODS["sft"])
    parser = HfArgumentParser((ScriptArguments, arguments_class), description=__doc__)
    script, arguments = parser.parse_args_into_dataclasses()
    if script.model is None:
        model, tokenizer, rows = tiny(method)
    else:
        model, tokenizer, rows = build(script.model, method), AutoTokenizer.from_pretrained(script.model), []
    rows = read(script.data) if script.data is not None else rows
    if not rows:
        raise SystemExit("train.py: there is nothing to train on: name a file with --data")
    more: dict[str, Any] = {}
    if script.lora_r:
        from peft import LoraConfig

        kind = "SEQ_CLS" if method == "reward" else "CAUSAL_LM"  # of which the first trains the head, too
        more["peft_config"] = LoraConfig(
            r=script.lora_r, lora_alpha=2 * script.lora_r, target_modules="all-linear", task_type=kind
        )
    elif method in ("dpo", "kto"):  # the model before training, which TRL otherwise loads by the name of the model
        more["ref_model"] = copy.deepcopy(model) if script.model is None else build(script.model, method)
    if method in ("grpo", "rloo"):
        more["reward_funcs"] = distinct
        named = script.model is not None or script.lora_r  # TRL loads a reference by the name of the model
        arguments.beta = arguments.beta if named else 0.0
    if script.server is not None:
        if method != "grpo":
            raise SystemExit("train.py: --server generates for GRPO only")
        is_main = arguments.distributed_state.is_main_process
        more["rollout_func"] = Rollouts(SimpleNamespace(**runpy.run_path(script.server)) if is_main else None)
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, **more
    )
    trainer.train()
    if script.lora_r:  # the adapters only, in peft's format; every rank calls it
        adapted = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        adapted.save_pretrained(arguments.output_dir, is_main_process=trainer.is_world_process_zero())
    else:
        trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        Path(arguments.output_dir, "losses.json").write_text(json.dumps(losses))
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeuronAccelError as error:
        sys.exit(f"train.py: {error}")

"""Training scripts of optimum-neuron: its arguments, its defaults, and its fine-tuning of Llama 3 and Qwen 3."""

from __future__ import annotations

import dataclasses
import logging
import runpy

import pytest
import torch

from neuron_accel.checkpoint.state.snapshot import pieces_of
from neuron_accel.errors import ConfigurationError
from tests.distributed.models import llama_config
from tests.distributed.trainer.trainer_support import Texts, model

THEIRS = {
    "use_autocast": True,
    "stochastic_rounding_enabled": False,
    "optimizer_use_master_weights": True,
    "optimizer_use_fp32_grad_acc": True,
    "optimizer_save_master_weights_in_ckpt": False,
    "enable_throughput_metrics": True,
    "enable_mfu_metrics": True,
    "enable_efficiency_metrics": True,
}
WITHOUT_EFFECT = {
    "dataloader_prefetch_size": 2,
    "skip_cache_push": True,
    "num_local_ranks_per_step": 8,
    "use_xser": True,
    "fuse_qkv": True,
    "recompute_causal_mask": True,
    "metrics_window_size": 5,
    "overwrite_output_dir": True,
}
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}


def arguments(folder, **more):
    from neuron_accel import NeuronTrainingArguments

    return NeuronTrainingArguments(output_dir=str(folder), **QUIET | more)


def test_every_argument_is_mapped_or_named(tmp_path, caplog):
    pytest.importorskip("neuron_accel_report")
    with caplog.at_level(logging.WARNING):
        made = arguments(tmp_path, zero_1=True, **THEIRS | WITHOUT_EFFECT)
    for name in WITHOUT_EFFECT:
        assert f"{name} of optimum-neuron has no effect here" in caplog.text
    for name in THEIRS:
        assert name not in caplog.text
    zero, report = made.strategies()
    assert (zero.use_grad_acc_hook, zero.higher_cc_precision, zero.save_master_weights) == (True, True, False)
    assert zero.optimizer_dtype == torch.float32
    assert report.folder == tmp_path / "run_report"
    (zero,) = arguments(tmp_path, zero_1=True, optimizer_use_master_weights=False).strategies()
    assert zero.optimizer_dtype == torch.bfloat16


def test_defaults_stay_those_of_transformers_without_the_switch(tmp_path):
    from transformers import TrainingArguments

    made, stock = arguments(tmp_path), TrainingArguments(output_dir=str(tmp_path), **QUIET)
    assert made.strategies() == []
    assert made.zero_1 is False
    for field in dataclasses.fields(stock):
        if field.name not in ("logging_dir", "accelerator_config"):
            assert getattr(made, field.name) == getattr(stock, field.name), field.name
    again = type(made)(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.init})
    assert again.to_dict() == made.to_dict()


def test_what_contradicts_or_has_no_effect_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="optimizer_use_master_weights has no effect"):
        arguments(tmp_path, optimizer_use_master_weights=True)
    with pytest.raises(ConfigurationError, match="Weights in bfloat16"):
        arguments(tmp_path, bf16=True, use_autocast=False)
    made = arguments(tmp_path, stochastic_rounding_enabled=False)
    environ = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}
    with pytest.raises(ConfigurationError, match="contradict"):
        made._set_rounding_variable(environ)
    environ.clear()
    made._set_rounding_variable(environ)
    assert environ == {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}


def train_with_its_defaults(arguments):
    from transformers import HfArgumentParser

    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    (made,) = HfArgumentParser(NeuronTrainingArguments).parse_args_into_dataclasses(arguments)
    trainer = NeuronTrainer(model=model(), args=made, train_dataset=Texts())
    trainer.train()
    pieces = list(pieces_of(trainer.optimizer.optimizer, trainer.accelerator.run))
    return {
        "batch": (made.per_device_train_batch_size, made.per_device_eval_batch_size),
        "weights": {p.dtype for p in trainer.model.parameters()},
        "masters": {(piece.master, piece.parameter.dtype) for piece in pieces},
        "options": [(p.use_grad_acc_hook, p.higher_cc_precision) for p in trainer.accelerator.plan.plugins],
        "steps": trainer.state.global_step,
        "autocast": trainer.accelerator.mixed_precision,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def test_one_switch_takes_its_defaults(tmp_path):
    flags = "--do_train --max_steps 2 --gradient_accumulation_steps 2 --bf16 --async_save --logging_steps 1"
    given = [*flags.split(), "--overwrite_output_dir", "--optimum_neuron_defaults", "--use_cpu", "--report_to", "none"]
    found = train_with_its_defaults([*given, "--output_dir", str(tmp_path)])
    assert found["batch"] == (1, 1)
    assert found["weights"] == {torch.bfloat16}
    assert found["masters"] == {(True, torch.float32)}
    assert found["options"] == [(True, True)]
    assert (found["steps"], found["autocast"]) == (2, "no")
    assert all(0 < loss < 10 for loss in found["losses"])


# ---- Its scripts, with other imports, a tiny model and a few samples -------------------------------------------------
SCRIPT = """
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, HfArgumentParser

from neuron_accel import NeuronModelForCausalLM, NeuronSFTConfig, NeuronSFTTrainer, NeuronTrainingArguments


@dataclass
class ScriptArguments:
    model_id: str = field(metadata={"help": "The model."})


script_args, training_args = HfArgumentParser((ScriptArguments, NeuronTrainingArguments)).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script_args.model_id)
model = NeuronModelForCausalLM.from_pretrained(
    script_args.model_id,
    training_args.trn_config,
    torch_dtype=torch.bfloat16 if training_args.bf16 else torch.float32,
    %(attention)s,
)
lora_config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
sft_config = NeuronSFTConfig(max_seq_length=32, packing=True, **training_args.to_dict())
trainer = NeuronSFTTrainer(
    args=sft_config,
    model=model,
    %(peft)s
    tokenizer=tokenizer,
    train_dataset=load_dataset("json", data_files=DATA, split="train"),
    formatting_func=lambda example: "w3 " + example["text"],
)
trainer.train()
"""
SCRIPTS = {
    "llama3": {"attention": "use_flash_attention_2=True", "peft": "peft_config=lora_config,"},
    "qwen3": {"attention": 'attn_implementation="eager"', "peft": ""},
}


def tiny(name, folder):
    from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from tests.distributed.trainer.test_subclasses import tokenizer

    torch.manual_seed(0)
    config = llama_config()
    if name == "qwen3":
        config = Qwen3Config(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
    (Qwen3ForCausalLM if name == "qwen3" else LlamaForCausalLM)(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


FLAGS = """--use_cpu --do_train --max_steps 2 --per_device_train_batch_size 1 --bf16 --zero_1 --tensor_parallel_size 1
    --learning_rate 1e-2 --logging_steps 1 --async_save --overwrite_output_dir --report_to none"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_fine_tuning_scripts_start(name, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    tiny(name, tmp_path / "model")
    words = [" ".join(f"w{(i * j) % 90 + 3}" for j in range(9)) for i in range(24)]
    (tmp_path / "data.json").write_text("\n".join(f'{{"text": "{line}"}}' for line in words))
    (tmp_path / "finetune.py").write_text(SCRIPT % SCRIPTS[name])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    flags = ["--model_id", f"{tmp_path}/model", "--output_dir", f"{tmp_path}/out", *FLAGS.split()]
    monkeypatch.setattr("sys.argv", ["finetune.py", *flags])
    given = {"DATA": f"{tmp_path}/data.json"}
    trainer = runpy.run_path(str(tmp_path / "finetune.py"), given, run_name="finetune")["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert type(trainer.model).__name__ == ("PeftModelForCausalLM" if name == "llama3" else "Qwen3ForCausalLM")
    assert trainer.args.max_length == 32
    assert [plugin.spec.name for plugin in trainer.accelerator.plan.plugins] == ["zero1"]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)

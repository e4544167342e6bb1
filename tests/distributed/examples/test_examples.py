"""Every example and every YAML file beside them, at a tiny scale on CPU ranks."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TINY = [
    "--block_size=32",
    "--corpus_share=0.02",
    "--vocab_size=300",
    "--config_overrides=n_embd=32,n_layer=2,n_head=4",
    "--max_train_samples=32",
    "--max_eval_samples=8",
    "--per_device_train_batch_size=4",
    "--learning_rate=1e-2",
]
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))


def ranks_of(config: Path) -> int:
    """What the first line of a file says that it needs."""
    first = config.read_text().split()[1]
    return int(first) if first.isdecimal() else 2


def run_script(script, arguments):
    """A script on a warm rank."""
    folder = str(Path(script).parent)
    sys.path.insert(0, folder)
    sys.argv = [str(script), *map(str, arguments)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise RuntimeError(error.code) from error
    finally:
        sys.path.remove(folder)


def on_ranks(script: Path, *arguments, ranks: int) -> None:
    from neuron_accel.testing import run_ranks

    run_ranks(run_script, ranks, str(script), list(arguments), timeout=100)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_loop_with_every_configuration(config, tmp_path):
    """It learns, evaluates and saves."""
    script, ranks = EXAMPLES / "language-modeling" / "run_clm_no_trainer.py", ranks_of(config)
    on_ranks(
        script,
        *TINY,
        f"--config={config}",
        "--num_train_epochs=3",
        "--max_steps=3",
        f"--output_dir={tmp_path}",
        ranks=ranks,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["losses"]) == 3
    assert result["losses"][-1] < result["losses"][0]
    assert math.isfinite(result["eval_loss"])
    assert (tmp_path / "model.safetensors").exists()


def test_the_gallery_is_listed():
    text = (EXAMPLES / "configs" / "README.md").read_text()
    assert len(CONFIGS) == text.count(".yaml` |")
    assert all(f"`{path.name}`" in text for path in CONFIGS)


def test_a_loop_goes_on_from_its_checkpoint(tmp_path):
    script = EXAMPLES / "language-modeling" / "run_clm_no_trainer.py"
    config = EXAMPLES / "configs" / "zero1.yaml"
    arguments = [*TINY, f"--config={config}", "--checkpoint_every=2"]
    on_ranks(script, *arguments, "--num_train_epochs=2", f"--output_dir={tmp_path / 'whole'}", ranks=2)
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    folder = tmp_path / "parts"
    on_ranks(script, *arguments, "--num_train_epochs=2", f"--output_dir={folder}", ranks=2)
    for path in (folder / "checkpoints").glob("checkpoint_*"):  # as if it had been killed after the first
        if path.name != "checkpoint_0":
            (path / "manifest.json").unlink()
    (folder / "result.json").unlink()
    on_ranks(script, *arguments, "--num_train_epochs=2", "--resume", f"--output_dir={folder}", ranks=2)
    assert json.loads((folder / "result.json").read_text())["losses"] == whole["losses"]


def test_a_trainer_from_the_command_line(tmp_path):
    """From scratch on local text by ZeRO-1, then the saved model again by tensor parallelism, in bf16."""
    script = EXAMPLES / "language-modeling" / "run_clm.py"
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES / "quickstart" / "data.py").read_text() * 3)
    common = ["--do_train", "--do_eval", "--report_to=none", "--max_steps=4", f"--train_file={text}", *TINY]
    first, second = tmp_path / "first", tmp_path / "second"
    on_ranks(script, *common, "--zero_1", f"--output_dir={first}", ranks=2)
    before = json.loads((first / "eval_results.json").read_text())
    assert before["perplexity"] == pytest.approx(math.exp(before["eval_loss"]))
    again = [a for a in common if not a.startswith("--config_overrides")]
    flags = [f"--model_name_or_path={first}", "--tensor_parallel_size=2", "--bf16", f"--output_dir={second}"]
    on_ranks(script, *again, *flags, ranks=2)
    assert json.loads((second / "eval_results.json").read_text())["eval_loss"] < before["eval_loss"]


def train_on_a_dataset(arguments, cache):
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache  # not in the home directory; in a process of its own
    run_script(str(EXAMPLES / "language-modeling" / "run_clm_no_trainer.py"), arguments)


@pytest.mark.parametrize("held_out", ["validation", "test", None])
def test_a_dataset_by_its_name(held_out, tmp_path):
    """A folder, which goes the way of a dataset of the hub, with a column of another name."""
    from neuron_accel.testing import run_ranks

    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = (EXAMPLES / "quickstart" / "data.py").read_text().splitlines(keepends=True)
    for name, part in {"train": lines[40:] * 4, held_out: lines[:40]}.items():
        if name is not None:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"line": line}) + "\n" for line in part))
    out = tmp_path / "out"
    arguments = [*TINY, f"--dataset_name={folder}", "--text_column=line", "--num_train_epochs=1", f"--output_dir={out}"]
    run_ranks(train_on_a_dataset, 2, arguments, str(tmp_path / "cache"), timeout=100)
    losses = json.loads((out / "result.json").read_text())["losses"]
    assert len(losses) == 4  # 32 sequences, on two ranks by four each
    assert losses[-1] < losses[0]


def test_a_dataset_without_the_column_is_an_error(tmp_path):
    from neuron_accel.testing import RanksError, run_ranks

    (tmp_path / "train.jsonl").write_text(json.dumps({"line": "a"}))
    arguments = [*TINY, f"--dataset_name={tmp_path}", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(RanksError, match="no column 'text' but \\['line'\\]; see --text_column"):
        run_ranks(train_on_a_dataset, 1, arguments, str(tmp_path / "cache"), timeout=100)


@pytest.mark.parametrize(("precision", "flag"), [("FP32", ""), ("BF16", ""), ("MIXED", "--enable-mixed-precision-")])
def test_what_the_shell_script_starts(precision, flag, tmp_path):
    command = tmp_path / "neuron-accel"
    command.write_text('#!/bin/sh\necho "ROUNDING=$NEURON_RT_STOCHASTIC_ROUNDING_EN"; echo "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PRECOMPILE": "1"}
    script = [EXAMPLES / "gpt2_xl_zero1" / "run.sh", precision, "--max_steps", "7"]
    printed = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("ROUNDING=\n")  # with master weights stochastic rounding only adds noise
    start = "precompile --max-steps 10 --cache-dir neuron_cache -- neuron-accel launch --nproc-per-node 32"
    assert f"{start} --cache-dir neuron_cache" in printed
    assert printed.endswith(f"train.py --precision {precision} --max_steps 7\n")
    assert ("--enable-mixed-precision-" in printed) == bool(flag)
    refused = subprocess.run([script[0], "FP8"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "FP8" in refused.stderr


@pytest.mark.parametrize("precision", ["FP32", "BF16", "MIXED"])
def test_gpt2_xl_at_its_tiny_scale(precision, tmp_path):
    script = EXAMPLES / "gpt2_xl_zero1" / "train.py"
    arguments = ["--scale=tiny", f"--precision={precision}", f"--output_dir={tmp_path}", "--learning_rate=3e-3"]
    on_ranks(script, *arguments, "--max_steps=12", "--gradient_accumulation_steps=2", ranks=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["sequences_per_second"] > 0 for line in lines)

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 1031


def test_gpt2_xl_has_its_true_size():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    scales = runpy.run_path(str(EXAMPLES / "gpt2_xl_zero1" / "train.py"))["SCALES"]
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**scales["xl"]))
    assert sum(p.numel() for p in model.parameters()) == 1_557_611_200


def test_the_batch_files_are_those_that_the_launcher_writes(tmp_path):
    folder = EXAMPLES / "gpt2_xl_zero1"
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "neuron-accel"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m neuron_accel.cli.main "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    subprocess.run([folder / "make_slurm.sh", "4", tmp_path], check=True, env=environment, capture_output=True)
    for name in ("run.slurm", "compile.slurm"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
        subprocess.run(["bash", "-n", folder / name], check=True)


@pytest.mark.parametrize(
    ("script", "ranks", "said", "floor"),
    [
        ("mlp", 1, r"epoch 4: .* ([\d.]+)% of 1000 read", 85),
        ("mlp", 4, r"epoch 4: .* ([\d.]+)% of 1000 read", 85),
        ("own_model", 2, r"step 200: .* ([\d.]+)% of the numbers", 90),
        ("own_model", 4, r"step 200: .* ([\d.]+)% of the numbers", 90),
        ("own_plugin", 2, r"epoch 6: .* ([\d.]+)% with the average", 90),
    ],
)
def test_small_examples_learn(script, ranks, said, floor, capfd):
    on_ranks(EXAMPLES / script / "train.py", ranks=ranks)
    printed = capfd.readouterr().out
    found = re.findall(said, printed)
    assert len(found) == 1  # rank 0 alone speaks
    assert float(found[0]) > floor


def test_one_worker_and_four_learn_the_same(capfd):
    losses = []
    for ranks in (1, 4):
        on_ranks(EXAMPLES / "mlp" / "train.py", "--epochs=1", ranks=ranks)
        losses.append(re.findall(r"([\d.]+)% of", capfd.readouterr().out))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "script",
    [
        "language-modeling/run_clm.py",
        "language-modeling/run_clm_no_trainer.py",
        "gpt2_xl_zero1/train.py",
        "tasks/run_classification.py",
        "tasks/run_image_classification.py",
        "tasks/run_summarization.py",
        "tasks/run_translation.py",
    ],
)
def test_help(script):
    done = subprocess.run([sys.executable, EXAMPLES / script, "--help"], capture_output=True, text=True, check=True)
    assert "--output_dir" in done.stdout
    assert "neuron-accel launch" in done.stdout

"""Training scripts of diffusers, transformers and accelerate, unmodified, on two CPU ranks, with the class swapped.

``from accelerate import Accelerator`` gives them ``NeuronAccelerator``. Models and data are tiny; writes a table.

python -m tests.sweeps.scripts CHECKOUT ... [--write docs/guides/from-accelerate.md] [--scripts name ...]

Each run is compared with a run of the same script with Accelerate's class: data parallel, ZeRO-1 and fully sharded with
two processes, rank by rank, tensor parallel with one process, as its data-parallel size is one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RUN_ON = {
    "diffusers": "58eb52c0803ea9af3abec60841c2a093bdf1f951",
    "transformers": "1618d44b9295361607ec74d7be860ba886aac039",
    "accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
}
"""Commits of the projects whose scripts the document tells about."""
SECONDS = 180
"""A script takes 15 to 60; one that waits for a rank that does not come is ended."""
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
STRATEGIES = {"plain": [], "ZeRO-1": ["zero1"], "fully sharded": ["fully_sharded"], "tp2": [TP2]}
NOT_TRIED = "not tried: "


@dataclass(frozen=True)
class Script:
    """A script, and how it is called.

    Args:
        project: the checkout that it is in.
        path: within the checkout.
        arguments: as on a command line; ``{data}`` is the folder of inputs.py, ``{out}`` an empty one.
        trains: the kind of model, for the table.
        modules: what ``FullyShardedPlugin`` is given to find the blocks of a model that its library does not mark.
        not_tried: reasons, by strategy.
    """

    project: str
    path: str
    arguments: str
    trains: str
    modules: tuple[str, ...] = ()
    not_tried: dict[str, str] = field(default_factory=dict)


NO_PLAN = {"tp2": "no plan of tensor parallelism is known for this model"}
UNCONDITIONAL = (
    "--train_data_dir {data}/pictures/train --model_config_name_or_path {data}/unet --resolution 16 --output_dir {out} "
    "--train_batch_size 2 --num_epochs 2 --save_images_epochs 1 --eval_batch_size 1 --ddpm_num_inference_steps 2 "
    "--lr_warmup_steps 2 --gradient_accumulation_steps 2 --learning_rate 1e-3"
)
TEXT_TO_IMAGE = (
    "--pretrained_model_name_or_path {data}/stable_diffusion --train_data_dir {data}/captioned --resolution 16 "
    "--output_dir {out} --train_batch_size 2 --max_train_steps 6 --lr_warmup_steps 2 --lr_scheduler cosine "
    "--learning_rate 1e-3 --seed 3"
)
BLOCKS = ("down_blocks.*", "mid_block", "up_blocks.*")
SCRIPTS = {
    "unconditional": Script(
        "diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        UNCONDITIONAL,
        "UNet",
        BLOCKS,
        NO_PLAN,
    ),
    "unconditional, EMA": Script(
        "diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        UNCONDITIONAL + " --use_ema",
        "UNet",
        BLOCKS,
        NO_PLAN,
    ),
    "unconditional, checkpoints": Script(
        "diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        UNCONDITIONAL + " --checkpointing_steps 2",
        "UNet",
        BLOCKS,
        NO_PLAN,
    ),
    "text to image": Script(
        "diffusers",
        "examples/text_to_image/train_text_to_image.py",
        TEXT_TO_IMAGE,
        "UNet of Stable Diffusion",
        BLOCKS,
        NO_PLAN,
    ),
    "text to image, EMA": Script(
        "diffusers",
        "examples/text_to_image/train_text_to_image.py",
        TEXT_TO_IMAGE + " --use_ema",
        "UNet of Stable Diffusion",
        BLOCKS,
        NO_PLAN,
    ),
    "dreambooth": Script(
        "diffusers",
        "examples/dreambooth/train_dreambooth_flux.py",
        "--pretrained_model_name_or_path {data}/flux --instance_data_dir {data}/pets --instance_prompt w1 "
        "--resolution 16 --output_dir {out} --train_batch_size 2 --max_train_steps 5 --learning_rate 1e-3 "
        "--optimizer adamw --max_sequence_length 16 --gradient_accumulation_steps 2 --seed 3",
        "transformer of Flux",
        ("transformer_blocks.*", "single_transformer_blocks.*"),
        NO_PLAN,
    ),
    "image classification": Script(
        "transformers",
        "examples/pytorch/image-classification/run_image_classification_no_trainer.py",
        "--dataset_name {data}/pictures --model_name_or_path {data}/vit "
        "--output_dir {out} --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --num_train_epochs 2 "
        "--weight_decay 0.1 --seed 3 --with_tracking --report_to tensorboard --checkpointing_steps epoch "
        "--learning_rate 1e-3 --label_column_name label --ignore_mismatched_sizes",
        "ViT",
    ),
    "translation": Script(
        "transformers",
        "examples/pytorch/translation/run_translation_no_trainer.py",
        "--train_file {data}/pairs/train.json --validation_file {data}/pairs/validation.json --model_name_or_path "
        "{data}/t5 --source_lang en --target_lang de --output_dir {out} --per_device_train_batch_size 2 "
        "--per_device_eval_batch_size 2 --num_train_epochs 2 --val_max_target_length 8 --num_beams 2 --seed 3 "
        "--with_tracking --report_to tensorboard --gradient_accumulation_steps 2 --learning_rate 1e-3",
        "T5",
    ),
    "speech recognition": Script(
        "transformers",
        "examples/pytorch/speech-recognition/run_speech_recognition_seq2seq.py",
        "--dataset_name {data}/recordings --model_name_or_path {data}/whisper --output_dir {out} --train_split_name "
        "train --eval_split_name validation --text_column_name text --do_train --do_eval --predict_with_generate "
        "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --num_train_epochs 2 --logging_steps 1 "
        "--max_duration_in_seconds 1 --generation_max_length 8 --freeze_feature_encoder False "
        "--report_to none --seed 3 --eval_strategy epoch",
        "Whisper, with Seq2SeqTrainer",
    ),
    "pets": Script(
        "accelerate",
        "examples/cv_example.py",
        "--data_dir {data}/pets",
        "ResNet of timm",
        ("layer*",),
        NO_PLAN,
    ),
    "pets, complete": Script(
        "accelerate",
        "examples/complete_cv_example.py",
        "--data_dir {data}/pets --output_dir {out} --project_dir {out} --checkpointing_steps epoch --with_tracking",
        "ResNet of timm",
        ("layer*",),
        NO_PLAN,
    ),
}


# ---- a run -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """What a run has trained: losses and logged values by rank, tensors by file and name."""

    ranks: list[dict[str, Any]]
    weights: dict[str, Any]


def run(script: Script, checkout: Path, data: Path, folder: Path, plugins: list[Any] | None, ranks: int) -> Run | str:
    """The run, or the reason why there is none."""
    out, records = folder / "out", folder / "records"
    for made in (out, records):
        made.mkdir(parents=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch += ["-m", "tests.sweeps.script_runs.rank", str(checkout / script.path)]
    arguments = [argument.format(data=data, out=out) for argument in script.arguments.split()]
    environment = os.environ | {
        "SCRIPT_RUN": json.dumps({"plugins": plugins, "records": str(records)}),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*launch, *arguments], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # upon which torchrun ends its ranks
            process.wait()
            code = None
    if code != 0:
        return reason((folder / "log").read_text(errors="replace"), code)
    states = [json.loads(file.read_text())["log_history"] for file in sorted(out.glob("trainer_state.json"))]
    recorded = [json.loads(file.read_text()) for file in sorted(records.glob("rank-*.json"))]
    files = sorted(
        file for place in (out, out / "unet", out / "transformer", records) for file in place.glob("*.safetensors")
    )
    written = {file.name if records in file.parents else str(file.relative_to(out)): load_file(file) for file in files}
    found = Run(
        recorded or [{"losses": [], "logged": entries} for entries in states],
        {f"{file}: {name}": value for file, tensors in written.items() for name, value in tensors.items()},
    )
    complete = found.weights and all(rank["losses"] or rank["logged"] for rank in found.ranks)
    return found if complete and found.ranks else "records nothing"


def reason(log: str, code: int | None) -> str:
    """The error of a log that says most, or the call in which ranks wait."""
    if code is None:
        waits = re.findall(r"has waited for other ranks for .*? s, in .*", log)
        return f"ends after {SECONDS} s; a rank {waits[-1]}" if waits else f"ends after {SECONDS} s"
    errors = re.findall(r"^(?:\[rank\d\]: ?)?([\w.]*(?:Error|Exception)\b: .*)", log, re.M)
    ours = [error for error in errors if "neuron_accel.errors" in error]
    return (ours or errors or ["fails"])[0].rpartition("neuron_accel.errors.")[2][:300]


# ---- what equal means ------------------------------------------------------------------------------------------------
RELATIVE, ABSOLUTE = 1e-4, 2e-5
TIMES = ("runtime", "per_second", "flos")


def difference(found: Run, stock: Run) -> str | None:
    """The first difference, or None."""
    ours = found.ranks
    theirs = stock.ranks * (len(ours) // len(stock.ranks))
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for kind in ("losses", "logged"):
            if len(one[kind]) != len(other[kind]):
                return f"{len(one[kind])} {kind} on rank {rank} instead of {len(other[kind])}"
            for step, (value, expected) in enumerate(zip(one[kind], other[kind], strict=True)):
                if not same(value, expected):
                    return f"{kind} {step} of rank {rank}: {value} instead of {expected}"
    if found.weights.keys() != stock.weights.keys():
        return f"other weights are written: {sorted(found.weights.keys() ^ stock.weights.keys())[:3]}"
    for name, value in stock.weights.items():
        if not value.allclose(found.weights[name], rtol=10 * RELATIVE, atol=ABSOLUTE):
            return f"{name} differs by {(value - found.weights[name]).abs().max():.1e}"
    return None


def same(value: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        names = {name for name in value.keys() | expected.keys() if not any(time in name for time in TIMES)}
        return all(name in value and name in expected and same(value[name], expected[name]) for name in names)
    return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE / 10)


def check(script: Script, checkout: Path, data: Path, folder: Path, chosen: list[str]) -> dict[str, str]:
    """``"yes"`` or a reason, by strategy."""
    stock: dict[int, Run | str] = {}
    results = {}
    for name in chosen:
        if name in script.not_tried:
            results[name] = NOT_TRIED + script.not_tried[name]
            continue
        ranks = 1 if name == "tp2" else 2
        if ranks not in stock:
            stock[ranks] = run(script, checkout, data, folder / f"stock-{ranks}", None, ranks)
        expected = stock[ranks]
        if isinstance(expected, str):
            results[name] = f"{NOT_TRIED}does not run with Accelerate's class: {expected}"
            print(f"  {name}: {results[name]}", flush=True)
            continue
        plugins: list[Any] = STRATEGIES[name]
        if name == "fully sharded" and script.modules:
            plugins = [{"fully_sharded": {"modules": list(script.modules)}}]
        began = time.monotonic()
        found = run(script, checkout, data, folder / re.sub(r"\W+", "-", name), plugins, 2)
        results[name] = found if isinstance(found, str) else difference(found, expected) or "yes"
        print(f"  {name}: {results[name]} ({time.monotonic() - began:.0f} s)", flush=True)
    return results


# ---- the document ----------------------------------------------------------------------------------------------------
TITLE = "## Training scripts that were run with the class swapped"
HEAD = """\
{title}

Scripts of diffusers ({diffusers}), transformers ({transformers}) and accelerate ({accelerate}), unmodified,
with {installed} installed, on two CPU ranks, with tiny models
and data and with `NeuronAccelerator` in the place of `Accelerator`. *yes*: every loss, every value that the script logs
and every weight that it saves equal those of the same script with Accelerate's class, to rounding: of two processes,
rank by rank, and for `tp2` (tensor parallel, where there is a plan for the model) of one process, since two ranks are
then one of data parallelism. Checkpoints of `save_state` are written and not compared. Fully sharded models of
diffusers and timm are given patterns of their blocks (`modules`). Metrics that scripts load from a hub, and the ResNet
of timm with its weights, are replaced by small ones. Whisper's script has a Trainer, which is replaced as in
[Trainer](../trainer.md#the-trainer). There is no such script for a vision-language model. Written by `nox -s scripts`.
"""
EXPLAINED = {
    "used outside of the forward and backward pass": "an error: the moving average reads weights between steps. It "
    "works inside [`full_weights`](#ema-and-writing-weights)",
    "has waited": "ranks wait for each other, and report it: the script calls `save_state` on the main process alone, "
    "every 500 steps by default. [Every rank has to](#calls-that-every-rank-must-make)",
    "ends after": "ranks wait for each other: the script calls the model on the main process alone, to generate "
    "images. [Every rank has to](#ema-and-writing-weights)",
    "do not make the same calls": "an error, in which ranks say what each calls: the script calls `save_state` on the "
    "main process alone",
    "state_dict() is not possible": "an error: the script saves a pipeline of diffusers on the main process alone, "
    "which has a shard of the weights. Every rank has to save it, inside [`full_weights`](#ema-and-writing-weights)",
}
"""What to say of errors, by what they contain."""


def table(results: dict[str, dict[str, str]]) -> str:
    """The results as a section of the document."""
    commits = {project: f"`{commit[:10]}`" for project, commit in RUN_ON.items()}
    installed = " and ".join(f"{project} {importlib.metadata.version(project)}" for project in RUN_ON)
    lines = [
        HEAD.format(title=TITLE, installed=installed.replace(" and ", ", ", 1), **commits),
        f"| script | model | {' | '.join(STRATEGIES)} |",
        "|---" * (len(STRATEGIES) + 2) + "|",
    ]
    reasons: list[str] = []
    for name, script in SCRIPTS.items():
        cells = [_cell(results[name].get(strategy, f"{NOT_TRIED}not in this run"), reasons) for strategy in STRATEGIES]
        flags = (flag for flag in ("--use_ema", "--checkpointing_steps 2") if script.arguments.endswith(flag))
        call = " ".join([Path(script.path).name, *flags])
        lines.append(f"| {script.project}: `{call}` | {script.trains} | {' | '.join(cells)} |")
    notes = [f"{number}. {text}" for number, text in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def _cell(result: str, reasons: list[str]) -> str:
    """``yes``, ``no`` or ``not tried``, with the number of the reason, which is added if it is new."""
    if result == "yes":
        return result
    text = next((why for said, why in EXPLAINED.items() if said in result), result.removeprefix(NOT_TRIED))
    if text not in reasons:
        reasons.append(text)
    return f"{'not tried' if result.startswith(NOT_TRIED) else 'no'} ({reasons.index(text) + 1})"


def write(path: Path, section: str) -> None:
    """Puts the section in the place of the one of its title, or at the end."""
    sections = re.split(r"(?m)^(?=## )", path.read_text())
    place = next((number for number, text in enumerate(sections) if text.startswith(TITLE)), len(sections))
    sections[place : place + 1] = [section]
    path.write_text("\n\n".join(text.strip("\n") for text in sections) + "\n")


def main() -> int:
    commits = ", ".join(f"{project} {commit}" for project, commit in RUN_ON.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"The table of the documentation is of {commits}."
    )
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders whose names contain that of their project")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--folder", type=Path, help="keeps inputs, outputs, logs and results, which later calls add to")
    parser.add_argument("--write", type=Path, help="the document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        data = folder / "data"
        if not data.exists():
            make = "import sys, pathlib; from tests.sweeps.script_runs import rank, inputs; "
            make += "rank.stand_in_for_what_needs_a_network(); inputs.make(pathlib.Path(sys.argv[1]))"
            subprocess.run([sys.executable, "-c", make, str(data)], check=True, cwd=ROOT)
        results = {}
        for name, script in SCRIPTS.items():
            place = folder / re.sub(r"\W+", "-", name)
            known = place / "results.json"
            results[name] = json.loads(known.read_text()) if known.exists() else {}
            checkout = next((path for path in options.checkouts if script.project in path.absolute().name), None)
            missing = [strategy for strategy in options.strategies if strategy not in results[name]]
            if name in options.scripts and checkout is not None and missing:
                print(name, flush=True)
                results[name] |= check(script, checkout.absolute(), data, place, missing)
                place.mkdir(exist_ok=True)
                known.write_text(json.dumps(results[name]))
    if options.write:
        write(options.write, table(results))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel init``: writes a training script, its configuration and the line that launches it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accel.commands import format_bytes, format_seconds, show, terminal_width, wrap_words
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel_plan.plan_command import WITHIN, within_of

DESCRIPTION = """\
Ask for the model, the data and the machine, search the layout that fits and has the shortest predicted time, and write
a folder with everything that a training needs:

  train.yaml          the layout, for NeuronAccelerator(config=...)
  train.py            an ordinary Accelerate loop, which is yours to change
  model/config.json   the sizes of the model

Each question has a default, which an empty answer takes, and an option that answers it; --yes asks nothing. A model is
the name of a popular one (as of `neuron-accel plan`), one of Hugging Face's hub whose config.json is in its cache, or a
folder. A folder with weights is trained further, other models begin with random weights. The data is a file or a folder
of .txt files, or .jsonl files with "text" in each line.

The search takes seconds for a small model, and for a large one about a minute (--within). On the CPU (--instance cpu)
time is predicted with assumed constants.
"""
EXAMPLES = """\
examples:
  neuron-accel init
  neuron-accel init --model qwen3-0.6b --data texts --instance trn1.32xlarge --global-batch 256 --yes
  neuron-accel init --model some/folder --data corpus.jsonl --instance cpu --nproc-per-node 2 --output try --yes
"""
CPU = "cpu"
FILES = ("train.yaml", "train.py", "model/config.json")


@dataclass(frozen=True)
class _Question:
    """What is asked for an option, and its default, which may depend on the answers before it."""

    name: str
    text: str
    default: Callable[[Mapping[str, Any]], Any]
    read: Callable[[str], Any] = str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("answers")
    asked.add_argument("--model", metavar="MODEL", help="what is trained (default: llama-3.2-1b)")
    asked.add_argument("--data", metavar="PATH", help="text to train on (default: data)")
    asked.add_argument("--instance", metavar="TYPE", help="instance type, or cpu (default: that of this machine)")
    asked.add_argument("--instances", type=int, metavar="N", help="number of instances (default: 1)")
    asked.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks, with --instance cpu (default: 2)")
    asked.add_argument("--global-batch", type=int, metavar="N", help="samples in a step, over all ranks")
    asked.add_argument("--sequence", type=int, metavar="N", help="tokens in a sample (default: at most 4096)")
    asked.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: 1000)")
    how = parser.add_argument_group("how it is done")
    how.add_argument(
        "--tokenizer", metavar="NAME", help="folder or name of the tokenizer (default: that of the model, else bytes)"
    )
    how.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="the folder (default: this one)")
    how.add_argument("--jobs", type=int, metavar="N", help="processes of the search (default: all cores)")
    how.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help=f"end the search after so long (default: {WITHIN:g}); 0: when nothing can be faster",
    )
    how.add_argument("--overwrite", action="store_true", help="replace files that exist")
    how.add_argument("-y", "--yes", action="store_true", help="ask nothing, and take the defaults")


def run(args: argparse.Namespace) -> int:
    present = [name for name in FILES if (args.output / name).exists()]
    if present and not args.overwrite:
        raise ConfigurationError(
            f"{', '.join(present)} exist in {args.output.absolute()}.", fix="pass --overwrite, or another --output"
        )
    answers = _answers(args)
    config, tokenizer, weights = _model(args, answers)
    question = _search_question(args, answers)
    show("searching layouts ...", sys.stderr)
    from neuron_accel_plan.auto_search import answer

    with contextlib.redirect_stdout(sys.stderr):
        found = answer(question)
    launch = _launch(args.output, answers)
    _write(args, answers, found, config, tokenizer, weights, launch)
    seconds, low, high = found["seconds"]
    predicted = f"{format_seconds(seconds)} a step are predicted ({format_seconds(low)} to {format_seconds(high)})"
    text = f"{found['layout']}, on {found['mesh']}: {predicted}, {format_bytes(found['memory'])} on the fullest rank"
    show("\n".join(wrap_words(text, terminal_width())))
    show(f"written: {', '.join(str(args.output / name) for name in FILES)}")
    if not Path(answers["data"]).exists():
        show(f"there is no {answers['data']} yet: put text there before you launch")
    show(f"launch:\n  {launch}")
    return 0


# ---- answers ---------------------------------------------------------------------------------------------------------
def _questions() -> list[_Question]:
    number = _positive
    return [
        _Question("model", "model, a name or a folder", lambda _: "llama-3.2-1b", _known_model),
        _Question("data", "text to train on, a file or a folder", lambda _: "data"),
        _Question("instance", "instance type, or cpu", lambda _: _this_machine(), _known_instance),
        _Question("nproc_per_node", "ranks", lambda got: 2 if got["instance"] == CPU else None, number),
        _Question("instances", "number of instances", lambda got: None if got["instance"] == CPU else 1, number),
        _Question("global_batch", "samples in a step, over all ranks", lambda got: 4 * _ranks(got), number),
        _Question("sequence", "tokens in a sample", _longest, number),
        _Question("steps", "optimizer steps", lambda _: 1000, number),
    ]


def _answers(args: argparse.Namespace) -> dict[str, Any]:
    got: dict[str, Any] = {}
    for question in _questions():
        given, default = getattr(args, question.name), question.default(got)
        if default is None:  # does not apply
            if given is not None:
                option = f"--{question.name.replace('_', '-')}"
                raise ConfigurationError(
                    f"{option} has no effect with --instance {got['instance']}.", fix="leave it out"
                )
            continue
        if given is not None:
            got[question.name] = question.read(str(given))
        elif args.yes:
            got[question.name] = question.read(str(default))
        else:
            got[question.name] = _asked(question, default)
    return got


def _asked(question: _Question, default: Any) -> Any:
    while True:
        try:
            typed = input(f"{question.text} [{default}]: ").strip()
            return question.read(typed or str(default))
        except EOFError:
            raise ConfigurationError(
                "The input ended before all questions were answered.", fix="pass --yes for the defaults"
            ) from None
        except ConfigurationError as error:
            show(str(error), sys.stderr)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{text!r} is not a number of at least 1.")
    return int(text)


def _known_model(text: str) -> str:
    from neuron_accel_plan.layout import _configuration

    _configuration(text)
    return text


def _known_instance(text: str) -> str:
    from neuron_accel import find_instance

    return text if text == CPU else find_instance(text).name


def _this_machine() -> str:
    from neuron_accel import find_instance

    try:
        product = Path("/sys/devices/virtual/dmi/id/product_name").read_text(errors="replace").strip()
        return find_instance(product).name
    except (OSError, NeuronAccelError):
        return CPU


def _ranks(got: Mapping[str, Any]) -> int:
    from neuron_accel import find_instance

    if got["instance"] == CPU:
        return int(got["nproc_per_node"])
    return int(find_instance(got["instance"]).cores() * got["instances"])


def _longest(got: Mapping[str, Any]) -> int:
    from neuron_accel_plan.layout import _configuration

    longest = getattr(_configuration(got["model"]), "max_position_embeddings", None)
    most = 128 if got["instance"] == CPU else 4096
    return min(most, longest) if isinstance(longest, int) and longest > 0 else most


def _model(args: argparse.Namespace, got: Mapping[str, Any]) -> tuple[Any, str | None, str | None]:
    """The configuration, the tokenizer, and the weights that the training begins with."""
    from neuron_accel_plan.layout import _configuration
    from neuron_accel_plan.models import known_models

    name, folder = str(got["model"]), Path(got["model"])
    config = _configuration(name)
    own = str(folder.absolute()) if folder.is_dir() else None if name.lower() in known_models() else name
    has = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    weights = own if any(file.endswith((".safetensors", ".safetensors.index.json")) for file in has) else None
    tokenizer = args.tokenizer
    if tokenizer is None and own is not None and (not has or any(file.startswith("tokenizer") for file in has)):
        tokenizer = own if not folder.is_file() else None
    return config, tokenizer, weights


def _dtype(got: Mapping[str, Any]) -> str:
    return "float32" if got["instance"] == CPU else "bfloat16"


# ---- the search, and what is written ---------------------------------------------------------------------------------
def _search_question(args: argparse.Namespace, got: Mapping[str, Any]) -> dict[str, Any]:
    from neuron_accel import find_instance
    from neuron_accel_plan.ranks import memory_of_cpu_rank

    ranks = _ranks(got)
    cpu = got["instance"] == CPU
    place = {"memory": memory_of_cpu_rank(ranks)} if cpu else {"instance": got["instance"]}
    if not cpu:
        place["lnc"] = find_instance(got["instance"]).logical()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return {
        "model": got["model"],
        "ranks": ranks,
        **place,
        "global_batch": got["global_batch"],
        "sequence": got["sequence"],
        "dtype": _dtype(got),
        "attention": "eager",
        "calibration": None,
        "reserve": None,
        "jobs": args.jobs or cores,
        "within": within_of(args),
    }


def _launch(output: Path, got: Mapping[str, Any]) -> str:
    script = shlex.quote(str(output / "train.py"))
    if got["instance"] == CPU:
        return f"neuron-accel launch --cpu --nproc-per-node {got['nproc_per_node']} {script}"
    each = _ranks(got) // got["instances"]
    several = f" --nnodes {got['instances']} --node-rank R --master-addr HOST" if got["instances"] > 1 else ""
    return f"neuron-accel launch --instance {got['instance']} --nproc-per-node {each}{several} {script}"


def _write(
    args: argparse.Namespace,
    got: Mapping[str, Any],
    found: Mapping[str, Any],
    config: Any,
    tokenizer: str | None,
    weights: str | None,
    launch: str,
) -> None:
    import yaml

    steps = got["steps"]
    values = {
        "title": f"{found['model']} ({found['parameters']:,} parameters)",
        "instance": f"{_ranks(got)} CPU ranks" if got["instance"] == CPU else f"{got['instances']} x {got['instance']}",
        "launch": launch,
        "model": 'HERE / "model"',
        "weights": repr(weights),
        "tokenizer": repr(tokenizer),
        "data": f"Path({str(Path(got['data']).absolute())!r})",
        "global_batch": got["global_batch"],
        "sequence": got["sequence"],
        "steps": steps,
        "warmup": max(1, steps // 20),
        "save_every": max(1, steps // 10),
        "dtype": _dtype(got),
    }
    template = (Path(__file__).parent / "train.py.template").read_text(encoding="utf-8")
    likely, low, high = map(format_seconds, found["seconds"])
    head = (
        f"# {values['title']} on {values['instance']}: {found['mesh']}, {found['layout']}\n"
        f"# predicted, not measured: {likely} a step ({low} to {high})\n"
        f"# a data-parallel rank calls the model with {found['rows']} samples of {got['sequence']} tokens\n"
    )
    try:
        (args.output / "model").mkdir(parents=True, exist_ok=True)
        config.save_pretrained(args.output / "model")
        configuration = head + yaml.safe_dump(found["configuration"], sort_keys=False)
        (args.output / "train.yaml").write_text(configuration, encoding="utf-8")
        (args.output / "train.py").write_text(string.Template(template).substitute(values), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{args.output} cannot be written: {error.strerror or error}.") from error

# SPDX-License-Identifier: Apache-2.0
"""``NeuronAccelerator(plugins="auto")``: rank 0 searches the layout of a training on the ranks that there are.

The search runs in a process of its own, without the environment of a rank: a dry run is a single process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from neuron_accel import errors, find_instance
from neuron_accel.commands import format_bytes, format_seconds, load_dataclass
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel_plan.plan_command import WITHIN
from neuron_accel_plan.ranks import memory_of_cpu_rank

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run

ONE_LINE = 'NeuronAccelerator(plugins="auto", plan_for={"model": config, "global_batch": 64, "sequence": 4096})'
_KEPT = ("NEURON_ACCEL_DISABLE_PLUGINS", "NEURON_ACCEL_TRUST")
_OF_A_RANK = (
    "ACCELERATE_",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
    "NEURON_",
    "PJRT_",
    "RANK",
    "ROLE_",
    "TORCHELASTIC_",
    "WORLD_",
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The keys of ``plan_for``.

    Args:
        model: what is trained: a model of transformers, its configuration, a folder with a ``config.json``, or the name
            of a popular model.
        global_batch: samples in an optimizer step, over all ranks.
        sequence: tokens in a sample.
        dtype: of the weights; by default that of the model, or of its configuration, else float32.
        attention: ``attn_implementation``; by default that of the configuration, if it names one, else "eager".
        calibration: a file of ``neuron-accel calibrate``; by default public constants of an instance, and
            assumed ones on CPU ranks (``cpu_machine`` of ``ranks.py``).
        reserve: bytes of a core that are left to what is not counted; by default 10%.
        jobs: the most processes of the search; by default as many as there are cores.
        within: seconds after which the search ends with what it has found, once a layout fits; 0: when nothing that is
            left can be faster.
    """

    model: Any
    global_batch: int
    sequence: int
    dtype: str | None = None
    attention: str | None = None
    calibration: str | None = None
    reserve: int | None = None
    jobs: int | None = None
    within: float = WITHIN


def choose(
    training: Mapping[str, Any],
    *,
    world_size: int,
    device: str,
    hardware: Any,
    accumulation: int = 1,
    recorded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the configuration of the fastest layout that fits, with an :class:`AutoLayout` that says why, and prints
    it.

    Args:
        training: the keys of :class:`Training`.
        world_size: number of ranks.
        device: type of their devices.
        hardware: limits of their instance; None: it is not known.
        accumulation: micro-batches of a step that the loop asks for: the search chooses them.
        recorded: the plan of the run that this one continues: its layout is kept if it was chosen for the same.

    Raises:
        ConfigurationError: if the model is not known, no layout fits, or there are no constants for these devices.
    """
    missing = [name for name in ("model", "global_batch", "sequence") if training.get(name) is None]
    if missing:
        raise ConfigurationError(
            f'plugins="auto" does not know {", ".join(missing)}.',
            where="plan_for",
            why="process counts, loaders and the model's shards depend on the layout, so it is chosen before `prepare` "
            "sees a model",
            fix=ONE_LINE,
        )
    if accumulation != 1:
        raise ConfigurationError(
            f'gradient_accumulation_steps={accumulation} is given, and plugins="auto" chooses it.',
            why="how many micro-batches a step needs depends on the layout",
            fix="leave it out, and read accelerator.gradient_accumulation_steps",
        )
    asked = load_dataclass(Training, training, "plan_for")
    with tempfile.TemporaryDirectory() as folder:
        question = _question(asked, Path(folder), world_size=world_size, device=device, hardware=hardware)
        named = {name: value for name, value in question.items() if name not in ("model", "jobs", "within")}
        kept = _kept(recorded, named)
        if kept is not None:
            found, why = kept, "the layout of the checkpoint that this run continues, chosen for the same training"
        else:
            found = _search(question)
            why = _reasons(found, question)
            if _answer_in(recorded) is not None:
                why += "; the last checkpoint's was chosen for other ranks or another training"
    configuration = found["configuration"]
    calls = configuration.get("gradient_accumulation_steps", 1)
    text = f'plugins="auto" is {found["layout"]}: {why}. A data-parallel rank calls the model with {found["rows"]} '
    text += f"samples of {asked.sequence} tokens" + (f", {calls} times in a step" if calls > 1 else "")
    print(textwrap.fill(f"neuron_accel: {text}", 120, subsequent_indent="  "), file=sys.stderr, flush=True)
    note = {"auto_layout": asdict(AutoLayout(question=named, answer=found, reasons=why))}
    return {**configuration, "plugins": [*configuration["plugins"], note]}


@dataclass(frozen=True, kw_only=True)
class AutoLayout(StrategyPlugin):
    """Records in the plan, and so in checkpoints, which layout was chosen for what and why, and warns if another
    training follows. :func:`choose` adds it.

    Args:
        question: what was asked.
        answer: the layout, and what was predicted for it and for the next ones.
        reasons: a sentence.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(name="auto_layout", api_version=4, phase=Phase.ADAPTATION)

    question: dict[str, Any] = field(hash=False)
    answer: dict[str, Any] = field(hash=False)
    reasons: str = ""

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        if "model" in run.state(self) or not model.optimizable:
            return
        run.state(self)["model"] = True
        planned, found = self.answer["parameters"], sum(parameter.numel() for parameter in model.original.parameters())
        if planned != found:
            _warn(run, f"the layout was chosen for a model of {planned:,} parameters, and this one has {found:,}")

    def transform_dataloader(self, dataloader: Any, run: Run) -> Any:
        size = getattr(dataloader, "total_batch_size", None)  # of all ranks; streams may not have one
        if size is not None and "loader" not in run.state(self):  # those after the first may be for evaluation
            calls = self.answer["configuration"].get("gradient_accumulation_steps", 1)
            if size * calls != self.question["global_batch"]:
                text = f"of {self.question['global_batch']} samples, and the first loader gives {size * calls}"
                _warn(run, f"the layout was chosen for steps {text} ({calls} micro-batches)")
        run.state(self)["loader"] = True
        return dataloader


def _warn(run: Run, text: str) -> None:
    if run.backend.rank == 0:
        warnings.warn(f'plugins="auto": {text}: give `plan_for` what is trained', stacklevel=2)


# ---- the question ----------------------------------------------------------------------------------------------------
def _question(asked: Training, folder: Path, *, world_size: int, device: str, hardware: Any) -> dict[str, Any]:
    """Everything that the search depends on, as plain data; the model's configuration is written into ``folder``."""
    model, dtype = asked.model, asked.dtype
    config = getattr(model, "config", model)
    if hasattr(model, "parameters"):
        dtype = dtype or str(next(model.parameters()).dtype).removeprefix("torch.")
    elif not isinstance(model, (str, os.PathLike)):
        dtype = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    name = str(config)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
        text = (folder / "config.json").read_text(encoding="utf-8")
        name, digest = str(folder), hashlib.sha256(text.encode()).hexdigest()
    elif isinstance(model, (str, os.PathLike)):
        digest = os.fspath(model)
    else:
        raise ConfigurationError(
            f'plugins="auto" cannot plan a {type(model).__name__}.',
            where="plan_for, model",
            why="layouts are searched for causal language models of transformers",
            fix="pass the model or its configuration, or give the plugins",
        )
    machine = _machine(device, hardware, world_size)
    return {
        "model": name,
        "configuration": digest,
        "ranks": world_size,
        **machine,
        "global_batch": asked.global_batch,
        "sequence": asked.sequence,
        "dtype": dtype or "bfloat16",
        "attention": asked.attention or getattr(config, "_attn_implementation", None) or "eager",
        "calibration": asked.calibration,
        "reserve": asked.reserve,
        "jobs": asked.jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1),
        "within": asked.within or None,
    }


def _machine(device: str, hardware: Any, world_size: int) -> dict[str, Any]:
    if hardware is not None:
        instance = find_instance(hardware.name.partition(" ")[0])
        lnc = next(degree for degree, ranks in instance.workers.items() if max(ranks) == hardware.full)
        return {"instance": instance.name, "lnc": lnc}
    if device == "cpu" or os.environ.get("PJRT_DEVICE") == "CPU":
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
        return {"memory": memory_of_cpu_rank(here)}
    raise ConfigurationError(
        f'plugins="auto" does not know the machine of {device} devices.',
        why="time and memory are predicted with the figures of an instance, or on CPU ranks with measured ones",
        fix="name the instance in the environment variable NEURON_ACCEL_INSTANCE, or give the plugins",
    )


def _answer_in(plan: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The options of the :class:`AutoLayout` of a plan."""
    found = (plan or {}).get("plugins", {}).get(AutoLayout.spec.name, {}).get("config")
    return found if isinstance(found, Mapping) else None


def _kept(recorded: Mapping[str, Any] | None, question: Mapping[str, Any]) -> dict[str, Any] | None:
    found = _answer_in(recorded)
    if found is None or found.get("question") != {**question}:
        return None
    answer = found.get("answer")
    return answer if isinstance(answer, dict) and {"configuration", "layout", "rows"} <= answer.keys() else None


def _search(question: Mapping[str, Any]) -> dict[str, Any]:
    environ = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_OF_A_RANK)}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "neuron_accel_plan.auto_search"],
        input=json.dumps(question),
        env=environ,
        capture_output=True,
        text=True,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ConfigurationError(
            f"The search of a layout ended with exit code {done.returncode}.", why=done.stderr.strip()[-1500:] or None
        ) from None
    if "error" in answer:
        _raise(answer["error"])
    return answer


def _raise(error: Mapping[str, Any]) -> NoReturn:
    kind = getattr(errors, error["kind"], NeuronAccelError)
    raise kind(error["what"], where=error["where"], why=error["why"], fix=error["fix"])


def _reasons(found: Mapping[str, Any], question: Mapping[str, Any]) -> str:
    where = question.get("instance")
    ranks = f"{question['ranks']} ranks of {where}" if where else f"{question['ranks']} CPU ranks"
    seconds, low, high = found["seconds"]
    total = 1 + len(found["others"]) + found["slower"] + found["left"]
    text = (
        f"the fastest of {total} layouts of {found['model']} that may fit {ranks}, {found['ruled_out']} are ruled out; "
    )
    text += f"{format_seconds(seconds)} a step are predicted ({format_seconds(low)} to {format_seconds(high)}), "
    text += f"{format_bytes(found['memory'])} on a rank"
    parts = sorted(found["parts"].items(), key=lambda part: -part[1])[:2]
    text += "".join(f", {share / seconds:.0%} {part}" for part, share in parts)
    if found["others"]:
        other = found["others"][0]
        text += f"; the next is {other['layout']} with {format_seconds(other['seconds'])}"
    if found["left"]:
        more = found["at_most_faster"]
        text += f"; {found['left']} were left when the search ended, "
        text += "of unknown time" if more is None else f"at most {more:.1%} faster"
    return text

"""Every family of transformers of a kind, causal text by default, or of diffusers, tiny, sharded over ranks against one
process, and the graphs of its step on XLA; writes the tables of families.

python -m tests.sweeps.families [--kind images] [--write docs/supported_models.md] [--layouts tp2 tp2+sp] [family ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from neuron_accel.models import Architecture
from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Tolerance, Trace, Training, compare, train_alone, train_on_rank
from tests.sweeps.tiny import KINDS, tiny_config, tiny_model

STEPS = 3
PP2 = {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
LAYOUTS = {
    "tp2": (2, [{"model_parallelism": {"tensor_parallel_size": 2}}]),
    "tp2+sp": (2, [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"]),
    "tp4, 2 key/value heads": (4, [{"model_parallelism": {"tensor_parallel_size": 4}}]),
    "tp2 x dp2 + zero1": (4, [{"model_parallelism": {"tensor_parallel_size": 2}}, "zero1"]),
    "pp2": (2, [PP2]),
    "pp2 x dp2 + fully_sharded, stage 2": (4, [PP2, "fully_sharded"]),
    "pp2 x dp2 + fully_sharded, stage 3": (4, [PP2, {"fully_sharded": {"reshard_after_forward": True}}]),
}
REPLICAS = {
    "data parallelism": (2, []),
    "ZeRO-1": (2, ["zero1"]),
    "fully sharded": (2, ["fully_sharded"]),
}
"""Layouts of other kinds than text by default."""
EXPERTS = {"experts over 2 ranks": (2, [{"expert_parallel": {"expert_parallel_size": 2}}])}
"""Layouts of mixtures alone, in the packages' names."""
PLANNED = "planned"
"""Not a layout: whether ``neuron-accel plan`` counts a step on tensor-parallel ranks of an instance."""
GRAPHS = {"graphs of zero1": (2, ["zero1"])}
"""Layouts whose graphs are checked instead, on XLA ranks."""
TOLERANCE = Tolerance(gradient=2e-4, weight=2e-4)
ROUNDING = 1e-6
"""Gradients of this size are noise: losses are about 5."""
TOO_LARGE = 10_000_000
"""Parameters of a model that did not become tiny."""
NOT_TRIED = (
    "not built tiny: ",
    "does not train tiny in one process: ",
    "has batch normalization, whose statistics are those of the samples of a rank",
    "samples of a batch see each other in one process, so that they have other losses on two ranks",
)
"""What a reason begins with if no layout was tried: it says nothing about support."""


def batches(model: torch.nn.Module, kind: str = "text") -> list[dict[str, torch.Tensor]]:
    """Three batches of four samples."""
    generator = torch.Generator().manual_seed(7)
    return [KINDS[kind].batch(model, generator) for _ in range(STEPS)]


def check(model_type: str, layouts: list[str], kind: str = "text") -> dict[str, str]:
    """``"ok"`` or the reason, by layout."""
    try:
        with torch.device("meta"):
            model = tiny_model(model_type, kind)
        drawn = batches(model, kind)
    except Exception as error:
        return dict.fromkeys(layouts, NOT_TRIED[0] + _last_line(error))
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > TOO_LARGE:
        return dict.fromkeys(layouts, f"{NOT_TRIED[0]}{size:,} parameters")
    if kind != "text" and any("BatchNorm" in type(module).__name__ for module in model.modules()):
        return dict.fromkeys(layouts, NOT_TRIED[2])
    if kind == "diffusion" and _mixes_samples(model_type, drawn[0]):
        return dict.fromkeys(layouts, NOT_TRIED[3])
    if all(layout.startswith("tp") for layout in layouts):
        try:
            plan_shards(Architecture.of(model), 2)
        except Exception as error:
            return dict.fromkeys(layouts, _last_line(error))
    if layouts == [PLANNED]:
        return {PLANNED: _planned(model_type)}
    build = functools.partial(_build, model_type, kind)
    try:
        reference = run_ranks(train_alone, 1, build, drawn, Training(), timeout=60)[0]
    except Exception as error:
        return dict.fromkeys(layouts, NOT_TRIED[1] + _last_line(error))
    return {
        layout: _findings(model_type, layout, drawn)
        if layout in GRAPHS
        else _compare(build, layout, drawn, reference, KINDS[kind].blocks(model))
        for layout in layouts
    }


def _build(model_type: str, kind: str = "text") -> torch.nn.Module:
    """A tiny model, which draws the same random numbers in every step: some route tokens to experts at random."""
    model = tiny_model(model_type, kind)
    model.register_forward_pre_hook(_seed)
    return model


def _mixes_samples(model_type: str, batch: dict[str, torch.Tensor]) -> bool:
    model = _build(model_type, "diffusion")
    with torch.no_grad():
        halves = [model(**{name: value[half] for name, value in batch.items()}) for half in (slice(2), slice(2, None))]
        return not torch.isclose(model(**batch), sum(halves) / 2, rtol=1e-4)


def _seed(model: torch.nn.Module, args: tuple[Any, ...]) -> None:
    torch.manual_seed(0)


def _compare(
    build: Any, layout: str, drawn: list[dict[str, torch.Tensor]], reference: Any, blocks: Sequence[str] = ()
) -> str:
    ranks, plugins = (LAYOUTS | EXPERTS | REPLICAS)[layout]
    if blocks and plugins == ["fully_sharded"]:
        plugins = [{"fully_sharded": {"modules": list(blocks)}}]
    try:
        trace = run_ranks(train_on_rank, ranks, build, drawn, {"plugins": plugins}, Training(), timeout=120)[0]
        compare(_without_zeros(reference, reference), _without_zeros(trace, reference), TOLERANCE)
    except AssertionError as error:
        return " ".join(str(error).split()[:24])
    except Exception as error:
        return _last_line(error)
    return "ok"


def _planned(model_type: str) -> str:
    from neuron_accel_plan import plan

    config = {"plugins": LAYOUTS["tp2"][1]}
    sizes = {"world_size": 2, "global_batch": 4, "sequence": 16}
    try:
        counted = plan(tiny_config(model_type), config=config, instance="trn1.2xlarge", **sizes)
        counted.predict()
    except Exception as error:
        return _last_line(error)
    return next((str(finding) for finding in counted.findings if finding.certain), "ok")


def _build_static(model_type: str) -> torch.nn.Module:
    """As above, without a cache of keys and values, and with experts that XLA can compile (docs/xla.md)."""
    model = _build(model_type)
    model.config.get_text_config().use_cache = False
    if getattr(model.config, "_experts_implementation", None) is not None and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def _findings(model_type: str, layout: str, drawn: list[dict[str, torch.Tensor]]) -> str:
    """What a check of the graphs of three steps finds. Reading the loss after each step is the sweep's own doing."""
    from neuron_accel_emulation import check_graphs

    build = functools.partial(_build_static, model_type)
    ranks, plugins = GRAPHS[layout]
    configuration = {"plugins": plugins, "backend": "xla"}
    try:
        report = check_graphs(
            train_on_rank,
            ranks,
            build,
            drawn,
            configuration,
            Training(),
            gradients=False,
            instance="trn1.2xlarge",
            timeout=300,
        )
    except Exception as error:
        return _last_line(error)
    found = [f"{finding.code}: {finding.what}" for finding in report.findings if finding.code != "host-read"]
    return "; ".join(dict.fromkeys(found))[:300] or "ok"


def _without_zeros(trace: Trace, reference: Trace) -> Trace:
    """``trace`` without the gradients that are zero but for rounding, those of a key's bias say, and without what an
    optimizer makes of them."""
    zero = {name for name, gradient in reference.gradients.items() if gradient.abs().max() <= ROUNDING}
    return replace(
        trace,
        gradients={name: value for name, value in trace.gradients.items() if name not in zero},
        weights={name: value for name, value in trace.weights.items() if name not in zero},
    )


def _last_line(error: Exception) -> str:
    """What an error says first, and why the runtime of the device ended the process, if it did."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    checks = [line.partition("Check failed")[2] for line in lines if "Check failed" in line]
    why = f" (the runtime's check failed{checks[0]})" if checks else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200] + why


NOTES = {
    "diffusion": """\
Each row is a class of diffusers. The loss is the squared error of the noise that a model finds, or of what an
autoencoder makes of its input, as in diffusers' training scripts. Fully sharded models have their blocks named, since
diffusers does not mark them, as in `modules=("down_blocks.*", "up_blocks.*")` or `modules="transformer_blocks.*"`
([more](guides/from-fsdp.md)). Tensor, sequence and pipeline parallelism have no plan for these models, and say so.""",
}
"""What else is said of a kind above its table."""

HEAD = f"""\
# Supported models

Models of transformers and diffusers, each built tiny and trained for {STEPS} steps in one process and sharded:
losses, gradients and weights must agree to rounding. Causal language models come first, then those for images, speech,
sequences to sequences, and diffusion. For graphs, three steps run on XLA ranks, and what they execute is checked as by
`neuron-accel precompile --check`. A family is "not tried" if no tiny model of it could be built, or trained in one
process, for the reason that is given: it may be supported. Written by `nox -s families families_graphs`.
"""


def title(layouts: list[str], kind: str = "text") -> str:
    return f"\n## {'' if kind == 'text' else f'{kind.capitalize()}: '}{' | '.join(layouts)}\n"


def earlier(path: Path, layouts: list[str], kind: str = "text") -> dict[str, dict[str, str]]:
    """The results that the document has of these layouts, by family; of several that failed all have the reason."""
    sections = path.read_text().split("\n## ") if path.exists() else []
    text = next((text for text in sections if text.startswith(title(layouts, kind).strip("\n# ") + "\n")), "")
    found = {}
    lines = text.splitlines()
    rule = next((number for number, line in enumerate(lines) if line.startswith("|---")), len(lines))
    for line in lines[rule + 1 :]:
        family, *marks, reason = (cell.strip() for cell in line.strip("|").split("|"))
        found[family] = {layout: "ok" if mark == "yes" else reason for layout, mark in zip(layouts, marks, strict=True)}
    return found


def table(results: dict[str, dict[str, str]], layouts: list[str], kind: str = "text") -> str:
    """The results as a section of the document."""
    tried = [result for result in results.values() if not all(value.startswith(NOT_TRIED) for value in result.values())]
    good = [result for result in tried if all(value == "ok" for value in result.values())]
    some = [result for result in tried if any(value == "ok" for value in result.values())]
    count = f"{len(good)} of {len(tried)} families that were tried pass"
    if len(layouts) > 1:
        count += f" every layout, {len(some)} at least one"
    count += f"; {len(results) - len(tried)} were not tried"
    lines = [
        title(layouts, kind),
        f"{count}.\n\n{NOTES[kind]}" if kind in NOTES else f"{count}.",
        "",
        "| family | " + " | ".join(layouts) + " | reason |",
        "|---" * (len(layouts) + 2) + "|",
    ]
    for family, result in results.items():
        marks = [_mark(result[layout]) for layout in layouts]
        reasons = dict.fromkeys(value for value in result.values() if value != "ok")
        lines.append(f"| {family} | {' | '.join(marks)} | {'; '.join(reasons).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _mark(value: str) -> str:
    return "yes" if value == "ok" else "not tried" if value.startswith(NOT_TRIED) else "no"


def write(path: Path, section: str, layouts: list[str], kind: str = "text") -> None:
    """Puts a section in the place of an earlier one of the same layouts, or at the end."""
    sections = path.read_text().split("\n## ")[1:] if path.exists() else []
    kept = [text for text in (f"\n## {text}" for text in sections) if not text.startswith(POPULAR_HEAD[:20])]
    place = next((number for number, text in enumerate(kept) if text.startswith(title(layouts, kind))), len(kept))
    kept[place : place + 1] = [section]
    path.write_text(HEAD + "".join(text.rstrip("\n") + "\n" for text in kept))
    body = path.read_text()[len(HEAD) :]
    path.write_text(HEAD + popular(path) + body)


POPULAR = {
    "Llama 2, 3": "llama",
    "Llama 4, text": "llama4_text",
    "Qwen2, Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Gemma 2": "gemma2",
    "Gemma 3, text": "gemma3_text",
    "Gemma 4, text": "gemma4_text",
    "Phi-3, Phi-4": "phi3",
    "GPT-OSS": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
    "Falcon": "falcon",
    "OLMo 2": "olmo2",
    "OLMoE": "olmoe",
    "StarCoder2": "starcoder2",
    "Granite": "granite",
    "SmolLM3": "smollm3",
    "GPT-2": "gpt2",
    "GPT-NeoX, Pythia": "gpt_neox",
    "BERT": "bert",
}
"""The families that the document begins with, and their ``model_type``."""
MIXTURES = ("llama4_text", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")
COLUMNS = {
    "tp": (["tp2", "tp2+sp"], "tp2"),
    "sp": (["tp2", "tp2+sp"], "tp2+sp"),
    "pp": (["pp2"], "pp2"),
    "experts": (list(EXPERTS), *EXPERTS),
    "graphs": (list(GRAPHS), *GRAPHS),
    "planned": ([PLANNED], PLANNED),
}
"""Of the first table, where in the others each column is from: the layouts of a section, and one of them."""
RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "models"


def popular(path: Path) -> str:
    """The first table of the document, from its other ones."""
    recipes = {json.loads(file.read_text())["model_type"] for file in RECIPES.glob("*.json")}
    results = {name: (earlier(path, layouts), layout) for name, (layouts, layout) in COLUMNS.items()}
    head = ["family", "`model_type`", *results, "recipe"]
    lines = [POPULAR_HEAD, f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, family in POPULAR.items():
        marks = [_mark(found[family][layout]) if family in found else "" for found, layout in results.values()]
        recipe = "[yes](recipes.md)" if family in recipes else ""
        lines.append(f"| {' | '.join([name, family, *marks, recipe])} |")
    return "\n".join(lines) + "\n"


POPULAR_HEAD = """
## Popular families

Tensor, sequence and pipeline parallelism (tp, sp, pp),
[experts over ranks](packages/neuron-accel-expert-parallel.md) of mixtures, graphs that the rules of the compiler accept
("no" of a mixture: it sorts, which is not documented as supported), whether `neuron-accel plan` counts it, and whether
there is a [recipe](recipes.md). Reasons are in the tables below.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument(
        "--layouts", nargs="+", choices=[*LAYOUTS, *EXPERTS, PLANNED, *GRAPHS, *REPLICAS], help="default: tp2 tp2+sp"
    )
    parser.add_argument("--kind", choices=KINDS, default="text", help="default: causal text")
    parser.add_argument("--popular", action="store_true", help="the popular families, or the mixtures among them")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    kind = options.kind
    options.layouts = options.layouts or (["tp2", "tp2+sp"] if kind == "text" else [*REPLICAS])
    torch.set_num_threads(1)
    tiny_model("llama")  # imports that threads must not make at once
    if kind == "diffusion":
        tiny_model("UNet2DModel", kind)
        # diffusers takes seconds to import: ranks are forked from a process that has done so
        parts = ("unets", "transformers", "autoencoders")
        modules = ["neuron_accel.testing._preload", *(f"diffusers.models.{part}" for part in parts)]
        multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
        forkserver.ensure_running()
    if options.popular:
        options.families = [name for name in POPULAR.values() if options.layouts != list(EXPERTS) or name in MIXTURES]
    families = options.families or KINDS[kind].families()
    results = {}
    jobs = 1 if options.layouts == [PLANNED] else options.jobs  # Accelerate has one state in a process
    with ThreadPoolExecutor(jobs) as pool:
        for family, result in zip(families, pool.map(lambda f: check(f, options.layouts, kind), families), strict=True):
            results[family] = result
            print(family, result, flush=True)
    if options.write:
        if options.families:  # the others stay
            results = dict(sorted((earlier(options.write, options.layouts, kind) | results).items()))
        write(options.write, table(results, options.layouts, kind), options.layouts, kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())

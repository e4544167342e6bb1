"""Every causal family of transformers, tiny, sharded over ranks against one process, and the graphs of its step on XLA;
writes the tables of families.

python -m tests.sweeps.families [--write docs/supported_models.md] [--layouts tp2 tp2+sp] [family ...]
"""

from __future__ import annotations

import argparse
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neuron_accel.models import Architecture
from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Tolerance, Trace, Training, compare, train_alone, train_on_rank
from tests.sweeps.tiny import VOCABULARY, causal_families, tiny_model

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
GRAPHS = {"graphs of zero1": (2, ["zero1"])}
"""Layouts whose graphs are checked instead, on XLA ranks."""
TOLERANCE = Tolerance(gradient=2e-4, weight=2e-4)
ROUNDING = 1e-6
"""Gradients of this size are noise: losses are about 5."""
TOO_LARGE = 5_000_000
"""Parameters of a model that did not become tiny."""
NOT_TRIED = ("not built tiny: ", "does not train tiny in one process: ")
"""What a reason begins with if no layout was tried: it says nothing about support."""


def batches() -> list[dict[str, torch.Tensor]]:
    """Three batches of four sequences of eleven tokens, which no degree divides."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(3, VOCABULARY, (4, 11), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


def check(model_type: str, layouts: list[str]) -> dict[str, str]:
    """``"ok"`` or the reason, by layout."""
    try:
        with torch.device("meta"):
            model = tiny_model(model_type)
    except Exception as error:
        return dict.fromkeys(layouts, NOT_TRIED[0] + _last_line(error))
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > TOO_LARGE:
        return dict.fromkeys(layouts, f"{NOT_TRIED[0]}{size:,} parameters")
    if all(layout.startswith("tp") for layout in layouts):
        try:
            plan_shards(Architecture.of(model), 2)
        except Exception as error:
            return dict.fromkeys(layouts, _last_line(error))
    build = functools.partial(_build, model_type)
    try:
        reference = run_ranks(train_alone, 1, build, batches(), Training(), timeout=60)[0]
    except Exception as error:
        return dict.fromkeys(layouts, NOT_TRIED[1] + _last_line(error))
    return {
        layout: _findings(model_type, layout) if layout in GRAPHS else _compare(build, layout, reference)
        for layout in layouts
    }


def _build(model_type: str) -> torch.nn.Module:
    """A tiny model, which draws the same random numbers in every step: some route tokens to experts at random."""
    model = tiny_model(model_type)
    model.register_forward_pre_hook(_seed)
    return model


def _seed(model: torch.nn.Module, args: tuple[Any, ...]) -> None:
    torch.manual_seed(0)


def _compare(build: Any, layout: str, reference: Any) -> str:
    ranks, plugins = LAYOUTS[layout]
    try:
        trace = run_ranks(train_on_rank, ranks, build, batches(), {"plugins": plugins}, Training(), timeout=120)[0]
        compare(_without_zeros(reference, reference), _without_zeros(trace, reference), TOLERANCE)
    except AssertionError as error:
        return " ".join(str(error).split()[:24])
    except Exception as error:
        return _last_line(error)
    return "ok"


def _build_static(model_type: str) -> torch.nn.Module:
    """As above, without a cache of keys and values, and with experts that XLA can compile (docs/xla.md)."""
    model = _build(model_type)
    model.config.get_text_config().use_cache = False
    if getattr(model.config, "_experts_implementation", None) is not None and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def _findings(model_type: str, layout: str) -> str:
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
            batches(),
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


HEAD = f"""\
# Supported models

Causal language models of transformers, each built tiny from its configuration class and trained for {STEPS} steps in
one process and sharded: losses, gradients and weights must agree to rounding. For graphs, three steps run on XLA ranks,
and what they execute is checked as by `neuron-accel precompile --check`. A family is "not tried" if no tiny model of it
could be built, or trained in one process, for the reason that is given: it may be supported. Written by
`nox -s families families_graphs`.
"""


def title(layouts: list[str]) -> str:
    return f"\n## {' | '.join(layouts)}\n"


def table(results: dict[str, dict[str, str]], layouts: list[str]) -> str:
    """The results as a section of the document."""
    tried = [result for result in results.values() if not all(value.startswith(NOT_TRIED) for value in result.values())]
    good = [result for result in tried if all(value == "ok" for value in result.values())]
    some = [result for result in tried if any(value == "ok" for value in result.values())]
    count = f"{len(good)} of {len(tried)} families that were tried pass"
    if len(layouts) > 1:
        count += f" every layout, {len(some)} at least one"
    count += f"; {len(results) - len(tried)} were not tried"
    lines = [
        title(layouts),
        f"{count}.",
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


def write(path: Path, section: str, layouts: list[str]) -> None:
    """Puts a section in the place of an earlier one of the same layouts, or at the end."""
    sections = path.read_text().split("\n## ")[1:] if path.exists() else []
    kept = [f"\n## {text}" for text in sections]
    kept = [text for text in kept if not text.startswith(title(layouts))]
    path.write_text(HEAD + "".join(text.rstrip("\n") + "\n" for text in (*kept, section)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, *GRAPHS], default=["tp2", "tp2+sp"])
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tiny_model("llama")  # imports that threads must not make at once
    families = options.families or causal_families()
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for family, result in zip(families, pool.map(lambda f: check(f, options.layouts), families), strict=True):
            results[family] = result
            print(family, result, flush=True)
    if options.write:
        write(options.write, table(results, options.layouts), options.layouts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

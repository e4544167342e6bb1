"""Writes the recipes from table.py: the YAML files, models' configurations, and the tables of docs/recipes.md.

python make.py                      writes all files; predictions are those of predicted.json
python make.py --count qwen3-8b     counts recipes whose name begins so by `neuron-accel plan`, into predicted.json
python make.py --count ""           counts all of them: about ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import yaml
from table import MODELS, RECIPES, Recipe

from neuron_accel import find_instance, plan
from neuron_accel.cli.main import main as neuron_accel

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "recipes.md"
PREDICTED = HERE / "predicted.json"
PRICES = json.loads((HERE / "prices.json").read_text())
FIGURES = ["GiB of a core", "s a step", "tokens/s", "instance hours for 1 B tokens", "USD for 1 B tokens"]
PUBLISHED = """\
### Published layouts

Layouts that AWS publishes for these instances, with its batch and sequence where it names them. The figure in
parentheses is with `regather=False`: the gathered inputs of attention and feed-forward are kept, which
[`SequenceParallelPlugin`](tensor_parallel.md#gathering-again) gathers again by default. Of TorchTitan Neuron's
families, GPT-OSS has the recipe [above](#gpt-oss-20b), with TP4 and experts over 8 ranks. Beside experts in parallel,
fully sharded experts are sharded over the ranks that hold the same ones, and everything else over all data-parallel
ranks. That of Llama 3.1 70B on trn2.48xlarge is tight: it leaves 6% of a core, not the 10% that `neuron-accel plan`
reserves. Tests train these layouts with tiny models, those of trn2 and GPT-OSS also on the stand-in for the
native device."""
NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest"
OVERLAP = f"""\
Collectives beside computation, as published: in a graph the compiler orders them.
[AWS]({NEURON}/neuron-runtime/explore/compute-comm-overlap.html)
says that it gathers fully sharded weights as early as possible and reduces their gradients at the end of the backward
pass, that experimental settings move both by a layer or more, and that collectives of tensor parallelism cannot be
overlapped effectively so far. Those of SimpleFSDP
[are in the graph]({NEURON}/training/torchtitan/tutorials/tutorial-simple-fsdp-training.html), too. `fully_shard`, of
the Qwen3 layout, gathers ahead [by PyTorch's default](https://github.com/pytorch/pytorch/pull/128884). For other
computation AWS's [guide]({NEURON}/torch/guides/torch-distributed.html) has HostCC and streams.

Here, fully sharded weights are gathered [one block ahead](guides/from-fsdp.md) (`prefetch=1`), and gradients are
reduced during the backward pass (`overlap=True`). With sequence parallelism an input that is gathered again travels
while its gradient is computed, and this gradient while those of the weights are. The first gather is overlapped only
with [`overlap_gather=True`](tensor_parallel.md#overlapping-the-gather), which none of these layouts sets. With
torch_xla, as on trn1, the compiler orders all of it."""
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def written_part(name: str) -> re.Pattern[str]:
    """What lies between two comments of the page."""
    return re.compile(
        rf"(?<=<!-- {name}, written by examples/recipes/make.py -->\n).*(?=<!-- end of {name} -->)", re.DOTALL
    )


def ranks(recipe: Recipe) -> int:
    return recipe.instances * find_instance(recipe.instance).cores()


def counted_as(recipe: Recipe) -> dict[str, Any]:
    """What a prediction depends on."""
    return {
        "config": MODELS[recipe.model].config,
        "ranks": ranks(recipe),
        "global_batch": recipe.global_batch,
        "sequence": recipe.sequence,
        "instance": recipe.instance,
        "accelerator": recipe.accelerator(),
    }


def count(recipe: Recipe) -> dict[str, Any]:
    """What `neuron-accel plan` says about a recipe."""
    with tempfile.TemporaryDirectory() as folder:
        model, config = Path(folder, "config.json"), Path(folder, "train.yaml")
        model.write_text(json.dumps(MODELS[recipe.model].config))
        config.write_text(yaml.safe_dump(recipe.accelerator()))
        command = f"plan --model {model} --config {config} --world-size {ranks(recipe)} --json"
        command += f" --global-batch {recipe.global_batch} --sequence {recipe.sequence} --instance {recipe.instance}"
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            neuron_accel(command.split())
        found = json.loads(said.getvalue())
        kept = {}
        if recipe.published and recipe.tp > 1:
            plugins = [
                {each: {"regather": False}} if each == "sequence_parallel" else each for each in recipe.plugins()
            ]
            without = found["memory"]["total"]
            if plugins != recipe.plugins():
                counted = plan(
                    model,
                    config={"plugins": plugins},
                    world_size=ranks(recipe),
                    global_batch=recipe.global_batch,
                    sequence=recipe.sequence,
                    accumulation=recipe.accumulation,
                    instance=recipe.instance,
                )
                without = counted.step.peak.total
            kept = {"memory_without_regather": without}
    return {
        "mesh": found["mesh"],
        "parameters": found["parameters"],
        "memory": found["memory"]["total"],
        "core": found["core_bytes"],
        "seconds": [found["time"][each] for each in ("seconds", "low", "high")],
        **kept,
        "of": counted_as(recipe),
    }


def recipe_text(recipe: Recipe, predicted: dict[str, Any] | None) -> str:
    """A YAML file."""
    model = MODELS[recipe.model]
    task = "pre-training" if recipe.task == "pretrain" else "LoRA fine-tuning"
    many = f"{recipe.instances} x " if recipe.instances > 1 else ""
    values = {
        "model": f"../models/{recipe.model}.json",
        "instance": recipe.instance,
        "instances": recipe.instances,
        "sequence": recipe.sequence,
        "global_batch": recipe.global_batch,
        **recipe.training,
    }
    lines = [
        f"# {model.title}, {task} on {many}{recipe.instance}: {ranks(recipe)} ranks.",
        *(
            []
            if predicted is None
            else [
                f"# Predicted by neuron-accel plan, not measured: {sentence(recipe, predicted)};",
                f"# {price_sentence(recipe, predicted)}.",
            ]
        ),
        "# Written by make.py from table.py. Copy this file to change it.",
        *(f"{name}: {value}" for name, value in values.items()),
        "accelerator:",
        *(f"  {name}: {value}" for name, value in recipe.accelerator().items() if name != "plugins"),
        "  plugins:",
        *(f"    - {entry}" for entry in map(flow, recipe.plugins())),
    ]
    return "\n".join(lines) + "\n"


def flow(entry: str | dict[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    ((name, options),) = entry.items()
    return f"{name}: " + yaml.safe_dump(options, default_flow_style=True, width=1000, sort_keys=False).strip()


def instance_hours(recipe: Recipe, seconds: float) -> float:
    """For a billion tokens, if a step takes that long."""
    return recipe.instances * 1e9 / (recipe.global_batch * recipe.sequence) * seconds / 3600


def dollars(recipe: Recipe, seconds: float) -> str:
    """Price of a billion tokens, in three digits."""
    price = instance_hours(recipe, seconds) * PRICES[recipe.instance]["usd_per_hour"]
    return f"{float(f'{price:.3g}'):,.0f}"


def sentence(recipe: Recipe, predicted: dict[str, Any]) -> str:
    likely, low, high = predicted["seconds"]
    memory, core = predicted["memory"] / 2**30, predicted["core"] >> 30
    return f"{memory:.1f} of {core} GiB on the fullest core, {likely:.3g} s a step ({low:.3g} to {high:.3g})"


def price_sentence(recipe: Recipe, predicted: dict[str, Any]) -> str:
    likely, low, high = (dollars(recipe, seconds) for seconds in predicted["seconds"])
    price = PRICES[recipe.instance]["usd_per_hour"]
    return f"{likely} USD for a billion tokens ({low} to {high}), at {price} USD for an hour of an instance"


def price_table() -> str:
    """What an hour of each type of instance costs, and where that is listed."""
    rows = []
    for name, price in PRICES.items():
        how = f"[{price['bought']}]({price['source']})"
        rows.append([name, f"{price['usd_per_hour']:.2f}", how, price["region"], price["listed"]])
    return table("instance", "USD for an hour", "bought", "region", "listed", rows=rows)


def tables(predicted: dict[str, Any]) -> str:
    """Sections of the page, one for each model."""
    parts = []
    for key, model in MODELS.items():
        rows = [
            row(recipe, predicted.get(f"{recipe.model}/{recipe.name}"))
            for recipe in RECIPES
            if recipe.model == key and not recipe.published
        ]
        if rows:
            parts += [
                f"### {model.title}",
                textwrap.fill(
                    f"[`{model.hub}`](https://huggingface.co/{model.hub}). {model.remark}", 130, **WHOLE_WORDS
                ),
                table("recipe", "instances", "mesh", *FIGURES, rows=rows),
            ]
    published = [recipe for recipe in RECIPES if recipe.published]
    rows = [published_row(recipe, predicted.get(f"{recipe.model}/{recipe.name}")) for recipe in published]
    head = ["layout", "instances", "mesh", "data parallel, recomputed", f"{FIGURES[0]} (kept)", FIGURES[1], FIGURES[-1]]
    where = "They are published by:\n\n" + "\n".join(map(source, published))
    return "\n\n".join([*parts, PUBLISHED, table(*head, rows=rows), where, OVERLAP])


def table(*head: str, rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def published_name(recipe: Recipe) -> str:
    """The model and the instance, which no two published layouts share."""
    return f"{MODELS[recipe.model].title.partition(' (')[0]}, {recipe.instance.partition('.')[0]}"


def source(recipe: Recipe) -> str:
    """Who has published a layout, and what differs there: an entry of a list."""
    there = f"; it {recipe.theirs}" if recipe.theirs else ""
    return f"- {published_name(recipe)}: {recipe.published}{there}"


def published_row(recipe: Recipe, predicted: dict[str, Any] | None) -> list[str]:
    _, where, mesh, memory, times, _, _, price = row(recipe, predicted)
    link = f"[{published_name(recipe)}](../examples/recipes/{recipe.model}/{recipe.name}.yaml)"
    kept = (predicted or {}).get("memory_without_regather")
    memory += "" if kept is None else f" ({kept / 2**30:.1f})"
    kind = "ZeRO-1" if not recipe.fully_sharded else "hybrid sharded" if recipe.instances > 1 else "fully sharded"
    return [link, where, mesh, f"{kind}, {'blocks' if recipe.recompute else 'scores'}", memory, times, price]


def row(recipe: Recipe, predicted: dict[str, Any] | None) -> list[str]:
    path = f"{recipe.model}/{recipe.name}"
    link = f"[{recipe.name}](../examples/recipes/{path}.yaml)"
    where = str(recipe.instances)
    if predicted is None:
        return [link, where, "not counted", "", "", "", "", ""]
    likely, low, high = predicted["seconds"]
    rate = recipe.global_batch * recipe.sequence / likely
    hours = instance_hours(recipe, likely)
    price = f"{dollars(recipe, likely)} ({dollars(recipe, low)}-{dollars(recipe, high)})"
    memory = f"{predicted['memory'] / 2**30:.1f} of {predicted['core'] >> 30}"
    times = f"{likely:.3g} ({low:.3g}-{high:.3g})"
    return [link, where, predicted["mesh"], memory, times, f"{rate:,.0f}", f"{hours:,.0f}", price]


def files() -> dict[Path, str]:
    """Every file that is written, and its text."""
    predicted = json.loads(PREDICTED.read_text())
    found = {
        HERE / "models" / f"{key}.json": json.dumps(model.config, indent=1) + "\n" for key, model in MODELS.items()
    }
    for recipe in RECIPES:
        name = f"{recipe.model}/{recipe.name}"
        found[HERE / f"{name}.yaml"] = recipe_text(recipe, predicted.get(name))
    page = written_part("tables").sub(lambda _: f"\n{tables(predicted)}\n\n", PAGE.read_text())
    found[PAGE] = written_part("prices").sub(lambda _: f"\n{price_table()}\n\n", page)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", metavar="NAME", help="count the recipes whose name begins so first")
    options = parser.parse_args()
    if options.count is not None:
        for recipe in RECIPES:
            name = f"{recipe.model}/{recipe.name}"
            if name.startswith(options.count):
                counted = json.loads(PREDICTED.read_text()) | {name: count(recipe)}
                PREDICTED.write_text(json.dumps(dict(sorted(counted.items())), indent=1) + "\n")
                print(f"{name}: {sentence(recipe, counted[name])}")
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains the quickstart's model with data parallelism and on two islands, and plots the losses.

    python convergence.py --output out --plot convergence.svg

runs ``examples/quickstart/train.py`` of the repository on two ranks, once for each variant; one that has run already
into the same folder is read from there. Prints the loss on held-out text for each, and by how much it differs from that
of data parallelism with the same seed and learning rate; with several ``--seeds``, means and ranges. Writes a plot of
the first seed. Options of the quickstart follow ``--``; these try it out in a minute:

    python convergence.py --output try --plot try.svg -- --steps 8 --hidden-size 32 --corpus-share 0.02 --vocab-size 300
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[2] / "examples" / "quickstart" / "train.py"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train on two ranks.

    Args:
        name: folder of the run.
        title: name in the plot.
        color: of the line.
        learning_rate: of the inner optimizer, AdamW.
        options: of the plugin ``local_sgd``; empty for data parallelism.
    """

    name: str
    title: str
    color: str
    learning_rate: float
    options: dict[str, Any] = field(default_factory=dict)


ISLANDS = {"islands": 2, "inner_steps": 16}
VARIANTS = (
    Variant(name="data-parallel-0.002", title="data parallel, 0.002", color="#444444", learning_rate=0.002),
    Variant(name="data-parallel-0.004", title="data parallel, 0.004", color="#aaaaaa", learning_rate=0.004),
    Variant(name="local-0.002", title="local SGD, 0.002", color="#9ecae1", learning_rate=0.002, options=ISLANDS),
    Variant(name="local-0.004", title="local SGD, 0.004", color="#1f77b4", learning_rate=0.004, options=ISLANDS),
    Variant(
        name="post-local-0.004",
        title="post-local SGD, 0.004",
        color="#d62728",
        learning_rate=0.004,
        options={**ISLANDS, "warmup_steps": 96},
    ),
)
"""The first is the quickstart as it is."""


def configuration(variant: Variant) -> dict[str, Any]:
    """Returns the accelerator's configuration. The plugin is named by its class, which is found in a checkout, too."""
    plugins = [{"neuron_accel_local_sgd:LocalSGDPlugin": variant.options}] if variant.options else []
    return {"mixed_precision": "no", "plugins": plugins}


def train(variant: Variant, seed: int, output: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Trains one variant from the weights and in the order of one seed, unless its history is there already.

    Returns:
        The history that the quickstart writes: ``losses`` of each step, ``evaluation_loss``.
    """
    folder = output / f"{variant.name}-seed{seed}"
    history = folder / "history.json"
    if not history.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(json.dumps(configuration(variant)))  # JSON is YAML
        chosen = ["--learning-rate", str(variant.learning_rate), "--seed", str(seed)]
        launch = [sys.executable, "-m", "neuron_accel.cli.main", "launch", "--nproc-per-node", "2", str(QUICKSTART)]
        subprocess.run([*launch, "--config", str(config), "--output", str(folder), *chosen, *arguments], check=True)
    return json.loads(history.read_text())


def table(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns a line for each variant: its loss, and the difference from data parallelism at its learning rate.

    Args:
        losses: by the names of variants, the loss on held-out text with each seed.
    """
    lines = []
    for variant in VARIANTS:
        same = next(each for each in VARIANTS if not each.options and each.learning_rate == variant.learning_rate)
        mine = losses[variant.name]
        apart = [loss / other - 1 for loss, other in zip(mine, losses[same.name], strict=True)]
        spread = f" ({min(apart):+.2%} to {max(apart):+.2%})" if len(apart) > 1 else ""
        lines.append(f"{variant.title:22} {fmean(mine):.4f}  {fmean(apart):+.2%}{spread}")
    return lines


# ---- the plot --------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 16, 16, 44


def smoothed(losses: Sequence[float], steps: int = 8) -> list[tuple[float, float]]:
    """Means over ``steps`` steps, each with the step in their middle."""
    groups = [losses[at : at + steps] for at in range(0, len(losses), steps)]
    return [(at * steps + (len(group) + 1) / 2, sum(group) / len(group)) for at, group in enumerate(groups)]


def plot(lines: Sequence[tuple[Variant, dict[str, Any]]]) -> str:
    """Returns the losses as an SVG."""
    points = {variant.name: smoothed(history["losses"]) for variant, history in lines}
    last = max(len(history["losses"]) for _, history in lines)
    values = [loss for line in points.values() for _, loss in line]
    low, high = int(min(values) * 2) / 2, int(max(values) * 2 + 1) / 2

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        "<title>Training loss of the quickstart's model by optimizer step</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for half in range(round(low * 2), round(high * 2) + 1):
        at = y(half / 2)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{half / 2:.1f}</text>')
    for quarter in range(5):
        step = last * quarter / 4
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">optimizer step</text>')
    for at, (variant, history) in enumerate(lines):
        path = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in points[variant.name])
        parts.append(f'<path d="M{path}" fill="none" stroke="{variant.color}" stroke-width="2"/>')
        top, left = TOP + 16 + 18 * at, WIDTH - 300
        parts.append(f'<path d="M{left} {top - 4}h24" stroke="{variant.color}" stroke-width="2"/>')
        text = f"{variant.title}: {history['evaluation_loss']:.3f} on held-out text"
        parts.append(f'<text x="{left + 32}" y="{top}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights and order (default: 0)")
    parser.add_argument("--plot", type=Path, default=HERE / "convergence.svg", help="file of the plot")
    parser.add_argument("rest", nargs="*", help="options of the quickstart, after --")
    options = parser.parse_args()
    histories = {
        variant.name: [train(variant, seed, options.output, options.rest) for seed in options.seeds]
        for variant in VARIANTS
    }
    losses = {name: [history["evaluation_loss"] for history in found] for name, found in histories.items()}
    print("\n".join(table(losses)))
    options.plot.write_text(plot([(variant, histories[variant.name][0]) for variant in VARIANTS]))


if __name__ == "__main__":
    main()

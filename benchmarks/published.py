"""Predicted step times beside the training rates that AWS publishes for its instances.

Usage: ``python -m benchmarks.published [--write]``. Counts every run of ``published_runs.json`` by dry runs (a few
minutes, no accelerator), and prints the table of docs/guides/planning.md. ``--write`` replaces the table, and the
predictions that ``neuron-accel plan`` takes its interval from. Which runs calibrate is decided by the rule in that
file, before any prediction.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from neuron_accel_plan import published

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "planning.md"
BEGIN, END = "<!-- published runs, written by benchmarks/published.py -->\n", "<!-- end of published runs -->\n"


def predictions() -> dict[str, dict[str, float]]:
    """Seconds of a step, likely and bounds by the assumptions, by the name of the run."""
    found = {}
    for run in (run for of in published.runs().values() for run in of):
        time = published.predict_run(run)
        found[run.name] = {key: float(f"{getattr(time, key):.4g}") for key in ("seconds", "low", "high")}
    return found


def table() -> str:
    """The comparison as Markdown, from the files."""
    predicted = json.loads(published.PREDICTIONS.read_text(encoding="utf-8"))
    lines = [
        "| run | instances | release | published, s a step | predicted, by assumptions | published / predicted | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for instance, of in published.runs().items():
        compared = published.compared()[instance]
        for number, run in enumerate(of):
            seconds = "{seconds:.3g} ({low:.3g}-{high:.3g})".format(**predicted[run.name])
            ratio = compared.ratios[run.name]
            inside = "inside" if compared.low <= ratio <= compared.high else "outside"
            use = "calibrates" if number < published.CALIBRATING else f"tests: {inside}"
            cells = [
                run.name,
                f"{run.instances} x {instance}",
                f"[{run.release}]({run.source})",
                f"[{run.seconds:.3g}]({run.layout})",
                seconds,
                f"{ratio:.2f}",
                use,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        low, high = min(compared.tested), max(compared.tested)
        lines += [
            "",
            f"On {instance} those that calibrate give {compared.low:.2f} to {compared.high:.2f} times the predicted",
            f"time; {compared.inside} of the {len(compared.tested)} others are inside, at {low:.2f} to {high:.2f}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the predictions and the table of the page")
    options = parser.parse_args()
    found = predictions()
    if options.write:
        published.PREDICTIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
    else:
        print(json.dumps(found, indent=1))
    print(table())


if __name__ == "__main__":
    main()

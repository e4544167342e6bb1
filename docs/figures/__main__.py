"""``python -m docs.figures [--count] [--train] [--report]``: draws the pictures; before that counts or measures their
numbers, or takes screenshots anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs.figures import charts, concepts, screens

FIGURES = {
    **{name: getattr(concepts, name) for name in ("overview", "mesh", "plan", "layout", "phases", "owners", "step")},
    **{name: getattr(charts, name) for name in ("memory", "timeline", "loss")},
    "report-terminal": screens.report_terminal,
    "plan-terminal": screens.plan_terminal,
}
IMAGES = Path(__file__).parents[1] / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="count memory and predict a step anew, by dry runs")
    parser.add_argument("--train", action="store_true", help="measure losses anew, on CPU ranks")
    parser.add_argument("--report", action="store_true", help="take screenshots anew; trains, and needs Chromium")
    options = parser.parse_args()
    if options.count:
        charts.write("memory", charts.count_memory())
        charts.write("timeline", charts.predict_step())
    if options.train:
        charts.write("loss", charts.measure_losses())
    if options.report:
        screens.record()
    for name, draw in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()

"""Screenshots. What a terminal of 80 columns showed is text beside this file, of which pictures are drawn; pages are
pictures by a browser. ``python -m docs.figures --report`` trains the runs that they show, and takes all of them anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docs.figures.drawing import GREY, PALE, Picture

FOLDER = Path(__file__).parent
IMAGES = FOLDER.parent / "images"
SCRIPT = "train.py"
"""What docs/figures/reported.py is called in the runs that are shown."""
CONFIG = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
PLAN = "plan --model config.json --world-size 32 --global-batch 64 --sequence 2048 --tensor-parallel-size 4 --zero-1"
PLAN += " --sequence-parallel --recompute --instance trn1.32xlarge"
PAGES = {
    "report-page": ("one.html", None, 1000),
    "report-ranks": ("one.html", "Ranks that others waited for", 620),
    "report-two-runs": ("two.html", "Loss", 780),
    "plan-page": ("plan.html", None, 786),
}
"""Pictures of pages: the page, the heading at the top and the height in pixels."""


def record() -> None:
    """Trains, and writes the text of terminals and the pictures of pages."""
    from tests.unit.cli.screen import capture

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(FOLDER / "reported.py", folder / SCRIPT)
        shutil.copy(FOLDER.parents[1] / "LICENSE", folder)
        _run(
            folder,
            "plan",
            SCRIPT,
            "--nproc-per-node",
            "4",
            "--json",
            "--",
            "--tensor-parallel-size",
            "2",
            to="plan.json",
        )
        tensor = ["--folder", "tensor-parallel", "--tensor-parallel-size", "2", "--predicted", "plan.json"]
        _run(folder, "launch", "--cpu", "--nproc-per-node", "4", SCRIPT, *tensor, "--late", "2", "40")
        _run(folder, "launch", "--cpu", "--nproc-per-node", "4", SCRIPT, "--folder", "data-parallel")
        _run(folder, "report", "tensor-parallel", "-q", "-o", "one.html")
        _run(folder, "report", "tensor-parallel", "data-parallel", "-q", "-o", "two.html")
        lines = {"report": capture(["report", str(folder / "tensor-parallel"), "--text"], 80)[1], "plan": plan(folder)}
        (FOLDER / "screens.json").write_text(json.dumps(lines, indent=1) + "\n")
        _photograph(folder)


def plan(folder: Path) -> list[str]:
    """What ``neuron-accel plan`` shows of a layout; also writes its page."""
    from tests.unit.cli.screen import capture

    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = [str(folder / word) if word == "config.json" else word for word in PLAN.split()]
    return capture([*words, "--html", str(folder / "plan.html")], 80)[1]


def _run(folder: Path, *words: str, to: str | None = None) -> None:
    command = [sys.executable, "-m", "neuron_accel.cli.main", *words]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE if to else None, text=True)
    if to:
        (folder / to).write_text(done.stdout)


def _photograph(folder: Path) -> None:
    from tests.browser import browser, resize, screenshot

    with browser() as driver:
        for name, (page, heading, height) in PAGES.items():
            resize(driver, 860, height)
            driver.get((folder / page).as_uri())
            if heading:
                _heading(driver, heading)
            screenshot(driver, IMAGES / f"{name}.png", full=False)


def _heading(driver: Any, text: str) -> None:
    """Scrolls a heading to the top of the window."""
    script = "[...document.querySelectorAll('h2')].find(h => h.textContent === arguments[0]).scrollIntoView()"
    driver.execute_script(script, text)


def terminal(name: str, title: str) -> Picture:
    """What a terminal of 80 columns showed."""
    lines = json.loads((FOLDER / "screens.json").read_text())[name]
    while lines and not lines[-1]:
        lines.pop()
    step = 17
    picture = Picture(704, 62 + step * len(lines) + 12, f"A terminal: {title}")
    picture.box(0.5, 0.5, 703, 61 + step * len(lines) + 11, fill=PALE, r=8)
    picture.text(20, 28, f"$ {title}", mono=True, size=13, bold=True)
    picture.path("M0 42 H704", GREY, weight=0.5)
    picture.lines(20, 64, lines, step=step, size=13, mono=True)
    return picture


def report_terminal() -> Picture:
    return terminal("report", "neuron-accel report tensor-parallel --text")


def plan_terminal() -> Picture:
    return terminal("plan", "neuron-accel plan --model config.json --world-size 32 ...")

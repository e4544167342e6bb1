"""The tutorial, followed as a reader would: its files are written, its commands run, and they print what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"(?:^\*\*`(?P<name>[^`]+)`\*\*\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


class Step(NamedTuple):
    """A fenced block: a file if it has a name, else commands or what they print."""

    name: str | None
    language: str
    text: str


def steps() -> list[Step]:
    found = STEP.finditer((ROOT / "docs/tutorial.md").read_text())
    return [Step(match["name"], match["language"], match["text"]) for match in found]


INSTALL, *FOLLOWED = steps()


def run(command, folder):
    words = command.split()
    program = {"python": [sys.executable], "neuron-accel": [sys.executable, "-m", "neuron_accel.cli.main"]}[words[0]]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def numbers(text):
    return [float(number) for number in re.findall(r"^loss ([\d.]+)$", text, re.MULTILINE)]


@pytest.mark.timeout(300)
def test_the_tutorial_can_be_followed(tmp_path):
    said = None
    for step in FOLLOWED:
        if step.name:
            (tmp_path / step.name).write_text(step.text)
        elif step.language == "console":
            said = "".join(run(command, tmp_path) for command in step.text.splitlines())
        else:
            assert step.language == "text"
            shown = [line for line in step.text.splitlines() if not line.startswith("loss")]
            assert [line for line in shown if line not in said] == []
            assert numbers(said) == pytest.approx(numbers(step.text), abs=0.01)
    assert (tmp_path / "neuron-accel-pull-back/pyproject.toml").is_file()


def test_sharding_does_not_change_the_losses_that_it_shows():
    losses = [numbers(step.text) for step in FOLLOWED if step.language == "text" and numbers(step.text)]
    assert losses == [losses[0]] * 3 + [losses[3]] * 2 + [losses[5]] * 2
    assert losses[0] != losses[3] != losses[5]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not in a clone")
def test_a_clone_can_be_installed(tmp_path):
    """With the package index that pip is configured for."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    commands = ["set -e", "PATH=" + os.environ["PATH"], *INSTALL.text.splitlines()]
    subprocess.run(["bash", "-c", "\n".join(commands)], cwd=tmp_path / "clone", env=clean, check=True)

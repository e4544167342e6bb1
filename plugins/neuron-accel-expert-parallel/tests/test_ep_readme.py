"""What the README shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml
from neuron_accel_expert_parallel import ExpertParallelPlugin
from neuron_accel_expert_parallel.families import FAMILIES

README = (Path(__file__).parents[1] / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_trains(tmp_path: Path) -> None:
    (train,) = _blocks("python")
    (tmp_path / "train.py").write_text(train)
    command = next(block for block in _blocks("console") if "launch" in block).split()
    launched = [sys.executable, "-m", "neuron_accel.cli.main", *command[1:]]
    done = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(value) for value in re.findall(r"step \d+: ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert "'experts/busiest_rank': 1." in done.stdout
    assert "2 of 4 experts on each" in done.stdout


def test_the_configuration_is_understood() -> None:
    (block,) = _blocks("yaml")
    ((name, options),) = yaml.safe_load(block)["plugins"][0].items()
    assert name == ExpertParallelPlugin.spec.name
    assert ExpertParallelPlugin(**options).expert_parallel_size == 2


def test_every_family_is_named() -> None:
    text = re.sub(
        r"\W", "", README.split("## Families")[1].split("##")[0].lower().replace("v2 and v3", "v2 deepseek v3")
    )
    assert not {family for family in FAMILIES if family.replace("_", "") not in text}

"""What the README shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml
from neuron_accel_lora import LoraPlugin

README = (Path(__file__).parents[1] / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_trains_and_peft_loads_and_merges_what_it_saved(tmp_path: Path) -> None:
    train, merge = _blocks("python")
    (tmp_path / "finetune.py").write_text(train)
    command = next(block for block in _blocks("console") if "launch" in block).split()
    launched = [sys.executable, "-m", "neuron_accel.cli.main", *command[1:]]
    done = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(value) for value in re.findall(r"step \d+: ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert "6 layers adapted" in done.stdout
    (tmp_path / "merge.py").write_text(
        f"{merge}\nassert not any('lora' in name for name, _ in model.named_modules())\n"
    )
    subprocess.run([sys.executable, "merge.py"], cwd=tmp_path, check=True)


def test_the_configuration_is_understood() -> None:
    (block,) = _blocks("yaml")
    ((name, options),) = yaml.safe_load(block)["plugins"][0].items()
    assert name == LoraPlugin.spec.name
    assert LoraPlugin(**options).options().lora_alpha == 16

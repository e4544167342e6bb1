"""What the README shows works as it stands."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import yaml
from neuron_accel_local_sgd import LocalSGDPlugin

from neuron_accel.contract import import_object

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
    (loss,) = re.findall(r"loss ([\d.]+)", done.stdout)
    assert float(loss) < 1.0  # 8 before training: the sum of eight inputs is predicted
    assert (tmp_path / "model").is_dir()


def test_the_configuration_is_understood() -> None:
    (block,) = _blocks("yaml")
    ((name, options),) = yaml.safe_load(block)["plugins"][0].items()
    assert name == LocalSGDPlugin.spec.name
    assert LocalSGDPlugin(**options).outer_options["nesterov"]


def test_losses_are_plotted() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "convergence.py"
    script = runpy.run_path(str(path))
    histories = [{"losses": [7.0 - i, 6.0 - i, 5.0 - i], "evaluation_loss": 5.0 + i} for i in range(2)]
    svg = ElementTree.fromstring(script["plot"](list(zip(script["VARIANTS"][:2], histories, strict=True))))
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert "data parallel, 0.002: 5.000 on held-out text" in texts
    assert sum(element.get("fill") == "none" for element in svg.iter()) == 2
    assert script["smoothed"]([4.0, 2.0, 1.0], steps=2) == [(1.5, 3.0), (3.0, 1.0)]


def test_the_script_trains_what_it_says() -> None:
    """What it writes for the quickstart is understood; data parallelism is the first variant."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "convergence.py"))
    plugins = [script["configuration"](variant)["plugins"] for variant in script["VARIANTS"]]
    assert plugins[0] == []
    for ((name, options),) in [plugin.items() for each in plugins for plugin in each]:
        assert import_object(name, "VARIANTS") is LocalSGDPlugin
        assert LocalSGDPlugin(**options).inner_steps == 16


def test_losses_are_compared_at_the_same_seed_and_rate() -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "convergence.py"))
    losses = {variant.name: [4.0, 5.0] for variant in script["VARIANTS"]}
    losses |= {"data-parallel-0.004": [2.0, 4.0], "local-0.004": [2.2, 4.0]}
    lines = {line.split("  ")[0]: line for line in script["table"](losses)}
    assert lines["local SGD, 0.004"].endswith("3.1000  +5.00% (+0.00% to +10.00%)")
    assert "+0.00%" in lines["local SGD, 0.002"]


def test_every_option_is_in_the_table() -> None:
    table = README.partition("## Options")[2].partition("## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(option.name for option in fields(LocalSGDPlugin))

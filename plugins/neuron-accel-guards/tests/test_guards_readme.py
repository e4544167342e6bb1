"""What the README shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from neuron_accel import NeuronAccelerator

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_configuration_and_the_example_are_understood() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    accelerator = NeuronAccelerator(config=yaml.safe_load(block))
    names = {"recompile_guard", "desync_guard", "replica_check", "finite_guard", "sum_check"}
    assert names <= {plugin.spec.name for plugin in accelerator.plan.plugins}
    accelerator.end_training()
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    found: dict = {}
    exec(block, found)
    assert {"finite_guard", "recompile_guard"} <= {plugin.spec.name for plugin in found["accelerator"].plan.plugins}
    found["accelerator"].end_training()

"""The layouts that AWS publishes for the native device train on its stand-in, as recipes with tiny models."""

from __future__ import annotations

import json
import math

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import run_script
from tests.distributed.examples.test_recipes import FOLDER, PACKAGES
from tests.guests import is_installed

PUBLISHED = sorted(FOLDER.glob("*/*-trn2.48xlarge-*.yaml"))


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_published_layout_trains_a_tiny_model(recipe, tmp_path):
    for word, package in PACKAGES.items():
        if f"- {word}:" in recipe.read_text() and not is_installed(package):
            pytest.skip(f"{package} is not installed")
    ranks = 2 if "expert_parallel" in recipe.read_text() else 4  # otherwise two shards of two tensor-parallel ranks
    arguments = [str(recipe), "--tiny", f"--output={tmp_path}"]
    run_ranks(run_script, ranks, str(FOLDER / "train.py"), arguments, backend="native", timeout=100)
    losses = json.loads((tmp_path / "result.json").read_text())["losses"]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]

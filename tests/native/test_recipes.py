"""The layouts that AWS publishes for the native device train on its stand-in, as recipes with tiny models."""

from __future__ import annotations

import json
import math

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import run_script
from tests.distributed.examples.test_recipes import FOLDER, PACKAGES
from tests.guests import is_installed

# TorchTitan Neuron's GPT-OSS has the recipe of pre-training.
PUBLISHED = [*sorted(FOLDER.glob("*/*-trn2.48xlarge-*.yaml")), FOLDER / "gpt-oss-20b" / "pretrain-trn2.48xlarge.yaml"]


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_published_layout_trains_a_tiny_model(recipe, tmp_path):
    for word, package in PACKAGES.items():
        if f"- {word}:" in recipe.read_text() and not is_installed(package):
            pytest.skip(f"{package} is not installed")
    # Two shards, or halves of the experts, of two tensor-parallel ranks; experts that are fully sharded on two ranks.
    ranks = 2 if all(name in recipe.read_text() for name in ("expert_parallel", "fully_sharded")) else 4
    arguments = [str(recipe), "--tiny", f"--output={tmp_path}"]
    run_ranks(run_script, ranks, str(FOLDER / "train.py"), arguments, backend="native", timeout=100)
    losses = json.loads((tmp_path / "result.json").read_text())["losses"]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]

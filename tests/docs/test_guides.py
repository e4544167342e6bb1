"""Every block of Python in the guides runs, on two ranks, with a small model, its optimizer and data by those names.

Blocks marked ``py`` are other libraries' code, or parts of something; they are not run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neuron_accel.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDES = [*sorted((DOCS / "guides").glob("*.md")), DOCS / "trainer.md"]


def blocks():
    for guide in GUIDES:
        for number, text in enumerate(PYTHON.findall(guide.read_text())):
            yield pytest.param(text, id=f"{guide.stem}-{number}")


def run_block(text, folder):
    import sys
    import types

    import torch
    from torch.utils.data import DataLoader

    from tests.distributed.models import llama

    torch.manual_seed(0)
    model = llama()
    rows = torch.randint(0, 96, (8, 8))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    module = types.ModuleType("guide")  # dataclasses look for the module of a class
    sys.modules["guide"] = module
    module.__dict__.update(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        dataset=dataset,
        loader=DataLoader(dataset, batch_size=2),
        folder=folder,
    )
    exec(compile(text, "guide", "exec"), module.__dict__)


@pytest.mark.parametrize("text", blocks())
def test_a_block_of_a_guide_runs(text, tmp_path):
    run_ranks(run_block, 2, text, str(tmp_path))


def test_there_is_a_guide_for_everybody():
    names = {guide.stem for guide in GUIDES}
    sources = {"optimum-neuron", "neuronx-distributed", "torch-xla", "ddp", "accelerate"}
    assert {f"from-{source}" for source in sources} <= names

"""Every block of Python in the documentation runs on ranks, with a small model, its optimizer and data by those names.

A guide's blocks stand alone; those of other pages go on where the one before ended. ``writing-a-plugin.md`` has tests
of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_accel.testing import run_ranks
from tests.guests import skip_without_packages_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDES = [*sorted((DOCS / "guides").glob("*.md")), DOCS / "checkpoints.md", DOCS / "trainer.md"]
PAGES = [ROOT / "README.md", *sorted(set(DOCS.glob("*.md")) - {*GUIDES, DOCS / "writing-a-plugin.md"})]
RANKS = {"README": 4, "pipeline": 4}
"""How many ranks a page needs if not two."""


def blocks(paths=GUIDES):
    return [
        pytest.param(text, id=f"{path.stem}-{number}")
        for path in paths
        for number, text in enumerate(PYTHON.findall(path.read_text()))
    ]


def surroundings(module, folder):
    """What blocks may take as given, in a module's namespace: dataclasses look for the module of a class."""
    import torch
    from torch.utils.data import DataLoader

    from tests.distributed.models import llama

    torch.manual_seed(0)
    model = llama()
    rows = torch.randint(0, 96, (8, 8))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sys.modules[module.__name__] = module
    module.__dict__.update(
        model=model,
        config=model.config,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        dataset=dataset,
        loader=DataLoader(dataset, batch_size=2),
        loss=torch.ones(()),
        folder=folder,
        epochs=1,
        step=0,
        MyBlock=type("MyBlock", (torch.nn.Module,), {}),
    )


def run_blocks(texts, folder):
    import types

    from neuron_accel import NeuronAccelerator

    module = types.ModuleType("page")
    surroundings(module, folder)
    os.chdir(folder)
    module.model.save_pretrained(f"{folder}/some/folder")
    makers = ("NeuronAccelerator(", "Trainer", "ZeroRedundancyOptimizer(")
    if not any(maker in text for text in texts for maker in makers):
        accelerator = module.accelerator = NeuronAccelerator(project_dir=folder)
        module.model, module.optimizer, module.loader = accelerator.prepare(
            module.model, module.optimizer, module.loader
        )
    for text in texts:
        exec(compile(at_a_store(text, folder), "page", "exec"), module.__dict__)


def at_a_store(text, folder):
    """A block with the tests' own object store in the place of an S3 bucket."""
    from tests.object_store import register

    if "s3://bucket" in text:
        register()
        Path(folder, "a.bucket").mkdir(exist_ok=True)
    return text.replace("s3://bucket", f"objects://{folder}/a.bucket")


def of_torch_xla(block):
    return "import torch_xla" in block.values[0]


def starts_ranks(block):
    return "__main__" in block.values[0]


@pytest.mark.parametrize("text", [block for block in blocks() if not of_torch_xla(block) and not starts_ranks(block)])
def test_a_block_of_a_guide_runs(text, tmp_path):
    skip_without_packages_of(text)
    if "torchao" in text and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    ranks, backend = (1, None) if re.search(r"\b(DryRun|plan)\(", text) else (2, "gloo")  # a dry run is one process
    eager = {"TORCHDYNAMO_DISABLE": "1"} if "torchao" in text else {}  # it compiles its step for every shape
    run_ranks(run_blocks, ranks, [text], str(tmp_path), backend=backend, env=eager)


@pytest.mark.parametrize("text", [*filter(starts_ranks, blocks())])
def test_a_program_of_a_guide_runs(text, tmp_path):
    run_program(text, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: nox -s xla")
@pytest.mark.parametrize("text", [*filter(of_torch_xla, blocks())])
def test_what_a_guide_shows_of_torch_xla_runs(text, tmp_path):
    given = "import types\nfrom tests.docs.test_guides import surroundings\nmodule = types.ModuleType('page')\n"
    given += "surroundings(module, None)\nglobals().update(vars(module))\n"
    clean = {name: value for name, value in os.environ.items() if name not in ("USE_TORCH_XLA", "ACCELERATE_USE_CPU")}
    run_program(given + text, tmp_path, clean | {"PJRT_DEVICE": "CPU"})


def run_program(text, folder, environment=None):
    program = folder / "program.py"
    program.write_text(text)
    environment = {**(environment or os.environ), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [path for path in PAGES if blocks([path])], ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(path, tmp_path):
    run_ranks(run_blocks, RANKS.get(path.stem, 2), PYTHON.findall(path.read_text()), str(tmp_path))


def test_there_is_a_guide_for_everybody():
    names = {guide.stem for guide in GUIDES}
    sources = {"optimum-neuron", "neuronx-distributed", "torch-xla", "ddp", "accelerate"}
    assert {f"from-{source}" for source in sources} <= names
    subjects = {"degrees", "precision", "compilation", "checkpoints", "writing-a-plugin", "troubleshooting"}
    assert subjects <= names | {page.stem for page in DOCS.glob("*.md")}

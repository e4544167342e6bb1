"""The documentation is correct: configurations load, commands parse, code compiles, and links have targets."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tempfile
from pathlib import Path

import pytest
import yaml

from neuron_accel.cli.main import build_parser, main
from neuron_accel.doors import COMMANDS, offered_by
from neuron_accel.engine.plan.config import load_config
from neuron_accel.testing import run_ranks
from tests.docs.test_guides import run_blocks
from tests.guests import helper, is_installed, skip_without_packages_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")


def blocks(*languages):
    """Every fenced block in one of ``languages``, with where it is for an id."""
    return list(_blocks(languages))


def _blocks(languages):
    for document in DOCUMENTS:
        for number, (language, text) in enumerate(FENCE.findall(document.read_text())):
            if language in languages:
                yield pytest.param(text, id=f"{document.relative_to(ROOT)}-{number}")


def commands():
    """Every command line of this project's that a block for the shell shows."""
    return list(_commands())


def _commands():
    for block in blocks("console", "bash", "sh", "shell"):
        if block.id.startswith("docs/tutorial.md"):
            continue  # test_tutorial.py runs them, in order
        for line in block.values[0].replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|| > ", line):
                if "neuron-accel " in part and "pip install" not in part:
                    yield pytest.param(part[part.index("neuron-accel ") :].strip(), id=part.strip())


def ours(block):
    """Whether a block needs only what this distribution brings; pages that make plugins have tests beside this file."""
    return not block.id.startswith(("docs/writing-a-plugin.md", "docs/tutorial.md"))


@pytest.mark.parametrize("text", [*filter(ours, blocks("yaml"))])
def test_configurations_load(text):
    load_config(yaml.safe_load(text))


@pytest.mark.parametrize("text", blocks("python"))
def test_code_compiles_and_imports_what_exists(text):
    tree = ast.parse(text)
    skip_without_packages_of(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "neuron_accel":
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def needs_its_package(words):
    """Skips a command of a package that is not installed."""
    package = offered_by(COMMANDS, "plan" if "--check-memory" in words else words[0])
    if package is not None and not is_installed(package):
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    words = shlex.split(command, comments=True)[1:]
    needs_its_package(words)
    if "--help" not in words:
        build_parser().parse_args(words)


def runs_here(command):
    """Not what means something on Trainium or with a bucket only, nor what has its own tests, with ranks."""
    return not re.search(r"precompile|--compiler-flags|--cpu|--network|accel test|s3://", command.values[0])


TRAINING = """
import torch
from neuron_accel import NeuronAccelerator

accelerator = NeuronAccelerator()
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(3):
    accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).sum())
    optimizer.step()
"""


@pytest.mark.parametrize("command", [*filter(runs_here, commands())])
def test_commands_run(command, tmp_path, monkeypatch, capsys):
    """On what a reader would have; a launch says what it would do, the tests beside this folder start ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "cache").mkdir()
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    (tmp_path / "some/folder").mkdir(parents=True)
    (tmp_path / "some/folder/config.json").write_text(json.dumps(model))
    measured = {
        "neuron_accel_calibration": 1,
        "machine": "a test",
        "ranks": 4,
        "kernels": {"product": {"float32": [[1e6, 1e10]]}, "element-wise": {"float32": [[1e6, 1e9]]}},
        "fixed": {"": 1e-5},
    }
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(measured))
    words = shlex.split(command, comments=True)[1:]
    needs_its_package(words)
    (tmp_path / "runs").mkdir()
    if words[0] in ("report", "trace") or "run_report" in words:
        for name in ("run_report", "runs/before", "runs/after"):
            helper("neuron-accel-report", "report_made_up").write_run(tmp_path / name, ranks=2, steps=12)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    if words[0] == "launch" and "--dry-run" not in words and "--slurm" not in words:
        words.insert(1, "--dry-run")
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.strip()
    assert "error" not in said.err


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    assert [target for target in targets if not (document.parent / target).exists()] == []


ANCHOR = re.compile(r"\[[^\]]+\]\(([^)#\s]*)#([^)\s]+)\)")


def anchors(document):
    """Anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_are_headings(document):
    targets = [(path, anchor) for path, anchor in ANCHOR.findall(document.read_text()) if "://" not in path]
    targets = [(document.parent / path if path else document, anchor) for path, anchor in targets]
    assert [f"{path}#{anchor}" for path, anchor in targets if anchor not in anchors(path)] == []


def test_the_site_lists_every_page():
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```$", (ROOT / "docs/index.md").read_text(), re.MULTILINE | re.DOTALL)
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")]
    names = {line for block in listed for line in block.splitlines() if not line.startswith(":")}
    assert names == {page for page in pages if not page.startswith("_")} - {"index"}


@pytest.mark.parametrize("module", ["neuron_accel", "neuron_accel.testing"])
def test_the_reference_has_every_public_name(module):
    """Those of the contract, the errors and the commands are added when the site is built, all of them."""
    listed = set(re.findall(r"^\.\. [\w:]+:: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    elsewhere = {"neuron_accel.NeuronAccelError"}  # on the page of errors
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    assert names - listed - elsewhere == set()


def pages_in_order(text):
    """Pages of the site that a text links to, in the order of their first links."""
    found = [
        target.removeprefix("docs/").removesuffix(".md") for target in LINK.findall(text) if target.endswith(".md")
    ]
    return list(dict.fromkeys(found))


def test_readme_sidebar_and_front_page_have_one_order():
    index, readme = (ROOT / "docs/index.md").read_text(), (ROOT / "README.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    sidebar = [line for tree in trees for line in tree.splitlines() if not line.startswith(":")]
    assert pages_in_order(index[index.index("## Start here") :]) == sidebar
    listed = [page for page in pages_in_order(readme[readme.index("**Start here**") :]) if page in sidebar]
    assert listed == [page for page in sidebar if not page.startswith("packages/")]


def test_the_architecture_is_that_of_the_code():
    """Each link goes to a file that has what its text names, a real run goes through the files of a walk, and a step
    through no others."""
    from benchmarks.reading import walk

    text = (ROOT / "docs/architecture.md").read_text()
    links = re.findall(r"\[`?([^`\]]+)`?\]\(\.\./neuron_accel/([^)]+)\)", text)
    assert len(links) > 30
    for name, file in links:
        code = (ROOT / "neuron_accel" / file).read_text()
        if not name.endswith(".py") and name[0].isupper() | ("_" in name):
            for part in name.split("."):
                assert re.search(rf"^ *(class|def) {part}\b", code, re.MULTILINE), f"{name} is not in {file}"
    with tempfile.TemporaryDirectory() as folder:
        facts = run_ranks(walk, 2, "zero1", folder)[0]
    parts = {"## A prepared model": "prepare_model", "## One optimizer step": "step", "## One checkpoint": "save_state"}
    for heading, name in parts.items():
        section = text[text.index(heading) :].split("\n## ")[0].split("\n\n`load_state`")[0]
        files = re.findall(r"\(\.\./neuron_accel/([^)]+)\)", section)
        assert [file for file in files if file not in facts[name]["in order"]] == []
        if name == "step":
            entered = [file for file in facts[name]["in order"] if not file.startswith("testing/")]
            assert [file for file in entered if file not in files] == [], "files of a step that the page leaves out"


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_the_comparison_on_the_front_page_run(side, tmp_path):
    (block,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/index.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line[1:] for line in block.splitlines() if line[:1] in (side, " ", "")]
    run_ranks(run_blocks, 2, ["\n".join(lines)], str(tmp_path))
    assert (tmp_path / "out/model.safetensors").is_file()


def test_there_is_something_to_test():
    assert blocks("yaml")
    assert blocks("python")
    assert commands()

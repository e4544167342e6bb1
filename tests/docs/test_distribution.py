"""What is published: metadata whose licence and links an index understands, and sources with tests and documents."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which a build replaces
print(build_meta.build_sdist(folder), build_meta.prepare_metadata_for_build_wheel(folder), sep="\\n")
"""
NOT_SOURCES = (".git", ".nox", ".venv", "build", "dist", "_build", "__pycache__", ".*_cache", "*.egg-info", "shared")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the source distribution, without its folder, and the metadata."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "sources", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    archive, metadata = done.stdout.splitlines()[-2:]
    with tarfile.open(folder / archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    return names, Parser().parsestr((folder / metadata / "METADATA").read_text())


def test_the_licence_is_an_expression(built):
    assert built[1]["License-Expression"] == "Apache-2.0"
    assert built[1]["License-File"] == "LICENSE"
    assert built[1]["License"] is None


def test_every_file_of_the_packages_names_the_licence():
    kinds = (".py", ".pyi", ".c", ".h", ".js")
    files = [path for folder in (ROOT / "neuron_accel", *ROOT.glob("plugins/*/src")) for path in folder.rglob("*.*")]
    code = [path for path in files if path.suffix in kinds and path.read_text().strip()]
    assert len(code) > 300
    assert [path for path in code if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:80]] == []


def test_the_page_of_an_index_has_no_link_that_leads_nowhere(built):
    text = built[1].get_payload()
    assert text.startswith("# neuron_accel")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def test_sources_have_tests_documentation_and_what_the_documentation_names(built):
    needed = {
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "noxfile.py",
    }
    needed |= {"docs/index.md", "docs/conf.py", "docs/images/step.svg", "docs/figures/loss.json", "constraints/xla.txt"}
    needed |= {"tests/unit/public_surface.txt", "examples/notebook/train.ipynb", "plugins/neuron-accel-lora/README.md"}
    needed |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")}
    assert needed - built[0] == set()
    assert [name for name in built[0] if name.endswith((".pyc", ".so"))] == []

"""The files in ``docker/``, which are not built here: what they start from, copy and run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))
GUIDE = (ROOT / "docs" / "guides" / "from-an-empty-account.md").read_text()


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction and its words, on one line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [
        (name, rest)
        for name, rest in (line.split(None, 1) for line in "\n".join(lines).replace("\\\n", " ").split("\n"))
    ]


def words(path: Path, name: str) -> list[str]:
    return [rest for each, rest in instructions(path) if each == name]


def test_there_is_one_for_each_kind_of_machine():
    assert [path.name for path in FILES] == ["Dockerfile", "Dockerfile.trn1", "Dockerfile.trn2"]
    listed = (ROOT / "docker" / "README.md").read_text()
    assert all(f"| `{path.name}` |" in listed for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_parts_are_there(path):
    known = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "CMD"}
    assert {name for name, _ in instructions(path)} <= known
    (base,) = words(path, "FROM")
    assert re.fullmatch(r"[a-z0-9./-]+:[a-zA-Z0-9._-]+|\$\{IMAGE\}", base)
    assert ":latest" not in base
    assert base != "${IMAGE}" or words(path, "ARG") == ["IMAGE"], "without a default"
    for copied in words(path, "COPY"):
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    for command in words(path, "RUN"):
        for local in re.findall(r"\./plugins/[\w-]+", command):
            assert (ROOT / local).is_dir()
        assert shlex.split(command)
    (command,) = words(path, "CMD")
    program, verb, *rest = json.loads(command)
    assert (program, verb in ("launch", "test")) == ("neuron-accel", True)
    assert all((ROOT / word).exists() for word in rest if word.endswith(".py"))
    assert f"docker build -f docker/{path.name} " in path.read_text()


def test_the_image_for_the_cpu_runs_the_quickstart_as_a_user():
    path = ROOT / "docker" / "Dockerfile"
    assert words(path, "USER") == ["user"]
    quickstart = (ROOT / "examples" / "quickstart" / "README.md").read_text()
    assert " ".join(json.loads(words(path, "CMD")[0])) in quickstart
    assert "'torch==2.13.*' '.[examples]'" in words(path, "RUN")[-1]
    assert "pip install 'torch==2.13.*' '.[trainer]'" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["Dockerfile.trn1", "Dockerfile.trn2"])
def test_images_of_aws_keep_their_torch_as_in_the_guide(name):
    (command,) = words(ROOT / "docker" / name, "RUN")
    listing, install = (" ".join(part.split()).replace("/tmp/", "") for part in command.split(" && "))
    guide = " ".join(GUIDE.replace("\\\n", " ").split())
    assert listing in guide
    assert install in guide
    text = (ROOT / "docker" / name).read_text()
    assert re.search(r"https://\S+", text)
    assert re.search(r"read\W+on 2026-\d\d-\d\d", text)

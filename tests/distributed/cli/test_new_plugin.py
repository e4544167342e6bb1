"""``neuron-accel new-plugin`` writes a package that can be built, is found by name, and passes its own tests."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from neuron_accel.cli.main import main
from neuron_accel.cli.new_plugin import KINDS, plugin_name, write
from neuron_accel.errors import UsageError
from tests.packages import install, run_in

QUICK = "(not found_by_name and (not Plugin or form or configuration or (zero1-gloo and not tp2))) or TwoWords and is_"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of a new package and that in which its wheel is installed."""
    output = tmp_path_factory.mktemp("new")
    assert main(["new-plugin", "two-words", "--output", str(output)]) == 0
    folder, target = output / "neuron-accel-two-words", output / "installed"
    assert install(folder, target).name == "neuron_accel_two_words-0.1.0-py3-none-any.whl"
    return folder, target


def test_it_is_found_by_name(package):
    folder, target = package
    shown = json.loads(run_in(target, ["-m", "neuron_accel.cli.main", "plugins", "--json"], folder))
    (plugin,) = [plugin for plugin in shown if plugin["name"] == "two_words"]
    assert (plugin["distribution"], plugin["version"]) == ("neuron-accel-two-words", "0.1.0")
    assert plugin["class"] == "neuron_accel_two_words:TwoWordsPlugin"
    assert plugin["error"] is None


@pytest.fixture(scope="module")
def packages(package, tmp_path_factory):
    """The folder of a new package of each kind, and that in which all are installed: three of them as their source,
    since wheels take long to build."""
    folders, target = {"observer": package[0]}, package[1]
    for kind in KINDS.keys() - folders:
        folders[kind] = write(f"an_{kind}", tmp_path_factory.mktemp(kind), kind)
        shutil.copytree(folders[kind] / "src", target, dirs_exist_ok=True)
    return folders, target


def run_tests_of(packages, kinds, *arguments):
    folders, target = packages
    tests = [str(folders[kind] / "tests") for kind in kinds]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *arguments]
    output = run_in(target, command, target)
    return int(re.search(r"(\d+) passed", output)[1])


def test_all_kinds_pass_their_tests(packages):
    assert run_tests_of(packages, KINDS, "-k", QUICK) >= 25


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_passes_the_whole_kit(kind, packages):
    deselected = [] if kind == "observer" else ["-k", "not found_by_name"]  # the wheel of one is installed
    assert run_tests_of(packages, [kind], *deselected) >= 24


def test_the_file_tree(package):
    folder, _ = package
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "pyproject.toml",
        "README.md",
        "src/neuron_accel_two_words/__init__.py",
        "src/neuron_accel_two_words/plugin.py",
        "tests/test_two_words.py",
    } <= files
    assert "$" not in "".join((folder / path).read_text() for path in files if path.endswith((".py", ".toml", ".md")))


@pytest.mark.parametrize("name", ["Stripes", "1st", "class", "a b", "neuron-accel-"])
def test_impossible_names(name):
    with pytest.raises(UsageError, match="is not a valid name for a plugin"):
        plugin_name(name)


def test_a_name_that_is_taken(capsys):
    assert main(["new-plugin", "zero1"]) == 2
    message = capsys.readouterr().err
    assert "A plugin 'zero1' exists already" in message
    assert "neuron-accel " in message


def test_nothing_is_overwritten(tmp_path):
    write("neuron-accel-stripes", tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        write("stripes", tmp_path)

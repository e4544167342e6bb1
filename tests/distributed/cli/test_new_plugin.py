"""``neuron-accel new-plugin`` writes a package that can be built, is found by name, and passes its own tests."""

from __future__ import annotations

import json
import re

import pytest

from neuron_accel.cli.main import main
from neuron_accel.cli.new_plugin import plugin_name, write
from neuron_accel.errors import UsageError
from tests.packages import install, run_in

QUICK = "not TestTwoWords or is_ or form or configuration or (tp2-sp and gloo)"


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


def run_its_tests(package, *arguments, timeout=100):
    folder, target = package
    output = run_in(target, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], folder / "tests", timeout)
    return int(re.search(r"(\d+) passed", output)[1])


def test_it_passes_its_tests(package):
    assert run_its_tests(package, "-k", QUICK) >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_passes_the_whole_kit(package):
    assert run_its_tests(package, timeout=550) >= 24


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

"""The first tier executes what both tiers execute, and new cases belong to it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.line_recorder import SOURCES
from tests.tiers import LIST, ROOT, Case, choose, is_listed, lines_of, main, read
from tests.upstream import broken, table

CASES = {
    "tests/unit/test_a.py::test_a": Case(1.0, {"a.py:1"}),
    "tests/test_b.py::test_b[1]": Case(2.0, {"a.py:1", "b.py:1", "b.py:2"}),
    "tests/test_b.py::test_b[2]": Case(9.0, {"b.py:1", "b.py:2"}),
    "tests/test_c.py::test_c[1]": Case(1.0, {"a.py:1"}),
    "tests/test_c.py::test_c[2]": Case(1.0, {"b.py:1"}),
    "tests/test_d.py::test_d": Case(50.0, {"d.py:1"}),
}


def test_the_first_tier_executes_everything_with_the_cheapest_cases():
    assert choose(CASES) == {
        "tests/unit/test_a.py::test_a",
        "tests/test_b.py::test_b[1]",
        "tests/test_d.py::test_d",
    }


def test_what_takes_more_than_the_time_that_is_left_is_not_taken():
    assert "tests/test_d.py::test_d" not in choose(CASES, seconds=10)


def test_a_function_is_listed_once_and_its_cases_where_others_are_in_the_first_tier():
    first = choose(CASES)
    second = lines_of(set(CASES) - first, first)
    assert second == ["tests/test_b.py::test_b[2]", "tests/test_c.py::test_c"]
    assert is_listed("tests/test_c.py::test_c[3]", set(second))
    assert not is_listed("tests/test_b.py::test_b[1]", set(second))
    assert not is_listed("tests/test_e.py::test_new", set(second))


def test_records_of_several_processes_are_added_up(tmp_path, capsys):
    for process, (line, composition) in enumerate([(1, []), (2, ["gloo, 2, 1: zero1"])]):
        record = {"case": "t.py::t", "seconds": 0.5, "lines": {"a.py": [line]}, "compositions": composition}
        (tmp_path / f"{process}.jsonl").write_text(
            json.dumps(record) + "\n" + json.dumps({**record, "case": ""}) + "\n"
        )
    assert read([tmp_path]) == {"t.py::t": Case(1.0, {"a.py:1", "a.py:2", "gloo, 2, 1: zero1"})}
    main([str(tmp_path)])
    assert "1 cases        1 s of processor time       2 lines     1 compositions 100.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (f"{ROOT}/neuron_accel/engine/plan/mesh.py", "neuron_accel/engine/plan/mesh.py"),
        ("/a/neuron_accel/neuron_accel/neuron/cores.py", "neuron_accel/neuron/cores.py"),
        ("/env/site-packages/neuron_accel_lora/plugin.py", "neuron_accel_lora/plugin.py"),
        ("/env/site-packages/torch/nn/functional.py", None),
    ],
)
def test_lines_of_this_package_are_recorded_wherever_it_is_installed(file, expected):
    found = SOURCES.search(file)
    assert (found and found[1]) == expected


def test_every_function_of_the_list_exists():
    functions: dict[str, set[str]] = {}
    for line in LIST.read_text().splitlines():
        path, _, name = line.partition("[")[0].partition("::")
        if path not in functions:
            tree = ast.parse(Path(ROOT, path).read_text())
            functions[path] = {
                node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            }
        assert name.rpartition("::")[2] in functions[path] or "::Test" in line, f"no test is called {line}"


def test_nothing_is_recorded_without_being_asked():
    assert not hasattr(sys, "lines_of_a_test")


def test_a_table_tells_what_a_release_broke(tmp_path):
    report = tmp_path / "report.xml"
    failed = '<testcase classname="tests.test_a"><failure message="TypeError: cache&#10;more"/></testcase>'
    passed = '<testcase classname="tests.test_b"/>'
    report.write_text(f"<testsuites><testsuite>{failed}{failed}{passed}</testsuite></testsuites>")
    text = table({"torch": "9.9"}, broken(report))
    assert "| torch | 9.9 |" in text
    assert "| tests.test_a | 2 | TypeError: cache |" in text
    assert "test_b" not in text

"""Objects without a device: what they show, and where the stand-in for neuron_parallel_compile looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from neuron_accel_emulation import EmulatedInstance, GraphReport
from neuron_accel_emulation._parallel_compile import cache_of


def test_a_machine_does_not_show_its_environment():
    shown = repr(EmulatedInstance(folder=Path("somewhere"), cores=2, environ={"SECRET": "value"}))
    assert "EmulatedInstance" in shown
    assert "SECRET" not in shown


def test_a_report_is_a_line():
    assert repr(GraphReport(2, (), ())) == "<GraphReport: 0 graphs of 2 ranks; 0 errors, 0 warnings>"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, "/var/tmp/neuron-compile-cache"),
        ({"NEURON_COMPILE_CACHE_URL": "file:///b"}, "/b"),
        (
            {"NEURON_CC_FLAGS": "-O1 --cache_dir=/a/c --verbose 35", "NEURON_COMPILE_CACHE_URL": "/b"},
            "/a/c",
        ),
        ({"NEURON_CC_FLAGS": "--retry_failed_compilation --cache_dir /a/c"}, "/a/c"),
    ],
)
def test_the_compile_cache_is_where_neurons_tool_looks(environ, place):
    assert str(cache_of(environ)) == place

"""What people get to see of objects in a message or a notebook."""

from __future__ import annotations

from pathlib import Path

from neuron_accel_emulation import EmulatedInstance, GraphReport


def test_a_machine_does_not_show_its_environment():
    shown = repr(EmulatedInstance(folder=Path("somewhere"), cores=2, environ={"SECRET": "value"}))
    assert "EmulatedInstance" in shown
    assert "SECRET" not in shown


def test_a_report_is_a_line():
    assert repr(GraphReport(2, (), ())) == "<GraphReport: 0 graphs of 2 ranks; 0 errors, 0 warnings>"

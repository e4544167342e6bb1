"""What holds for every test: no network, no threads fighting over the cores, no accidental XLA."""

from __future__ import annotations

import os

# Libraries read these when they are imported, which is after this file.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")

from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from neuron_accel.backends.select import settle
from tests.what_runs import Recorder

settle(os.environ)
CORES = os.sched_getaffinity(0)

# How long generating or checking an example takes says nothing on a machine that others use, too.
settings.register_profile("shared machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-runs", type=Path, metavar="FILE", help="write down what ran where (tests/what_runs.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-runs", default=None):
        config.pluginmanager.register(Recorder(config.getoption("--record-runs")))


def how_busy() -> float:
    """How many processes want each core of this machine; at least 1. Limits of time are multiplied by it."""
    average, running = Path("/proc/loadavg").read_text().split()[::3]
    return max(1.0, float(average) / len(CORES), int(running.partition("/")[0]) / len(CORES))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """As pytest-timeout does, with a limit for a machine that is as busy as this one is now."""
    factor = how_busy()
    os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"] = f"{factor:.2f}"
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout * factor))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have counted (``record_property``) is part of the report."""
    counted = [
        f"{report.nodeid}: {name}: {value}"
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
    ]
    if counted:
        terminalreporter.section("counted")
        for line in counted:
            terminalreporter.write_line(line)

"""Records which lines of this package a process executes, for tests/tiers.py.

Every interpreter of the environment of ``nox -s tiers`` imports this when it starts, before anything else: what it
imports is little, and of the standard library.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

FOLDER = "NEURON_ACCEL_RECORD_LINES"
"""Name of the environment variable with the folder into which processes write what they executed."""
SOURCES = re.compile(r"^(?:.*/)?(neuron_accel(?:_\w+)?/.+\.py)$")


class Lines:
    """What this process has executed since the last report."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._entered: set[tuple[str, int]] = set()
        self._since = 0.0

    def start(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]  # Python 3.12
        tool, events = monitoring.PROFILER_ID, monitoring.events

        def on_start(code: CodeType, offset: int) -> object:
            if SOURCES.search(code.co_filename):
                monitoring.set_local_events(tool, code, events.LINE)
            return monitoring.DISABLE

        def on_line(code: CodeType, line: int) -> object:
            self._entered.add((code.co_filename, line))
            return monitoring.DISABLE

        monitoring.use_tool_id(tool, "lines of a test")
        monitoring.register_callback(tool, events.PY_START, on_start)
        monitoring.register_callback(tool, events.LINE, on_line)
        monitoring.set_events(tool, events.PY_START)
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.report)

    def forget(self) -> None:
        self._entered.clear()
        self._since = time.process_time()
        sys.monitoring.restart_events()  # type: ignore[attr-defined]

    def report(self, case: str | None = None, compositions: Iterable[str] = ()) -> None:
        """Writes down what was executed, for a case; without one for the case in whose time this process was
        started."""
        import json

        case = case or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        lines: dict[str, list[int]] = {}
        for file, line in list(self._entered):
            lines.setdefault(SOURCES.search(file)[1], []).append(line)  # type: ignore[index]
        record = {
            "case": case,
            "seconds": time.process_time() - self._since,
            "lines": lines,
            "compositions": sorted(compositions),
        }
        with open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
        self.forget()


def record_this_process() -> None:
    """Records what this process executes if it was started by tests that record it. ``nox -s tiers`` has every
    interpreter of its environment call this when it starts, some of them twice: site reads its files again if asked."""
    if os.environ.get(FOLDER) and hasattr(sys, "monitoring") and not hasattr(sys, "lines_of_a_test"):
        lines = Lines(os.environ[FOLDER])
        lines.start()
        _exit = os._exit

        def report_and_exit(code: int) -> None:
            lines.report()
            _exit(code)

        os._exit = report_and_exit  # type: ignore[assignment]  # ranks end by it, and nothing else is told
        sys.lines_of_a_test = lines  # type: ignore[attr-defined]

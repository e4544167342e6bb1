# SPDX-License-Identifier: Apache-2.0
"""What the first rank shows of a run while it trains: a few lines that are redrawn on a terminal, or a line at
intervals."""

from __future__ import annotations

import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TextIO

from neuron_accel.errors import ConfigurationError
from neuron_accel_report.records import Step, Straggler

_REDRAW_S = 0.25
_COLOURS = {
    "loader": "magenta",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
    "communication": "red",
    "device": "bright_blue",
    "checkpoint": "yellow",
    "evaluation": "bright_black",
    "other": "white",
}


class Display(ABC):
    """Shows steps."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def show(self, step: Step, late: Sequence[Straggler], replicas: int) -> None:
        """Shows a step, if one is due.

        Args:
            step: the step of this rank.
            late: stragglers, when ranks compared their times last.
            replicas: number of data-parallel ranks, by which throughput is multiplied.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the display."""


def make_display(kind: str, seconds: float, stream: TextIO | None = None) -> Display | None:
    """Returns the display of a run; None if nothing is shown.

    Args:
        kind: see :class:`RunReportPlugin`.
        seconds: between two lines.
        stream: where; None: standard output.

    Raises:
        ConfigurationError: if a dashboard is wanted and rich is not installed.
    """
    stream = sys.stdout if stream is None else stream
    has_rich = importlib.util.find_spec("rich") is not None
    if kind == "dashboard" and not has_rich:
        raise ConfigurationError(
            "A dashboard needs rich, which is not installed.",
            where="plugin 'run_report', show='dashboard'",
            fix="install rich (the extra terminal of neuron-accel-report), or choose show='lines'",
        )
    if kind == "nothing":
        return None
    if kind == "dashboard" or (kind == "auto" and has_rich and stream.isatty()):
        return Dashboard(stream)
    return Lines(seconds, stream)


def throughput(step: Step, replicas: int) -> str:
    """Tokens or samples in a second, over all data-parallel ranks."""
    amount, unit = (step.samples, "samples") if step.tokens is None else (step.tokens, "tokens")
    if amount is None or step.training_seconds <= 0:
        return "-"
    return f"{amount * replicas / step.training_seconds:,.0f} {unit}/s"


def parts_in_words(step: Step, most: int = 4) -> str:
    """The largest parts of a step, such as ``backward 52 %, forward 30 %``."""
    ranked = sorted(step.parts.items(), key=lambda item: -item[1])[:most]
    shares = {part: seconds / step.seconds for part, seconds in ranked}
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share > 0.005)


def facts(step: Step, replicas: int) -> list[tuple[str, str]]:
    """The figures of a step as text, by name."""
    found = [("step", str(step.step))]
    if step.loss is not None:
        found.append(("loss", f"{step.loss:.4f}"))
    if step.grad_norm is not None:
        found.append(("grad norm", f"{step.grad_norm:.3g}"))
    if step.lr:
        found.append(("lr", f"{step.lr[0]:.3g}"))
    found += [("time", f"{step.seconds:.3g} s"), ("throughput", throughput(step, replicas))]
    if step.mfu is not None:
        found.append(("MFU", f"{step.mfu:.1%}"))
    bytes_used, where = (step.memory.host, "host") if step.memory.device is None else (step.memory.device, "device")
    if bytes_used is not None:
        found.append((f"{where} memory", f"{bytes_used / 2**30:.2f} GiB"))
    return found


def warnings_of(step: Step, late: Sequence[Straggler]) -> list[str]:
    """Warnings: stragglers, graphs that were compiled late, skipped updates."""
    found = [
        f"step {each.step}: rank {each.rank} is {each.seconds * 1e3:.0f} ms late ({each.part})" for each in late[:2]
    ]
    if step.compilations and step.step > 1:
        found.append(f"step {step.step}: {step.compilations} graphs were compiled")
    if step.skipped:
        found.append(f"step {step.step}: the update was skipped")
    return found


class Lines(Display):
    """One line for the first step, and then every few seconds.

    Args:
        seconds: between two lines.
        stream: where.
    """

    def __init__(self, seconds: float, stream: TextIO) -> None:
        self._seconds, self._stream, self._due = seconds, stream, 0.0
        self._said: set[str] = set()

    def show(self, step: Step, late: Sequence[Straggler], replicas: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._seconds
            known = ", ".join(f"{name} {value}" for name, value in facts(step, replicas))
            self._print(f"{known}; {parts_in_words(step)}")
            for warning in warnings_of(step, late):
                if warning not in self._said:
                    self._said.add(warning)
                    self._print(warning)

    def _print(self, text: str) -> None:
        print(f"neuron_accel: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        pass


class Dashboard(Display):
    """A few lines at the bottom of a terminal, which are redrawn at most four times a second. What the training prints
    is above them.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._due = 0.0
        self._last: tuple[Step, Sequence[Straggler], int] | None = None
        self._started = False

    def show(self, step: Step, late: Sequence[Straggler], replicas: int) -> None:
        self._last = (step, late, replicas)
        if (now := time.monotonic()) >= self._due:
            self._due = now + _REDRAW_S
            self._draw()

    def _draw(self) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        assert self._last is not None
        self._live.update(render(*self._last, self._console.width), refresh=True)

    def close(self) -> None:
        if self._last is not None:
            self._draw()
            self._live.stop()


def render(step: Step, late: Sequence[Straggler], replicas: int, width: int) -> Any:
    """Returns the lines of the dashboard, for rich."""
    from rich.console import Group
    from rich.text import Text

    room = max(10, width - 1)
    lines = [Text()]
    for name, value in facts(step, replicas):  # a line is broken between facts, not in them
        if len(lines[-1]) + len(name) + len(value) + 1 > room:
            lines.append(Text())
        lines[-1].append(f"{name} ", style="dim").append(f"{value}  ")
    for line in lines:
        line.rstrip()
    bar = Text()
    ranked = [(part, seconds) for part, seconds in step.parts.items() if seconds > 0.005 * step.seconds]
    for part, seconds in ranked:
        label = f" {part} {seconds / step.seconds:.0%}"
        cells = round(room * seconds / step.seconds)
        bar.append(label[:cells].ljust(cells), style=f"black on {_COLOURS.get(part, 'white')}")
    bar.truncate(room)
    warnings = [Text(each, style="yellow") for each in warnings_of(step, late)]
    return Group(*lines, bar, *warnings)

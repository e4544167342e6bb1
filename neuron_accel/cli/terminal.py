"""Tables and progress bars in a terminal."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Sequence
from typing import Any, TextIO


# ---- Plain text tables -----------------------------------------------------------------------------------------------
def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; the last column is left ragged."""
    lines = [list(headers), ["-" * len(header) for header in headers], *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def format_pairs(pairs: Sequence[tuple[str, str]], indent: str = "  ", width: int | None = None) -> str:
    """``name  value`` lines with aligned values, which are wrapped to ``width`` columns."""
    longest = max((len(name) for name, _ in pairs), default=0)
    lines = [(f"{indent}{name.ljust(longest)}  ", value) for name, value in pairs]
    if width is None:
        return "\n".join(f"{name}{value}".rstrip() for name, value in lines)
    return "\n".join(
        textwrap.fill(value, width, initial_indent=name, subsequent_indent=" " * len(name), break_on_hyphens=False)
        for name, value in lines
    )


def terminal_width() -> int:
    """Columns of the terminal, or what COLUMNS says; 80 where there is none."""
    return max(40, shutil.get_terminal_size().columns)


# ---- A progress bar for terminals ------------------------------------------------------------------------------------
_WIDTH = 30
_INTERVAL = 0.1


class Bar:
    """Shows how many bytes of how many are done, and how fast. A context manager.

    Args:
        stream: where to; nothing is shown if it is no terminal.
        hidden: whether to show nothing at all.
    """

    def __init__(self, stream: TextIO, hidden: bool = False) -> None:
        self._stream, self._hidden = stream, hidden or not stream.isatty()
        self._begin = self._shown = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._hidden:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._hidden or (now - self._shown < _INTERVAL and done < total):
            return
        self._shown = now
        part = done / total if total else 1.0
        rate = done / max(now - self._begin, 1e-9) / 1e6
        filled = "#" * int(part * _WIDTH)
        self._stream.write(
            f"\r[{filled:<{_WIDTH}}] {part:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB  {rate:.0f} MB/s"
        )
        self._stream.flush()

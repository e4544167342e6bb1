"""Tables and progress bars in a terminal."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, TextIO


# ---- Plain text tables -----------------------------------------------------------------------------------------------
def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Formats a table with aligned columns, two spaces apart. If it is wider than ``width``, the cells of its widest
    columns are wrapped."""
    lines = [list(headers), ["-" * len(header) for header in headers], *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    least = [min(full, max(len(header), 8)) for full, header in zip(widths, headers, strict=True)]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        column = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__, default=None)
        if column is None:
            break
        widths[column] -= 1
    wrapped: list[Sequence[str]] = []
    for line in lines:
        cells = [_wrap_cell(cell, cell_width) for cell, cell_width in zip(line, widths, strict=True)]
        wrapped += itertools.zip_longest(*cells, fillvalue="")
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in wrapped
    )


def _wrap_cell(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken after a space or one of ``./+;,_-`` if possible."""
    lines = [""]
    for word in re.split(r"(?<=[\s./+;,_-])", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def format_pairs(pairs: Sequence[tuple[str, str]], indent: str = "  ", width: int | None = None) -> str:
    """Formats lines of ``name  value`` with aligned values, which are wrapped to ``width`` columns."""
    longest = max((len(name) for name, _ in pairs), default=0)
    lines = [(f"{indent}{name.ljust(longest)}  ", value) for name, value in pairs]
    if width is None:
        return "\n".join(f"{name}{value}".rstrip() for name, value in lines)
    return "\n".join(
        textwrap.fill(value, width, initial_indent=name, subsequent_indent=" " * len(name), break_on_hyphens=False)
        for name, value in lines
    )


def terminal_width() -> int:
    """Number of columns, from COLUMNS or the terminal; 80 without either, and at least 40."""
    return max(40, shutil.get_terminal_size().columns)


def table_width() -> int | None:
    """The width of tables: that of the terminal, or None if standard output is not a terminal."""
    return terminal_width() if sys.stdout.isatty() else None


# ---- A progress bar for terminals ------------------------------------------------------------------------------------
_WIDTH = 30
_INTERVAL = 0.1


class Bar:
    """A progress bar for bytes, with their rate. A context manager.

    Args:
        stream: where to write the bar; nothing is written if it is not a terminal.
        hidden: whether to show no bar.
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
        """Draws the bar for ``done`` of ``total`` bytes, at most ten times a second."""
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

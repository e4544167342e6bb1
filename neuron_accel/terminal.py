# SPDX-License-Identifier: Apache-2.0
"""Tables and progress bars in a terminal."""

from __future__ import annotations

import itertools
import re
import shlex
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
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    words = [max(map(len, header.split()), default=0) for header in headers]
    least = [min(full, max(word, 8)) for full, word in zip(widths, words, strict=True)]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        column = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__, default=None)
        if column is None:
            break
        widths[column] -= 1
    rule = ["-" * min(len(header), cell_width) for header, cell_width in zip(headers, widths, strict=True)]
    wrapped: list[Sequence[str]] = []
    for line in (headers, rule, *rows):
        cells = [_wrap_cell(cell, cell_width) for cell, cell_width in zip(line, widths, strict=True)]
        wrapped += itertools.zip_longest(*cells, fillvalue="")
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in wrapped
    )


def _wrap_cell(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken after a space or one of ``./+;,_-`` if possible, not in numbers and
    before one last letter."""
    lines = [""]
    for word in re.split(r"(?<=\s)|(?<=[./+;,_-])(?=\D\S)", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def format_pairs(pairs: Sequence[tuple[str, str]], indent: str = "  ", width: int | None = None) -> str:
    """Formats lines of ``name  value`` with aligned values, which are wrapped to ``width`` columns. A value is
    below its name if that is longer than half of that, or one of its own words does not fit beside it. Without a width
    values are aligned to names of at most 60 characters."""
    most = 60 if width is None else width // 2
    column = max((len(name) for name, _ in pairs if len(name) <= most), default=0)
    lines = []
    for name, value in pairs:
        before = f"{indent}{name.ljust(column)}  "
        if width is None:
            lines.append(f"{before}{value}".rstrip())
            continue
        longest = max(map(len, value.split()), default=0)
        if len(name) > column or longest > width - len(before):
            lines.append(f"{indent}{name}")
            before = f"{indent}    "
        wrapped = [part for line in value.split("\n") for part in wrap_words(line, width - len(before)) or [""]] or [""]
        after = " " * len(before)
        lines += [f"{after if number else before}{part}".rstrip() for number, part in enumerate(wrapped)]
    return "\n".join(lines)


def format_command(words: Sequence[str], width: int | None = None, indent: str = "") -> str:
    """Formats a command line for a shell, continued with backslashes after ``width`` columns, ``indent`` included."""
    lines = [""]
    for word in map(shlex.quote, words):
        if width is not None and lines[-1].strip() and len(indent) + len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(f"{indent}{line}" for line in lines)


def wrap_words(text: str, width: int, indent: str = "", hanging: str = "") -> list[str]:
    """Lines of at most ``width`` characters, the first with ``indent`` and the others with ``hanging`` before them.
    Words are not broken, so that a path or an option can be copied: a longer one is a line by itself."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def fit(text: str, stream: TextIO) -> str:
    """Returns ``text`` as it is written to ``stream``: lines that are longer than a terminal is wide are wrapped, with
    two more spaces before what follows. Text for a file or a pipe stays as it is."""
    if not stream.isatty():
        return text
    width, lines = terminal_width(), []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += wrap_words(line.strip(), width, indent, f"{indent}  ") if len(line) > width else [line]
    return "\n".join(lines)


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints ``text``, wrapped if it goes to a terminal.

    Args:
        text: what to print.
        stream: where; None: standard output.
    """
    stream = sys.stdout if stream is None else stream
    print(fit(text, stream), file=stream, flush=True)


def terminal_width() -> int:
    """Number of columns, from COLUMNS or the terminal; 80 without either, and at least 40."""
    return max(40, shutil.get_terminal_size().columns)


def table_width(stream: TextIO | None = None) -> int | None:
    """The width of tables: that of the terminal, or None if ``stream`` (standard output) is not a terminal."""
    return terminal_width() if (sys.stdout if stream is None else stream).isatty() else None


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
        text = f" {part:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB  {rate:.0f} MB/s"
        width = terminal_width() - 1  # a character in the last column may move the cursor to the next line
        room = min(_WIDTH, width - len(text) - 2)
        bar = f"[{'#' * int(part * room):<{room}}]" if room >= 4 else ""
        self._stream.write(f"\r{(bar + text)[:width]}\033[K")
        self._stream.flush()

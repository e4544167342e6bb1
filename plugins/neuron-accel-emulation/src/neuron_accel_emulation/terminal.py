# SPDX-License-Identifier: Apache-2.0
"""Tables in a terminal."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Sequence


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


def table_width() -> int | None:
    """The width of tables: that of the terminal, or None if standard output is not a terminal."""
    return terminal_width() if sys.stdout.isatty() else None


def terminal_width() -> int:
    """Number of columns, from COLUMNS or the terminal; 80 without either, and at least 40."""
    return max(40, shutil.get_terminal_size().columns)

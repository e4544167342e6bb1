"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; the last column is left ragged."""
    lines = [list(headers), ["-" * len(header) for header in headers], *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def format_pairs(pairs: Sequence[tuple[str, str]], indent: str = "  ") -> str:
    """``name  value`` lines with aligned values."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {value}".rstrip() for name, value in pairs)

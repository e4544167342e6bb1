# SPDX-License-Identifier: Apache-2.0
"""Pages that a browser shows without a network: the document around a body, its style in light, dark and print, tables,
and numbers with units. What a page shows may come from files of others: whatever is written goes through ``escape``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

COLOURS = 9
"""Number of colours ``--c0``, ``--c1``, ..., which colour-blind readers can distinguish, too."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --grey: #57606a; --line: #d0d7de; --pale: #eef0f2; --paper: #ffffff; --warn: #b3261e;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499;
  --c4: #e69f00; --c5: #56b4e9; --c6: #8c8c8c; --c7: #6a51a3; --c8: #8c564b;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --grey: #9aa7b4; --line: #3b434c; --pale: #20262d; --paper: #11151a; --warn: #ff8a80;
    --c0: #4aa8e0; --c1: #f08a45; --c2: #2bc295; --c3: #d98acb;
    --c4: #f2bd3f; --c5: #8fd0f5; --c6: #a3a9b0; --c7: #a794dd; --c8: #c9a08f;
  }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
svg { display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 0.15em 1.2em 0.15em 0; vertical-align: top; overflow-wrap: normal; }
.wide { overflow-x: auto; margin: 0.6em 0; } .wide .columns { white-space: nowrap; }
.note { color: var(--grey); }
@media print {
  body { max-width: none; margin: 0; } figure, tr, svg { break-inside: avoid; } h2 { break-after: avoid; }
}
"""
"""Colours are variables, so that pictures follow the scheme of the screen; paper is white in print."""


def colour(index: int) -> str:
    """Returns the colour of a label by its index. The first colours are those of the palette; further ones are mixed
    with the colour of text, and then with that of the background, so that 27 labels have different colours."""
    shade, number = divmod(index, COLOURS)
    base = f"var(--c{number})"
    return base if shade % 3 == 0 else f"color-mix(in srgb, {base} 55%, var(--{('ink', 'paper')[shade % 3 - 1]}))"


def document(title: str, body: Iterable[str], *, style: str = "", script: str = "", data: Any = None) -> str:
    """Returns a page.

    Its policy lets nothing be loaded and no script run but ``script``, which is named by its hash: text of a file that
    should look like a script would not become one.

    Args:
        title: of the page, as text.
        body: its parts, as HTML.
        style: further rules of CSS.
        script: a program that runs when the page is open.
        data: a value for the program, as JSON in the element with the id ``data``; without NaN and infinity.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'" + (
        f"; script-src 'sha256-{digest}'" if script else ""
    )
    # "<" would end the element; the two separators end a line in scripts of old browsers.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    programs = [f'<script type="application/json" id="data">{text}</script>', f"<script>{script}</script>"]
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">',
        f"<style>{STYLE}{style}</style>\n</head>\n<body>",
        *body,
        *(programs if script else []),
        "</body>\n</html>\n",
    ]
    return "\n".join(lines)


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values."""
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with names of columns."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    kind = ' class="columns"' if len(head) > 3 else ""
    return f'<div class="wide"><table{kind}>{"".join(lines)}</table></div>'


def format_bytes(size: float) -> str:
    """A size with its binary unit, such as ``1.25 GiB``."""
    if size >= 1 << 30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB" if size >= 1 << 14 else f"{size:,.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration with its unit, such as ``12.5 ms``."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"

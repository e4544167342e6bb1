"""The messages of errors, read from the source. The page of errors lists them, so that they can be searched for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("neuron_accel", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/src")))
GAP = "…"
"""What stands for a value that a message contains."""


class Message(NamedTuple):
    """What is wrong, and what to do about it; empty if the source computes it."""

    error: str
    what: str
    fix: str


@cache
def messages() -> list[Message]:
    """Every message that a ``raise`` spells out, sorted."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return sorted({message for file in files for message in _of(ast.parse(file.read_text(encoding="utf-8")))})


def _of(tree: ast.AST) -> Iterator[Message]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "error" and {keyword.arg for keyword in node.keywords} & {"why", "fix"}:
            name = "ConfigurationError"  # of a place in a file (Location)
        what = _text(node.args[0])
        if name.endswith("Error") and name[0].isupper() and _says_something(what):
            fixes = [_text(keyword.value) for keyword in node.keywords if keyword.arg == "fix"]
            yield Message(name, what, fixes[0] if fixes and _says_something(fixes[0]) else "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return GAP


def _says_something(text: str) -> bool:
    return len(text.replace(GAP, "").split()) >= 3


def rows(error: str, found: list[Message]) -> str:
    """A table in Markdown of the messages of one class; empty if it has none."""
    lines = [f"| {_cell(message.what)} | {_cell(message.fix)} |" for message in found if message.error == error]
    return "\n".join(["| message | what to do |", "| --- | --- |", *lines]) if lines else ""


def _cell(text: str) -> str:
    for special in "\\|`*_<>[]$#{}":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split()).replace(f"{GAP}.", GAP)

"""Collectives in the text of an HLO module."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_INSTRUCTION = re.compile(
    r"= .+? (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One instruction.

    Args:
        op: as HLO calls it.
        groups: its replica groups.
        sizes: bytes of each array among its operands.
    """

    op: str
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)


def collectives(module: str) -> list[Collective]:
    """The collectives of a module, in the order of the text."""
    found = []
    for line in module.splitlines():
        match = _INSTRUCTION.search(line)
        if match:
            listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", match["rest"])
            groups = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
            sizes = tuple(_size(kind, dims) for kind, dims in _ARRAY.findall(match["operands"]) if kind in _BYTES)
            found.append(Collective(match["op"], tuple(tuple(map(int, g.split(","))) for g in groups), sizes))
    return found


def instructions(module: str) -> int:
    """Number of instructions in a module."""
    return sum(1 for line in module.splitlines() if re.match(r"\s+(ROOT )?%\S+ = ", line))


def _size(kind: str, dims: str) -> int:
    total = _BYTES[kind]
    for dim in dims.split(","):
        total *= int(dim or 1)
    return total


def dots(module: str) -> int:
    """Number of matrix products in a module."""
    return len(re.findall(r" dot\(", module))


def barriers(module: str) -> int:
    """Number of optimization barriers in a module."""
    return len(re.findall(r" opt-barrier\(", module))

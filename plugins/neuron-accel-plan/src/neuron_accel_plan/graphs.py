# SPDX-License-Identifier: Apache-2.0
"""What the compiler of a Trainium instance refuses, by the operations of a step: the part of its rules that names
operations. ``neuron-accel precompile --check`` applies all of them, to the graphs themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COMPLEX = "complex numbers"

_SORTS = ("sort", "argsort", "msort", "topk", "kthvalue", "median", "unique")
_COUNTS = ("histc", "bincount", "nonzero", "masked_select", "_grouped_mm")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a step.

    Args:
        code: the compiler's error code; empty if the graph cannot even be made.
        what: what is wrong, with the operations.
        certain: whether it is refused; otherwise it is not among what is documented as supported.
    """

    code: str
    what: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.code}: {self.what}" if self.code else self.what


def findings(operations: Iterable[str]) -> list[Finding]:
    """Returns what is wrong with a step of these operations (:data:`NOTED`)."""
    seen = sorted(operations)
    sorts, counts = ([name for name in seen if name in kind] for kind in (_SORTS, _COUNTS))
    found = []
    if COMPLEX in seen:
        found.append(Finding("NCC_EVRF004", "complex numbers are not supported", True))
    if counts:
        what = f"{', '.join(counts)}: XLA has no such operator, or its shapes depend on values"
        found.append(Finding("", what, True))
    if sorts:
        what = f"sort is not among the operators that are documented as supported ({', '.join(sorts)})"
        found.append(Finding("NCC_EVRF001", what, False))
    return found


NOTED = frozenset((*_SORTS, *_COUNTS))
"""Names of operations that :func:`findings` knows, besides :data:`COMPLEX`."""

"""Takes features away from a failing case while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.case import Case, simpler
from tests.fuzz.judge import SECONDS, Verdict, judge


def shrink(
    verdict: Verdict, *, seconds: float = SECONDS, judged: Callable[..., Verdict] = judge, tries: int = 120
) -> Verdict:
    """The verdict of the smallest case that was found.

    Args:
        verdict: of the case to begin with.
        judged: runs a case.
        tries: cases to run at most.
    """
    tried: set[Case] = {verdict.case}
    while True:
        for case in simpler(verdict.case):
            if case in tried:
                continue
            if len(tried) > tries:
                return verdict
            tried.add(case)
            found = judged(case, seconds=seconds)
            if found.kind == verdict.kind and found.sort == verdict.sort:
                verdict = found
                break
        else:
            return verdict

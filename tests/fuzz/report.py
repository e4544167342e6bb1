"""What became of many cases, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.fuzz.judge import Verdict

KINDS = ("ok", "vague", "refused", "failed", "invalid")


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts by composition, and of the reasons of refusals."""
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.case.composition, Counter())[verdict.kind] += 1
    width = max(map(len, counts), default=0)
    lines = ["", f"{'composition':{max(width, 11)}}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for name in sorted(counts):
        lines.append(f"{name:{max(width, 11)}}" + "".join(f"{counts[name][kind] or '-':>9}" for kind in KINDS))
    total = Counter(verdict.kind for verdict in verdicts)
    lines.append(f"{'all':{max(width, 11)}}" + "".join(f"{total[kind] or '-':>9}" for kind in KINDS))
    reasons = Counter(verdict.detail for verdict in verdicts if verdict.kind == "refused")
    if reasons:
        lines += ["", "refused:", *(f"{count:>5}  {reason}" for reason, count in reasons.most_common())]
    failed = [verdict for verdict in verdicts if verdict.failed]
    if failed:
        lines += ["", "failed:"]
        lines += [f"{v.case.seed:>7}  {v.sort}: {v.case.describe()}" for v in failed]
    return "\n".join(lines)

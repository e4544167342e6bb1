"""What a newer release beneath this package broke, as a table: ``python -m tests.upstream REPORT.xml PACKAGE...``.

REPORT.xml is what ``pytest --junit-xml`` wrote. ``nox -s upstream`` calls this.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree


def broken(report: Path) -> Counter[tuple[str, str]]:
    """Numbers of failed cases, by file of the test and first line of the error."""
    found: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in (*case.findall("failure"), *case.findall("error")):
            lines = outcome.get("message", "").strip().splitlines() or ["(no message)"]
            error = re.sub(r"^.*rank \d+ of \d+: ", "", lines[0])  # which rank said it first does not matter
            found[case.get("classname", "").partition(".Test")[0], error[:140]] += 1
    return found


def table(releases: dict[str, str], found: Counter[tuple[str, str]]) -> str:
    """Markdown: the releases, then what broke, the most frequent first."""
    lines = [
        "| package | release |",
        "| --- | --- |",
        *(f"| {name} | {release} |" for name, release in releases.items()),
    ]
    if not found:
        return "\n".join([*lines, "", "Nothing broke."])
    lines += ["", "| tests | broke | error |", "| --- | --- | --- |"]
    for (file, error), number in found.most_common():
        lines.append(f"| {file} | {number} | {error.replace('|', '/')} |")
    return "\n".join(lines)


def release_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(report: str, *packages: str) -> int:
    found = broken(Path(report))
    print(table({package: release_of(package) for package in packages}, found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

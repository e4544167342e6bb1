# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel bundle``: what a support ticket asks for, in one file without secrets."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from neuron_accel.commands import main, show
from neuron_accel.errors import ConfigurationError
from neuron_accel_report.files import write_whole

DESCRIPTION = """\
Write a zip file for a support ticket: what `neuron-accel env --network` and `neuron-accel cache list` show, the
installed packages, the output of Neuron's tools if they are installed, and the text files named by --include: logs, a
plan, the report of a run. Values of variables and settings that look like secrets are removed from all of them; look
through the file before you send it.
"""
EXAMPLES = """\
examples:
  neuron-accel bundle ticket.zip --include run_report --include logs
"""

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|(^|_)P(WD|AT)$(?<!^PWD)(?<!^OLDPWD)|CREDENTIAL|(^|_)(API_?)?KEY(_|$)|AUTH|JWT|BEARER"
    r"|COOKIE",
    re.IGNORECASE,
)
"""Names of variables whose values are secret."""
URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
MOST_BYTES = 20 << 20
"""Bytes of a file that are kept, at its end: the error of a log is there."""
MOST_FILES = 2000
TOOLS = {
    "neuron-ls": ("neuron-ls", "--json-output"),
    "neuronx-cc": ("neuronx-cc", "--version"),
    "neuron-driver": ("modinfo", "neuron"),
}
"""Commands whose output is added if they are installed, by the name of their file."""
_TOOL_S = 20.0
_SHORTEST_SECRET = 4
_NO_SECRETS = ("true", "false", "null", "none")
_HIDDEN = "(not shown)"
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS access keys
    r"|\b(?:hf|gh[pousr]|sk|xox[abp])[_-][A-Za-z0-9_-]{16,}"  # Hugging Face, GitHub, OpenAI, Slack
    r"|\b(?:github_pat_|glpat-|npm_|pypi-|AIza)[A-Za-z0-9_-]{16,}"  # GitHub, GitLab, npm, PyPI, Google
    r"|\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"  # JSON Web Tokens
    r"|(?<=X-Amz-Signature=)[0-9a-fA-F]+|(?<=X-Amz-Security-Token=)[^&\s]+"  # signed addresses
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
_NAMES = r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|jwt|bearer|_pwd|_pat)"
_HEADER = re.compile(
    r"(?i)(\b(?:(?:proxy-)?authorization|x-auth[\w-]*|x-api-key|(?:set-)?cookie)[\"']?\s*[:=]\s*[\"']?)[^\n\"']+"
)
"""Headers of a request that carry a secret, to the end of the line."""
_WORDS = re.compile(r"(?i)(\b[\w.-]*(?:passw(?:or)?d|passphrase)[\"']?:[ \t]+)(?![\"'])[^\n,;}]+")
"""A password of several words."""
_OPTION = re.compile(rf"(?i)((?<![\w-])--?[\w-]*{_NAMES}[ =])(?!\(not shown\))(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}}\"']+)")
"""``--name value`` and ``--name=value``."""
_ASSIGNED = re.compile(
    rf"(?i)([\"']?(?<![\w-])[\w.-]*{_NAMES}\b[\"']?\s*[:=]\s*)(?!\(not shown\))"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}\"']+)"
)
"""``name: value`` and ``name=value`` whose name suggests a secret."""


class Redactor:
    """Removes secrets from text: values of environment variables whose names suggest one, keys of known forms, values
    that are assigned to such names, and passwords in URLs.

    Args:
        environment: the environment variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value
            for name, value in environment.items()
            if SECRET.search(name) and len(value) >= _SHORTEST_SECRET and value.lower() not in _NO_SECRETS
        }
        longest_first = sorted(values, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def __call__(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(_HIDDEN, text)
        text = _HEADER.sub(rf"\1{_HIDDEN}", _KEYS.sub(_HIDDEN, text))
        text = _WORDS.sub(rf"\1{_HIDDEN}", text)
        text = _ASSIGNED.sub(_hide, _OPTION.sub(_hide, text))
        return URL_CREDENTIALS.sub("***@", text)


def _hide(match: re.Match[str]) -> str:
    quote = match[2][0] if match[2][0] in "\"'" else ""
    return f"{match[1]}{quote}{_HIDDEN}{quote}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="FILE", help="the zip file to write")
    parser.add_argument(
        "--include",
        type=Path,
        metavar="PATH",
        action="append",
        default=[],
        help="a file, or a folder of text files; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    redact, buffer = Redactor(os.environ), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents(args.include):
            archive.writestr(name, redact(content))
    write_whole(args.output, buffer.getvalue())
    show(f"{args.output}: {buffer.tell() / 1e6:.1f} MB; look through it before you send it")
    return 0


def contents(included: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the files of the archive.

    Args:
        included: files, and folders whose files are taken.

    Raises:
        ConfigurationError: if one of ``included`` does not exist.
    """
    yield "env.txt", shown("env", "--network")
    yield "env.json", shown("env", "--network", "--json")
    yield "packages.txt", "\n".join(packages()) + "\n"
    yield "compile_cache.txt", shown("cache", "list")
    for name, command in TOOLS.items():
        output = output_of(command)
        if output is not None:
            yield f"{name}.txt", output
    for path in included:
        yield from _files(path)


def shown(*words: str) -> str:
    """What a command prints, with its errors."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        main(words)
    return text.getvalue()


def packages() -> list[str]:
    """Names and versions of the installed distributions."""
    found = {
        (each.metadata["Name"] or "?", each.version) for each in importlib.metadata.distributions() if each.metadata
    }
    return [f"{name}=={version}" for name, version in sorted(found, key=lambda pair: pair[0].lower())]


def output_of(command: tuple[str, ...]) -> str | None:
    """The output of a command; None if it is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return f"{done.stdout}{done.stderr}"


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """The text files of a folder, or one file, with their names in the archive."""
    if path.is_file():
        yield f"files/{path.name}", _end_of(path)
        return
    if not path.is_dir():
        raise ConfigurationError(
            f"{str(path)!r} does not exist.", where="--include", fix="name a file, or a folder of logs or of a report"
        )
    base = path.resolve().name or "root"
    found = sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    for each in found[:MOST_FILES]:
        if _is_text(each):
            yield f"files/{base}/{each.relative_to(path).as_posix()}", _end_of(each)
    if len(found) > MOST_FILES:
        yield f"files/{base}/left-out.txt", "\n".join(str(each.relative_to(path)) for each in found[MOST_FILES:]) + "\n"


def _is_text(path: Path) -> bool:
    """Whether a file begins with text: weights, graphs and archives do not belong into a ticket."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


def _end_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            text = file.read(MOST_BYTES).decode(errors="backslashreplace")
    except OSError as error:
        return f"cannot be read: {error}\n"
    return text if size <= MOST_BYTES else f"(the last {MOST_BYTES} of {size} bytes)\n{text}"

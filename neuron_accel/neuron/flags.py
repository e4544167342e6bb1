"""The text of ``NEURON_CC_FLAGS``: reading it, writing it, and merging two of them.

It carries options of the compiler (neuronx-cc) and of the wrapper around it that keeps the compile cache. Sources: the
SDK's neuronx-cc command line reference and its page on the persistent cache.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError

VARIABLE = "NEURON_CC_FLAGS"

VALUES: Mapping[str, tuple[str, ...]] = {
    "--model-type": ("generic", "transformer", "unet-inference", "cnn-training"),
    "--auto-cast": ("none", "matmult", "all"),
    "--auto-cast-type": ("bf16", "fp16", "tf32", "fp8_e4m3"),
    "--distribution-strategy": ("llm-training",),
    "--optlevel": ("1", "2", "3"),
    "--lnc": ("1", "2"),
    "--native-int64": ("enabled", "disabled"),
    "--target": ("inf2", "trn1", "trn1n", "trn2", "trn3"),
    "--verbose": ("debug", "info", "warning", "error", "critical"),
    "--log_level": ("INFO", "WARNING", "ERROR"),
}
"""What may follow an option, where that is a closed list."""

WITH_TEXT = ("--cache_dir", "--logfile", "--output", "--implicit-integer-downcast", "--tensorizer-options")
SWITCHES = (
    "--enable-mixed-precision-accumulation",
    "--disable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
    "--no_cache",
    "--retry_failed_compilation",
)
CACHE_OPTIONS = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")
"""For the wrapper: they never reach the compiler and are no part of the cache's key."""

ALIASES = {"-O": "--optlevel", "-lnc": "--lnc", "--logical-nc-config": "--lnc"}
REMOVED = {
    "--cache_size": "neuron-accel cache prune --max-size",
    "--cache_ttl": "neuron-accel cache prune --ttl",
}
EXCLUDE = (("--enable-mixed-precision-accumulation", "--disable-mixed-precision-accumulation"),)
REPEATABLE = ("--tensorizer-options", "--internal-hlo2tensorizer-options")

_KNOWN = (*VALUES, *WITH_TEXT, *SWITCHES)


@dataclass(frozen=True)
class Flag:
    """One option.

    Args:
        name: its long name.
        value: what follows it; None for a switch.
        text: as it was written.
    """

    name: str
    value: str | None
    text: str

    @property
    def written(self) -> str:
        """In the form that every version of the tools reads."""
        if self.name not in _KNOWN:
            return " ".join(map(shlex.quote, shlex.split(self.text)))
        if self.name == "--optlevel":
            return f"-O{self.value}"
        if self.name == "--lnc":
            return f"-lnc={self.value}"
        return self.name if self.value is None else f"{self.name}={shlex.quote(self.value)}"


def parse(text: str, where: str = VARIABLE) -> tuple[Flag, ...]:
    """The options in ``text``. Options that are not known here are kept as they are.

    Raises:
        ConfigurationError: if it is no list of options, or one of them cannot be.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} cannot be read: {error}.", where=where, why="it is split as a shell would", fix="close the quote"
        ) from None
    flags = []
    while words:
        flags.append(_next(words, where))
    return combine(flags, where=where)


def _next(words: list[str], where: str) -> Flag:
    """Takes the first option, and its value, off ``words``."""
    word = words.pop(0)
    if not word.startswith("-") or word in ("-", "--"):
        raise ConfigurationError(
            f"{word!r} is no option.",
            where=where,
            why="options begin with a dash, and what comes before this one takes no value",
            fix=f"write --{word.lstrip('-')}, quote a value with spaces, or leave it out",
        )
    name, assigned, value = word.partition("=")
    given: str | None = value if assigned else None
    if name[:2] == "-O" and len(name) > 2 and not assigned:
        name, given = "-O", name[2:]
    name = ALIASES.get(name, name)
    text = word
    takes_value = name in VALUES or name in WITH_TEXT
    if given is None and words and not words[0].startswith("-") and (takes_value or name not in SWITCHES):
        given = words.pop(0)
        text = f"{word} {shlex.quote(given)}"
    flag = Flag(name, given, text)
    _check(flag, where)
    return flag


def _check(flag: Flag, where: str) -> None:
    name, value = flag.name, flag.value
    if name in REMOVED:
        raise ConfigurationError(
            f"{flag.text} does nothing.",
            where=where,
            why=f"torch-neuronx dropped {name} in 1.13.1.1.8.0 (June 2023)",
            fix=f"leave it out, and run `{REMOVED[name]}` when it suits you",
        )
    if name in SWITCHES and value is not None:
        raise ConfigurationError(f"{name} takes no value, but has {value!r}.", where=where, fix=f"write {name}")
    if name in VALUES or name in WITH_TEXT:
        if not value:
            possible = f": {', '.join(VALUES[name])}" if name in VALUES else ""
            raise ConfigurationError(f"{flag.text} has no value.", where=where, fix=f"write {name}=VALUE{possible}")
        if name in VALUES and value not in VALUES[name]:
            raise ConfigurationError(
                f"{flag.text}: {value!r} is no value of {name}.", where=where, fix=f"give {', '.join(VALUES[name])}"
            )
        return
    near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.9)
    if name not in _KNOWN and near:
        raise ConfigurationError(
            f"{name} is no option of the compiler or its cache.",
            where=where,
            why="misspelt, it would be refused after minutes, or silently ignored",
            fix=f"did you mean {near[0]}?",
        )


def combine(*sources: Iterable[Flag], where: str, other: str | None = None) -> tuple[Flag, ...]:
    """One list without repetitions, in order of first appearance.

    Args:
        sources: lists of options; a later one may repeat, but not contradict, an earlier one.
        where: what the first list is, for messages.
        other: what the others are.

    Raises:
        ConfigurationError: naming both, if two of them contradict each other.
    """
    merged: dict[tuple[str, str | None], Flag] = {}
    by_name: dict[str, tuple[Flag, str]] = {}
    for index, source in enumerate(sources):
        origin = where if index == 0 else other or where
        for flag in source:
            for name in (flag.name, *_excluded_by(flag.name)):
                if name in by_name and flag.name not in REPEATABLE:
                    earlier, from_where = by_name[name]
                    if name != flag.name or earlier.value != flag.value:
                        raise _contradiction(earlier, from_where, flag, origin)
            by_name.setdefault(flag.name, (flag, origin))
            merged.setdefault((flag.name, flag.value), flag)
    return tuple(merged.values())


def _excluded_by(name: str) -> tuple[str, ...]:
    return tuple(other for pair in EXCLUDE if name in pair for other in pair if other != name)


def _contradiction(first: Flag, first_from: str, second: Flag, second_from: str) -> ConfigurationError:
    both = first_from if first_from == second_from else f"{first_from}; {second_from}"
    return ConfigurationError(
        f"{first.text} and {second.text} contradict each other.",
        where=both,
        why="the compiler would follow one of them, and which one differs between versions",
        fix=f"drop {first.text} from {first_from}, or {second.text} from {second_from}",
    )


def write(flags: Iterable[Flag]) -> str:
    """The text that :func:`parse` reads."""
    return " ".join(flag.written for flag in flags)

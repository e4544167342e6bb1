# SPDX-License-Identifier: Apache-2.0
"""Parsing, merging and writing the text of ``NEURON_CC_FLAGS``.

It contains options of the compiler (neuronx-cc) and of the wrapper around it that keeps the compile cache. Sources: the
neuronx-cc command line reference of SDK 2.32 and the SDK's page on the persistent cache.

The compiler has options that its reference does not list, and releases add some. So unlisted options and values are
passed on, with a remark (:func:`remarks`); those that no version accepts are errors.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.facts import FACTS

VARIABLE = "NEURON_CC_FLAGS"

VALUES: Mapping[str, tuple[str, ...]] = {row["name"]: tuple(row["values"]) for row in FACTS["flags"]}
"""Values of options according to the reference."""

CLOSED = tuple(row["name"] for row in FACTS["flags"] if row.get("closed"))
"""Options without other values in any release. For other options, pages of the SDK use values that the reference does
not list (``--auto-cast=matmul``, ``--distribution-strategy=NEMO``)."""

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
"""Options of the wrapper, which are not passed to the compiler and are not part of the cache's key."""

ALIASES = {"-O": "--optlevel", "-lnc": "--lnc", "--logical-nc-config": "--lnc"}
REMOVED = {
    "--cache_size": "neuron-accel cache prune --max-size",
    "--cache_ttl": "neuron-accel cache prune --ttl",
}
EXCLUDE = (("--enable-mixed-precision-accumulation", "--disable-mixed-precision-accumulation"),)
REPEATABLE = ("--tensorizer-options", "--internal-hlo2tensorizer-options")

_TRUE, _FALSE = ("true", "1"), ("false", "0")
_KNOWN = (*VALUES, *WITH_TEXT, *SWITCHES)


@dataclass(frozen=True)
class Flag:
    """One option.

    Args:
        name: its long name.
        value: its value; None for a switch.
        text: the flag as it was written.
    """

    name: str
    value: str | None
    text: str

    @property
    def written(self) -> str:
        """The flag in the form that every version of the tools accepts."""
        if self.name not in _KNOWN:
            return " ".join(map(shlex.quote, shlex.split(self.text)))
        if self.name == "--optlevel":
            return f"-O{self.value}"
        if self.name == "--lnc":
            return f"-lnc={self.value}"
        return self.name if self.value is None else f"{self.name}={shlex.quote(self.value)}"

    @property
    def meaning(self) -> str | None:
        """Its value, where ``=true`` after a switch is the same as none."""
        is_on = self.name in SWITCHES and self.value is not None and self.value.lower() in _TRUE
        return None if is_on else self.value


def parse(text: str, where: str = VARIABLE) -> tuple[Flag, ...]:
    """Parses options. Of repeated options the last one counts, as for the compiler; unknown ones are kept.

    Args:
        text: the options.
        where: where they are from, for error messages.

    Raises:
        ConfigurationError: if ``text`` is not a list of options, or one of them is not valid.
    """
    return combine(_read(text, where), where=where)


def remarks(text: str, where: str = VARIABLE) -> list[str]:
    """Returns warnings about possible mistakes: unlisted names and values, and repetitions.

    Args:
        text: the options.
        where: where they are from, for error messages.

    Raises:
        ConfigurationError: as for :func:`parse`.
    """
    flags = _read(text, where)
    found = [said for flag in flags if (said := _oddity(flag)) is not None]
    for position, flag in enumerate(flags):
        names = (flag.name, *_excluded_by(flag.name)) if flag.name not in REPEATABLE else ()
        later = next((other for other in reversed(flags[position + 1 :]) if other.name in names), flag)
        if (later.name, later.meaning) != (flag.name, flag.meaning):
            found.append(f"{flag.text} is overridden by {later.text} after it")
    return list(dict.fromkeys(found))


def _oddity(flag: Flag) -> str | None:
    name, value = flag.name, flag.value
    if name in SWITCHES:
        is_truth = value is None or value.lower() in (*_TRUE, *_FALSE)
        return None if is_truth else f"{flag.text}: {name} is a switch"
    if name in VALUES:
        is_listed = value in VALUES[name] or (name == "--verbose" and str(value).isdecimal())
        return None if is_listed else f"{flag.text}: listed values are {', '.join(VALUES[name])}"
    near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.9) if name not in _KNOWN else []
    return f"{flag.text} is passed on unchanged; did you mean {near[0]}?" if near else None


def _read(text: str, where: str) -> list[Flag]:
    """All options, in order."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} cannot be parsed: {error}.", where=where, why="it is split as by a shell", fix="close the quote"
        ) from None
    flags = []
    while words:
        flags.append(_next(words, where))
    return flags


def _next(words: list[str], where: str) -> Flag:
    """Removes the first option, with its value, from ``words`` and returns it."""
    word = words.pop(0)
    if not word.startswith("-") or word in ("-", "--"):
        raise ConfigurationError(
            f"{word!r} is not an option.",
            where=where,
            why="options begin with a dash, and the option before it takes no value",
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
            f"{flag.text} has no effect.",
            where=where,
            why=f"torch-neuronx removed {name} in 1.13.1.1.8.0 (June 2023)",
            fix=f"leave it out, and run `{REMOVED[name]}`",
        )
    if name in SWITCHES and name in CACHE_OPTIONS and value is not None:
        raise ConfigurationError(f"{name} takes no value, but got {value!r}.", where=where, fix=f"write {name}")
    if (name in VALUES or name in WITH_TEXT) and not value:
        possible = f": {', '.join(VALUES[name])}" if name in VALUES else ""
        raise ConfigurationError(f"{flag.text} has no value.", where=where, fix=f"write {name}=VALUE{possible}")
    if name in CLOSED and value not in VALUES[name]:
        raise ConfigurationError(
            f"{flag.text}: {value!r} is not a valid value of {name}.",
            where=where,
            fix=f"pass one of {', '.join(VALUES[name])}",
        )


def combine(*sources: Iterable[Flag], where: str, other: str | None = None) -> tuple[Flag, ...]:
    """Combines lists of options into one without repetitions.

    Args:
        sources: lists of options. Within a list the last of repeated options counts; a later list may repeat options of
            an earlier one, but not contradict them.
        where: where the first list is from, for error messages.
        other: where the other lists are from.

    Raises:
        ConfigurationError: if options of two lists contradict each other.
    """
    merged: list[Flag] = []
    origins: dict[str, str] = {}
    for index, source in enumerate(sources):
        origin = where if index == 0 else other or where
        for flag in _last_of_each(source):
            if flag.name in REPEATABLE:
                merged += [flag] if flag not in merged else []
                continue
            for earlier in merged:
                differs = earlier.name == flag.name and earlier.meaning != flag.meaning
                if differs or earlier.name in _excluded_by(flag.name):
                    raise _contradiction(earlier, origins[earlier.name], flag, origin)
            if flag.name not in origins:
                origins[flag.name] = origin
                merged.append(flag)
    return tuple(merged)


def _last_of_each(flags: Iterable[Flag]) -> list[Flag]:
    """The options that no later one overrides."""
    kept: list[Flag] = []
    for flag in flags:
        replaced = (flag.name, *_excluded_by(flag.name)) if flag.name not in REPEATABLE else ()
        kept = [earlier for earlier in kept if earlier.name not in replaced]
        kept.append(flag)
    return kept


def _excluded_by(name: str) -> tuple[str, ...]:
    return tuple(other for pair in EXCLUDE if name in pair for other in pair if other != name)


def _contradiction(first: Flag, first_from: str, second: Flag, second_from: str) -> ConfigurationError:
    both = first_from if first_from == second_from else f"{first_from}; {second_from}"
    return ConfigurationError(
        f"{first.text} and {second.text} contradict each other.",
        where=both,
        why="only one of them would have an effect",
        fix=f"remove {first.text} from {first_from}, or {second.text} from {second_from}",
    )


def write(flags: Iterable[Flag]) -> str:
    """The options as text, which :func:`parse` accepts."""
    return " ".join(flag.written for flag in flags)

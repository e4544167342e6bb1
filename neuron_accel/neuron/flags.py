"""The text of ``NEURON_CC_FLAGS``: reading it, writing it, and merging two of them.

It carries options of the compiler (neuronx-cc) and of the wrapper around it that keeps the compile cache. Sources: the
SDK's neuronx-cc command line reference (SDK 2.32) and its page on the persistent cache.

The compiler knows more options than its reference lists, and every release adds some. So an option or a value that is
not listed is passed on, with a remark (:func:`remarks`); an error is what no version can read.
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
    "--distribution-strategy": ("generic", "llm-training", "NEMO", "nemo"),
    "--optlevel": ("1", "2", "3"),
    "--lnc": ("1", "2"),
    "--native-int64": ("default", "enabled", "disabled"),
    "--target": ("inf2", "trn1", "trn1n", "trn2", "trn3"),
    "--verbose": ("debug", "info", "warning", "error", "critical"),
    "--log_level": ("INFO", "WARNING", "ERROR"),
}
"""What the reference lists as values of an option."""

CLOSED = ("--optlevel", "--lnc", "--log_level")
"""Options that have had no other values in any release; elsewhere the SDK's own pages use values that the reference
does not list (``--auto-cast=matmul``, ``--distribution-strategy=NEMO``)."""

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
"""For the wrapper: they never reach the compiler and do not belong to the cache's key."""

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

    @property
    def meaning(self) -> str | None:
        """Its value, where a switch and the same switch with ``=true`` are alike."""
        is_on = self.name in SWITCHES and self.value is not None and self.value.lower() in _TRUE
        return None if is_on else self.value


def parse(text: str, where: str = VARIABLE) -> tuple[Flag, ...]:
    """The options in ``text``. Of an option that is repeated the last one counts, as for the compiler. Options that are
    not known here are kept as they are.

    Raises:
        ConfigurationError: if it is not a list of options, or one of them is not valid.
    """
    return combine(_read(text, where), where=where)


def remarks(text: str, where: str = VARIABLE) -> list[str]:
    """What is odd about the options in ``text``, and may be a slip: unlisted names and values, repetitions.

    Raises:
        ConfigurationError: as for :func:`parse`.
    """
    flags = _read(text, where)
    found = [said for flag in flags if (said := _oddity(flag)) is not None]
    for position, flag in enumerate(flags):
        names = (flag.name, *_excluded_by(flag.name)) if flag.name not in REPEATABLE else ()
        later = next((other for other in reversed(flags[position + 1 :]) if other.name in names), flag)
        if (later.name, later.meaning) != (flag.name, flag.meaning):
            found.append(f"{flag.text} is replaced by {later.text} to its right")
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
    return f"{flag.text} is passed on as it is; did you mean {near[0]}?" if near else None


def _read(text: str, where: str) -> list[Flag]:
    """All options, in the order in which they are written."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} cannot be read: {error}.", where=where, why="it is split as a shell would", fix="close the quote"
        ) from None
    flags = []
    while words:
        flags.append(_next(words, where))
    return flags


def _next(words: list[str], where: str) -> Flag:
    """Takes the first option, and its value, off ``words``."""
    word = words.pop(0)
    if not word.startswith("-") or word in ("-", "--"):
        raise ConfigurationError(
            f"{word!r} is not an option.",
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
    if name in SWITCHES and name in CACHE_OPTIONS and value is not None:
        raise ConfigurationError(f"{name} takes no value, but has {value!r}.", where=where, fix=f"write {name}")
    if (name in VALUES or name in WITH_TEXT) and not value:
        possible = f": {', '.join(VALUES[name])}" if name in VALUES else ""
        raise ConfigurationError(f"{flag.text} has no value.", where=where, fix=f"write {name}=VALUE{possible}")
    if name in CLOSED and value not in VALUES[name]:
        raise ConfigurationError(
            f"{flag.text}: {value!r} is not a valid value of {name}.",
            where=where,
            fix=f"give {', '.join(VALUES[name])}",
        )


def combine(*sources: Iterable[Flag], where: str, other: str | None = None) -> tuple[Flag, ...]:
    """One list without repetitions.

    Args:
        sources: lists of options. Within one the last of several with the same name counts; a later list may repeat an
            earlier one, but not contradict it.
        where: what the first list is, for messages.
        other: what the others are.

    Raises:
        ConfigurationError: naming both, if options of two lists contradict each other.
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
    """Without those that one to their right replaces."""
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
        why="the compiler would follow one of them only",
        fix=f"drop {first.text} from {first_from}, or {second.text} from {second_from}",
    )


def write(flags: Iterable[Flag]) -> str:
    """The text that :func:`parse` reads."""
    return " ".join(flag.written for flag in flags)

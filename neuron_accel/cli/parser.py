# SPDX-License-Identifier: Apache-2.0
"""Parsing the command line: help that fits the terminal, and error messages with the most similar option.

For an unknown option of a subcommand argparse prints the usage of the program; :class:`Parser` prints that of the
subcommand.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from neuron_accel.errors import NeuronAccelError
from neuron_accel.terminal import show, terminal_width, wrap_words


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the description and the examples to the width of the terminal. It keeps paragraphs, indented lines, and the
    two columns of examples, and leaves out spellings of options with underscores."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        width = terminal_width() - 1
        super().__init__(prog, **{"width": width, "max_help_position": min(30, width // 3), **kwargs})

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):  # argparse ignores their indentation
            length = len(self._format_action_invocation(command)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_filled(text, width))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap_words(text, width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [option for option in action.option_strings if "_" not in option]
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown) + value


def _filled(text: str, width: int) -> Iterator[str]:
    """Rewraps a text to ``width``. Paragraphs that contain an indented line are wrapped line by line."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.split("\n")
        if any(line.startswith(" ") for line in lines):
            for line in lines:
                yield from _line(line, width, columns=all(len(each) <= width for each in lines))
        else:
            yield from wrap_words(" ".join(lines), width)
        yield ""


def _line(line: str, width: int, columns: bool) -> Iterator[str]:
    """Wraps one line: its columns beside or below each other, and a command continued with backslashes."""
    indent = re.match(r" *", line).group()  # type: ignore[union-attr]
    first, rest = [*re.split(r" {2,}", line.strip(), maxsplit=1), ""][:2]
    if len(line) <= width and (columns or not rest or "neuron-accel " not in first):
        yield line
        return
    is_command = "neuron-accel " in first
    step = " " * 4
    wrapped = textwrap.wrap(
        first,
        width - 2,
        initial_indent=indent,
        subsequent_indent=indent + (step if is_command else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from (f"{part} \\" if is_command and part is not wrapped[-1] else part for part in wrapped)
    if rest:
        yield from textwrap.wrap(
            rest, width, initial_indent=indent + step, subsequent_indent=indent + step, break_on_hyphens=False
        )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose error messages begin with its own usage and suggest the most similar option.

    Attributes:
        rest: name of the argument that receives the words after ``--``; None: they are arguments as all others.
        rest_usage: how the usage shows these words; empty if it does not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **kwargs})
        self.rest: str | None = None
        self.rest_usage = ""
        self._words: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if args is None:
            return super().parse_known_args(args, namespace)
        self._words = list(args)
        if self.rest is not None:
            end = self._words.index("--") if "--" in self._words else len(self._words)
            args, rest = self._words[:end], self._words[end + 1 :]
            namespace = argparse.Namespace() if namespace is None else namespace
            setattr(namespace, self.rest, rest)
        namespace, left = super().parse_known_args(args, namespace)
        unknown = [word for word in left if word.startswith("-") and word != "--"]
        if left:
            self.error(self._unknown(unknown[0]) if unknown else f"unexpected argument {left[0]!r}")
        return namespace, left

    def format_usage(self) -> str:
        usage = super().format_usage()
        if not self.rest_usage:
            return usage
        lines = usage.rstrip().splitlines()
        if len(lines[-1]) + 1 + len(self.rest_usage) < terminal_width():
            lines[-1] += f" {self.rest_usage}"
        else:
            lines.append(" " * len(f"usage: {self.prog} ") + self.rest_usage)
        return "\n".join(lines) + "\n"

    def format_help(self) -> str:
        return super().format_help().replace(super().format_usage(), self.format_usage(), 1)

    def error(self, message: str) -> NoReturn:
        if "required" in message:  # which may follow from an unknown option
            known = self._option_string_actions
            words = self._words[: self._words.index("--")] if "--" in self._words else self._words
            unknown = [w for w in words if re.match(r"--?[A-Za-z]", w) and w.partition("=")[0] not in known]
            message = self._unknown(unknown[0]) if unknown else message
        elif invalid := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(invalid[1], re.findall(r"[\w.-]+", invalid[2]), n=1, cutoff=0.5)
            message += f"; did you mean {near[0]}?" if near else ""
        self.print_usage(sys.stderr)
        show(f"{self.prog}: error: {message}", sys.stderr)
        self.exit(2)

    def _unknown(self, word: str) -> str:
        """The error message for an unknown option."""
        name = word.partition("=")[0]
        options = [
            option
            for option, action in self._option_string_actions.items()
            if option.startswith("--") and "_" not in option and action.help is not argparse.SUPPRESS
        ]
        letters = name.lstrip("-").replace("_", "-")
        near = [option for option in options if sorted(option) == sorted(f"--{letters}")]  # letters in another order
        near += difflib.get_close_matches(f"--{letters}", options, n=1, cutoff=0.6) if len(letters) > 2 else []
        near += [option for option in options if option.startswith(f"--{letters[:1]}")]
        rest = "" if self.rest is None else " (arguments of a script follow --)"
        return f"unknown option {name}{rest}" + (f"; did you mean {near[0]}?" if near else "")


def no_command(word: str, commands: Mapping[str, Any]) -> str:
    """The error message for an unknown command."""
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.5)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    listing = textwrap.fill(f"commands: {', '.join(commands)}", terminal_width() - 1, break_on_hyphens=False)
    return f"unknown command {word!r}{advice}\n{listing}"


@contextmanager
def naming_options(names: Mapping[str, str]) -> Iterator[None]:
    """A context manager in which error messages name options of the command line instead of arguments in Python.

    Args:
        names: option by argument, such as ``{"virtual_stages": "--virtual-stages"}``. In messages ``name=value``
            becomes ``--name value``.
    """
    try:
        yield
    except NeuronAccelError as error:
        parts = [_with_options(part, names) for part in (error.what, error.where, error.why, error.fix)]
        what, where, why, fix = parts
        raise type(error)(what or "", where=where, why=why, fix=fix) from error


def _with_options(text: str | None, names: Mapping[str, str]) -> str | None:
    for name, option in names.items():
        if text is not None:
            word = rf"(?<![\w.-]){re.escape(name)}"
            text = re.sub(rf"{word}=[\"']?([\w.-]+)[\"']?", rf"{option} \1", text)
            # A name without a dot or underscore may be an ordinary word of the message.
            alone = rf"{word}(?![\w-])" if re.search(r"[_.]", name) else rf"^{re.escape(name)}(?= is |$)"
            text = re.sub(alone, option, text)
    return text

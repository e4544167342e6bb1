# SPDX-License-Identifier: Apache-2.0
"""Reads configuration files, and records the line of each value for error messages."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

Key = Hashable
KeyPath = tuple[Key, ...]

IN_PYTHON = "the configuration given in Python"

MOST_BYTES = 256 * 1024
MOST_DEPTH = 40
MOST_VALUES = 10_000
"""Limits of a configuration file: bytes, levels of nesting, and values after aliases are expanded. They bound the time
and memory for reading a malicious file."""


@dataclass(frozen=True)
class Location:
    """The place of a value in a configuration.

    Args:
        source: name of the file, or :data:`IN_PYTHON`.
        lines: line number, from 1, of each place in the file.
        path: the keys and indices that lead to the value.
    """

    source: str = IN_PYTHON
    lines: Mapping[KeyPath, int] = field(default_factory=dict, repr=False)
    path: KeyPath = ()

    def __truediv__(self, key: Key) -> Location:
        return replace(self, path=(*self.path, key))

    @property
    def key_path(self) -> str:
        """The path as text, such as ``plugins[1].zero1.max_norm``."""
        text = "".join(f"[{key}]" if type(key) is int else f".{key}" for key in self.path)
        return text.removeprefix(".")

    def __str__(self) -> str:
        above = (self.path[:length] for length in range(len(self.path), 0, -1))
        line = next((self.lines[path] for path in above if path in self.lines), None)
        parts = [self.source, f"line {line}" if line else "", self.key_path]
        return ", ".join(part for part in parts if part)

    def error(self, what: str, *, why: str | None = None, fix: str | None = None) -> ConfigurationError:
        """Returns an error with this place, for the caller to raise."""
        return ConfigurationError(what, where=str(self), why=why, fix=fix)


def open_document(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Any, Location]:
    """Returns the data of a YAML file or a mapping, and the location of its root.

    Raises:
        ConfigurationError: if the file cannot be read, is not YAML or is empty.
    """
    if isinstance(source, Mapping):
        return source, Location()
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigurationError(
            f"A configuration must be a mapping or the path of a YAML file, not {source!r}.", where=IN_PYTHON
        )
    return _parse(_read(source), os.fspath(source))


def _read(source: str | os.PathLike[str]) -> str:
    try:
        # Opening a named pipe would wait for a writer.
        descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a file")
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES // 1024} KiB")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "The configuration file cannot be read.",
            where=repr(source) if "\0" in str(source) else os.fspath(source),
            why=getattr(error, "strerror", None) or str(error),
            fix="give the path of a YAML file, or a mapping",
        ) from error


def _parse(text: str, name: str) -> tuple[Any, Location]:
    import yaml

    try:
        _check_size(yaml.parse(text, yaml.SafeLoader), name)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigurationError(
                    "The configuration file is empty.", where=name, fix="write at least 'plugins: []'"
                )
            lines: dict[KeyPath, int] = {}
            _note_lines(node, Location(name), lines, ())
            return loader.construct_document(node), Location(name, lines)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigurationError(
            "The configuration file is not valid YAML.",
            where=f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name,
            why=getattr(error, "problem", None) or _first_line(error),
        ) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # of an invalid number or date
        raise ConfigurationError(
            "The configuration file has a value that cannot be read.", where=name, why=_first_line(error)
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _check_size(events: Iterable[yaml.Event], name: str) -> None:
    """Raises a ConfigurationError for too deep nesting, or too many values after aliases are expanded, before
    parsing."""
    import yaml

    sizes: dict[str, int] = {}
    open_ones: list[tuple[str | None, int]] = []  # anchors of enclosing collections, and number of values before them
    count = 0
    for event in events:
        at = f"{name}, line {event.start_mark.line + 1}" if event.start_mark else name
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(str(event.anchor), 1)
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            count += 1
            if anchor is not None:
                sizes[anchor] = 1  # that of a collection is set at its end
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((anchor, count - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_ones.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if len(open_ones) > MOST_DEPTH:
            raise ConfigurationError(
                f"The configuration is nested in more than {MOST_DEPTH} levels.",
                where=at,
                why="no option has so many",
                fix="check the brackets and the indentation",
            )
        if count > MOST_VALUES:
            raise ConfigurationError(
                f"The configuration has more than {MOST_VALUES} values.",
                where=at,
                why="aliases (*name) count as often as they are used",
                fix="reduce it, or give the plugin as an object in Python",
            )


def _note_lines(node: yaml.Node, at: Location, lines: dict[KeyPath, int], above: tuple[int, ...]) -> None:
    """Records the line of every key and item below ``node``. Raises errors for duplicate keys, keys that are
    collections, and values that contain themselves, which YAML accepts."""
    import yaml

    if id(node) in above:
        raise at.error("A value contains itself.", why="an alias refers to a mapping or list around it")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise Location(f"{at.source}, line {key.start_mark.line + 1}", path=at.path).error(
                    "A list or mapping cannot be a key.",
                    fix="write 'name: value'; for text that begins with a bracket or a question mark use quotes",
                )
            below = at / (int(key.value) if key.tag.endswith(":int") and _is_short(key.value) else key.value)
            if below.path in lines and key.tag != "tag:yaml.org,2002:merge":
                lines_text = f"lines {lines[below.path]} and {key.start_mark.line + 1}"
                raise at.error(
                    f"Key {key.value!r} is given twice, in {lines_text}.",
                    why="only the last one would count",
                    fix="keep one of them",
                )
            lines[below.path] = key.start_mark.line + 1
            _note_lines(value, below, lines, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            below = at / index
            lines[below.path] = item.start_mark.line + 1
            _note_lines(item, below, lines, above)


def _is_short(digits: str) -> bool:
    return digits.isdigit() and len(digits) < 20

"""A configuration document, and where in it a value stands, so that an error can point there."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

Key = Hashable
KeyPath = tuple[Key, ...]

IN_PYTHON = "the configuration given in Python"


@dataclass(frozen=True)
class Location:
    """A place in a document.

    Args:
        source: the file's name, or :data:`IN_PYTHON`.
        lines: line number, from 1, of every place in a file.
        path: keys and indices that lead to the place.
    """

    source: str = IN_PYTHON
    lines: Mapping[KeyPath, int] = field(default_factory=dict, repr=False)
    path: KeyPath = ()

    def __truediv__(self, key: Key) -> Location:
        return replace(self, path=(*self.path, key))

    @property
    def key_path(self) -> str:
        """``plugins[1].zero1.max_norm``"""
        text = "".join(f"[{key}]" if type(key) is int else f".{key}" for key in self.path)
        return text.removeprefix(".")

    def __str__(self) -> str:
        above = (self.path[:length] for length in range(len(self.path), 0, -1))
        line = next((self.lines[path] for path in above if path in self.lines), None)
        parts = [self.source, f"line {line}" if line else "", self.key_path]
        return ", ".join(part for part in parts if part)

    def error(self, what: str, *, why: str | None = None, fix: str | None = None) -> ConfigurationError:
        """An error about this place, for the caller to raise."""
        return ConfigurationError(what, where=str(self), why=why, fix=fix)


def open_document(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Any, Location]:
    """The data of a YAML file or a mapping, and the location of its root.

    Raises:
        ConfigurationError: if the file cannot be read, is no YAML or is empty.
    """
    if isinstance(source, Mapping):
        return source, Location()
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigurationError(
            f"A configuration is a mapping or the path of a YAML file, not {source!r}.", where=IN_PYTHON
        )
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "The configuration file cannot be read.",
            where=os.fspath(source),
            why=getattr(error, "strerror", None) or str(error),
            fix="give the path of a YAML file, or a mapping",
        ) from error
    return _parse(text, os.fspath(source))


def _parse(text: str, name: str) -> tuple[Any, Location]:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigurationError("The configuration file is empty.", where=name, fix="write at least 'plugins: []'")
        lines: dict[KeyPath, int] = {}
        _note_lines(node, Location(name), lines, ())
        return loader.construct_document(node), Location(name, lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigurationError(
            "The configuration file is no valid YAML.",
            where=f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name,
            why=getattr(error, "problem", None) or str(error),
        ) from error
    finally:
        loader.dispose()


def _note_lines(node: yaml.Node, at: Location, lines: dict[KeyPath, int], above: tuple[int, ...]) -> None:
    """Notes the line of every key and item below ``node``, and refuses what YAML would silently accept."""
    import yaml

    if id(node) in above:
        raise at.error("A value contains itself.", why="an alias refers to a mapping or list around it")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = at / (int(key.value) if key.tag.endswith(":int") and key.value.isdigit() else key.value)
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

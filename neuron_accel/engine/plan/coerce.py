# SPDX-License-Identifier: Apache-2.0
"""Converts plain data, as JSON and YAML have it, to the types of dataclass annotations and back, and checks objects
against these types.

The conversion is strict: a boolean is not a valid number, and a number is not a valid boolean; an integer is valid for
a float. Objects created in Python are checked against the same annotations, see :func:`check_fields`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from neuron_accel.engine.plan.source import Location, open_document
from neuron_accel.errors import ConfigurationError, NeuronAccelError, PluginError, did_you_mean

T = TypeVar("T")

_SCALARS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_LISTS: dict[Any, Any] = {
    list: list,
    collections.abc.Sequence: tuple,
    collections.abc.Iterable: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
}
_SETS = (set, frozenset, collections.abc.Set)
_MAPPINGS = (dict, collections.abc.Mapping)


def load_dataclass(cls: type[T], source: str | os.PathLike[str] | Mapping[str, Any], subject: str) -> T:
    """Creates an object of a dataclass from a YAML file, which is read as data: it cannot name code.

    Args:
        cls: the dataclass.
        source: the file, or a mapping of the same form.
        subject: description of the object in messages, such as ``"the calibration"``.

    Raises:
        ConfigurationError: if it cannot be read, for an unknown or missing field, a wrong type, or a value that the
            class rejects.
    """
    data, root = open_document(source)
    return build(cls, data, root, subject)


def build(cls: type[T], options: Any, at: Location, subject: str) -> T:
    """Creates an object of a dataclass from a mapping of its fields.

    Args:
        cls: the dataclass.
        options: the values of its fields; None for no options.
        at: the place of the options.
        subject: description of the object in messages, such as ``"plugin 'zero1'"``.

    Raises:
        ConfigurationError: for an unknown or missing field, a wrong type, or a value that the class rejects.
    """
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise at.error(
            f"Options of {subject} must be a mapping, not {_shown(options)}.", fix="write {name: value, ...}"
        )
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in options:
        if key not in fields:
            raise (at / key).error(f"{key!r} is not an option of {subject}.", fix=_instead_of(str(key), cls, fields))
    required = [f.name for f in fields.values() if _is_required(f) and f.name not in options]
    if required:
        raise at.error(
            f"{subject[0].upper()}{subject[1:]} needs a value for {', '.join(map(repr, required))}.",
            why="there is no default",
            fix=f"add '{required[0]}: ...'",
        )
    values = {key: convert(value, field_type(cls, fields[key]), at / key) for key, value in options.items()}  # type: ignore[arg-type]
    try:
        return cls(**values)
    except NeuronAccelError as error:
        where = str(at) if error.where is None else f"{at}: {error.where}"
        raise ConfigurationError(error.what, where=where, why=error.why, fix=error.fix) from error
    except (ValueError, TypeError) as error:
        raise at.error(f"{subject[0].upper()}{subject[1:]} does not accept these options.", why=str(error)) from error


def _is_required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


@functools.cache
def field_type(cls: type, f: dataclasses.Field) -> Any:
    """Returns the resolved annotation of a field. ``torch`` need not be imported in the module of the class.

    Raises:
        PluginError: if it refers to a name that does not exist at run time.
    """
    if not isinstance(f.type, str):
        return f.type
    owner = next(base for base in cls.__mro__ if f.name in inspect.get_annotations(base))
    annotated = types.SimpleNamespace(__annotations__={f.name: f.type})
    try:
        names = dict(vars(sys.modules[owner.__module__]))
        try:
            return typing.get_type_hints(annotated, dict(vars(owner)), names)[f.name]
        except NameError:
            import torch

            return typing.get_type_hints(annotated, dict(vars(owner)), names | {"torch": torch})[f.name]
    except Exception as error:
        raise PluginError(
            f"The type {f.type!r} of option {f.name!r} is not known at run time.",
            where=f"{owner.__module__}:{owner.__qualname__}",
            why=f"{type(error).__name__}: {error}",
            fix="import it outside of 'if TYPE_CHECKING'",
        ) from error


def convert(value: Any, hint: Any, at: Location) -> Any:
    """Converts ``value`` to the type of the annotation ``hint``.

    Raises:
        ConfigurationError: if it is not valid for that type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return value
    if origin is Annotated:
        return convert(value, arguments[0], at)
    if origin in (Union, types.UnionType):
        return _to_union(value, hint, arguments, at)
    if hint is None or hint is type(None):
        return value if value is None else _refuse(value, hint, at)
    if origin is Literal:
        known = any(type(value) is type(member) and value == member for member in arguments)
        return value if known else _refuse(value, hint, at)
    if hint in _SCALARS:
        return _to_scalar(value, hint, at)
    if _is_dtype_hint(hint):
        return _to_dtype(value, hint, at)
    base = origin or hint
    if base in _LISTS:
        return _LISTS[base](_items(value, hint, arguments, at))
    if base is tuple:
        return tuple(_items(value, hint, arguments, at))
    if base in _MAPPINGS:
        return _to_mapping(value, hint, arguments, at)
    if isinstance(base, type):
        return _to_class(value, base, at)
    raise _unwritable(hint, at)


def _to_union(value: Any, hint: Any, members: tuple[Any, ...], at: Location) -> Any:
    failures = []
    for member in members:
        try:
            return convert(value, member, at)
        except ConfigurationError as error:
            failures.append((member, error.with_traceback(None)))  # which would keep the frames, and their accelerator
    real = [(member, error) for member, error in failures if member is not type(None)]
    if len(real) == 1 and real[0][1].what != _wrong_type(value, real[0][0], at).what:
        raise real[0][1]  # for "X | None" the error of X is more specific
    return _refuse(value, hint, at)


def _to_scalar(value: Any, hint: type, at: Location) -> Any:
    if type(value) is hint or (hint is str and isinstance(value, str) and not isinstance(value, Enum)):
        return value
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise at.error(f"{_name(at)} is too large: {value}.") from None
    return _refuse(value, hint, at)


def _items(value: Any, hint: Any, arguments: tuple[Any, ...], at: Location) -> list[Any]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        _refuse(value, hint, at)
    items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
    if (get_origin(hint) or hint) is tuple and arguments and arguments[-1] is not Ellipsis:
        arguments = () if arguments == ((),) else arguments
        if len(items) != len(arguments):
            raise at.error(f"{_name(at)} must be a list of {len(arguments)}, not of {len(items)}.")
        return [convert(item, kind, at / i) for i, (item, kind) in enumerate(zip(items, arguments, strict=True))]
    kind = arguments[0] if arguments else Any
    return [convert(item, kind, at / index) for index, item in enumerate(items)]


def _to_mapping(value: Any, hint: Any, arguments: tuple[Any, ...], at: Location) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        _refuse(value, hint, at)
    key_kind, kind = arguments or (Any, Any)
    return {convert(key, key_kind, at / key): convert(item, kind, at / key) for key, item in value.items()}


def _to_class(value: Any, cls: type, at: Location) -> Any:
    if isinstance(value, cls):
        return value
    if issubclass(cls, Enum):
        for member in cls:
            if type(value) is type(member.value) and value == member.value:
                return member
        return _refuse(value, cls, at)
    if cls is Path or cls is os.PathLike:
        return Path(value) if isinstance(value, str) else _refuse(value, cls, at)
    if dataclasses.is_dataclass(cls):
        if not isinstance(value, Mapping):
            _refuse(value, cls, at)
        return build(cls, value, at, f"{at.path[-1]!r}" if at.path else cls.__name__)
    raise _unwritable(cls, at)


def _is_dtype_hint(hint: Any) -> bool:
    return getattr(hint, "__module__", None) == "torch" and getattr(hint, "__name__", None) == "dtype"


def _to_dtype(value: Any, hint: Any, at: Location) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        return _refuse(value, hint, at)
    found = getattr(torch, value.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else _refuse(value, hint, at)


# ---- objects ---------------------------------------------------------------------------------------------------------
def check_fields(obj: Any) -> None:
    """Checks that the fields of a dataclass object have the types of their annotations, and that numbers are finite.

    The rules are those for a configuration file, but nothing is converted: where a file has the name of a dtype or the
    value of an enum member, an object must have the dtype or the member. A list is valid for a tuple. Infinity and NaN
    are valid for a field with ``metadata={"finite": False}``. Other annotations (a ``TypeVar``, a name that exists for
    type checkers only) are not checked.

    Raises:
        ConfigurationError: if a field has another type; the message names the class and the field.
    """
    for f in dataclasses.fields(obj):
        if not f.init or not hasattr(obj, f.name):
            continue
        try:
            hint = field_type(type(obj), f)  # type: ignore[arg-type]
        except PluginError:  # a name for type checkers only; such an option raises an error in a configuration file
            continue
        value, at = getattr(obj, f.name), Location(source=type(obj).__name__, path=(f.name,))
        if not _is_a(value, hint):
            raise at.error(
                f"{_name(at)} must be {_expected_object(hint)}, not {value!r}.", fix=_advice_object(value, hint)
            )
        if hint not in (Any, object) and f.metadata.get("finite", True) and not _is_finite(value):
            raise at.error(f"{_name(at)} must be finite, not {value!r}.")


def _is_a(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    base = origin or hint
    if hint in (Any, object):
        return True
    if origin is Annotated:
        return _is_a(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(_is_a(value, member) for member in arguments)
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in arguments)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if _is_dtype_hint(hint):
        return is_dtype(value)
    if base is tuple and isinstance(value, (list, tuple)) and arguments and arguments[-1] is not Ellipsis:
        arguments = () if arguments == ((),) else arguments
        return len(value) == len(arguments) and all(map(_is_a, value, arguments))
    if base in (tuple, list, collections.abc.Sequence):
        return isinstance(value, (list, tuple)) and _all_are(value, arguments)
    if base in _SETS:
        return isinstance(value, collections.abc.Set) and _all_are(value, arguments)
    if base in _MAPPINGS:
        key_kind, kind = arguments or (Any, Any)
        return isinstance(value, Mapping) and _all_are(value, (key_kind,)) and _all_are(value.values(), (kind,))
    if base is Path:
        return isinstance(value, os.PathLike)
    if base is collections.abc.Callable:
        return callable(value)
    try:
        return isinstance(value, base)
    except TypeError:  # type variables and protocols cannot be checked at run time
        return True


def _instead_of(option: str, cls: type, known: Iterable[str]) -> str:
    """What to do instead of giving an option that a class does not have."""
    return getattr(cls, "removed_options", {}).get(option) or did_you_mean(option, known)


def check_arguments(cls: type, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Checks that the constructor of a dataclass accepts these arguments.

    Raises:
        ConfigurationError: if it does not; for an unknown option with the nearest name.
    """
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    try:
        signature.bind(None, *arguments, **options)
    except TypeError as error:
        at, name = Location(source=f"{cls.__name__}(...)"), cls.__name__
        known = [p.name for p in list(signature.parameters.values())[1:] if p.kind in (p.KEYWORD_ONLY, _BY_EITHER)]
        for option in options:
            if option not in known:
                fix = _instead_of(option, cls, known)
                raise at.error(f"{option!r} is not an option of {name}.", fix=fix) from None
        by_position = sum(p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values()) - 1
        if len(arguments) > by_position:
            takes = "no positional argument"
            if by_position:
                takes = f"only these positional arguments: {', '.join(known[:by_position])}"
            raise at.error(
                f"{name} takes {takes}, but received {arguments[by_position]!r}.",
                fix=f"name it: {', '.join(known[by_position:])}" if known else "leave it out: there are no options",
            ) from None
        raise at.error(f"{name} cannot be created from these arguments.", why=str(error)) from None


_BY_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _all_are(items: Any, arguments: tuple[Any, ...]) -> bool:
    return not arguments or all(_is_a(item, arguments[0]) for item in items)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_finite, value))
    return all(map(_is_finite, value.values())) if isinstance(value, dict) else True


def _expected_object(hint: Any) -> str:
    """Returns a description of an annotation for Python objects."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected_object(member) for member in get_args(hint))
    if hint is None or hint is type(None):
        return "None"
    if hint is bool:
        return "True or False"
    if _is_dtype_hint(hint):
        return "a torch.dtype"
    base = origin or hint
    if isinstance(base, type) and (issubclass(base, Enum) or dataclasses.is_dataclass(base)):
        return f"a {base.__name__}"
    if base in _MAPPINGS or base in _LISTS or base is tuple:
        items = [_expected_object(kind) for kind in get_args(hint) if kind is not Ellipsis]
        kind = "a set" if base in _SETS else _expected(hint)
        return kind + (f" ({' and '.join(items)})" if items else "")
    return _expected(hint)


def _advice_object(value: Any, hint: Any) -> str | None:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, str):
        if any(_is_dtype_hint(kind) for kind in alternatives):
            return "give the dtype itself, such as torch.float32"
        if {int, float} & set(alternatives) and re.fullmatch(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*", value):
            return f"leave the quotes out: {value.strip()}"
        words = [word for kind in alternatives if get_origin(kind) is Literal for word in get_args(kind)]
        texts = [word for word in words if isinstance(word, str)]
        return did_you_mean(value, texts) if texts else None
    if int in alternatives and hasattr(type(value), "__index__") and not isinstance(value, bool):
        return f"write int({value})"
    return None


# ---- messages --------------------------------------------------------------------------------------------------------
def _name(at: Location) -> str:
    """Returns the last key of a place, with the indices below it."""
    path = at.path
    while len(path) > 1 and type(path[-1]) is int:
        path = path[:-1]
    return repr(Location(path=at.path[len(path) - 1 :]).key_path) if path else "this"


def _unwritable(hint: Any, at: Location) -> ConfigurationError:
    return at.error(
        f"{_name(at)} cannot be given in a configuration.",
        why=f"its type is {_expected(hint)}, which cannot be written in a file",
        fix="leave it out here and give the plugin as an object in Python",
    )


def _refuse(value: Any, hint: Any, at: Location) -> typing.NoReturn:
    raise _wrong_type(value, hint, at)


def _wrong_type(value: Any, hint: Any, at: Location) -> ConfigurationError:
    return at.error(f"{_name(at)} must be {_expected(hint)}, not {_shown(value)}.", fix=_advice(value, hint))


def _expected(hint: Any) -> str:
    """Returns a description of an annotation for configuration files."""
    origin, arguments = get_origin(hint), get_args(hint)
    base = origin or hint
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in arguments)
    if origin is Literal:
        return _one_of(arguments)
    if hint is None or hint is type(None):
        return "null"
    if hint in _SCALARS:
        return _SCALARS[hint]
    if _is_dtype_hint(hint):
        return "the name of a dtype"
    if base in _LISTS or base is tuple:
        return "a list"
    if base in _MAPPINGS or dataclasses.is_dataclass(base):
        return "a mapping"
    if isinstance(base, type) and issubclass(base, Enum):
        return _one_of([member.value for member in base])
    if base is Path or base is os.PathLike:
        return "a path"
    return getattr(hint, "__name__", str(hint))


def _one_of(values: Any) -> str:
    return f"one of {', '.join(_shown(value) for value in values)}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return repr(value)


def _advice(value: Any, hint: Any) -> str | None:
    """Returns advice for common mistakes in YAML, or None."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [word for kind in alternatives if get_origin(kind) is Literal for word in get_args(kind)]
    words += [m.value for kind in alternatives if isinstance(kind, type) and issubclass(kind, Enum) for m in kind]
    texts = [word for word in words if isinstance(word, str)]
    if isinstance(value, bool) and (texts or str in alternatives):
        meant = "no" if value is False else "yes"
        return f'put it in quotes, "{meant}" for one: YAML reads yes, no, on and off as true and false'
    if isinstance(value, str) and texts:
        return did_you_mean(value, texts)
    if isinstance(value, str) and any(_is_dtype_hint(kind) for kind in alternatives):
        import torch

        dtypes = {
            str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point
        }
        return did_you_mean(value, {name.removeprefix("torch.") for name in dtypes})
    if isinstance(value, str) and bool in alternatives and value.lower() in ("true", "false"):
        return "leave the quotes out"
    if isinstance(value, str) and {int, float} & set(alternatives):
        return _advice_on_number(value)
    return None


def _advice_on_number(text: str) -> str | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return "YAML writes .inf, -.inf and .nan"
    if "e" in text.lower():
        mantissa, exponent = text.lower().split("e")
        mantissa += "" if "." in mantissa else ".0"
        exponent = exponent if exponent.startswith(("-", "+")) else f"+{exponent}"
        return f"write {mantissa}e{exponent} without quotes: YAML takes 1e-5 or 1.0e5 for text"
    return "leave the quotes out"


# ---- Back to plain data ----------------------------------------------------------------------------------------------
def to_plain(value: Any, fallback: Callable[[Any], Any] | None = None) -> Any:
    """Converts ``value`` to None, booleans, numbers, strings, lists, and dicts with string keys.

    Dtypes become their names, enum members their values, paths strings, tuples and sets (sorted) lists, and dataclasses
    dicts of their constructor's arguments. The result depends on the value only, so that ranks can compare it.

    Args:
        value: the value.
        fallback: is called for values of other types; by default these raise an error.

    Raises:
        TypeError: if a value cannot be converted, or two keys of a mapping become the same string.
    """
    if isinstance(value, Enum):
        return to_plain(value.value, fallback)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dtype(value):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [to_plain(item, fallback) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(item, fallback) for item in value), key=lambda item: (type(item).__name__, repr(item)))
    if isinstance(value, Mapping):
        keys = {key: str(to_plain(key, fallback)) for key in value}
        if len(set(keys.values())) < len(keys):
            raise TypeError(f"the keys {list(value)} are not distinct as text")
        return {text: to_plain(value[key], fallback) for key, text in keys.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name), fallback) for f in dataclasses.fields(value) if f.init}
    if fallback is not None:
        return fallback(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as plain data")


def is_dtype(value: Any) -> bool:
    """Returns whether ``value`` is a ``torch.dtype``, without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"

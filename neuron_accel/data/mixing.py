"""Loaders with abilities beyond Accelerate's, as classes made when they are needed, whose objects can be pickled."""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class Mixin:
    """What a class of Accelerate's loaders is mixed with.

    Attributes:
        prefix: begins the names of the classes that :func:`mixed` makes.
    """

    prefix: ClassVar[str]

    def __reduce__(self) -> tuple[Any, ...]:
        # Accelerate's loaders reduce to a class of its own, whatever theirs is.
        return _rebuilt, (_recipe(type(self)),), dict(self.__dict__)


def mixed(mixin: type[Mixin], cls: type) -> type:
    """A class that is ``cls`` with ``mixin`` before it; always the same one."""
    made: Any = mixin  # mypy: a class whose __hash__ is an instance's is not Hashable
    return _mixed(made, cls)


@functools.cache
def _mixed(mixin: Any, cls: Any) -> type:
    content = {"__doc__": cls.__doc__, "__module__": mixin.__module__, "mixed_from": (mixin, cls)}
    return type(f"{mixin.prefix}{cls.__name__}", (mixin, cls), content)


def as_mixed(loader: Any, mixin: type[Mixin]) -> Any:
    """A copy of ``loader`` with the abilities of ``mixin``; Accelerate's constructors would make it anew."""
    result: Any = object.__new__(mixed(mixin, type(loader)))
    result.__dict__.update(loader.__dict__)
    return result


def _recipe(cls: type) -> tuple[type, ...]:
    """A class that can be found by its name, and what it was mixed with, the last first."""
    mixins = []
    while "mixed_from" in vars(cls):
        mixin, cls = vars(cls)["mixed_from"]
        mixins.append(mixin)
    return (cls, *reversed(mixins))


def _rebuilt(recipe: tuple[type, ...]) -> Any:
    cls, *mixins = recipe
    for mixin in mixins:
        cls = mixed(mixin, cls)
    return object.__new__(cls)

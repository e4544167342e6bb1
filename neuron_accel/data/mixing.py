# SPDX-License-Identifier: Apache-2.0
"""Classes that combine a mixin with one of Accelerate's loaders, created on demand, whose objects can be pickled."""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class Mixin:
    """Base class of the mixins.

    Attributes:
        prefix: prefix of the names of the classes that :func:`mixed` creates.
    """

    prefix: ClassVar[str]

    def __repr__(self) -> str:
        dataset = getattr(self, "dataset", None)
        return f"<{_recipe(type(self))[0].__name__} of a {type(dataset).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Accelerate's own __reduce__ does not keep the class.
        return _rebuilt, (_recipe(type(self)),), dict(self.__dict__)


def mixed(mixin: type[Mixin], cls: type) -> type:
    """Returns a subclass of ``mixin`` and ``cls``, the same one at each call."""
    made: Any = mixin  # mypy: a class whose __hash__ is an instance's is not Hashable
    return _mixed(made, cls)


@functools.cache
def _mixed(mixin: Any, cls: Any) -> type:
    content = {"__doc__": cls.__doc__, "__module__": mixin.__module__, "mixed_from": (mixin, cls)}
    return type(f"{mixin.prefix}{cls.__name__}", (mixin, cls), content)


def as_mixed(loader: Any, mixin: type[Mixin]) -> Any:
    """Returns a copy of ``loader`` whose class also derives from ``mixin``, without calling the constructor."""
    result: Any = object.__new__(mixed(mixin, type(loader)))
    result.__dict__.update(loader.__dict__)
    return result


def _recipe(cls: type) -> tuple[type, ...]:
    """Returns the importable base class of ``cls``, and the mixins in the order in which they were added."""
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

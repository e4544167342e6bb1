"""Whether a class keeps the form of the plugin contract."""

from __future__ import annotations

import inspect

from neuron_accel.engine.errors import PluginError
from neuron_accel.engine.plugin import API_VERSION, PluginSpec, StrategyPlugin


def check_contract(cls: object, source: str) -> None:
    """Checks the form of a plugin class.

    Args:
        cls: what ought to be a subclass of :class:`~neuron_accel.engine.plugin.StrategyPlugin`.
        source: the distribution or module it comes from, for messages.

    Raises:
        PluginError: if it is no plugin class, or was written for another version of the contract.
    """
    if not (isinstance(cls, type) and issubclass(cls, StrategyPlugin)):
        raise PluginError(
            f"{cls!r} is no plugin class.",
            where=source,
            why="strategies derive from neuron_accel.StrategyPlugin",
            fix="name a subclass of it",
        )
    where = f"class {cls.__qualname__} of {source}"
    spec = getattr(cls, "spec", None)
    if not isinstance(spec, PluginSpec):
        raise PluginError(
            f"{cls.__name__} declares no spec.",
            where=where,
            why="the class attribute 'spec' says what a plugin is called, when it acts and what it owns",
            fix="add 'spec = PluginSpec(name=..., phase=...)' to the class",
        )
    if spec.api_version != API_VERSION:
        older = isinstance(spec.api_version, int) and spec.api_version < API_VERSION
        raise PluginError(
            f"Plugin {spec.name!r} was written for version {spec.api_version!r} of the plugin contract, "
            f"this is version {API_VERSION}.",
            where=where,
            why="hooks may have other names, arguments or meanings",
            fix=f"install a newer version of {source if older else 'neuron-accel'}",
        )
    own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(cls):
        raise PluginError(
            f"{cls.__name__} has fields ({', '.join(own)}) but is no dataclass.",
            where=where,
            why="they would be no part of its configuration",
            fix="put @dataclass(frozen=True, kw_only=True) above the class",
        )

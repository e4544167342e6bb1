"""An environment variable and its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An environment variable that the ranks get, and why. Only a ``binding`` one replaces what is set already."""

    name: str
    value: str
    why: str
    binding: bool = False

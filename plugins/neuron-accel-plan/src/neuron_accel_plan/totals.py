# SPDX-License-Identifier: Apache-2.0
"""What a training of so many tokens takes: hours, instance-hours and a price; and whether that is within limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel_plan.time import StepTime

_TOKENS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What was asked.

    Args:
        tokens: of the training.
        hours: in which it has to end; None: no limit.
        budget: most that it may cost; None: no limit.
        price_per_hour: of an instance; None: unknown.
    """

    tokens: float
    hours: float | None = None
    budget: float | None = None
    price_per_hour: float | None = None

    def total(self, time: StepTime, tokens_of_step: int, instances: int) -> Total:
        """Returns what the training takes, if a step of so many tokens takes this time."""
        hours = [self.tokens / tokens_of_step * seconds / 3600 for seconds in (time.seconds, time.low, time.high)]
        return Total(limits=self, instances=instances, hours=hours[0], low=hours[1], high=hours[2])


@dataclass(frozen=True, kw_only=True)
class Total:
    """What a training takes.

    Args:
        limits: what was asked.
        instances: number of instances.
        hours, low, high: how long it takes: likely, and the interval.
    """

    limits: Limits
    instances: int
    hours: float
    low: float
    high: float

    @property
    def instance_hours(self) -> float:
        """Hours of all instances."""
        return self.hours * self.instances

    @property
    def price(self) -> float | None:
        """In the currency of the price."""
        return None if self.limits.price_per_hour is None else self.instance_hours * self.limits.price_per_hour

    @property
    def in_time(self) -> bool:
        """Whether it ends within the limit, by the likely time."""
        return self.limits.hours is None or self.hours <= self.limits.hours

    @property
    def in_budget(self) -> bool:
        """Whether it costs no more than the limit, by the likely time."""
        return self.limits.budget is None or self.price is None or self.price <= self.limits.budget

    def __str__(self) -> str:
        parts = [f"{big(self.limits.tokens)} tokens in {long(self.hours)} ({long(self.low)} to {long(self.high)})"]
        parts.append(f"{self.instance_hours:,.4g} instance-hours")
        parts += [] if self.price is None else [f"{self.price:,.0f} USD"]
        return ", ".join(parts)

    def verdict(self) -> str:
        """Returns whether the limits are kept, in words; empty without limits."""
        parts = []
        if self.limits.hours is not None:
            parts.append(f"{'ends' if self.in_time else 'does NOT end'} within {long(self.limits.hours)}")
        if self.limits.budget is not None:
            parts.append(f"costs {'less' if self.in_budget else 'MORE'} than {self.limits.budget:,.0f} USD")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers."""
        hours = {"likely": self.hours, "low": self.low, "high": self.high}
        return {
            "tokens": self.limits.tokens,
            "hours": hours,
            "instance_hours": self.instance_hours,
            "price": self.price,
        }


def parse_tokens(text: str) -> float:
    """Returns a number such as ``"2T"`` or ``"100B"``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGBT]?)", text)
    if found is None or not float(found[1]):
        raise ConfigurationError(f"{text!r} is not a number of tokens.", where="--tokens", fix="write 2T, 100B or 500M")
    return float(found[1]) * _TOKENS[found[2]]


def parse_hours(text: str) -> float:
    """Returns the hours of a duration such as ``"3d"`` or ``"12h"``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mhdw])", text)
    if found is None or not float(found[1]):
        raise ConfigurationError(f"{text!r} is not a duration.", where="--finish-in", fix="write 90m, 12h, 3d or 2w")
    return float(found[1]) * _HOURS[found[2]]


def big(number: float) -> str:
    """Returns a number with the unit of its size."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def long(hours: float) -> str:
    """Returns a duration with the unit of its size."""
    if hours >= 48:
        return f"{hours / 24:,.3g} d" if hours < 24_000 else f"{hours / 24:,.0f} d"
    return f"{hours:.3g} h" if hours >= 1 else f"{math.ceil(60 * hours)} min"

"""Hyper-parameters that change from step to step, on devices that compile what they are told.

On a lazy device a Python number becomes an operand of the graph, but 0 and 1 become constants of it, and one transfer
serves all numbers of equal value: a schedule that starts at 0, or a bias correction that reaches 1 after a few hundred
steps, would be another graph. So for the length of an optimizer step the learning rate is a tensor on the device where
the optimizer can use one, and counters live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend

_TINY = 1e-30  # in place of 0: updates vanish beside any float32, and capturable Adam, which divides by it, can do so
_BESIDE_ONE = 1.0 + 1e-12  # in place of 1: the same float32


@contextmanager
def as_device_data(optimizer: torch.optim.Optimizer, backend: Backend) -> Iterator[None]:
    """Inside, ``optimizer`` can step without a number in its graph that may change. Does nothing on eager devices.

    Args:
        optimizer: its groups are as before afterwards.
    """
    if "lazy" not in backend.capabilities:
        yield
        return
    takes_tensors = isinstance(_innermost(optimizer), torch.optim.Adam)  # AdamW is one
    kept: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept.append({name: group[name] for name in ("lr", "capturable") if name in group})
        if "capturable" in group:
            group["capturable"] = True
        if "lr" in group:
            group["lr"] = _rate(group["lr"], takes_tensors, backend)
    if any("capturable" in group for group in kept):
        _move_counters(optimizer, backend)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)


def _rate(value: Any, as_tensor: bool, backend: Backend) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    number = float(value)
    number = {0.0: _TINY, 1.0: _BESIDE_ONE}.get(number, number)
    return torch.tensor(number, dtype=torch.float32).to(backend.device) if as_tensor else number


def _move_counters(optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """What was loaded, or counted before, on the host."""
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and step.device.type == "cpu":
            state["step"] = step.to(backend.device)


def _innermost(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer

# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters that change from step to step, on devices that compile graphs.

On a lazy device a Python number becomes an input of the graph, but 0 and 1 become constants, and numbers of equal value
become one input. A schedule that starts at 0, or a bias correction that reaches 1 after a few hundred steps, would
therefore be another graph. During an optimizer step such numbers are changed by less than the precision of the device,
or replaced by tensors. PyTorch's own Adam then keeps its step counters on the host, as long as it has updated all its
parameters equally often. Other optimizers receive the learning rate as a tensor if they support it, and their counters
are on the device, which costs about thirty operations for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.optim.state import HasStatePieces, each_optimizer

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend

_TINY = 1e-30  # instead of 0: updates are negligible in float32, and capturable Adam can divide by it
_BESIDE_ONE = 1.0 + 1e-12  # instead of 1: equal in float32


def as_device_data(
    optimizer: torch.optim.Optimizer, backend: Backend, *, evaluates: bool = False
) -> AbstractContextManager[None]:
    """Context in which ``optimizer`` steps with the same graph whatever its hyper-parameters are.

    Args:
        optimizer: the optimizer; its groups are restored afterwards.
        backend: the backend, of a lazy device.
        evaluates: whether it steps with a closure, which computes the gradients inside of the step: what is done to
            weights before it would be done before the forward pass.
    """
    return (_on_host if not evaluates and _can_count_on_host(optimizer) else _on_device)(optimizer, backend)


@contextmanager
def _options_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context that restores the options of all groups at its end."""
    names = ("lr", "capturable", "weight_decay")
    kept: list[dict[str, Any]] = [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)


@contextmanager
def _on_device(optimizer: torch.optim.Optimizer, backend: Backend) -> Iterator[None]:
    takes_tensors = isinstance(_innermost(optimizer), torch.optim.Adam)  # AdamW is one
    # Adadelta counts, but computes nothing from it, and refuses to count on XLA devices.
    counts = not isinstance(_innermost(optimizer), torch.optim.Adadelta)
    with _options_restored(optimizer):
        for group in optimizer.param_groups:
            if counts and "capturable" in group:
                group["capturable"] = True
            if "lr" in group:
                group["lr"] = _rate(group["lr"], takes_tensors, backend)
        if counts and any("capturable" in group for group in optimizer.param_groups):
            _move_counters(optimizer, backend)
        yield


# ---- Adam with its numbers computed on the host ----------------------------------------------------------------------
def _can_count_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether this is PyTorch's own Adam with all numbers on the host and equal counters for all parameters.
    Bias corrections that differ between parameters and become equal at some step would be another graph."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    for group in optimizer.param_groups:
        if group["capturable"] or group["differentiable"] or group["fused"] or "decoupled_weight_decay" not in group:
            return False
        if any(isinstance(number, torch.Tensor) for number in (group["lr"], *group["betas"])):
            return False
    betas = {group["betas"] for group in optimizer.param_groups}
    if len(betas) > 1 or any(first > second for first, second in betas):
        return False
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    if any(isinstance(counter, torch.Tensor) and counter.device.type != "cpu" for counter in counters):
        return False
    return len({float(counter) for counter in counters}) < 2


@contextmanager
def _on_host(optimizer: torch.optim.Optimizer, backend: Backend) -> Iterator[None]:
    counted = [(state, float(state["step"])) for state in optimizer.state.values() if "step" in state]
    last = min(_last_correction(group["betas"][1]) for group in optimizer.param_groups)
    with _options_restored(optimizer):
        for index, group in enumerate(optimizer.param_groups):
            rate = float(group["lr"])
            if group["decoupled_weight_decay"] and group["weight_decay"]:
                _decay(group["params"], 1 - rate * group["weight_decay"], backend)
                group["weight_decay"] = 0
            # If the rates of several groups are 0, each gets a different number.
            group["lr"] = _BESIDE_ONE if rate == 1.0 else max(rate, _TINY * (1 + index))
        beyond = [(state, count) for state, count in counted if count >= last]
        for state, _ in beyond:
            state["step"] = torch.tensor(last - 1.0)
        try:
            yield
        finally:
            for state, count in beyond:
                state["step"] = torch.tensor(count + float(state["step"]) - (last - 1.0))


def _decay(parameters: list[torch.Tensor], factor: float, backend: Backend) -> None:
    """Applies the weight decay of AdamW, whose factor is 1 in float32 for small rates."""
    given = backend.number(factor)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.mul_(given)


def _last_correction(beta: float) -> float:
    """Returns the last step at which the square root of Adam's second bias correction is less than 1 in float32. All
    later steps use this one."""
    if not 0.0 < beta < 1.0:
        return math.inf
    return max(1.0, float(math.floor(math.log(1.3e-7) / math.log(beta))))


# ---- numbers as tensors ----------------------------------------------------------------------------------------------
def _rate(value: Any, as_tensor: bool, backend: Backend) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    number = float(value)
    number = {0.0: _TINY, 1.0: _BESIDE_ONE}.get(number, number)
    return torch.tensor(number, dtype=torch.float32).to(backend.device) if as_tensor else number


def _move_counters(optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Moves step counters that are on the host to the device. With ``Tensor.to``, equal numbers would share one tensor
    that is not updated in place, and the first step after loading would be a graph of its own."""
    updating = [each for each in each_optimizer(optimizer) if not isinstance(each, HasStatePieces)]
    counting = [each for each in updating if any(group.get("capturable") for group in each.param_groups)]
    for state in (state for each in counting for state in each.state.values()):
        for name in ("step", "eta", "mu"):  # the last two are ASGD's
            number = state.get(name)
            if isinstance(number, torch.Tensor) and number.device.type == "cpu":
                is_number = number.dtype == torch.float32 and not number.dim()
                state[name] = backend.number(float(number)) if is_number else number.to(backend.device)


def _innermost(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer

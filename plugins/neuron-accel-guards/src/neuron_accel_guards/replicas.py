# SPDX-License-Identifier: Apache-2.0
"""Checks that ranks which hold the same shard of a parameter hold equal values, and names the parameters that
differ."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, DesyncError

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterRecord, PreparedModel, Run

_SHOWN = 5

Part = tuple[tuple[str, int], ...]
"""Identifies a shard of a parameter: index along each axis over which it is sharded."""


@dataclass(frozen=True, kw_only=True)
class ReplicaCheck(StrategyPlugin):
    """Checks that ranks which hold the same shard of a parameter hold equal values, before the first forward pass and
    again every ``every`` steps. Data-parallel ranks compare all parameters, tensor-parallel ranks those that are
    replicated, pipeline stages their tied weights.

    Values are compared bitwise, by their hash (BLAKE2b); only hashes are sent. Each check copies all weights to the
    host.

    Args:
        every: number of optimizer steps between checks; 0 to check only before the first step.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="replica_check",
        api_version=4,
        phase=Phase.OPTIMIZER,
        provides=frozenset({"looks-at-values", "gathered-weights"}),
    )

    every: int = 0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigurationError(f"every is {self.every}; expected a number of steps, or 0 for none.")

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Compares replicas before the next forward when due."""
        state = run.state(self)

        def compare() -> None:
            state["checked"][id(model)] = state["due"]
            check_replicas(model, run, state["steps"])

        comparing = run.join.register("a comparison of replicas", compare)

        def look(module: nn.Module, _: Any) -> None:
            if state["due"] > state["checked"].get(id(model), -1) and module.training:
                if comparing.announced:
                    comparing()
                compare()

        state.setdefault("due", 0), state.setdefault("steps", 0), state.setdefault("checked", {})
        run.undo(model.module.register_forward_pre_hook(torch.compiler.disable(look)).remove)

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Counts steps until replicas are compared."""
        yield
        state = run.state(self)
        if state:
            state["steps"] += 1
            state["due"] += bool(self.every) and state["steps"] % self.every == 0


def check_replicas(model: PreparedModel, run: Run, steps: int = 0) -> None:
    """Compares the parameters of a prepared model between ranks. Collective.

    Args:
        steps: optimizer steps taken so far, for the message.

    Raises:
        DesyncError: on every rank, naming the parameters that differ and the ranks.
    """
    if run.backend.is_lazy:
        run.backend.step_boundary()
    replica = replica_of(run)
    mine = {
        record.fqn: ((*replica, *part_of(record, run.coordinates)), digest(_held(record, record.current)))
        for record in model.parameters
        if record.current is not None
    }
    everyone = run.backend.all_gather_object(mine, run.world)
    different = _differences(everyone)
    if different:
        shown = [f"{name}: {text}" for name, text in different[:_SHOWN]]
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        when = f"after step {steps}" if steps else "before the first step"
        raise DesyncError(
            f"Ranks hold different values of {len(different)} parameter{'s' if len(different) > 1 else ''} {when}.",
            where="; ".join(shown) + more,
            why="they train the same parameter, and their gradients belong to different weights",
            fix="change weights in the same way on every rank (same seed, same file), or before `prepare`",
        )


def replica_of(run: Run) -> Part:
    """Returns which replica of the model this rank belongs to, where replicas may differ between synchronisations."""
    return tuple((axis, run.coordinates[axis]) for axis in run.mesh.replica_axes)


def part_of(record: ParameterRecord, coordinates: dict[str, int]) -> Part:
    """Returns which shard of a parameter the rank at ``coordinates`` holds."""
    kept = () if record.weights is None else record.weights.axes
    return (
        *((cut.axis, coordinates.get(cut.axis, 0) // cut.replicas) for cut in record.layout.cuts if cut.parts > 1),
        *((axis, coordinates.get(axis, 0)) for axis in kept),
    )


def _held(record: ParameterRecord, parameter: torch.Tensor) -> torch.Tensor:
    """The values that this rank holds."""
    return parameter if record.weights is None else record.weights.tensor


def digest(parameter: torch.Tensor) -> str:
    """Returns a hash of a tensor's values, shape and dtype."""
    host = parameter.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{host.dtype}{list(host.shape)}".encode(), digest_size=8)
    if host.numel():
        found.update(host.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _differences(everyone: list[dict[str, tuple[Part, str]]]) -> list[tuple[str, str]]:
    """Returns the names of parameters that differ, each with a text of the ranks that have equal values."""
    holders: dict[tuple[str, Part], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parameters in enumerate(everyone):
        for name, (part, value) in parameters.items():
            holders[name, part][value].append(rank)
    return [
        (name, " against ".join("rank " + ", ".join(map(str, ranks)) for ranks in values.values()))
        for (name, _), values in holders.items()
        if len(values) > 1
    ]

"""The optimizer's options: every block of a model has a learning rate of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from neuron_accel.contract import ParameterMap, Phase, PluginSpec, Run, StrategyPlugin, twin
from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class BlockRates(StrategyPlugin):
    """Multiplies learning rates by ``decay`` for every block between a parameter and the end of the model.

    A block is known by the first number in the names of its parameters. What comes before the blocks (embeddings) has
    a rate of its own, what comes after them (a head) the full one.

    Args:
        decay: factor from one block to the one before it; above 0.

    Source: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (2018, arXiv:1801.06146).
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="block_rates", api_version=4, phase=Phase.ADAPTATION
    )  # before optimizers are sharded

    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.decay <= 0:
            raise ConfigurationError(f"decay={self.decay} is not possible.", fix="choose one above 0")

    @staticmethod
    def depths(parameters: ParameterMap) -> dict[str, int]:
        """How far each parameter of a model is from its end, by name, also of those on other ranks only."""
        numbers = {record.fqn: re.search(r"\b\d+\b", record.fqn) for record in parameters}
        blocks = 1 + max((int(found[0]) for found in numbers.values() if found), default=-1)
        depths, outside = {}, blocks + 1
        for fqn, found in numbers.items():
            outside = 0 if found else outside  # behind the first block
            depths[fqn] = blocks - int(found[0]) if found else outside
        return depths

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Splits groups by depth, in the same way on every rank. Schedulers keep the groups that the user has made."""
        depth = {}
        for parameters in run.parameter_maps:
            by_name = self.depths(parameters)
            depth.update({record.current: by_name[record.fqn] for record in parameters if record.current is not None})
            run.state(self)["deepest"] = max(run.state(self).get("deepest", 0), *by_name.values())
        links, groups = run.state(self).setdefault("links", []), []
        for given in optimizer.param_groups:
            for this in range(run.state(self)["deepest"] + 1):
                mine = [parameter for parameter in given["params"] if depth[parameter] == this]
                groups.append({**given, "params": mine, "lr": given["lr"] * self.decay**this, "link": len(links)})
                links.append({"given": given, "rate": self.decay**this, "seen": given["lr"]})
        return twin(optimizer, groups, optimizer.state)

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Follows what a scheduler has written into the user's groups."""
        for group in optimizer.param_groups:
            link = run.state(self)["links"][group["link"]]
            if link["given"]["lr"] != link["seen"]:
                group["lr"], link["seen"] = link["given"]["lr"] * link["rate"], link["given"]["lr"]
        yield

    def save(self, run: Run) -> dict[str, Any]:
        return {"rates": [[link["given"]["lr"], link["seen"]] for link in run.state(self).get("links", [])]}

    def load(self, state: dict[str, Any], run: Run) -> None:
        if state:
            for link, rates in zip(run.state(self).get("links", []), state["rates"], strict=True):
                link["given"]["lr"], link["seen"] = rates

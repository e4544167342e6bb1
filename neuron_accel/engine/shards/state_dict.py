# SPDX-License-Identifier: Apache-2.0
"""Conversion between the state of tensors that the inner optimizer updates and the state of single parameter shards.

``state_dict`` of :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer` has an entry for each updated tensor,
which may consist of several parameter shards. Which shards belong together can differ when the state is loaded. The
state is therefore split into that of single shards, by their places in the parameters, and concatenated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.shards.shard import BucketShard
    from neuron_accel.engine.shards.sharded_grad import ParameterShard

Place = tuple[str, int, int]
"""Place of a shard: FQN of the parameter, and the range of elements of its flattened local tensor."""


def place_of(shard: BucketShard, piece: ParameterShard) -> Place:
    """Returns the place of a parameter shard."""
    return shard.bucket.records[piece.place.parameter].fqn, piece.place.start, piece.place.stop


def reordered(
    given: dict[str, Any],
    saved: Sequence[Sequence[Sequence[Any]]],
    held: list[list[Place]],
    lengths: Mapping[Place, int],
    present: dict[str, Any],
) -> dict[str, Any]:
    """Converts a state dict with the shards ``saved`` to one with the shards ``held`` now, some of which began to train
    later or are now updated separately.

    Args:
        given: the state dict.
        saved: places of the shards in ``given``.
        held: places of the shards now.
        lengths: number of elements of each shard.
        present: a state dict of the current state.

    Raises:
        UsageError: if some of ``saved`` are not held.
    """
    entries = by_place([saved[index] for index in given["state"]], list(given["state"].values()), lengths)
    state = {
        index: joined_entries([entries[p] for p in places]) for index, places in enumerate(held) if places[0] in entries
    }
    groups = [
        {**mine, "params": now["params"], **({"param_names": now["param_names"]} if "param_names" in now else {})}
        for mine, now in zip(given["param_groups"], present["param_groups"], strict=True)
    ]
    return {**given, "state": state, "param_groups": groups}


def by_place(
    saved: Sequence[Sequence[Sequence[Any]]],
    values: Sequence[Mapping[str, Any]],
    lengths: Mapping[Place, int],
) -> dict[Place, dict[str, Any]]:
    """Splits the values of tensors that consist of several shards, and returns them by the place of each shard."""
    result = {}
    for places, entries in zip(saved, values, strict=True):
        for place in places:
            if tuple(place) not in lengths:
                raise UsageError(
                    f"The state of elements {place[1]} to {place[2]} of {place[0]!r} does not belong here.",
                    where="`load_state_dict` of a sharded optimizer",
                    why="it was sharded in another way: other parameters trained when it was, or there were other "
                    "ranks",
                    fix="use `accelerator.save_state` and `load_state`, which load into any mesh",
                )
        sizes = [lengths[tuple(place)] for place in places]  # type: ignore[index]
        cut = [name for name, value in entries.items() if len(sizes) > 1 and _has_one_for_each(value, sum(sizes))]
        parts = {name: entries[name].split(sizes) for name in cut}
        for index, place in enumerate(places):
            result[tuple(place)] = {**entries, **{name: values[index] for name, values in parts.items()}}
    return result  # type: ignore[return-value]


def _has_one_for_each(value: Any, elements: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (elements,)


def joined_entries(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries of a tensor that consists of several shards, from those of each."""

    def joined(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if len(entries) > 1 and value.dim():
            return torch.cat([mine[name] for mine in entries])
        return value if value.dim() else value.clone()

    return {name: joined(name, value) for name, value in entries[0].items()}

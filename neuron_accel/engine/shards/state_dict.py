# SPDX-License-Identifier: Apache-2.0
"""The ``state_dict`` of a sharded optimizer, by updated tensor.

``state_dict`` of :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer` has an entry for each updated tensor,
which may consist of several parameter shards. Which shards belong together can differ when the state is loaded. The
state is therefore split into that of single shards, by their places in the parameters, and concatenated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from neuron_accel.engine.optim.state import share_options, state_of
from neuron_accel.engine.shards.build import record_of
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.shards.shard import BucketShard, ParameterShard
    from neuron_accel.engine.shards.shard_twin import ShardTwin

Place = tuple[str, int, int]
"""Place of a shard: FQN of the parameter, and the range of elements of its flattened local tensor."""


# ---- by updated tensor -----------------------------------------------------------------------------------------------
def state_with_places(twin: ShardTwin, *, masters: bool) -> dict[str, Any]:
    """Returns ``state_dict`` of a twin with the places of all shards that it updates (``pieces``), state that was
    loaded for parameters without shards (``whole_state``), and, with ``masters``, ``master_weights`` if there are
    some."""
    result = {**twin.inner.state_dict(), "pieces": _places(twin)}
    known = cast("Mapping[nn.Parameter, Any]", state_of(twin.optimizer))
    frozen = {record_of(parameter, twin.run).fqn: dict(entries) for parameter, entries in known.items() if entries}
    if frozen:
        result["whole_state"] = frozen
    if masters and any(shard.has_masters for shard in twin.shards):
        result["master_weights"] = [master.detach().clone() for master in twin.masters]
    return result


def load_state(twin: ShardTwin, state: dict[str, Any]) -> bool:
    """Loads the result of :func:`state_with_places`.

    Returns:
        Whether it has master weights.

    Raises:
        UsageError: if it is the state of other shards than those of this rank.
    """
    own = ("master_weights", "pieces", "whole_state")
    given = {key: value for key, value in state.items() if key not in own}
    held, masters = _places(twin), state.get("master_weights")
    saved = state.get("pieces", held)
    if saved != held:
        held = _split_like(twin, saved)
        given = reordered(given, saved, held, _lengths(twin), twin.inner.state_dict())
    twin.inner.load_state_dict(given)
    share_options(twin.optimizer, twin.of_shards)
    for parameter in twin.unsharded:
        entries = state.get("whole_state", {}).get(record_of(parameter, twin.run).fqn)
        if entries is not None:
            state_of(twin.optimizer)[parameter] = dict(entries)
    if masters is None:
        return False
    if saved != held:
        for shard in twin.shards:  # those that began to train later have none
            shard.reload()
    if "pieces" not in state:  # written by an older version, which did not store them
        in_shards = [master for shard in twin.shards for master, _ in shard.updated()]
        masters = [dict(zip(in_shards, masters, strict=True))[master] for master in twin.masters]
    lengths = _lengths(twin)
    known = [index for index, places in enumerate(saved) if tuple(places[0]) in lengths]
    values = by_place([saved[index] for index in known], [{"": masters[index]} for index in known], lengths)
    with torch.no_grad():
        for master, places in zip(twin.masters, held, strict=True):
            if places[0] in values:
                master.copy_(joined_entries([values[place] for place in places])[""])
    return True


def _places(twin: ShardTwin) -> list[list[Place]]:
    """Returns the places of all shards that the twin updates, in the order of its groups."""
    places: dict[torch.Tensor, list[Place]] = {}
    for shard in twin.shards:
        for master, pieces in shard.updated():
            places[master] = [place_of(shard, piece) for piece in pieces]
    return [places[master] for master in twin.masters]


def _lengths(twin: ShardTwin) -> dict[Place, int]:
    """Returns the number of elements of each shard, padding included."""
    return {place_of(shard, piece): piece.span.length for shard in twin.shards for piece in shard.pieces}


def _split_like(twin: ShardTwin, saved: Sequence[Sequence[Sequence[Any]]]) -> list[list[Place]]:
    """Splits the tensors that the twin updates, such that each belongs to one entry of ``saved``. Returns their
    places."""
    index_of = {tuple(place): index for index, places in enumerate(saved) for place in places}
    for shard in twin.shards:
        kinds = {piece.span.parameter: index_of.get(place_of(shard, piece)) for piece in shard.pieces}
        twin.replace(shard.split_by(kinds, twin.state))
    return _places(twin)


def place_of(shard: BucketShard, piece: ParameterShard) -> Place:
    """Returns the place of a parameter shard."""
    return shard.bucket.records[piece.span.parameter].fqn, piece.span.start, piece.span.stop


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

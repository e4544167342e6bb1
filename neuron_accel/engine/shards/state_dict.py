# SPDX-License-Identifier: Apache-2.0
"""The ``state_dict`` of a sharded optimizer: what this rank keeps, by the names of the original parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.optim.state import names_parameters, share_options
from neuron_accel.engine.shards.build import record_of
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.optim.state import StatePiece
    from neuron_accel.engine.shards.shard_twin import ShardTwin

_OF_SHARDS = ("state", "param_groups", "pieces", "master_weights")


def state_of_rank(twin: ShardTwin, *, masters: bool) -> dict[str, Any]:
    """Returns the state of this rank's shards (``state``), options and parameters of the groups (``param_groups``),
    which elements the shards are (``pieces``), and, with ``masters``, their own weights (``master_weights``)."""
    pieces = _pieces(twin, masters=masters)
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in twin.optimizer.param_groups
    ]
    for group, theirs in zip(groups, twin.optimizer.param_groups, strict=True):
        names = (twin.run.name_of(record_of(parameter, twin.run)) for parameter in theirs["params"])
        group["params"] = [fqn for fqn in names if fqn in pieces]  # in the order of the group, as torch's
    entries = {fqn: dict(piece.read_state(twin.inner)) for fqn, piece in pieces.items()}
    own = {fqn: piece.parameter.detach().clone() for fqn, piece in pieces.items() if piece.master}
    return {
        **{name: value for name, value in twin.of_shards.state_dict().items() if name not in _OF_SHARDS},
        "state": {fqn: values for fqn, values in entries.items() if values},
        "param_groups": groups,
        "pieces": {fqn: (piece.start, piece.stop) for fqn, piece in pieces.items()},
        **({"master_weights": own} if own else {}),
    }


def load_state_of_rank(twin: ShardTwin, state: dict[str, Any]) -> bool:
    """Loads the result of :func:`state_of_rank`.

    Returns:
        Whether it has master weights.

    Raises:
        UsageError: if it is the state of other shards than those of this rank.
    """
    pieces = _pieces(twin, masters=True)
    places = state.get("pieces", {})
    for fqn in state["state"]:
        piece, (start, stop) = pieces.get(fqn), places.get(fqn, (None, None))
        if piece is None or (start, stop) not in (
            (piece.start, piece.stop),
            (0, math.prod(piece.record.layout.local_shape)),
        ):
            raise UsageError(
                f"The state of elements {start} to {stop} of {fqn!r} does not belong here.",
                where="`load_state_dict` of a sharded optimizer",
                why="it was sharded in another way: other parameters trained when it was, or there were other ranks",
                fix="use `accelerator.get_optimizer_state_dict`, or `accelerator.save_state` and `load_state`",
            )
    more = {name: value for name, value in state.items() if name not in _OF_SHARDS}
    if more:  # of the user's class
        twin.of_shards.load_state_dict({**twin.of_shards.state_dict(), **more})
        share_options(twin.optimizer, twin.of_shards)
        pieces = _pieces(twin, masters=True)  # which are in another dict now
    for group, theirs in zip(twin.optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: _copied(v) for k, v in theirs.items() if k != "params" and not names_parameters(v)})
    masters = state.get("master_weights")
    for fqn, piece in pieces.items():
        piece.drop_state(twin.inner)
        if entries := state["state"].get(fqn):
            new = piece.new_state(twin.inner)
            new.update({name: _copied(piece.fit(value)) for name, value in entries.items()})
        if masters is not None and piece.master:
            with torch.no_grad():
                piece.parameter.copy_(masters[fqn]) if fqn in masters else piece.take_weights(twin.run)
    return masters is not None


def _pieces(twin: ShardTwin, *, masters: bool) -> dict[str, StatePiece]:
    return {twin.run.name_of(piece.record): piece for piece in twin.state_pieces(masters=masters)}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value

"""Whose state ZeRO-1 keeps on this rank, for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_accel.engine.optimizer_state import StatePiece
from neuron_accel.engine.whole import WholeParameters

if TYPE_CHECKING:
    from neuron_accel.strategies.zero1.optimizer import Zero1Optimizer


def state_pieces(optimizer: Zero1Optimizer, axes: tuple[str, ...]) -> list[StatePiece]:
    """This rank's pieces of every parameter of ``optimizer``, whose state is divided along ``axes``."""
    groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pieces = []
    for shard in optimizer.shards:
        store_of_pieces = shard.open(optimizer.inner.state)
        for piece in shard.pieces:
            store, key = store_of_pieces, piece.master
            if isinstance(optimizer.inner, WholeParameters):
                store, key = optimizer.inner.place_of_state(piece.master)
            pieces.append(
                StatePiece(
                    record=shard.bucket.records[piece.place.parameter],
                    parameter=piece.master,
                    start=piece.place.start,
                    stop=piece.place.stop,
                    group=groups[piece.parameter],
                    axes=axes,
                    master=piece.master.dtype != piece.parameter.dtype and optimizer.options.save_master_weights,
                    whole=key is not piece.master,
                    key=key,
                    store=store,
                )
            )
    return pieces

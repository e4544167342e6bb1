# SPDX-License-Identifier: Apache-2.0
"""Reads a rank's shard of the weights of models that were built without memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.optim.buckets import Bucket
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.shards.partition import Partition


def read_weights(
    buckets: Sequence[Bucket],
    models: Iterable[PreparedModel],
    run: Run,
    *,
    partition: Callable[[Bucket], Partition],
    keeps: Callable[[Bucket], bool],
) -> dict[int, torch.Tensor]:
    """Reads this rank's elements of weights that were not read with the model, and all elements of those that every
    rank keeps. Collective.

    Args:
        buckets: that are sharded next.
        models: the models that the parameters may belong to.
        run: the run.
        partition: returns the positions of a bucket's parameters in its buffer.
        keeps: returns whether every rank keeps the parameters of a bucket.

    Returns:
        By ``id`` of a bucket, this rank's weights, ``[partition.chunk]`` on the CPU; of those only that were not read.
    """
    models = [model for model in models if model.reader is not None]
    model_of = {id(record): model for model in models for record in model.parameters}
    wanted: dict[int, dict[str, tuple[int, torch.Tensor]]] = {id(model): {} for model in models}
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    result: dict[int, torch.Tensor] = {}
    for bucket in buckets:
        group = run.group(*bucket.reduction_axes)
        is_kept = group.size == 1 or keeps(bucket)
        for record, parameter in zip(bucket.records, bucket.parameters, strict=True):
            if record.is_unread:
                value = torch.zeros(parameter.shape if is_kept else (0,), dtype=bucket.dtype)
                wanted[id(model_of[id(record)])][record.fqn] = (0, value.view(-1))
                if is_kept:
                    kept.append((parameter, value))
        if is_kept or not any(record.is_unread for record in bucket.records):
            continue
        places = partition(bucket)
        place = places.place(group.index)
        own = result[id(bucket)] = torch.zeros(place.stop - place.start, dtype=bucket.dtype)
        for span in places.spans(group.index):
            record = bucket.records[span.parameter]
            part = own[span.offset : span.offset + span.stop - span.start]
            if record.is_unread:
                wanted[id(model_of[id(record)])][record.fqn] = (span.start, part)
            else:
                value = run.backend.to_host(bucket.parameters[span.parameter].detach())
                part.copy_(value.view(-1)[span.start : span.stop])
    for model in models:
        model.read_weights(wanted[id(model)])
    for parameter, value in kept:
        parameter.data = value.to(parameter.device)
    return result

# SPDX-License-Identifier: Apache-2.0
"""Collectives over the values of data-parallel ranks; ranks with the same data count once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch.utils._pytree import tree_leaves

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.runtime.run import Run


def _data_group(run: Run) -> Group:
    return run.group(*run.mesh.data_axes)


def gather(values: Any, run: Run) -> Any:
    """Concatenates tensors of the data-parallel ranks along the first dim, in rank order. Collective.

    Args:
        values: a tensor, or nested lists, tuples and dicts of tensors, of the same shape on every rank. 0-dim tensors
            become 1-dim.
        run: the run.
    """
    group = _data_group(run)

    def one(value: torch.Tensor) -> torch.Tensor:
        return run.backend.all_gather(value.unsqueeze(0) if value.ndim == 0 else value.contiguous(), group)

    return recursively_apply(one, values, error_on_other_type=True)


def check_shapes(values: Any, run: Run) -> None:
    """Checks that tensors have the same shapes on all data-parallel ranks. Collective.

    Raises:
        UsageError: on every rank, if they have not.
    """
    group = _data_group(run)
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    everyone = run.backend.all_gather_object(shapes, group)
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        if theirs != everyone[0]:
            raise UsageError(
                f"Rank {rank} gathers tensors of other shapes than rank {group.ranks[0]}: {theirs} and {everyone[0]}.",
                where="`gather` with even_batches=False",
                why="the last batch of an epoch has fewer samples on some ranks; only equal shapes can be gathered",
                fix="use accelerator.pad_across_processes(tensor) first, gather_for_metrics(values, "
                "use_gather_object=True), or even_batches=True",
            )


def gather_objects(values: Any, run: Run) -> list[Any]:
    """Concatenates the ``values`` (iterables of any objects) of the data-parallel ranks in one list. Collective."""
    return [item for part in run.backend.all_gather_object(values, _data_group(run)) for item in part]


def reduce(values: Any, run: Run, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Reduces tensors over the data-parallel ranks. Collective.

    Args:
        values: a tensor, or nested lists, tuples and dicts of tensors, of the same shape on every rank.
        run: the run.
        reduction: "sum", "mean" or "max"; "none" returns ``values``.
        scale: multiplies the result.
    """
    group = _data_group(run)
    if reduction == "none":
        return values

    def one(value: torch.Tensor) -> torch.Tensor:
        total = run.backend.all_reduce(value.clone(), group, "max" if reduction == "max" else "sum")
        total = total / group.size if reduction == "mean" else total
        return total * scale if scale != 1.0 else total

    return recursively_apply(one, values, error_on_other_type=True)


def are_tensors(values: Any) -> bool:
    """Whether every leaf of nested lists, tuples and dicts is a tensor."""
    try:
        recursively_apply(lambda value: value, values, error_on_other_type=True)
    except TypeError:
        return False
    return True


def without_repeats(data: Any, remainder: int, *, on_host: bool = False) -> Any:
    """Drops the samples that were repeated to fill the last global batch.

    Args:
        data: the gathered values.
        remainder: number of samples in the last batch without repeats; 0 if it is full, -1 if that is unknown.
        on_host: whether to slice on the host, for devices on which each length is another graph.
    """
    if remainder <= 0:
        return data

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value.cpu()[:remainder].to(value.device) if on_host else value[:remainder]

    return data[:remainder] if isinstance(data, list) else recursively_apply(cut, data)


def any_rank(flag: bool, run: Run) -> bool:
    """Whether ``flag`` is True on any process; the same result on every one. Collective."""
    if run.world.size == 1 or not run.backend.has_values:
        return flag
    return float(run.backend.all_reduce(run.backend.number(float(flag)), run.world)) > 0


# ---- Splitting inputs between data-parallel ranks, for inference -----------------------------------------------------
def split_for_rank(values: Any, rank: int, ranks: int, *, pad: bool = False) -> Any:
    """Returns the ``rank``-th of ``ranks`` consecutive slices; the first ones are longer by one if the length is not
    divisible by ``ranks``.

    Args:
        values: a list, tuple, tensor (sliced along its first dim), dataset with a ``select`` method, or a dict of these
            with equal lengths. Anything else is returned unchanged.
        rank: index of the slice.
        ranks: number of slices.
        pad: whether to pad shorter slices with the last value of ``values``.

    Raises:
        UsageError: if the lengths in a dict differ.
    """
    if ranks == 1:
        return values
    if isinstance(values, dict):
        lengths = {key: len(value) for key, value in values.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"The values of a dict to be split have different lengths: {lengths}.")
        return {key: split_for_rank(value, rank, ranks, pad=pad) for key, value in values.items()}
    if not (isinstance(values, (list, tuple, torch.Tensor)) or hasattr(values, "select")):
        return values
    each, extra = divmod(len(values), ranks)
    start = rank * each + min(rank, extra)
    stop = start + each + (rank < extra)
    missing = each + (extra > 0) - (stop - start) if pad and len(values) else 0
    if isinstance(values, torch.Tensor):
        return torch.cat([values[start:stop], *[values[-1:]] * missing]) if missing else values[start:stop]
    if isinstance(values, list):
        return values[start:stop] + values[-1:] * missing
    if isinstance(values, tuple):
        return values[start:stop] + values[-1:] * missing
    return values.select([*range(start, stop), *[len(values) - 1] * missing])

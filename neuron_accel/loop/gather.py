"""Values of several ranks where some ranks have the same data, which counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.runtime.run import Run


def _data_group(run: Run) -> Group:
    return run.group(*run.mesh.data_axes)


def gather(values: Any, run: Run) -> Any:
    """Tensors of the ranks that see different data, concatenated along the first dim in their order; equal shapes."""
    group = _data_group(run)

    def one(value: torch.Tensor) -> torch.Tensor:
        return run.backend.all_gather(value.unsqueeze(0) if value.ndim == 0 else value.contiguous(), group)

    return recursively_apply(one, values, error_on_other_type=True)


def gather_objects(values: Any, run: Run) -> list[Any]:
    """The items of every rank's ``values``, in one list."""
    return [item for part in run.backend.all_gather_object(values, _data_group(run)) for item in part]


def reduce(values: Any, run: Run, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Sums, averages or takes the maximum; ``scale`` multiplies the result."""
    group = _data_group(run)
    if reduction == "none":
        return values

    def one(value: torch.Tensor) -> torch.Tensor:
        total = run.backend.all_reduce(value.clone(), group, "max" if reduction == "max" else "sum")
        total = total / group.size if reduction == "mean" else total
        return total * scale if scale != 1.0 else total

    return recursively_apply(one, values, error_on_other_type=True)


def are_tensors(values: Any) -> bool:
    """Whether every leaf is a tensor."""
    try:
        recursively_apply(lambda value: value, values, error_on_other_type=True)
    except TypeError:
        return False
    return True


def without_repeats(data: Any, remainder: int, *, on_host: bool = False) -> Any:
    """Drops what the last global batch was filled up with.

    Args:
        data: what was gathered.
        remainder: number of samples that the last batch really has; 0 if it is full, -1 if that is unknown.
        on_host: slice there, for devices on which it would be another graph.
    """
    if remainder <= 0:
        return data

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value.cpu()[:remainder].to(value.device) if on_host else value[:remainder]

    return data[:remainder] if isinstance(data, list) else recursively_apply(cut, data)


def any_rank(flag: bool, run: Run) -> bool:
    """Whether any process says so; the same answer on every one. Collective."""
    if run.world.size == 1:
        return flag
    return float(run.backend.all_reduce(run.backend.number(float(flag)), run.world)) > 0


# ---- Splitting inputs between data-parallel ranks, for inference - ----------------------------------------
def split_for_rank(values: Any, rank: int, ranks: int, *, pad: bool = False) -> Any:
    """The ``rank``-th of ``ranks`` consecutive slices, the first ones longer by one if the number is not divisible.

    Args:
        values: a list, tuple, tensor (sliced along its first dim), dataset with a ``select`` method, or a dict of these
            with equal lengths. Anything else is returned unchanged.
        rank: index of the slice.
        ranks: number of slices.
        pad: whether shorter slices are padded with the last value of all.

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

# SPDX-License-Identifier: Apache-2.0
"""Buckets: parameters whose gradients are reduced together, and the memory for these gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together: of one dtype, over one set of axes.

    Args:
        records: records of the parameters, in the order in which the backward pass is expected to reach them.
        parameters: the parameters of these records.
        dtype: dtype of the gradients.
        partial_axes: axes over which the gradients are partial sums, beside the mesh's gradient axes.
        reduction_axes: the gradient axes of the mesh whose ranks hold the same shards of these parameters, over which
            gradients are therefore summed (:meth:`ParameterRecord.reduction_axes`). The sum is always divided by the
            number of ranks along all gradient axes, which gives the average over the global batch.
        sharded_axes: the other gradient axes: their ranks hold different shards.
        reduce_dtype: dtype in which a plugin wants gradients to be sent and summed
            (:attr:`ParameterRecord.reduce_dtype`); None: none does.
    """

    records: tuple[ParameterRecord, ...]
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    partial_axes: tuple[str, ...]
    reduction_axes: tuple[str, ...]
    sharded_axes: tuple[str, ...] = ()
    reduce_dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        axes = " x ".join((*self.partial_axes, *self.reduction_axes)) or "no axis"
        return (
            f"<{type(self).__name__}: {len(self.parameters)} parameters, {self.numel} elements of {self.dtype}, "
            f"summed over {axes}>"
        )

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)


def make_buckets(records: Iterable[ParameterRecord], cap_bytes: int, mesh: Mesh) -> list[Bucket]:
    """Returns buckets of about ``cap_bytes`` in the reverse order of ``records``, since backward reaches the last
    layers first.

    A parameter larger than the cap gets a bucket of its own.

    Args:
        records: parameters that this rank holds, in the order of the model.
        cap_bytes: size of a bucket in bytes.
        mesh: the mesh, over whose gradient axes gradients are averaged.
    """
    Key = tuple[torch.dtype, tuple[str, ...], tuple[str, ...], torch.dtype | None]
    open_buckets: dict[Key, list[ParameterRecord]] = {}
    sizes: dict[Key, int] = {}
    closed: list[Bucket] = []

    def close(key: Key) -> None:
        dtype, partial_axes, reduction_axes, reduce_dtype = key
        members = tuple(open_buckets.pop(key))
        closed.append(
            Bucket(
                records=members,
                parameters=tuple(r.current for r in members if r.current is not None),
                dtype=dtype,
                partial_axes=partial_axes,
                reduction_axes=reduction_axes,
                sharded_axes=tuple(axis for axis in mesh.gradient_axes if axis not in reduction_axes),
                reduce_dtype=reduce_dtype,
            )
        )

    for record in reversed(list(records)):
        parameter = record.current
        assert parameter is not None
        partial_axes = tuple(sorted(record.partial_axes))
        key = (parameter.dtype, partial_axes, record.reduction_axes(mesh), record.reduce_dtype)
        size = parameter.numel() * parameter.element_size()
        if key in open_buckets and sizes[key] + size > cap_bytes:
            close(key)
        if key not in open_buckets:
            open_buckets[key], sizes[key] = [], 0
        open_buckets[key].append(record)
        sizes[key] += size
    for key in list(open_buckets):
        close(key)
    return closed


def used_anywhere(local: list[bool], run: Run, group: Group) -> list[bool]:
    """Returns which parameters have a gradient on any rank of ``group``. A parameter without one keeps None, as in one
    process.

    A rank that has all gradients need not read the answer, which would stall a device other than the CPU. Ranks of a
    lazy device run the same graph, so ``local`` is the answer there.

    Args:
        local: for each parameter, whether this rank has a gradient. run: the run. group: the ranks. Collective over
            them.
    """
    if group.size == 1 or not local or not exchanges_flags(run):
        return local
    flags = torch.tensor(local, dtype=torch.float32, device=run.device)  # the native Neuron device sums no integers
    anywhere = run.backend.all_reduce(flags, group)
    return local if all(local) else [flag > 0 for flag in anywhere.tolist()]


def exchanges_flags(run: Run) -> bool:
    """Whether ranks tell each other which gradients they have: not where a compiler needs the same graph on all ranks,
    or there are no values."""
    return not run.backend.is_lazy and run.backend.has_values


class FlatGradients:
    """Memory for the gradients of a bucket, which is kept to avoid page faults in every step.

    Gradients are copied here as they arrive, while they are in the cache, and scaled at the same time.

    Args:
        bucket: the parameters.
        flags: whether to append, for each parameter, 1 if it has a gradient and else 0. As these flags are summed with
            the gradients, they show whether any rank has one, without a separate message.
    """

    def __init__(self, bucket: Bucket, *, flags: bool = False) -> None:
        self._bucket, self._flags = bucket, flags
        self._flat: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._taken = [False] * len(bucket.parameters)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {sum(self._taken)} gradients of {self._bucket!r}>"

    def take(self, index: int, scale: float) -> None:
        """Moves a parameter's gradient here, multiplied by ``scale``. A further gradient of the same parameter is
        added."""
        parameter = self._bucket.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return
        check_dense(gradient, self._bucket.records[index])
        if gradient.dtype is not self._bucket.dtype:
            raise UsageError(
                f"The gradient of {self._bucket.records[index].fqn!r} is {gradient.dtype}, not {self._bucket.dtype}.",
                why="the model was converted, by `double()`, `half()` or `to()`, after it was prepared, or its "
                "parameters have a `grad_dtype`",
                fix="convert the model before `prepare`, and leave `grad_dtype` as it is",
            )
        if self._flat is None:
            self._allocate()
        slot = self._slots[index]
        if self._taken[index]:
            slot.add_(gradient.detach(), alpha=scale)
        else:
            torch.mul(gradient.detach(), scale, out=slot)  # gradient may be slot, if a loop does not zero gradients
        self._taken[index] = True
        parameter.grad = None

    def collect(self, scale: float) -> tuple[torch.Tensor, list[bool]]:
        """Returns a flat tensor of the gradients, with zeros for parameters without one, followed by the flags; and
        which parameters have a gradient."""
        for index in range(len(self._taken)):
            self.take(index, scale)
        flat = self._flat if self._flat is not None else self._allocate()
        used, self._taken = self._taken, [False] * len(self._taken)
        missing = [index for index, is_used in enumerate(used) if not is_used]
        for index in missing:
            self._slots[index].zero_()
        if self._flags:
            flags = flat[self._bucket.numel :].fill_(1)
            if missing:
                flags[missing] = 0
        return flat, used

    def _allocate(self) -> torch.Tensor:
        parameters, numel = self._bucket.parameters, self._bucket.numel
        length = numel + len(parameters) if self._flags else numel
        dtype = self._bucket.reduce_dtype or self._bucket.dtype
        self._flat = torch.empty(length, dtype=dtype, device=parameters[0].device)
        self._slots = split_like(self._flat, parameters)
        return self._flat

    def parts(self, reduced: torch.Tensor) -> list[torch.Tensor]:
        """Returns the gradients in the reduced result of :meth:`collect`, in the shapes and dtype of the parameters;
        of the same memory at every call if it was reduced in place and in that dtype."""
        if reduced.dtype != self._bucket.dtype:
            return split_like(reduced[: self._bucket.numel].to(self._bucket.dtype), self._bucket.parameters)
        if self._flat is not None and reduced.data_ptr() == self._flat.data_ptr():
            return [slot.detach() for slot in self._slots]  # a loop may give them other memory, by assigning `.data`
        return split_like(reduced, self._bucket.parameters)

    def used_anywhere(self, reduced: torch.Tensor, local: Sequence[bool]) -> list[bool]:
        """Returns which parameters have a gradient on any rank.

        Args:
            reduced: the sum over ranks of the result of :meth:`collect`.
            local: for each parameter, whether this rank has a gradient.
        """
        if not self._flags or all(local):
            return list(local)
        return [flag > 0 for flag in reduced[self._bucket.numel :].tolist()]


def check_dense(gradient: torch.Tensor, record: ParameterRecord) -> None:
    """Checks that a gradient is dense.

    Raises:
        UsageError: if it is sparse.
    """
    if gradient.is_sparse:
        raise UsageError(
            f"The gradient of {record.fqn!r} is sparse.",
            why="gradients are reduced in dense buckets",
            fix="build the embedding with sparse=False",
        )


def split_like(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns consecutive views of ``flat`` with the shapes of ``parameters``, and with their strides if these have no
    gaps, as autograd's gradients do: torch's fused optimizers read memory in its order."""
    views, begin = [], 0
    for parameter in parameters:
        end = begin + parameter.numel()
        part = flat[begin:end]
        if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            views.append(part.view(parameter.shape))
        else:
            views.append(part.as_strided(parameter.shape, parameter.stride()))
        begin = end
    return views

# SPDX-License-Identifier: Apache-2.0
"""Operations on tensors of several ranks: gathering full tensors, broadcasting weights and buffers, moving a model to
its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.layout import Layout
    from neuron_accel.engine.sharding.parameters import ParameterMap


# ---- A full tensor from the shards of several ranks ------------------------------------------------------------------
def full_tensor(local: torch.Tensor, layout: Layout, run: Run) -> torch.Tensor:
    """Gathers the full tensor of which every rank holds the shard given by ``layout``. Collective over the axes along
    which it is sharded.

    Returns:
        A tensor of shape ``layout.shape`` on the device of ``local``, or on the CPU if that device is lazy; ``local``
        itself if nothing is sharded.
    """
    if not layout.cuts:
        return local
    group = run.group(*(cut.axis for cut in layout.cuts))
    if run.backend.is_lazy:
        local = run.backend.to_host(local)  # on the device each shape would be a graph to compile
    shards = run.backend.all_gather(local.detach().contiguous().unsqueeze(0), group)
    full = torch.empty(layout.shape, dtype=local.dtype, device=shards.device)
    for rank, shard in zip(group.ranks, shards, strict=True):
        layout.write(shard, full, run.mesh.coordinates(rank))
    return full


# ---- Equal weights on every rank before anything is sharded ----------------------------------------------------------
_CHUNK_BYTES = 8 << 20


def broadcast_tensors(tensors: Iterable[torch.Tensor], run: Run, group: Group, source: int = 0) -> None:
    """Broadcasts ``tensors`` from the rank at position ``source`` of ``group``, in place, in a few large messages."""
    if group.size == 1:
        return
    with torch.no_grad():
        for batch in _batches(tensors):
            flat = torch.cat([t.reshape(-1) for t in batch])
            flat = run.backend.broadcast(flat, group, source)
            for tensor, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _CHUNK_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def state_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of a model's state dict, each once. Tensors on the meta device are left out."""
    seen: dict[torch.Tensor, None] = {}
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            seen.setdefault(value)
    return list(seen)


# ---- Buffers that training changes (running statistics), on ranks that process different samples ---------------------
# The forward passes of each rank change its own buffers. As in DistributedDataParallel, those of the first rank are
# broadcast, so that all ranks evaluate, copy or save the same values after a step.
class BufferBroadcast:
    """Broadcasts the persistent buffers of one model from the first rank, or from the first that still has data.

    A strategy whose ranks process different samples creates one in ``transform_model``, in phase ``GRADIENTS`` or
    later, and calls :meth:`after_step` from its hook ``step``. Nothing is sent for a model without buffers, or if
    no training forward has run since the last broadcast. All methods are collective.

    Args:
        model: the model, after all rewrites.
        run: the run.
    """

    def __init__(self, model: PreparedModel, run: Run) -> None:
        self._model, self._run = model, run
        self._is_stale = False
        self._action = run.join.register("the broadcast of buffers", self._send)
        self._names = [name for name, _ in model.module.named_buffers()]
        self._by_axes = buffers_by_axes(model, run)

        def notice(
            module: nn.Module, _inputs: Any
        ) -> None:  # a function, not a method: a copied model copies its hooks
            if module is model.module and module.training and torch.is_grad_enabled():
                self._is_stale = True

        self._handle = model.module.register_forward_pre_hook(notice) if self._by_axes else None
        run.undo(self.close)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._model!r}>"

    def after_step(self) -> None:
        """Must be called after an optimizer step. Broadcasts the buffers, if a training forward may have changed
        them."""
        if self._is_stale and not self._run.join.is_through:
            if self._action.announced:
                self._action()
            self._send()

    def close(self) -> None:
        """Removes the forward hook."""
        if self._handle is not None:
            self._handle.remove()

    def _send(self) -> None:
        self._is_stale, buffers = False, dict(self._model.module.named_buffers())
        if [*buffers] != self._names:  # a module has got one, or lost one
            self._names, self._by_axes = [*buffers], buffers_by_axes(self._model, self._run)
        for axes, names in self._by_axes.items():
            source = self._run.join.position_of_leader(axes) if self._run.join.leader else 0
            broadcast_tensors([buffers[name] for name in names], self._run, self._run.group(*axes), source)


def buffers_by_axes(model: PreparedModel, run: Run) -> dict[tuple[str, ...], list[str]]:
    """Returns the names of the persistent buffers of a model, each once, by the gradient axes along which ranks hold
    the same modules.

    A buffer belongs to the closest module around it that has parameters. If all of these are sharded along an axis of
    samples (experts over data-parallel ranks), ranks along that axis hold other modules, with buffers of their own.
    """
    result: dict[tuple[str, ...], list[str]] = {}
    saved = model.module.state_dict(keep_vars=True)
    for name, buffer in model.module.named_buffers():
        if name in saved and buffer.device.type != "meta":
            result.setdefault(_axes_of(name, model, run), []).append(name)
    return {axes: names for axes, names in result.items() if axes}


def _axes_of(name: str, model: PreparedModel, run: Run) -> tuple[str, ...]:
    owner = name.rpartition(".")[0]
    while True:
        records = [model.parameters.find(p) for p in model.module.get_submodule(owner).parameters()]
        if records or not owner:
            break
        owner = owner.rpartition(".")[0]
    shared: set[str] = set(run.mesh.gradient_axes) if not records else set()
    for record in records:
        shared |= set(run.mesh.gradient_axes if record is None else record.reduction_axes(run.mesh))
    return tuple(axis for axis in run.mesh.gradient_axes if axis in shared)


# ---- Moving a model to its device ------------------------------------------------------------------------------------
def place(model: nn.Module, device: torch.device, parameters: ParameterMap) -> None:
    """Moves ``model`` to ``device`` in place. Tied weights stay tied.

    For some devices ``Module.to`` creates new parameters, one for each name, so that a tied weight would become two.

    Args:
        model: the model.
        device: the device.
        parameters: the parameters of ``model``; updated to the new objects.
    """
    if all(_same(tensor.device, device) for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to(device)
    for record in parameters:
        if record.current is None:
            continue
        names = [name for name in record.names if _holds(model, name)]
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(names[0]))
    parameters.follow(model)


def _same(one: torch.device, other: torch.device) -> bool:
    # "cpu" and "cpu:0" are the same device, but torch would copy between them.
    return one == other or one.type == other.type == "cpu"


def _holds(model: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    try:
        return attribute in model.get_submodule(owner)._parameters
    except AttributeError:  # the module is on another rank
        return False

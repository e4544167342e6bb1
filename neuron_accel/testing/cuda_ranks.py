"""Runs a function on several ranks with CUDA devices, on however many GPUs this machine has.

Each rank has a GPU and they talk through nccl, if there are enough GPUs. nccl refuses two ranks on one GPU, so ranks
that have to share one talk through gloo, with a copy of every tensor in host memory (:class:`StagedGroup`). Then what
ranks compute, and when, is as with nccl; nccl itself and its speed are not shown. Imported by ranks and their caller;
nothing is registered by importing this module.
"""

from __future__ import annotations

import io
import os
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from neuron_accel.testing._device_group import DeviceGroup, Work, bits, nothing

STAGED = "staged"
"""The name of the process group that goes through host memory."""


def missing() -> str | None:
    """Why no ranks with CUDA devices can be run here, as a sentence; None if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device on this machine"
    return None if dist.is_gloo_available() else "torch is built without gloo"


def library(size: int, devices: int) -> str:
    """What ranks talk through: nccl, or :data:`STAGED` where some of them share a GPU.

    Args:
        size: number of ranks.
        devices: number of GPUs.
    """
    return "nccl" if size <= devices and dist.is_nccl_available() else STAGED


def connect(rank: int, size: int, store: dist.Store, timeout: timedelta) -> None:
    """Gives this rank its GPU, and connects it to the others."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    name = library(size, torch.cuda.device_count())
    if name == STAGED:
        register("cuda")
    dist.init_process_group(f"cpu:gloo,cuda:{name}", store=store, rank=rank, world_size=size, timeout=timeout)


def register(device: str) -> None:
    """Registers :class:`StagedGroup` with torch.distributed for tensors on a type of device."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
        return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, device)

    dist.Backend.register_backend(STAGED, create, devices=[device])


class StagedGroup(DeviceGroup):
    """A process group whose collectives go through host memory and gloo.

    Args:
        gloo: the group of the same ranks that serves host memory.
        device: type of the device that it serves.
    """

    def __init__(self, gloo: Any, rank: int, size: int, device: str) -> None:
        super().__init__(STAGED, device, gloo, rank, size)

    # ---- combining ---------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        host = _host(tensor)
        return Work(self._all_reduce(host, opts), lambda: tensor.copy_(host), host)

    def _all_reduce(self, host: torch.Tensor, opts: Any) -> Any:
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts else dist.ReduceOp.SUM
        return self._gloo.allreduce([host], options)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        host = _host(tensor)
        rows = host.view(self._size, -1)
        finish = lambda: output.copy_(rows[self._rank].view(output.shape))  # noqa: E731
        return Work(self._all_reduce(host, opts), finish, host)

    _reduce_scatter_base = reduce_scatter_single

    # ---- moving ------------------------------------------------------------------------------------------------------
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        host = _host(tensor)
        return Work(self._gloo.broadcast([bits(host)], opts), lambda: tensor.copy_(host), host)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        received, host = torch.empty(output.shape, dtype=output.dtype), _host(tensor)
        work = self._gloo._allgather_base(bits(received), bits(host), c10d.AllgatherOptions())
        return Work(work, lambda: output.copy_(received), (received, host))

    _allgather_base = all_gather_single

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Work:
        if out_splits or in_splits:
            raise NotImplementedError("all_to_all: only equal splits")
        received, host = torch.empty(output.shape, dtype=output.dtype), _host(tensor)
        work = self._gloo.alltoall_base(bits(received), bits(host), [], [], c10d.AllToAllOptions())
        return Work(work, lambda: output.copy_(received), (received, host))

    alltoall_base = all_to_all_single

    # ---- one rank to another, and all of them ------------------------------------------------------------------------
    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Work:
        host = _host(tensors[0])
        return Work(self._gloo.send([bits(host)], target, tag), nothing, host)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Work(self._gloo.recv([bits(host)], source, tag), lambda: tensor.copy_(host), host)

    def barrier(self, opts: Any = None) -> Work:
        return Work(self._gloo.barrier(), nothing, None)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, also of a tensor that is there already."""
    return tensor.detach().to("cpu", copy=True).contiguous()


# ---- What a rank returns ---------------------------------------------------------------------------------------------
def dumps(value: Any) -> bytes:
    """Pickles what a rank returns, with its CUDA tensors as copies in host memory: the caller may not use the GPU."""
    stream = io.BytesIO()
    _OnHost(stream).dump(value)
    return stream.getvalue()


class _OnHost(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return _same, (value.detach().cpu(),)
        return NotImplemented


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

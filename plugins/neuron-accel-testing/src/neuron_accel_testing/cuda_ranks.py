# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks with CUDA devices, on any number of GPUs.

With enough GPUs each rank has one, and ranks communicate with nccl. nccl does not support several ranks on one GPU, so
ranks that share a GPU communicate with gloo and copies in host memory (:class:`StagedGroup`). Results are then the same
as with nccl, but nccl itself and its speed are not tested. Importing this module registers nothing.
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

from ._device_group import DeviceGroup, Work, bits, nothing

STAGED = "staged"
"""Name of the process group that copies tensors to host memory."""


def missing() -> str | None:
    """Why this machine cannot run ranks with CUDA devices, as a sentence; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device on this machine"
    return None if dist.is_gloo_available() else "torch is built without gloo"


def library(size: int, devices: int) -> str:
    """The backend of the ranks: nccl, or :data:`STAGED` if some of them share a GPU.

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
    """A process group whose collectives copy tensors to host memory and use gloo.

    Args:
        gloo: the gloo group of the same ranks.
        rank: this rank.
        size: number of ranks.
        device: type of the device of the tensors.
    """

    def __init__(self, gloo: Any, rank: int, size: int, device: str) -> None:
        super().__init__(STAGED, device, gloo, rank, size)

    # ---- reductions --------------------------------------------------------------------------------------------------
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

    # ---- copies ------------------------------------------------------------------------------------------------------
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
            raise NotImplementedError("all_to_all: splits have to be equal")
        received, host = torch.empty(output.shape, dtype=output.dtype), _host(tensor)
        work = self._gloo.alltoall_base(bits(received), bits(host), [], [], c10d.AllToAllOptions())
        return Work(work, lambda: output.copy_(received), (received, host))

    alltoall_base = all_to_all_single

    # ---- point-to-point and barrier ----------------------------------------------------------------------------------
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
    """A contiguous copy in host memory, also of a CPU tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


# ---- Results of ranks ------------------------------------------------------------------------------------------------
def dumps(value: Any) -> bytes:
    """Pickles a result, with CUDA tensors copied to host memory, since the caller may not have initialised CUDA."""
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

# SPDX-License-Identifier: Apache-2.0
"""The process group of the device of :mod:`._native_device`: AWS's documented behaviour, with gloo.

Integers are reduced in float32. Splits have to be equal. A broadcast is an all-reduce of zeros and one tensor.
Point-to-point communication raises an error unless it was enabled. Imported by ranks only.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from neuron_accel.testing.devices import DeviceGroup, Work, bits, nothing
from neuron_accel_emulation._native_device import NAME, Runtime, on_host

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


class Rules:
    """The options of the process groups of this process, and the collectives that were issued.

    Args:
        runtime: the state of the device.
        sends: whether point-to-point communication is supported.
        integers: whether integers can be reduced, which a later release of the compiler no longer supports.

    Attributes:
        issued: the collectives in order: kind, shape, dtype and number of ranks.
    """

    def __init__(self, runtime: Runtime, *, sends: bool, integers: bool) -> None:
        self.runtime, self.sends, self.integers = runtime, sends, integers
        self.issued: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        self._connected = False

    def connect(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> NativeGroup:
        """Creates a group; the first one is the default group."""
        if not self._connected and self.runtime.initialized:
            raise AssertionError("the Neuron runtime was used before init_process_group")
        first, self._connected = not self._connected, True
        os.environ.setdefault("NEURON_RT_VISIBLE_CORES", os.environ.get("LOCAL_RANK", "0"))
        return NativeGroup(self, dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, is_default=first)


class NativeGroup(DeviceGroup):
    """A group of ranks with one device each."""

    def __init__(self, rules: Rules, gloo: Any, rank: int, size: int, *, is_default: bool) -> None:
        super().__init__(NAME, NAME, gloo, rank, size)
        self._rules, self._is_default = rules, is_default

    # ---- reductions --------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        return self._all_reduce("all_reduce", self._host("all_reduce", tensor), op)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        for tensor in tensors[:-1]:
            self.allreduce([tensor], opts).wait()
        return self.allreduce([tensors[-1]], opts)

    def _all_reduce(self, kind: str, host: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        if not any(op == known for known in _OPS):
            raise NotImplementedError(f"{op} is missing in this stand-in for the native Neuron device")
        averages = op == dist.ReduceOp.AVG
        wide = self._as_summed(kind, host)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if averages else op

        def finish() -> None:
            if averages:
                wide.div_(self._size)
            if wide is not host:
                host.copy_(wide)

        return Work(self._gloo.allreduce([wide], options), finish, wide)

    def _as_summed(self, kind: str, host: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype in which the device reduces it: integers and booleans in float32, exact up to
        2**24."""
        if host.is_floating_point() or host.is_complex():
            return host.contiguous()
        if not self._rules.integers:
            raise RuntimeError(f"NCC_EVRF061: {kind} of {host.dtype} is not supported: no integer reduction")
        return host.to(torch.float32)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        target, source = self._host("reduce_scatter", output, count=False), self._host("reduce_scatter", tensor)
        if source.numel() != target.numel() * self._size:
            raise ValueError("reduce_scatter: the input has to be as large as the outputs of all ranks together")
        full = source.clone()
        work = self._all_reduce("reduce_scatter", full, opts.reduceOp if opts else dist.ReduceOp.SUM)
        return Work(work, lambda: _fill(target, full.view(self._size, -1)[self._rank]), full)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list, inputs: list, opts: Any = None) -> Work:
        return self.reduce_scatter_single(outputs[0], torch.cat([t.reshape(-1) for t in inputs[0]]), opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        host = self._host("broadcast", tensor)
        if self._rank != opts.rootRank:
            host.zero_()
        return self._all_reduce("broadcast", host)

    # ---- copies ------------------------------------------------------------------------------------------------------
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        target, source = self._host("all_gather", output, count=False), self._host("all_gather", tensor)
        if target.numel() != source.numel() * self._size:
            raise ValueError("all_gather: the output has to be as large as the inputs of all ranks together")
        options = c10d.AllgatherOptions()
        return Work(self._gloo._allgather_base(bits(target), bits(source.contiguous()), options), nothing, target)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list, inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (tensors,), (tensor,) = outputs, inputs
        if any(out.shape != tensor.shape for out in tensors):
            raise ValueError("all_gather: shapes differ")
        source = self._host("all_gather", tensor).contiguous()
        received = torch.empty((self._size, source.numel()), dtype=source.dtype)

        def finish() -> None:
            for out, row in zip(tensors, received, strict=True):
                _fill(on_host(out), row)

        work = self._gloo._allgather_base(bits(received), bits(source), c10d.AllgatherOptions())
        return Work(work, finish, (received, source))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Work:
        if len({*(out_splits or ()), *(in_splits or ())}) > 1 or tensor.shape[0] % self._size:
            raise ValueError("all_to_all: splits have to be equal")
        target, source = self._host("all_to_all", output, count=False), self._host("all_to_all", tensor).contiguous()
        rows, received = bits(source), bits(target)
        work = self._gloo.alltoall_base(received, rows, [], [], c10d.AllToAllOptions())
        return Work(work, nothing, (rows, received))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        if not self._is_default:
            raise NotImplementedError("barrier: only for the default group")
        return Work(self._gloo.barrier(), nothing, None)

    # ---- point-to-point ----------------------------------------------------------------------------------------------
    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Work:
        return self._point_to_point("send", tensors, target, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        return self._point_to_point("recv", tensors, source, tag)

    def _point_to_point(self, kind: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if not self._rules.sends:
            raise NotImplementedError(f"ProcessGroupNeuron does not implement {kind}")
        (tensor,) = tensors
        memory = bits(self._host(kind, tensor))
        return Work(getattr(self._gloo, kind)([memory], peer, tag), nothing, memory)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _host(self, kind: str, tensor: torch.Tensor, *, count: bool = True) -> torch.Tensor:
        if tensor.device.type != NAME:
            raise ValueError(f"{kind}: expected a tensor on {NAME}, got one on {tensor.device}")
        self._rules.runtime.begin()
        if count:
            self._rules.issued.append((kind, tuple(tensor.shape), tensor.dtype, self._size))
        return on_host(tensor)


def _fill(target: torch.Tensor, row: torch.Tensor) -> None:
    target.copy_(row.view(target.shape))


def install(rules: Rules) -> None:
    """Registers the process group with torch.distributed, under the name of the device."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NativeGroup:
        return rules.connect(store, rank, size, timeout)

    dist.Backend.register_backend(NAME, create, devices=[NAME])

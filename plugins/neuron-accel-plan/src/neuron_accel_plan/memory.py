# SPDX-License-Identifier: Apache-2.0
"""Counts the memory of a training step from the tensors that are alive, by what they are for, and its operations.

Every operation is seen by a ``TorchDispatchMode``. A storage counts from the operation that creates it until nothing
refers to it; a weak reference tells when. This works for tensors without memory as for real ones, so that a dry run and
a real rank can be compared. A storage that a strategy resizes, to gather weights into it, counts with the size that it
has when another one is created. Floating-point operations are those of ``torch.utils.flop_counter``: of matrix
products, convolutions and attention kernels, a multiplication and an addition each.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuron_accel_plan.graphs import COMPLEX, NOTED
from neuron_accel_plan.shapes import Results, tensors_in
from neuron_accel_plan.trace import Tracer

WEIGHTS = "weights"
GRADIENTS = "gradients"
MASTERS = "master weights"
STATE = "optimizer state"
ACTIVATIONS = "saved activations"
BUCKETS = "buckets"
TEMPORARY = "temporary"
HOST = "host"
PARTS = (WEIGHTS, GRADIENTS, MASTERS, STATE, ACTIVATIONS, BUCKETS, TEMPORARY)
"""What memory is for: parameters and buffers of the model, of fully sharded ones this rank's elements and those that
are gathered; gradients that an optimizer receives, or that wait for the last micro-batch; what an optimizer updates
instead of the weights; its state; what lives from the forward pass to the backward pass; memory that is kept from step
to step for communication; all else."""


@dataclass(frozen=True)
class Moment:
    """Where in a step memory is allocated.

    Args:
        phase: name of the phase: ``"forward"``, ``"backward"``, ``"clipping"`` or ``"optimizer step"``.
        module: FQN of the innermost module whose forward or backward pass runs; empty outside of modules.
        passed: whether a block of the model was entered before in this phase.
        time: how often this phase was entered before: with accumulation, the number of the micro-batch.
    """

    phase: str
    module: str = ""
    passed: bool = False
    time: int = 0

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass(frozen=True)
class Peak:
    """The largest amount of memory in a stretch of a step.

    Args:
        moment: when it is reached.
        parts: bytes by part (:data:`PARTS`).
    """

    moment: Moment
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(eq=False)
class _Storage:
    nbytes: int
    born: int
    phase: str
    part: str | None = None
    died: int | None = None
    reference: Any = field(default=None, repr=False)


class _Position:
    """Which module's forward or backward pass runs: a backward pass of a module begins with the gradient of its output
    and ends with that of its input.

    Args:
        model: the model, whose modules are named.
        blocks: FQN of the list of its blocks, or None.
    """

    def __init__(self, model: nn.Module, blocks: str | None) -> None:
        self._blocks = None if blocks is None else f"{blocks}."
        self.passed = False
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._inside: list[str] = []

    @property
    def module(self) -> str:
        return self._inside[-1] if self._inside else ""

    def clear(self) -> None:
        self._inside.clear()
        self.passed = False

    def _enter(self, name: str) -> None:
        self._inside.append(name)
        self.passed |= self._blocks is not None and name.startswith(self._blocks)

    def entering(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(module, "")
        if name:
            self._enter(name)
            self._when_gradients_of(inputs, lambda: self._leave(name))

    def leaving(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        name = self._names.get(module, "")
        if name:
            self._leave(name)
            self._when_gradients_of(outputs, lambda: self._enter(name))

    def _leave(self, name: str) -> None:
        # Also what is inside it, and no other: gradients arrive at the module before it first, and a recomputation that
        # stops at the last tensor that is needed leaves no module.
        self._inside = [each for each in self._inside if each != name and not each.startswith(f"{name}.")]

    @staticmethod
    def _when_gradients_of(tensors: Any, action: Callable[[], None]) -> None:
        for tensor in tree_leaves(tensors):
            if type(tensor) is torch.Tensor and tensor.requires_grad:
                tensor.register_hook(lambda _: action())
                return  # the first is the hidden states


class StepCounter(TorchDispatchMode):
    """A context in which storages on a device, and operations, are counted.

    Args:
        device: the device, by its type.
        results: what operations on tensors without memory return, if that is shared with others.

    Attributes:
        operations: floating-point operations since the context was entered.
        uncounted: names of operations that are matrix products, convolutions or attention by their name, and whose
            operations are not known.
        noted: names of operations since :meth:`forget_peaks` that a compiler may refuse.
        tracer: receives every operation; None: none does.
    """

    def __init__(self, device: torch.device, results: Results | None = None) -> None:
        super().__init__()
        self._results = results or Results()
        self.operations = 0
        self.uncounted: set[str] = set()
        self.noted: set[str] = set()
        self.tracer: Tracer | None = None
        self._type = device.type
        self._names: dict[Any, str] = {}
        self._live: dict[int, _Storage] = {}
        self._resized: set[int] = set()
        self._all: list[_Storage] = []
        self._clock, self._now = 0, 0
        self._phase = "preparation"
        self._entered: Counter[str] = Counter()
        self._peaks: dict[Moment, tuple[int, int]] = {}  # bytes and time
        self._position: _Position | None = None
        self._differentiating = False
        self._stack = ExitStack()

    # ---- counting ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> StepCounter:
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_update),
            (register_optimizer_step_post_hook, self._after_update),
        ):
            self._stack.callback(register(hook).remove)
        super().__enter__()
        return self

    def name_modules(self, model: nn.Module, blocks: str | None = None) -> None:
        """Adds modules of ``model`` to the moments that follow. ``blocks`` is the FQN of the list of its blocks."""
        self._position = position = _Position(model, blocks)
        for handle in (
            register_module_forward_pre_hook(position.entering),
            register_module_forward_hook(position.leaving),
        ):
            self._stack.callback(handle.remove)

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # transformers asks whether a mask is all ones; that of a dry run is
        differentiating = torch._C._current_graph_task_id() != -1
        if differentiating and not self._differentiating:
            self._save_activations()
        self._differentiating = differentiating
        result, operations = self._results.call(func, args, kwargs or {})
        results = [(tensor, self._see(tensor)) for tensor in tensors_in(result)]
        if any(tensor.is_complex() for tensor, _ in results):
            self.noted.add(COMPLEX)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = func._schema.name.rpartition(":")[2]
        if name in NOTED:
            self.noted.add(name)
        if operations is None:
            self.uncounted.add(str(func._overloadpacket))
        self.operations += operations or 0
        if self.tracer is not None:
            self.tracer.operation(func, (args, kwargs), results, operations or 0, self._phase)
        return result

    def find(self, tensor: torch.Tensor) -> _Storage | None:
        """Returns the storage of a tensor on the device; None for other tensors."""
        if not self._has_memory(tensor):
            return None
        return self._live.get(tensor.untyped_storage()._cdata)

    def _has_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory on the device. A subclass that handles its operations by itself, such as a
        gradient of which the rank has a shard, has a storage of its size that was never allocated."""
        if tensor.device.type != self._type or tensor.layout != torch.strided:
            return False
        return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__

    def _see(self, tensor: torch.Tensor) -> _Storage | None:
        if not self._has_memory(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known

        def freed(_: Any) -> None:
            self._end(key)
            self._resized.discard(key)

        self._follow(self._resized)
        return self._begin(key, storage.nbytes(), weakref.ref(storage, freed))

    def _follow(self, keys: Iterable[int]) -> None:
        """Counts storages with the sizes that they have now. Those that have changed are followed from now on;
        they hold weights. Which of them changed first is not known: no peak is between these changes."""
        for key in list(keys):
            known = self._live[key]
            kept = known.reference()
            if kept is not None and kept.nbytes() != known.nbytes:
                self._end(key)
                self._add(key, kept.nbytes(), known.reference, known.part or WEIGHTS)
                self._resized.add(key)

    def _end(self, key: int) -> None:
        known = self._live.pop(key)
        known.died = self._clock
        self._now -= known.nbytes

    def _add(self, key: int, nbytes: int, reference: Any, part: str | None = None) -> _Storage:
        self._clock += 1
        phase = "backward" if self._differentiating else self._phase
        found = _Storage(nbytes=nbytes, born=self._clock, phase=phase, part=part, reference=reference)
        self._live[key] = found
        self._all.append(found)
        self._now += found.nbytes
        return found

    def _begin(self, key: int, nbytes: int, reference: Any) -> _Storage:
        found, at = self._add(key, nbytes, reference), self._position
        time = max(0, self._entered[found.phase] - 1)
        moment = Moment(found.phase, time=time) if at is None else Moment(found.phase, at.module, at.passed, time)
        if self._now > self._peaks.get(moment, (0, 0))[0]:
            self._peaks[moment] = (self._now, self._clock)
        return found

    # ---- what storages are for ---------------------------------------------------------------------------------------
    def label(self, tensors: Iterable[Any], part: str) -> None:
        """Labels the storages of ``tensors`` that have no label yet with the part of memory that they belong to; other
        objects are ignored.

        The weights of a model before it is prepared are in the memory of the host: what is labelled :data:`HOST` is not
        counted, unless it is labelled otherwise later.
        """
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = self._see(tensor.detach())
                if storage is not None and storage.part in (None, HOST):
                    storage.part = part

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.label(parameters, MASTERS)  # those of the model are labelled before
        self.label([p.grad for p in parameters], GRADIENTS)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.label(tree_leaves([dict(state) for state in optimizer.state.values()]), STATE)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context in which what is allocated belongs to ``phase``. What is allocated in ``"forward"`` and is alive at
        its end, or when a backward pass begins in it, is a saved activation."""
        previous, self._phase = self._phase, phase
        self._entered[phase] += 1
        if self._position is not None:
            self._position.clear()
        try:
            yield
        finally:
            if phase == "forward":
                self._save_activations()
            self._phase = previous

    def _save_activations(self) -> None:
        for storage in self._live.values():
            if storage.phase == "forward" and storage.part is None:
                storage.part = ACTIVATIONS

    # ---- results -----------------------------------------------------------------------------------------------------
    def forget_peaks(self) -> None:
        """Resets the peaks to what is alive now."""
        self._follow(self._live)
        self._peaks = {}
        self._entered.clear()
        self.noted.clear()
        self._all = [storage for storage in self._all if storage.died is None]

    def peaks(self) -> list[Peak]:
        """Returns the peak of each moment that was seen since :meth:`forget_peaks`, in the order of first allocation.
        To be called at the end of a step: what no part was said of and is alive now is a bucket.
        """
        for storage in self._live.values():
            if storage.part is None and storage.phase != "forward":
                storage.part = BUCKETS
        parts = self._parts_at(sorted(time for _, time in self._peaks.values()))
        return [Peak(moment, parts[time]) for moment, (_, time) in self._peaks.items()]

    def alive(self) -> dict[str, int]:
        """Returns the bytes of each part that are alive now; to be called after :meth:`peaks`."""
        parts = dict.fromkeys(PARTS, 0)
        for storage in self._live.values():
            if storage.part != HOST:
                parts[storage.part or TEMPORARY] += storage.nbytes
        return parts

    def _parts_at(self, times: Iterable[int]) -> dict[int, dict[str, int]]:
        """Bytes by part at each of the times, which ascend: in one pass over births, which are in order, and deaths."""
        now, found = dict.fromkeys(PARTS, 0), {}
        counted = [storage for storage in self._all if storage.part != HOST]
        born = iter([*counted, None])
        ended = [(each.died, each.part or TEMPORARY, each.nbytes) for each in counted if each.died is not None]
        died = iter([*sorted(ended), None])
        birth, death = next(born), next(died)
        for time in times:
            while birth is not None and birth.born <= time:
                now[birth.part or TEMPORARY] += birth.nbytes
                birth = next(born)
            while death is not None and death[0] < time:
                now[death[1]] -= death[2]
                death = next(died)
            found[time] = dict(now)
        return found

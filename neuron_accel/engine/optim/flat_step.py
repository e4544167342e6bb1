# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's element-wise optimizers on flat tensors that fit the cache, instead of one tensor per parameter.

On a CPU these optimizers run a dozen operations for each parameter. For a small one their calls take longer than their
arithmetic, and the temporaries of a large one pass through memory a dozen times. For the duration of a step, parameters
whose weights and gradients are adjacent in memory are therefore replaced by one flat tensor, and that by slices. The
weights, gradients and state of the slices are views of those of the parameters, so that between steps the optimizer is
as it always is: it has each parameter, with state of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_SLICE = 1 << 17
"""Elements of a slice for each thread: with gradient, state and temporaries of AdamW a few MB in float32. Smaller
slices cost more calls."""

_LONG = 16
"""Slices from which a tensor is cut. The temporaries of a shorter one do not cost as much as the calls for its slices.
"""

_MANY, _SMALL = 6, 1 << 16
"""Parameters from which they are joined, if they have at most so many elements on average."""

_DTYPES = (torch.float32, torch.float64)
"""Their operations round alike wherever in a tensor an element is; those of narrower dtypes do not, since a vector is
rounded less often than what remains of a tensor behind the last full one."""

_OPTIMIZERS = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Classes whose step does for each element what it would do in any other tensor. Another class, or one derived from
these, may look at its parameters."""


class FlatStep:
    """Steps an optimizer, on flat tensors where that gives the same result to the bit.

    That is done for torch's element-wise optimizers and dense float32 or float64 parameters on a CPU, where it is
    faster: if many small parameters or a large number of elements are adjacent. With
    ``foreach=True`` parameters are joined and not cut into slices. With ``fused=True`` they are stepped as they are:
    the kernel has no temporaries, and rounds differently at the end of a tensor. So are other parameters, and other
    optimizers, and those with hooks on their step, which would see other parameters.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._plans: list[_GroupPlan] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.optimizer).__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        """In a copy of the optimizer nothing is a view of its parameters."""
        return {**self.__dict__, "_plans": []}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Performs a step, with arguments of the optimizer's own ``step``."""
        if any(argument is not None for argument in (*arguments, *options.values())) or not self._applies():
            return self.optimizer.step(*arguments, **options)
        groups = self.optimizer.param_groups
        self._plans = [plan for plan, _ in zip(self._plans, groups, strict=False)]
        self._plans += [_GroupPlan() for _ in groups[len(self._plans) :]]
        given = [group["params"] for group in groups]
        state: Any = self.optimizer.state
        known = len(state)
        try:
            for plan, group in zip(self._plans, groups, strict=True):
                cut, joins = self._form(group)
                group["params"] = plan.begin(group["params"], state, cut) if joins else group["params"]
            result = self.optimizer.step(*arguments, **options)
        except BaseException:
            self._end(given, state, completed=False)
            raise
        self._end(given, state, completed=True)
        if len(state) > known:
            _put_in_order([parameter for parameters in given for parameter in parameters], state, known)
        return result

    def _end(self, given: Sequence[list[torch.Tensor]], state: Any, *, completed: bool) -> None:
        for group, parameters in zip(self.optimizer.param_groups, given, strict=True):
            group["params"] = parameters
        for plan in self._plans:
            plan.end(state, completed=completed)

    def _applies(self) -> bool:
        if type(self.optimizer) not in _OPTIMIZERS:
            return False
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return not any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))

    def _form(self, group: dict[str, Any]) -> tuple[int | None, bool]:
        """Returns the length of slices, None for none, and whether parameters of ``group`` are joined or cut."""
        if group.get("capturable") or group.get("differentiable") or group.get("fused"):
            return None, False
        return (None if group.get("foreach") else _SLICE * torch.get_num_threads()), True


def _put_in_order(parameters: Sequence[torch.Tensor], state: Any, known: int) -> None:
    """Gives the entries of ``state`` behind the first ``known`` ones the order of the parameters, in which a step makes
    them: that of their memory is another one on each rank."""
    new = dict(list(state.items())[known:])
    for parameter in new:
        del state[parameter]
    state.update({parameter: new.pop(parameter) for parameter in parameters if parameter in new})
    state.update(new)


class _GroupPlan:
    """What replaces the parameters of one group, kept from step to step while it fits."""

    def __init__(self) -> None:
        self._key: Any = None
        self._order: list[_Run | torch.Tensor] = []
        self._running: list[_Run] = []

    def begin(self, parameters: Sequence[torch.Tensor], state: Any, cut: int | None) -> list[torch.Tensor]:
        """Returns what is stepped instead of ``parameters``."""
        key = (cut, [(id(parameter), parameter.grad is None) for parameter in parameters])
        if key != self._key or not all(entry.fits(state) for entry in self._order if isinstance(entry, _Run)):
            self._key, self._order = key, list(_runs(parameters, state, cut))
        result: list[torch.Tensor] = []
        for entry in self._order:
            if isinstance(entry, _Run):
                self._running.append(entry)
                result += entry.begin(state)
            else:
                result.append(entry)
        return result

    def end(self, state: Any, *, completed: bool) -> None:
        """Gives the parameters what the step has written, or, if it raised an error, what it has written in place."""
        running, self._running = self._running, []
        for run in running:
            run.end(state, completed=completed)


def _runs(parameters: Iterable[torch.Tensor], state: Any, cut: int | None) -> Iterator[_Run | torch.Tensor]:
    """Yields runs of parameters that are stepped as one tensor, and the parameters that are not."""
    neighbours: list[torch.Tensor] = []
    last: Any = None

    def finished() -> Iterator[_Run | torch.Tensor]:
        elements = sum(parameter.numel() for parameter in neighbours)
        is_long = cut is not None and elements >= _LONG * cut
        if is_long or (len(neighbours) >= _MANY and elements <= _SMALL * len(neighbours)):
            yield _Run(neighbours, state, cut)
        else:
            yield from neighbours

    kinds = [(parameter, _kind(parameter, state.get(parameter, {}))) for parameter in parameters]
    yield from (parameter for parameter, kind in kinds if kind is None)
    fitting = [(parameter, kind) for parameter, kind in kinds if kind is not None]
    # Buckets have parameters in the order of the backward pass, groups in any other.
    for parameter, kind in sorted(fitting, key=lambda pair: pair[0].data_ptr()):
        joined = bool(neighbours) and kind == last and _follows(neighbours[-1], parameter)
        if not joined:
            yield from finished()
            neighbours = []
        neighbours.append(parameter)
        last = kind
    yield from finished()


def _kind(parameter: torch.Tensor, entries: dict[str, Any]) -> Any:
    """Returns what must be equal for parameters that are stepped as one tensor; None if one is not."""
    grad = parameter.grad
    if type(parameter) is not nn.Parameter or type(grad) is not torch.Tensor or not parameter.dim():
        return None
    if not _is_plain(parameter, parameter) or not _is_plain(grad, parameter):
        return None
    result: list[Any] = [parameter.dtype]
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            result.append((name, type(value), value))
        elif not value.dim():
            result.append((name, value.dtype, value.item()))
        elif _is_plain(value, parameter):
            result.append(name)
        else:
            return None
    return result


def _is_plain(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    of_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.dtype in _DTYPES
    return of_cpu and tensor.is_contiguous() and tensor.shape == parameter.shape and tensor.dtype == parameter.dtype


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether weight and gradient of ``after`` are behind those of ``before`` in memory."""
    return _adjacent([before, after]) and _adjacent([before.grad, after.grad])  # type: ignore[list-item]


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors are one behind the other in the same memory."""
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address:
            return False
        address += tensor.numel() * tensor.element_size()
    return _is_memory_of(tensors[0], tensors[-1])


def _is_memory_of(tensor: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the end of ``after``, which begins behind ``tensor``, is in the memory that this has been allocated
    with. Two allocations may be adjacent by chance."""
    memory = tensor.untyped_storage()
    return after.data_ptr() + after.numel() * after.element_size() <= memory.data_ptr() + memory.nbytes()


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns adjacent tensors as one, ``[elements]``."""
    first, elements = tensors[0].detach(), sum(tensor.numel() for tensor in tensors)
    return first.as_strided((elements,), (1,), first.storage_offset())


class _Run:
    """Parameters that are adjacent in memory and have equal counters, stepped as slices of one flat tensor.

    Args:
        parameters: the parameters.
        state: the optimizer's state. That of the parameters is moved to be adjacent, unless it is.
        cut: length of a slice; None for one slice.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], state: Any, cut: int | None) -> None:
        self._parameters = list(parameters)
        self._lengths = [parameter.numel() for parameter in parameters]
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        flat = _flat(parameters)
        step = flat.numel() if cut is None else cut
        self._bounds = [(at, min(at + step, flat.numel())) for at in range(0, flat.numel(), step)]
        self._slices = [nn.Parameter(part) for part in self._cut(flat)]
        self._entries: list[dict[str, Any]] = [{} for _ in self._slices]  # of the state, by slice
        self._known: list[dict[str, Any]] = [{} for _ in parameters]  # and by parameter, as of the last step
        self._counters: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, value in state.get(parameters[0], {}).items():
            values = [state[parameter][name] for parameter in parameters]
            if not isinstance(value, torch.Tensor):
                self._put(name, value, state)
            elif not value.dim():
                self._put_counter(name, value, state)
            else:
                self._put_flat(name, _flat(values) if _adjacent(values) else None, values, state)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[begin:end] for begin, end in self._bounds]

    # ---- state -------------------------------------------------------------------------------------------------------
    def _put(self, name: str, value: Any, state: Any) -> None:
        """Sets an entry that is not a tensor."""
        for parameter, known in zip(self._parameters, self._known, strict=True):
            state[parameter][name] = known[name] = value
        for entries in self._entries:
            entries[name] = value

    def _put_counter(self, name: str, value: torch.Tensor, state: Any) -> None:
        """Sets a 0-dim entry. Each parameter and each slice has one of its own, since a step counts in place."""
        is_kept = len(self._parameters) == 1 and state[self._parameters[0]].get(name) is value
        mine = value.detach().view(1) if is_kept else value.detach().repeat(len(self._parameters))
        sliced = value.detach().repeat(len(self._slices))
        self._counters[name] = mine, sliced
        for index, (parameter, known) in enumerate(zip(self._parameters, self._known, strict=True)):
            known[name] = state[parameter][name] = value if is_kept else mine[index]
        for index, entries in enumerate(self._entries):
            entries[name] = sliced[index]

    def _put_flat(self, name: str, flat: torch.Tensor | None, values: Sequence[torch.Tensor], state: Any) -> None:
        """Sets an entry with one value for each element.

        Args:
            name: its name.
            flat: the values, if those of the parameters are views of it already.
            values: else their parts, of which copies are joined.
            state: the optimizer's state.
        """
        if flat is None:
            flat = torch.cat([value.detach().reshape(-1) for value in values])
            parts = flat.split(self._lengths)
            for parameter, part in zip(self._parameters, parts, strict=True):
                state[parameter][name] = part.view(parameter.shape)
        for parameter, known in zip(self._parameters, self._known, strict=True):
            known[name] = state[parameter][name]
        for entries, part in zip(self._entries, self._cut(flat), strict=True):
            entries[name] = part

    # ---- a step ------------------------------------------------------------------------------------------------------
    def fits(self, state: Any) -> bool:
        """Whether weights and state are where they were at the last step, gradients adjacent, and counters equal."""
        gradient = self._parameters[0].grad
        behind = 0 if gradient is None else gradient.data_ptr() - self._addresses[0]
        for parameter, address, known in zip(self._parameters, self._addresses, self._known, strict=True):
            grad, entries = parameter.grad, state.get(parameter, {})
            if type(grad) is not torch.Tensor or grad.layout is not torch.strided or not grad.is_contiguous():
                return False
            if parameter.data_ptr() != address or grad.data_ptr() != address + behind:
                return False
            if entries.keys() != known.keys() or not all(map(operator.is_, entries.values(), known.values())):
                return False
        if not _is_memory_of(self._parameters[0].grad, self._parameters[-1].grad):  # type: ignore[arg-type]
            return False
        return all(len(mine) == 1 or bool((mine == mine[0]).all()) for mine, _ in self._counters.values())

    def begin(self, state: Any) -> list[nn.Parameter]:
        """Returns the slices, with their gradients and state."""
        for mine, sliced in self._counters.values():
            sliced.copy_(mine[0].expand_as(sliced))
        gradient = _flat([parameter.grad for parameter in self._parameters])  # type: ignore[misc]
        for part, grad, entries in zip(self._slices, self._cut(gradient), self._entries, strict=True):
            part.grad = grad
            if entries:
                state[part] = dict(entries)
        return self._slices

    def end(self, state: Any, *, completed: bool) -> None:
        """Takes the state of the slices; after a step that raised an error, nothing but what is in place."""
        written = [state.pop(part, {}) for part in self._slices]
        for part in self._slices:
            part.grad = None  # which may be a lot of memory
        if not completed:
            return
        for name, value in written[0].items():
            values = [entries[name] for entries in written]
            is_known = all(entries.get(name) is v for entries, v in zip(self._entries, values, strict=True))
            if isinstance(value, torch.Tensor) and not value.dim():
                if is_known:
                    mine, sliced = self._counters[name]
                    mine.copy_(sliced[0].expand_as(mine))
                else:
                    self._put_counter(name, value, state)
            elif not is_known:
                if isinstance(value, torch.Tensor):
                    self._put_flat(name, None, values, state)
                else:
                    self._put(name, value, state)
        for name in self._entries[0].keys() - written[0].keys():
            for entries in (*self._entries, *self._known, *(state[parameter] for parameter in self._parameters)):
                entries.pop(name, None)
            self._counters.pop(name, None)

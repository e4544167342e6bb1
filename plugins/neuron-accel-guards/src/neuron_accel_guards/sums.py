# SPDX-License-Identifier: Apache-2.0
"""Detects values that hardware has changed: sums over ranks that are not the sum of what was sent, memory that changed
although nothing wrote it, and replicas whose updates differ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from neuron_accel.contract import Group, Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.events import Collective, Event, Observer
from neuron_accel.contract.sharded import ShardedOptimizer
from neuron_accel.errors import ConfigurationError, CorruptionError
from neuron_accel_guards.replicas import Part, part_of, replica_of

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterRecord, PreparedModel, Run

_MOST = 4096  # sums of a step that are checked
_EVERY = 10  # steps between readings on a device whose values are not free to read


@dataclass(frozen=True, kw_only=True)
class SumCheck(StrategyPlugin):
    """Detects values that hardware has changed, and raises a :class:`~neuron_accel.errors.CorruptionError` on every
    rank, with the step, the rank and what changed. It compares checksums:

    - of every sum of gradients over ranks (all-reduce or reduce-scatter, of any owner of gradient reduction): the sum
      of the checksums of what the ranks sent must be the checksum of what each received, to rounding (algorithm-based
      fault tolerance, Huang and Abraham, IEEE Transactions on Computers, 1984);
    - of memory: reduced gradients until an optimizer uses or clips them, and this rank's trained weights and optimizer
      state from the end of a step until the next update, unless PyTorch has written them meanwhile;
    - of weights after each update: ranks that hold the same shard must have the same values. The rank that differs from
      the majority is named; of two, both.

    The check of sums is to rounding, so it finds changes larger than about the rounding error of the sum's norm. The
    others are exact on devices that run one operation after another. On a lazy device (XLA) memory is checked to a
    relative change of the norm of a tensor of about 3e-5, and gradients, which exist in a graph only, are not checked
    between reduction and update. Nothing is read from a device before the step has been executed; the error therefore
    comes after the update, so continue from an earlier checkpoint. Before a checkpoint is saved all steps are judged.

    Not found: a wrong gradient that a rank has computed and sent correctly, an update of a shard that no other rank
    holds, computed wrongly, and, of gradients that a loop clips or changes, what happens to them before that.

    Values that are written without PyTorch's knowledge look like corruption: write weights with
    ``torch.no_grad()`` and in-place operations, or assign ``parameter.data``, but do not write into
    ``parameter.data``.

    Args:
        every: number of steps between readings of the checks, which is when an error is raised; each step is checked,
            and the message has the step. None: 1 where reading values costs nothing (CPU), 10 elsewhere.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="sum_check",
        api_version=4,
        phase=Phase.OPTIMIZER,
        provides=frozenset({"looks-at-values", "gathered-weights"}),
    )

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigurationError(f"every is {self.every}; expected a number of steps from 1, or None.")

    def setup(self, run: Run) -> None:
        """Observes sums over ranks."""
        every = self.every or (1 if run.backend.reads_are_free else _EVERY)
        checks = Checks(run, every)
        run.state(self)["checks"] = checks
        run.undo(run.events.observe(checks.sums))

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Compares memory with the end of the last step, and the sums of this one, and computes the checksums of what
        it updated. Reads the checks, when due."""
        checks = self._checks(run)
        checks.before_update(optimizer)
        yield
        checks.after_update(optimizer)
        run.backend.after_step(lambda: checks.judge(run), reads_graph=True)

    def save(self, run: Run) -> None:
        """Reads all checks, so that no corrupt state is saved."""
        self._checks(run).judge(run, now=True)

    def load(self, state: dict[str, Any], run: Run) -> None:
        """Forgets the checksums of earlier values."""
        self._checks(run).forget()

    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Forgets the checksums of earlier values."""
        yield
        self._checks(run).forget()

    def _checks(self, run: Run) -> Checks:
        return run.state(self)["checks"]


# ---- Checksums -------------------------------------------------------------------------------------------------------
_COLUMNS = 512  # of the matrix as which a tensor is projected
_ROWS_AT_ONCE = 2048  # of these: what is converted to another dtype at a time
_SIGMAS = 8.0
_ERROR = {False: 8.0, True: 64.0}
"""Rounding error of a projection, in units of 2**-23 times the norm: of an eager and of a lazy device, which adds in
float32 in an order of its own."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's elements read as integers, modulo 2**64; 0-dim int64. A change of any one bit
    changes it."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = tensor.view(kinds[tensor.element_size()])
    return tensor.sum(dtype=torch.int64)


class Projection:
    """Random signs, the same on every rank, onto which tensors are projected: a tensor in rows of 512 elements, times
    one vector of signs from the right and another from the left. Signs keep rounding errors that are alike from adding
    up.

    Args:
        lazy: whether to write the projection as operations that a compiler fuses, in float32.
    """

    def __init__(self, lazy: bool) -> None:
        self._lazy = lazy
        self._signs: dict[torch.device, torch.Tensor] = {}

    def __call__(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the projection of all elements and the sum of their squares, ``[2]``; float64, or float32 on a lazy
        device."""
        found = [self._of(each) for tensor in tensors for each in _real(tensor)]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    def rows(self, tensors: Iterable[torch.Tensor], count: int) -> torch.Tensor:
        """The same for each row of tensors ``[count, ...]``, ``[count, 2]``."""
        tensors = list(tensors)
        return torch.stack([self([tensor[i] for tensor in tensors]) for i in range(count)])

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if self._lazy else torch.float64
        length, rows = flat.numel(), flat.numel() // _COLUMNS
        right, left = self._take(flat.device, rows + 1)
        projections, squares = [], []
        for first in range(0, rows, max(rows, 1) if self._lazy else _ROWS_AT_ONCE):
            last = rows if self._lazy else min(rows, first + _ROWS_AT_ONCE)
            matrix = flat[first * _COLUMNS : last * _COLUMNS].view(-1, _COLUMNS)
            matrix = matrix.float() if matrix.dtype.itemsize < 4 else matrix
            signs = left[first:last]
            if self._lazy:
                projections.append(((matrix * right).sum(1) * signs).sum())
                squares.append(matrix.square().sum())
            else:
                projections.append(((matrix @ right.to(matrix.dtype)).to(wide) * signs).sum())
                squares.append((matrix.flatten() @ matrix.flatten()).to(wide))
        if rest := length - rows * _COLUMNS:
            tail = flat[rows * _COLUMNS :].to(wide)
            projections.append((tail * right[:rest]).sum() * left[rows])
            squares.append(tail.square().sum())
        if not projections:
            return torch.zeros(2, dtype=wide, device=flat.device)
        return torch.stack([torch.stack(projections).sum().to(wide), torch.stack(squares).sum().to(wide)])

    def _take(self, device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._signs.get(device)
        if known is None or len(known) < _COLUMNS + rows:
            length = _COLUMNS + max(rows, 1024 if known is None else 2 * len(known))
            generator = torch.Generator().manual_seed(20_480)
            drawn = torch.randint(2, (length,), generator=generator) * 2 - 1
            known = self._signs[device] = drawn.to(torch.float32 if self._lazy else torch.float64).to(device)
        return known[:_COLUMNS], known[_COLUMNS : _COLUMNS + rows]


def _real(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return [flat.detach().reshape(-1)]


def beyond_rounding(
    expected: torch.Tensor, received: torch.Tensor, dtype: torch.dtype, ranks: int, lazy: bool
) -> torch.Tensor:
    """Returns 1.0 for each sum whose checksum differs from that of what was sent by more than rounding, else 0.0;
    float32.

    The bound is eight standard deviations of the rounding errors of ``ranks`` additions in ``dtype`` of random vectors.

    Args:
        expected: the sums over ranks of the projections, and of the squares, of what they sent, ``[..., 2]``.
        received: projection and squares of the result, ``[..., 2]``.
    """
    norms = expected[..., 1] + received[..., 1]
    variance = ranks * (torch.finfo(dtype).eps / 2) ** 2 + (_ERROR[lazy] * 2.0**-23) ** 2
    bound = _SIGMAS * (variance * norms).sqrt()
    close = (expected[..., 0] - received[..., 0]).abs() <= bound
    # What is not finite where it was computed is another guard's business, and a sum in float16 may overflow.
    excused = ~torch.isfinite(expected).all(-1)
    if dtype == torch.float16:
        excused = excused | ~torch.isfinite(received).all(-1)
    return (~(close | excused)).float()


# ---- Sums over ranks -------------------------------------------------------------------------------------------------
@dataclass
class Sum:
    """A sum of one step.

    Args:
        dtype: in which it was sent and added.
        sent: projection and squares of what this rank sent, ``[2]``, or ``[group.size, 2]`` if rows are scattered.
        received: of what it received, ``[2]``.
    """

    dtype: torch.dtype
    sent: torch.Tensor
    received: torch.Tensor


class Sums(Observer):
    """Computes the checksums of sums over ranks of a step's gradients.

    Args:
        run: the run.

    Attributes:
        results: what was received in this step, with the checksum and the version of each; on eager devices.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"collective", "deferred"})

    def __init__(self, run: Run) -> None:
        self._run, self._lazy = run, run.backend.is_lazy
        self.project = Projection(self._lazy)
        self._compares = False  # sums of checksums are not checked themselves
        # Bounded, for a loop that sums values of an evaluation: every rank of a group has the same last ones.
        self.results: deque[Kept] = deque(maxlen=_MOST)
        self._found: dict[tuple[tuple[int, ...], bool], tuple[Group, deque[Sum]]] = {}

    def begin(self, event: Event) -> None:
        """Computes the checksums of what is summed, and of the sums when they are there."""
        if self._compares or not isinstance(event, Collective) or not event.summed:
            return
        group, sent, scattered = event.group, event.summed, event.scattered
        if not self._is_of_gradients(group) or any(tensor.device != self._run.device for tensor in sent):
            return
        dtype = sent[0].dtype.to_real()
        before = self.project.rows(sent, group.size) if scattered else self.project(sent)

        def finish(received: Sequence[torch.Tensor], scale: float) -> None:
            after = self.project(received)
            if scale != 1.0:
                after = after * torch.tensor([1 / scale, 1 / scale**2], dtype=after.dtype, device=after.device)
            _, found = self._found.setdefault((group.ranks, scattered), (group, deque(maxlen=_MOST)))
            found.append(Sum(dtype, before, after))
            if not self._lazy:
                self.results += [Kept("a reduced gradient", each, bits(each)) for each in received]

        event.when_received(finish)

    def _is_of_gradients(self, group: Group) -> bool:
        return set(group.name.split(" x ")) <= set(self._run.mesh.gradient_axes)

    def compare(self) -> torch.Tensor | None:
        """Returns above 0 if a sum of this step is wrong on this rank; 0-dim; None without sums. Collective over the
        groups of the sums."""
        found, self._found = self._found, {}
        self._compares = True
        try:
            return self._wrong(found)
        finally:
            self._compares = False

    def _wrong(self, found: dict[tuple[tuple[int, ...], bool], tuple[Group, deque[Sum]]]) -> torch.Tensor | None:
        wrong = []
        for (_, scattered), (group, sums) in found.items():
            sent = torch.stack([each.sent for each in sums], -2)  # [sums, 2] or [ranks, sums, 2]
            if scattered:
                expected = self._run.backend.reduce_scatter(sent, group).reshape(-1, 2)
            else:
                expected = self._run.backend.all_reduce(sent, group)
            for dtype in dict.fromkeys(each.dtype for each in sums):
                own = [index for index, each in enumerate(sums) if each.dtype == dtype]
                received = torch.stack([sums[index].received for index in own])
                chosen = expected if len(own) == len(sums) else expected[own]
                wrong.append(beyond_rounding(chosen, received, dtype, group.size, self._lazy).max())
        return torch.stack(wrong).max() if wrong else None


# ---- Memory ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kept:
    """A tensor with its checksum at some time.

    Args:
        name: for messages.
        tensor: the tensor.
        checksum: of :func:`bits`, or of a :class:`Projection`.
        version: the number of times PyTorch had written it then.
        address: of its memory then.
    """

    name: str
    tensor: torch.Tensor
    checksum: torch.Tensor
    version: int = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.tensor._version)
        object.__setattr__(self, "address", _address(self.tensor))

    @property
    def is_unwritten(self) -> bool:
        """Whether PyTorch has not written it since, and it was not assigned other memory."""
        return self.tensor._version == self.version and _address(self.tensor) == self.address


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.device.type in ("cpu", "cuda") else 0


class Checks:
    """The checks of one rank.

    Args:
        run: the run.
        every: steps between readings.
    """

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every, self._lazy = run, every, run.backend.is_lazy
        self.sums = Sums(run)
        self._steps = 0
        self._weights: list[Kept] = []
        self._state: dict[int, list[Kept]] = {}
        self._changed: list[tuple[list[str], torch.Tensor]] = []  # names of what was compared, and flags of each
        self._due: list[Due] = []
        self._keys: list[tuple[Any, ...]] | None = None
        self._parts: list[dict[tuple[Any, ...], Part]] = []

    def forget(self) -> None:
        """Forgets all checksums, after values were loaded or changed their shapes."""
        self._weights, self._state, self._keys = [], {}, None
        self.sums.results.clear()

    # ---- before and after an update ----------------------------------------------------------------------------------
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares gradients, weights and state with their checksums."""
        kept = [*self.sums.results, *self._weights, *self._state.pop(id(optimizer), [])]
        self.sums.results.clear()
        self._weights = []
        kept = [each for each in kept if each.is_unwritten]
        if kept:
            flags = torch.stack([self._differs(each) for each in kept])
            self._changed.append(([each.name for each in kept], flags))

    def _differs(self, kept: Kept) -> torch.Tensor:
        now = self._checksum(kept.tensor)
        if not self._lazy:
            return (now != kept.checksum).float()
        bound = _SIGMAS * _ERROR[True] * 2.0**-23 * kept.checksum[1].sqrt()
        same = ((now[0] - kept.checksum[0]).abs() <= bound) | ~torch.isfinite(kept.checksum).all()
        return (~same).float()

    def _checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.sums.project([tensor]) if self._lazy else bits(tensor)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares the sums of a step, and keeps checksums until the next update."""
        self._steps += 1
        with torch.no_grad():
            wrong = self.sums.compare()
            by_key: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
            for key, name, tensor in self._held():
                kept = Kept(name, tensor, self._checksum(tensor))
                self._weights.append(kept)
                by_key[key].append(kept.checksum)
            self._state[id(optimizer)] = [
                Kept(name, tensor, self._checksum(tensor)) for name, tensor in self._state_of(optimizer)
            ]
        replicas = {key: torch.stack(found).sum(0) for key, found in by_key.items()}
        changed, self._changed = self._changed, []
        is_alone = any(not model.sync_enabled for model in self._run.models)
        self._due.append(Due(self._steps, wrong, changed, {} if is_alone else replicas))

    def _held(self) -> Iterator[tuple[tuple[Any, ...], str, torch.Tensor]]:
        """The weights on this rank, each with a key that is equal for parameters that are sharded alike."""
        for model in self._run.models:
            for record in model.parameters:
                if record.current is None or record.is_unread or not record.current.requires_grad:
                    continue
                if record.weights is None:
                    yield _key(record), record.fqn, record.current
                elif not self._lazy and record.weights.tensor.numel():  # else they are the optimizer's
                    yield _key(record), record.fqn, record.weights.tensor

    def _state_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        state = optimizer.shard_state if isinstance(optimizer, ShardedOptimizer) else optimizer.state
        for index, (updated, entries) in enumerate(state.items()):
            if not isinstance(entries, Mapping):
                continue
            record = self._run.find_parameter(updated) if isinstance(updated, torch.Tensor) else None
            of = f"{record.fqn!r}" if record is not None else f"shard {index}"
            values = dict(entries)
            if record is None and isinstance(updated, torch.Tensor):
                values["master weight"] = updated
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device == self._run.device:
                    yield f"{name} of {of} in the optimizer", value

    # ---- reading -----------------------------------------------------------------------------------------------------
    def judge(self, run: Run, *, now: bool = False) -> None:
        """Reads the checks of the last steps if they are due. Collective.

        Raises:
            CorruptionError: on every rank.
        """
        if not self._due or not (now or self._steps % self._every == 0) or not run.backend.has_values:
            self._due = self._due if run.backend.has_values else []
            return
        due, self._due = self._due, []
        if self._keys is None:
            replica = replica_of(run)
            mine = {
                _key(r): (*replica, *part_of(r, run.coordinates)) for m in run.models for r in m.parameters if r.trains
            }
            self._parts = run.backend.all_gather_object(mine, run.world)
            self._keys = sorted({key for parts in self._parts for key in parts})
        rows = torch.stack([each.read(self._keys, run) for each in due])
        everyone = run.backend.all_gather(rows.unsqueeze(0), run.world) if run.world.size > 1 else rows.unsqueeze(0)
        for index, each in enumerate(due):
            found = everyone[:, index]
            if bool((found[:, :2] > 0).any()) or self._unequal(found):
                raise self._error(each, found, run)

    def _unequal(self, found: torch.Tensor) -> list[tuple[tuple[Any, ...], dict[tuple[int, ...], list[int]]]]:
        """Returns the keys of which ranks with the same shard have other checksums, and the ranks of each checksum."""
        result = []
        for column, key in enumerate(self._keys or []):
            by_part: dict[Part, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
            for rank, parts in enumerate(self._parts):
                checksum = tuple(found[rank, 2 + 2 * column : 4 + 2 * column].tolist())
                if key in parts and checksum != _ABSENT:
                    by_part[parts[key]][checksum].append(rank)
            result += [(key, dict(ranks)) for ranks in by_part.values() if len(ranks) > 1]
        return result

    def _error(self, due: Due, found: torch.Tensor, run: Run) -> CorruptionError:
        """Collective."""
        names = run.backend.all_gather_object(due.names(run), run.world)
        guilty: dict[int, list[str]] = defaultdict(list)
        for rank in range(run.world.size):
            if found[rank, 0] > 0:
                guilty[rank].append("received a sum of gradients that is not the sum of what the ranks sent")
            if found[rank, 1] > 0:
                guilty[rank].append(f"memory changed that nothing wrote: {', '.join(names[rank])}")
        for _, holders in self._unequal(found):
            most = max(len(each) for each in holders.values())
            tied = sum(len(each) == most for each in holders.values()) > 1
            for each in holders.values():
                for rank in each if tied or len(each) < most else ():
                    others = sorted(r for other in holders.values() if other is not each for r in other)
                    shown = ", ".join(map(str, others[:4])) + (", ..." if len(others) > 4 else "")
                    guilty[rank].append(f"its weights after the step differ from those of rank {shown}")
        ranks = sorted(guilty)
        return CorruptionError(
            f"Values of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} were corrupted in step "
            f"{due.step}.",
            where="; ".join(f"rank {rank}: {' and '.join(guilty[rank])}" for rank in ranks),
            why="hardware or a driver has changed them, or code wrote them without PyTorch's knowledge "
            "(parameter.data, another library)",
            fix="continue from a checkpoint of an earlier step, and test or replace the device or machine of the rank "
            "if it happens again",
        )


_ABSENT = (-1, -1)


@dataclass
class Due:
    """The checks of one step, not yet read.

    Args:
        step: number of the step, from 1.
        wrong: above 0 if a sum was wrong on this rank; 0-dim; None without sums.
        changed: names of tensors, and flags that are above 0 for those that changed.
        replicas: checksums of the weights by key, of all parameters of a key.
    """

    step: int
    wrong: torch.Tensor | None
    changed: list[tuple[list[str], torch.Tensor]]
    replicas: dict[tuple[Any, ...], torch.Tensor]

    def read(self, keys: Sequence[tuple[Any, ...]], run: Run) -> torch.Tensor:
        """Returns the flags and, for each key, two numbers that are equal where the checksums are; int64 on the CPU."""
        read = run.backend.to_host
        wrong = 0 if self.wrong is None else int(read(self.wrong) > 0)
        changed = int(any(bool((read(flags) > 0).any()) for _, flags in self.changed))
        result = [wrong, changed]
        for key in keys:
            value = self.replicas.get(key)
            if value is None:
                result += _ABSENT
                continue
            host = read(value).reshape(-1)
            if not host.dtype.is_floating_point:
                low = int(host[0]) & 0xFFFFFFFF
                result += [low, (int(host[0]) >> 32) & 0xFFFFFFFF]
            else:  # the bits of the projection and of the squares
                result += host.to(torch.float32).view(torch.int32).to(torch.int64).abs().tolist()
        return torch.tensor(result, dtype=torch.int64)

    def names(self, run: Run) -> list[str]:
        """Names of the first tensors that changed on this rank."""
        found = [
            name
            for names, flags in self.changed
            for name, flag in zip(names, run.backend.to_host(flags).tolist(), strict=True)
            if flag
        ]
        return found[:3]


def _key(record: ParameterRecord) -> tuple[Any, ...]:
    """How a parameter is sharded: ranks that hold the same shard of one parameter do so of all with this key."""
    cuts = tuple((cut.axis, cut.parts, cut.replicas) for cut in record.layout.cuts if cut.parts > 1)
    kept = () if record.weights is None else record.weights.axes
    return (cuts, tuple(kept), tuple(sorted((axis, *held) for axis, held in record.holders.items())))

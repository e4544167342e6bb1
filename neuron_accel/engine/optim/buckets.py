"""Gradients, bucket by bucket, while the backward pass still runs.

Whoever owns gradient reduction gets its parameters as buckets and is told when the gradients of a bucket are complete,
always in the same order on every rank, so that the collectives it starts match. A parameter that takes no part in a
backward pass holds nothing up: its bucket follows when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.runtime.join import JoinAction
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together: one dtype, one set of axes to sum over.

    Args:
        records: in the order in which backward is expected to reach them.
        parameters: the parameters of these records.
        dtype: of the gradients.
        partial_axes: axes over which the gradients are partial sums, beside the mesh's gradient axes.
    """

    records: tuple[ParameterRecord, ...]
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    partial_axes: tuple[str, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)


def make_buckets(records: Iterable[ParameterRecord], cap_bytes: int) -> list[Bucket]:
    """Buckets of about ``cap_bytes`` in the reverse order of ``records``, since backward reaches the last layers first.

    A parameter larger than the cap gets a bucket of its own.
    """
    open_buckets: dict[tuple[torch.dtype, tuple[str, ...]], list[ParameterRecord]] = {}
    sizes: dict[tuple[torch.dtype, tuple[str, ...]], int] = {}
    closed: list[Bucket] = []

    def close(key: tuple[torch.dtype, tuple[str, ...]]) -> None:
        members = tuple(open_buckets.pop(key))
        parameters = tuple(r.current for r in members if r.current is not None)
        closed.append(Bucket(records=members, parameters=parameters, dtype=key[0], partial_axes=key[1]))

    for record in reversed(list(records)):
        parameter = record.current
        assert parameter is not None
        key = (parameter.dtype, tuple(sorted(record.partial_axes)))
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


class BackwardWatcher:
    """Follows backward passes over the parameters of a list that require gradients.

    Which do is looked up at the end of every pass that is reduced, and at the latest before gradients are used: a
    parameter that has begun to train joins with all the gradient that it has, and a bucket none of whose parameters
    trains takes no part. ``requires_grad`` is the same on every rank.

    Args:
        records: all parameters that may train, in the same order on every rank.
        admit: called with those of ``records`` that begin to train, the first time before anything was watched; gives
            the buckets to watch from now on, beside those before.
        run: the run.
        group: the ranks whose parameters train at the same time.
        synchronises: whether gradients that arrive now are to be announced, or only accumulate.
        driven: whether whoever runs the backward pass will call :meth:`finish`; else autograd does at its end.
        ready: called with a bucket's index once its gradients are complete; in ascending order, each at most once per
            pass.
        done: called at the end of a pass, after every bucket that takes part in it was ready.
        overlap: whether buckets are announced while the pass still runs, or all at its end.
        action: the reduction as others can take part in it that have run out of data: with the arguments of
            :meth:`take_part`.
        take: called with a bucket's index and a parameter's position in it when a gradient arrives that will be
            announced while the pass still runs.
        agreed: whether it is known that the same parameters train on all ranks now.
    """

    def __init__(
        self,
        records: Iterable[ParameterRecord],
        admit: Callable[[list[ParameterRecord]], Sequence[Bucket]],
        *,
        run: Run,
        group: Group,
        synchronises: Callable[[], bool],
        driven: Callable[[], bool],
        ready: Callable[[int], None],
        done: Callable[[], None],
        overlap: bool = True,
        action: JoinAction | None = None,
        take: Callable[[int, int], None] | None = None,
        agreed: bool = False,
    ) -> None:
        self._admit, self._run, self._group = admit, run, group
        self._action, self._take = action, take
        self._ready, self._done = ready, done
        self._synchronises, self._driven, self._overlap = synchronises, driven, overlap
        self._candidates: list[ParameterRecord] = []
        self._frozen: list[int] = []  # those of them that never trained
        self._joined: list[tuple[int, ...]] = []  # those that began to train, one entry each time
        self._buckets: list[Bucket] = []
        # By number of the parameter: a hook costs microseconds, and looking a tensor up in a dict is a call, too.
        self._where: list[int] = []
        self._position: list[int] = []
        self._records: list[ParameterRecord] = []
        self._late: list[bool] = []
        self._handles: list[Any] = []
        self._owed: list[bool] = []  # of each bucket: whether gradients were left unreduced
        self._active: list[bool] = []
        self._seen = bytearray()
        self._missing: list[int] = []
        self._next = 0
        self._running, self._sends_early = False, False
        run.watchers.append(self)
        self.extend(records, agreed=agreed)

    def extend(self, records: Iterable[ParameterRecord], *, agreed: bool = False) -> None:
        """Watches further parameters, if they train, and as soon as they do. Collective."""
        begin = len(self._candidates)
        self._candidates += [record for record in records if record.current is not None]
        self._frozen += range(begin, len(self._candidates))
        self.follow(agreed=agreed)

    def follow(self, *, owed: bool = False, agreed: bool = False) -> bool:
        """Looks which parameters have begun to train. Collective if there are any.

        Args:
            owed: whether they have gradients that are to be reduced.
            agreed: whether it is known that the same have on all ranks.

        Returns:
            whether there are any.

        Raises:
            DesyncError: if others have on other ranks.
        """
        begun = tuple(index for index in self._frozen if self._trains(self._candidates[index]))
        if begun:
            if not agreed:
                self._check_agreement(begun)
            self._join(begun, owed=owed)
        return bool(begun)

    @staticmethod
    def _trains(record: ParameterRecord) -> bool:
        return record.current is not None and record.current.requires_grad

    def _check_agreement(self, begun: tuple[int, ...]) -> None:
        if self._group.size == 1 or (self._action is not None and self._action.announced):
            return  # who has data tells the others which parameters train
        everyone = self._run.backend.all_gather_object([self._candidates[i].fqn for i in begun], self._group)
        differs = sorted(set().union(*everyone).difference(set(everyone[0]).intersection(*everyone)))
        if differs:
            raise DesyncError(
                f"{differs[0]!r} requires a gradient on some ranks and not on others.",
                where=f"ranks {', '.join(map(str, self._group.ranks))}; {len(differs)} such parameters",
                why="their gradients are summed over these ranks, and each rank would wait for the others",
                fix="freeze and unfreeze the same parameters at the same step on every rank",
            )

    def _join(self, begun: tuple[int, ...], *, owed: bool) -> None:
        self._joined.append(begun)
        joining = set(begun)
        self._frozen = [index for index in self._frozen if index not in joining]
        buckets = self._admit([self._candidates[index] for index in begun])
        for index, bucket in enumerate(buckets, len(self._buckets)):
            for position, parameter in enumerate(bucket.parameters):
                number = len(self._where)
                self._where.append(index)
                self._position.append(position)
                self._handles.append(_hooked(parameter, partial(self._arrived, number)))
                self._seen.append(0)
            self._records += bucket.records
            self._late += [record.completed_late for record in bucket.records]
            self._missing.append(len(bucket.parameters))
        self._buckets += buckets
        self._owed += [owed] * len(buckets)
        self._active += [True] * len(buckets)

    @property
    def unsynchronised(self) -> bool:
        """Whether gradients have arrived that were not announced through ``ready`` yet."""
        return any(self._owed)

    def owes(self, index: int) -> bool:
        """Whether this holds for a bucket."""
        return self._owed[index]

    def owe(self) -> None:
        """There are gradients that this has not seen arrive."""
        self._owed = [owed or self._learns(i) for i, owed in enumerate(self._owed)]

    def forget(self) -> None:
        """Gradients that were not announced are not to be."""
        self._owed = [False] * len(self._buckets)

    def _learns(self, index: int) -> bool:
        return any(parameter.requires_grad for parameter in self._buckets[index].parameters)

    @property
    def is_mixed(self) -> bool:
        """Whether a bucket has parameters that train and others that do not any more."""
        return any(
            len({parameter.requires_grad for parameter in bucket.parameters}) > 1
            for bucket, active in zip(self._buckets, self._active, strict=True)
            if active
        )

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        index = self._where[number]
        if not self._synchronises():
            if not self._owed[index]:
                self.owe()
            return
        if not self._running:
            self._begin()
            if not self._driven():
                # A plain loss.backward(): autograd itself tells when it is through.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if self._late[number]:
            return  # goes with its bucket at the end
        if self._seen[number]:
            if index < self._next:
                raise UsageError(
                    f"The gradient of {self._records[number].fqn!r} arrived twice in one backward pass, the second "
                    "time after it had been sent.",
                    why="re-entrant activation checkpointing runs a backward pass inside the backward pass",
                    fix="use the non-re-entrant variant: gradient_checkpointing_kwargs={'use_reentrant': False}",
                )
        else:
            self._seen[number] = 1
            self._missing[index] -= 1
        if not self._sends_early or (self._action and self._action.announced):
            return
        if self._take:
            self._take(index, self._position[number])
        if self._missing[index] == 0:
            self._advance()

    def _begin(self, *, left: bool = False) -> None:
        """A pass begins; ``left``: it reduces what others have left, and nothing else."""
        self._running = True
        # Of several, which is complete first depends on what a rank's samples use; after the pass they have an order.
        alone = not any(other._buckets for other in self._run.watchers if other is not self)
        self._sends_early = self._overlap and alone
        self._next = 0
        self._seen = bytearray(len(self._where))
        self._missing = [sum(p.requires_grad for p in bucket.parameters) for bucket in self._buckets]
        self._active = [
            owed or (missing > 0 and not left) for owed, missing in zip(self._owed, self._missing, strict=True)
        ]

    def _advance(self, *, everything: bool = False) -> None:
        while self._next < len(self._buckets):
            if not self._active[self._next]:
                self._next += 1
            elif everything or self._missing[self._next] <= 0:
                self._next += 1
                self._ready(self._next - 1)
            else:
                return

    def finish(self) -> None:
        """The backward pass is over: announces what is left. Does nothing between passes, but for parameters that have
        begun to train."""
        begun = (self._running or self._synchronises()) and self.follow(owed=True)
        if not self._running:
            if not begun:
                return
            self._begin(left=True)
        self._complete()

    def _complete(self) -> None:
        if self._action and self._action.announced:
            trains = tuple(self._trains(record) for record in self._candidates)
            self._action(trains, tuple(self._joined), tuple(self._active))
        self._advance(everything=True)
        self._running = False
        self._owed = [owed and not active for owed, active in zip(self._owed, self._active, strict=True)]
        self._done()

    def flush(self) -> None:
        """Announces gradients that arrived in passes that did not synchronise, if there are any."""
        self.finish()
        self.follow(owed=True)
        if self.unsynchronised:
            self._begin(left=True)
            self._complete()

    def take_part(
        self, trains: tuple[bool, ...], joined: tuple[tuple[int, ...], ...], active: tuple[bool, ...]
    ) -> None:
        """A pass without one: this rank has no data, and contributes what gradients it has, or zeros.

        Args:
            trains: which parameters train on the ranks that have data; from now on on this one, too.
            joined: which of them began to, one entry each time.
            active: which buckets take part.
        """
        for record, does in zip(self._candidates, trains, strict=True):
            if record.current is not None and record.current.requires_grad != does:
                record.current.requires_grad_(does)
        for begun in joined[len(self._joined) :]:
            self._join(begun, owed=False)
        self._begin()
        self._active = list(active)
        self._complete()

    def close(self) -> None:
        """Stops watching."""
        if self in self._run.watchers:
            self._run.watchers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hooked(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook for gradients that arrive, also where none do now: torch asks for ``requires_grad`` then."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trains)


def used_anywhere(local: list[bool], run: Run, group: Group) -> list[bool]:
    """Which parameters got a gradient on any rank of ``group``, so that one without stays without, as in one process.

    Where reading a value would stall the device, what this rank knows is taken for all: ranks of such devices run the
    same graph.

    Args:
        local: for each parameter, whether this rank has a gradient.
    """
    if group.size == 1 or not run.backend.reads_are_free:
        return local
    flags = torch.tensor(local, dtype=torch.int32, device=run.device)
    return [flag > 0 for flag in run.backend.all_reduce(flags, group).tolist()]


class FlatGradients:
    """Memory that the gradients of a bucket keep from pass to pass, so that it is not faulted in anew every step.

    Gradients are moved here as they arrive, while they are in the cache, and scaled on the way, which then costs no
    pass over memory of its own.

    Args:
        bucket: the parameters.
        flags: whether a one or zero for each parameter follows the gradients: whether it has one. Summed along with
            them, they say whether any rank has, without a message of their own.
    """

    def __init__(self, bucket: Bucket, *, flags: bool = False) -> None:
        self._bucket, self._flags = bucket, flags
        self._flat: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._taken = [False] * len(bucket.parameters)

    def take(self, index: int, scale: float) -> None:
        """Moves a parameter's gradient here, multiplied by ``scale``; one that comes after it is added."""
        parameter = self._bucket.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return
        check_dense(gradient, self._bucket.records[index])
        if self._flat is None:
            self._allocate()
        slot = self._slots[index]
        if self._taken[index]:
            slot.add_(gradient.detach(), alpha=scale)
        else:
            torch.mul(gradient.detach(), scale, out=slot)  # it may be the slot itself, where a loop keeps gradients
        self._taken[index] = True
        parameter.grad = None

    def collect(self, scale: float) -> tuple[torch.Tensor, list[bool]]:
        """The gradients one after another, and the flags, zeros for those that have none; and which have one."""
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
        self._flat = torch.empty(length, dtype=self._bucket.dtype, device=parameters[0].device)
        self._slots = split_like(self._flat, parameters)
        return self._flat

    def parts(self, reduced: torch.Tensor) -> list[torch.Tensor]:
        """The gradients in what :meth:`collect` has become, in the shapes of the parameters; the same tensors every
        time where it was reduced in place."""
        if self._flat is not None and reduced.data_ptr() == self._flat.data_ptr():
            return self._slots
        return split_like(reduced, self._bucket.parameters)

    def used_anywhere(self, reduced: torch.Tensor, local: Sequence[bool]) -> list[bool]:
        """Which parameters have a gradient on any rank.

        Args:
            reduced: the sum over ranks of what :meth:`collect` gave.
            local: which have one on this rank.
        """
        if not self._flags or all(local):
            return list(local)
        return [flag > 0 for flag in reduced[self._bucket.numel :].tolist()]


def check_dense(gradient: torch.Tensor, record: ParameterRecord) -> None:
    """Refuses a sparse gradient.

    Raises:
        UsageError: naming the parameter.
    """
    if gradient.is_sparse:
        raise UsageError(
            f"The gradient of {record.fqn!r} is sparse.",
            why="gradients travel in dense buckets",
            fix="build the embedding with sparse=False",
        )


def split_like(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive views of ``flat`` with the shapes of ``parameters``."""
    views, begin = [], 0
    for parameter in parameters:
        end = begin + parameter.numel()
        views.append(flat[begin:end].view(parameter.shape))
        begin = end
    return views

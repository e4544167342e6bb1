# SPDX-License-Identifier: Apache-2.0
"""The reduction of gradients over ranks, bucket by bucket, while the backward pass still runs.

:class:`GradientReducer` is for owners of gradient reduction that keep gradients at their parameters; it is all of data
parallelism. :class:`BackwardWatcher`, below it, tells a :class:`GradientOwner` when the gradients of a bucket are
complete, always in the same order on every rank, so that the collectives started then match. A parameter without a
gradient in a backward pass delays nothing: its bucket follows when the pass ends. The method is that of "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training" (Li et al., VLDB 2020).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, FlatGradients, exchanges_flags, make_buckets, used_anywhere
from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group, Pending
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


MEET_S = 300.0
"""Time in seconds for which a rank on which a parameter has begun to train waits for the others to notice the same."""
LOOK_S, LOOKS_A_SECOND = 0.001, 2000
"""Seconds between two looks of such a rank, at first, and how often all of them look together after a while."""


class GradientReducer:
    """Averages the gradients of one model over the samples of all ranks.

    After a backward pass that synchronises, ``parameter.grad`` is a view into a bucket with the sum over

    - the gradient axes of the mesh whose ranks hold the same shard (:meth:`ParameterRecord.reduction_axes`), and
    - the axes over which the gradient that autograd computes is a partial sum (``partial_axes``),

    divided by the number of ranks along all gradient axes: the gradient of the mean of the ranks' losses. A parameter
    that has a gradient on some ranks only has one on all ranks afterwards; one without any gradient keeps None.
    Gradients are sent and summed in the dtype that a plugin has set as :attr:`ParameterRecord.reduce_dtype`.

    Passes that do not synchronise (:attr:`PreparedModel.synchronises`, false under ``no_sync`` and while micro-batches
    accumulate) leave gradients as they are; the next one that does, or :meth:`flush`, reduces their sum. Ranks that ran
    out of data in ``join_uneven_inputs`` contribute zeros.

    The owner calls the methods from its hooks: :meth:`begin_backward` and :meth:`end_backward` from
    ``backward_pass``, :meth:`before_step` from ``step`` and before gradients are clipped or scaled, :meth:`restart`
    from ``reshape``. Its hooks are removed with those of the run (:meth:`Run.undo`).

    Args:
        model: after all rewrites, on its device: create the reducer in ``transform_model``, in phase ``GRADIENTS`` or
            later. Collective, like every method.
        run: the run.
        bucket_cap_mb: size of a bucket in MiB. Smaller ones start earlier, larger ones cost fewer messages.

    Raises:
        DesyncError: here or later, if a parameter requires a gradient on some ranks and not on others.
        UsageError: if a gradient is sparse, or arrives twice in one backward pass.
    """

    by_arrival: ClassVar[bool] = True

    def __init__(self, model: PreparedModel, run: Run, bucket_cap_mb: float = 25.0) -> None:
        self._model, self._run, self._cap_bytes = model, run, int(bucket_cap_mb * (1 << 20))
        self._data_group = run.group(*run.mesh.gradient_axes)
        self._pending: list[tuple[int, list[bool], Pending]] = []
        self._left: set[torch.Tensor] = set()
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._buckets: list[Bucket] = []
        self._groups: list[Group] = []  # over which each bucket is summed
        self._memory: list[FlatGradients] = []  # of each bucket; on lazy devices none
        # A lazy device runs nothing before the graph is complete, and its compiler schedules the reduction.
        self._watcher = BackwardWatcher(self, self._records(), run, overlap=not run.backend.is_lazy)
        run.undo(self.close)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._buckets)} buckets of {self._model!r}>"

    # ---- what the owner calls ----------------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Must be called at the start of a backward pass. If a loop did not zero gradients, those of earlier passes are
        already reduced. If the sum and the division are over different ranks, reducing them again would change them, so
        they are stored until the pass has ended."""
        if not self._model.synchronises:
            return
        for index, bucket in enumerate(self._buckets):
            if self._groups[index].size != self._data_group.size and not self._watcher.owes(index):
                for parameter in bucket.parameters:
                    if parameter.requires_grad and parameter.grad is not None:
                        self._before[parameter], parameter.grad = parameter.grad.clone(), None

    def end_backward(self) -> None:
        """Must be called at the end of a backward pass. Completes the reduction, if the pass synchronises."""
        self._watcher.finish()
        self._put_back()

    def flush(self) -> None:
        """Reduces the gradients of passes without synchronisation, unless ``no_sync`` is active."""
        self._watcher.finish()
        if self._model.sync_enabled:
            self._watcher.flush()

    def before_step(self) -> None:
        """Must be called before gradients are used. In a step inside ``no_sync``, data-parallel ranks are independent,
        but ranks that together hold one copy of the model still sum their partial gradients."""
        self.flush()
        if self._model.sync_enabled:
            return
        self._watcher.follow()
        if not self._watcher.unsynchronised:
            return
        mesh = self._run.mesh
        inside = [axis for axis in mesh.gradient_axes if axis not in mesh.data_axes]
        ways = [self._inside_replica(bucket, inside) for bucket in self._buckets]
        if all(group.size == ranks == 1 for group, ranks in ways):
            return
        for index, (group, ranks) in enumerate(ways):
            if self._watcher.owes(index):
                self._send(index, group, ranks)
        self._watcher.forget()
        self.receive_gradients()

    def _inside_replica(self, bucket: Bucket, inside: list[str]) -> tuple[Group, int]:
        """Returns the group over which a bucket is summed if replicas are not averaged, and the number by which the sum
        is divided: ranks over which a parameter is sharded hold one copy of it, whose gradient includes the loss of
        each of them."""
        reduced = [axis for axis in inside if axis in bucket.reduction_axes]
        return (
            self._run.group(*reduced, *bucket.partial_axes),
            self._run.group(*inside, *bucket.sharded_axes).size,
        )

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Excludes these parameters from the reduction from now on."""
        new = set(parameters) - self._left
        self._left |= new
        if any(record.current in new for record in self._model.parameters):
            self.restart()

    def restart(self) -> None:
        """Creates the buckets again, for parameters whose shapes have changed."""
        self._buckets, self._groups, self._memory = [], [], []
        self._watcher.restart(self._records())

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self._watcher.close()

    def _records(self) -> list[ParameterRecord]:
        return [record for record in self._model.parameters if record.current not in self._left]

    # ---- what the watcher calls, see GradientOwner -------------------------------------------------------------------
    @property
    def reduces_now(self) -> bool:
        """Whether gradients that arrive now are reduced."""
        return self._model.synchronises

    @property
    def in_backward(self) -> bool:
        """Whether the run executes the backward pass."""
        return self._model.in_backward

    def admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Creates buckets for parameters that begin to train."""
        buckets = []
        for bucket in make_buckets(records, self._cap_bytes, self._run.mesh):
            group = self._run.group(*bucket.reduction_axes, *bucket.partial_axes)
            if group.size > 1 or self._data_group.size > 1:
                buckets.append(bucket)
                self._groups.append(group)
        self._buckets += buckets
        if not self._run.backend.is_lazy:
            flags = exchanges_flags(self._run)
            self._memory += [FlatGradients(bucket, flags=flags) for bucket in buckets]
        return buckets

    def take_gradient(self, bucket: int, index: int) -> None:
        """Copies a gradient that has arrived into the memory of its bucket."""
        self._memory[bucket].take(index, 1 / self._data_group.size)

    def send_gradients(self, bucket: int) -> None:
        """Starts the average of a bucket's gradients."""
        self._send(bucket, self._groups[bucket], self._data_group.size)

    def _send(self, index: int, group: Group, ranks: int) -> None:
        """Starts the sum of a bucket's gradients over ``group``, divided by ``ranks``."""
        if self._run.backend.is_lazy:
            self._average(self._buckets[index], group, ranks)
            return
        flat, used = self._memory[index].collect(1 / ranks)
        self._pending.append((index, used, self._run.backend.start_all_reduce(flat, group)))

    def _average(self, bucket: Bucket, group: Group, ranks: int) -> None:
        """The same on lazy devices, which defer execution themselves."""
        used = [p.grad is not None for p in bucket.parameters]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.parameters]
        if group.size == 1:
            averages = [gradient / ranks for gradient in gradients]
        else:
            sent = gradients
            if bucket.reduce_dtype is not None:  # rounded once they are scaled, as in the memory of other devices
                sent, ranks = [(gradient / ranks).to(bucket.reduce_dtype) for gradient in gradients], 1
            averages = self._run.backend.all_reduce_together(sent, group, 1 / ranks)
            averages = [average.to(bucket.dtype) for average in averages]
        for parameter, is_used, average in zip(bucket.parameters, used, averages, strict=True):
            parameter.grad = average if is_used else None

    def receive_gradients(self) -> None:
        """Waits for the averages and assigns them to the parameters."""
        pending, self._pending = self._pending, []
        for index, used, work in pending:
            bucket, memory = self._buckets[index], self._memory[index]
            flat = work.wait()
            anywhere = memory.used_anywhere(flat, used)
            if bucket.sharded_axes:  # as for one process, a parameter is used if any shard of it is
                anywhere = used_anywhere(anywhere, self._run, self._run.group(*bucket.sharded_axes))
            for parameter, part, is_used in zip(bucket.parameters, memory.parts(flat), anywhere, strict=True):
                if is_used:
                    parameter.grad = part
        self._put_back()
        if self._watcher.is_mixed and not self._watcher.unsynchronised:
            self.restart()  # otherwise frozen parameters would be sent too, and delay their bucket

    def _put_back(self) -> None:
        before, self._before = self._before, {}
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@runtime_checkable
class GradientOwner(Protocol):
    """Reduces gradients bucket by bucket, when a :class:`BackwardWatcher` tells it to.

    Attributes:
        by_arrival: whether a bucket is complete once all its gradients have arrived; False: once the owner says so
            (:meth:`BackwardWatcher.complete`), at the same place between other collectives on every rank, also on one
            where a parameter has no gradient.
    """

    by_arrival: ClassVar[bool]

    @property
    def reduces_now(self) -> bool:
        """Whether gradients that arrive now are to be reduced, or only accumulate."""

    @property
    def in_backward(self) -> bool:
        """Whether the code that runs the backward pass will call :meth:`BackwardWatcher.finish`; otherwise autograd
        calls it at the end of the pass."""

    def admit(self, records: list[ParameterRecord]) -> Sequence[Bucket]:
        """Called with parameters that begin to train; returns the buckets to watch in addition."""

    def take_gradient(self, bucket: int, index: int) -> None:
        """Called when a gradient arrives of a bucket that may be sent while the pass still runs, with the position of
        its parameter in the bucket."""

    def send_gradients(self, bucket: int) -> None:
        """Called once the gradients of a bucket are complete; in ascending order but for
        :meth:`BackwardWatcher.complete_ahead`, and at most once in a pass."""

    def receive_gradients(self) -> None:
        """Called at the end of a pass, after every bucket that takes part in it was sent."""

    def flush(self) -> None:
        """Reduces the gradients that are not reduced yet."""


class BackwardWatcher:
    """Tells an owner of gradients when those of each bucket are complete in a backward pass.

    Which parameters require gradients is checked at the end of every pass that is reduced, and at the latest before
    gradients are used. A parameter that has begun to train is then reduced with its full accumulated gradient, and a
    bucket without training parameters is skipped. ``requires_grad`` must be the same on every rank.

    Args:
        owner: reduces the gradients.
        records: all parameters that may train, in the same order on every rank.
        run: the run.
        overlap: whether buckets are sent while the pass still runs, or all at its end.
    """

    def __init__(self, owner: GradientOwner, records: Iterable[ParameterRecord], run: Run, *, overlap: bool = True):
        self._owner, self._run, self._overlap = owner, run, overlap
        self.has_begun = False  # whether a pass has begun since gradients were set to zero
        self._action = run.join.register("a backward pass", self.take_part, flush=owner.flush)
        self._handles: list[Any] = []
        self._watch()
        self.extend(records)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._trainable} in {len(self._buckets)} buckets>"

    def _watch(self) -> None:
        self._trainable = Trainable(self._run)
        self._buckets: list[Bucket] = []
        # By the number of a parameter, which its hook knows: bucket, position there, record, whether its gradient is
        # complete at the end of a pass only.
        self._watched: list[tuple[int, int, ParameterRecord, bool]] = []
        self._owed: list[bool] = []  # for each bucket, whether it has gradients that were not reduced
        self._resting: set[int] = set()  # buckets in which nothing trained in the last pass
        self._pass: _Pass | None = None
        self._run.watchers.append(self)

    def extend(self, records: Iterable[ParameterRecord]) -> None:
        """Watches further parameters from the time when they train. Collective."""
        self._trainable.add(records)
        self.follow(owed=False, meets=True)

    def restart(self, records: Iterable[ParameterRecord]) -> None:
        """Watches these parameters instead, of which the same ones train on all ranks."""
        self.close()
        self._watch()
        self._trainable.add(records)
        if begun := self._trainable.begun():
            self._join(begun, owed=False)

    def retire(self) -> None:
        """Removes the hooks, for good: ranks without data take part in no backward pass of this watcher any more."""
        self.close()
        self._run.join.drop(self._action)

    def close(self) -> None:
        """Removes the hooks."""
        if self in self._run.watchers:
            self._run.watchers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- parameters that begin to train ------------------------------------------------------------------------------
    def follow(self, *, owed: bool = True, meets: bool = False) -> bool:
        """Checks which parameters have begun to train, and returns whether any have. Collective if they have.

        Args:
            owed: whether gradients that they have are to be reduced.
            meets: see :meth:`Trainable.check`.

        Raises:
            DesyncError: if other parameters have begun to train on other ranks.
        """
        begun = self._trainable.begun()
        if begun:
            self._trainable.check([self._trainable.candidates[index] for index in begun], meets=meets)
            self._join(begun, owed=owed)
        return bool(begun)

    def _join(self, begun: tuple[int, ...], *, owed: bool) -> None:
        buckets = self._owner.admit(self._trainable.join(begun))
        for number, bucket in enumerate(buckets, len(self._buckets)):
            for index, (parameter, record) in enumerate(zip(bucket.parameters, bucket.records, strict=True)):
                self._handles.append(_hooked(parameter, _Arrival(self, len(self._watched))))
                self._watched.append((number, index, record, record.completed_late))
            if self._pass is not None:
                self._pass.active.append(True)
                self._pass.missing.append(len(bucket.parameters))
        self._buckets += buckets
        self._owed += [owed] * len(buckets)

    @property
    def is_mixed(self) -> bool:
        """Whether a bucket has parameters that train and others that no longer do. In a pass, of those that take part
        in it."""
        return any(
            len({parameter.requires_grad for parameter in bucket.parameters}) > 1
            for index, bucket in enumerate(self._buckets)
            if self._pass is None or self._pass.active[index]
        )

    # ---- gradients that passes have left unreduced -------------------------------------------------------------------
    @property
    def unsynchronised(self) -> bool:
        """Whether gradients have arrived that were not sent yet."""
        return any(self._owed)

    def owes(self, bucket: int) -> bool:
        """Returns whether a bucket has gradients that were not sent yet."""
        return self._owed[bucket]

    def owe(self) -> None:
        """Marks all buckets with training parameters as having gradients that were not sent."""
        trains = [any(parameter.requires_grad for parameter in bucket.parameters) for bucket in self._buckets]
        self._owed = [owed or learns for owed, learns in zip(self._owed, trains, strict=True)]

    def forget(self) -> None:
        """Removes that mark from all buckets."""
        self._owed = [False] * len(self._buckets)

    # ---- a pass ------------------------------------------------------------------------------------------------------
    def _arrived(self, number: int, followed: bool) -> None:
        bucket, index, record, is_late = self._watched[number]
        if not self._owner.reduces_now:
            if not self._owed[bucket]:
                self.owe()
            return
        now = self._enter()
        if is_late:
            return
        is_sent = bucket < now.next and bucket not in now.ahead
        if number in now.arrived:
            if is_sent:
                raise UsageError(
                    f"The gradient of {record.fqn!r} arrived twice in one backward pass, the second time after it had "
                    "been sent.",
                    why="another backward pass ran inside of this one, as in re-entrant activation checkpointing",
                    fix="use the non-re-entrant variant: gradient_checkpointing_kwargs={'use_reentrant': False}",
                )
        else:
            if is_sent and bucket in now.told:
                raise UsageError(
                    f"The gradient of {record.fqn!r} arrived after the gradients of its module had been sent.",
                    why="the parameter is also used outside of the forward pass of the module that it was sharded with",
                    fix="choose other modules to shard by, so that it belongs to one in whose forward pass it is used",
                )
            now.arrived.add(number)
            now.missing[bucket] -= 1
        # One that other hooks are to see stays where it is, and is taken when its bucket is sent. In what order buckets
        # are sent does not depend on it: this rank alone may have such hooks.
        if now.sends_early and not followed and not self._run.join.is_uneven:
            self._owner.take_gradient(bucket, index)
            if now.missing[bucket] == 0 and self._owner.by_arrival:
                self._advance(now)

    def _enter(self) -> _Pass:
        """Returns the pass that runs, which begins with the first gradient."""
        if self._pass is None:
            self._pass = self._begin()
            if not self._owner.in_backward:
                # A plain loss.backward(): autograd itself reports its end.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            elif self._run.backward_task not in (None, torch._C._current_graph_task_id()):
                self._pass.sends_early = False  # a hook runs backward passes inside this one, and more may follow
        return self._pass

    def _begin(self, active: Sequence[bool] | None = None) -> _Pass:
        """Begins a pass.

        Args:
            active: which buckets are reduced, if that is given: those that earlier passes have left unreduced, or that
                other ranks reduce, which this one follows without data. By default also those in which some parameter
                trains.
        """
        missing = [sum(p.requires_grad for p in bucket.parameters) for bucket in self._buckets]
        every = [owed or count > 0 for owed, count in zip(self._owed, missing, strict=True)]
        # With several watchers the order of completion depends on a rank's samples; at the end of the pass it is fixed.
        alone = not any(other._buckets for other in self._run.watchers if other is not self)
        self.has_begun = True
        self._pass = _Pass(list(every if active is None else active), missing, self._overlap and alone)
        resumed = tuple(i for i in sorted(self._resting) if every[i])
        self._resting = {i for i, count in enumerate(missing) if not count}
        if active is None and resumed:
            self._trainable.check_resumed(resumed, self._buckets)
        return self._pass

    def _advance(self, now: _Pass, *, everything: bool = False) -> None:
        """Sends the buckets that are complete, in order."""
        while now.next < len(self._buckets):
            bucket = now.next
            if now.active[bucket] and bucket not in now.ahead:
                arrived = self._owner.by_arrival and now.missing[bucket] <= 0
                if not (everything or arrived or bucket in now.told):
                    return
                now.next += 1
                self._owner.send_gradients(bucket)
            else:
                now.next += 1

    def complete(self, buckets: Iterable[int]) -> None:
        """Called during a backward pass, once these buckets get no further gradients in it, whether or not some are
        missing. They are sent, after those before them. Without effect in a pass that does not synchronise, or whose
        buckets are sent at its end."""
        if not self._owner.reduces_now:
            return
        now = self._enter()
        if now.sends_early and not self._run.join.is_uneven:
            now.told.update(buckets)
            self._advance(now)

    def complete_ahead(self, bucket: int) -> bool:
        """As :meth:`complete`, for a bucket that is sent before those with a lower index, at the same moment on every
        rank. It may get further gradients in this pass, which the owner reduces.

        Returns:
            Whether it was sent.
        """
        if not self._owner.reduces_now:
            return False
        now = self._enter()
        is_next = now.active[bucket] and bucket >= now.next and bucket not in now.told
        if not is_next or not now.sends_early or self._run.join.is_uneven:
            return False
        now.told.add(bucket)
        now.ahead.add(bucket)
        self._owner.send_gradients(bucket)
        return True

    def has_arrived(self, bucket: int) -> bool:
        """Returns whether all gradients of a bucket have arrived in the backward pass that runs."""
        return self._pass is not None and self._pass.missing[bucket] <= 0

    def finish(self) -> None:
        """Must be called at the end of a backward pass: sends the remaining buckets. Between passes it only handles
        parameters that have begun to train."""
        now = self._pass
        if now is not None and not self._run.join.is_uneven:
            self._advance(now, everything=True)  # first, since some ranks have started these collectives in the pass
        begun = (now is not None or self._owner.reduces_now) and self.follow()
        if now is not None or begun:
            self._complete(now or self._begin(self._owed))

    def flush(self) -> None:
        """Sends gradients that arrived in passes that did not synchronise, if there are any. Collective.

        Raises:
            UsageError: on every rank, if there was no pass, so that the loop has assigned gradients, and they differ.
        """
        self.finish()
        self.follow()
        if self.unsynchronised:
            self._complete(self._begin(self._owed))
        elif not any(each.has_begun for each in self._run.watchers) and self._owner.reduces_now:
            self._check_assigned()

    def _check_assigned(self) -> None:
        run = self._run
        group = run.group(*run.mesh.gradient_axes)
        parameters = [
            parameter
            for bucket in chain.from_iterable(each._buckets for each in run.watchers)
            for parameter, record in zip(bucket.parameters, bucket.records, strict=True)
            if not {*record.layout.axes} & {*run.mesh.gradient_axes}  # others have gradients of their own on each rank
        ]
        if not parameters or group.size == 1 or run.backend.is_lazy or run.join.is_uneven:
            return
        self.has_begun = True  # checked until gradients are set to zero
        gradients = [p.grad.detach().double() for p in parameters if p.grad is not None]
        norms = run.backend.all_gather_object(sum(float(gradient.norm()) for gradient in gradients), group)
        if max(norms) - min(norms) > 1e-6 * max(norms):  # False for NaN
            raise UsageError(
                "Gradients that no backward pass has reduced differ between data-parallel ranks.",
                where="an optimizer step, or clipping, of gradients that the loop has assigned",
                why="each rank would step with the gradients of its own samples, and their weights would drift apart",
                fix='parameter.grad = accelerator.reduce(gradient, reduction="mean") for each parameter, or '
                "accelerator.backward(loss) in place of torch.autograd.grad",
            )

    def _complete(self, now: _Pass) -> None:
        if self._run.join.is_uneven:
            trains = tuple(record.trains for record in self._trainable.candidates)
            self._action(trains, tuple(self._trainable.joined), tuple(now.active))
        self._advance(now, everything=True)
        self._owed = [owed and not active for owed, active in zip(self._owed, now.active, strict=True)]
        self._owner.receive_gradients()
        self._pass = None

    def take_part(
        self, trains: tuple[bool, ...], joined: tuple[tuple[int, ...], ...], active: tuple[bool, ...]
    ) -> None:
        """Takes part in a pass of other ranks without data: this rank contributes the gradients that it has, or zeros.

        Args:
            trains: which parameters train on the ranks with data, and from now on on this rank.
            joined: indices of parameters that have begun to train, one entry each time.
            active: which buckets are reduced.
        """
        self._trainable.follow(trains)
        for begun in joined[len(self._trainable.joined) :]:
            self._join(begun, owed=False)
        self._complete(self._begin(active))


@dataclass(eq=False, slots=True)
class _Pass:
    """The state of one backward pass.

    Args:
        active: which buckets take part in it.
        missing: for each bucket, how many of its gradients have not arrived.
        sends_early: whether buckets are sent while it runs.

    Attributes:
        next: the first bucket that was not sent, of those that are sent in order.
        arrived: numbers of the parameters whose gradients have arrived.
        told: buckets that the owner has called complete.
        ahead: of these, those that were sent before others with a lower index.
    """

    active: list[bool]
    missing: list[int]
    sends_early: bool
    next: int = 0
    arrived: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)


class Trainable:
    """Which of some parameters train, agreed over the ranks that sum their gradients.

    Args:
        run: the run.

    Attributes:
        candidates: all parameters that may train.
        joined: indices of those that began to train, one entry each time.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._group = run, run.group(*run.mesh.gradient_axes)
        self.candidates: list[ParameterRecord] = []
        self.joined: list[tuple[int, ...]] = []
        self._frozen: list[int] = []  # indices of those that never trained
        self._agreed: set[tuple[int, ...]] = set()  # buckets that ranks have agreed on to train again

    def __repr__(self) -> str:
        return f"{len(self.candidates) - len(self._frozen)} parameters that train"

    def add(self, records: Iterable[ParameterRecord]) -> None:
        """Adds parameters that may train."""
        begin = len(self.candidates)
        self.candidates += [record for record in records if record.current is not None]
        self._frozen += range(begin, len(self.candidates))

    def begun(self) -> tuple[int, ...]:
        """Returns the indices of those that train now and never did."""
        return tuple(index for index in self._frozen if self.candidates[index].trains)

    def join(self, begun: tuple[int, ...]) -> list[ParameterRecord]:
        """Notes that these train from now on, and returns them."""
        self.joined.append(begun)
        joining = set(begun)
        self._frozen = [index for index in self._frozen if index not in joining]
        return [self.candidates[index] for index in begun]

    def follow(self, trains: Sequence[bool]) -> None:
        """Sets ``requires_grad`` to that of other ranks."""
        for record, does in zip(self.candidates, trains, strict=True):
            if record.current is not None and record.current.requires_grad != does:
                record.current.requires_grad_(does)

    # ---- the same on every rank --------------------------------------------------------------------------------------
    def check(self, begun: Iterable[ParameterRecord], *, meets: bool) -> None:
        """Checks that the same parameters begin to train on all ranks.

        Args:
            begun: those that begin on this rank.
            meets: whether all ranks are known to check now. If not, other ranks may not have noticed anything and
                continue with another collective. This rank then waits for them for a limited time, without a
                collective.

        Raises:
            DesyncError: if they are others on other ranks.
        """
        if self._group.size == 1 or self._run.join.is_uneven:
            return  # ranks with data tell the others which parameters train
        backend, names = self._run.backend, sorted(record.fqn for record in begun)
        if not meets:
            self._meet(names[0])
        same = backend.gather_object(names, self._group, lambda one, other: one if one == other else None)
        if not backend.broadcast_object(same is None, self._group):
            return
        everyone = backend.all_gather_object(names, self._group)  # to explain it
        differs = sorted(set().union(*everyone).difference(set(everyone[0]).intersection(*everyone)))
        if differs:  # unless no other rank exists
            ranks = [rank for rank, mine in zip(self._group.ranks, everyone, strict=True) if differs[0] in mine]
            raise self._differs(differs[0], ranks, f"{len(differs)} such parameters")

    def check_resumed(self, resumed: tuple[int, ...], buckets: Sequence[Bucket]) -> None:
        """Checks that buckets whose parameters did not train in the last pass, and now do, are the same on all ranks. A
        set of buckets is checked once only, since some loops freeze and unfreeze parameters at every step."""
        if resumed not in self._agreed and not self._run.join.is_uneven:
            self.check([r for index in resumed for r in buckets[index].records if r.trains], meets=False)
            self._agreed.add(resumed)

    def _meet(self, name: str) -> None:
        """Waits until all ranks have noticed that parameters begin to train, of which ``name`` is one."""
        board, group = self._run.backend.board(), self._group
        key = f"trains/{group.ranks[0]}-{group.ranks[-1]}/{group.size}"
        number = (board.add(key, 1) - 1) // group.size  # of this meeting: no rank comes to another before all have come
        note, all_here = b"%d" % number, (number + 1) * group.size
        board.put(f"{key}/{group.index}", note)
        end, pause = time.monotonic() + MEET_S, LOOK_S
        while board.add(key, 0) < all_here:
            if time.monotonic() > end:
                board.add(key, -1)
                notes = board.get_all([f"{key}/{index}" for index in range(group.size)])
                here = [rank for rank, each in zip(group.ranks, notes, strict=True) if each == note]
                raise self._differs(name, here, f"the others have not noticed any for {MEET_S:g} s")
            time.sleep(pause)
            pause = min(2 * pause, max(0.02, group.size / LOOKS_A_SECOND))

    def _differs(self, name: str, ranks: Sequence[int], more: str) -> DesyncError:
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return DesyncError(
            f"{name!r} has begun to require a gradient on {where}, and not on others.",
            where=f"ranks {', '.join(map(str, self._group.ranks))}; {more}",
            why="gradients are summed over these ranks, and each rank would wait for the others",
            fix="freeze and unfreeze the same parameters at the same step on every rank",
        )


class _Arrival:
    """The hook of a parameter, by its number. It keeps neither the watcher nor a record, which have the parameter:
    Python's garbage collector does not see these hooks, and would never free them."""

    def __init__(self, watcher: BackwardWatcher, number: int) -> None:
        self._watcher, self._number = weakref.ref(watcher), number

    def __call__(self, parameter: torch.Tensor) -> None:
        watcher = self._watcher()
        # Autograd also calls it for a node that has returned None; the gradient may follow in another backward call.
        if watcher is not None and parameter.grad is not None:
            hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            watcher._arrived(self._number, len(hooks) > 1 and self._is_followed(hooks))

    def _is_followed(self, hooks: dict[int, Any]) -> bool:
        """Whether the loop has registered hooks since, which have to see the gradient: from now on this one is last."""
        order = list(hooks.items())
        place = next(index for index, (_, hook) in enumerate(order) if hook is self)
        if all(isinstance(hook, _Arrival) for _, hook in order[place:]):
            return False
        key = order[place][0]
        hooks[key] = hooks.pop(key)
        return True


def _hooked(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook for accumulated gradients, also on a parameter that does not require a gradient now, which torch
    does not allow otherwise."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trains)

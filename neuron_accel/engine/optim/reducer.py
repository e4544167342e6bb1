# SPDX-License-Identifier: Apache-2.0
"""The reduction of gradients over ranks, bucket by bucket, while the backward pass still runs.

:class:`GradientReducer` is for owners of gradient reduction that keep gradients at their parameters; it is
all of data parallelism. :class:`BackwardWatcher`, below it, reports when the gradients of a bucket are complete, always
in the same order on every rank, so that the collectives started then match. A parameter without a gradient in a
backward pass delays nothing: its bucket follows when the pass ends. The method is that of "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (Li et al., VLDB 2020).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, FlatGradients, exchanges_flags, make_buckets, used_anywhere
from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group, Pending
    from neuron_accel.engine.runtime.join import JoinAction
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


MEET_S = 300.0
"""Time in seconds for which a rank on which a parameter has begun to train waits for the others to notice the same."""


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

    The owner calls the methods from its hooks: :meth:`begin_backward` from ``before_backward``, :meth:`end_backward`
    from ``after_backward``, :meth:`before_step` from ``before_step`` and before gradients are clipped or scaled,
    :meth:`restart` from ``after_reshape``, :meth:`close` from ``teardown``.

    Args:
        model: after all rewrites, on its device: create the reducer in ``transform_model``, in phase ``GRADIENTS`` or
            later. Collective, like every method.
        run: the run.
        bucket_cap_mb: size of a bucket in MiB. Smaller ones start earlier, larger ones cost fewer messages.

    Raises:
        DesyncError: here or later, if a parameter requires a gradient on some ranks and not on others.
        UsageError: if a gradient is sparse, or arrives twice in one backward pass.
    """

    def __init__(self, model: PreparedModel, run: Run, bucket_cap_mb: float = 25.0) -> None:
        self._model, self._run, self._cap_bytes = model, run, int(bucket_cap_mb * (1 << 20))
        self._data_group = run.group(*run.mesh.gradient_axes)
        self._pending: list[tuple[int, list[bool], Pending]] = []
        self._left: set[torch.Tensor] = set()
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._action = run.join.register(
            "a backward pass", lambda *state: self._watcher.take_part(*state), settle=lambda: self.flush()
        )
        self._watch(agreed=False)

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
            if self._group(bucket).size != self._data_group.size and not self._watcher.owes(index):
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
        self._watcher.follow(owed=True)
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
        self._done()

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
        self._watcher.close()
        self._watch(agreed=True)

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self._watcher.close()

    # ---- one bucket after another ------------------------------------------------------------------------------------
    def _watch(self, *, agreed: bool) -> None:
        model = self._model
        lazy = self._run.backend.is_lazy
        self._buckets: list[Bucket] = []
        self._memory: list[FlatGradients] | None = None if lazy else []
        self._watcher = BackwardWatcher(
            [r for r in model.parameters if r.current is not None and r.current not in self._left],
            self._admit,
            run=self._run,
            group=self._data_group,
            synchronises=lambda: model.synchronises,
            driven=lambda: model.in_backward,
            ready=self._ready,
            done=self._done,
            overlap=not lazy,  # a lazy device runs nothing before the graph is complete, and its compiler schedules it
            action=self._action,
            take=None if lazy else self._take,
            agreed=agreed,
        )

    def _admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Buckets for parameters that begin to train."""
        buckets = make_buckets(records, self._cap_bytes, self._run.mesh)
        buckets = [b for b in buckets if self._group(b).size > 1 or self._data_group.size > 1]
        self._buckets += buckets
        if self._memory is not None:
            flags = exchanges_flags(self._run)
            self._memory += [FlatGradients(bucket, flags=flags) for bucket in buckets]
        return buckets

    def _group(self, bucket: Bucket) -> Group:
        return self._run.group(*bucket.reduction_axes, *bucket.partial_axes)

    def _take(self, index: int, position: int) -> None:
        assert self._memory is not None
        self._memory[index].take(position, 1 / self._data_group.size)

    def _ready(self, index: int) -> None:
        self._send(index, self._group(self._buckets[index]), self._data_group.size)

    def _send(self, index: int, group: Group, ranks: int) -> None:
        """Starts the sum of a bucket's gradients over ``group``, divided by ``ranks``."""
        if self._memory is None:
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

    def _done(self) -> None:
        """Waits for the averages and assigns them to the parameters."""
        pending, self._pending = self._pending, []
        for index, used, work in pending:
            assert self._memory is not None
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


class BackwardWatcher:
    """Reports when the gradients of each bucket are complete in a backward pass.

    Which parameters require gradients is checked at the end of every pass that is reduced, and at the latest before
    gradients are used. A parameter that has begun to train is then reduced with its full accumulated gradient, and a
    bucket without training parameters is skipped. ``requires_grad`` must be the same on every rank.

    Args:
        records: all parameters that may train, in the same order on every rank.
        admit: is called with those of ``records`` that begin to train, for the first time by the constructor; returns
            the buckets to watch in addition.
        run: the run.
        group: the ranks on which the same parameters must train.
        synchronises: returns whether gradients that arrive now are to be reduced, or only accumulate.
        driven: returns whether the code that runs the backward pass will call :meth:`finish`; otherwise autograd calls
            it at the end of the pass.
        ready: called with a bucket's index once its gradients are complete; in ascending order but for
            :meth:`complete_ahead`, each at most once per pass.
        done: called at the end of a pass, after every bucket that takes part in it was ready.
        overlap: whether buckets are announced while the pass still runs, or all at its end.
        action: the reduction, for ranks that have run out of data: with the arguments of :meth:`take_part`.
        take: called with a bucket's index and a parameter's position in it when a gradient arrives that will be
            announced while the pass still runs.
        agreed: whether it is known that the same parameters train on all ranks now.
        by_arrival: whether a bucket is complete once all its gradients have arrived; False: once the owner says so
            (:meth:`complete`), at the same place between other collectives on every rank, also on one where a parameter
            has no gradient.
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
        by_arrival: bool = True,
    ) -> None:
        self._admit, self._run, self._group = admit, run, group
        self._action, self._take = action, take
        self._ready, self._done = ready, done
        self._by_arrival = by_arrival
        self._told: set[int] = set()  # buckets that the owner has called complete in this pass
        self._ahead: set[int] = set()  # of these, those that were announced before others with a lower index
        self._synchronises, self._driven, self._overlap = synchronises, driven, overlap
        self._candidates: list[ParameterRecord] = []
        self._frozen: list[int] = []  # indices of the candidates that never trained
        self._joined: list[tuple[int, ...]] = []  # indices of those that began to train, one entry each time
        self._buckets: list[Bucket] = []
        # Lists by the number of a parameter: a hook takes microseconds, and looking up a tensor in a dict is slower.
        self._where: list[int] = []
        self._position: list[int] = []
        self._records: list[ParameterRecord] = []
        self._late: list[bool] = []
        self._handles: list[Any] = []
        self._owed: list[bool] = []  # for each bucket, whether it has gradients that were not reduced
        self._active: list[bool] = []
        self._seen = bytearray()
        self._missing: list[int] = []
        self._resting: set[int] = set()  # buckets in which nothing trained in the last pass
        self._agreed: set[tuple[int, ...]] = set()  # of these, those that ranks have agreed on to train again
        self._next = 0
        self._running, self._sends_early = False, False
        run.watchers.append(self)
        self.extend(records, agreed=agreed)

    def __repr__(self) -> str:
        training = len(self._candidates) - len(self._frozen)
        return f"<{type(self).__name__}: {training} parameters that train in {len(self._buckets)} buckets>"

    def extend(self, records: Iterable[ParameterRecord], *, agreed: bool = False) -> None:
        """Watches further parameters from the time when they train. Collective."""
        begin = len(self._candidates)
        self._candidates += [record for record in records if record.current is not None]
        self._frozen += range(begin, len(self._candidates))
        self.follow(agreed=agreed, meets=True)

    def follow(self, *, owed: bool = False, agreed: bool = False, meets: bool = False) -> bool:
        """Checks which parameters have begun to train. Collective if there are any.

        Args:
            owed: whether they have gradients that are to be reduced.
            agreed: whether the same parameters are known to have begun on all ranks.
            meets: whether all ranks are known to check now.

        Returns:
            Whether any have.

            Raises:
                DesyncError: if other parameters have begun to train on other ranks.
        """
        begun = tuple(index for index in self._frozen if self._candidates[index].trains)
        if begun:
            if not agreed:
                self._check_agreement(begun, meets=meets)
            self._join(begun, owed=owed)
        return bool(begun)

    def _check_agreement(self, begun: Iterable[int], *, meets: bool) -> None:
        """Checks that the same parameters begin to train on all ranks.

        Args:
            begun: indices of those that begin on this rank.
            meets: whether all ranks are known to check now. If not, other ranks may not have noticed anything and
                continue with another collective. This rank then waits for them for a limited time, without a
                collective.
        """
        if self._group.size == 1 or (self._action is not None and self._action.announced):
            return  # ranks with data tell the others which parameters train
        names = [self._candidates[i].fqn for i in begun]
        if meets:
            everyone = self._run.backend.all_gather_object(names, self._group)
        else:
            everyone = self._meet(names)
        differs = sorted(set().union(*everyone).difference(set(everyone[0]).intersection(*everyone)))
        if differs:
            ranks = [rank for rank, mine in zip(self._group.ranks, everyone, strict=True) if differs[0] in mine]
            raise self._differs(differs[0], ranks, f"{len(differs)} such parameters")

    def _meet(self, names: list[str]) -> list[list[str]]:
        """Waits until all ranks have noticed that parameters begin to train, and returns the names of each rank."""
        board, key = self._run.backend.board(), "trains/" + ",".join(map(str, self._group.ranks))
        board.put(f"{key}/{self._group.index}", b"begun")
        end, missing = time.monotonic() + MEET_S, list(range(self._group.size))
        try:
            while missing := [index for index in missing if board.get(f"{key}/{index}") != b"begun"]:
                if time.monotonic() > end:
                    here = [rank for index, rank in enumerate(self._group.ranks) if index not in missing]
                    raise self._differs(names[0], here, f"the others have not noticed any for {MEET_S:g} s")
                time.sleep(0.001)
            # Also a barrier: all ranks have read all notes before any rank removes its own.
            return self._run.backend.all_gather_object(names, self._group)
        finally:
            board.put(f"{key}/{self._group.index}", b"")

    def _differs(self, name: str, ranks: Sequence[int], more: str) -> DesyncError:
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return DesyncError(
            f"{name!r} has begun to require a gradient on {where}, and not on others.",
            where=f"ranks {', '.join(map(str, self._group.ranks))}; {more}",
            why="gradients are summed over these ranks, and each rank would wait for the others",
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
                self._handles.append(_hooked(parameter, _arrival(weakref.ref(self), number)))
                self._seen.append(0)
            self._records += bucket.records
            self._late += [record.completed_late for record in bucket.records]
            self._missing.append(len(bucket.parameters))
        self._buckets += buckets
        self._owed += [owed] * len(buckets)
        self._active += [True] * len(buckets)

    @property
    def unsynchronised(self) -> bool:
        """Whether gradients have arrived that were not reported through ``ready`` yet."""
        return any(self._owed)

    def owes(self, index: int) -> bool:
        """Returns whether a bucket has gradients that were not reported yet."""
        return self._owed[index]

    def owe(self) -> None:
        """Marks all buckets with training parameters as having gradients that were not reported."""
        self._owed = [owed or self._learns(i) for i, owed in enumerate(self._owed)]

    def forget(self) -> None:
        """Removes that mark from all buckets."""
        self._owed = [False] * len(self._buckets)

    def _learns(self, index: int) -> bool:
        return any(parameter.requires_grad for parameter in self._buckets[index].parameters)

    @property
    def is_mixed(self) -> bool:
        """Whether a bucket has parameters that train and others that no longer do."""
        return any(
            len({parameter.requires_grad for parameter in bucket.parameters}) > 1
            for bucket, active in zip(self._buckets, self._active, strict=True)
            if active
        )

    def _arrived(self, number: int) -> None:
        index = self._where[number]
        if not self._synchronises():
            if not self._owed[index]:
                self.owe()
            return
        self._enter()
        if self._late[number]:
            return  # its bucket is complete at the end of the pass only
        if self._seen[number]:
            if index < self._next and index not in self._ahead:
                raise UsageError(
                    f"The gradient of {self._records[number].fqn!r} arrived twice in one backward pass, the second "
                    "time after it had been sent.",
                    why="re-entrant activation checkpointing runs a backward pass inside the backward pass",
                    fix="use the non-re-entrant variant: gradient_checkpointing_kwargs={'use_reentrant': False}",
                )
        else:
            if index in self._told and index < self._next and index not in self._ahead:
                raise UsageError(
                    f"The gradient of {self._records[number].fqn!r} arrived after the gradients of its module had been "
                    "sent.",
                    why="the parameter is also used outside of the forward pass of the module that it was sharded with",
                    fix="choose other modules to shard by, so that it belongs to one in whose forward pass it is used",
                )
            self._seen[number] = 1
            self._missing[index] -= 1
        if not self._sends_early or (self._action and self._action.announced):
            return
        if self._take:
            self._take(index, self._position[number])
        if self._missing[index] == 0 and self._by_arrival:
            self._advance()

    def _enter(self) -> None:
        if self._running:
            return
        self._begin()
        if not self._driven():
            # A plain loss.backward(): autograd itself reports its end.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def complete(self, indices: Iterable[int]) -> None:
        """Called during a backward pass, once these buckets get no further gradients in it, whether or not some are
        missing. They are announced, after those before them. Without effect in a pass that does not synchronise, or
        whose buckets are announced at its end."""
        if not self._synchronises():
            return
        self._enter()
        if self._sends_early and not (self._action and self._action.announced):
            self._told.update(indices)
            self._advance()

    def complete_ahead(self, index: int) -> bool:
        """As :meth:`complete`, for a bucket that is announced before those with a lower index, at the same moment on
        every rank. It may get further gradients in this pass, which the owner reduces.

        Returns:
            Whether it was announced.
        """
        if not self._synchronises():
            return False
        self._enter()
        is_next = self._active[index] and index >= self._next and index not in self._told
        if not is_next or not self._sends_early or (self._action and self._action.announced):
            return False
        self._told.add(index)
        self._ahead.add(index)
        self._ready(index)
        return True

    def has_arrived(self, index: int) -> bool:
        """Returns whether all gradients of a bucket have arrived in the backward pass that runs."""
        return self._running and self._missing[index] <= 0

    def _begin(self, *, left: bool = False, follows: bool = False) -> None:
        """Begins a pass.

        Args:
            left: whether it only reduces gradients that earlier passes have left unreduced.
            follows: whether this rank has no data, and follows the ranks that have.
        """
        self._running = True
        # With several watchers the order of completion depends on a rank's samples; at the end of the pass it is fixed.
        alone = not any(other._buckets for other in self._run.watchers if other is not self)
        self._sends_early = self._overlap and alone
        self._next = 0
        self._told, self._ahead = set(), set()
        self._seen = bytearray(len(self._where))
        self._missing = [sum(p.requires_grad for p in bucket.parameters) for bucket in self._buckets]
        self._active = [
            owed or (missing > 0 and not left) for owed, missing in zip(self._owed, self._missing, strict=True)
        ]
        resumed = tuple(i for i, is_active in enumerate(self._active) if is_active and i in self._resting)
        self._resting = {i for i, missing in enumerate(self._missing) if not missing}
        if not left and not follows:
            self._check_resumed(resumed)

    def _check_resumed(self, resumed: tuple[int, ...]) -> None:
        """Checks that buckets whose parameters did not train in the last pass, and now do, are the same on all ranks. A
        set of buckets is checked once only, since some loops freeze and unfreeze parameters at every step."""
        announced = self._action is not None and self._action.announced
        if resumed and resumed not in self._agreed and not announced:
            candidates = {id(record): index for index, record in enumerate(self._candidates)}
            records = [record for i in resumed for record in self._buckets[i].records if record.trains]
            self._check_agreement([candidates[id(record)] for record in records], meets=False)
            self._agreed.add(resumed)

    def _advance(self, *, everything: bool = False) -> None:
        while self._next < len(self._buckets):
            if not self._active[self._next] or self._next in self._ahead:
                self._next += 1
            elif everything or self._next in self._told or (self._by_arrival and self._missing[self._next] <= 0):
                self._next += 1
                self._ready(self._next - 1)
            else:
                return

    def finish(self) -> None:
        """Must be called at the end of a backward pass: reports the remaining buckets. Between passes it only handles
        parameters that have begun to train."""
        if self._running and not (self._action and self._action.announced):
            self._advance(everything=True)  # first, since some ranks have started these collectives during the pass
        begun = (self._running or self._synchronises()) and self.follow(owed=True)
        if not self._running:
            if not begun:
                return
            self._begin(left=True)
        self._complete()

    def _complete(self) -> None:
        if self._action and self._action.announced:
            trains = tuple(record.trains for record in self._candidates)
            self._action(trains, tuple(self._joined), tuple(self._active))
        self._advance(everything=True)
        self._running = False
        self._owed = [owed and not active for owed, active in zip(self._owed, self._active, strict=True)]
        self._done()

    def flush(self) -> None:
        """Reports gradients that arrived in passes that did not synchronise, if there are any."""
        self.finish()
        self.follow(owed=True)
        if self.unsynchronised:
            self._begin(left=True)
            self._complete()

    def take_part(
        self, trains: tuple[bool, ...], joined: tuple[tuple[int, ...], ...], active: tuple[bool, ...]
    ) -> None:
        """Takes part in a pass of other ranks without data: this rank contributes the gradients that it has, or zeros.

        Args:
            trains: which parameters train on the ranks with data, and from now on on this rank.
            joined: indices of parameters that have begun to train, one entry each time.
            active: which buckets are reduced.
        """
        for record, does in zip(self._candidates, trains, strict=True):
            if record.current is not None and record.current.requires_grad != does:
                record.current.requires_grad_(does)
        for begun in joined[len(self._joined) :]:
            self._join(begun, owed=False)
        self._begin(follows=True)
        self._active = list(active)
        self._complete()

    def close(self) -> None:
        """Removes the hooks."""
        if self in self._run.watchers:
            self._run.watchers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _arrival(reference: weakref.ref[BackwardWatcher], number: int) -> Callable[[torch.Tensor], None]:
    """A hook of a parameter. It does not keep the watcher, which has the parameter: Python's garbage collector does not
    see these hooks, and would never free them."""

    def arrived(_: torch.Tensor) -> None:
        watcher = reference()
        if watcher is not None:
            watcher._arrived(number)

    return arrived


def _hooked(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook for accumulated gradients, also on a parameter that does not require a gradient now, which torch
    does not allow otherwise."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trains)

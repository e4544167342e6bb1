# SPDX-License-Identifier: Apache-2.0
"""Execution of a schedule: a rank runs its list of actions for one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from neuron_accel.errors import UnsupportedModelError, UsageError
from neuron_accel.strategies.pipeline.deferred_wgrad import DeferredWgrad, Later
from neuron_accel.strategies.pipeline.outputs import loss_of
from neuron_accel.strategies.pipeline.p2p import P2P, Form, Part, Values
from neuron_accel.strategies.pipeline.schedules import Action, Kind, Schedule, in_rounds, transfers_after

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Pending
    from neuron_accel.contract.events import Events
    from neuron_accel.strategies.pipeline.p2p import RingShift
    from neuron_accel.strategies.pipeline.stage import Stage

Call = tuple[tuple[Any, ...], dict[str, Any]]
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, activations",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
"""Names of computations in events."""


@dataclass
class Flight:
    """The tensors of a micro-batch that a stage keeps between forward and backward.

    Args:
        received: the stage's input, whose gradients are sent back; empty on the first stage.
        result: the stage's output, or on the last stage the micro-batch's weighted loss.
        later: its deferred weight gradients.
    """

    received: Values
    result: Values
    later: Later | None


@dataclass(frozen=True)
class Failure:
    """An exception of a stage, and the stage and action that raised it, as text."""

    error: Exception
    place: str


class Execution(ABC):
    """Executes one rank's actions for one batch. Subclasses define how stages exchange tensors.

    Args:
        schedule: the schedule.
        rank: this rank's position in the pipeline.
        stages: this rank's stages, by index.
        calls: the model's arguments for each micro-batch.
        key: identifies batches whose activations have the same shapes.
        weight: returns the factor of a micro-batch's loss before backward; None to run forward only.
        deferred_wgrad: splits backward passes in two, for schedules that require it.
        synchronise: is called before each backward pass with whether it is the last of its stage.
        events: of the run; each pass is one.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        calls: list[Call],
        key: Hashable,
        *,
        weight: Callable[[int], torch.Tensor | float] | None = None,
        deferred_wgrad: DeferredWgrad | None = None,
        synchronise: Callable[[bool], None] = lambda last: None,
        events: Events,
    ) -> None:
        self._schedule, self._rank, self._stages = schedule, rank, stages
        self._calls, self._key, self._weight, self._synchronise = calls, key, weight, synchronise
        self._deferred_wgrad, self._events = deferred_wgrad, events
        self._arriving: dict[tuple[Kind, int, int], list[Pending | None] | None] = {}
        self._leaving: dict[tuple[Kind, int, int], Values] = {}
        self._flights: dict[tuple[int, int], Flight] = {}
        self._last = {(action.stage, action.kind): action for action in schedule.compute(rank)}
        self.outputs: list[Any] = []
        """The last stage's outputs by micro-batch; in training, detached losses."""
        self.most_in_flight = 0
        """The largest number of micro-batches whose activations were kept at the same time."""
        self.failure: Failure | None = None
        """The first exception of a stage of this rank."""

    @abstractmethod
    def run(self) -> None:
        """Executes all actions. If a stage raises an exception, :attr:`failure` is set; after that arbitrary tensors
        are sent and received, so that no other rank waits forever."""

    @abstractmethod
    def _form(self, stage: int) -> Form | None:
        """Returns the form of the tensors that ``stage`` sends to the next one; None if it is not known yet."""

    @abstractmethod
    def _refuse_form(self, found: Form, form: Form, stage: int) -> NoReturn: ...

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _arrived(self, kind: Kind, action: Action) -> Values:
        pending = self._arriving.pop((kind, action.stage, action.microbatch))
        if pending is None:
            raise NeighbourFailed(f"stage {action.stage} received nothing")
        return tuple(None if part is None else part.wait() for part in pending)

    # ---- computing ---------------------------------------------------------------------------------------------------
    def _attempt(self, action: Action) -> None:
        if self.failure is None:
            try:
                with self._range(action):
                    self._compute(action)
            except Exception as error:
                direction = "forward" if action.kind is Kind.FORWARD else "backward"
                place = f"stage {action.stage}, {direction} pass of micro-batch {action.microbatch}"
                self.failure = Failure(error, place)
                self._flights.clear()

    def _range(self, action: Action) -> AbstractContextManager[Any]:
        stage, microbatch = action.stage, action.microbatch
        name = f"{_NAMES[action.kind]}, stage {stage}, micro-batch {microbatch}"
        part = None if action.kind is Kind.FORWARD else "backward"
        return self._events.open(name, "pipeline", part=part, stage=stage, micro_batch=microbatch)

    def _compute(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind in _BACKWARD:
            self._backward(action)
        else:
            self._synchronise(self._last[action.stage, action.kind] == action)
            flight = self._flights.pop((action.stage, action.microbatch))
            if flight.later is not None:
                flight.later.run()

    def _forward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        received: Values = ()
        if action.stage:
            received = self._arrived(Kind.RECEIVE_ACTIVATION, action)
            form = self._form(action.stage - 1)
            stage.state.as_tuple = form is not None and form.as_tuple
            for value in received:
                if self._weight is not None and value is not None and value.is_floating_point():
                    value.requires_grad_()
        later = Later() if self._deferred_wgrad and self._weight is not None else None
        with self._deferring(later):
            result = stage.run(*self._calls[action.microbatch], received)
        if stage.last:
            result = (self._finish(result, action.microbatch),)
        else:
            self._check_form(result, stage)
            leaving = tuple(None if value is None else value.detach() for value in result)
            self._leaving[Kind.SEND_ACTIVATION, action.stage, action.microbatch] = leaving
        if self._weight is not None:
            self._flights[action.stage, action.microbatch] = Flight(received, result, later)
            self.most_in_flight = max(self.most_in_flight, len(self._flights))

    def _deferring(self, later: Later | None) -> AbstractContextManager[Any]:
        return nullcontext() if self._deferred_wgrad is None else self._deferred_wgrad.deferring(later)

    def _finish(self, output: Any, microbatch: int) -> Any:
        if self._weight is None:
            self.outputs.append(output)
            return output
        loss = loss_of(output)
        self.outputs.append(output if isinstance(output, torch.Tensor) else type_and_loss(output, loss))
        return loss * self._weight(microbatch)

    def _check_form(self, values: Values, stage: Stage) -> None:
        form, found = self._form(stage.index), Form.of(values, stage.state.as_tuple)
        if form is not None and found.parts != form.parts:
            self._refuse_form(found, form, stage.index)

    def _backward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        self._synchronise(self._last[action.stage, action.kind] == action)
        gradients: Values = (None,) if stage.last else self._arrived(Kind.RECEIVE_GRADIENT, action)
        flight = self._flights[key]
        pairs = [(r, g) for r, g in zip(flight.result, gradients, strict=True) if r is not None and r.requires_grad]
        if pairs:
            with without_autocast(pairs[0][0].device.type), self._deferring(flight.later):
                torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])
        if action.stage:
            leaving = tuple(None if value is None else value.grad for value in flight.received)
            self._leaving[Kind.SEND_GRADIENT, action.stage, action.microbatch] = leaving
        if action.kind is Kind.BACKWARD:
            del self._flights[key]
        else:  # activations that are not needed for weight gradients are released
            self._flights[key] = Flight((), (), flight.later)


class P2PExecution(Execution):
    """Stages exchange tensors by point-to-point messages, which overlap with computation.

    Args:
        p2p: sends to and receives from the neighbours.
        arguments, options: see :class:`Execution`.
    """

    def __init__(self, p2p: P2P, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._p2p = p2p
        self._sends: deque[Pending] = deque()

    def run(self) -> None:
        for action in self._schedule.actions[self._rank]:
            if action.kind.is_send:
                self._send(action)
            elif action.kind.is_receive:
                self._receive(action)
            else:
                self._attempt(action)
        for parts in self._arriving.values():
            for part in parts or ():
                if part is not None:
                    part.wait()
        for pending in self._sends:
            pending.wait()

    def _edge(self, stage: int) -> Hashable:
        """Returns the key of messages from ``stage`` to the next one for this kind of batch."""
        return (self._key, stage)

    def _send(self, action: Action) -> None:
        values = self._leaving.pop((action.kind, action.stage, action.microbatch), None)
        peer = self._schedule.peer(action)
        if action.kind is Kind.SEND_ACTIVATION:
            as_tuple = self._stages[action.stage].state.as_tuple
            self._sends += self._p2p.send(values, self._edge(action.stage), peer, as_tuple)
        else:
            self._sends += self._p2p.send_gradient(values, self._edge(action.stage - 1), peer)
        while len(self._sends) > 2 * self._schedule.ranks * self._schedule.virtual_stages:
            self._sends.popleft().wait()

    def _receive(self, action: Action) -> None:
        peer = self._schedule.peer(action)
        if action.kind is Kind.RECEIVE_ACTIVATION:
            stage, call = self._stages[action.stage], self._calls[action.microbatch]
            pending = self._p2p.receive(self._edge(action.stage - 1), peer, lambda: stage.expected(*call))
        else:
            pending = self._p2p.receive_gradient(self._edge(action.stage), peer)
        self._arriving[action.kind, action.stage, action.microbatch] = pending

    def _form(self, stage: int) -> Form | None:
        return self._p2p.form(self._edge(stage))

    def _refuse_form(self, found: Form, form: Form, stage: int) -> NoReturn:
        raise UsageError(
            f"Stage {stage} computed {found} for a batch for which it computed {form} before.",
            why="the next stage expects the same shapes and dtypes for batches of the same shapes",
        )


class RingExecution(Execution):
    """All ranks compute and communicate in rounds: each computes one action, then all exchange results. On a lazy
    device every computation is a graph, the same for all micro-batches except for the first backward pass, and every
    exchange is another graph.

    Args:
        ring: exchanges tensors between the ranks of the pipeline.
        backend: executes graphs.
        arguments, options: see :class:`Execution`.
    """

    def __init__(self, ring: RingShift, backend: Backend, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ring, self._backend = ring, backend

    def run(self) -> None:
        schedule = self._schedule
        self._backend.step_boundary()  # computes the micro-batches
        for actions in in_rounds([schedule.compute(rank) for rank in range(schedule.ranks)], schedule.stages):
            if self._rank in actions:
                self._attempt(actions[self._rank])
            self._backend.step_boundary()
            if self._ring.form(self._key) is None and self._ring.learn(self._key, self._first_form()) is None:
                return  # the first stage failed, so the shapes are unknown
            form = self._ring.form(self._key)
            assert form is not None
            self._exchange(actions, Kind.SEND_ACTIVATION, form.parts, 1)
            self._exchange(actions, Kind.SEND_GRADIENT, form.learning, -1)

    def _exchange(self, actions: dict[int, Action], kind: Kind, parts: tuple[Part | None, ...], shift: int) -> None:
        """Exchanges all results of one kind of a round."""
        pairs = [pair for action in actions.values() for pair in transfers_after(action, self._schedule.stages)]
        pairs = [(send, receive) for send, receive in pairs if send.kind is kind]
        if not pairs:
            return
        own = None
        for send, _ in pairs:
            if self._schedule.rank_of(send.stage) == self._rank:
                own = self._leaving.pop((send.kind, send.stage, send.microbatch), None)
        arrived = self._ring.shift(own, parts, shift)
        for _, receive in pairs:
            if self._schedule.rank_of(receive.stage) == self._rank:
                self._arriving[receive.kind, receive.stage, receive.microbatch] = arrived

    def _first_form(self) -> Form | None:
        values = self._leaving.get((Kind.SEND_ACTIVATION, 0, 0))
        return None if values is None else Form.of(values, self._stages[0].state.as_tuple)

    def _form(self, stage: int) -> Form | None:
        return self._ring.form(self._key)

    def _refuse_form(self, found: Form, form: Form, stage: int) -> NoReturn:
        raise UnsupportedModelError(
            f"Stage {stage} computed {found} where the first one computed {form}.",
            why="ranks that cannot send to each other exchange all tensors at once, which needs one shape",
            fix="choose stage_cuts between blocks that return the same shape",
        )


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast on devices of that type, some of which have none."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class StageFailed(Exception):
    """Names the stage that raised an error; the cause of the error that all ranks raise."""


class NeighbourFailed(Exception):
    """Nothing was received, because the neighbouring stage failed."""


def type_and_loss(output: Any, loss: torch.Tensor) -> Any:
    """Returns an output of the same kind that contains only the loss, detached."""
    return (loss.detach(),) if isinstance(output, (tuple, list)) else {"loss": loss.detach()}

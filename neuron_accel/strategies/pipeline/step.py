"""One step: a rank's list of actions, carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.errors import UsageError
from neuron_accel.strategies.pipeline.actions import Action, Kind, Schedule
from neuron_accel.strategies.pipeline.outputs import loss_of
from neuron_accel.strategies.pipeline.weights_later import Later, WeightsLater

if TYPE_CHECKING:
    from neuron_accel.backends.base import Pending
    from neuron_accel.strategies.pipeline.stage import Stage
    from neuron_accel.strategies.pipeline.wire import Wire

Call = tuple[tuple[Any, ...], dict[str, Any]]
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass
class Flight:
    """What a micro-batch leaves on a stage between forward and backward.

    Args:
        received: the stage's input, whose gradient goes back; None on the first stage.
        result: hidden states, or on the last stage the micro-batch's part of the loss.
        later: what it owes to weights.
    """

    received: torch.Tensor | None
    result: torch.Tensor
    later: Later | None


class Step:
    """Carries out one rank's actions for one batch.

    Args:
        schedule: the schedule.
        rank: this rank's position in the pipeline.
        stages: this rank's stages, by index.
        wire: to its neighbours.
        calls: the model's arguments for each micro-batch.
        key: what the shapes of activations depend on.
        weight: gives the factor by which a micro-batch's loss is multiplied before backward; None to run forward only.
        weights_later: divides backward passes in two, for schedules that want it.
        synchronise: called before each backward pass with whether it is the stage's last.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        wire: Wire,
        calls: list[Call],
        key: Hashable,
        *,
        weight: Callable[[int], torch.Tensor | float] | None = None,
        weights_later: WeightsLater | None = None,
        synchronise: Callable[[bool], None] = lambda last: None,
    ) -> None:
        self._schedule, self._rank, self._stages, self._wire = schedule, rank, stages, wire
        self._calls, self._key, self._weight, self._synchronise = calls, key, weight, synchronise
        self._weights_later = weights_later
        self._arriving: dict[tuple[Kind, int, int], Pending | None] = {}
        self._leaving: dict[tuple[Kind, int, int], torch.Tensor | None] = {}
        self._flights: dict[tuple[int, int], Flight] = {}
        self._sends: deque[Pending] = deque()
        self._last = {(action.stage, action.kind): action for action in schedule.compute(rank)}
        self.outputs: list[Any] = []
        """The last stage's outputs by micro-batch; losses, detached, where backward passes run."""
        self.most_in_flight = 0
        """The largest number of micro-batches whose activations were kept at a time."""
        self.error: Exception | None = None
        """What a stage of this rank raised."""

    def run(self) -> None:
        """Carries out everything. A stage that raises leaves :attr:`error`; from then on messages have no meaning, but
        all of them are sent and received, so that no neighbour waits for ever."""
        for action in self._schedule.actions[self._rank]:
            if action.kind.is_send:
                self._send(action)
            elif action.kind.is_receive:
                self._receive(action)
            elif self.error is None:
                try:
                    self._compute(action)
                except Exception as error:
                    self.error = error
                    self._flights.clear()
        for pending in self._arriving.values():
            if pending is not None:
                pending.wait()
        for pending in self._sends:
            pending.wait()

    # ---- messages --------------------------------------------------------------------------------------------------
    def _edge(self, stage: int) -> Hashable:
        """The edge from ``stage`` to the next one, for this kind of batch."""
        return (self._key, stage)

    def _send(self, action: Action) -> None:
        tensor = self._leaving.pop((action.kind, action.stage, action.microbatch), None)
        peer = self._schedule.peer(action)
        if action.kind is Kind.SEND_ACTIVATION:
            as_tuple = self._stages[action.stage].passage.as_tuple
            self._sends += self._wire.send(tensor, self._edge(action.stage), peer, as_tuple)
        else:
            self._sends += self._wire.send_gradient(tensor, self._edge(action.stage - 1), peer)
        while len(self._sends) > 2 * self._schedule.ranks * self._schedule.virtual_stages:
            self._sends.popleft().wait()

    def _receive(self, action: Action) -> None:
        peer = self._schedule.peer(action)
        if action.kind is Kind.RECEIVE_ACTIVATION:
            pending = self._wire.receive(self._edge(action.stage - 1), peer)
        else:
            pending = self._wire.receive_gradient(self._edge(action.stage), peer)
        self._arriving[action.kind, action.stage, action.microbatch] = pending

    def _arrived(self, kind: Kind, action: Action) -> torch.Tensor:
        pending = self._arriving.pop((kind, action.stage, action.microbatch))
        if pending is None:
            raise NeighbourFailed(f"stage {action.stage} received nothing")
        return pending.wait()

    # ---- computing -------------------------------------------------------------------------------------------------
    def _compute(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind in _BACKWARD:
            self._backward(action)
        else:
            self._synchronise(self._last[action.stage, action.kind] == action)
            flight = self._flights.pop((action.stage, action.microbatch))
            if flight.later is not None:
                flight.later.pay()

    def _forward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        received = None
        if action.stage:
            received = self._arrived(Kind.RECEIVE_ACTIVATION, action)
            form = self._wire.form(self._edge(action.stage - 1))
            stage.passage.as_tuple = form is not None and form.as_tuple
            if self._weight is not None:
                received.requires_grad_()
        later = Later() if self._weights_later and self._weight is not None else None
        with self._owing(later):
            result = stage.run(*self._calls[action.microbatch], received)
        if stage.last:
            result = self._finish(result, action.microbatch)
        else:
            self._check_form(result, action.stage)
            self._leaving[Kind.SEND_ACTIVATION, action.stage, action.microbatch] = result.detach()
        if self._weight is not None:
            self._flights[action.stage, action.microbatch] = Flight(received, result, later)
            self.most_in_flight = max(self.most_in_flight, len(self._flights))

    def _owing(self, later: Later | None) -> AbstractContextManager[Any]:
        return nullcontext() if self._weights_later is None else self._weights_later.owing(later)

    def _finish(self, output: Any, microbatch: int) -> Any:
        if self._weight is None:
            self.outputs.append(output)
            return output
        loss = loss_of(output)
        self.outputs.append(output if isinstance(output, torch.Tensor) else type_and_loss(output, loss))
        return loss * self._weight(microbatch)

    def _check_form(self, hidden: Any, stage: int) -> None:
        form = self._wire.form(self._edge(stage))
        if form is not None and (tuple(hidden.shape), hidden.dtype) != (form.shape, form.dtype):
            raise UsageError(
                f"Stage {stage} computed {hidden.dtype} {tuple(hidden.shape)} for a batch for which it computed "
                f"{form.dtype} {form.shape} before.",
                why="the next stage expects the same for batches of the same shapes",
            )

    def _backward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        self._synchronise(self._last[action.stage, action.kind] == action)
        gradient = None if stage.last else self._arrived(Kind.RECEIVE_GRADIENT, action)
        flight = self._flights[key]
        device = flight.result.device.type
        if flight.result.requires_grad:
            with torch.autocast(device, enabled=False), self._owing(flight.later):
                torch.autograd.backward(flight.result, gradient)
        if flight.received is not None:
            self._leaving[Kind.SEND_GRADIENT, action.stage, action.microbatch] = flight.received.grad
        if action.kind is Kind.BACKWARD:
            del self._flights[key]
        else:  # activations that no weight waits for are free
            self._flights[key] = Flight(None, flight.result.detach(), flight.later)


class NeighbourFailed(Exception):
    """A message without meaning arrived; its sender knows why."""


def type_and_loss(output: Any, loss: torch.Tensor) -> Any:
    """An output of the same kind that holds nothing but a loss, detached."""
    return (loss.detach(),) if isinstance(output, (tuple, list)) else {"loss": loss.detach()}

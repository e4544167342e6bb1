# SPDX-License-Identifier: Apache-2.0
"""Exchange of activations and gradients between stages: point-to-point messages, or a permutation of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group, Pending


# ---- Messages between neighbouring stages ----------------------------------------------------------------------------
Values = tuple[torch.Tensor | None, ...]
"""The tensors that a stage sends: hidden states, and other outputs of a block that the next one takes."""
Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""
_HEADER = 1024  # bytes


@dataclass(frozen=True)
class Form:
    """The form of the tensors that one stage sends to the next.

    Args:
        parts: shape and dtype of the hidden states, then of the other outputs of blocks; None for those that the next
            one does not take.
        as_tuple: whether blocks return a tuple that begins with the hidden states.
    """

    parts: tuple[Part | None, ...]
    as_tuple: bool

    @classmethod
    def of(cls, values: Values, as_tuple: bool) -> Form:
        return cls(tuple(None if v is None else (tuple(v.shape), v.dtype) for v in values), as_tuple)

    def __str__(self) -> str:
        return " and ".join(f"{part[1]} {list(part[0])}" for part in self.parts if part is not None)

    @property
    def learning(self) -> tuple[Part | None, ...]:
        """The parts that have gradients; None for the others."""
        return tuple(part if part is not None and part[1].is_floating_point else None for part in self.parts)


def _header_of(form: Form | None) -> torch.Tensor:
    """The pickled form in a tensor of fixed size: ranks of one run trust each other."""
    header = torch.zeros(_HEADER, dtype=torch.uint8)
    payload = bytearray(pickle.dumps(form))
    header[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8)
    return header


class P2P:
    """Sends and receives hidden states and their gradients between the ranks of a pipeline.

    For a new kind of batch, a small header with their shapes precedes the activations of the first micro-batch. A stage
    that failed continues to send zeros of the expected shapes, so that its neighbours reach the end of the step, where
    the failure is exchanged.

    Args:
        backend: sends and receives.
        group: the ranks of the pipeline.
    """

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group
        self._forms: dict[Hashable, Form] = {}

    def form(self, key: Hashable) -> Form | None:
        """Returns the form of the tensors for ``key``, a kind of batch and a stage; None if it is not known yet."""
        return self._forms.get(key)

    def send(self, values: Values | None, key: Hashable, target: int, as_tuple: bool) -> list[Pending]:
        """Starts to send activations to the rank at position ``target``; ``values`` is None if this stage failed."""
        pending = []
        if key not in self._forms:
            form = None if values is None else Form.of(values, as_tuple)
            pending.append(self._backend.start_send(_header_of(form).to(self._backend.device), self._group, target))
            if form is None:
                return pending
            self._forms[key] = form
        return [*pending, *self._send(values, self._forms[key].parts, target)]

    def receive(self, key: Hashable, source: int, expected: Callable[[], Form]) -> list[Pending | None] | None:
        """Starts to receive activations. Returns None if the sender failed before their shapes were known.

        Args:
            key: a kind of batch and the stage that sends.
            source: position of its rank.
            expected: computes the form that this stage expects; called if received headers have no values.
        """
        if key not in self._forms:
            header = self._backend.start_receive((_HEADER,), torch.uint8, self._group, source).wait()
            form = pickle.loads(header.cpu().numpy().tobytes()) if self._backend.has_values else expected()
            if form is None:
                return None
            self._forms[key] = form
        return self._receive(self._forms[key].parts, source)

    def send_gradient(self, gradients: Values | None, key: Hashable, target: int) -> list[Pending]:
        """Starts to send the gradients of activations that were received for ``key``."""
        return self._send(gradients, self._forms[key].learning, target) if key in self._forms else []

    def receive_gradient(self, key: Hashable, source: int) -> list[Pending | None] | None:
        """Starts to receive the gradients of activations that were sent for ``key``."""
        return self._receive(self._forms[key].learning, source) if key in self._forms else None

    def _send(self, values: Values | None, parts: tuple[Part | None, ...], target: int) -> list[Pending]:
        pending = []
        for part, value in zip(parts, values or (None,) * len(parts), strict=True):
            if part is not None:
                shape, dtype = part
                value = torch.zeros(shape, dtype=dtype, device=self._backend.device) if value is None else value
                pending.append(self._backend.start_send(value.detach(), self._group, target))
        return pending

    def _receive(self, parts: tuple[Part | None, ...], source: int) -> list[Pending | None]:
        return [None if part is None else self._backend.start_receive(*part, self._group, source) for part in parts]


# ---- Exchange on backends without point-to-point messages ------------------------------------------------------------
class RingShift:
    """Shifts tensors between the ranks of a pipeline by one position.

    Every rank takes part in every shift, with zeros if it has nothing to send, so that a shift is the same graph on all
    ranks. All stages therefore send tensors of one form, that of the first stage's first micro-batch, which is sent to
    all ranks as an object.

    Args:
        backend: performs the permutation.
        group: the ranks of the pipeline.
        everyone: the ranks of this and all replicated pipelines, which shift in the same collective.
    """

    def __init__(self, backend: Backend, group: Group, everyone: Group) -> None:
        self._backend, self._group, self._everyone = backend, group, everyone
        self._forms: dict[Hashable, Form] = {}
        self._nothing: dict[Part, torch.Tensor] = {}

    def form(self, key: Hashable) -> Form | None:
        """Returns the form of the tensors for ``key``, a kind of batch; None if it is not known yet."""
        return self._forms.get(key)

    def learn(self, key: Hashable, own: Form | None) -> Form | None:
        """Sends the form for ``key`` from the rank of the first stage to all ranks. Collective.

        Args:
            key: the kind of batch.
            own: the form on the rank of the first stage; None if it failed, and on the other ranks.

        Returns:
            The form; None if the first stage failed on all replicas.
        """
        forms = self._backend.all_gather_object(own, self._everyone)
        form = next((form for form in forms if form is not None), None)
        if form is not None:
            self._forms[key] = form
        return form

    def shift(self, values: Values | None, parts: tuple[Part | None, ...], by: int) -> list[Pending | None]:
        """Sends ``values`` to the rank ``by`` positions after this one, and returns those of the rank ``by`` positions
        before. Collective.

        Args:
            values: the tensors to send; None to send zeros.
            parts: shape and dtype of each tensor; None for those that are not sent.
            by: number of positions.
        """
        arrived: list[Pending | None] = []
        for part, value in zip(parts, values or (None,) * len(parts), strict=True):
            if part is None:
                arrived.append(None)
                continue
            if value is None:
                if part not in self._nothing:
                    self._nothing[part] = torch.zeros(part[0], dtype=part[1], device=self._backend.device)
                value = self._nothing[part]
            arrived.append(self._backend.start_permute(value, self._group, by))
        return arrived

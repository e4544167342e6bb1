"""Messages between neighbouring stages."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Group, Pending

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 12  # state, form, dtype, dims, sizes
_FAILED, _FINE = 0, 1


@dataclass(frozen=True)
class Form:
    """What one stage hands on to the next.

    Args:
        shape, dtype: of the hidden states.
        as_tuple: whether blocks return a tuple that begins with them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    as_tuple: bool


class Wire:
    """Sends and receives hidden states and their gradients between the ranks of a pipeline.

    The first time that a kind of batch comes by, a small header goes ahead of the activations of its first micro-batch
    and says what they look like; from then on both ends know. A stage that failed goes on sending what its neighbours
    wait for, without meaning, so that they come to the end of the step and hear of it there.

    Args:
        backend: sends and receives.
        group: the ranks of the pipeline.
    """

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group
        self._forms: dict[Hashable, Form] = {}

    def form(self, key: Hashable) -> Form | None:
        """What travels under ``key``, a kind of batch and an edge; None if that is not known (yet)."""
        return self._forms.get(key)

    def send(self, hidden: torch.Tensor | None, key: Hashable, target: int, as_tuple: bool) -> list[Pending]:
        """Sends activations to a rank; None if there are none because this stage failed."""
        pending = []
        if key not in self._forms:
            pending.append(self._send_header(hidden, target, as_tuple))
            if hidden is None:
                return pending
            self._forms[key] = Form(tuple(hidden.shape), hidden.dtype, as_tuple)
        return [*pending, self._send_payload(hidden, key, target)]

    def receive(self, key: Hashable, source: int) -> Pending | None:
        """Starts to receive activations; None if the sender failed before it knew what they look like."""
        if key not in self._forms:
            form = self._receive_header(source)
            if form is None:
                return None
            self._forms[key] = form
        return self._receive_payload(key, source)

    def send_gradient(self, gradient: torch.Tensor | None, key: Hashable, target: int) -> list[Pending]:
        """Sends the gradient of what was received under ``key``."""
        return [self._send_payload(gradient, key, target)] if key in self._forms else []

    def receive_gradient(self, key: Hashable, source: int) -> Pending | None:
        """Starts to receive the gradient of what was sent under ``key``."""
        return self._receive_payload(key, source) if key in self._forms else None

    def _send_payload(self, tensor: torch.Tensor | None, key: Hashable, target: int) -> Pending:
        form = self._forms[key]
        if tensor is None:
            tensor = torch.zeros(form.shape, dtype=form.dtype, device=self._backend.device)
        return self._backend.start_send(tensor.detach(), self._group, target)

    def _receive_payload(self, key: Hashable, source: int) -> Pending:
        form = self._forms[key]
        return self._backend.start_receive(form.shape, form.dtype, self._group, source)

    def _send_header(self, hidden: torch.Tensor | None, target: int, as_tuple: bool) -> Pending:
        values = [_FAILED]
        if hidden is not None:
            values = [_FINE, int(as_tuple), _DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape]
        values += [0] * (_HEADER - len(values))
        header = torch.tensor(values, dtype=torch.int64, device=self._backend.device)
        return self._backend.start_send(header, self._group, target)

    def _receive_header(self, source: int) -> Form | None:
        header = self._backend.start_receive((_HEADER,), torch.int64, self._group, source).wait()
        state, as_tuple, dtype, dims, *sizes = header.tolist()
        if state == _FAILED:
            return None
        return Form(tuple(sizes[:dims]), _DTYPES[dtype], bool(as_tuple))

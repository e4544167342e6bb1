"""Ranks that communicate what a dry run predicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def as_predicted() -> Iterator[None]:
    """A context manager in which no decision depends on reading a value, and ranks do not tell each other which
    parameters have a gradient: ranks that compile a step do not, and a dry run predicts theirs."""
    from neuron_accel.backends.torch_distributed import TorchBackend

    flags = [f"neuron_accel.engine.optim.{module}.exchanges_flags" for module in ("buckets", "reducer")]
    expensive = property(lambda backend: False, lambda backend, value: None)
    with (
        mock.patch.object(TorchBackend, "reads_are_free", expensive),
        mock.patch(flags[0], return_value=False),
        mock.patch(flags[1], return_value=False),
    ):
        yield

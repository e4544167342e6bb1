"""``model.no_sync()``, as loops written for DistributedDataParallel call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel


class NoSync:
    """Forward passes inside ``with model.no_sync():`` lead to backward passes that do not sum gradients over ranks.

    It belongs to one prepared model; in a copy of that model, which nobody synchronises, it does nothing.
    """

    def __init__(self, model: PreparedModel | None = None) -> None:
        self._model = model

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._model is None:
            yield
            return
        previous, self._model.sync_enabled = self._model.sync_enabled, False
        try:
            yield
        finally:
            self._model.sync_enabled = previous

    def __reduce__(self) -> Any:
        return NoSync, ()

"""``save_pretrained`` of a model that lies over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.gather import full_state_dict

if TYPE_CHECKING:
    from neuron_accel.engine.run import PreparedModel, Run


class SaveFull:
    """In place of a model's own ``save_pretrained``, which would write this rank's shards as if they were the model.

    Every process calls it; the main process writes the full model, with original names and shapes, and all return once
    the files are complete.

    Args:
        record: the prepared model.
        run: the run.
        save: the model's own ``save_pretrained``.
    """

    def __init__(self, record: PreparedModel, run: Run, save: Callable[..., Any]) -> None:
        self._record, self._run, self._save = record, run, save

    def __call__(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        """As in transformers; a ``state_dict`` that is given is taken for the full one."""
        if state_dict is None:
            state_dict = full_state_dict(self._record, self._run)
        if self._run.backend.rank == 0:
            self._save(save_directory, is_main_process=True, state_dict=state_dict, **options)
        self._run.backend.barrier()


def save_in_full(record: PreparedModel, run: Run) -> None:
    """Makes ``save_pretrained`` of a divided model write the full one."""
    divided = any(r.layout.cuts or r.holders for r in record.parameters)
    save = getattr(record.original, "save_pretrained", None)
    if divided and save is not None:
        record.original.save_pretrained = SaveFull(record, run, save)  # type: ignore[assignment]

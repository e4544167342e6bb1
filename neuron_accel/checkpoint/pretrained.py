"""``save_pretrained`` of a model that lies over several ranks.

The method a model has of its own would write this rank's shards as if they were the model. So a divided model gets
another one, on the object, like the ``forward`` that Accelerate gives it: the class is the user's. It stands for this
model in this run only: copies, and the model after the run, refuse to be saved rather than write shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from neuron_accel.checkpoint.gather import full_state_dict
from neuron_accel.engine.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.run import PreparedModel, Run

_METHOD = "save_pretrained"


class SaveNothing:
    """In place of ``save_pretrained`` where a model holds shards and nobody can gather them."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "This model holds one rank's shards of a divided model.",
            where=_METHOD,
            why="it is a copy of a prepared model, or its run is over; its shards would be written as if they were the "
            "model",
            fix="save the prepared model itself, before the run ends, or use `accelerator.get_state_dict(model)`",
        )


class SaveFull:
    """In place of the ``save_pretrained`` of a divided model.

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

    def __reduce__(self) -> tuple[type[SaveNothing], tuple[()]]:
        return SaveNothing, ()  # of copies and pickles of the model

    def remove(self) -> None:
        """The run is over."""
        setattr(self._record.original, _METHOD, SaveNothing())


def save_in_full(record: PreparedModel, run: Run) -> None:
    """Makes ``save_pretrained`` of a divided model write the full one, until the run is over."""
    divided = any(r.layout.cuts or r.holders for r in record.parameters)
    save = getattr(record.original, _METHOD, None)
    if divided and save is not None:
        replacement = SaveFull(record, run, save)
        setattr(record.original, _METHOD, replacement)
        record.handles.append(replacement)

# SPDX-License-Identifier: Apache-2.0
"""Which of a checkpoint's models is which of a run's: by class, parameters and whether it is trained, and not by the
order alone.

The order in which models are prepared may change between two runs of one program, for example if a Trainer evaluates
before it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.index import Index, described_model, model_in_words, name_models
from neuron_accel.checkpoint.format.tensorfile import model_collection
from neuron_accel.checkpoint.state.snapshot import buffers_of
from neuron_accel.checkpoint.state.training import describe_model
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel


def match_models(
    models: Sequence[PreparedModel | None], index: Index, described: Sequence[Mapping[str, Any] | None]
) -> dict[int, int]:
    """Returns the number of each model in the checkpoint, by its position in ``models``.

    Models that differ in nothing are matched in the order in which they were prepared, if the checkpoint has as many.

    Args:
        models: the models to load; None for one that is not loaded.
        index: the tensors of the checkpoint.
        described: what the manifest says of the checkpoint's models, by number. Older checkpoints have fewer entries.

    Raises:
        CheckpointError: if the checkpoint has fewer models, or several of its models could be one of the run.
    """
    present = {i: m for i, m in enumerate(models) if m is not None and (list(m.parameters) or buffers_of(m))}
    saved = index.models()
    if len(present) > len(saved):
        raise _other_number(saved, present.values(), described)
    if len(present) == len(saved) == 1:
        return dict(zip(present, saved, strict=True))
    as_many = len(present) == len(saved)
    numbers: dict[int, int] = {}
    for position, model in present.items():
        fitting = [n for n in saved if n not in numbers.values() and _fits(model, n, index)]
        alike = [
            n for n in fitting if _is_described(model, described, n, loosely=not as_many and not model.optimizable)
        ]
        found = alike or fitting
        if not found and as_many:  # which of its weights do not fit is said when they are loaded
            found = [n for n in saved if n not in numbers.values()]
        if not found or (len(found) > 1 and not as_many):
            raise _other_number(saved, present.values(), described)
        numbers[position] = position if position in found else found[0]
    return numbers


def _is_described(
    model: PreparedModel, described: Sequence[Mapping[str, Any] | None], number: int, *, loosely: bool
) -> bool:
    """Whether the manifest describes the model so; ``loosely``: whether it is trained or not."""
    mine, theirs = describe_model(model), described_model(described, number)
    return all(theirs[key] == mine[key] for key in theirs if key in mine and not (loosely and key == "trains"))


def _fits(model: PreparedModel, number: int, index: Index) -> bool:
    """Whether the checkpoint's model has the same parameters, by name and shape."""
    collection = model_collection(number)
    for record in model.parameters:
        source = index.find(collection, record.names)
        if source is None and record.added:
            continue
        if source is None or source.layout.shape != record.layout.shape:
            return False
    known = {name for record in model.parameters for name in record.names}
    known.update(name for names in buffers_of(model) for name in names)
    return all(t.buffer or not known.isdisjoint((t.name, *t.aliases)) for t in index.tensors(collection))


def _other_number(
    saved: Sequence[int], present: Iterable[PreparedModel], described: Sequence[Mapping[str, Any] | None]
) -> CheckpointError:
    mine = [model_in_words(describe_model(model)) for model in present]
    return CheckpointError(
        f"The checkpoint has {len(saved)} model{'s' * (len(saved) != 1)}, this training {len(mine)}, and which is "
        "which cannot be told.",
        where=f"checkpoint: {name_models(saved, described) or 'none'}; here: {', '.join(mine) or 'none'}",
        why="models are identified by class, parameters and whether they are trained; of equal ones, by their order",
        fix="prepare the same models as when the checkpoint was saved; `neuron-accel consolidate --model N` writes one "
        "of them as a folder of transformers, which can be loaded alone",
    )

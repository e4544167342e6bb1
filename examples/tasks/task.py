"""What the scripts of this folder have in common: the arguments, the data, and the run itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np


class DataError(Exception):
    """The data that the arguments select are not available."""


@dataclass
class TaskArguments:
    """Arguments that select the model and the data."""

    model_name_or_path: str = field(metadata={"help": "A model of the hub, or a folder of one, to fine-tune."})
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the hub, or a local folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "Instead of a dataset: a file, .csv or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "One to evaluate with."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use no more examples than these."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use no more examples than these."})


def load(arguments: TaskArguments, columns: list[str]) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The examples to train on and those to evaluate with: the validation or test part, or a twentieth of the others.

    Raises:
        DataError: if they cannot be had, or lack one of the columns.
    """
    files = {"train": arguments.train_file, "validation": arguments.validation_file}
    files = {part: name for part, name in files.items() if name is not None}
    if arguments.dataset_name is None and "train" not in files:
        raise DataError("there is nothing to train on: pass --dataset_name or --train_file")
    try:
        if arguments.dataset_name is not None:
            parts = datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name)
        else:
            kind = "csv" if Path(files["train"]).suffix == ".csv" else "json"
            parts = datasets.load_dataset(kind, data_files=files)
    except Exception as error:
        raise DataError(f"{arguments.dataset_name or files} cannot be loaded: {error}") from error
    held_out = next((name for name in ("validation", "test") if name in parts), None)
    if held_out is None:
        parts, held_out = parts["train"].train_test_split(0.05, seed=0), "test"
    limits = {"train": arguments.max_train_samples, held_out: arguments.max_eval_samples}
    for name, limit in limits.items():
        missing = set(columns) - set(parts[name].column_names)
        if missing:
            raise DataError(f"the {name} part has no {sorted(missing)} but the columns {parts[name].column_names}")
        if limit is not None:
            parts[name] = parts[name].select(range(min(limit, len(parts[name]))))
    return parts["train"], parts[held_out]


def classes(train: datasets.Dataset, column: str) -> tuple[list[str], dict[Any, int]]:
    """The names of the classes, declared or those that occur, and the number of the class of each value."""
    names = getattr(train.features[column], "names", None)
    values = range(len(names)) if names else sorted(train.unique(column))
    return names or [str(value) for value in values], {value: number for number, value in enumerate(values)}


def head(names: list[str]) -> dict[str, Any]:
    """What ``from_pretrained`` needs to give a model a new head for these classes."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "ignore_mismatched_sizes": True,
    }


def with_mean_loss(model: Any) -> Any:
    """Tells the Trainer that the model's loss is a mean over its own batch.

    By the signature of ``forward`` the Trainer takes it for a sum divided by the ``num_items_in_batch`` that it passes,
    which these models ignore: with several ranks the gradients would be too large by their number, and a rank without
    examples in the last batch would yield NaN.
    """
    model.accepts_loss_kwargs = False
    return model


def accuracy(prediction: Any) -> dict[str, float]:
    """Of class scores [examples, classes] and labels [examples], both of all ranks."""
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def run(trainer: Any) -> None:
    """Trains, saves and evaluates, as far as the arguments ask for it."""
    arguments = trainer.args
    if arguments.do_train:
        result = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if arguments.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.accelerator.end_training()

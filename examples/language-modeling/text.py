"""Text in blocks of equal length for causal language models: from the hub, from files, or Python's standard library."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
import data


class TextError(Exception):
    """The text that the arguments select is not available."""


@dataclass
class TextArguments:
    """Arguments that select the text. Without any of them it is the source code of Python's standard library, which
    every machine has."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the hub, or a local folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(default="text", metadata={"help": "The dataset's column with the text."})
    train_file: str | None = field(default=None, metadata={"help": "A text file to train on, a document."})
    validation_file: str | None = field(default=None, metadata={"help": "A text file to evaluate with."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a sequence."})
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Per cent of the text to evaluate with, where there is none for that."}
    )
    corpus_share: float = field(default=0.4, metadata={"help": "Fraction of the standard library's files to use."})
    vocab_size: int = field(
        default=2048, metadata={"help": "Tokens of the tokenizer that is trained where none is named."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use no more sequences than these."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use no more sequences than these."})


@dataclass(frozen=True)
class Blocks:
    """Text as sequences of tokens.

    Args:
        tokenizer: what made the tokens.
        train, evaluation: int32 ``[sequences, block_size]``.
    """

    tokenizer: Any
    train: data.Sequences
    evaluation: data.Sequences


def load_blocks(arguments: TextArguments, tokenizer_name: str | None, cache: Path) -> Blocks:
    """Loads the text that the arguments select. One process of a machine should call it first, so that others find its
    files.

    Args:
        tokenizer_name: a name of the hub or a folder; None: a tokenizer is trained on the text.
        cache: a folder for what is made of the text.

    Raises:
        TextError: if it cannot be had, or is too short.
    """
    documents = _documents(arguments)
    if tokenizer_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    else:
        tokenizer = _trained(documents.train, arguments.vocab_size, cache)
    limits = (arguments.max_train_samples, arguments.max_eval_samples)
    parts = [
        _packed(texts, tokenizer, arguments.block_size, limit)
        for texts, limit in zip((documents.train, documents.held_out), limits, strict=True)
    ]
    return Blocks(tokenizer, *(data.Sequences(part) for part in parts))


def _documents(arguments: TextArguments) -> data.Documents:
    if arguments.dataset_name is not None:
        return _of_the_hub(arguments)
    if arguments.train_file is not None:
        return _of_files(arguments)
    share = arguments.validation_split_percentage / 100
    return data.read_documents(share=arguments.corpus_share, held_out=share)


def _of_the_hub(arguments: TextArguments) -> data.Documents:
    try:
        import datasets
    except ImportError as error:
        raise TextError("--dataset_name needs the package datasets: pip install datasets") from error
    try:
        loaded = datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    except Exception as error:
        raise TextError(
            f"the dataset {arguments.dataset_name!r} cannot be loaded ({error}); without a network name local files "
            "with --train_file, or neither, to train on the source code of Python's standard library"
        ) from error
    column = arguments.text_column
    if column not in loaded["train"].column_names:
        raise TextError(f"the dataset has no column {column!r} but {loaded['train'].column_names}; see --text_column")
    held_out = next((loaded[name] for name in ("validation", "test") if name in loaded), None)
    train = list(loaded["train"][column])
    return data.Documents(train, list(held_out[column])) if held_out is not None else _split(train, arguments)


def _of_files(arguments: TextArguments) -> data.Documents:
    texts = []
    for name in (arguments.train_file, arguments.validation_file):
        try:
            texts.append([] if name is None else [Path(name).read_text(encoding="utf-8")])
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"{name} cannot be read as text: {error}") from error
    train, held_out = texts
    return data.Documents(train, held_out) if held_out else _split(train[0].splitlines(keepends=True), arguments)


def _split(texts: list[str], arguments: TextArguments) -> data.Documents:
    """Splits off the end of the text for evaluation."""
    count = max(1, round(len(texts) * arguments.validation_split_percentage / 100))
    return data.Documents(["".join(texts[:-count])], ["".join(texts[-count:])])


def _trained(texts: list[str], size: int, cache: Path) -> Any:
    folder = cache / f"tokenizer-{size}-{data.Documents(texts, []).digest()[:16]}"
    if not (folder / "tokenizer.json").exists():
        data.train_tokenizer(texts, size).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _packed(texts: list[str], tokenizer: Any, length: int, limit: int | None) -> np.ndarray:
    end = tokenizer.eos_token_id
    if end is None:
        raise TextError("the tokenizer has no token for the end of a document; choose another")
    rows = data.pack(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], length=length, end=end)
    if not len(rows):
        raise TextError(f"the text is shorter than one sequence of {length} tokens; choose a smaller --block_size")
    return rows[:limit]

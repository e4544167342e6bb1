"""A corpus that every machine with Python has: the source code of Python's standard library.

The files are found through ``sysconfig``, a byte-level BPE tokenizer is trained on them, and the tokens are packed into
sequences of one length. The result is kept in one file that is reused only if it was made from the same text with the
same settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 bytes, so that any text can be written, and the end of a document."""

_CACHE_FORMAT = 1
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TABLES = {"encodings", "pydoc_data"}
"""Folders with character tables and prose, which are a tenth of all text and contain hardly any code."""


class CorpusError(Exception):
    """The corpus cannot be created with these settings on this machine."""


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """The settings of the tokenized corpus.

    Args:
        share: fraction of the standard library's files to use, in (0, 1].
        held_out: fraction of these files kept for evaluation, in (0, 1).
        vocab_size: number of tokens, at least 257.
        sequence_length: tokens in a packed sequence.
    """

    share: float = 0.4
    held_out: float = 0.05
    vocab_size: int = 2048
    sequence_length: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise CorpusError(f"the share of files is {self.share}; it must be above 0 and at most 1")
        if not 0 < self.held_out < 1:
            raise CorpusError(f"the held-out share is {self.held_out}; it must be between 0 and 1, both excluded")
        if not SMALLEST_VOCABULARY <= self.vocab_size <= 2**31:
            raise CorpusError(
                f"the vocabulary has {self.vocab_size} tokens; a byte-level one needs at least {SMALLEST_VOCABULARY}"
            )
        if self.sequence_length < 2:
            raise CorpusError(f"the sequence length is {self.sequence_length}; predicting the next token needs 2")


@dataclass(frozen=True)
class Documents:
    """The text of source files, split into training and evaluation."""

    train: list[str]
    held_out: list[str]

    def digest(self) -> str:
        """A hash of every text, in order."""
        hasher = hashlib.sha256()
        for texts in (self.train, self.held_out):
            hasher.update(len(texts).to_bytes(8, "big"))
            for text in texts:
                data = text.encode()
                hasher.update(len(data).to_bytes(8, "big"))
                hasher.update(data)
        return hasher.hexdigest()


@dataclass(frozen=True)
class Corpus:
    """The tokenized corpus.

    Args:
        tokenizer: trained on the training documents alone.
        train: int32 ``[sequences, sequence_length]``.
        held_out: int32 ``[sequences, sequence_length]``, from files that training never sees.
        digest: a hash of settings and text; equal on all ranks that may train together.
        reused: whether it came from the cache.
    """

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    held_out: np.ndarray
    digest: str
    reused: bool


def find_sources(root: Path | None = None) -> list[Path]:
    """The standard library's Python files, sorted by their path below ``root``.

    Tests, installed packages, tables, and what the build of Python generated for this machine are left out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_THE_LIBRARY | _TABLES]
        for name in names:
            if name.endswith(".py") and not name.startswith(("test_", "_sysconfigdata")):
                found.append(Path(folder, name))
    if not found:
        raise CorpusError(f"no Python source under {root}, where sysconfig places the standard library of this Python")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _fractions(name: str) -> tuple[float, float]:
    """Two independent numbers in [0, 1) that depend on nothing but ``name``."""
    digest = hashlib.sha256(name.encode()).digest()
    first, second = (int.from_bytes(digest[start : start + 6], "big") / 2**48 for start in (0, 6))
    return first, second


def read_documents(*, share: float, held_out: float, root: Path | None = None) -> Documents:
    """Reads a part of the standard library and splits it.

    A file's name alone decides whether it is taken and whether it is held out: a larger share only adds files, and no
    file ever changes sides. Files that cannot be read or are not UTF-8 are skipped.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = Documents([], [])
    for path in find_sources(root):
        chosen, side = _fractions(path.relative_to(root).as_posix())
        if chosen >= share:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            (documents.held_out if side < held_out else documents.train).append(text)
    if not documents.train or not documents.held_out:
        raise CorpusError(
            f"a share of {share:g} of the standard library leaves {len(documents.train)} files to train on and "
            f"{len(documents.held_out)} held out; both are needed, so choose larger shares"
        )
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text can be encoded and decodes to itself, byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise CorpusError(
            f"the text yields a vocabulary of only {tokenizer.get_vocab_size()} of the {vocab_size} tokens asked for; "
            "choose a larger share of files or a smaller vocabulary"
        )
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wraps the tokenizer for transformers, so that ``AutoTokenizer`` loads it after ``save_pretrained``."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        pad_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
    )


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The tokens of every text. What looks like a special token in a source file is text like any other."""
    literal = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    literal.encode_special_tokens = True
    return [encoding.ids for encoding in literal.encode_batch(list(texts), add_special_tokens=False)]


def pack(documents: Iterable[Sequence[int]], *, length: int, end: int) -> np.ndarray:
    """Joins documents, each followed by ``end``, and cuts the stream into sequences.

    Every position of every sequence holds a real token, so all ranks average their losses over equally many and no
    padding is ever computed. The incomplete sequence at the very end is dropped.

    Returns:
        int32 ``[sequences, length]``.
    """
    stream = [np.append(np.asarray(document, dtype=np.int32), np.int32(end)) for document in documents]
    tokens = np.concatenate(stream) if stream else np.empty(0, dtype=np.int32)
    count = len(tokens) // length
    return tokens[: count * length].reshape(count, length)


def load_corpus(settings: CorpusSettings, cache: Path, *, root: Path | None = None) -> Corpus:
    """The corpus in the file ``cache`` if it is the one that ``settings`` and today's sources make; else makes it and
    replaces the file in one atomic step, so that nobody ever reads half of one.

    Args:
        settings: what to make.
        cache: a safetensors file: sequences as tensors, tokenizer and digest in its header.
        root: folder of sources; the standard library by default.

    Raises:
        CorpusError: there is too little text for the settings, or the cache cannot be written.
    """
    documents = read_documents(share=settings.share, held_out=settings.held_out, root=root)
    digest = _digest(settings, documents)
    corpus = _read_cache(cache, digest)
    if corpus is None:
        corpus = _make_corpus(settings, documents, digest)
        _write_cache(corpus, cache)
    return corpus


def _digest(settings: CorpusSettings, documents: Documents) -> str:
    facts = [_CACHE_FORMAT, tokenizers.__version__, asdict(settings), documents.digest()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _make_corpus(settings: CorpusSettings, documents: Documents, digest: str) -> Corpus:
    tokenizer = train_tokenizer(documents.train, settings.vocab_size)
    train, held_out = (
        pack(tokenize(texts, tokenizer), length=settings.sequence_length, end=tokenizer.eos_token_id)
        for texts in (documents.train, documents.held_out)
    )
    return Corpus(tokenizer, train, held_out, digest, reused=False)


def _read_cache(cache: Path, digest: str) -> Corpus | None:
    try:
        with safe_open(cache, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("digest") != digest:
                return None
            train, held_out = file.get_tensor("train"), file.get_tensor("held_out")
    except (FileNotFoundError, SafetensorError):  # missing, or another file: the corpus has to be created
        return None
    return Corpus(_wrap(Tokenizer.from_str(header["tokenizer"])), train, held_out, digest, reused=True)


def _write_cache(corpus: Corpus, cache: Path) -> None:
    header = {"digest": corpus.digest, "tokenizer": corpus.tokenizer.backend_tokenizer.to_str()}
    data = save({"train": corpus.train, "held_out": corpus.held_out}, metadata=header)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.parent, prefix=f".{cache.name}.")
    except OSError as error:
        raise CorpusError(f"the folder {cache.parent} cannot be written to: {error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, cache)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class Sequences(Dataset):
    """Packed sequences for a causal language model; the labels are the inputs, which the model shifts."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = torch.from_numpy(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


class TrainingOrder(Sampler[int]):
    """The samples of a whole training run in order: as many passes over the data as it takes, each shuffled anew.

    It depends on nothing but its arguments, so every rank, and the one-process run, walk through the same order.

    Args:
        size: number of sequences in the data.
        total: number of samples of the run.
        seed: of the shuffles.
    """

    def __init__(self, *, size: int, total: int, seed: int) -> None:
        self.size, self.total, self.seed = size, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.total, self.size):
            generator = torch.Generator().manual_seed(self.seed + start // self.size)
            order = torch.randperm(self.size, generator=generator).tolist()
            yield from order[: self.total - start]


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """``count`` of the rows, evenly spaced over all of them."""
    return rows[np.linspace(0, len(rows), count, endpoint=False).astype(np.int64)]

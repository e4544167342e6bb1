"""Makes tokens of text, once: `train.py` reads the folder that this writes.

python data.py --tokenizer Qwen/Qwen3-8B --sequence 4096 --output tokens texts/*.jsonl
python data.py --tokenizer Qwen/Qwen3-8B --sequence 2048 --output chats chats.jsonl

Each line of a file is a JSON object. Lines with "text" are packed: one after another, with an end-of-text token
after each, in samples of --sequence tokens. Lines with "messages", or with "prompt" and "completion", are one sample
each: what comes before the last answer is not learnt, and the sample is padded at its end. A text or a prompt begins
with a begin-of-text token where the tokenizer adds one, as a server then does; of "messages" the chat template writes
all tokens. Texts are read one at a time, so files may be of any size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED = -100
"""The label of a token that is not learnt."""


class DataError(Exception):
    """The text cannot be used."""


class Rows(Dataset):
    """Samples of a folder that this program wrote; they stay on disk until they are used."""

    def __init__(self, folder: Path, sequence: int) -> None:
        try:
            about = json.loads((folder / "about.json").read_text())
        except OSError as error:
            raise DataError(f"{folder} is not a folder that data.py wrote: {error}") from error
        if about["sequence"] != sequence:
            raise DataError(f"{folder} has samples of {about['sequence']} tokens, and the recipe {sequence}")
        shape = (about["samples"], 2, sequence)
        self._rows = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r", shape=shape)
        self.uneven: bool = about["uneven"]
        """Whether samples have different numbers of labels."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": ids, "labels": labels}


class Counting(Dataset):
    """Samples without a file, for --tiny: numbers that rise by one."""

    uneven = False

    def __init__(self, samples: int, sequence: int, vocabulary: int) -> None:
        self._rows = (torch.arange(sequence) + 7 * torch.arange(samples)[:, None]) % vocabulary

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def lines(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of all files, each with where it is."""
    for file in files:
        with file.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}, line {number} is not JSON: {error}") from error
                yield f"{file}, line {number}", value


def beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: its begin-of-text token, or nothing."""
    return [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]


def conversation(tokenizer: Any, value: dict[str, Any], where: str, sequence: int) -> np.ndarray | None:
    """Ids and labels `[2, sequence]` of one sample; None if it is too long."""
    first: list[int] = []
    if "messages" in value:
        if tokenizer.chat_template is None:
            raise DataError(
                f"{where}: the tokenizer has no chat template for 'messages': take the tokenizer of an instruct model, "
                "or write 'prompt' and 'completion'"
            )
        before = tokenizer.apply_chat_template(value["messages"][:-1], tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(value["messages"], tokenize=False)
    else:
        before, full = value["prompt"], value["prompt"] + value["completion"] + tokenizer.eos_token
        first = beginning(tokenizer)
    if not full.startswith(before):
        raise DataError(f"{where}: with the chat template the answer does not follow what comes before it")
    given = first + tokenizer(before, add_special_tokens=False)["input_ids"]
    ids = given + tokenizer(full[len(before) :], add_special_tokens=False)["input_ids"]
    if len(ids) > sequence:
        return None
    row = np.full((2, sequence), IGNORED, dtype=np.int32)
    row[0] = tokenizer.eos_token_id
    row[0, : len(ids)] = ids
    row[1, len(given) : len(ids)] = ids[len(given) :]
    return row


def samples(tokenizer: Any, files: Iterable[Path], sequence: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Every sample, and whether all of its tokens are learnt."""
    waiting: list[int] = []
    first, left_out = beginning(tokenizer), 0
    for where, value in lines(files):
        if "text" in value:
            ids = tokenizer(value["text"], add_special_tokens=False)["input_ids"]
            waiting += [*first, *ids, tokenizer.eos_token_id]
            while len(waiting) >= sequence:
                packed, waiting = np.array(waiting[:sequence], dtype=np.int32), waiting[sequence:]
                yield np.stack([packed, packed]), True
        elif "messages" in value or {"prompt", "completion"} <= set(value):
            row = conversation(tokenizer, value, where, sequence)
            left_out += row is None
            if row is not None:
                yield row, False
        else:
            raise DataError(f"{where} has none of 'text', 'messages', or 'prompt' and 'completion': {sorted(value)}")
    if left_out:
        print(f"{left_out} samples have more than {sequence} tokens and are left out")


def write(tokenizer: Any, files: Iterable[Path], sequence: int, folder: Path) -> int:
    """Writes all samples, and the tokenizer beside them; returns their number."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no token for the end of a text; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    count, uneven = 0, False
    with (folder / "tokens.bin").open("wb") as file:
        for row, all_learnt in samples(tokenizer, files, sequence):
            file.write(row.tobytes())
            count, uneven = count + 1, uneven or not all_learnt
    if not count:
        raise DataError(f"the text has less than one sample of {sequence} tokens; choose a smaller --sequence")
    tokenizer.save_pretrained(folder)
    about = {"samples": count, "sequence": sequence, "uneven": uneven}
    (folder / "about.json").write_text(json.dumps(about, indent=1))  # last: a folder without it is incomplete
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines")
    parser.add_argument("--tokenizer", required=True, help="a name of the hub, or a folder")
    parser.add_argument("--sequence", required=True, type=int, help="tokens in a sample: that of the recipe")
    parser.add_argument("--output", required=True, type=Path, help="the folder to write")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    count = write(AutoTokenizer.from_pretrained(options.tokenizer), options.files, options.sequence, options.output)
    print(f"{count} samples of {options.sequence} tokens in {options.output}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DataError, OSError) as error:
        sys.exit(f"data.py: {error}")

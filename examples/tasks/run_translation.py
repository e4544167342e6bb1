"""Fine-tunes a model to translate. `python run_translation.py --help` lists every argument.

    neuron-accel launch --nproc-per-node 2 run_translation.py --model_name_or_path google-t5/t5-small \\
        --source_lang en --target_lang fr --source_prefix "translate English to French: " \\
        --dataset_name Helsinki-NLP/opus_books --dataset_config_name en-fr \\
        --do_train --do_eval --predict_with_generate --zero_1 --bf16 --output_dir out
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronSeq2SeqTrainingArguments  # isort: skip
import pairs
import task
from transformers import HfArgumentParser


@dataclass(kw_only=True)
class TranslationArguments(pairs.PairArguments):
    """Arguments of this task."""

    source_lang: str = field(metadata={"help": "The language of the sources, a key in the column: en."})
    target_lang: str = field(metadata={"help": "The language to translate to."})
    column: str = field(default="translation", metadata={"help": "The column of texts by language."})


def chrf(written: list[str], wanted: list[str], *, longest: int = 6) -> dict[str, float]:
    """The share of sequences of one to six characters, without spaces, that both have: F2 in per cent."""

    def pieces(text: str, size: int) -> Counter[str]:
        text = "".join(text.split())
        return Counter(text[start : start + size] for start in range(len(text) - size + 1))

    shares = []
    for size in range(1, longest + 1):
        found = [pieces(text, size) for text in written]
        sought = [pieces(text, size) for text in wanted]
        both = sum((left & right).total() for left, right in zip(found, sought, strict=True))
        totals = [sum(counter.total() for counter in counters) for counters in (found, sought)]
        if all(totals):
            shares.append([both / total for total in totals])
    if not any(precision for precision, _ in shares):
        return {"chrf": 0.0}
    precision, recall = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    return {"chrf": 100 * 5 * precision * recall / (4 * precision + recall)}


def main() -> int:
    parser = HfArgumentParser((TranslationArguments, NeuronSeq2SeqTrainingArguments), description=__doc__)
    chosen, arguments = parser.parse_args_into_dataclasses()

    def texts_of(batch):
        return [
            [both[language] for both in batch[chosen.column]] for language in (chosen.source_lang, chosen.target_lang)
        ]

    task.run(pairs.make_trainer(chosen, arguments, [chosen.column], texts_of, chrf))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, task.DataError) as error:
        sys.exit(f"run_translation.py: {error}")

"""Fine-tunes a model to summarize texts. `python run_summarization.py --help` lists every argument.

    neuron-accel launch --nproc-per-node 2 run_summarization.py --model_name_or_path google-t5/t5-small \\
        --source_prefix "summarize: " --dataset_name EdinburghNLP/xsum --text_column document \\
        --do_train --do_eval --predict_with_generate --zero_1 --bf16 --output_dir out
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronSeq2SeqTrainingArguments  # isort: skip
import pairs
import task
from transformers import HfArgumentParser


@dataclass
class SummarizationArguments(pairs.PairArguments):
    """Arguments of this task."""

    text_column: str = field(default="text", metadata={"help": "The column of the texts."})
    summary_column: str = field(default="summary", metadata={"help": "The column of their summaries."})


def rouge_l(written: list[str], wanted: list[str]) -> dict[str, float]:
    """The share of words in the longest common subsequence, F1, mean in per cent. Words are neither stemmed nor freed
    of punctuation, so it is not the number that papers report."""
    scores = []
    for left, right in zip(written, wanted, strict=True):
        rows, words = left.lower().split(), right.lower().split()
        longest = [0] * (len(words) + 1)  # of the rows so far and the first words
        for row in rows:
            before = longest
            longest = [0]
            for place, word in enumerate(words):
                longest.append(before[place] + 1 if row == word else max(before[place + 1], longest[place]))
        scores.append(2 * longest[-1] / max(len(rows) + len(words), 1))
    return {"rougeL": 100 * sum(scores) / max(len(scores), 1)}


def main() -> int:
    parser = HfArgumentParser((SummarizationArguments, NeuronSeq2SeqTrainingArguments), description=__doc__)
    chosen, arguments = parser.parse_args_into_dataclasses()
    columns = [chosen.text_column, chosen.summary_column]
    task.run(pairs.make_trainer(chosen, arguments, columns, lambda batch: [batch[name] for name in columns], rouge_l))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, task.DataError) as error:
        sys.exit(f"run_summarization.py: {error}")

"""Fine-tunes a model to classify texts, or pairs of them. `python run_classification.py --help` lists every argument.

    neuron-accel launch --nproc-per-node 2 run_classification.py --model_name_or_path bert-base-uncased \\
        --dataset_name stanfordnlp/imdb --do_train --do_eval --zero_1 --bf16 --output_dir out
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronTrainer, NeuronTrainingArguments  # isort: skip
import task
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    default_data_collator,
    set_seed,
)


@dataclass
class ClassificationArguments(task.TaskArguments):
    """Arguments of this task."""

    text_column: str = field(default="text", metadata={"help": "The column of the texts."})
    second_text_column: str | None = field(default=None, metadata={"help": "For pairs: the column of the second ones."})
    label_column: str = field(default="label", metadata={"help": "The column of the classes, names or numbers."})
    max_length: int = field(default=128, metadata={"help": "Tokens to which each text is cut or padded."})


def main() -> int:
    parser = HfArgumentParser((ClassificationArguments, NeuronTrainingArguments), description=__doc__)
    chosen, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    texts = [column for column in (chosen.text_column, chosen.second_text_column) if column is not None]
    tokenizer = AutoTokenizer.from_pretrained(chosen.model_name_or_path)
    with arguments.main_process_first(local=True, desc="preparing the data"):
        parts = task.load(chosen, [*texts, chosen.label_column])
        names, numbers = task.classes(parts[0], chosen.label_column)

        def encode(batch):
            sizes = {"padding": "max_length", "truncation": True, "max_length": chosen.max_length}
            encoded = tokenizer(*(batch[column] for column in texts), **sizes)
            return {**encoded, "labels": [numbers[label] for label in batch[chosen.label_column]]}

        train, evaluation = (
            part.map(encode, batched=True, remove_columns=part.column_names, desc="tokens") for part in parts
        )
    model = AutoModelForSequenceClassification.from_pretrained(chosen.model_name_or_path, **task.head(names))
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = NeuronTrainer(
        model=task.with_mean_loss(model),
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=task.accuracy,
    )
    task.run(trainer)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, task.DataError) as error:
        sys.exit(f"run_classification.py: {error}")

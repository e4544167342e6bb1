"""Fine-tuning an encoder and decoder, such as T5, on pairs of texts: what summarization and translation share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments  # isort: skip
import numpy as np
import task
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, default_data_collator, set_seed

Texts = list[str]


@dataclass
class PairArguments(task.TaskArguments):
    """Arguments of both tasks."""

    source_prefix: str = field(default="", metadata={"help": "Text before each source; T5 wants one for each task."})
    max_source_length: int = field(default=512, metadata={"help": "Tokens to which a source is cut or padded."})
    max_target_length: int = field(default=128, metadata={"help": "The same for what the model shall write."})


def make_trainer(
    chosen: PairArguments,
    arguments: NeuronSeq2SeqTrainingArguments,
    columns: list[str],
    texts_of: Callable[[Any], tuple[Texts, Texts]],
    score: Callable[[Texts, Texts], dict[str, float]],
) -> NeuronSeq2SeqTrainer:
    """All texts have the same two lengths, so that every step is one graph.

    Args:
        columns: of the data that ``texts_of`` reads.
        texts_of: gets a batch of the data, returns sources and targets, [examples] each.
        score: gets what the model wrote and what it should have, [examples] each; for --predict_with_generate.

    Raises:
        DataError: if the data cannot be had.
    """
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model_name_or_path)
    if arguments.generation_max_length is None:
        arguments.generation_max_length = chosen.max_target_length

    def encode(batch: Any) -> dict[str, Any]:
        sources, targets = texts_of(batch)
        sizes = {"padding": "max_length", "truncation": True}
        sources = [chosen.source_prefix + text for text in sources]
        wanted = tokenizer(text_target=targets, max_length=chosen.max_target_length, **sizes)
        labels = np.where(wanted["attention_mask"], wanted["input_ids"], -100)
        return {**tokenizer(sources, max_length=chosen.max_source_length, **sizes), "labels": labels}

    def metrics(prediction: Any) -> dict[str, float]:
        ids = (prediction.predictions, prediction.label_ids)
        padded = (np.where(tokens < 0, tokenizer.pad_token_id, tokens) for tokens in ids)
        return score(*(tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in padded))

    with arguments.main_process_first(local=True, desc="preparing the data"):
        train, evaluation = (
            part.map(encode, batched=True, remove_columns=part.column_names, desc="tokens")
            for part in task.load(chosen, columns)
        )
    return NeuronSeq2SeqTrainer(
        model=task.with_mean_loss(AutoModelForSeq2SeqLM.from_pretrained(chosen.model_name_or_path)),
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=metrics if arguments.predict_with_generate else None,
    )

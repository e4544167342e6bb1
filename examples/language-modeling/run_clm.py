"""Trains or fine-tunes a causal language model with a Trainer. `python run_clm.py --help` lists every argument.

    neuron-accel launch --nproc-per-node 2 run_clm.py --model_name_or_path gpt2 --dataset_name wikitext \\
        --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --zero_1 --bf16 --output_dir out
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronTrainer, NeuronTrainingArguments  # isort: skip
from models import ModelArguments, build_model
from text import TextArguments, TextError, load_blocks
from transformers import HfArgumentParser, default_data_collator, set_seed


def main() -> int:
    parser = HfArgumentParser((ModelArguments, TextArguments, NeuronTrainingArguments), description=__doc__)
    model_arguments, text_arguments, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    with arguments.main_process_first(local=True, desc="preparing the text"):
        blocks = load_blocks(text_arguments, model_arguments.tokenizer, Path(arguments.output_dir, "text"))
    model = build_model(
        model_arguments,
        vocab_size=len(blocks.tokenizer),
        block_size=text_arguments.block_size,
        end=blocks.tokenizer.eos_token_id,
    )
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=blocks.train,
        eval_dataset=blocks.evaluation,
        processing_class=blocks.tokenizer,
        data_collator=default_data_collator,
    )
    if arguments.do_train:
        result = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if arguments.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, TextError) as error:
        sys.exit(f"run_clm.py: {error}")

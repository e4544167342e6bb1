"""Fine-tunes a model to classify images. `python run_image_classification.py --help` lists every argument.

    neuron-accel launch --nproc-per-node 2 run_image_classification.py --dataset_name AI-Lab-Makerere/beans \\
        --model_name_or_path google/vit-base-patch16-224-in21k --label_column labels \\
        --do_train --do_eval --zero_1 --bf16 --output_dir out
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

# First: it chooses the device for Accelerate.
from neuron_accel import NeuronAccelError, NeuronTrainer, NeuronTrainingArguments  # isort: skip
import task
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    default_data_collator,
    set_seed,
)


@dataclass
class ImageArguments(task.TaskArguments):
    """Arguments of this task. A local folder of a dataset is one of images in a folder for each class."""

    image_column: str = field(default="image", metadata={"help": "The column of the images."})
    label_column: str = field(default="label", metadata={"help": "The column of the classes."})


def main() -> int:
    parser = HfArgumentParser((ImageArguments, NeuronTrainingArguments), description=__doc__)
    chosen, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    arguments.remove_unused_columns = False  # images become pixels when they are read
    processor = AutoImageProcessor.from_pretrained(chosen.model_name_or_path)
    with arguments.main_process_first(local=True, desc="preparing the data"):
        parts = task.load(chosen, [chosen.image_column, chosen.label_column])
    names, numbers = task.classes(parts[0], chosen.label_column)

    def encode(batch):
        images = [image.convert("RGB") for image in batch[chosen.image_column]]
        labels = [numbers[label] for label in batch[chosen.label_column]]
        return {**processor(images, return_tensors="pt"), "labels": labels}

    train, evaluation = (part.with_transform(encode) for part in parts)
    model = AutoModelForImageClassification.from_pretrained(chosen.model_name_or_path, **task.head(names))
    trainer = NeuronTrainer(
        model=task.with_mean_loss(model),
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=task.accuracy,
    )
    task.run(trainer)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NeuronAccelError, task.DataError) as error:
        sys.exit(f"run_image_classification.py: {error}")

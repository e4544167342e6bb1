"""``Seq2SeqTrainer`` and its arguments as docs/trainer.md describes them, with the plugins of a run: classes that other
modules can import, since a Trainer pickles its arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from neuron_accel import NeuronTrainerMixin
from neuron_accel.trainer import StrategyArguments


@dataclass
class Arguments(StrategyArguments, Seq2SeqTrainingArguments):
    def __post_init__(self) -> None:
        self.plugins = json.loads(os.environ["SCRIPT_RUN"])["plugins"]
        super().__post_init__()


class Trainer(NeuronTrainerMixin, Seq2SeqTrainer):
    pass

# SPDX-License-Identifier: Apache-2.0
"""transformers' ``Trainer`` on the strategies of this package."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ImportError("neuron_accel.trainer needs transformers; in a clone of the repository: pip install '.[trainer]'")

from neuron_accel.trainer.arguments import (
    NeuronSeq2SeqTrainingArguments,
    NeuronTrainingArguments,
    StrategyArguments,
)
from neuron_accel.trainer.mixin import NeuronSeq2SeqTrainer, NeuronTrainer, NeuronTrainerMixin

__all__ = [
    "NeuronSeq2SeqTrainer",
    "NeuronSeq2SeqTrainingArguments",
    "NeuronTrainer",
    "NeuronTrainerMixin",
    "NeuronTrainingArguments",
    "StrategyArguments",
]

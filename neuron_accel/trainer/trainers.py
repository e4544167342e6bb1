"""Trainers of transformers that train by strategies."""

from __future__ import annotations

from neuron_accel.trainer.mixin import NeuronTrainerMixin  # isort: skip  # first: it settles the device
from transformers import Seq2SeqTrainer, Trainer


class NeuronTrainer(NeuronTrainerMixin, Trainer):
    """transformers' ``Trainer``, by the strategies that its :class:`NeuronTrainingArguments` name."""


class NeuronSeq2SeqTrainer(NeuronTrainerMixin, Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer``, by the strategies that its :class:`NeuronSeq2SeqTrainingArguments` name."""

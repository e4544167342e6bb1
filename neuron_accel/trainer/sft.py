# SPDX-License-Identifier: Apache-2.0
"""TRL's ``SFTTrainer`` with strategies, under the names of optimum-neuron. Needs TRL."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

if importlib.util.find_spec("trl") is None:
    raise ImportError("NeuronSFTTrainer and NeuronSFTConfig need TRL; install it with: pip install trl")

from neuron_accel.trainer.arguments import StrategyArguments  # isort: skip  # first: it chooses the device
from trl import SFTConfig, SFTTrainer

from neuron_accel.errors import ConfigurationError
from neuron_accel.trainer.mixin import NeuronTrainerMixin


@dataclass
class NeuronSFTConfig(StrategyArguments, SFTConfig):
    """TRL's ``SFTConfig``, with the arguments of :class:`StrategyArguments`, and ``max_seq_length`` as another name of
    ``max_length``."""

    max_seq_length: int | None = field(default=None, metadata={"help": "Another name of max_length."})

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            self.max_length = self.max_seq_length
        super().__post_init__()


class NeuronSFTTrainer(NeuronTrainerMixin, SFTTrainer):  # type: ignore[misc]  # attributes that TRL declares otherwise
    """TRL's ``SFTTrainer`` with the strategies of its :class:`NeuronSFTConfig`; ``tokenizer`` is another name of
    ``processing_class``."""

    def __init__(self, *args: Any, tokenizer: Any = None, **options: Any) -> None:
        if tokenizer is not None:
            if options.get("processing_class") is not None:
                raise ConfigurationError(
                    "The tokenizer is given twice.", where="tokenizer and processing_class", fix="keep the second"
                )
            options["processing_class"] = tokenizer
        super().__init__(*args, **options)

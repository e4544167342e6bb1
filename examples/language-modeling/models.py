"""The model to train: a pretrained one, or one built from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from neuron_accel import lazy_load_for_parallelism


@dataclass
class ModelArguments:
    """Arguments that select the model."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model of the hub, or a folder of one, whose training continues."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "A configuration, by name or folder, for a new model."}
    )
    model_type: str = field(default="gpt2", metadata={"help": "The family of a new model without a configuration."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "For a new model: n_embd=128,n_layer=4,n_head=4 and so on."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "A tokenizer; by default the model's, or one trained on the text."}
    )

    @property
    def tokenizer(self) -> str | None:
        """Name or folder of the tokenizer."""
        return self.tokenizer_name or self.model_name_or_path or self.config_name


def build_model(arguments: ModelArguments, *, vocab_size: int, block_size: int, end: int) -> Any:
    """The model, without memory for its weights: each rank reads, or initialises, its shard when it is prepared.

    Args:
        vocab_size: number of tokens of the tokenizer.
        block_size: tokens in a sequence.
        end: id of the token that ends a document.
    """
    if arguments.model_name_or_path is not None:
        with lazy_load_for_parallelism():
            return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    if arguments.config_name is not None:
        config = AutoConfig.from_pretrained(arguments.config_name)
    else:
        sizes = {"vocab_size": vocab_size, "max_position_embeddings": block_size}
        config = AutoConfig.for_model(arguments.model_type, **sizes, bos_token_id=end, eos_token_id=end)
    if arguments.config_overrides:
        config.update_from_string(arguments.config_overrides)
    with lazy_load_for_parallelism():
        return AutoModelForCausalLM.from_config(config)

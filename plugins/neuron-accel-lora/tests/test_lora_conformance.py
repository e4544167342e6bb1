"""The plugin keeps the contract: alone, and beside every built-in strategy; one process runs plain peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from neuron_accel_lora import LoraPlugin
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from neuron_accel.testing import PluginConformance

OPTIONS = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"],
    "init_lora_weights": False,  # both factors other than zero
}


def adapted_by_peft(model: nn.Module, plugin: LoraPlugin) -> nn.Module:
    """peft's own layers, under names in which the base model keeps its own."""
    model = inject_adapter_in_model(LoraConfig(**OPTIONS), model)
    model.__class__ = type(type(model).__name__, (type(model),), {"named_parameters": _named, "state_dict": _state})
    return model


def _named(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return ((_plain(name), p) for name, p in nn.Module.named_parameters(self, *args, **kwargs))


def _state(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    return {_plain(name): value for name, value in nn.Module.state_dict(self, *args, **kwargs).items()}


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


class TestLora(PluginConformance):
    reference = staticmethod(adapted_by_peft)
    opt_out = {  # noqa: RUF012  as the kit's own attributes are
        "test_leaves_nothing_behind": "The adapters are what was trained; the hooks that apply them stay with the "
        "model, or it would silently compute what it did before training.",
    }

    @pytest.fixture
    def plugin(self) -> LoraPlugin:
        return LoraPlugin(peft_config=OPTIONS)

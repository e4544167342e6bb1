# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning with ``peft`` for neuron_accel, with adapters that are sharded like the layers that they adapt.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022).
"""

from __future__ import annotations

from neuron_accel_lora.export import extract_adapter, save_adapter
from neuron_accel_lora.plugin import LoraPlugin

__all__ = ["LoraPlugin", "extract_adapter", "save_adapter"]
__version__ = "0.1.0"

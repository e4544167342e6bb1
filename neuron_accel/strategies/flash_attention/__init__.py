# SPDX-License-Identifier: Apache-2.0
"""Attention without stored scores: in blocks of queries, or by a kernel of the device."""

from neuron_accel.strategies.flash_attention.plugin import FlashAttentionPlugin

__all__ = ["FlashAttentionPlugin"]

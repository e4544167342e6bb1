# SPDX-License-Identifier: Apache-2.0
"""Cross entropy in chunks of tokens, so that the full logits never exist."""

from neuron_accel.strategies.chunked_loss.plugin import ChunkedLossPlugin

__all__ = ["ChunkedLossPlugin"]

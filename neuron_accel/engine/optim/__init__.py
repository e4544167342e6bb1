# SPDX-License-Identifier: Apache-2.0
"""Building blocks of strategies that reduce gradients or shard optimizers."""

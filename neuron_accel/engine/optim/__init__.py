"""Building blocks of strategies that reduce gradients or shard optimizers."""

"""What strategies that reduce gradients or shard optimizers are made of."""

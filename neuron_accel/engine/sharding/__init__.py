"""What a tensor of the original model is on this rank."""

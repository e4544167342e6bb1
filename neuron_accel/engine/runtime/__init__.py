"""The state of one run, and operations on tensors of several ranks."""

"""Checkpoints that any mesh can load: files, what goes into them, and tools that need no accelerator."""

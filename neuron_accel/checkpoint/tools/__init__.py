"""Consolidate, reshard, inspect and verify: without a process group or an accelerator."""

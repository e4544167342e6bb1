# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that any mesh can load: files, what goes into them, and tools that need no accelerator."""

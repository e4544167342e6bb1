# SPDX-License-Identifier: Apache-2.0
"""Consolidate, reshard, inspect and verify: without a process group or an accelerator."""

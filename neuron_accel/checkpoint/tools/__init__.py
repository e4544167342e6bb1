# SPDX-License-Identifier: Apache-2.0
"""Consolidate, inspect and verify: without a process group or an accelerator."""

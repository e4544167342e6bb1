# SPDX-License-Identifier: Apache-2.0
"""Flags of XLA for tests, in which compilation takes longer than execution."""

from __future__ import annotations

import os

QUICK = {"--xla_backend_optimization_level": "0", "--xla_llvm_disable_expensive_passes": "true"}
"""LLVM's optimizations take half of the compilation, and do not change results."""


def quick_flags(**more: str) -> str:
    """The caller's ``XLA_FLAGS``, with those for fast compilation and ``more`` added, unless it sets them.

    Args:
        more: values by the names of flags, without the dashes before them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = {**QUICK, **{f"--{name}": value for name, value in more.items()}}
    return " ".join([flags, *(f"{name}={value}" for name, value in wanted.items() if name not in flags)]).strip()

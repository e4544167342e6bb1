# SPDX-License-Identifier: Apache-2.0
"""Whether the model of a configuration can be sharded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SupportReport:
    """Whether and how a model can be sharded.

    Args:
        model_type: family of the model.
        tensor_parallel_size: the degree.
        supported: whether the model can be sharded.
        reason: why it cannot; empty if it can.
        sequence: why it does not support sequence parallelism; empty if it does.
        sharded: number of elements in sharded parameters.
        replicated: number of elements in replicated parameters.
        local: number of elements on each rank, padding included.
    """

    model_type: str
    tensor_parallel_size: int
    supported: bool
    reason: str = ""
    sequence: str = ""
    sharded: int = 0
    replicated: int = 0
    local: int = 0

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        title = f"{self.model_type} with tensor_parallel_size={self.tensor_parallel_size}"
        if not self.supported:
            return f"{title}: not supported. {self.reason}"
        sequence = f"sequence parallel: no, {self.sequence}" if self.sequence else "sequence parallel: yes"
        return (
            f"{title}: supported. {self.sharded:,} elements sharded, {self.replicated:,} replicated, "
            f"{self.local:,} on each; {sequence}"
        )

# SPDX-License-Identifier: Apache-2.0
"""The plugin: its options and hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.contract import AxisKind, AxisSpec, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run

AXIS = "cp"
"""The mesh axis of context parallelism."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelPlugin(StrategyPlugin):
    """Shards sequences over ``context_parallel_size`` ranks, with exact ring attention (Liu, Zaharia and Abbeel, 2023).

    Each rank receives full sequences, and computes an early and a late slice of each. Keys and values are passed around
    the ranks; activations need 1 / degree of the memory. The training loop does not change: inputs, positions, labels
    and padding masks are sharded when the model is called. The model returns the mean loss over all tokens on every
    rank, and unsharded outputs.

    Args:
        context_parallel_size: number of ranks over which a sequence is sharded. Lengths that are not a multiple of
            twice this number are padded internally.
        training_logits: whether a call with labels in training returns the full logits on every rank. By default they
            are left out, since they need more memory than all sharded activations.

    Raises:
        ConfigurationError: if ``context_parallel_size`` is not an integer of at least 1.
    """

    context_parallel_size: int
    training_logits: bool = False

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="context_parallel",
        api_version=4,
        phase=Phase.ACTIVATIONS,
        after=frozenset({"sequence_parallel"}),
        provides=frozenset({"gathered-weights"}),  # weights are read by the model's own layers only
    )

    @classmethod
    def layouts(cls, space: Any) -> Iterable[StrategyPlugin]:
        """2, 4 or 8 ranks, each with two slices of at least 2,048 tokens, or 512 if there are fewer samples than ranks.
        Shorter sequences are divided by no rank that could have samples of its own."""
        least = 1024 if space.global_batch < space.replicas else 4096
        sizes = [size for size in (2, 4, 8) if space.replicas % size == 0 and space.sequence >= least * size]
        return [cls(context_parallel_size=size) for size in sizes]

    def __post_init__(self) -> None:
        if type(self.context_parallel_size) is not int or self.context_parallel_size < 1:
            raise ConfigurationError(
                f"context_parallel_size is {self.context_parallel_size!r}.",
                where="plugin context_parallel",
                fix="pass an integer of at least 1",
            )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.context_parallel_size, kind=AxisKind.SEQUENCE),)

    def setup(self, run: Run) -> None:
        run.group(AXIS)  # created now, in the same order on every rank

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Shards the arguments of calls of ``model`` along the sequence.

        Raises:
            UnsupportedModelError: if the model's attention is not supported; the model is then unchanged.
        """
        if run.mesh.degree(AXIS) == 1:
            return
        from neuron_accel_context_parallel.models import Attached

        attached = Attached(
            model.module, run, AXIS, keeps_logits=self.training_logits, staged=run.mesh.degree("pp") > 1
        )
        run.undo(attached.detach)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Describes the communication of each attention layer."""
        degree = run.mesh.degree(AXIS)
        if degree == 1:
            return ""
        return (
            f"Each attention layer sends the keys and values of 1/{degree} of the sequence {degree - 1} times forward, "
            f"the same and their gradients {2 * degree - 1} times backward, to the next of {degree} ranks."
        )

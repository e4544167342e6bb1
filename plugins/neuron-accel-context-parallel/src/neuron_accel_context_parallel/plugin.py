"""The plugin: configuration, and what becomes of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from neuron_accel.contract import (
    AxisKind,
    AxisSpec,
    ConfigurationError,
    Phase,
    PluginSpec,
    StrategyPlugin,
)

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run

AXIS = "cp"
"""The mesh axis of context parallelism."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelPlugin(StrategyPlugin):
    """Divides sequences over ``context_parallel_size`` ranks, with exact attention.

    Each rank gets full sequences and computes an early and a late slice of each. Keys and values go round the ranks;
    activations, and with them the memory of training, take 1 / degree. The loop stays as it is: inputs, positions,
    labels and masks of padding are sharded when the model is called, the loss that it returns is the mean over all
    tokens on every rank, and outputs are full.

    Args:
        context_parallel_size: number of ranks over which a sequence is sharded. Lengths not divisible by 2 x this are
            padded inside.
        training_logits: whether a call with labels in training returns logits, full on every rank. By default they are
            left out, since they take more memory than anything that is sharded.
    """

    context_parallel_size: int
    training_logits: bool = False

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="context_parallel", phase=Phase.ACTIVATIONS, after=frozenset({"sequence_parallel"})
    )

    def __post_init__(self) -> None:
        if type(self.context_parallel_size) is not int or self.context_parallel_size < 1:
            raise ConfigurationError(
                f"context_parallel_size is {self.context_parallel_size!r}.",
                where="plugin context_parallel",
                fix="give a whole number of at least 1",
            )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.context_parallel_size, kind=AxisKind.SEQUENCE),)

    def setup(self, run: Run) -> None:
        run.group(AXIS)  # made now, in the same order on every rank

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Makes calls of ``model`` shard their arguments.

        Raises:
            UnsupportedModelError: if its attention cannot be sharded. It is unchanged then.
        """
        if run.mesh.degree(AXIS) == 1:
            return
        from neuron_accel_context_parallel.models import Attached

        attached = Attached(
            model.module, run, AXIS, keeps_logits=self.training_logits, staged=run.mesh.degree("pp") > 1
        )
        run.state(self).setdefault("models", []).append(attached)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """What each layer sends, as text."""
        degree = run.mesh.degree(AXIS)
        if degree == 1:
            return ""
        return (
            f"Each attention layer sends the keys and values of 1/{degree} of the sequence {degree - 1} times forward, "
            f"the same and their gradients {2 * degree - 1} times backward, to the next of {degree} ranks."
        )

    def teardown(self, run: Run) -> None:
        for attached in run.state(self).get("models", []):
            attached.detach()
        run.state(self).clear()

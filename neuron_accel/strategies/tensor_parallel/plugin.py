# SPDX-License-Identifier: Apache-2.0
"""The plugin of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.contract import (
    AxisKind,
    AxisSpec,
    GradientPart,
    Phase,
    PluginSpec,
    StrategyPlugin,
    global_norm,
    gradient_parts,
)
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel.strategies.tensor_parallel.cuts import AXIS

if TYPE_CHECKING:
    import torch

    from neuron_accel.contract import PreparedModel, Run
    from neuron_accel.strategies.tensor_parallel.support import SupportReport

_SMALL = 1 << 16
"""Elements of the largest parameter that is compared: embeddings that are not sharded would take time."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions(StrategyPlugin):
    """How the weights of a model are sharded.

    Args:
        tensor_parallel_size: number of ranks over which one copy of the model is sharded. Heads and features whose
            number is not divisible by it are padded; key/value heads, if there are fewer, are replicated on several
            ranks.
        parallelize_embeddings: whether to shard token embedding and head along the vocabulary, and compute the loss
            without gathering logits. They are not sharded if the ``forward`` of the model, or of the model of
            transformers in it, was replaced on the object, as some trainers do to fuse head and loss, because it may
            read the head's weight directly.
        tensor_parallel_plan: how to shard a model of your own: FQN patterns of linear layers and attributes, and their
            styles; see :func:`~neuron_accel.register_tensor_parallel_plan`, which registers a plan for a class.
    """

    tensor_parallel_size: int = 1
    parallelize_embeddings: bool = True
    tensor_parallel_plan: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size < 1:
            raise ConfigurationError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; it must be at least 1.",
                where=f"plugin {self.spec.name!r}",
                fix="leave it out for 1",
            )


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlugin(TensorParallelOptions):
    """Shards the weights of a model of a known family over ``tensor_parallel_size`` neighbouring ranks.

    Attention heads and feed-forward features are sharded; each rank computes with its shard and the ranks sum the
    outputs, once for each attention and each feed-forward. The model is rewritten in place and keeps its FQNs.

    Args:
        options: see :class:`TensorParallelOptions`.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="tensor_parallel",
        api_version=4,
        phase=Phase.LAYOUT,
        provides=frozenset({"weights-in-passes"}),
        lazy_load=True,
    )

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.tensor_parallel_size, kind=AxisKind.MODEL),)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Shards attention, feed-forward and vocabulary.

        Raises:
            UnsupportedModelError: if no plan covers the model.
            LayoutError: if its heads or features cannot be sharded over that many ranks. The model is unchanged then.
        """
        degree = run.mesh.degree(AXIS)
        if degree == 1:
            return
        from neuron_accel.contract.families import Architecture
        from neuron_accel.strategies.tensor_parallel.rewrite import rewrite
        from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards

        architecture = Architecture.planned(model.module, self.tensor_parallel_plan, degree)
        # A forward that was replaced on the object (a fused head and loss) may read the head's weight directly.
        replaced = any("forward" in vars(module) for module in (model.module, architecture.owner))
        embeddings = self.parallelize_embeddings and not replaced
        rewrite(architecture, plan_shards(architecture, degree, parallelize_embeddings=embeddings), model, run)

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Notes the gradients of parameters that each rank holds in full, which the ranks compare at times. On lazy
        devices their norm is part of the graph of the step."""
        yield
        if run.mesh.degree(AXIS) == 1 or not run.backend.has_values:
            return
        copies = [p for group in optimizer.param_groups for p in group["params"] if _is_copy(p, run)]
        of_shards = getattr(optimizer, "gradient_parts", None)
        parts = gradient_parts(copies, run) if of_shards is None else of_shards(copies)
        unsharded = [GradientPart(part.tensor, ()) for part in parts if part.tensor is not None]
        # Over no axis: nothing is sent.
        run.shared_inputs.add_gradients(global_norm(unsharded, run) if unsharded else None)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Shows what the sharded modules communicate."""
        from neuron_accel.strategies.tensor_parallel.traffic import explain_traffic

        return explain_traffic(model.module, tokens)

    @staticmethod
    def supports(config: Any, *, tensor_parallel_size: int = 2, parallelize_embeddings: bool = True) -> SupportReport:
        """Returns whether the causal language model of a transformers configuration can be sharded, and how much of it.
        No weights are created or read.

        Args:
            config: the configuration of the model.
            tensor_parallel_size: the degree to check.
            parallelize_embeddings: as in the plugin.
        """
        from neuron_accel.contract.families import Architecture, model_without_weights
        from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards, sizes_of
        from neuron_accel.strategies.tensor_parallel.support import SupportReport

        model = model_without_weights(config)
        asked: dict[str, Any] = {"model_type": config.model_type, "tensor_parallel_size": tensor_parallel_size}
        try:
            architecture = Architecture.of(model)
            styles = plan_shards(architecture, tensor_parallel_size, parallelize_embeddings=parallelize_embeddings)
        except NeuronAccelError as error:
            return SupportReport(**asked, supported=False, reason=str(error))
        sizes: dict[str, Any] = {**sizes_of(model, styles)}
        return SupportReport(**asked, supported=True, sequence=architecture.plan.sequence, **sizes)


def _is_copy(parameter: torch.Tensor, run: Run) -> bool:
    record = run.find_parameter(parameter)
    return record is not None and not record.layout.axes and parameter.numel() <= _SMALL

"""Activations between tensor-parallel regions divided along the sequence.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuron_accel.engine.errors import PlanError
from neuron_accel.engine.plugin import Phase, PluginSpec, StrategyPlugin

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.parameters import ParameterMap
    from neuron_accel.engine.run import Run


@dataclass(frozen=True, kw_only=True)
class SequenceParallelPlugin(StrategyPlugin):
    """Divides what lies between attention and feed-forward layers (residual stream, norms, dropout) along the sequence,
    over the ranks of the tensor-parallel axis.

    From the first block's input to the final norm each rank has a share of the positions, so that activations take
    1 / degree of the memory there. Positions, rotary tables and masks are computed on whole sequences. A length that
    does not divide is padded inside. Batch-first models: dim 1 is the sequence.
    """

    spec = PluginSpec(name="sequence_parallel", phase=Phase.ACTIVATIONS, requires=frozenset({"axis:tp"}))

    def transform_model(self, model: torch.nn.Module, run: Run, parameters: ParameterMap) -> torch.nn.Module:
        """Makes the activations of ``model``, which tensor parallelism has divided, flow in shares of the sequence.

        Raises:
            PlanError: if nothing has divided the model.
            UnsupportedModelError: if no plan covers it.
        """
        from neuron_accel.strategies.tensor_parallel.boundary import boundary_of
        from neuron_accel.strategies.tensor_parallel.sequence import divide_sequence

        boundary = boundary_of(model)
        if boundary is None or boundary.architecture is None:
            raise PlanError(
                f"Sequence parallelism found no tensor-parallel region in {type(model).__name__}.",
                where="plugin sequence_parallel",
                why="it divides what lies between such regions",
                fix="use it together with ModelParallelismPlugin(tensor_parallel_size=...)",
            )
        divide_sequence(boundary.architecture, boundary, parameters)
        return model

"""Communication: gradients travel as bfloat16, whatever plugin reduces them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import ClassVar

import torch

from neuron_accel.contract import Claim, Phase, PluginSpec, PreparedModel, Run, StrategyPlugin
from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class BF16Gradients(StrategyPlugin):
    """Sends gradients in bfloat16 and sums them there: half of the bytes of float32, with 8 instead of 24 bits.

    Gradients are computed, accumulated over micro-batches, clipped and used as ever.

    Args:
        keep: patterns of the names of parameters whose gradients are sent as they are, such as ``"*norm*"``.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="bf16_gradients",
        api_version=4,
        phase=Phase.PRECISION,
        refines=frozenset({Claim.GRADIENT_REDUCTION}),  # the owner, data parallelism or ZeRO-1, does what records say
        provides=frozenset({"gathered-weights"}),  # works with fully sharded weights: it reads none
    )

    keep: tuple[str, ...] = ()

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        for pattern in self.keep:
            if not any(fnmatch(name, pattern) for record in model.parameters for name in record.names):
                raise ConfigurationError(
                    f"No parameter is called {pattern!r}.",
                    where="plugin 'bf16_gradients', option 'keep'",
                    fix="compare it with the names in model.named_parameters()",
                )
        for record in model.parameters:
            if not any(fnmatch(name, pattern) for name in record.names for pattern in self.keep):
                record.reduce_dtype = torch.bfloat16

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        mine = [record for record in model.parameters if record.reduce_dtype is torch.bfloat16]
        return f"the gradients of {len(mine)} of {len(model.parameters)} parameters are sent in bfloat16"

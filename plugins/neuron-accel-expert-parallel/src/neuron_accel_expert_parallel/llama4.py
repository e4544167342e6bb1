# SPDX-License-Identifier: Apache-2.0
"""Llama 4's mixtures in the form of others: experts that are called with the tokens that chose them.

In transformers a mixture of Llama 4 calls its experts with a copy of all tokens for every expert, multiplied by the
scores of the router, which are zero where a token did not choose the expert. Experts have no biases, so that they
return zeros for these, and gradients are zeros, too. Here only the chosen copies exist; everything else is the same.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe


class ChosenExperts(Llama4TextExperts):
    """The experts, called as those of other families: see ``families``. They say what they are as transformers'
    ``use_experts_implementation`` does."""

    has_gate, has_bias, is_transposed = True, False, True

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The weighted sums ``[N, H]`` of the experts ``[N, k]`` of tokens ``[N, H]``."""
        choices = experts.shape[1]
        by_expert = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        rows = tokens[by_expert // choices].split(counts)
        up, down = self.gate_up_proj.unbind(), self.down_proj.unbind()
        results = [self._apply_gate(rows[i] @ up[i]) @ down[i] for i in range(self.num_experts)]
        weighted = torch.cat(results) * weights.flatten()[by_expert, None]
        return torch.zeros_like(tokens).index_add(0, by_expert // choices, weighted)


class ChosenMixture(Llama4TextMoe):
    """The mixture, which multiplies tokens by the scores of the experts that they chose."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        inputs = (hidden[:, None] * weights[..., None]).flatten(0, 1)  # [N * k, H]
        routed = self.experts(inputs, chosen.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        return self.shared_expert(hidden) + routed.view(-1, self.top_k, self.hidden_dim).sum(1), logits


def call_with_chosen_tokens(model: nn.Module) -> None:
    """Lets every mixture of Llama 4 in ``model`` call its experts with the tokens that chose them."""
    for module in model.modules():
        if type(module) is Llama4TextMoe and type(module.experts) is Llama4TextExperts:
            module.__class__, module.experts.__class__ = ChosenMixture, ChosenExperts

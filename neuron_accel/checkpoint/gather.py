"""Full tensors from shards: what leaves a run has the names and shapes of the original model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.engine.layout import Layout
    from neuron_accel.engine.run import PreparedModel, Run


def full_tensor(local: torch.Tensor, layout: Layout, run: Run) -> torch.Tensor:
    """The whole of a tensor of which every rank holds the shard that ``layout`` says; collective over the cut axes.

    Returns:
        a tensor of ``layout.shape`` on the device of ``local``: ``local`` itself where nothing is cut.
    """
    if not layout.cuts:
        return local
    group = run.group(*(cut.axis for cut in layout.cuts))
    shards = run.backend.all_gather(local.detach().contiguous().unsqueeze(0), group)
    full = torch.empty(layout.shape, dtype=local.dtype, device=local.device)
    for rank, shard in zip(group.ranks, shards, strict=True):
        layout.write(shard, full, run.mesh.coordinates(rank))
    return full


def full_state_dict(model: PreparedModel, run: Run) -> dict[str, torch.Tensor]:
    """The state dict of the original model: original names and shapes; tied weights stay one tensor. Collective.

    Returns:
        On the main process all tensors, on the CPU, in memory of their own. On the others the same where nothing is
        cut, else an empty dict: no rank but one holds the full model, and that one a tensor at a time beside it.
    """
    module = getattr(model.module, "_orig_mod", model.module)
    cut = any(record.layout.cuts for record in model.parameters)
    keep = run.backend.rank == 0 or not cut
    result: dict[str, torch.Tensor] = {}
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            if keep:
                result[name] = value
            continue
        if value not in copies:
            full = value.detach()
            if name in model.parameters:
                full = full_tensor(full, model.parameters[name].layout, run)
            copies[value] = full.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            result[name] = copies[value]
    return result


def full_gradients(model: PreparedModel, run: Run) -> dict[str, torch.Tensor]:
    """The reduced gradients by FQN, in the shapes of the original model, on every rank's CPU. Collective.

    Meant for tests and for looking: it holds all gradients at once. Parameters without a gradient are left out.
    """
    from neuron_accel.engine.plugin import Claim

    owner = run.owner(Claim.GRADIENT_REDUCTION)
    result = {}
    for record in model.parameters:
        if record.current is None or not record.current.requires_grad:
            continue
        gradient = owner.full_gradient(record.current, run) if owner else record.current.grad
        if gradient is not None:
            result[record.fqn] = full_tensor(gradient, record.layout, run).to("cpu", copy=True)
    return result

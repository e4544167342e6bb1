"""Parameters that train and that no optimizer holds: they would receive gradients for ever and never change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from neuron_accel.engine.errors import ParameterError

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.run import Run


def check_every_parameter_is_held(
    optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer], run: Run
) -> None:
    """Checks the models that ``optimizer`` trains, at its first step, when every optimizer of the run is known.

    Frozen parameters (``requires_grad=False``) need no optimizer, and models of which an optimizer holds nothing are
    nobody's business.

    Raises:
        ParameterError: if one of these models has a trainable parameter that no prepared optimizer holds.
    """
    held = {p for each in (optimizer, *others) for group in each.param_groups for p in group["params"]}
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    for model in run.models:
        records = [r for r in model.parameters if r.current is not None]
        if not any(r.current in mine for r in records):
            continue
        orphans = [r.fqn for r in records if r.current.requires_grad and r.current not in held]
        if orphans:
            shown = ", ".join(orphans[:3]) + (f" and {len(orphans) - 3} more" if len(orphans) > 3 else "")
            raise ParameterError(
                f"No optimizer holds {shown}.",
                where=f"{type(model.original).__name__}, first step of an optimizer",
                why="they require gradients, which would be computed and sent at every step and never used",
                fix="give them to an optimizer, prepare that optimizer before the first step, or freeze them with "
                "requires_grad_(False)",
            )

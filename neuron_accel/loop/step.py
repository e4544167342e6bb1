# SPDX-License-Identifier: Apache-2.0
"""A training step: backward passes of its micro-batches, averaging over items (tokens), and gradient clipping.

``NeuronAccelerator.backward``, ``accumulate`` and ``clip_grad_norm_`` call :class:`Step`. The optimizer's own step is
:meth:`neuron_accel.loop.wrappers.PreparedOptimizer.step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from accelerate.state import GradientState
    from torch import nn

    from neuron_accel.engine.runtime.run import Run


class Step:
    """The training step that the loop is in.

    Args:
        run: the run.
        gradient_state: Accelerate's, which has the active loader and whether this micro-batch is the last of the step.
    """

    def __init__(self, run: Run, gradient_state: GradientState) -> None:
        self._run, self._gradient_state = run, gradient_state
        self.items, self.clipping = ItemCount(run), Clipping(run)
        self._in_micro_batch, self._accumulating = False, 0

    @property
    def is_accumulating(self) -> bool:
        """Whether the loop is inside ``accumulate``."""
        return self._accumulating > 0

    def backward(
        self,
        loss: torch.Tensor,
        num_items: int | torch.Tensor | None,
        differentiate: Callable[[torch.Tensor], None],
        accumulation_steps: int,
        options: dict[str, Any],
    ) -> None:
        """Runs the backward pass of a micro-batch and, on the last one, the reduction of gradients.

        Args:
            loss: the loss of this micro-batch on this rank, 0-dim.
            num_items: see :meth:`NeuronAccelerator.backward`.
            differentiate: runs the backward pass if no plugin owns it; divides the loss by ``accumulation_steps``.
            accumulation_steps: number of micro-batches in a step.
            options: arguments of ``torch.Tensor.backward``, for a plugin that owns the backward pass.

        Raises:
            UsageError: if ``num_items`` is given and a plugin owns the backward pass, or the loss is a sum.
        """
        if num_items is not None:
            check_is_mean(loss)
        self._run.num_items = num_items
        try:
            with self._run.events.open("backward", "part", part="backward"):
                self._backward(loss, num_items, differentiate, accumulation_steps, options)
        finally:
            self._run.num_items = None
        self._in_micro_batch = not self._gradient_state.sync_gradients

    def _backward(
        self,
        loss: torch.Tensor,
        num_items: int | torch.Tensor | None,
        differentiate: Callable[[torch.Tensor], None],
        accumulation_steps: int,
        options: dict[str, Any],
    ) -> None:
        run = self._run
        owner = run.owner(Claim.BACKWARD)
        with run.hooks.around("backward_pass", loss, run) as loss:
            if owner is None:
                loss = self._weighted(loss, num_items, accumulation_steps)
                lazy = [optimizer.lazy for optimizer in run.optimizers if optimizer.lazy is not None]
                for each in lazy:
                    each.before_backward()
                with run.driving_backward(loss):
                    differentiate(loss)
                for each in lazy:
                    each.after_backward()
            else:
                if num_items is not None:
                    raise UsageError(
                        "`num_items` is not possible here.",
                        where=f"plugin {owner.spec.name!r}",
                        why="it runs the backward pass before the loss reaches `backward`",
                    )
                with run.driving_backward():
                    owner.backward(loss / accumulation_steps, run, **options)  # type: ignore[attr-defined]  # version 3

    def _weighted(self, loss: torch.Tensor, num_items: int | torch.Tensor | None, steps: int) -> torch.Tensor:
        """The loss weighted by its number of items, and by the share of the batch's rows that are not repeats."""
        share = getattr(self._gradient_state.active_dataloader, "row_share", None)
        if num_items is None:
            if self._run.data_parallel_size > 1 and loss.device.type == "cpu" and bool(loss.isnan()):
                warnings.warn(
                    "The loss of this data-parallel rank is NaN. If all of its labels are masked (-100), gradients are "
                    "averaged as if it had samples: accelerator.backward(loss, num_items=(labels != -100).sum()) "
                    "averages over the labels of all ranks.",
                    stacklevel=5,
                )
            return loss if share is None else loss * share.reshape(())
        if share is not None:  # a rank whose rows are all repeats has no items
            num_items = self.items.on_device(num_items) * (share > 0).reshape(())
        return loss * (self.items.add(num_items) * steps)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A context manager for ``accumulate``: all that is done in it belongs to one micro-batch."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1
        self.finish_micro_batch()

    def finish_micro_batch(self, *_: Any) -> None:
        """Executes the graph of a micro-batch that is not the last of its step.

        Called at the end of ``accumulate``, or before the next forward pass if the loop does not use it, so that a step
        of any number of micro-batches uses one graph.
        """
        if self._in_micro_batch and not self._accumulating:
            self._in_micro_batch = False
            self._run.backend.step_boundary()


# ---- Averaging a loss over items (tokens) of all ranks and micro-batches ---------------------------------------------
# A mean of means is not the mean if micro-batches have different numbers of tokens. So each loss, a mean, is multiplied
# by its number of items, and the complete gradients of a step are divided by the number of items of all its ranks and
# micro-batches.
class ItemCount:
    """Counts the items that the gradients of the current step are sums over.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._count: torch.Tensor | None = None
        self._action = run.join.register("the average over items", self._divide, flushes=True)

    def add(self, items: int | torch.Tensor) -> torch.Tensor:
        """Counts the items of a micro-batch; returns their number, 0-dim int64 on the run's device."""
        count = self.on_device(items).to(torch.int64)
        self._count = count if self._count is None else self._count + count
        return count

    def on_device(self, items: int | torch.Tensor) -> torch.Tensor:
        """A number of items, 0-dim on the run's device. It is not a number where it gets there: torch_xla makes 0 and 1
        constants of the graph, which ranks with other numbers would not have."""
        return torch.as_tensor(items).detach().reshape(1).to(self._run.device).reshape(())

    def divide_gradients(self) -> None:
        """Divides the accumulated gradients by the number of items, once, if losses were given with items.
        Collective."""
        if self._count is not None:
            if self._action.announced:
                self._action()
            self._divide()

    def _divide(self) -> None:
        run = self._run
        group = run.group(*run.mesh.gradient_axes)
        mine = torch.zeros((), dtype=torch.int64, device=run.device) if self._count is None else self._count
        self._count = None
        total = run.backend.all_reduce(mine.clone(), group)
        parameters = [r.current for m in run.models for r in m.parameters if r.current is not None]
        # Gradients are averages over the group. Without any items, gradients are zero.
        run.gradients.scale(parameters, group.size / total.clamp(min=1).to(torch.float32))


def check_is_mean(loss: torch.Tensor) -> None:
    """Checks that a loss is not a sum over items, as far as the last operations of its computation tell: a loss
    function of torch with ``reduction="sum"``, or with ``reduction="none"`` and ``sum()``.

    Raises:
        UsageError: if it is a sum.
    """
    node, is_summed = loss.grad_fn, False
    while node is not None and node.name() in _KEEPS_SUMS:
        is_summed |= node.name().startswith("Sum")
        node = node.next_functions[0][0]
    reduction = getattr(node, "_saved_reduction", None)  # as torch numbers them: 0 none, 1 mean, 2 sum
    if reduction == 2 or (reduction == 0 and is_summed):
        raise UsageError(
            "The loss is a sum over items.",
            where="accelerator.backward(loss, num_items=...)",
            why="it is multiplied by num_items, which a mean over these items needs",
            fix="give the mean loss over the items, as with reduction='mean', or leave num_items out",
        )


_KEEPS_SUMS = ("SumBackward0", "SumBackward1", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0")
"""Operations of autograd after which a sum is still a sum."""


# ---- Gradient clipping, together with ranks that have run out of data ------------------------------------------------
class Clipping:
    """Clips gradients, also on ranks that have run out of data.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clip_norm = run.join.register("clipping to a norm", self._norm_along, flushes=True)
        self._clip_value = run.join.register("clipping values", self._value_along, flushes=True)

    def norm(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """See :meth:`Gradients.clip_norm`."""
        if self._clip_norm.announced:
            self._clip_norm(self._positions(parameters), max_norm, norm_type)
        with self._run.events.open("clip_grad_norm_", "call", part="optimizer"):
            return self._to_norm(parameters, max_norm, norm_type)

    def value(self, parameters: list[nn.Parameter], limit: float) -> None:
        """See :meth:`Gradients.clip_value`."""
        if self._clip_value.announced:
            self._clip_value(self._positions(parameters), limit)
        with self._run.events.open("clip_grad_value_", "call", part="optimizer"):
            self._run.gradients.clip_value(parameters, limit)

    def _to_norm(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        self._run.norm = self._run.gradients.clip_norm(parameters, max_norm, norm_type)
        return self._run.norm

    def _norm_along(self, positions: list[int], max_norm: float, norm_type: float) -> None:
        self._to_norm(self._at(positions), max_norm, norm_type)

    def _value_along(self, positions: list[int], limit: float) -> None:
        self._run.gradients.clip_value(self._at(positions), limit)

    def _all(self) -> list[nn.Parameter | None]:
        return [record.current for model in self._run.models for record in model.parameters]

    def _positions(self, parameters: list[nn.Parameter]) -> list[int]:
        wanted = set(parameters)
        return [position for position, parameter in enumerate(self._all()) if parameter in wanted]

    def _at(self, positions: list[int]) -> list[nn.Parameter]:
        parameters = self._all()
        return [p for p in (parameters[position] for position in positions) if p is not None]

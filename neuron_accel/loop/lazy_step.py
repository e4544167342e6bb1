# SPDX-License-Identifier: Apache-2.0
"""What an optimizer needs beside its step on a device that compiles: every micro-batch and every step has one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from neuron_accel.engine.optim.lazy_hyperparameters import as_device_data

if TYPE_CHECKING:
    from accelerate.state import GradientState
    from torch import nn

    from neuron_accel.backends.base import Backend

WATCHED = 2
"""Updates in which reads are looked for. The first one creates state and the second uses it; an optimizer that reads no
values in these is not watched any more, because watching costs host time for each call."""


class LazyStep:
    """The steps of one optimizer on a lazy device.

    *Gradients.* In the first micro-batch of a step a gradient is created and in the others it is added to: two graphs,
    and a third for a step of a single micro-batch at the end of an epoch. With zeros as initial gradients every
    micro-batch adds to a gradient, and all use one graph. The zeros for a step are created in the graph of the step
    before, which costs no execution; only those for the first step are copied to the device.

    *Hyper-parameters* that change are data of the graph (:func:`as_device_data`).

    *Reads.* A value that an optimizer reads, as Adafactor reads norms and LBFGS losses, executes what it is computed
    from, reduction of gradients included, as a graph of this rank by itself. The same graph is to run on every rank at
    the same point, and ranks that are threads of one process meet in its collectives only if one of them compiles it
    for all. So what was collected is executed first.

    Args:
        optimizer: the optimizer.
        backend: of the run.
        gradient_state: Accelerate's, which has the number of micro-batches in a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, gradient_state: GradientState) -> None:
        self._optimizer, self._backend, self._gradient_state = optimizer, backend, gradient_state
        self._zeros: dict[nn.Parameter, torch.Tensor] = {}
        self._arrived: set[torch.Tensor] = set()
        self._watched: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._updates, self._reads = 0, False

    @property
    def _accumulates(self) -> bool:
        return self._gradient_state.num_steps > 1

    def before_backward(self) -> None:
        """Creates zeros for parameters without a gradient that have not had zeros yet."""
        for parameter in (p for group in self._optimizer.param_groups if self._accumulates for p in group["params"]):
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived.add)
                if parameter.grad is None:
                    parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(parameter.device)

    def after_backward(self) -> None:
        """Sets the gradient of a parameter that was not used to None, instead of zeros."""
        for parameter in self._watched:
            if parameter not in self._arrived:
                parameter.grad = None

    @property
    def watches(self) -> bool:
        """Whether reads are looked for in the next update."""
        return self._updates < WATCHED or self._reads

    @contextmanager
    def update(self, *, evaluates: bool) -> Iterator[None]:
        """The context of the optimizer's own step; ``evaluates``: with a closure."""
        watch = _ExecutesFirst(self) if self.watches else nullcontext()
        self._updates += 1
        with as_device_data(self._optimizer, self._backend, evaluates=evaluates), watch:
            yield

    def execute(self, tensor: torch.Tensor) -> None:
        """Before ``tensor`` is read in an update."""
        self._reads = True
        if self._backend.collects([tensor]):
            self._backend.step_boundary()

    def before_boundary(self) -> None:
        """Creates the zeros for the next step, before the graph of this one is executed."""
        if self._accumulates:
            self._zeros = {p: torch.zeros_like(p, requires_grad=False) for p in self._watched}

    def after_zero_grad(self) -> None:
        """Sets the gradients to the zeros that were created in the step before."""
        for parameter, zeros in self._zeros.items():
            parameter.grad = zeros
        self._zeros = {}
        self._arrived.clear()

    def close(self) -> None:
        """Removes the hooks on the parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()


class _ExecutesFirst(TorchFunctionMode):
    """Looks for reads among the calls inside. (A mode below autograd would see them all, but torch_xla traces other
    graphs under it.)

    Args:
        step: receives each tensor that is about to be read.
    """

    _READS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
    )
    _FACTORS = ("alpha", "beta", "value")  # numbers to an operator, which reads them if they are tensors

    def __init__(self, step: LazyStep) -> None:
        super().__init__()
        self._step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = args[:1] if func in self._READS else [kwargs[name] for name in self._FACTORS if name in kwargs]
        for tensor in read:
            if isinstance(tensor, torch.Tensor):
                self._step.execute(tensor)
        return func(*args, **kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Deferred values: logging, printing and progress bars without a host read in the middle of a step.

On a lazy device, which collects a step in one graph, reading a value would execute the part of the graph that has been
recorded, and compile two graphs instead of one. Callers therefore pass tensors, which are read when the step that
computes them has been executed. On other devices they are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


def call_after_step(values: Any, backend: Backend, action: Callable[[Any], None], *, here: bool = True) -> None:
    """Calls ``action`` with the current ``values``, whose tensors are detached and moved to the host.

    Args:
        values: any nesting of lists, tuples and dicts; values that are not tensors are passed on unchanged.
        backend: of the run.
        action: called at once, or on a lazy device at the next step boundary, in the order of the calls.
        here: whether to call ``action`` on this rank. Every rank has to call this function, also one where it is False,
            so that all ranks record the same graph.
    """
    collects = backend.collects([leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)])
    # Cloned, since a tensor such as a running total may change in place before the step ends.
    if collects:
        kept = _of_tensors(values, lambda t: t.detach().clone())
    elif here:
        kept = _of_tensors(values, lambda t: t.detach().cpu())
    else:
        return
    backend.after_step(lambda: action(_of_tensors(kept, torch.Tensor.cpu)) if here else None, reads_graph=collects)


def numbers(values: Any) -> Any:
    """Returns ``values`` with tensors of one element replaced by Python numbers, which trackers require."""
    return _of_tensors(values, lambda t: t.item() if t.numel() == 1 else t)


def progress_bar(backend: Backend, shown: bool, iterable: Iterable[Any] | None, options: dict[str, Any]) -> Any:
    """Returns a tqdm progress bar whose ``set_postfix`` accepts tensors.

    Args:
        backend: of the run.
        shown: whether the bar is shown on this rank.
        iterable: what to iterate over, or None.
        options: arguments of ``tqdm``.
    """
    from tqdm.auto import tqdm

    class Progress(tqdm):
        def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
            def show(now: dict[str, Any]) -> None:
                super(Progress, self).set_postfix(numbers(now), refresh)

            call_after_step({**dict(ordered_dict or {}), **values}, backend, show, here=shown)

    return Progress(iterable, **{"disable": not shown, **options})


def _of_tensors(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)

"""Looking at values while training: logging, printing, progress bars.

On a device that collects a step in one graph, reading a value in the middle of it would execute the half that is there,
and compile two graphs instead of one. So code that needs values passes tensors, and what is done with them is
done when the step that computes them has been executed. On other devices it is done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


def look(values: Any, backend: Backend, action: Callable[[Any], None], *, here: bool = True) -> None:
    """Calls ``action`` with ``values`` as they are now, their tensors on the host, detached.

    Args:
        values: any nesting of lists, tuples and dicts; other values are passed on.
        action: called at once, or at the next step boundary, in the order of the calls.
        here: whether this rank acts. Those that do not keep the same values, so that all have one graph.
    """
    collects = backend.collects([leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)])
    # What is changed in place before the step ends, a running total, is seen as it was.
    if collects:
        kept = _of_tensors(values, lambda t: t.detach().clone())
    elif here:
        kept = _of_tensors(values, lambda t: t.detach().cpu())
    else:
        return
    backend.after_step(lambda: action(_of_tensors(kept, torch.Tensor.cpu)) if here else None, reads_graph=collects)


def numbers(values: Any) -> Any:
    """``values`` with numbers in place of tensors of one element, as trackers want them."""
    return _of_tensors(values, lambda t: t.item() if t.numel() == 1 else t)


def progress_bar(backend: Backend, shown: bool, iterable: Iterable[Any] | None, options: dict[str, Any]) -> Any:
    """A bar of tqdm whose postfixes may be tensors.

    Args:
        shown: whether it is shown on this rank.
        options: of tqdm.
    """
    from tqdm.auto import tqdm

    class Progress(tqdm):
        def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
            def show(now: dict[str, Any]) -> None:
                super(Progress, self).set_postfix(numbers(now), refresh)

            look({**dict(ordered_dict or {}), **values}, backend, show, here=shown)

    return Progress(iterable, **{"disable": not shown, **options})


def _of_tensors(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)

# SPDX-License-Identifier: Apache-2.0
"""Batches of a fixed shape, for devices that compile a graph for every shape.

The last batch of an epoch may be shorter than the others, or be padded with samples from the beginning so that every
rank has one. Here it is padded to the number of rows of the others, and the padding does not count: integer labels of
the padding rows are set to -100, the attention to them is masked, and the loss of a rank is weighted by its fraction of
the real rows. If the loss is a mean over samples, or is passed to ``accelerator.backward`` with its ``num_items``, the
gradient of the last step is that of the real samples alone, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import send_to_device
from torch.utils._pytree import tree_leaves, tree_map

from neuron_accel.data.mixing import Mixin, as_mixed

IGNORED_LABEL = -100  # default ignore_index of torch's cross entropy, which transformers' losses use


def fill_rows(batch: Any, rows: int) -> Any:
    """Pads a batch to ``rows`` rows by repeating rows from its beginning.

    Args:
        batch: a nested structure. Tensors whose first dim is the batch dim are padded; other values are not changed.
        rows: number of rows of the result, at least that of ``batch``.
    """
    count = rows_of(batch)
    if count is None or count >= rows or count == 0:
        return batch
    index = torch.arange(rows) % count

    def fill(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
        return leaf.index_select(0, index.to(leaf.device)) if is_batched else leaf

    return tree_map(fill, batch)


def mask_rows(batch: Any, real: int) -> tuple[Any, bool]:
    """Masks the rows of a batch from ``real`` on. Returns the batch, and whether it has labels that could be masked.

    Integer tensors named ``labels``, ``label`` or ``*_labels`` are set to -100 in these rows. An ``attention_mask`` is
    set to 0 there except at the first position, because a softmax over no position is NaN.
    """
    if not isinstance(batch, Mapping):
        return batch, False
    masked = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.is_floating_point():
            continue
        if name in ("labels", "label") or name.endswith("_labels"):
            masked[name] = value.clone()
            masked[name][real:] = IGNORED_LABEL
    if not masked:
        return batch, False
    attention = batch.get("attention_mask")
    if isinstance(attention, torch.Tensor) and attention.dim() == 2:
        masked["attention_mask"] = attention.clone()
        masked["attention_mask"][real:, 1:] = 0
    kind: Any = type(batch)
    result = kind(batch) if not isinstance(batch, dict) else batch.copy()
    result.update(masked)
    return result, True


def rows_of(batch: Any) -> int | None:
    """Returns the size of the first dim of the first tensor that has dims, or None if there is none."""
    return next((t.shape[0] for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), None)


class _FixedRows(Mixin):
    """Pads batches to a fixed number of rows and moves them to the device one batch ahead. Mixed into Accelerate's
    ``DataLoaderShard``.

    Attributes:
        rows: number of rows of each batch.
        place: data-parallel rank, and number of data-parallel ranks.
        row_share: while the loader is iterated, a float32 tensor of shape ``[1]`` on its device, the factor of the
            current batch's loss; None if all batches are full.
    """

    prefix = "FixedRows"
    rows: int
    place: tuple[int, int]
    row_share: torch.Tensor | None = None

    def __iter__(self: Any) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        rows, ranks = self.rows, self.place[1]
        # The padding of a stream of unknown length, added by IterableDatasetShard, cannot be distinguished from
        # samples.
        ragged = 0 < self.remainder < rows * ranks and not isinstance(self.dataset, IterableDatasetShard)
        full = self._share(1.0) if ragged and ranks > 1 else None
        ahead: list[tuple[Any, torch.Tensor | None, Any]] = []
        index = 0
        try:
            for batch, is_last, state in self._with_last():
                real, share = rows_of(batch) or rows, full
                batch = fill_rows(batch, rows)
                if ragged and is_last:
                    real = min(real, max(self.remainder - self.place[0] * rows, 0))
                elif is_last and real < rows and self.remainder < 0:
                    self.remainder = real * ranks
                if real < rows or (ragged and is_last):
                    batch, share = self._masked(batch, real, full)
                if self.device is not None:
                    batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
                ahead.append((batch, share, state))
                if len(ahead) == 2:
                    yield from self._hand_out(*ahead.pop(0), index)
                    index += 1
            self.end_of_dataloader = bool(ahead)
            for given in ahead:
                yield from self._hand_out(*given, index)
            if ahead:
                self.iteration += 1
        finally:
            self.row_share = None
            self.end()

    def _hand_out(self: Any, batch: Any, share: torch.Tensor | None, state: Any, index: int) -> Iterator[Any]:
        self.row_share = share
        if state is not None:
            self.dl_state_dict = {**state, "_iterator_finished": self.end_of_dataloader}
        if index >= self.skip_batches:
            yield batch

    def _with_last(self: Any) -> Iterator[tuple[Any, bool, Any]]:
        """Yields batches on the host, whether each is the last, and the state of a stateful loader after it."""
        batches = iter(self.base_dataloader)
        nothing = object()
        current = next(batches, nothing)
        while current is not nothing:
            self._update_state_dict()
            state = self.dl_state_dict if self.use_stateful_dataloader else None
            following = next(batches, nothing)
            yield current, following is nothing, state
            current = following

    def _masked(self: Any, batch: Any, real: int, full: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
        # A rank without a real row keeps its labels: a mean over no sample is NaN, which stays NaN when multiplied by
        # zero.
        masked, possible = mask_rows(batch, real)
        share = self._share(real * self.place[1] / self.remainder) if full is not None and possible else full
        return (masked if real else batch), share

    def _share(self: Any, value: float) -> torch.Tensor:
        share = torch.tensor([value])  # without dims, torch_xla would make 0 and 1 constants of the graph
        return share if self.device is None else share.to(self.device)


def with_fixed_rows(loader: Any, rows: int, place: tuple[int, int]) -> Any:
    """Returns a copy of ``loader``, a ``DataLoaderShard`` of Accelerate, whose batches all have ``rows`` rows.

    Args:
        place: data-parallel rank, and number of data-parallel ranks.
    """
    result = as_mixed(loader, _FixedRows)
    result.rows, result.place = rows, place
    return result


def has_fixed_rows(loader: Any) -> bool:
    """Returns whether ``loader`` was returned by :func:`with_fixed_rows`."""
    return issubclass(type(loader), _FixedRows)

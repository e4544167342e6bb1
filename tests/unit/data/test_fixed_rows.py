"""Loaders whose batches all have one shape: the rows that fill up the last batch do not contribute to the loss."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import prepare_data_loader

from neuron_accel.data.fixed_rows import fill_rows, mask_rows, with_fixed_rows


def rows(count):
    return [
        {"ids": torch.tensor([i]), "labels": torch.tensor([i, i]), "attention_mask": torch.ones(2)}
        for i in range(count)
    ]


def loader_on(rank, ranks, count, size=2, **options):
    loader = torch.utils.data.DataLoader(options.pop("data", rows(count)), batch_size=size, **options)
    prepared = prepare_data_loader(
        loader, torch.device("cpu"), num_processes=ranks, process_index=rank, put_on_device=True, dispatch_batches=False
    )
    return with_fixed_rows(prepared, size, (rank, ranks))


def epoch(loader):
    """Returns for each batch its real samples, its number of rows, the weight of its loss, and whether it is the
    last."""
    seen = []
    for batch in loader:
        real = [int(i) for i, label in zip(batch["ids"], batch["labels"], strict=True) if label[0] >= 0]
        share = None if loader.row_share is None else loader.row_share.item()
        seen.append((real, len(batch["ids"]), share, loader.end_of_dataloader))
    return seen


def test_a_short_batch_is_filled_up_and_masked():
    loader = loader_on(0, 1, 5)
    assert epoch(loader) == [([0, 1], 2, None, False), ([2, 3], 2, None, False), ([4], 2, None, True)]
    assert epoch(loader)[-1] == ([4], 2, None, True)
    *_, last = loader
    assert last["ids"].tolist() == [[4], [4]]
    assert last["labels"].tolist() == [[4, 4], [-100, -100]]
    assert last["attention_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("count", [8, 9, 10, 11])
def test_loss_weights_of_all_ranks_count_each_real_row_once(count):
    found = [epoch(loader_on(rank, 2, count)) for rank in range(2)]
    batches = -(-count // 4)
    assert [len(batches_) for batches_ in found] == [batches] * 2
    real = count - 4 * (batches - 1)
    weighed = {}
    for rank in range(2):
        for _, length, share, _ in found[rank]:
            assert length == 2
            if real == 4:
                assert share is None
        *full, (samples, _, share, _) = found[rank]
        assert {s for _, _, s, _ in full} <= {None if real == 4 else 1.0}
        if real != 4:
            mine = min(max(real - 2 * rank, 0), 2)
            assert share == pytest.approx(2 * mine / real)
            # a rank without a real row has labels, or its loss would be a mean over nothing
            assert len(samples) == (mine or 2)
            weighed.update({} if not mine else dict.fromkeys(samples, share / mine))
    if real != 4:
        assert len(weighed) == real
        assert len(set(weighed.values())) == 1, "every real sample weighs the same"
        everything = {s for b in found for samples, _, share, _ in b if share for s in samples}
        assert everything == set(range(count))


def test_what_cannot_be_masked_counts_as_it_does_under_accelerate():
    data = [(torch.tensor([float(i)]), torch.tensor(float(i))) for i in range(5)]
    loader = loader_on(1, 2, 5, data=data)
    shares = [loader.row_share.item() for _ in loader]
    assert shares == [1.0, 1.0]
    batch, possible = mask_rows({"labels": torch.ones(3)}, 1)
    assert (batch["labels"].tolist(), possible) == ([1, 1, 1], False)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from rows(3)


def test_the_end_of_a_stream_is_masked_and_known_to_metrics():
    loader = loader_on(0, 1, 3, data=Stream())
    for batch in loader:
        last, remainder = batch, loader.remainder
    assert remainder == 1
    assert last["labels"].tolist() == [[2, 2], [-100, -100]]


class Sent:
    """A batch that records when it is moved to its device."""

    def __init__(self, index, log):
        self.index, self.log = index, log

    def to(self, device, **options):
        self.log.append(f"sent {self.index}")
        return self


def test_the_next_batch_is_on_the_device_before_this_one_is_given_out():
    log = []
    data = torch.utils.data.DataLoader(range(4), collate_fn=lambda items: Sent(items[0], log))
    prepared = prepare_data_loader(data, torch.device("cpu"), num_processes=1, process_index=0, put_on_device=True)
    for batch in with_fixed_rows(prepared, 1, (0, 1)):
        log.append(f"step {batch.index}")
    assert log == ["sent 0", "sent 1", "step 0", "sent 2", "step 1", "sent 3", "step 2", "step 3"]


def test_after_breaking_out_of_an_epoch_the_next_one_is_complete():
    loader = loader_on(0, 2, 9)
    for _ in loader:
        break
    assert loader.row_share is None
    assert len(epoch(loader)) == 3


def test_fill_rows_repeats_rows_and_returns_values_without_rows_unchanged():
    assert fill_rows({"a": "text"}, 3) == {"a": "text"}
    assert fill_rows(torch.arange(2), 5).tolist() == [0, 1, 0, 1, 0]

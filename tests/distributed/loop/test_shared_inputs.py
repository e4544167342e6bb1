"""Ranks that compute one forward pass together have the same samples and random numbers, or say that they do not."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuron_accel.testing import run_ranks
from neuron_accel.testing.rank_errors import RanksError
from tests.distributed.models import VOCABULARY, gpt2

TP = [{"tensor_parallel": {"tensor_parallel_size": 2}}]
PP = [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 1}}]
DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}


def start(plugins: list[Any] = TP, **options: Any):
    from neuron_accel import NeuronAccelerator

    return NeuronAccelerator(config={"plugins": plugins}, **options)


def rank_of(accelerator) -> int:
    return accelerator.run.backend.rank


def seed_everything(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def step(accelerator, model, optimizer, batch) -> None:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def same(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


# ---- seeds -----------------------------------------------------------------------------------------------------------
def train_after_seeding_each_process(plugins):
    from accelerate.utils import set_seed

    accelerator = start(plugins)
    set_seed(1, device_specific=True)
    model = gpt2(**DROPOUT)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    for _ in range(3):
        step(accelerator, model, optimizer, same(torch.arange(16).reshape(2, 8)))
    norms = [p.detach().double().sum().item() for n, p in model.named_parameters() if "ln" in n]
    return accelerator.data_parallel_rank, drawn, norms


@pytest.mark.parametrize("ranks", [2, 4])
def test_seeds_of_processes_become_seeds_of_data_parallel_ranks(ranks):
    results = run_ranks(train_after_seeding_each_process, ranks, TP)
    assert all(norms == results[0][2] for *_, norms in results)
    by_rank = {}
    for rank, drawn, _ in results:
        assert by_rank.setdefault(rank, drawn) == drawn
    assert len(set(by_rank.values())) == ranks // 2


def train_with_other_masks():
    accelerator = start()
    model = gpt2(**DROPOUT)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(rank_of(accelerator))
    for _ in range(3):
        step(accelerator, model, optimizer, same(torch.arange(16).reshape(2, 8)))


def refused(function, *arguments) -> str:
    with pytest.raises(RanksError) as caught:
        run_ranks(function, 2, *arguments, timeout=60)
    errors = caught.value.errors
    assert sorted(errors) == [0, 1]
    assert {type(error).__name__ for error in errors.values()} == {"DesyncError"}
    assert str(errors[0]) == str(errors[1])
    return str(errors[0])


def test_other_dropout_masks_in_a_group_are_refused():
    text = refused(train_with_other_masks)
    assert "Rank 1 draws other random numbers than rank 0." in text
    assert "the first forward pass, ranks [0, 1] of group 'tp'" in text


# ---- samples ---------------------------------------------------------------------------------------------------------
class Augmented(Dataset):
    """Rows of tokens, of which one is another on the second rank."""

    def __init__(self, changed: int) -> None:
        self.changed = changed

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) + index) % VOCABULARY
        return same(ids * 0 if index == self.changed else ids)


def train_with_a_rare_augmentation(plugins):
    accelerator = start(plugins)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Augmented(22 if rank_of(accelerator) else -1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        step(accelerator, model, optimizer, batch)


@pytest.mark.parametrize("plugins", [TP, PP], ids=["tp", "pp"])
def test_a_sample_that_differs_late_in_an_epoch_is_refused(plugins):
    assert "Rank 1 computes a forward pass of other samples than rank 0." in refused(
        train_with_a_rare_augmentation, plugins
    )


def train_on_rows_of_its_own(at_step):
    accelerator = start()
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(at_step + 1):
        shift = rank_of(accelerator) if number == at_step else 0
        step(accelerator, model, optimizer, same(torch.arange(16).reshape(2, 8) + shift))
    accelerator.save_state("not written")


@pytest.mark.parametrize("at_step", [0, 2])
def test_samples_that_no_loader_compares_are_refused_before_they_are_saved(at_step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(train_on_rows_of_its_own, at_step)
    assert not list(tmp_path.iterdir())


# ---- no false alarm --------------------------------------------------------------------------------------------------
class Noisy(IterableDataset):
    """Samples that the process which reads them draws."""

    def __iter__(self):
        for _ in range(8):
            yield same(torch.randint(VOCABULARY, (8,)))


def train_on_dispatched_noise(ranks):
    accelerator = start()
    model = gpt2(**DROPOUT)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Noisy(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for _ in range(2):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            seen.append(tuple(batch["input_ids"].flatten().tolist()))
    assert len(set(seen)) == len(seen)
    return [p.detach().double().sum().item() for n, p in model.named_parameters() if "ln" in n]


def test_what_the_main_process_draws_while_it_reads_for_all_changes_no_mask():
    first, second = run_ranks(train_on_dispatched_noise, 2, 2)
    assert first == second


def numbers_around_a_shuffling_loader(plugins):
    torch.manual_seed(3)
    accelerator = start(plugins)
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=2, shuffle=True))
    drawn = torch.rand(2).tolist()
    batches = [(batch.tolist(), torch.rand(()).item()) for _ in range(2) for batch in loader]
    return drawn, batches


def test_a_shuffling_loader_draws_what_it_draws_in_one_process():
    (expected,) = run_ranks(numbers_around_a_shuffling_loader, 1, [])
    assert run_ranks(numbers_around_a_shuffling_loader, 2, TP) == [expected] * 2


# ---- the pair of index and number ------------------------------------------------------------------------------------
def pairs(plugins):
    accelerator = start(plugins)
    return {
        "rows": list(range(12))[accelerator.process_index :: accelerator.num_processes],
        "process": accelerator.state.process_index,
        "main": (accelerator.is_main_process, accelerator.is_last_process),
        "gathered": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
    }


def test_the_index_of_a_process_counts_what_the_number_of_processes_counts():
    found = run_ranks(pairs, 4, TP)
    for rank, one in enumerate(found):
        assert one == {
            "rows": list(range(rank // 2, 12, 2)),
            "process": rank,
            "main": (rank == 0, rank == 3),
            "gathered": [0, 1],
        }


def forward_passes_of_a_copy():
    accelerator = start()
    model = accelerator.prepare(gpt2())
    torch.manual_seed(rank_of(accelerator))
    copy.deepcopy(model)(input_ids=torch.arange(4)[None])
    return True


def test_a_copy_of_a_model_does_not_compare():
    assert all(run_ranks(forward_passes_of_a_copy, 2))

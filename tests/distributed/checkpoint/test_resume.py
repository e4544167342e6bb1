"""Resuming from a checkpoint: N steps, save, stop, load and N more steps equal 2N steps, and loaders yield each sample
once."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from neuron_accel import NeuronAccelerator
from neuron_accel.checkpoint.format.manifest import Manifest, latest_of
from neuron_accel.checkpoint.state.resume import SavedBatch, step_of
from neuron_accel.checkpoint.state.snapshot import pieces_of
from neuron_accel.errors import CheckpointError, ConfigurationError, UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import BATCHES, TP2, Trained, assert_equal


# ---- exactness -------------------------------------------------------------------------------------------------------
class Noisy(nn.Module):
    """A model with dropout, running statistics and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5)).square().mean()


class Counter:
    """A custom object whose state is the mean of its inputs and values that JSON cannot represent."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": tuple(self.seen), "tensor": torch.tensor(self.seen), 3: {float("inf")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[3] == {float("inf")}
        assert torch.equal(state["tensor"], torch.tensor(state["seen"]))
        self.seen = list(state["seen"])


def _noisy_run(folder: str, plugins: list[Any], part: str, samples: int = 41) -> tuple[list[Any], dict]:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, "gradient_accumulation_steps": 2})
    torch.manual_seed(7 if part != "second" else 8)
    random.seed(accelerator.process_index)
    np.random.seed(accelerator.process_index)
    model = Noisy()
    optimizer = torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.last.parameters()}]
    )
    optimizer.add_param_group({"params": model.norm.parameters(), "weight_decay": 0.0})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=200)
    data = TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(3)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    epoch = 0
    if part == "second":
        accelerator.load_state(folder)
        epoch = loader.iteration
    trace: list[Any] = []
    step = 0
    while epoch < 2:
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.seen.append(accelerator.reduce(loss.detach(), "mean").item())
            trace.append(
                (epoch, loss.item(), x.sum().item(), random.random(), np.random.rand(), scheduler.get_last_lr())
            )
            step += 1
            if part == "first" and step == 4:
                accelerator.save_state(folder)
                return trace, {}
        epoch += 1
    # Running statistics, which evaluation sees.
    statistics = [accelerator.run.backend.to_host(b).tolist() for b in model.buffers()]
    state = accelerator.get_state_dict(model)
    return [*trace, tuple(counter.seen), statistics], state


@pytest.mark.parametrize("broadcast", [True, False], ids=["", "own buffers"])
@pytest.mark.parametrize("plugin", ["data_parallel", "zero1"])
def test_resuming_in_the_middle_of_an_epoch_equals_an_uninterrupted_run(tmp_path, plugin, broadcast):
    """The run is stopped within an epoch, and has dropout, running statistics, parameter groups, a scheduler, shuffling
    and all random number generators."""
    folder = str(tmp_path / "c")
    plugins = [{plugin: {"broadcast_buffers": broadcast}}]
    whole = run_ranks(_noisy_run, 2, folder, plugins, "whole")
    first = run_ranks(_noisy_run, 2, folder, plugins, "first")
    second = run_ranks(_noisy_run, 2, folder, plugins, "second")
    for (expected, _), (one, _), (other, _) in zip(whole, first, second, strict=True):
        assert [*one, *other] == expected
    assert (
        whole[0][0][-1] == whole[1][0][-1]
    ) is broadcast  # else ranks have statistics of their own, and get them back
    assert_equal(whole[0][1], second[0][1])


# ---- loaders ---------------------------------------------------------------------------------------------------------
SAMPLES = 46


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(SAMPLES))

    def __len__(self):
        return SAMPLES


def _samples(
    folder: str, batch_size: int, part: str, kind: str = "map", stop: int = 3, on: str | None = None, workers: int = 0
) -> tuple[list[int], list[int]]:
    """Returns the samples of this rank in the first epoch and in the next."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(backend=on)
    torch.manual_seed(1 if part == "first" else 2)
    dataset = torch.arange(SAMPLES) if kind == "map" else Stream()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size, shuffle=kind == "map", num_workers=workers))
    seen: list[int] = []
    if part == "second":
        accelerator.load_state(folder)
    for index, batch in enumerate(loader):
        seen += batch.tolist()
        if part == "first" and index + 1 == stop:
            accelerator.save_state(folder)
            return seen, []
    return seen, [sample for batch in loader for sample in batch.tolist()]


@pytest.mark.parametrize(
    ("before", "after", "kind", "stop", "workers"),
    [
        (1, 1, "map", 3, 0),
        (1, 2, "map", 3, 2),  # workers have fetched more than was given out
        (2, 1, "stream", 3, 1),
        (1, 2, "map", 3, 0),  # of 46 samples, 40 are left
        (3, 2, "map", 3, 0),  # 18 samples are no whole number of rounds of 4; 28 are left
        (3, 1, "map", 2, 2),
        (2, 1, "stream", 3, 0),
        (1, 1, "map", 23, 0),  # at the end of an epoch
    ],
)
def test_each_sample_is_seen_once(tmp_path, before, after, kind, stop, workers):
    folder = str(tmp_path / "c")
    first = run_ranks(_samples, before, folder, 2, "first", kind, stop, workers=workers)
    second = run_ranks(_samples, after, folder, 2, "second", kind, workers=workers)
    seen = [sample for seen, _ in (*first, *second) for sample in seen]
    assert sorted(seen) == list(range(SAMPLES))
    following = [sample for _, following in second for sample in following]
    assert sorted(set(following)) == list(range(SAMPLES))
    assert len(following) - SAMPLES < 2 * after  # what a ragged end was filled up with
    if kind == "map":
        assert [s for s, _ in first] != [sorted(s) for s, _ in first]  # shuffled


def _batch_sizes_that_do_not_fit(folder: str) -> None:
    with pytest.raises(CheckpointError, match="returned 6 samples"):
        _samples(folder, 4, "second")


def test_a_position_inside_of_a_batch_is_refused(tmp_path):
    folder = str(tmp_path / "c")
    run_ranks(_samples, 1, folder, 2, "first")
    run_ranks(_batch_sizes_that_do_not_fit, 1, folder)


def _skips_by_hand(folder: str) -> list[int]:
    """Skips batches as Accelerate's example of checkpointing does."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=1))
    if not Path(folder).exists():
        for index, _ in enumerate(loader):
            if index == 2:
                accelerator.save_state(folder)
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, 3)
    return [int(x) for x in rest] + [int(x) for x in loader]


def test_skipping_by_hand_is_not_done_twice(tmp_path):
    assert run_ranks(_skips_by_hand, 1, str(tmp_path / "c"))[0] == [3, 4, 5, 6, 7, *range(8)]


# ---- loaders that one process reads for all --------------------------------------------------------------------------
def _epochs(folder: str, samples: int, after: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns an epoch in which the state is saved after batch ``after``, the rest of it after loading, and the next
    epoch."""
    from accelerate.utils import DataLoaderConfiguration

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(list(range(samples)), batch_size=2))
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        if len(whole) == after:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    return whole, [batch.tolist() for batch in loader], [batch.tolist() for batch in loader]


@pytest.mark.parametrize(("samples", "after"), [(16, 1), (16, 4), (9, 1), (9, 2), (9, 3)])
def test_a_dispatching_loader_goes_on_where_it_was(tmp_path, samples, after):
    for whole, rest, following in run_ranks(_epochs, 2, str(tmp_path / "c"), samples, after):
        assert len(whole) == -(-samples // 4)
        assert rest == whole[after:]
        assert following == whole


# ---- loaders of torchdata that have a state ------------------------------------------------------------------------
def _shuffled(folder: str, workers: int, dispatch: bool) -> None:
    """Accelerate begins an epoch to get the state of such a loader, before the generators are set by a load."""
    from accelerate.utils import DataLoaderConfiguration

    def begin(seed: int) -> tuple[NeuronAccelerator, Any]:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
        accelerator = NeuronAccelerator(dataloader_config=configuration)
        torch.manual_seed(seed)
        before = multiprocessing.active_children()
        loader = accelerator.prepare(DataLoader(torch.arange(48), batch_size=4, num_workers=workers, shuffle=True))
        assert set(multiprocessing.active_children()) <= set(before)  # workers start with the epoch
        torch.manual_seed(seed + 10)
        return accelerator, loader

    accelerator, loader = begin(1)
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        if len(whole) == 2:
            accelerator.save_state(f"{folder}/middle")
    accelerator.save_state(f"{folder}/end")
    following = [batch.tolist() for batch in loader]
    for part, expected in (("middle", [*whole[2:], *following]), ("end", following)):
        accelerator, loader = begin(2)
        accelerator.load_state(f"{folder}/{part}")
        epochs = 2 if part == "middle" else 1
        assert [batch.tolist() for _ in range(epochs) for batch in loader] == expected, part
    assert whole != following


@pytest.mark.parametrize(("ranks", "workers", "dispatch"), [(1, 0, False), (2, 2, False), (2, 2, True)])
def test_a_loader_that_has_a_state_goes_on_in_its_order(tmp_path, ranks, workers, dispatch):
    run_ranks(_shuffled, ranks, str(tmp_path), workers, dispatch)


# ---- saving in the background ----------------------------------------------------------------------------------------
def _save_behind(folder: str) -> None:
    trained = Trained("gpt2-tied", [TP2, "zero1"])
    accelerator = trained.accelerator
    trained.step(BATCHES[0])
    before = trained.contents()
    accelerator.save_state(folder, async_save=True)
    trained.step(BATCHES[1])  # goes on while it is written
    trained.step(BATCHES[2])
    accelerator.load_state(folder)  # waits
    assert_equal(before, trained.contents())
    accelerator.save_state(folder, async_save=True)
    accelerator.end_training()
    assert Path(folder, "manifest.json").exists()


def test_a_background_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    run_ranks(_save_behind, 4, str(tmp_path / "c"))


# ---- mixed precision -------------------------------------------------------------------------------------------------
def _scaler(folder: str, load: bool) -> tuple[float, dict[str, Any]]:
    """Returns the loss scale of fp16 training. Accelerate creates a scaler on GPUs only; PyTorch has one for the
    CPU."""
    trained = Trained("gpt2-tied", ["zero1"], seed=int(load))
    scaler = trained.accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=8.0 if load else 1024.0, growth_interval=3
    )
    if load:
        trained.accelerator.load_state(folder)
    else:
        for value in (1.0, float("inf"), 1.0):
            parameter = nn.Parameter(torch.ones(1))
            parameter.grad = torch.tensor([value])
            made = torch.optim.SGD([parameter], lr=0.1)
            scaler.scale(torch.ones(()))
            scaler.step(made)
            scaler.update()
        trained.accelerator.save_state(folder)
    return scaler.get_scale(), scaler.state_dict()


def test_the_scaler_of_fp16_training_goes_on(tmp_path):
    saved = run_ranks(_scaler, 2, str(tmp_path / "c"), False)
    assert saved[0][0] == 512.0
    assert saved[0][1]["_growth_tracker"] == 1
    assert run_ranks(_scaler, 2, str(tmp_path / "c"), True) == saved


# ---- Accelerate's ways -----------------------------------------------------------------------------------------------
def _project(root: str, steps: int) -> list[str]:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    trained = Trained("gpt2-tied", [], project_config=project)
    accelerator = trained.accelerator
    found = accelerator.load_state(resume="latest")
    assert bool(found) == Path(root, "checkpoints").exists()
    for index in range(steps):
        trained.step(BATCHES[index])
        accelerator.save_state()
    return sorted(path.name for path in Path(root, "checkpoints").iterdir())


def test_numbered_checkpoints(tmp_path):
    assert run_ranks(_project, 2, str(tmp_path), 3)[0] == ["checkpoint_1", "checkpoint_2"]
    assert run_ranks(_project, 1, str(tmp_path), 1)[0] == ["checkpoint_2", "checkpoint_3"]


def _given_folder(root: str, steps: int) -> list[str]:
    """Resumes from ``root``, saves after each step into a folder of its own, and returns what was said of resuming."""
    accelerator = NeuronAccelerator(gradient_accumulation_steps=2 // int(os.environ["WORLD_SIZE"]))
    loader = accelerator.prepare(DataLoader(torch.arange(24), batch_size=2, shuffle=True))
    resumed = accelerator.load_state(root, resume="latest")
    for index, _ in zip(range(steps), loader, strict=False):
        accelerator.save_state(os.path.join(root, f"{'zyx'[index]}{accelerator.world_size}"))
    assert resumed.positions == tuple((place, samples) for place, samples in resumed.positions if place == 0)
    return [str(resumed), str(accelerator.step)]


def test_the_latest_checkpoint_of_a_given_folder(tmp_path, capfd):
    """Names do not matter, an incomplete checkpoint is not taken, and the accumulation goes on with more micro-batches
    on fewer ranks."""
    root = str(tmp_path / "runs")
    first = run_ranks(_given_folder, 2, root, 2)[0][0]
    assert first == "nothing to resume: training starts from the beginning"
    assert f"neuron_accel: {first}\n" in capfd.readouterr().out  # of `run_ranks`, which shows it
    (tmp_path / "runs" / "incomplete").mkdir()
    then = run_ranks(_given_folder, 1, root, 1)[0][0]
    assert re.fullmatch(rf"resumed from {root}/y2, saved \S+Z by 2 ranks: epoch 0, after 8 samples", then), then
    assert f"neuron_accel: {then}\n" in capfd.readouterr().out
    assert "z1, saved" in run_ranks(_given_folder, 1, root, 0)[0][0]
    with pytest.raises(Exception, match="`resume='newest'` is not possible"):
        run_ranks(_newest, 1, root)


def _newest(root: str) -> None:
    NeuronAccelerator().load_state(root, resume="newest")  # type: ignore[arg-type]


# ---- the same samples in a step on any number of ranks ---------------------------------------------------------------
def _kept(root: str, stop: int, accumulation: int = 1, accumulates: bool = True, batch: int = 4) -> dict[str, Any]:
    """Trains until a step, after which it saves; a step has 16 samples."""
    accelerator = NeuronAccelerator(gradient_accumulation_steps=accumulation, zero_1=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, batch_size=batch)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(root, resume="latest", keep_batch=True)
    steps = 0
    for samples in loader:
        with accelerator.accumulate(model) if accumulates else nullcontext():
            accelerator.backward(model(samples).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if accelerator.sync_gradients and steps == stop:
            accelerator.save_state(os.path.join(root, f"from{accelerator.world_size}"))
            break
    weights = torch.cat([part.detach().flatten() for part in model.parameters()])
    accumulated = accelerator.gradient_accumulation_steps
    return {"steps": steps, "rate": scheduler.get_last_lr(), "weights": weights, "accumulation": accumulated}


def test_a_run_goes_on_with_the_same_steps_on_fewer_and_on_more_ranks(tmp_path):
    """From 2 ranks to 1, and from that to 4, whose loader has another batch size."""
    expected = run_ranks(_kept, 2, str(tmp_path / "whole"), 99, 2)[0]
    root = str(tmp_path / "runs")
    assert run_ranks(_kept, 2, root, 2, 2)[0]["accumulation"] == 2
    assert run_ranks(_kept, 1, root, 2)[0]["accumulation"] == 4
    last = run_ranks(_kept, 4, root, 99, 8, batch=2)[0]
    assert (last["accumulation"], last["steps"], last["rate"]) == (2, 2, pytest.approx(expected["rate"]))
    torch.testing.assert_close(last["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
    with pytest.raises(Exception, match="3 data-parallel ranks cannot continue a run of 1 with as many samples"):
        run_ranks(_kept, 3, root, 99)
    with pytest.raises(Exception, match="has no effect outside"):
        run_ranks(_kept, 1, root, 99, 1, False)


def test_batches_of_checkpoints_without_the_number_of_samples():
    saved = SavedBatch(data_parallel=4, accumulation=3, samples=0, steps_at_once=4)
    assert [saved.accumulation_for(ranks, samples=7, splits=False) for ranks in (1, 2, 3, 6)] == [12, 6, 4, 2]
    assert saved.accumulation_for(5, samples=7, splits=True) == 3
    with pytest.raises(ConfigurationError, match="cannot continue a run of 4") as error:
        saved.accumulation_for(5, samples=7, splits=False)
    assert "12 micro-batches, which 5 ranks cannot share" in error.value.why


# ---- the latest ------------------------------------------------------------------------------------------------------
def _with_a_clock(root: str, *years: str) -> str | None:
    """Saves once at each time, into a folder named by it, and returns what would be loaded."""
    accelerator = NeuronAccelerator()
    for year in years:
        with mock.patch("neuron_accel.checkpoint.state.training.time.strftime", lambda *_, year=year: year):
            accelerator.save_state(os.path.join(root, f"in{year}"))
        os.utime(os.path.join(root, f"in{year}", "manifest.json"), (int(year), int(year)))
    return accelerator.load_state(root, resume="latest").folder


def test_the_latest_is_that_of_the_last_save_whatever_the_clock_says(tmp_path):
    assert run_ranks(_with_a_clock, 1, str(tmp_path), "2030", "2020", "2025") == [str(tmp_path / "in2025")]
    assert run_ranks(_with_a_clock, 1, str(tmp_path), "2010") == [str(tmp_path / "in2010")]  # another run
    for year in ("2030", "2020", "2025", "2010"):  # as saved by a version without the number
        path = tmp_path / f"in{year}" / "manifest.json"
        manifest = Manifest.from_bytes(path.read_bytes(), str(path))
        info = {name: value for name, value in manifest.info.items() if name != "saves"}
        path.write_bytes(dataclasses.replace(manifest, info=info).to_bytes())
    assert latest_of(tmp_path) == tmp_path / "in2030"


def test_a_step_of_more_micro_batches_is_as_far():
    assert step_of({}, 3, 1) == 3
    assert step_of({"step": 6}, 0, 4) == 6  # of a version that did not save the accumulation
    assert step_of({"step": 6, "accumulation": 2}, 0, 4) == 12
    assert step_of({"step": 6, "accumulation": 4}, 0, 2) == 6  # within a step, it cannot be converted


def _hooks(folder: str) -> None:
    trained = Trained("gpt2-tied", [])
    accelerator = trained.accelerator
    calls = []

    def save(models, weights, output_dir):
        calls.append((len(models), len(weights), output_dir))
        weights.pop()

    def load(models, input_dir):
        calls.append((len(models), input_dir))
        models.pop()

    saving = accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(folder)
    loading = accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(folder)
    assert calls == [(1, 1, folder), (1, folder)]
    loading.remove()
    with pytest.raises(CheckpointError, match="The checkpoint has 0 models, this training 1"):
        accelerator.load_state(folder)
    saving.remove()
    accelerator.save_state(folder)
    accelerator.load_state(folder)


def test_hooks_can_take_models_over(tmp_path):
    run_ranks(_hooks, 1, str(tmp_path / "c"))


class Opaque:
    def state_dict(self):
        return {"callback": print}

    def load_state_dict(self, state):
        raise AssertionError


def _refusals(folder: str) -> None:
    trained = Trained("gpt2-tied", [])
    accelerator = trained.accelerator
    with pytest.raises(UsageError, match="'max_shard_size' is not an option of `save_state`"):
        accelerator.save_state(folder, max_shard_size=3)
    with pytest.raises(UsageError, match=r"'map_locaton' is not an option(.|\n)*Did you mean 'map_location'"):
        accelerator.load_state(folder, map_locaton="cpu")
    with pytest.raises(UsageError, match="Unsupported optimizer map location passed: 'meta'"):
        accelerator.load_state(folder, map_location="meta")
    with pytest.raises(ConfigurationError, match=r"mixed_precision='bf16' differs from the 'no'(.|\n)*a new process"):
        NeuronAccelerator(mixed_precision="bf16")
    with pytest.raises(UsageError, match="needs a folder"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="does not exist"):
        accelerator.load_state(folder + "-nothing")
    accelerator.save_state(folder)
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="has 0 objects registered for checkpointing, this training has 1"):
        accelerator.load_state(folder)
    accelerator.register_for_checkpointing(Opaque())
    with pytest.raises(CheckpointError, match=r"builtin_function_or_method(.|\n)*custom object 1 \(Opaque\)\.callback"):
        accelerator.save_state(folder)
    assert Path(folder, "manifest.json").exists()


def _not_safe(folder: str) -> tuple[list[str], list[str]]:
    accelerator = (trained := Trained("gpt2-tied", [TP2])).accelerator
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("neuron_accel").addHandler(handler)
    for name in ("a", "b"):
        accelerator.save_state(f"{folder}/{name}", safe_serialization=False)
    assert accelerator.load_state(f"{folder}/b", map_location="cpu")
    accelerator.save_model(trained.model, f"{folder}/model", safe_serialization=False, max_shard_size="20KB")
    return said, sorted(os.listdir(f"{folder}/model"))


def test_save_model_pickles_where_it_is_asked_to_and_save_state_never_does(tmp_path):
    (said, files), (elsewhere, _) = run_ranks(_not_safe, 2, str(tmp_path))
    assert len(said) == 1
    assert "writes safetensors and JSON too" in said[0]
    assert elsewhere == []
    assert not [path for name in "ab" for path in (tmp_path / name).rglob("*") if path.suffix in (".bin", ".pt")]
    names = [name for name in files if name.endswith(".bin")]
    assert len(names) > 1
    assert "pytorch_model.bin.index.json" in files
    weights = {}
    for name in names:
        weights |= torch.load(tmp_path / "model" / name, weights_only=True)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=False).state_dict()
    assert loaded.keys() - weights.keys() <= {"lm_head.weight"}
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_what_cannot_be_done_is_refused(tmp_path):
    run_ranks(_refusals, 2, str(tmp_path / "c"))


def _factored(folder: str, plugins: list[Any], load: bool) -> dict:
    """Returns the optimizer state by FQN and entry, from the rank that holds it."""
    trained = Trained("gpt2-tied", plugins, optimizer="adafactor", seed=int(load))
    if load:
        trained.accelerator.load_state(folder)
    else:
        trained.step(BATCHES[0])
        trained.accelerator.save_state(folder)
    inner, run = trained.optimizer.optimizer, trained.accelerator.run
    mine = {f"{p.record.fqn}/{e}": v for p in pieces_of(inner, run) for e, v in p.read_state(inner).items()}
    everyone = run.backend.all_gather_object(mine, run.world)
    return {name: value for one in everyone for name, value in one.items()}


def test_factored_moments_travel_between_meshes(tmp_path):
    """State whose shape is not the parameter's is replicated along the axes that the parameter is sharded along."""
    folder = str(tmp_path / "c")
    whole = {"zero1": {"partition": "parameters"}}
    saved = run_ranks(_factored, 2, folder, [TP2], False)[0]
    assert any(name.endswith("/row_var") for name in saved)
    for ranks, plugins in ((1, []), (2, [TP2]), (4, [TP2, whole]), (2, [whole])):
        assert_equal(saved, run_ranks(_factored, ranks, folder, plugins, True)[0], str(plugins))


# ---- other dtypes ----------------------------------------------------------------------------------------------------
def _masters(folder: str, plugins: list[Any], seed: int) -> dict:
    trained = Trained("llama", plugins, seed=seed, dtype=torch.bfloat16)
    if seed:
        trained.accelerator.load_state(folder)
    else:
        trained.step(BATCHES[0])
        trained.accelerator.save_state(folder)
    return trained.contents()


def test_master_weights_keep_their_bits(tmp_path):
    folder = str(tmp_path / "c")
    saved = run_ranks(_masters, 2, folder, ["zero1"], 0)[0]
    assert any(name.endswith("/master") and value.dtype == torch.float32 for name, value in saved.items())
    assert_equal(saved, run_ranks(_masters, 4, folder, [TP2, "zero1"], 1)[0])

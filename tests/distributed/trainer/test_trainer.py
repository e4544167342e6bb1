"""transformers' Trainer with strategies has the results of one process."""

from __future__ import annotations

import functools
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import safe_globals

from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.trainer.trainer_support import (
    Texts,
    assert_same,
    model,
    options,
    squared_logits,
    train_on_rank,
    train_with_stock,
)

COMPOSITIONS = {
    "dp2+zero1": (2, 2, {"zero_1": True}),
    "dp2+fully_sharded": (2, 2, {"fully_sharded": True}),
    "tp2+sp": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}),
    "tp2xdp2+zero1": (4, 2, {"tensor_parallel_size": 2, "zero_1": True}),
}


MIDDLE = {"save_strategy": "steps", "save_steps": 2}  # an epoch has three steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The results of transformers' Trainer, by data-parallel size."""
    folder = tmp_path_factory.mktemp("stock")
    two = run_ranks(functools.partial(train_with_stock, **MIDDLE), 2, str(folder / "2"), 2)
    return {1: train_with_stock(folder / "1", **MIDDLE), 2: two[0], "folder": folder}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_same_training(name, stock, tmp_path, capfd):
    """Accumulation, a short last window and batch, clipping, a schedule, evaluation with metrics, checkpoints."""
    ranks, with_data, more = COMPOSITIONS[name]
    results = run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more)
    for result in results:
        assert_same(result, stock[with_data])
    said = [line for line in capfd.readouterr().out.splitlines() if "'loss'" in line or "train_loss" in line]
    assert len(said) == stock[with_data]["steps"] + 1
    assert all(line.startswith("[rank 0]") for line in said)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("pp2", "label_smoothing"),
        ("tp2+sp", "label_smoothing"),
        ("pp2", "compute_loss_func"),
        ("tp2xdp2+zero1", "compute_loss_func"),
    ],
)
def test_another_loss(name, option, tmp_path):
    """Losses that the Trainer computes from logits, or the last stage in a pipeline."""
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    extra = {}
    if option == "label_smoothing":
        arguments["label_smoothing_factor"] = 0.2
    else:
        extra["compute_loss_func"] = squared_logits
    alone = train_with_stock(tmp_path / "stock", **arguments, **extra)
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments, extra):
        assert_same(result, alone)


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        ("dp2+zero1", "dp2+zero1", 2),
        ("dp2+zero1", "dp2+zero1", 4),
        ("pp2", "pp2", 2),
        ("tp2xdp2+zero1", "tp2xdp2+zero1", 2),
        ("dp2+zero1", "tp2xdp2+zero1", 2),
        ("pp2", "tp2+sp", 2),
    ],
)
def test_resume(before, after, at, stock, tmp_path):
    """Resumes from a checkpoint in the middle of an epoch, on the same mesh or one with as many samples per step."""
    ranks, with_data, more = COMPOSITIONS[before]
    first = run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | MIDDLE | {"stop_after": at})
    assert first[0]["steps"] == at
    ranks, with_data, more = COMPOSITIONS[after]
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | MIDDLE, None, True):
        result["train_loss"] = None  # of the steps of this call
        assert_same(result, stock[with_data])


def train_started_again(folder, run, more, count=1):
    """What the launcher sets when it has restarted a run, and a script that says nothing of checkpoints."""
    os.environ.update(TORCHELASTIC_RESTART_COUNT=str(count), NEURON_ACCEL_RUN=run)
    return train_on_rank(folder, 2, more | {"keep_batch": True})


def test_a_restarted_run_resumes_by_itself_also_on_fewer_ranks(stock, tmp_path, capfd):
    more = MIDDLE | {"stop_after": 2}
    run_ranks(train_started_again, 2, str(tmp_path), "this", more, 0)
    (result,) = run_ranks(train_started_again, 1, str(tmp_path), "this", MIDDLE)
    said = capfd.readouterr().out
    assert f"the launcher restarted the ranks: resuming from {tmp_path}/checkpoint-2\n" in said
    assert "each rank accumulates 4 micro-batches instead of 2" in said
    result["train_loss"] = None  # of the steps of this call
    result["evaluations"] = stock[1]["evaluations"]  # a mean over batches of another size
    assert_same(result, stock[1])  # the last step of an epoch has fewer samples, to which two ranks add some
    (result,) = run_ranks(train_started_again, 1, str(tmp_path), "another", more)
    assert result["steps"] == 2
    assert "it saved no complete checkpoint" in capfd.readouterr().out


def resumed_with_keep_batch(folder, written):
    """Resumes, with as many samples in a step, from a checkpoint that was written before these were recorded, or from
    one of two models."""
    from neuron_accel import NeuronAccelerator
    from neuron_accel.checkpoint.format.manifest import NAME, read_manifest

    at = Path(folder, "checkpoint-1")
    train_on_rank(folder, 1, MIDDLE | {"max_steps": 1, "save_steps": 1})
    if written == "before":
        manifest = read_manifest(at)
        counters = {name: value for name, value in manifest.info["counters"].items() if name != "samples"}
        Path(at, NAME).write_bytes(replace(manifest, info={**manifest.info, "counters": counters}).to_bytes())
    else:
        accelerator = NeuronAccelerator(gradient_accumulation_steps=2)
        models = [model(), model()]
        loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        accelerator.prepare(*models, *optimizers, loader)
        accelerator.save_state(str(at))
    train_on_rank(folder, 1, MIDDLE | {"keep_batch": True}, resume=str(at))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("before", "The checkpoint does not say how many samples an optimizer step had.*without keep_batch"),
        ("with two models", "The checkpoint has 2 models, this training 1, and which is which cannot be told"),
    ],
)
def test_keep_batch_with_a_checkpoint_that_does_not_fit(written, words, tmp_path):
    with pytest.raises(RanksError, match=rf"(?s)CheckpointError: {words}"):
        run_ranks(resumed_with_keep_batch, 1, str(tmp_path), written)


def test_sigterm_to_one_rank_saves_a_checkpoint_on_all_of_them(stock, tmp_path):
    """transformers' callback for `enable_jit_checkpoint` stops each rank at a step of its own."""
    ranks, with_data, more = COMPOSITIONS["dp2+zero1"]
    more = more | MIDDLE | {"save_strategy": "no", "enable_jit_checkpoint": True}
    stopped = run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | {"signal_at": 2})
    assert {result["steps"] for result in stopped} in ({4}, {5})
    assert (tmp_path / f"checkpoint-{stopped[0]['steps']}").is_dir()
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more, None, True):
        result["train_loss"] = None  # of the steps of this call
        assert_same(result, stock[with_data])


@pytest.mark.parametrize(("name", "at"), [("dp2+zero1", 2), ("tp2+sp", 4), ("pp2", 2)])
def test_resume_from_a_checkpoint_of_transformers_own_trainer(name, at, stock, tmp_path):
    """The checkpoint restores moments, learning rate, random state and the position in the data."""
    ranks, with_data, more = COMPOSITIONS[name]
    folder = tmp_path / f"checkpoint-{at}"
    shutil.copytree(stock["folder"] / str(with_data) / folder.name, folder)
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | MIDDLE, None, str(folder)):
        result["train_loss"] = None  # of the steps of this call
        assert_same(result, stock[with_data])


class Told:
    """Unpickling one creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def resume_what_does_not_fit(source, folder):
    """What is said of checkpoints of transformers' Trainer, and whether the random state is taken over."""
    from neuron_accel.errors import CheckpointError
    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    class Look(NeuronTrainer):
        def _load_rng_state(self, checkpoint):
            super()._load_rng_state(checkpoint)
            self.random = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())

    def attempt(name, damage, **more):
        checkpoint = Path(folder, name, "checkpoint-2")
        shutil.copytree(source, checkpoint)
        damage(checkpoint)
        arguments = options(folder, **{"eval_strategy": "no", "save_strategy": "no", "max_steps": 3} | more)
        trainer = Look(model(), NeuronTrainingArguments(**arguments), train_dataset=Texts(), eval_dataset=Texts(4))
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        except CheckpointError as error:
            assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
            return str(error)
        return trainer.random

    def groups(checkpoint):
        state = torch.load(checkpoint / "optimizer.pt")
        state["param_groups"].pop()
        torch.save(state, checkpoint / "optimizer.pt")

    def shape(checkpoint):
        state = torch.load(checkpoint / "optimizer.pt")
        state["state"][0]["exp_avg"] = torch.zeros(3, 5)
        torch.save(state, checkpoint / "optimizer.pt")

    return {
        "fits": attempt("fits", lambda checkpoint: None),
        "groups": attempt("groups", groups),
        "shape": attempt("shape", shape),
        "scheduler": attempt(
            "scheduler", lambda c: None, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
        ),
        "code": attempt("code", lambda c: torch.save({"state": Told(Path(folder, "ran"))}, c / "optimizer.pt")),
        "cut": attempt("cut", lambda c: (c / "scheduler.pt").write_bytes((c / "scheduler.pt").read_bytes()[:99])),
        "fsdp": attempt("fsdp", lambda c: (c / "optimizer_0").mkdir()),
        "samples": attempt("samples", lambda c: None, gradient_accumulation_steps=1),
        "weights": attempt("weights", lambda c: (c / "optimizer.pt").unlink(), ignore_data_skip=True),
    }


def test_checkpoints_of_transformers_own_trainer_that_do_not_fit(stock, tmp_path, capfd):
    source = stock["folder"] / "1" / "checkpoint-2"
    found = run_ranks(resume_what_does_not_fit, 1, str(source), str(tmp_path))[0]
    with safe_globals():
        saved = torch.load(source / "rng_state.pth", weights_only=True)
    assert found["fits"] == (saved["cpu"].tolist(), saved["python"], saved["numpy"][1].tolist())
    assert "it has 1 groups, this optimizer 2" in found["groups"]
    assert "has shape (3, 5), not (" in found["shape"]
    assert "another scheduler class" in found["scheduler"]
    assert "'optimizer.pt' contains more than tensors" in found["code"]
    assert not (tmp_path / "ran").exists()
    assert "'scheduler.pt'" in found["cut"]
    assert "FSDP or DeepSpeed" in found["fsdp"]
    assert "the number of samples per step differs" in found["samples"]
    assert isinstance(found["weights"], tuple)
    assert "has no optimizer.pt: this state is not restored" in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["dp2+zero1", "tp2+sp", "pp2"])
def test_packed_documents(name, tmp_path):
    """Positions that begin anew within a row: what belongs to different documents does not attend to each other."""
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "packed": True}
    packed = train_with_stock(tmp_path / "stock", **arguments)
    apart = train_with_stock(tmp_path / "apart", **arguments | {"packed": False})
    assert abs(packed["losses"][0] - apart["losses"][0]) > 1e-3
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments):
        assert_same(result, packed)


# ---- the gradient scaler of a checkpoint of transformers' Trainer ----------------------------------------------------
def resume_scaled(folder):
    """The scale that a training of fp16 goes on with. Accelerate has no scaler for the CPU; torch has."""
    from dataclasses import replace
    from pathlib import Path

    from neuron_accel import NeuronAccelerator
    from neuron_accel.trainer.stock import restore

    def trained(scaler):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            scaler.scale(net.lm_head.weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return net, optimizer

    saved = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    net, optimizer = trained(saved)
    net.save_pretrained(folder)
    for name, state in (("optimizer", optimizer), ("scaler", saved)):
        torch.save(state.state_dict(), Path(folder, f"{name}.pt"))
    accelerator = NeuronAccelerator()
    other = model()
    other, _ = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.01))
    own = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    training = replace(accelerator._session.training(), scaler=own)
    restore(training, accelerator.run.prepared(other), None, Path(folder))
    return saved.state_dict(), own.state_dict()


def test_the_scale_of_fp16_goes_on(tmp_path):
    ((saved, own),) = run_ranks(resume_scaled, 1, str(tmp_path))
    assert saved["scale"] == 2.0**11
    assert own == saved

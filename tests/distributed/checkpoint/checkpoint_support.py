"""Training runs that are saved and loaded, for the tests of checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.distributed.models import MODELS as FAMILIES
from tests.distributed.models import llama, token_batches


def noisy() -> torch.nn.Module:
    """Returns a model with dropout, which resumes identically only if the random number generators do."""
    model = FAMILIES["gpt2-tied"]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


# 95 tokens divide by no degree: with a sharded vocabulary, shards are padded.
MODELS = {**FAMILIES, "llama-padded": functools.partial(llama, vocabulary=95), "gpt2-noisy": noisy}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
PP2_TP2 = {
    "model_parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
}
TP4 = {"model_parallelism": {"tensor_parallel_size": 4}}
TOPOLOGIES: dict[str, tuple[int, list[Any]]] = {
    "dp1": (1, []),
    "dp4": (4, []),
    "dp3-zero1": (3, ["zero1"]),
    "tp2": (2, [TP2]),
    "tp4": (4, [TP4]),
    "tp2-dp2-zero1": (4, [TP2, "zero1"]),
    "tp2-sp": (2, [TP2, "sequence_parallel"]),
    "pp2-tp2": (4, [PP2_TP2]),
}
BATCHES = token_batches(8, size=12, vocabulary=95)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


class Trained:
    """A prepared model, optimizer and scheduler on this rank."""

    def __init__(
        self,
        model: str,
        plugins: Sequence[Any],
        *,
        seed: int = 0,
        optimizer: str = "adamw",
        dtype: Any = None,
        on: str | None = None,
        **options: Any,
    ) -> None:
        from neuron_accel import NeuronAccelerator
        from neuron_accel.testing.xla_ranks import one_at_a_time

        self.accelerator = NeuronAccelerator(config={"plugins": list(plugins)}, backend=on, **options)
        with one_at_a_time():
            torch.manual_seed(seed)
            built = MODELS[model]()
        built.train()
        if dtype is not None:
            built.to(dtype)
        made = OPTIMIZERS[optimizer](built.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(built, made, scheduler)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        size, rank = self.accelerator.data_parallel_size, self.accelerator.data_parallel_rank
        share = {name: value.chunk(size)[rank].to(self.accelerator.device) for name, value in batch.items()}
        loss = self.model(**share).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.accelerator.run.backend.to_host(self.accelerator.reduce(loss.detach(), "mean")).item()

    def contents(self) -> dict[str, torch.Tensor]:
        """Returns the full weights and optimizer state of the original model on the main process."""
        from neuron_accel.checkpoint.state.full_state import full_tensor, stage_group
        from neuron_accel.checkpoint.state.snapshot import pieces_of

        run = self.accelerator.run
        inner = self.optimizer.optimizer
        mine: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
        for piece in pieces_of(inner, run):
            entries = dict(piece.read_state(inner))
            if piece.master:
                entries["master"] = piece.parameter.detach()
            for entry, value in entries.items():
                value = run.backend.to_host(value)
                if value.numel() > max(1, piece.stop - piece.start):  # padded
                    value = value[: piece.stop - piece.start]
                mine.setdefault((piece.record.fqn, entry), []).append((piece.start, value))
        everyone = run.backend.all_gather_object(mine, run.group(*run.mesh.gradient_axes))
        state = {}
        for fqn, entry in sorted({key for one in everyone for key in one}):
            found = [part for one in everyone for part in one.get((fqn, entry), ())]
            layout = next(m.parameters[fqn] for m in run.models).layout
            if found[0][1].dim() == 0:
                state[f"{fqn}/{entry}"] = found[0][1]
                continue
            pieces = dict(sorted(found, key=lambda part: part[0]))
            flat = torch.cat([value.reshape(-1) for value in pieces.values()])
            state[f"{fqn}/{entry}"] = full_tensor(flat.view(layout.local_shape).to(run.device), layout, run).cpu()
        result = dict(self.accelerator.get_state_dict(self.model))
        for stage in run.backend.all_gather_object(state, stage_group(run)):
            result |= stage
        return result if self.accelerator.is_main_process else {}


def train_and_save(
    folder: str, model: str, plugins: Sequence[Any], steps: int = 2, **options: Any
) -> tuple[dict, float]:
    """Trains some steps, saves, and returns what was saved and the loss of the next step."""
    trained = Trained(model, plugins, **options)
    for batch in BATCHES[:steps]:
        trained.step(batch)
    trained.accelerator.save_state(folder)
    contents = trained.contents()
    return contents, trained.step(BATCHES[steps])


def load_and_step(folder: str, model: str, plugins: list[Any], steps: int = 2, **options: Any) -> tuple[dict, float]:
    """Loads into a model with other weights, and returns what was loaded and the loss of the next step."""
    return load_each_and_step([folder], model, plugins, steps, **options)[0]


def load_each_and_step(
    folders: list[str], model: str, plugins: list[Any], steps: int = 2, **options: Any
) -> list[tuple[dict, float]]:
    """Does the same for several checkpoints, one after another."""
    trained = Trained(model, plugins, seed=1, **options)
    result = []
    for folder in folders:
        trained.accelerator.load_state(folder)
        result.append((trained.contents(), trained.step(BATCHES[steps])))
    return result


def assert_equal(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], what: str = "") -> None:
    """Bit for bit, NaNs included."""
    assert expected.keys() == found.keys(), what
    for name, value in expected.items():
        other = found[name]
        assert value.dtype == other.dtype, name
        assert value.shape == other.shape, name
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (value, other)]
        assert torch.equal(*bits), (what, name)

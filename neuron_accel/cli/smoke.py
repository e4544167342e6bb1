# SPDX-License-Identifier: Apache-2.0
"""The script that each rank of ``neuron-accel test`` runs: ``python -m neuron_accel.cli.smoke RESULT_FILE RUNG...``.

It climbs the rungs in order and stops at the first that fails. What differs between ranks is data, never a choice
between tensors of a lazy device: every rank has to trace the same graph. Rank 0 prints a line for each rung, and writes
the result file before and after each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from neuron_accel import NeuronAccelerator
from neuron_accel.backends.base import Backend
from neuron_accel.backends.group import Group
from neuron_accel.cli.smoke_test import RUNGS
from neuron_accel.parity import Tolerance, Trace, Training, compare, train_alone, train_on_rank
from neuron_accel.terminal import show

STEPS = 3
LENGTH, VOCABULARY = 8, 32
SECONDS = 120.0
"""The limit of a rung, without the time in which a compiler runs; NEURON_ACCEL_TIMEOUT_FACTOR multiplies it."""

TOLERANCES = {
    # The compiler rounds the factors of float32 products to bfloat16, unless --auto-cast=none. Measured with factors
    # rounded to 8 bits, for these models: losses 0.001, norms 0.002, gradients 0.013, weights 0.007.
    "neuron": Tolerance(loss=1e-2, norm=1e-2, gradient=6e-2, weight=4e-2),
    # Measured in float32: losses 2e-7, norms 2e-7, gradients 1e-6, weights 3e-5.
    "cpu": Tolerance(),
}
PRODUCTS = {
    # Largest error of a product of matrices, relative to its largest entry. Measured in float32 and bfloat16: 4e-7 and
    # 4e-3; of float32 with factors rounded to 8 bits 2e-3.
    "neuron": {"float32": 1e-2, "bfloat16": 2e-2},
    "cpu": {"float32": 1e-5, "bfloat16": 2e-2},
}


class Skipped(Exception):
    """A rung cannot be tried here; the message says why."""


@dataclass
class Ladder:
    """What rungs use.

    Args:
        backend: the backend of this rank; opened by the first rung.
        group: all ranks.
        measured: what the rung has measured, and what is allowed, by name.
        leaving: what is left when all ranks have finished the rung.
    """

    backend: Backend
    group: Group
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    leaving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def arithmetic(self) -> str:
        """Whose rounding is expected."""
        return "neuron" if self.backend.device.type in ("neuron", "xla") else "cpu"

    def measure(self, name: str, error: float, allowed: float) -> None:
        """Records an error, the largest of those of this name.

        Raises:
            AssertionError: if it is larger than allowed, or not a number.
        """
        self.measured[name] = (max(error, self.measured.get(name, (0.0, 0.0))[0]), allowed)
        assert error <= allowed, f"{name} is off by {error:.3g}, more than {allowed:g}"


# ---- the device, and one operation -----------------------------------------------------------------------------------
def check_device(ladder: Ladder) -> None:
    names = ladder.backend.all_gather_object(ladder.backend.device.type, ladder.group)
    assert len(set(names)) == 1, f"ranks use different devices: {names}"
    found = ladder.backend.to_host(torch.arange(4.0).to(ladder.backend.device))
    assert found.tolist() == [0, 1, 2, 3], f"what was copied to the device comes back as {found.tolist()}"


def check_operation(ladder: Ladder) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x, y = a.to(dtype), b.to(dtype)
        expected = x.double() @ y.double()
        found = ladder.backend.to_host(x.to(ladder.backend.device) @ y.to(ladder.backend.device)).double()
        error = float((found - expected).abs().max() / expected.abs().max())
        ladder.measure(f"product in {name}", error, PRODUCTS[ladder.arithmetic][name])


# ---- collectives -----------------------------------------------------------------------------------------------------
Comparison = Callable[[Backend, Group, list[torch.Tensor]], tuple[Any, Any]]


def sent(rank: int, group: Group) -> torch.Tensor:
    """The tensor that a rank contributes to a collective, of shape ``[4 * group.size]``, on the host. Small integers,
    whose sums are exact."""
    return torch.arange(4.0 * group.size) + 100 * rank


def check_all_reduce(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    found = [backend.all_reduce(_mine(backend, group, parts), group, op) for op in ("sum", "max", "min")]
    every = torch.stack(parts)
    return found, [every.sum(0), every.amax(0), every.amin(0)]


def check_all_gather(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    return [backend.all_gather(_mine(backend, group, parts), group)], [torch.cat(parts)]


def check_reduce_scatter(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    total = torch.stack(parts).sum(0)
    return [backend.reduce_scatter(_mine(backend, group, parts), group)], [total.chunk(group.size)[group.index]]


def check_all_to_all(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    expected = torch.cat([part.chunk(group.size)[group.index] for part in parts])
    return [backend.all_to_all(_mine(backend, group, parts), group)], [expected]


def check_permute(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    return [backend.permute(_mine(backend, group, parts), group)], [parts[group.index - 1]]


def check_broadcast(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    return [backend.broadcast(_mine(backend, group, parts), group, group.size - 1)], [parts[-1]]


def check_objects(backend: Backend, group: Group, parts: list[torch.Tensor]) -> tuple[Any, Any]:
    names = [f"rank {rank}" for rank in group.ranks]
    mine = names[group.index]
    found = [backend.all_gather_object(mine, group), backend.broadcast_object(mine, group, group.size - 1)]
    return found, [names, names[-1]]


def _mine(backend: Backend, group: Group, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[group.index].to(backend.device, copy=True)  # which a collective may write to


def check_collective(comparison: Comparison, ladder: Ladder) -> None:
    backend, group = ladder.backend, ladder.group
    found, expected = comparison(backend, group, [sent(rank, group) for rank in range(group.size)])
    found = [backend.to_host(one) if isinstance(one, torch.Tensor) else one for one in found]
    assert same(found, expected), f"got {found} instead of {expected}"


def same(found: Any, expected: Any) -> bool:
    """Whether nested lists of tensors and values are exactly equal."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


# ---- one graph -------------------------------------------------------------------------------------------------------
def check_graph(ladder: Ladder) -> None:
    """A step that is taken twice: ranks record the same graph, and it is compiled once."""
    backend, group = ladder.backend, ladder.group
    torch.manual_seed(0)
    model = Perceptron().to(backend.device)
    graphs: list[str] = []
    before = backend.compilations
    for batch in numbers(1)[:2]:
        loss = model(**{name: value.to(backend.device) for name, value in batch.items()})
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        summed = backend.all_reduce_together(gradients, group)
        graph = backend.graph_of(summed)
        every = backend.all_gather_object(graph, group)  # before it is executed: different ones would never end
        assert len(set(every)) == 1, f"ranks record different graphs: {every}"
        graphs += [] if graph is None else [graph]
        backend.step_boundary()
        before = backend.compilations if len(graphs) == 1 else before
    assert len(set(graphs)) <= 1, "the same step has another graph the second time"
    assert backend.compilations == before, "the same step was compiled again"


# ---- trainings -------------------------------------------------------------------------------------------------------
class Perceptron(nn.Module):
    """A model whose ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs), targets)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def numbers(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": torch.randn(size, LENGTH, generator=generator),
            "targets": torch.randn(size, 1, generator=generator),
        }
        for _ in range(STEPS)
    ]


def tokens(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (size, LENGTH), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": batch, "labels": batch.clone()} for batch in ids]


def errors(reference: Trace, trace: Trace) -> dict[str, float]:
    """The largest relative error of what a training gave, by kind, as :class:`Tolerance` defines them."""

    def of_numbers(expected: Sequence[float], found: Sequence[float]) -> float:
        return max((abs(b - a) / abs(a) for a, b in zip(expected, found, strict=False)), default=0.0)

    def of_tensors(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
        both = [(expected[name], found[name]) for name in expected.keys() & found.keys()]
        return max((float((b - a).abs().max() / a.abs().max().clamp(min=1e-8)) for a, b in both), default=0.0)

    return {
        "loss": of_numbers(reference.losses, trace.losses),
        "norm": of_numbers(reference.norms, trace.norms),
        "gradient": of_tensors(reference.gradients, trace.gradients),
        "weight": of_tensors(reference.weights, trace.weights),
    }


def _judge(ladder: Ladder, reference: Trace, trace: Trace | None) -> None:
    """Compares a training with that of one process, on the rank that has its result."""
    if trace is None:
        return
    tolerance = TOLERANCES[ladder.arithmetic]
    if not trace.gradients:
        reference = Trace(reference.losses, reference.norms, {}, reference.weights)
    for name, error in errors(reference, trace).items():
        if trace.gradients or name != "gradient":
            ladder.measured[name] = (error, getattr(tolerance, name))
    compare(reference, trace, tolerance)


def check_training(model: str, plugins: Sequence[Any], ladder: Ladder) -> None:
    ranks, training = ladder.group.size, Training(max_norm=1.0)
    if any("pipeline_parallel_size" in str(plugin) for plugin in plugins):
        _needs_messages(ladder.backend)
    model_fn, batches = _needs_pairs(ladder) if model == "Llama" else (Perceptron, numbers(2 * ranks))
    gradients = not ladder.backend.is_lazy  # which would be read from graphs of their own
    trace = train_on_rank(model_fn, batches, {"plugins": list(plugins)}, training, gradients=gradients)
    if ladder.backend.rank == 0:
        _judge(ladder, train_alone(model_fn, batches, training), trace)


def _needs_pairs(ladder: Ladder) -> tuple[Callable[[], nn.Module], list[dict[str, torch.Tensor]]]:
    _needs_transformers()
    if ladder.group.size % 2:
        raise Skipped("needs an even number of ranks")
    return tiny_llama, tokens(ladder.group.size)


def _needs_messages(backend: Backend) -> None:
    if not backend.is_lazy and not backend.has_point_to_point:
        raise Skipped(backend.missing.get("point-to-point", "this device cannot send from rank to rank"))


def _needs_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("needs transformers: install the extra 'trainer'")


# ---- checkpoints, and the Trainer ------------------------------------------------------------------------------------
def check_checkpoint(ladder: Ladder) -> None:
    """A step after a load is that after the save, and the consolidated weights are those that were saved."""
    folder = _common_folder(ladder)
    accelerator = NeuronAccelerator(config={"plugins": ["zero1"]})
    torch.manual_seed(0)
    model = Perceptron()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = [
        {name: value.to(accelerator.device) for name, value in batch.items()}
        for batch in numbers(2)  # the same on all ranks
    ]

    def step(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        accelerator.backward(model(**batch))
        optimizer.step()
        optimizer.zero_grad()
        return dict(accelerator.get_state_dict(model))

    saved = step(batches[0])
    accelerator.save_state(str(folder / "state"))
    expected = step(batches[1])
    accelerator.load_state(str(folder / "state"))
    found = step(batches[1])
    if not accelerator.is_main_process:
        return
    _equal(ladder, "a step after loading", expected, found)
    from safetensors.torch import load_file

    from neuron_accel.checkpoint.tools.consolidate import consolidate

    for path in consolidate(folder / "state", folder / "full"):
        _equal(ladder, "consolidated weights", saved, load_file(str(path)))


def check_trainer(ladder: Ladder) -> None:
    """Every sample is the same, so that their order does not matter."""
    _needs_transformers()
    from safetensors.torch import load_file
    from transformers import PrinterCallback

    from neuron_accel import NeuronTrainer, NeuronTrainingArguments

    ranks = ladder.group.size
    sample = {name: value[0] for name, value in tokens(1)[0].items()}
    folder = _common_folder(ladder)
    arguments = NeuronTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_epsilon=1e-6,
        optim="adamw_torch",
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=ladder.backend.device.type == "cpu",
    )
    torch.manual_seed(0)
    trainer = NeuronTrainer(model=tiny_llama(), args=arguments, train_dataset=[sample] * (ranks * STEPS))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    if ladder.backend.rank == 0:
        batch = {name: torch.stack([value] * ranks) for name, value in sample.items()}
        adamw = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.0)
        expected = train_alone(tiny_llama, [batch] * STEPS, Training(optimizer=adamw, max_norm=1.0))
        found = load_file(folder / "model" / "model.safetensors")
        allowed = TOLERANCES[ladder.arithmetic]
        for of_one, logged in (("losses", "loss"), ("norms", "grad_norm")):
            found_here = [float(entry[logged]) for entry in trainer.state.log_history if logged in entry]
            assert len(found_here) == STEPS, f"{len(found_here)} of {STEPS} steps have logged {logged}"
            for value, other in zip(getattr(expected, of_one), found_here, strict=True):
                ladder.measure(logged, abs(other - value) / value, max(allowed.loss, 1e-4))  # it is rounded
        for name, weight in expected.weights.items():
            error = (found[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-8)
            ladder.measure("weight", float(error), allowed.weight)


def _common_folder(ladder: Ladder) -> Path:
    """A temporary folder of all ranks of this machine, until all have finished the rung."""
    name = None
    if ladder.backend.rank == 0:
        name = ladder.leaving.enter_context(tempfile.TemporaryDirectory(prefix="neuron_accel_"))
    return Path(ladder.backend.broadcast_object(name, ladder.group))


def _equal(ladder: Ladder, what: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys(), f"{what}: {sorted(found)} instead of {sorted(expected)}"
    for name, tensor in expected.items():
        ladder.measure(what, float((found[name].cpu() - tensor.cpu()).abs().max()), 0.0)


CLIMBS: dict[str, Callable[[Ladder], None]] = {
    "device": check_device,
    "operation": check_operation,
    "all-reduce": functools.partial(check_collective, check_all_reduce),
    "all-gather": functools.partial(check_collective, check_all_gather),
    "reduce-scatter": functools.partial(check_collective, check_reduce_scatter),
    "all-to-all": functools.partial(check_collective, check_all_to_all),
    "permute": functools.partial(check_collective, check_permute),
    "broadcast": functools.partial(check_collective, check_broadcast),
    "objects": functools.partial(check_collective, check_objects),
    "graph": check_graph,
    "data-parallel": functools.partial(check_training, "perceptron", []),
    "zero1": functools.partial(check_training, "perceptron", ["zero1"]),
    "tp": functools.partial(check_training, "Llama", [{"model_parallelism": {"tensor_parallel_size": 2}}]),
    "tp-sp": functools.partial(
        check_training, "Llama", [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"]
    ),
    "pp": functools.partial(check_training, "Llama", [{"model_parallelism": {"pipeline_parallel_size": 2}}]),
    "fully-sharded": functools.partial(check_training, "perceptron", [{"fully_sharded": {"modules": "layers.*"}}]),
    "checkpoint": check_checkpoint,
    "trainer": check_trainer,
}


# ---- climbing --------------------------------------------------------------------------------------------------------
class Limit:
    """A context manager that ends this rank, with the stack of each of its threads, after ``seconds`` in which no
    compiler of Neuron ran below its launcher. The ranks of a machine wait for the one that compiles.

    Args:
        seconds: the limit.
        every: seconds between two looks at the processes.
    """

    def __init__(self, seconds: float, every: float = 1.0) -> None:
        self._left, self._every = seconds, every
        self.compiling = 0.0
        """Seconds in which a compiler ran."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="neuron_accel_limit")

    def __enter__(self) -> Limit:
        faulthandler.dump_traceback_later(self._left, exit=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._every):
            now = time.monotonic()
            if self.counts(now - last, compiles=compiler_runs()):
                faulthandler.dump_traceback_later(self._left, exit=True)
            last = now

    def counts(self, seconds: float, *, compiles: bool) -> bool:
        """Counts time in which a compiler ran, or none did. Returns whether the end is later than it was."""
        if compiles:
            self.compiling += seconds
        else:
            self._left = max(self._left - seconds, 0.1)
        return compiles


def compiler_runs() -> bool:
    """Whether the Neuron compiler runs in a process below the launcher of this rank."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(os.path.basename(word).startswith("neuronx-cc") for word in process.cmdline()[:2]):
                    return True
    return False


def climb(
    names: Sequence[str], write: Callable[[list[dict[str, Any]]], None] = lambda results: None
) -> list[dict[str, Any]]:
    """Climbs rungs until one fails. Collective.

    Args:
        names: the rungs, in order.
        write: called on rank 0 with the results so far, before and after each rung.

    Returns:
        the results, on every rank.
    """
    seconds = SECONDS * float(os.environ.get("NEURON_ACCEL_TIMEOUT_FACTOR", 1))
    results: list[dict[str, Any]] = []
    start = time.monotonic()
    with Limit(seconds):
        run = NeuronAccelerator().run
    ladder = Ladder(run.backend, run.world)
    opened = time.monotonic() - start
    for name in names:
        if run.backend.rank == 0:
            write([*results, {"name": name, "proves": RUNGS[name], "status": "running"}])
        result = _climb_one(name, ladder, seconds)
        result["seconds"] += opened if name == "device" else 0.0
        results.append(result)
        if run.backend.rank == 0:
            write(results)
            show(_line(result))
            for problem in result["problems"]:
                show(f"        {problem}")
        if result["status"] == "failed":
            break
    return results


def _climb_one(name: str, ladder: Ladder, seconds: float) -> dict[str, Any]:
    backend = ladder.backend
    ladder.measured, skipped, problem = {}, None, None
    compilations, compiled, start = backend.compilations, backend.compile_seconds, time.monotonic()
    with Limit(seconds) as limit, ladder.leaving:
        try:
            CLIMBS[name](ladder)
        except Skipped as reason:
            skipped = str(reason)
        except AssertionError as difference:
            problem = str(difference) or "an assertion failed"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        every = backend.all_gather_object((problem, limit.compiling), ladder.group)
    in_compiler = max(compiling for _, compiling in every)
    if compiled is not None and backend.compile_seconds is not None:
        in_compiler = backend.compile_seconds - compiled
    problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(every) if problem]
    return {
        "name": name,
        "proves": RUNGS[name],
        "status": "failed" if problems else "passed" if skipped is None else "skipped",
        "seconds": round(time.monotonic() - start, 3),
        "compile_seconds": round(in_compiler, 3),
        "compilations": None if compilations is None else (backend.compilations or 0) - compilations,
        "measured": {what: {"error": error, "allowed": most} for what, (error, most) in ladder.measured.items()},
        "device_memory": backend.device_memory,
        "problems": problems or ([skipped] if skipped else []),
    }


def _line(result: Mapping[str, Any]) -> str:
    """A result as a line: ``ok  0.20 s  zero1  loss 2e-07 of 1e-05``."""
    state = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}[result["status"]]
    seconds, compiling = result["seconds"], result["compile_seconds"]
    with_compiler = f" (compiling {compiling:.2f} s)" if compiling else ""
    errors = [f"{name} {each['error']:.0e} of {each['allowed']:.0e}" for name, each in result["measured"].items()]
    return f"{state:<8}{seconds:6.2f} s{with_compiler}  {result['name']}: {', '.join([result['proves'], *errors])}"


def main(result_file: str, *names: str) -> int:
    path = Path(result_file)

    def write(results: list[dict[str, Any]]) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results))
        part.replace(path)

    return int(any(result["status"] == "failed" for result in climb(names, write)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Saving and loading training state, against bare safetensors, torch.save and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [--sizes 0.5 2] [--repeat 5]

Every peer saves and loads the same state on one rank: weights and both moments of AdamW, in fp32, of the size given in
GB. A save counts until its bytes are on disk: peers that do not say so themselves are followed by fsync. Files are read
from the page cache, into tensors that are there already. Rates in MB/s are medians over rounds; ratios are to bare
safetensors in the same round (median, min-max). Peak memory is what a save, or a load, added to the process.

Then: how long the loop stalls for a save in the background, relative to one in the foreground of the same round: for
the first one, which takes the memory that all later ones use again, and for the next. And consolidation of the model's
part against a plain copy of its bytes, with the memory it added to the interpreter.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import note, parser
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import PeakMemory

WIDTH = 2048
Result = dict[str, float]


def build(gigabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of square layers and its optimizer after one step, ``gigabytes`` in all."""
    layers = max(1, round(gigabytes * 1e9 / 3 / (WIDTH * WIDTH * 4)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}/{entry}": value for entry, value in optimizer.state[parameter].items()}
    return state


def fsync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(size: int, save: Callable[[], Any], load: Callable[[], Any]) -> Result:
    """Rates in MB/s and peak memory in MB."""
    result = {}
    for name, work in (("save", save), ("load", load)):
        gc.collect()
        memory = PeakMemory()
        begin = time.perf_counter()
        work()
        result[name] = size / 1e6 / (time.perf_counter() - begin)
        result[f"{name} memory"] = memory.bytes() / 1e6
    return result


def _prepared(gigabytes: float) -> tuple[dict[str, torch.Tensor], int]:
    model, optimizer = build(gigabytes)
    optimizer.step()
    optimizer.zero_grad()
    state = flat_state(model, optimizer)
    return state, sum(t.numel() * t.element_size() for t in state.values())


def _copy_into(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)


def safetensors(folder: str, gigabytes: float) -> Result:
    from safetensors.torch import load_file, save_file

    state, size = _prepared(gigabytes)
    path = Path(folder, "state.safetensors")

    def save() -> None:
        save_file(state, path)
        fsync([path])

    return measure(size, save, lambda: _copy_into(state, load_file(path)))


def torch_save(folder: str, gigabytes: float) -> Result:
    state, size = _prepared(gigabytes)
    path = Path(folder, "state.pt")

    def save() -> None:
        torch.save(state, path)
        fsync([path])

    return measure(size, save, lambda: _copy_into(state, torch.load(path, weights_only=True, mmap=True)))


def torch_distributed_checkpoint(folder: str, gigabytes: float) -> Result:
    import torch.distributed.checkpoint as dcp

    state, size = _prepared(gigabytes)

    def save() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))  # it calls fsync itself

    return measure(size, save, lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder)))


def plain_copy(folder: str, gigabytes: float) -> Result:
    """Bytes in memory to a file and back."""
    state, size = _prepared(gigabytes)
    path = Path(folder, "bytes")
    views = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in state.values()]

    def save() -> None:
        with open(path, "wb", buffering=0) as file:
            for view in views:
                file.write(view)
            os.fsync(file.fileno())

    def load() -> None:
        with open(path, "rb", buffering=0) as file:
            for view in views:
                file.readinto(view)

    return measure(size, save, load)


def _ours(folder: str, gigabytes: float, verify: bool) -> Result:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    model, optimizer = accelerator.prepare(*build(gigabytes))
    optimizer.step()
    optimizer.zero_grad()
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    path = Path(folder, "checkpoint")

    def save() -> None:
        accelerator.save_state(path)

    result = measure(size, save, lambda: accelerator.load_state(path, verify=verify))
    if verify:
        for stall in ("first stall / save", "stall / save"):
            begin = time.perf_counter()
            accelerator.save_state(Path(folder, "background"), async_save=True)
            result[stall] = (time.perf_counter() - begin) * result["save"] * 1e6 / size
            accelerator.load_state(Path(folder, "background"), verify=False)  # waits for the background save
        result |= consolidation(path, Path(folder))
    return result


def ours(folder: str, gigabytes: float) -> Result:
    return _ours(folder, gigabytes, verify=True)


def ours_unverified(folder: str, gigabytes: float) -> Result:
    return _ours(folder, gigabytes, verify=False)


_CONSOLIDATE = """
import sys, time
from pathlib import Path
import numpy
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.testing.resources import PeakMemory
memory = PeakMemory()
begin = time.perf_counter()
consolidate(Path(sys.argv[1]), Path(sys.argv[2]))
print(time.perf_counter() - begin, memory.bytes() / 1e6)
"""


def consolidation(checkpoint: Path, folder: Path) -> Result:
    """Against a plain copy of the model's bytes, both durable."""
    source = next(iter((checkpoint / "tensor_parallel_shards").iterdir()))
    begin = time.perf_counter()
    shutil.copyfile(source, folder / "copy")
    fsync([folder / "copy"])
    copied = time.perf_counter() - begin
    command = [sys.executable, "-c", _CONSOLIDATE, str(checkpoint), str(folder / "consolidated")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    return {"consolidate / copy": copied / seconds, "consolidate memory": memory}


PEERS = {
    "safetensors": safetensors,
    "save_state, load_state": ours,
    "the same, load_state(verify=False)": ours_unverified,
    "torch.save": torch_save,
    "torch.distributed.checkpoint": torch_distributed_checkpoint,
    "plain copy": plain_copy,
}


_OTHERS = ("first stall / save", "stall / save", "consolidate / copy")


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def report(results: dict[str, list[Result]]) -> str:
    head = ["peer", "save MB/s", "load MB/s", "save ratio", "load ratio", "save memory MB", "load memory MB"]
    rows = [head, ["---"] * len(head)]
    for name, rounds in results.items():
        cells = [name, *(f"{statistics.median(r[what] for r in rounds):.0f}" for what in ("save", "load"))]
        for what in ("save", "load"):
            cells.append(middle([r[what] / s[what] for r, s in zip(rounds, results["safetensors"], strict=True)]))
        cells += [f"{statistics.median(r[f'{what} memory'] for r in rounds):.0f}" for what in ("save", "load")]
        rows.append(cells)
    own = results["save_state, load_state"]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"{what}: {middle([r[what] for r in own])}" for what in _OTHERS)]
    lines.append(f"memory added by consolidation, MB: {max(r['consolidate memory'] for r in own):.0f}")
    return "\n".join(lines)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="of the state, in GB")
    options_parser.add_argument("--folder", help="where files are written (default: the system's temporary folder)")
    options = options_parser.parse_args()
    for size in [0.05] if options.small else options.sizes:
        results: dict[str, list[Result]] = {name: [] for name in PEERS}
        for number in range(options.repeat):
            for name, peer in PEERS.items():
                note(f"{size} GB, round {number + 1}/{options.repeat}: {name}")
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    results[name].append(run_ranks(peer, 1, folder, size, timeout=900)[0])
        note("")
        print(f"\n## {size:g} GB\n\n{report(results)}", flush=True)


if __name__ == "__main__":
    main()

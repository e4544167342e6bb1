"""How long a run takes to start: weights loaded and sharded, modules imported, and the first step.

    python -m benchmarks.start [--sizes 0.13 2] [--repeat 9] [--cold]

Two gloo ranks load a Llama of the size given in GB from safetensors files, in fp32. Peers take turns in the same ranks,
in an order that changes from round to round; a turn lasts from a barrier to a barrier. transformers' own loading maps
the files and reads nothing, so it is also measured followed by a sum over all values, and followed by a copy into
ordinary memory, where the others' weights are too. Ratios are to the copy of the same round (median, quartiles), in
seconds and in seconds of the processor, which depend less on what else the machine does. Files are in the page cache;
with ``--cold`` they are dropped from it before every turn (``posix_fadvise``). Peak memory is what a turn added.

Then, in new processes that take turns: seconds and modules of ``import neuron_accel`` and of ``import accelerate``, and
seconds of two ranks from their start to the end of their first step with either.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import in_table, note, parser, quartiles
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import PeakMemory

Result = dict[str, list[float]]


# ---- Weights ---------------------------------------------------------------------------------------------------------
def configuration(gigabytes: float) -> Any:
    """Of a Llama whose weights take about ``gigabytes`` in fp32."""
    from transformers import LlamaConfig

    hidden = 2048 if gigabytes > 0.5 else 768 if gigabytes > 0.05 else 128
    vocabulary, inner = 4 * hidden, 8 * hidden // 3
    layer = 4 * hidden**2 + 3 * hidden * inner
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * vocabulary * hidden) / layer))
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def mapped(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)


def mapped_and_summed(folder: str) -> Any:
    model = mapped(folder)
    for parameter in model.parameters():
        parameter.detach().sum()
    return model


def copied(folder: str) -> Any:
    model = mapped(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def ours(folder: str) -> Any:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, lazy_load_for_parallelism

    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=dist.get_world_size())])
    with lazy_load_for_parallelism():
        model = mapped(folder)
    return accelerator.prepare(model)


def ours_from_full(folder: str) -> Any:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=dist.get_world_size())])
    return accelerator.prepare(mapped(folder))


def tp_plan_auto(folder: str) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))


def bare_slices(folder: str) -> Any:
    """Half of every matrix, by safetensors alone: what the file format and the memory allow."""
    from safetensors import safe_open

    held, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored = file.get_slice(name)
                shape = stored.get_shape()
                if len(shape) == 1:
                    held.append(stored[...].clone())
                    continue
                dim = 1 if "o_proj" in name or "down_proj" in name else 0
                wanted = slice(rank * shape[dim] // ranks, (rank + 1) * shape[dim] // ranks)
                held.append((stored[:, wanted] if dim else stored[wanted]).clone())
    return held


PEERS: dict[str, Callable[[str], Any]] = {
    "from_pretrained, copied into memory": copied,
    "from_pretrained, all values summed": mapped_and_summed,
    "from_pretrained, only mapped": mapped,
    "lazy_load_for_parallelism, prepare": ours,
    "from_pretrained, prepare": ours_from_full,
    "from_pretrained with tp_plan='auto'": tp_plan_auto,
    "safetensors' slices": bare_slices,
}
REFERENCE = "from_pretrained, copied into memory"


def loads(folder: str, repeat: int, cold: bool) -> dict[str, Result]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    order, names = random.Random(0), list(PEERS)
    results: dict[str, Result] = {name: {"seconds": [], "processor": [], "memory": []} for name in names}
    for number in range(repeat + 1):  # the first round is not counted
        order.shuffle(names)
        for name in names:
            gc.collect()
            with contextlib.suppress(
                AttributeError
            ):  # of glibc: gives freed memory back, so that all peers get new one
                ctypes.CDLL(None).malloc_trim(0)
            dist.barrier()
            if cold and dist.get_rank() == 0:
                drop(folder)
            memory = PeakMemory()
            dist.barrier()
            begin, before = time.perf_counter(), time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                model = PEERS[name](folder)
            processor = time.process_time() - before
            dist.barrier()
            seconds = time.perf_counter() - begin
            if number:
                results[name]["seconds"].append(seconds)
                results[name]["processor"].append(processor)
                results[name]["memory"].append(memory.bytes() / 1e6)
            del model
    return results


def drop(folder: str) -> None:
    """Drops the files of a folder from the page cache."""
    for path in Path(folder).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def report_loads(results: dict[str, Result]) -> str:
    rows = [["peer", "seconds", "seconds / copied", "processor / copied", "peak memory MB"]]
    for name, found in results.items():
        relative = {
            what: [own / other for own, other in zip(found[what], results[REFERENCE][what], strict=True)]
            for what in ("seconds", "processor")
        }
        memory = f"{statistics.median(found['memory']):.0f}"
        rows.append([name, quartiles(found["seconds"]), *map(quartiles, relative.values()), memory])
    return in_table(rows)


def write(folder: str, gigabytes: float) -> None:
    """Writes a model in a process of its own, whose memory is then free."""
    import transformers

    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        transformers.LlamaForCausalLM(configuration(gigabytes)).save_pretrained(folder)


# ---- Imports and the first step --------------------------------------------------------------------------------------
_IMPORT = """
import time, sys
begin = time.perf_counter()
import torch
middle, modules = time.perf_counter(), len(sys.modules)
{line}
print(time.perf_counter() - middle, len(sys.modules) - modules, middle - begin)
"""
IMPORTS = {
    "neuron_accel": "import neuron_accel; neuron_accel.NeuronAccelerator",
    "accelerate": "import accelerate; accelerate.Accelerator",
}


def imported(line: str) -> list[float]:
    """Seconds and number of modules of an import after that of torch, and seconds of torch's."""
    done = subprocess.run([sys.executable, "-c", _IMPORT.format(line=line)], capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()[-3:]]


def first_step(which: str) -> None:
    from torch import nn

    if which == "neuron_accel":
        from neuron_accel import NeuronAccelerator

        accelerator: Any = NeuronAccelerator(cpu=True)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(4, 64)).mean())
    optimizer.step()
    optimizer.zero_grad()


def report_starts(repeat: int) -> str:
    found: dict[str, list[list[float]]] = {name: [] for name in IMPORTS}
    steps: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for number in range(repeat):
        for name, line in IMPORTS.items():
            note(f"round {number + 1}/{repeat}: {name}")
            found[name].append(imported(line))
            begin = time.perf_counter()
            run_ranks(first_step, 2, name, timeout=120)
            steps[name].append(time.perf_counter() - begin)
    note("")
    rows = [["", "import, seconds after torch's", "modules", "two ranks to the first step, seconds"]]
    for name in IMPORTS:
        rows.append(
            [
                name,
                quartiles([seconds for seconds, *_ in found[name]]),
                f"{found[name][0][1]:.0f}",
                quartiles(steps[name]),
            ]
        )
    return in_table(rows)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sizes", type=float, nargs="*", default=[0.13, 2.0], help="of the weights, in GB")
    options_parser.add_argument("--folder", help="where files are written (default: the system's temporary folder)")
    options_parser.add_argument("--cold", action="store_true", help="drop files from the page cache before every turn")
    options = options_parser.parse_args()
    for size in [0.01] if options.small else options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            subprocess.run(
                [sys.executable, "-c", f"from benchmarks.start import write; write({folder!r}, {size})"], check=True
            )
            note(f"{size:g} GB")
            results = run_ranks(loads, 2, folder, options.repeat, options.cold, timeout=1800)[0]
            print(f"\n## {size:g} GB\n\n{report_loads(results)}", flush=True)
    print(f"\n## Imports and the first step\n\n{report_starts(options.repeat)}", flush=True)


if __name__ == "__main__":
    main()

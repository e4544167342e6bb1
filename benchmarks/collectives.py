"""Collectives of CPU ranks of one host: through shared memory, through gloo, and torch.distributed's own on gloo.

    python -m benchmarks.collectives [--ranks 2 4] [--repeat 30]

In every round each way runs each collective once, on the same ranks and tensors. What is printed is the time of the two
others by the time of shared memory in the same round (median and quartiles), and the bytes of a rank's tensor. Results
are compared before. Needs neuron-accel-host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from benchmarks.harness import in_table, note, parser, quartiles
from neuron_accel.backends.group import Group
from neuron_accel.backends.process_group import installed_library
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.testing import run_ranks

SIZES = (1 << 12, 1 << 20, 1 << 25)
SHARED, GLOO, TORCH = "shared memory", "gloo", "torch.distributed"


def ways(
    numel: int, backends: Mapping[str, TorchBackend], groups: Mapping[str, Group]
) -> dict[str, dict[str, Callable]]:
    """For each collective, a function for each way that runs it and returns its result."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.arange(float(numel)) % 7 + rank
    rows, mine = tensor.view(ranks, -1), torch.empty(numel // ranks)
    result: dict[str, dict[str, Callable]] = {
        "all-reduce": {TORCH: lambda: _in_place(dist.all_reduce, tensor.clone())},
        "reduce-scatter": {TORCH: lambda: _into(dist.reduce_scatter_single, torch.empty_like(mine), tensor)},
        "all-gather": {TORCH: lambda: _into(dist.all_gather_single, torch.empty(numel), rows[rank].clone())},
        "all-to-all": {TORCH: lambda: _into(dist.all_to_all_single, torch.empty(numel), tensor)},
    }
    for name, backend in backends.items():
        group = groups[name]
        result["all-reduce"][name] = lambda b=backend, g=group: b.all_reduce(tensor.clone(), g)
        result["reduce-scatter"][name] = lambda b=backend, g=group: b.start_reduce_scatter_into(
            torch.empty_like(mine), tensor, g
        ).wait()
        result["all-gather"][name] = lambda b=backend, g=group: b.all_gather(rows[rank].clone(), g)
        result["all-to-all"][name] = lambda b=backend, g=group: b.all_to_all(tensor, g)
    return result


def _in_place(collective: Callable[..., object], tensor: torch.Tensor) -> torch.Tensor:
    collective(tensor)
    return tensor


def _into(collective: Callable[..., object], out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    collective(out, tensor)
    return out


def measure(size: int, repeat: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by collective and way. Collective."""
    backends = {
        SHARED: TorchBackend.connect("cpu", library=installed_library()),
        GLOO: TorchBackend.connect("cpu", library="gloo"),
    }
    groups = {name: backend.new_group([range(dist.get_world_size())], "world") for name, backend in backends.items()}
    seconds: dict[str, dict[str, list[float]]] = {}
    for collective, each in ways(size // 4, backends, groups).items():
        expected = each[TORCH]()
        for way, run in each.items():
            torch.testing.assert_close(run(), expected.view_as(run()), msg=f"{collective} through {way}")
        times = seconds[collective] = {way: [] for way in each}
        for _ in range(repeat):
            for way, run in each.items():
                dist.barrier()
                begin = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - begin)
    for backend in backends.values():
        backend.shutdown()
    return seconds


def main(arguments: list[str] | None = None) -> None:
    options_parser = parser(__doc__)
    options_parser.set_defaults(repeat=30)
    options = options_parser.parse_args(arguments)
    for ranks in options.ranks:
        rows = [
            ["", *(f"{'torch' if way == TORCH else way}, {_name(size)}" for size in SIZES for way in (GLOO, TORCH))]
        ]
        found: dict[str, list[str]] = {}
        for size in SIZES[: 1 if options.small else None]:
            note(f"{ranks} ranks: {_name(size)}")
            for collective, times in run_ranks(measure, ranks, size, options.repeat, timeout=600)[0].items():
                for way in (GLOO, TORCH):
                    pairs = zip(times[way], times[SHARED], strict=True)
                    found.setdefault(collective, []).append(quartiles([other / ours for other, ours in pairs]))
        note("")
        rows = [row[: 1 + len(next(iter(found.values())))] for row in rows]
        print(f"## {ranks} ranks\n\n{in_table([*rows, *([name, *cells] for name, cells in found.items())])}\n")


def _name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


if __name__ == "__main__":
    main()

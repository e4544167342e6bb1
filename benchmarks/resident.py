"""What is resident in a rank after each step of data parallelism and of ZeRO-1, ours and torch's, on two gloo ranks.

    python -m benchmarks.resident
    NEURON_ACCEL_SHARED_MEMORY=0 python -m benchmarks.resident      without neuron-accel-host's transport

The model has 32 M parameters, 128 MiB in fp32, and is trained by AdamW. A row names what malloc has handed out
(weights, gradients, the optimizer's state), files (libraries), memory that ranks share, the rest (freed memory that
malloc keeps, stacks), and all resident memory of the rank, in MiB. Pages that ranks share are resident in each of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import allocated_bytes

SIZE, LAYERS, STEPS = 1024, 32, 4
HEAD = ("in use", "files", "shared", "rest", "resident")


def resident() -> list[int]:
    """The columns of :data:`HEAD`, in MiB."""
    pages: Counter[str] = Counter()
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
            kind = "shared" if "memfd:" in name else "files" if name.startswith("/") else ""
        elif words[0] == "Rss:":
            pages[kind] += int(words[1])  # KiB
    mib = Counter({name: size >> 10 for name, size in pages.items()})
    used, all_pages = allocated_bytes() >> 20, sum(pages.values()) >> 10
    return [used, mib["files"], mib["shared"], all_pages - used - mib["files"] - mib["shared"], all_pages]


def measure(peer: str) -> list[list[int]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from neuron_accel import NeuronAccelerator, Zero1Plugin

    rows = [resident()]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(SIZE, SIZE, bias=False), torch.nn.Tanh())]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer
    if peer in ("DataParallelPlugin", "Zero1Plugin"):
        accelerator = NeuronAccelerator(plugins=[Zero1Plugin()] if peer == "Zero1Plugin" else [])
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        backward = accelerator.backward
    else:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if peer == "DDP":
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        backward = torch.Tensor.backward
    rows.append(resident())
    for _ in range(STEPS):
        backward(model(torch.randn(16, SIZE)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        rows.append(resident())
    return rows


def main() -> int:
    for peer in ("DataParallelPlugin", "Zero1Plugin", "DDP", "ZeroRedundancyOptimizer"):
        rows = run_ranks(measure, 2, peer, timeout=300)[0]
        print(peer)
        print(f"{'':10}" + "".join(f"{name:>10}" for name in HEAD))
        for name, row in zip(("start", "prepared", *(f"step {n + 1}" for n in range(STEPS))), rows, strict=True):
            print(f"{name:10}" + "".join(f"{value:10}" for value in row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What optimizers keep and send under ZeRO-1 and fully sharded: counts of the tables in "Other optimizers".

    OMP_NUM_THREADS=1 python -m benchmarks.optimizers [--ranks 2 4]

Every optimizer trains a Llama on gloo ranks under ``Zero1Plugin`` and under ``FullyShardedPlugin``, with the partition
that it needs. Columns, per rank and relative to the bytes of the parameters in fp32: the tensors of the optimizer's
state, on the rank that has most of them, and what the kernel sent over TCP in a step. Optimizers of matrices (Muon,
Shampoo, SOAP) have the matrices of the blocks, and AdamW the rest. The row of an optimizer whose package is not
installed names the package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.harness import OVER_TCP, in_table, note, parser
from benchmarks.zero1 import LENGTH, build
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import bytes_sent

ENDS = ("embed_tokens.weight", "lm_head.weight")


def whole(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [make(model.parameters())]


def of_matrices(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in model.named_parameters():
            parts[parameter.dim() != 2 or name.endswith(ENDS)].append(parameter)
        return [make(parts[0]), torch.optim.AdamW(parts[1])]

    return both


def of_library(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer

        optimizer = getattr(pytorch_optimizer, name)(parameters)
        if hasattr(optimizer, "train"):  # schedule-free
            optimizer.train()
        return optimizer

    return make


def of_8_bits(parameters: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters)


STRATEGIES = {"ZeRO-1": "Zero1Plugin", "Fully sharded": "FullyShardedPlugin"}
OPTIMIZERS: dict[str, tuple[str, Callable[[nn.Module], list[torch.optim.Optimizer]]]] = {
    "AdamW": ("even", whole(torch.optim.AdamW)),
    "SGD with momentum": ("even", whole(lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9))),
    "Lion": ("even", whole(of_library("Lion"))),
    "ScheduleFreeAdamW": ("even", whole(of_library("ScheduleFreeAdamW"))),
    "Adafactor": ("parameters", whole(torch.optim.Adafactor)),
    "Lamb": ("parameters", whole(of_library("Lamb"))),
    "Muon": ("parameters", of_matrices(torch.optim.Muon)),
    "Shampoo": ("parameters", of_matrices(of_library("Shampoo"))),
    "SOAP": ("parameters", of_matrices(of_library("SOAP"))),
    "AdamW8bit": ("parameters", whole(of_8_bits)),
}
PACKAGES = {"AdamW8bit": "torchao"} | dict.fromkeys(
    ("Lion", "ScheduleFreeAdamW", "Lamb", "Shampoo", "SOAP"), "pytorch_optimizer"
)
"""What has to be installed for an optimizer that is not torch's."""
WITHOUT_COMPILING = {"TORCHDYNAMO_DISABLE": "1"}
"""torchao compiles its step for every shape, which takes minutes and changes no count."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state, and those of which quantized ones are made."""
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (tensor for entry in value for tensor in tensors_of(entry))


def count(name: str, strategy: str, small: bool) -> tuple[float, float]:
    """What this rank keeps and sends, relative to the parameters."""
    import neuron_accel

    partition, make = OPTIMIZERS[name]
    plugin = getattr(neuron_accel, STRATEGIES[strategy])(partition=partition)
    accelerator = neuron_accel.NeuronAccelerator(plugins=[plugin])
    model, size = build(small)
    model, *optimizers = accelerator.prepare(model, *make(model))
    ids = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        dist.barrier()
        before = bytes_sent()
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sent = bytes_sent() - before
    states = [entry for optimizer in optimizers for state in optimizer.state.values() for entry in state.values()]
    kept = sum(t.numel() * t.element_size() for entry in states for t in tensors_of(entry))
    accelerator.free_memory()
    return kept / size, sent / size


def count_all(names: Sequence[str], strategy: str, small: bool) -> dict[str, tuple[float, float]]:
    found = {}
    for name in names:
        if dist.get_rank() == 0:
            note(f"{strategy}, {name} on {dist.get_world_size()} ranks")
        found[name] = count(name, strategy, small)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    for strategy in STRATEGIES:
        print(f"\n## {strategy}\n\n{measure(strategy, options.ranks, options.small)}", flush=True)


def measure(strategy: str, numbers: Sequence[int], small: bool) -> str:
    missing = {name: p for name, p in PACKAGES.items() if importlib.util.find_spec(p) is None}
    names = [name for name in OPTIMIZERS if name not in missing]
    cells: dict[str, list[str]] = {name: [] for name in names}
    for ranks in numbers:
        found = run_ranks(count_all, ranks, names, strategy, small, timeout=1800, env=OVER_TCP | WITHOUT_COMPILING)
        for name in names:
            cells[name] += [f"{max(values):.2f}" for values in zip(*(rank[name] for rank in found), strict=True)]
    rows = [["optimizer", "partition", *(f"{what}, {n} ranks" for n in numbers for what in ("state", "sent"))]]
    for name, (partition, _) in OPTIMIZERS.items():
        without = [f"{missing.get(name)} is not installed", *[""] * (2 * len(numbers) - 1)]
        rows.append([name, partition, *cells.get(name, without)])
    return in_table(rows)


if __name__ == "__main__":
    main()

"""ZeRO-1 against DistributedDataParallel, torch's own ZeroRedundancyOptimizer, and FSDP2.

    OMP_NUM_THREADS=1 python -m benchmarks.zero1 [--ranks 2 4] [--optimizers plain fused] [--libraries gloo host]

Every peer trains the same Llama-shaped model on the same tokens with AdamW, all on gloo, and all on neuron-accel-host
if that is installed. DDP has gradients in its buckets and a static graph, and ZeroRedundancyOptimizer parameters in
buckets. Columns: tokens/s relative to DDP + AdamW and to torch's ZeroRedundancyOptimizer in the same round (median and
quartiles over rounds; all peers take turns within the same ranks), and, from ranks of the peer's own, peak memory
relative to DDP, and per rank, relative to the parameters' bytes, the optimizer's state and what the kernel sent over
TCP in a step. The floor of the latter is 2 (N - 1) / N.

Two rows say what there is to gain. "compute alone" is the forward and backward pass and the update of 1 / N of the
parameters, with nothing sent at all: where cores are free for communication, nothing can be faster. "compute, then the
bytes" adds as many bytes as ZeRO-1 needs in one bare all-reduce: where all cores compute, nothing is hidden.

torch's ZeroRedundancyOptimizer refuses its overlapped variant on gloo; where it does, its row is missing and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import OVER_TCP, in_table, note, parser, quartiles, race
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import PeakMemory, bytes_sent

LENGTH = 128


@dataclass(frozen=True)
class Peer:
    """A training on this rank.

    Args:
        model: as the loop calls it.
        optimizer: what the loop steps.
        size: of the model's parameters, in bytes.
        state: tensors of the optimizer's state on this rank.
        backward: of a loss.
    """

    model: nn.Module
    optimizer: Any
    size: int
    state: Callable[[], Iterable[torch.Tensor]]
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward


def build(small: bool) -> tuple[nn.Module, int]:
    """The model, and the size of its parameters in bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = (64, 2, 256) if small else (512, 8, 8192)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )
    return model, _bytes(model.parameters())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _moments(state: Any) -> list[torch.Tensor]:
    values = [v for entries in state.values() for v in entries.values() if isinstance(v, torch.Tensor) and v.dim()]
    return [v.to_local() if hasattr(v, "to_local") else v for v in values]


def _in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def ddp(small: bool, fused: bool) -> Peer:
    model, size = build(small)
    model = _in_ddp(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return Peer(model, optimizer, size, lambda: _moments(optimizer.state))


def torch_zero(small: bool, fused: bool) -> Peer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, size = build(small)
    model = _in_ddp(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=fused
        )
    return Peer(model, optimizer, size, lambda: _moments(optimizer.optim.state))


def torch_zero_overlapped(small: bool, fused: bool) -> Peer:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, size = build(small)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, parameters_as_bucket_view=True, fused=fused
    )
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    return Peer(model, optimizer, size, lambda: _moments(optimizer.optim.state))


def _fsdp2(small: bool, fused: bool, reshard: bool) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, size = build(small)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return Peer(model, optimizer, size, lambda: _moments(optimizer.state))


def fsdp2(small: bool, fused: bool) -> Peer:
    return _fsdp2(small, fused, reshard=False)


def fsdp2_resharding(small: bool, fused: bool) -> Peer:
    return _fsdp2(small, fused, reshard=True)


def ours(small: bool, fused: bool) -> Peer:
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model, size = build(small)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused))
    return Peer(model, optimizer, size, lambda: _moments(optimizer.state), accelerator.backward)


def compute_alone(small: bool, fused: bool) -> Peer:
    """This rank's share of the work, and no communication."""
    model, size = build(small)
    mine: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        (mine if _bytes(mine) < size / dist.get_world_size() else others).append(parameter)
    optimizer = torch.optim.AdamW(mine, fused=fused)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        for parameter in others:
            parameter.grad = None

    return Peer(model, optimizer, size, lambda: _moments(optimizer.state), backward)


def compute_and_bytes(small: bool, fused: bool) -> Peer:
    """The same, and then as many bytes as ZeRO-1 has to send."""
    peer = compute_alone(small, fused)
    flat = torch.zeros(peer.size // 4)

    def backward(loss: torch.Tensor) -> None:
        peer.backward(loss)
        dist.all_reduce(flat)

    return replace(peer, backward=backward)


PEERS: dict[str, Callable[[bool, bool], Peer]] = {
    "DDP": ddp,
    "Zero1Plugin": ours,
    "DDP + ZeroRedundancyOptimizer": torch_zero,
    "FSDP2, no resharding": fsdp2,
    "FSDP2, resharding": fsdp2_resharding,
    "compute, then the bytes": compute_and_bytes,
    "compute alone": compute_alone,
}
OVERLAPPED = "DDP + ZeroRedundancyOptimizer, overlapped"


def step_of(name: str, small: bool, fused: bool) -> Callable[[], None]:
    return _step(({OVERLAPPED: torch_zero_overlapped} | PEERS)[name](small, fused), small)


def _step(peer: Peer, small: bool) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(256 if small else 8192, (1, LENGTH), generator=generator)

    def step() -> None:
        peer.backward(peer.model(input_ids=ids, labels=ids, use_cache=False).loss)
        peer.optimizer.step()
        peer.optimizer.zero_grad()

    return step


def count(name: str, small: bool, fused: bool) -> dict[str, float]:
    """Peak memory of this rank, in bytes, and what it holds and sends relative to the parameters."""
    if name == "Zero1Plugin":
        import neuron_accel  # noqa: F401  like torch: what importing takes is not the peer's
    memory = PeakMemory()
    peer = ({OVERLAPPED: torch_zero_overlapped} | PEERS)[name](small, fused)
    step = _step(peer, small)
    step()
    dist.barrier()
    before = bytes_sent()
    step()
    sent = bytes_sent() - before
    step()
    return {"peak": memory.bytes(), "state": _bytes(peer.state()) / peer.size, "sent": sent / peer.size}


def measure(ranks: int, small: bool, fused: bool, library: str, repeat: int) -> str:
    """The table for a number of ranks."""
    names, remark = [*PEERS], ""
    counts = {}
    for name in (*PEERS, OVERLAPPED):
        note(f"{ranks} ranks: memory and bytes of {name}")
        try:
            measured = run_ranks(count, ranks, name, small, fused, timeout=120, env=OVER_TCP)
        except Exception as error:
            if name != OVERLAPPED:
                raise
            remark = f"\nZeroRedundancyOptimizer, overlapped: {str(error.__cause__ or error).splitlines()[0]}"
            continue
        counts[name] = measured[0] | {"peak": max(m["peak"] for m in measured)}
    if OVERLAPPED in counts:
        names.append(OVERLAPPED)
    turns = race({n: partial(step_of, n) for n in names}, ranks, small, fused, repeat=repeat, library=library)
    rows = [["peer", "rate / DDP", "rate / ZeroRedundancyOptimizer", "peak memory / DDP", "state", "sent"]]
    for name in names:
        relative = [
            quartiles([r.seconds / t.seconds for r, t in zip(turns[reference], turns[name], strict=True)])
            for reference in ("DDP", "DDP + ZeroRedundancyOptimizer")
        ]
        found = counts[name]
        peak = found["peak"] / counts["DDP"]["peak"]
        rows.append([name, *relative, f"{peak:.2f}", f"{found['state']:.3f}", f"{found['sent']:.3f}"])
    return in_table(rows) + remark


def main(arguments: Sequence[str] | None = None) -> None:
    options_parser = parser(__doc__, on_libraries=True)
    options_parser.set_defaults(repeat=15)
    options_parser.add_argument(
        "--optimizers", nargs="+", default=["plain", "fused"], choices=["plain", "fused"], help="AdamW's variants"
    )
    options = options_parser.parse_args(arguments)
    for ranks, library, variant in product(options.ranks, options.libraries, options.optimizers):
        rows = measure(ranks, options.small, variant == "fused", library, options.repeat)
        print(f"\n## {ranks} ranks on {library}, {variant} AdamW\n\n{rows}", flush=True)


if __name__ == "__main__":
    main()

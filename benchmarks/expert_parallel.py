"""Experts over ranks with other samples, against the same experts under tensor parallelism, and replicated.

    PYTHONPATH=plugins/neuron-accel-expert-parallel/src OMP_NUM_THREADS=1 python -m benchmarks.expert_parallel
        [--ranks 2 4] [--repeat 15] [--small]

All train the same Mixtral-shaped model with the same weights on the same global batch with AdamW, on gloo ranks; their
losses are compared before anything is reported. "replicated experts" is data parallelism, in which every rank holds,
updates and reduces all experts; "tensor parallel" shards attention and the features of every expert, and every rank
computes for all samples.

Columns: tokens/s relative to replicated experts and to tensor parallelism in the same round (median and quartiles over
rounds; all peers take turns within the same ranks), processor time of all ranks relative to replicated experts in the
same round, and, from ranks of the peer's own, peak memory relative to replicated experts, the bytes of parameters that
a rank holds, and the bytes that the kernel sent over TCP in a step.

Two rows say what there is to gain. "computation alone" is the forward and backward pass of a rank's samples through all
experts, and the update of what it holds under expert parallelism, with nothing sent: where cores are free for
communication, nothing can be faster. "computation, then the bytes" adds the least that expert parallelism must send,
by two bare collectives: the rows of tokens and their gradients in one all-to-all, the gradients of replicated
parameters in one all-reduce.

The line below has the bytes of the all-to-all that a rank sends in a step, beside that least: four rows of the hidden
size for each pair of a token and another rank that holds one of its experts. What is above it are the numbers of the
experts, their weights and the gradients of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import OVER_TCP, in_table, note, parser, quartiles, race
from neuron_accel.testing import PeakMemory, run_ranks

REPLICATED, EXPERTS, TENSORS = "replicated experts", "ExpertParallelPlugin", "TensorParallelPlugin"
BATCH, LENGTH = 4, 128
"""Samples of all ranks together, and tokens of each."""


@dataclass(frozen=True)
class Peer:
    """A training on this rank.

    Args:
        model: what is trained.
        step: one step on this rank's samples, which returns the mean of their losses.
        accelerator: that prepared it; None for a bound.
    """

    model: Any
    step: Callable[[], torch.Tensor]
    accelerator: Any = None


def build(small: bool) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    hidden, layers, vocabulary = (32, 2, 256) if small else (256, 4, 4096)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config).train()


def samples(model: Any, index: int, size: int) -> torch.Tensor:
    """Token ids ``[batch, length]`` of one of ``size`` data-parallel ranks, which share the same global batch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=generator).chunk(size)[index]


def ours(plugins: list[Any], small: bool) -> Peer:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=plugins)
    model = build(small)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = samples(model, accelerator.data_parallel_rank, accelerator.data_parallel_size)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Peer(model, step, accelerator)


def replicated(small: bool) -> Peer:
    return ours([], small)


def expert_parallel(small: bool) -> Peer:
    from neuron_accel_expert_parallel import ExpertParallelPlugin

    return ours([ExpertParallelPlugin(expert_parallel_size=dist.get_world_size())], small)


def tensor_parallel(small: bool) -> Peer:
    from neuron_accel import TensorParallelPlugin

    return ours([TensorParallelPlugin(tensor_parallel_size=dist.get_world_size())], small)


def computation(small: bool) -> Peer:
    model, rank, ranks = build(small), dist.get_rank(), dist.get_world_size()
    ids = samples(model, rank, ranks)
    stacked, rest = both(model)
    held = [nn.Parameter(p.detach().chunk(ranks)[rank].clone()) for p in stacked]
    optimizer = torch.optim.AdamW([*rest, *held])

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for mine, parameter in zip(held, stacked, strict=True):
            assert parameter.grad is not None
            mine.grad = parameter.grad.chunk(ranks)[rank]
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return Peer(model, step)


def computation_and_bytes(small: bool) -> Peer:
    peer, ranks = computation(small), dist.get_world_size()
    rows = torch.zeros(sum(needed(peer.model)) * peer.model.config.hidden_size // ranks * ranks)
    received = torch.empty_like(rows)
    gradients = torch.zeros(sum(p.numel() for p in both(peer.model)[1]))

    def step() -> torch.Tensor:
        loss = peer.step()
        dist.all_to_all_single(received, rows)
        dist.all_reduce(gradients)
        return loss

    return Peer(peer.model, step)


def both(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of experts, and all others."""
    named = list(model.named_parameters())
    return [p for n, p in named if ".experts." in n], [p for n, p in named if ".experts." not in n]


def needed(model: Any) -> list[int]:
    """The rows of the hidden size that this rank must send in a step, for each layer: a token to each other rank that
    holds one of its experts, as many rows back as it receives (here the mean over ranks), and both for gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = model.config.num_local_experts // ranks
    rows: list[int] = []

    def count(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        holders = torch.zeros(len(output[-1]), ranks).scatter_(1, output[-1] // local, 1)
        holders[:, rank] = 0
        total = holders.sum()
        dist.all_reduce(total)
        rows.append(round(4 * float(total) / ranks))

    handles = [layer.mlp.gate.register_forward_hook(count) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=samples(model, rank, ranks))
    for handle in handles:
        handle.remove()
    return rows


PEERS: dict[str, Callable[[bool], Peer]] = {
    REPLICATED: replicated,
    TENSORS: tensor_parallel,
    EXPERTS: expert_parallel,
    "computation, then the bytes": computation_and_bytes,
    "computation alone": computation,
}


def step_of(name: str, small: bool) -> Callable[[], torch.Tensor]:
    return PEERS[name](small).step


def count(name: str, small: bool) -> dict[str, float]:
    """What a peer needs on this rank, in bytes; and its first loss."""
    import neuron_accel  # noqa: F401  like torch: what importing takes is not the peer's
    from neuron_accel.testing.resources import bytes_sent

    memory = PeakMemory()
    peer = PEERS[name](small)
    loss = peer.step() / dist.get_world_size()
    dist.all_reduce(loss)
    dist.barrier()
    before = bytes_sent()
    peer.step()
    result = {"loss": float(loss), "sent": bytes_sent() - before}
    result["held"] = sum(p.numel() * p.element_size() for p in peer.model.parameters())
    peer.step()
    result["peak"] = memory.bytes()
    if name == EXPERTS:
        row = peer.model.config.hidden_size * 4
        result["least"] = sum(needed(peer.model)) * row
        with peer.accelerator.run.backend.record() as traffic:
            peer.step()
        result["all to all"] = traffic.sent(op="all_to_all_uneven", group="ep")
    return result


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.set_defaults(repeat=15)
    options = options_parser.parse_args()
    for ranks in options.ranks:
        counts: dict[str, dict[str, float]] = {}
        for name in PEERS:
            note(f"{ranks} ranks: memory and bytes of {name}")
            measured = run_ranks(count, ranks, name, options.small, timeout=300, env=OVER_TCP)
            mean = {key: sum(each[key] for each in measured) / ranks for key in measured[0]}
            counts[name] = mean | {"peak": max(each["peak"] for each in measured)}
        losses = {name: found["loss"] for name, found in counts.items()}
        if max(losses.values()) - min(losses.values()) > 1e-4:
            raise SystemExit(f"the peers disagree about the loss: {losses}")
        turns = race({n: partial(step_of, n) for n in PEERS}, ranks, options.small, repeat=options.repeat)
        rows = [["peer", f"rate / {REPLICATED}", f"rate / {TENSORS}", "processor time", "peak memory", "held", "sent"]]
        for name, found in counts.items():
            relative = [
                quartiles([r.seconds / t.seconds for r, t in zip(turns[reference], turns[name], strict=True)])
                for reference in (REPLICATED, TENSORS)
            ]
            peak = found["peak"] / counts[REPLICATED]["peak"]
            megabytes = [f"{found[each] / 1e6:.1f} MB" for each in ("held", "sent")]
            pairs = zip(turns[name], turns[REPLICATED], strict=True)
            processor = quartiles([mine.cpu_seconds / theirs.cpu_seconds for mine, theirs in pairs])
            rows.append([name, *relative, processor, f"{peak:.2f}", *megabytes])
        mine = counts[EXPERTS]
        print(f"\n## {ranks} ranks\n\n{in_table(rows)}", flush=True)
        print(
            f"\nAll-to-all of {EXPERTS}, sent by a rank in a step: {mine['all to all'] / 1e6:.3f} MB, the least is "
            f"{mine['least'] / 1e6:.3f} MB ({mine['all to all'] / mine['least']:.3f} x)",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Fully sharded parameters against FSDP2 and FSDP1 of PyTorch, beside ZeRO-1 and DistributedDataParallel.

    OMP_NUM_THREADS=1 python -m benchmarks.fully_sharded [--ranks 2 4] [--optimizers plain fused] [--repeat 8]

Every peer trains the same Llama-shaped model on the same tokens with AdamW, all on gloo, and all on neuron-accel-host
if that is installed, and must compute the same losses as DDP does, or the benchmark ends with an error. A block of the
model is one unit of every peer that shards parameters. FSDP2 is there twice for each setting of resharding, also with
the blocks to prefetch given explicitly; FSDP1 has `BACKWARD_PRE`, `forward_prefetch`, `limit_all_gathers` and
`use_orig_params`.

Columns: tokens/s relative to FSDP2 with and without resharding (the faster one of each in the same round; median and
quartiles over rounds: all peers take turns within the same ranks), and the processor time of a step relative to the
same two, over all ranks, which what else the machine does changes little. From ranks of the peer's own, for one step of
one rank: bytes sent over TCP according to the kernel, relative to the parameters' bytes ("sent"), and those that the
calls of our backend add up to ("counted"); the number of collectives; the peak of the bytes of live tensors, and what
remains of them between steps, relative to the parameters; and the peak growth of resident memory, relative to FSDP2
with resharding.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import OVER_TCP, Turn, in_table, note, parser, quartiles, race
from neuron_accel.backends.process_group import let_threads_finish
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import PeakMemory, bytes_sent

STEPS = 4
"""Steps whose losses are compared, and of which the last two are counted."""


@dataclass(frozen=True)
class Size:
    """What is trained.

    Args:
        hidden, layers, vocabulary: of the model.
        tokens: in one sequence, of which each rank has one in a step.
    """

    hidden: int = 512
    layers: int = 8
    vocabulary: int = 8192
    tokens: int = 128


@dataclass(frozen=True)
class Peer:
    """A training on this rank.

    Args:
        model: as the loop calls it.
        optimizer: what the loop steps.
        backward: of a loss.
        counts: a context that counts the bytes of collectives, where there is one.
    """

    model: nn.Module
    optimizer: Any
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    counts: Callable[[], Any] = nullcontext


def build(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.hidden * 11 // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )


def adamw(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=fused)


# ---- the peers -------------------------------------------------------------------------------------------------------
def ddp(size: Size, fused: bool) -> Peer:
    model = nn.parallel.DistributedDataParallel(build(size), gradient_as_bucket_view=True)
    return Peer(model, adamw(model, fused))


def fsdp2(size: Size, fused: bool, *, reshard: bool, prefetch: bool) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if prefetch:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return Peer(model, adamw(model, fused))


def fsdp1(size: Size, fused: bool, *, reshard: bool) -> Peer:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = build(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of FSDP2
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            limit_all_gathers=True,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    return Peer(model, adamw(model, fused))


def ours(size: Size, fused: bool, *, plugin: str, **options: Any) -> Peer:
    import neuron_accel

    accelerator = neuron_accel.NeuronAccelerator(plugins=[getattr(neuron_accel, plugin)(**options)])
    model = build(size)
    model, optimizer = accelerator.prepare(model, adamw(model, fused))
    return Peer(model, optimizer, accelerator.backward, accelerator.run.backend.record)


STAGE_3, STAGE_2 = "FullyShardedPlugin, stage 3", "FullyShardedPlugin, stage 2"
RESHARDING, KEEPING = "FSDP2, resharding", "FSDP2, no resharding"
PREFETCH = ", explicit prefetch"
PEERS: dict[str, Callable[[Size, bool], Peer]] = {
    STAGE_3: partial(ours, plugin="FullyShardedPlugin"),
    STAGE_2: partial(ours, plugin="FullyShardedPlugin", reshard_after_forward=False),
    RESHARDING: partial(fsdp2, reshard=True, prefetch=False),
    RESHARDING + PREFETCH: partial(fsdp2, reshard=True, prefetch=True),
    KEEPING: partial(fsdp2, reshard=False, prefetch=False),
    KEEPING + PREFETCH: partial(fsdp2, reshard=False, prefetch=True),
    "FSDP1, FULL_SHARD": partial(fsdp1, reshard=True),
    "FSDP1, SHARD_GRAD_OP": partial(fsdp1, reshard=False),
    "Zero1Plugin": partial(ours, plugin="Zero1Plugin"),
    "DDP": ddp,
}


# ---- one step --------------------------------------------------------------------------------------------------------
def step_of(name: str, size: Size, fused: bool) -> Callable[[], float]:
    return _step(PEERS[name](size, fused), size)


def _step(peer: Peer, size: Size) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(size.vocabulary, (1, size.tokens), generator=generator)

    def step() -> float:
        loss = peer.model(input_ids=ids, labels=ids, use_cache=False).loss
        value = loss.item()
        peer.backward(loss)
        peer.optimizer.step()
        peer.optimizer.zero_grad()
        return value

    return step


@dataclass(frozen=True)
class Counts:
    """What one rank needs for a step.

    Args:
        losses: of this rank in the first steps.
        sent: bytes that the kernel sent.
        counted: bytes that the backend's calls send; None where nothing counts them.
        collectives: number of calls.
        live: peak of the bytes of live tensors.
        kept: bytes of live tensors between steps.
        resident: peak growth of resident memory.
    """

    losses: list[float]
    sent: int
    counted: int | None
    collectives: int
    live: int
    kept: int
    resident: int


def count(name: str, size: Size, fused: bool) -> Counts:
    """What a peer needs, on ranks of its own."""
    import transformers.models.llama.modeling_llama  # noqa: F401  what importing takes is not the peer's

    import neuron_accel  # noqa: F401

    memory = PeakMemory()
    peer = PEERS[name](size, fused)
    step = _step(peer, size)
    losses = [step() for _ in range(STEPS - 2)]
    dist.barrier()
    before = bytes_sent()
    with peer.counts() as traffic:
        losses.append(step())
    sent = bytes_sent() - before
    losses.append(step())
    resident = memory.bytes()
    del peer, step
    return Counts(losses, sent, traffic.sent() if traffic else None, *tensors(name, size, fused), resident)


class LiveTensors(TorchDispatchMode):
    """Watches the storages of all tensors that operations return, also inside DTensors, and counts collectives.

    Attributes:
        peak: of the bytes of live storages after an operation, since :meth:`start`.
        collectives: calls since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        self._started, self.peak, self.collectives = False, 0, 0

    def start(self) -> None:
        self._started = True

    def bytes(self) -> int:
        """Bytes of the storages that are alive. One that was resized counts with its present size."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if type(tensor) in (torch.Tensor, nn.Parameter):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._known.setdefault(reference.cdata, reference)
        if self._started:
            if self.bytes() > self.peak:
                # gloo reports a collective as complete shortly before its thread lets go of its tensors
                let_threads_finish()
                self.peak = max(self.peak, self.bytes())
            self.collectives += function.namespace == "c10d" and "barrier" not in function.__name__
        return result


def tensors(name: str, size: Size, fused: bool) -> tuple[int, int, int]:
    """Collectives of the third step of a peer that is built anew, so that all tensors are seen, the peak of their bytes
    in this step, and what remains of them after it."""
    with LiveTensors() as live:
        step = step_of(name, size, fused)
        for _ in range(2):
            step()
        gc.collect()
        live.start()
        step()
    gc.collect()
    return live.collectives, live.peak, live.bytes()


def check_losses(counts: Mapping[str, Sequence[Counts]]) -> None:
    """Raises RuntimeError unless all peers have the losses of DDP, on every rank."""
    for name, ranks in counts.items():
        for rank, (mine, theirs) in enumerate(zip(ranks, counts["DDP"], strict=True)):
            if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(mine.losses, theirs.losses, strict=True)):
                raise RuntimeError(f"{name} has losses {mine.losses} on rank {rank}, DDP has {theirs.losses}")


# ---- the tables ------------------------------------------------------------------------------------------------------
def relative(turns: Mapping[str, Sequence[Turn]], name: str, reference: str, *, rate: bool) -> str:
    """Rate, or processor time, relative to the faster one of a reference with and without explicit prefetch."""
    each = []
    for mine, *others in zip(turns[name], turns[reference], turns[reference + PREFETCH], strict=True):
        if rate:
            each.append(min(other.seconds for other in others) / mine.seconds)
        else:
            each.append(mine.cpu_seconds / min(other.cpu_seconds for other in others))
    return quartiles(each)


def rows(turns: Mapping[str, Sequence[Turn]], counts: Mapping[str, Sequence[Counts]], size: int) -> list[list[str]]:
    """The table; ``size`` is that of the parameters in bytes."""
    head = ["peer", "rate / resharding", "rate / no resharding", "CPU / resharding", "CPU / no resharding"]
    result = [[*head, "sent", "counted", "collectives", "live peak", "kept", "resident"]]
    resident = max(c.resident for c in counts[RESHARDING])
    for name, ranks in counts.items():
        first = ranks[0]
        speed = [relative(turns, name, other, rate=rate) for rate in (True, False) for other in (RESHARDING, KEEPING)]
        result.append(
            [
                name,
                *speed,
                f"{max(c.sent for c in ranks) / size:.3f}",
                "-" if first.counted is None else f"{first.counted / size:.3f}",
                str(first.collectives),
                f"{max(c.live for c in ranks) / size:.2f}",
                f"{max(c.kept for c in ranks) / size:.2f}",
                f"{max(c.resident for c in ranks) / resident:.2f}",
            ]
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options_parser = parser(__doc__, on_libraries=True)
    options_parser.set_defaults(repeat=8)
    add = options_parser.add_argument
    add("--optimizers", nargs="+", default=["plain", "fused"], choices=["plain", "fused"], help="AdamW's variants")
    for name, what in (("hidden", "features"), ("layers", "blocks"), ("vocabulary", "tokens that there are")):
        add(f"--{name}", type=int, default=getattr(Size, name), help=f"{what} (default: {getattr(Size, name)})")
    add("--tokens", type=int, default=Size.tokens, help=f"tokens of a rank in a step (default: {Size.tokens})")
    add("--peers", nargs="+", default=[*PEERS], choices=[*PEERS], help="beside FSDP2 and DDP (default: all)")
    options = options_parser.parse_args(arguments)
    size = Size(options.hidden, options.layers, options.vocabulary, options.tokens)
    if options.small:
        size = Size(hidden=64, layers=2, vocabulary=256, tokens=16)
    names = [n for n in PEERS if n in options.peers or n.startswith("FSDP2") or n == "DDP"]
    model_bytes = sum(p.numel() * p.element_size() for p in build(size).parameters())
    for ranks in options.ranks:
        for variant in options.optimizers:
            fused = variant == "fused"
            counts = {}
            for name in names:
                note(f"{ranks} ranks, {variant} AdamW: memory and bytes of {name}")
                counts[name] = run_ranks(count, ranks, name, size, fused, timeout=300, env=OVER_TCP)
            check_losses(counts)
            built = {n: partial(step_of, n) for n in names}
            for library in options.libraries:
                turns = race(built, ranks, size, fused, repeat=options.repeat, library=library)
                title = f"{ranks} ranks on {library}, {variant} AdamW, {model_bytes / 4e6:.1f} million parameters"
                print(f"\n## {title}\n\n{in_table(rows(turns, counts, model_bytes))}", flush=True)


if __name__ == "__main__":
    main()

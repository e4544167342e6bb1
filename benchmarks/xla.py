"""Training steps on real torch_xla ranks: ours against torch_xla's ZeRO-1 and FSDP and loops by hand.

    python -m benchmarks.xla [--ranks 2 4] [--repeat 5]
    python -m benchmarks.xla --counts

Every peer trains the same Llama-shaped model on the same tokens with AdamW; all live in the same ranks, which are
threads of one process on the CPU, and take some steps in turn, round after round. Columns: steps/s relative to
torch_xla's ZeRO-1 in the same round (median, min-max), and exact counts: graphs compiled in all, executions per step,
and of the graph of a step its HLO instructions, its collectives, and the bytes that go into them. Both ZeRO-1 clip to a
norm. The loops by hand are data parallelism as torch_xla's examples write it, with ``xm.optimizer_step``, and tensor
parallelism with an all-reduce after each pair of matrix products; FSDP wraps each block, and the model.

``--counts`` counts a tiny model on two ranks and measures no time. It also says, for our strategies, how many graphs
are compiled for an evaluation, and then for a step after an evaluation and for one after loading a checkpoint.

The clock sees host and device together: on a CPU, tracing and the meeting of threads are a large part of a step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.harness import Measurement, in_table, note, parser, table
from neuron_accel.contract.events import Event, Observer
from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.xla.hlo import collectives, instructions
from tests.xla.watching import compiled, executed

LENGTH, MAX_NORM, WARM_UP = 64, 1.0, 3
REFERENCE = "torch_xla ZeRO-1"
MEASURED = "--xla_backend_optimization_level=3 --xla_llvm_disable_expensive_passes=false"
"""Full optimization, unlike for ranks of tests."""


@dataclass
class Peer:
    """One way to train.

    Args:
        step: a whole step; it calls its argument before the graph of the step is executed.
        kept: returns the tensors that a training keeps: weights and optimizer state.
        accelerator: of our peers.
        evaluate: one batch without gradients; of our peers.
    """

    step: Callable[[Callable[[], None]], None]
    kept: Callable[[], list[torch.Tensor]]
    accelerator: Any = None
    evaluate: Callable[[], None] | None = None


def kept(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Weights and state that have values on this rank."""
    weights = [*model.parameters(), *(each for group in optimizer.param_groups for each in group["params"])]
    state = [each for entries in optimizer.state.values() for each in entries.values()]
    found = {id(each): each for each in (*weights, *state) if isinstance(each, torch.Tensor) and each.numel()}
    return [each for each in found.values() if each.device.type == "xla"]


def graph_of(tensors: list[torch.Tensor]) -> str:
    """The HLO of what computes the pending ones of ``tensors``."""
    import torch_xla

    lib = torch_xla._XLAC
    return lib._get_xla_tensors_hlo([each for each in tensors if lib._check_tensor_need_materialization([each])[0]])


def build(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = (32, 2, 128) if small else (256, 4, 2048)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="eager",  # the other ones of transformers read the mask, and cut the graph of every peer
    )
    with one_at_a_time():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).train()


def tokens(small: bool, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(128 if small else 2048, (2, LENGTH), generator=generator)
    # Without a mask transformers reads position ids, to look for packed sequences.
    return {"input_ids": ids.to(device), "labels": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def options() -> dict[str, float]:
    return {"lr": 1e-3, "weight_decay": 0.01}


def ours(plugins: list[Any], small: bool, clips: bool = False) -> Peer:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    model = build(small)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **options()))
    batch = tokens(small, accelerator.data_parallel_rank, accelerator.device)

    def loss() -> torch.Tensor:
        return model(**batch, use_cache=False).loss

    def step(look: Callable[[], None]) -> None:
        accelerator.backward(loss())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        leave = accelerator.run.events.observe(_Look(look))
        optimizer.step()
        leave()
        optimizer.zero_grad()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            accelerator.run.backend.to_host(accelerator.gather_for_metrics(loss().reshape(1)))
        model.train()

    inner = getattr(optimizer.optimizer, "inner", optimizer.optimizer)
    return Peer(step, lambda: kept(model, inner), accelerator, evaluate)


class _Look(Observer):
    """Calls a function before a graph is executed."""

    categories: ClassVar[frozenset[str]] = frozenset({"graph"})

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def begin(self, event: Event) -> None:
        self._look()


def our(*plugins: Any, clips: bool = False) -> Callable[[bool, Any], Peer]:
    return lambda small, backend: ours(list(plugins), small, clips)


def their_zero1(small: bool, backend: Any) -> Peer:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = build(small).to(backend.device)
    with one_at_a_time():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, grad_clipping=True, max_norm=MAX_NORM, pin_layout=False, **options()
        )
    return by_hand(small, backend, model, optimizer, optimizer.step, state=optimizer.base_optimizer)


def their_data_parallel(small: bool, backend: Any) -> Peer:
    import torch_xla.core.xla_model as xm

    model = build(small).to(backend.device)
    optimizer = torch.optim.AdamW(model.parameters(), **options())

    return by_hand(small, backend, model, optimizer, lambda: xm.optimizer_step(optimizer, pin_layout=False))


def their_fsdp(reshard: bool) -> Callable[[bool, Any], Peer]:
    def make(small: bool, backend: Any) -> Peer:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        def wrap(module: nn.Module) -> nn.Module:
            return XlaFullyShardedDataParallel(
                module, reshard_after_forward=reshard, pin_layout_in_collective_ops=False
            )

        model = build(small).to(backend.device)
        with one_at_a_time():
            for index, block in enumerate(model.model.layers):
                model.model.layers[index] = wrap(block)
            model = wrap(model)
            optimizer = torch.optim.AdamW(model.parameters(), **options())
        return by_hand(small, backend, model, optimizer, optimizer.step)

    return make


class _Sum(torch.autograd.Function):
    """Sums over ranks in one of the two passes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, in_forward: bool) -> torch.Tensor:
        ctx.in_forward = in_forward
        return _sum(tensor) if in_forward else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.in_forward else _sum(gradient), None


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    import torch_xla.core.xla_model as xm

    return xm.all_reduce(xm.REDUCE_SUM, tensor, pin_layout=False)


def their_tensor_parallel(small: bool, backend: Any) -> Peer:
    """Heads and features of a block over the ranks; embedding and head are replicated."""
    model = build(small)

    def shard(linear: nn.Linear, dim: int) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(backend.world_size, dim)[backend.rank].clone())
        if dim:
            linear.register_forward_hook(lambda _, __, output: _Sum.apply(output, True))

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            shard(linear, 0)
        for linear in (attention.o_proj, mlp.down_proj):
            shard(linear, 1)
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.register_forward_hook(lambda _, __, output: _Sum.apply(output, False))
    model = model.to(backend.device)
    optimizer = torch.optim.AdamW(model.parameters(), **options())
    return by_hand(small, backend, model, optimizer, optimizer.step, shares_data=True)


def by_hand(
    small: bool,
    backend: Any,
    model: nn.Module,
    optimizer: Any,
    update: Callable[[], Any],
    *,
    state: Any = None,
    shares_data: bool = False,
) -> Peer:
    batch = tokens(small, 0 if shares_data else backend.rank, backend.device)

    def step(look: Callable[[], None]) -> None:
        model(**batch, use_cache=False).loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        look()
        backend.step_boundary()

    return Peer(step, lambda: kept(model, state or optimizer))


TENSOR = {"tensor_parallel": {"tensor_parallel_size": 2}}
PEERS: dict[str, Callable[[bool, Any], Peer]] = {
    REFERENCE: their_zero1,
    "neuron_accel, ZeRO-1": our("zero1", clips=True),
    "by hand, xm.optimizer_step": their_data_parallel,
    "neuron_accel, data parallel": our(),
    "torch_xla FSDP": their_fsdp(True),
    "neuron_accel, fully sharded": our("fully_sharded"),
    "torch_xla FSDP, no resharding": their_fsdp(False),
    "neuron_accel, fully sharded, no resharding": our({"fully_sharded": {"reshard_after_forward": False}}),
    "by hand, tensor parallel": their_tensor_parallel,
    "neuron_accel, tensor parallel": our(TENSOR),
    "neuron_accel, tensor and sequence parallel": our(TENSOR, "sequence_parallel"),
}
OURS = [name for name in PEERS if name.startswith("neuron_accel")]


def counted(peer: Peer, backend: Any, before: int) -> dict[str, float]:
    """Takes the first steps of a peer; returns counts. Collective."""
    graphs: list[str] = []

    def look() -> None:
        graphs.append(graph_of(peer.kept()))

    for _ in range(WARM_UP):
        peer.step(look)
    backend.barrier()
    compilations = compiled() - before
    backend.barrier()
    ran = executed()
    backend.barrier()
    peer.step(lambda: None)
    backend.barrier()
    executions = (executed() - ran) / backend.world_size
    backend.barrier()
    calls = collectives(graphs[-1])
    return {
        "compilations": compilations,
        "executions/step": executions,
        "HLO instructions": instructions(graphs[-1]),
        "collectives": len(calls),
        "bytes into them": sum(call.size for call in calls),
    }


def extra_graphs(peer: Peer, backend: Any, folder: str) -> dict[str, float]:
    """Graphs that are compiled for an evaluation, for the step after a second one, and for a step after a load."""

    def after(*actions: Callable[[], Any]) -> int:
        backend.barrier()
        before = compiled()
        backend.barrier()
        for action in actions:
            action()
        backend.barrier()
        return compiled() - before

    def step() -> None:
        peer.step(lambda: None)

    assert peer.evaluate is not None
    peer.accelerator.save_state(folder)
    return {
        "evaluation": after(peer.evaluate),
        "step after it": after(peer.evaluate, step),
        "step after a load": after(lambda: peer.accelerator.load_state(folder), step),
    }


def count(names: list[str], folder: str) -> dict[str, Mapping[str, float]]:
    """Counts of a tiny model; runs on every rank."""
    from neuron_accel.backends.xla import XlaBackend

    backend, found = XlaBackend.connect(), {}
    for index, name in enumerate(names):
        backend.barrier()
        before = compiled()
        backend.barrier()
        peer = PEERS[name](True, backend)
        counts = counted(peer, backend, before)
        if peer.evaluate is not None:
            counts |= extra_graphs(peer, backend, f"{folder}/{index}")
        found[name] = counts
    return found


def counts_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """A table in Markdown."""
    columns = list(dict.fromkeys(column for counts in found.values() for column in counts))
    rows = [["2 ranks", *columns]]
    for name, counts in found.items():
        rows.append([name, *(f"{counts[column]:,.0f}" if column in counts else "" for column in columns)])
    return in_table(rows)


def compare(small: bool, repeat: int, steps: int) -> dict[str, list[Measurement]]:
    """All peers in this rank; runs on every rank."""
    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    peers, counts = {}, {}
    for name, make in PEERS.items():
        backend.barrier()
        before = compiled()
        backend.barrier()
        peers[name] = make(small, backend)
        counts[name] = counted(peers[name], backend, before)
    results: dict[str, list[Measurement]] = {name: [] for name in peers}
    for _ in range(repeat):
        for name, peer in peers.items():
            backend.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                peer.step(lambda: None)
            backend.barrier()
            results[name].append(Measurement(rate=steps / (time.perf_counter() - begin), counts=counts[name]))
            backend.barrier()
    return results


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=10, help="steps of each peer in a round (default: 10)")
    arguments.add_argument("--counts", action="store_true", help="count a tiny model on two ranks, and measure no time")
    given = arguments.parse_args()
    if given.counts:
        with tempfile.TemporaryDirectory() as folder:
            print(counts_table(run_ranks(count, 2, list(PEERS), folder, backend="xla", timeout=600)[0]))
        return
    os.environ.setdefault("XLA_FLAGS", MEASURED)
    for ranks in given.ranks:
        note(f"{ranks} ranks")
        results = run_ranks(compare, ranks, given.small, given.repeat, given.steps, backend="xla", timeout=1500)[0]
        note("")
        rate = statistics.median(m.rate for m in results[REFERENCE])
        print(f"\n{ranks} ranks; {REFERENCE}: {1000 / rate:.0f} ms a step\n")
        print(table(results, REFERENCE))


if __name__ == "__main__":
    from benchmarks.xla import main  # ranks import what they run by the name of its module

    main()

"""Training steps on real torch_xla ranks: ours against torch_xla's ZeroRedundancyOptimizer and a loop by hand.

    python -m benchmarks.xla [--ranks 2 4] [--repeat 5]

Every peer trains the same Llama-shaped model on the same tokens with AdamW; all live in the same ranks, which are
threads of one process on the CPU, and take some steps in turn, round after round. Columns: steps/s relative to
torch_xla's ZeRO-1 in the same round (median, min-max), and exact counts: graphs compiled in all, executions per step,
and of the graph of a step its HLO instructions, its collectives, and the bytes that go into them. Both ZeRO-1 clip to a
norm. The loop by hand is data parallelism as torch_xla's examples write it, with ``xm.optimizer_step``; ours beside it
is the default strategy.

The clock sees host and device together: on a CPU, tracing and the meeting of threads are a large part of a step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.harness import Measurement, note, parser, table
from neuron_accel.engine.plan.plugin import Phase, PluginSpec, StrategyPlugin
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
    """A peer: one way to train.

    Args:
        step: a whole step, up to its execution.
        hlo: the graphs of its first steps.
    """

    step: Callable[[], Any]
    hlo: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Watcher(StrategyPlugin):
    """Hands over the graph of a step."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="benchmark_watcher", phase=Phase.OPTIMIZER)

    def after_step(self, optimizer: Any, run: Any) -> None:
        wanted = run.state(self).get("hlo")
        if wanted is not None and len(wanted) < WARM_UP:
            wanted.append(graph_of(run.models[0].module))


def graph_of(model: nn.Module) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(list(model.parameters()))


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


def ours(plugins: list[Any], small: bool, clips: bool) -> Peer:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins}, plugins=[Watcher()])
    model = build(small)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **options()))
    batch = tokens(small, accelerator.data_parallel_rank, accelerator.device)

    def step() -> None:
        accelerator.backward(model(**batch, use_cache=False).loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    peer = Peer(step)
    accelerator.run.state(accelerator.plan.plugin("benchmark_watcher"))["hlo"] = peer.hlo
    return peer


def ours_zero1(small: bool, backend: Any) -> Peer:
    return ours(["zero1"], small, clips=True)


def ours_data_parallel(small: bool, backend: Any) -> Peer:
    return ours([], small, clips=False)


def their_zero1(small: bool, backend: Any) -> Peer:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = build(small).to(backend.device)
    with one_at_a_time():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, grad_clipping=True, max_norm=MAX_NORM, pin_layout=False, **options()
        )
    return by_hand(small, backend, model, optimizer, optimizer.step)


def their_data_parallel(small: bool, backend: Any) -> Peer:
    import torch_xla.core.xla_model as xm

    model = build(small).to(backend.device)
    optimizer = torch.optim.AdamW(model.parameters(), **options())

    return by_hand(small, backend, model, optimizer, lambda: xm.optimizer_step(optimizer, pin_layout=False))


def by_hand(small: bool, backend: Any, model: nn.Module, optimizer: Any, update: Callable[[], Any]) -> Peer:
    batch = tokens(small, backend.rank, backend.device)
    peer = Peer(lambda: None)

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        if len(peer.hlo) < WARM_UP:
            peer.hlo.append(graph_of(model))
        backend.step_boundary()

    peer.step = step
    return peer


PEERS: dict[str, Callable[[bool, Any], Peer]] = {
    REFERENCE: their_zero1,
    "ours, ZeRO-1": ours_zero1,
    "by hand, xm.optimizer_step": their_data_parallel,
    "ours, data parallel": ours_data_parallel,
}


def compare(small: bool, repeat: int, steps: int) -> dict[str, list[Measurement]]:
    """All peers in this rank; runs on every rank."""
    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    peers, counts = {}, {}
    for name, make in PEERS.items():
        backend.barrier()
        before = compiled()
        backend.barrier()
        peer = peers[name] = make(small, backend)
        for _ in range(WARM_UP):
            peer.step()
        backend.barrier()
        calls = collectives(peer.hlo[-1])
        counts[name] = {
            "compilations": compiled() - before,
            "executions/step": 0.0,
            "HLO instructions": instructions(peer.hlo[-1]),
            "collectives": len(calls),
            "bytes into them": sum(call.size for call in calls),
        }
        backend.barrier()
    results: dict[str, list[Measurement]] = {name: [] for name in peers}
    for _ in range(repeat):
        for name, peer in peers.items():
            backend.barrier()
            ran, begin = executed(), time.perf_counter()
            backend.barrier()
            for _ in range(steps):
                peer.step()
            backend.barrier()
            seconds = (time.perf_counter() - begin) / steps
            counts[name]["executions/step"] = (executed() - ran) / steps / backend.world_size
            results[name].append(Measurement(rate=1 / seconds, counts=counts[name]))
            backend.barrier()
    return results


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=10, help="steps of each peer in a round (default: 10)")
    given = arguments.parse_args()
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

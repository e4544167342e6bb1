"""Context parallelism: step time and peak memory at growing sequence length, on 1, 2 and 4 ranks, beside the bound.

    python -m benchmarks.context_parallel [--lengths 512 1024 2048 4096] [--ranks 1 2 4] [--repeat 5]

A Llama-shaped model trains one sequence with AdamW, one thread for each gloo rank. "cp 1" is one process without the
plugin, with torch's own fused attention. Time and memory are relative to it, in the same round (median, min-max).

The bounds: time is divided by the degree, or by the number of cores where ranks share them; of the peak, weights,
gradients and the optimizer's state stay whole on every rank, and the rest is divided by the degree. Bytes are what a
rank sends for attention in a step, per token of the sequence.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.harness import Measurement, note, parser, ratios, rounds, timed_steps
from neuron_accel.testing import PeakMemory


def build(small: bool, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = (32, 2, 256) if small else (256, 4, 4096)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=length,
        )
    )


def train(length: int, small: bool) -> Measurement:
    """Trains on all ranks, over which each sequence is sharded."""
    from neuron_accel import NeuronAccelerator

    torch.set_num_threads(1)
    degree = int(os.environ.get("WORLD_SIZE", "1"))
    plugins = [{"context_parallel": {"context_parallel_size": degree}}] if degree > 1 else []
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    backend = accelerator.run.backend
    memory = PeakMemory()
    model = build(small, length).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()

    with backend.record() as traffic:
        step()
    seconds = timed_steps(step, backend.barrier, warm_up=1, steps=3)
    whole = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    return Measurement(
        rate=length / seconds,
        peak_bytes=memory.bytes(),
        counts={"whole": whole, "sent": traffic.sent(op="permute") / length, "seconds": seconds},
    )


def table(results: dict[str, list[Measurement]], degrees: Sequence[int], cores: int) -> str:
    """A table in Markdown: time and memory for each number of ranks relative to the first, and the bounds."""
    head = ["peer", "seconds", "time / cp 1", "min-max", "bound", "peak / cp 1", "bound", "bytes sent / token"]
    rows = [head, ["---"] * len(head)]
    first = results[f"cp {degrees[0]}"]
    for degree, (name, relative) in zip(degrees, ratios(results, f"cp {degrees[0]}").items(), strict=True):
        middle, low, high = relative
        measured = results[name]
        peaks = [m.peak_bytes / f.peak_bytes for m, f in zip(measured, first, strict=True)]
        whole = measured[0].counts["whole"] / statistics.median(f.peak_bytes for f in first)  # type: ignore[index]
        whole = min(whole, 1)
        rows.append(
            [
                name,
                f"{statistics.median(m.counts['seconds'] for m in measured):.3f}",  # type: ignore[index]
                f"{1 / middle:.2f}",
                f"{1 / high:.2f}-{1 / low:.2f}",
                f"{1 / min(degree, cores):.2f}",
                f"{statistics.median(peaks):.2f}",
                f"{whole + (1 - whole) / degree:.2f}",
                f"{measured[0].counts['sent']:.0f}",  # type: ignore[index]
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of the sequence")
    options.set_defaults(ranks=[1, 2, 4])
    given = options.parse_args()
    cores = len(os.sched_getaffinity(0))
    for length in given.lengths:
        results: dict[str, list[Measurement]] = {f"cp {degree}": [] for degree in given.ranks}
        for _ in range(given.repeat):
            for degree in given.ranks:
                name = f"cp {degree}"
                results[name] += rounds({name: train}, degree, length, given.small, repeat=1)[name]
        note("")
        print(f"\n## {length} tokens, {cores} cores\n\n{table(results, given.ranks, cores)}", flush=True)


if __name__ == "__main__":
    main()

"""Pipelines against torch.distributed.pipelining, and against the least time that a schedule can take.

    python -m benchmarks.pipeline [--ranks 2 4] [--repeat 5] [--schedule 1f1b] [--libraries gloo host]

Both peers run forward and backward of the same Llama-shaped model on ranks that the same library connects, cut at the
same blocks, with the same schedule and micro-batches. The bound is the compute of the slowest stage, measured on its
own while the other ranks wait, for all micro-batches plus the schedule's bubble; on a machine with fewer free cores
than ranks it cannot be reached. Columns: steps/s relative to torch.distributed.pipelining in the same round (median,
min-max), and ms per step.

torch's stage infers shapes with a warm-up pass on gloo. Its meta tensors take the dtype of the first argument in torch
2.9, which crashes for token ids; the peer is given its inputs and outputs, so that nothing has to be inferred.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Measurement, parser, rounds, table, timed_steps

LENGTH = 128


def sizes(small: bool) -> tuple[int, int, int]:
    """Hidden size, blocks, vocabulary."""
    return (64, 4, 256) if small else (384, 12, 2048)


def build(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = sizes(small)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
        )
    ).train()


def tokens(small: bool, microbatches: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(sizes(small)[2], (microbatches, LENGTH), generator=generator)


def starts_of(model: nn.Module, stages: int) -> tuple[int, ...]:
    from neuron_accel.strategies.pipeline.cuts import cut

    return cut(model, stages, None)[1]


class Part(nn.Module):
    """One stage of the model, written by hand."""

    def __init__(self, model: Any, starts: tuple[int, ...], stage: int) -> None:
        super().__init__()
        base, count = model.model, len(model.model.layers)
        stop = starts[stage + 1] if stage + 1 < len(starts) else count
        self.embed = base.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleList(list(base.layers)[starts[stage] : stop])
        self.rotary = base.rotary_emb
        last = stage == len(starts) - 1
        self.norm, self.head = (base.norm, model.lm_head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if self.embed is None else self.embed(x)
        positions = torch.arange(h.shape[1])[None]
        table = self.rotary(h, position_ids=positions)
        for layer in self.layers:
            h = layer(h, attention_mask=None, position_embeddings=table, position_ids=positions)
        return h if self.head is None else self.head(self.norm(h))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def measured(step: Any, steps: int) -> Measurement | None:
    seconds = timed_steps(step, dist.barrier, warm_up=2, steps=steps)
    return Measurement(rate=1 / seconds, counts={"ms/step": 1000 * seconds}) if dist.get_rank() == 0 else None


def ours(schedule: str, microbatches: int, small: bool, steps: int) -> Measurement | None:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator

    plugin = ModelParallelismPlugin(
        pipeline_parallel_size=dist.get_world_size(), num_microbatches=microbatches, schedule=schedule
    )
    accelerator = NeuronAccelerator(plugins=[plugin])
    model = accelerator.prepare(build(small))
    ids = tokens(small, microbatches)

    def step() -> None:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        model.zero_grad()

    return measured(step, steps)


def torch_pipelining(schedule: str, microbatches: int, small: bool, steps: int) -> Measurement | None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(small)
    part = Part(model, starts_of(model, size), rank)
    hidden, _, vocabulary = sizes(small)
    between = torch.empty(1, LENGTH, hidden, device="meta", requires_grad=True)
    given = torch.empty(1, LENGTH, dtype=torch.long, device="meta") if rank == 0 else between
    made = torch.empty(1, LENGTH, vocabulary, device="meta", requires_grad=True) if rank == size - 1 else between
    stage = PipelineStage(part, rank, size, torch.device("cpu"), input_args=(given,), output_args=(made,))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner = kind(stage, microbatches, loss_fn=loss_of)
    ids = tokens(small, microbatches)

    def step() -> None:
        if rank == 0:
            runner.step(ids)
        elif rank == size - 1:
            losses: list[torch.Tensor] = []
            runner.step(target=ids, losses=losses)
        else:
            runner.step()
        part.zero_grad()

    return measured(step, steps)


def bound(schedule: str, microbatches: int, small: bool, steps: int) -> Measurement | None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(small)
    part = Part(model, starts_of(model, size), rank)
    ids = tokens(small, 1)

    def once() -> None:
        x = ids if rank == 0 else torch.randn(1, LENGTH, sizes(small)[0], requires_grad=True)
        out = part(x)
        (loss_of(out, ids) if rank == size - 1 else out.sum()).backward()

    seconds = torch.zeros(size)
    for turn in range(size):
        dist.barrier()
        if turn == rank:
            for _ in range(3):
                once()
            begin = time.perf_counter()
            for _ in range(steps * 2):
                once()
            seconds[rank] = (time.perf_counter() - begin) / (steps * 2)
    dist.barrier()
    dist.all_reduce(seconds)
    total = float(seconds.max()) * (microbatches + size - 1)
    return Measurement(rate=1 / total, counts={"ms/step": 1000 * total}) if rank == 0 else None


def main() -> None:
    options = parser(__doc__, on_libraries=True)
    options.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--steps", type=int, default=5)
    args = options.parse_args()
    peers = {"torch.distributed.pipelining": torch_pipelining, "neuron_accel": ours, "bound": bound}
    given = (args.schedule, args.microbatches, args.small, args.steps)
    for ranks, library in product(args.ranks, args.libraries):
        results = rounds(peers, ranks, *given, repeat=args.repeat, library=library)
        print(f"\n{args.schedule}, {args.microbatches} micro-batches, {ranks} ranks on {library}\n")
        print(table(results, "torch.distributed.pipelining"))


if __name__ == "__main__":
    main()

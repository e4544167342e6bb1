"""Tensor parallelism against torch's parallelize_module (DTensor) and transformers' tp_plan="auto".

    python -m benchmarks.tensor_parallel [--ranks 2 4] [--repeat 5] [--small] [--libraries gloo host]

All run forward and backward of the same Llama-shaped model with the same weights on the same tokens, on ranks that the
same library connects; their losses are compared before anything is reported. torch's peer is what its documentation
recommends: column- and row-wise projections, token embedding and head divided along the vocabulary, and
``loss_parallel``.

The bound is what remains if nothing but the arithmetic and the wire takes time: a model whose layers have the sizes of
one rank's share, without communication, run by all ranks at once, and then the same bytes in bare all-reduces: four of
the hidden states for each layer, one each for embedding and head, and two of a few numbers for each token in the loss.

Columns: tokens/s relative to torch's of the same round (median, min-max), peak memory, ms for each step, and of the
bound the milliseconds that are arithmetic and those that are collectives.

A second table has the bytes that autograd keeps for the backward pass on one rank, counted through saved tensors, of
the whole model and of each layer, with and without sequence parallelism.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import Measurement, note, parser, rounds, table, timed_steps
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import PeakMemory

TORCH = "parallelize_module"
BATCH, LENGTH = 4, 128


def config(small: bool, parts: int = 1) -> Any:
    """The model; with ``parts``, a model whose layers have the sizes of one of ``parts`` shards."""
    from transformers import LlamaConfig

    hidden, layers, vocabulary = (64, 2, 256) if small else (512, 8, 8192)
    return LlamaConfig(
        vocab_size=vocabulary // parts,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // parts,
        num_hidden_layers=layers,
        num_attention_heads=8 // parts,
        num_key_value_heads=8 // parts,
        head_dim=hidden // 8,
        use_cache=False,
    )


def build(small: bool, parts: int = 1) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(config(small, parts)).train()


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """The next token of each position; the last position has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100).flatten()


def measured(model: nn.Module, step: Callable[[], float], memory: PeakMemory, steps: int) -> Measurement | None:
    loss = step()

    def timed() -> None:
        step()
        model.zero_grad()

    seconds = timed_steps(timed, dist.barrier, warm_up=2, steps=steps)
    counts = {"loss": loss, "ms/step": 1000 * seconds}
    return Measurement(rate=BATCH * LENGTH / seconds, peak_bytes=memory.bytes(), counts=counts)


def ours(
    folder: str, small: bool, steps: int, sequence_parallel: bool = False, overlap_gather: bool = False
) -> Measurement | None:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin

    plugins: list[Any] = [ModelParallelismPlugin(tensor_parallel_size=dist.get_world_size())]
    plugins += [SequenceParallelPlugin(overlap_gather=overlap_gather, regather=False)] if sequence_parallel else []
    accelerator = NeuronAccelerator(plugins=plugins)
    memory = PeakMemory()
    model = accelerator.prepare(build(small))
    ids = tokens(config(small).vocab_size)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        return loss.item()

    return measured(model, step, memory, steps)


def ours_with_sequence_parallel(folder: str, small: bool, steps: int) -> Measurement | None:
    return ours(folder, small, steps, sequence_parallel=True)


def ours_with_overlapping_gathers(folder: str, small: bool, steps: int) -> Measurement | None:
    return ours(folder, small, steps, sequence_parallel=True, overlap_gather=True)


def torch_dtensor(folder: str, small: bool, steps: int) -> Measurement | None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    memory = PeakMemory()
    model: Any = build(small)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    layer |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    layer |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    ids = tokens(config(small).vocab_size)

    def step() -> float:
        with loss_parallel():
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), shifted(ids))
            loss.backward()
        return loss.full_tensor().item()

    return measured(model, step, memory, steps)


def tp_plan_auto(folder: str, small: bool, steps: int) -> Measurement | None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    memory = PeakMemory()
    model: Any = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).train()
    ids = tokens(config(small).vocab_size)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    return measured(model, step, memory, steps)


def bound(folder: str, small: bool, steps: int) -> Measurement | None:
    ranks = dist.get_world_size()
    memory = PeakMemory()
    model = build(small, ranks)
    ids = tokens(model.config.vocab_size)

    def compute() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    hidden = torch.zeros(BATCH, LENGTH, model.config.hidden_size)
    of_loss = [torch.zeros(BATCH * LENGTH), torch.zeros(2, BATCH * LENGTH)]
    sums = [hidden] * (4 * model.config.num_hidden_layers + 2) + of_loss

    def communicate() -> None:
        for tensor in sums:
            dist.all_reduce(tensor)

    arithmetic, wire = (timed_steps(run, dist.barrier, warm_up=2, steps=steps) for run in (compute, communicate))
    seconds = arithmetic + wire
    counts = {"ms/step": 1000 * seconds, "arithmetic": 1000 * arithmetic, "collectives": 1000 * wire}
    return Measurement(rate=BATCH * LENGTH / seconds, peak_bytes=memory.bytes(), counts=counts)


PEERS: dict[str, Callable[..., Measurement | None]] = {
    TORCH: torch_dtensor,
    'tp_plan="auto"': tp_plan_auto,
    "ModelParallelismPlugin": ours,
    "ModelParallelismPlugin, SequenceParallelPlugin": ours_with_sequence_parallel,
    "ModelParallelismPlugin, SequenceParallelPlugin(overlap_gather=True)": ours_with_overlapping_gathers,
    "bound": bound,
}


def check_losses(results: dict[str, list[Measurement]]) -> None:
    """Checks that all peers compute the same loss."""
    losses = {name: m[0].counts["loss"] for name, m in results.items() if m[0].counts and "loss" in m[0].counts}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the peers disagree about the loss: {losses}")


def kept_bytes(small: bool, layers: int, tensor_parallel: bool, sequence_parallel: bool) -> int:
    """Bytes that autograd keeps after a forward pass, each storage once, without the weights."""
    from transformers import LlamaForCausalLM

    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin

    sizes = config(small)
    sizes.num_hidden_layers = layers
    model: Any = LlamaForCausalLM(sizes).train()
    if tensor_parallel:
        plugins: list[Any] = [ModelParallelismPlugin(tensor_parallel_size=dist.get_world_size())]
        plugins += [SequenceParallelPlugin(regather=False)] if sequence_parallel else []
        model = NeuronAccelerator(plugins=plugins).prepare(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = tokens(sizes.vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def memory_table(ranks: int, small: bool) -> str:
    cases = {
        "whole model": (False, False),
        "tensor parallel": (True, False),
        "tensor and sequence parallel": (True, True),
    }
    layers = config(small).num_hidden_layers
    found = {
        name: [max(run_ranks(kept_bytes, ranks, small, count, *case, timeout=300)) for count in (layers, layers - 1)]
        for name, case in cases.items()
    }
    reference = found["tensor parallel"]
    lines = [f"| one of {ranks} ranks keeps | MiB | / tensor parallel | MiB for each layer | / tensor parallel |"]
    lines.append("|---" * 5 + "|")
    for name, (all_layers, but_one) in found.items():
        layer, of_reference = all_layers - but_one, reference[0] - reference[1]
        relative = f"{all_layers / reference[0]:.2f} | {layer / 2**20:.2f} | {layer / of_reference:.2f}"
        lines.append(f"| {name} | {all_layers / 2**20:.1f} | {relative} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__, on_libraries=True)
    options.add_argument("--steps", type=int, default=5, help="steps that are timed in each round (default: 5)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        note("the model's weights")
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            build(args.small).save_pretrained(folder)
        for ranks, library in product(args.ranks, args.libraries):
            results = rounds(PEERS, ranks, folder, args.small, args.steps, repeat=args.repeat, library=library)
            check_losses(results)
            print(f"\n## {ranks} ranks on {library}\n")
            print(table(results, TORCH))
            rates = {name: statistics.median(m.rate for m in measured) for name, measured in results.items()}
            mine, best = rates["ModelParallelismPlugin"], max(rates[TORCH], rates['tp_plan="auto"'])
            print(
                f"\n{mine / best:.2f} x the faster peer; the bound is {rates['bound'] / mine:.2f} x as fast", flush=True
            )
    print(f"\n## Activations\n\n{memory_table(max(args.ranks), args.small)}")


if __name__ == "__main__":
    main()

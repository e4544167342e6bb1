"""ZeRO-1 against DistributedDataParallel, torch's own ZeroRedundancyOptimizer, and FSDP2.

    python -m benchmarks.zero1 [--ranks 2 4] [--repeat 5]

Every peer trains the same Llama-shaped model on the same tokens with AdamW on gloo ranks. Columns: tokens/s relative to
DDP + AdamW of the same round (median, min-max), peak memory relative to DDP, and per rank, relative to the parameters'
bytes: the optimizer's state, and what the kernel sent over TCP in a step. The floor of the latter is 2 (N - 1) / N.

torch's ZeroRedundancyOptimizer refuses its overlapped variant on gloo; where it does, its row is missing and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Measurement, note, parser, rounds, table, timed_steps
from neuron_accel.testing.resources import PeakMemory, bytes_sent

LENGTH = 128


def build(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = (64, 2, 256) if small else (512, 8, 8192)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )


def measure(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any], state: Callable[[], int],
            memory: PeakMemory, parameter_bytes: int, small: bool) -> Measurement:  # fmt: skip
    vocabulary = 256 if small else 8192
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(vocabulary, (1, LENGTH), generator=generator)

    def step() -> None:
        backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    dist.barrier()
    before = bytes_sent()
    step()
    sent = bytes_sent() - before
    seconds = timed_steps(step, dist.barrier, warm_up=1, steps=3)
    return Measurement(
        rate=dist.get_world_size() * LENGTH / seconds,
        peak_bytes=memory.bytes(),
        counts={"state / parameters": state() / parameter_bytes, "sent / parameters": sent / parameter_bytes},
    )


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _state_bytes(state: Any) -> int:
    return sum(
        (v.to_local() if hasattr(v, "to_local") else v).numel() * v.element_size()
        for entries in state.values()
        for v in entries.values()
        if isinstance(v, torch.Tensor) and v.dim()
    )


def ddp(small: bool) -> Measurement:
    memory = PeakMemory()
    model = nn.parallel.DistributedDataParallel(build(small), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    size = _bytes(model.parameters())
    return measure(model, optimizer, torch.Tensor.backward, lambda: _state_bytes(optimizer.state), memory, size, small)


def torch_zero(small: bool) -> Measurement:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    memory = PeakMemory()
    model = nn.parallel.DistributedDataParallel(build(small), gradient_as_bucket_view=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    size = _bytes(model.parameters())
    return measure(
        model, optimizer, torch.Tensor.backward, lambda: _state_bytes(optimizer.optim.state), memory, size, small
    )


def torch_zero_overlapped(small: bool) -> Measurement:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    memory = PeakMemory()
    model = nn.parallel.DistributedDataParallel(build(small), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, parameters_as_bucket_view=True
    )
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    size = _bytes(model.parameters())
    return measure(
        model, optimizer, torch.Tensor.backward, lambda: _state_bytes(optimizer.optim.state), memory, size, small
    )


def _fsdp2(small: bool, reshard: bool) -> Measurement:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    memory = PeakMemory()
    model = build(small)
    size = _bytes(model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    return measure(model, optimizer, torch.Tensor.backward, lambda: _state_bytes(optimizer.state), memory, size, small)


def fsdp2(small: bool) -> Measurement:
    return _fsdp2(small, reshard=False)


def fsdp2_resharding(small: bool) -> Measurement:
    return _fsdp2(small, reshard=True)


def ours(small: bool) -> Measurement:
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    memory = PeakMemory()
    model = build(small)
    size = _bytes(model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return measure(model, optimizer, accelerator.backward, lambda: _state_bytes(optimizer.state), memory, size, small)


def main() -> None:
    options = parser(__doc__).parse_args()
    peers: dict[str, Callable[..., Measurement]] = {
        "DDP": ddp,
        "Zero1Plugin": ours,
        "DDP + ZeroRedundancyOptimizer": torch_zero,
        "FSDP2, no resharding": fsdp2,
        "FSDP2, resharding": fsdp2_resharding,
    }
    for ranks in options.ranks:
        try:
            rounds({"overlapped": torch_zero_overlapped}, ranks, options.small, repeat=1)
            available = peers | {"DDP + ZeroRedundancyOptimizer, overlapped": torch_zero_overlapped}
            remark = ""
        except Exception as error:
            available = peers
            remark = f"\nZeroRedundancyOptimizer, overlapped: {str(error.__cause__ or error).splitlines()[0]}"
        note("")
        print(f"\n## {ranks} ranks\n")
        print(table(rounds(available, ranks, options.small, repeat=options.repeat), "DDP"), remark, flush=True)


if __name__ == "__main__":
    main()

"""Trains a model that is not from transformers, sharded by a plan of its own. It learns to sort.

neuron-accel launch --nproc-per-node 2 train.py
"""

from __future__ import annotations

import argparse
import sys

# First: it chooses the device for Accelerate.
from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, NeuronAccelError, Zero1Plugin  # isort: skip
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

PLAN = {
    "blocks.*.qkv": "colwise:3",  # queries, keys and values in one weight, each sharded by heads
    "blocks.*.heads": "per_rank",  # the number of heads, which is divided by the number of ranks
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual connection; input and output ``[batch, length, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, self.size).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sorter(nn.Module):
    """Reads numbers below ``values``, int64 ``[batch, length]``, and predicts the sorted sequence."""

    def __init__(self, *, values: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(values, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, values)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.tokens(numbers) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Numbers(Dataset):
    """Random numbers, one row per sample."""

    def __init__(self, count: int, *, values: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, values, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor_parallel_size", type=int, default=2, help="ranks that share a model (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    options = parser.parse_args()

    accelerator = NeuronAccelerator(
        plugins=[
            ModelParallelismPlugin(tensor_parallel_size=options.tensor_parallel_size, tensor_parallel_plan=PLAN),
            Zero1Plugin(),
        ]
    )
    torch.manual_seed(0)
    model = Sorter(values=10, length=8, width=64, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Numbers(options.steps * 32, values=10, length=8), batch_size=32 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(accelerator.explain(model))
    for step, numbers in enumerate(loader):
        logits, sorted_numbers = model(numbers), numbers.sort(dim=-1).values
        loss = F.cross_entropy(logits.flatten(0, 1), sorted_numbers.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == options.steps:
            right = accelerator.gather(logits.argmax(-1) == sorted_numbers).float().mean().item()
            accelerator.print(f"step {step + 1}: loss {loss.item():.3f}, {right:.1%} of the numbers in their places")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeuronAccelError as error:
        sys.exit(f"train.py: {error}")

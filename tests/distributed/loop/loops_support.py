"""Helpers of the tests of training loops: compositions, samples, and a reference loop in one process."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from tests.distributed.models import VOCABULARY, llama

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}

COMPOSITIONS = {
    "none": (2, []),
    "zero1": (2, ["zero1"]),
    "tp2": (2, [TP2]),
    "tp2-sp": (2, [TP2, "sequence_parallel"]),
    "tp2-dp2-zero1-sp": (4, [TP2, "sequence_parallel", "zero1"]),
}
"""Number of ranks and plugins of each composition, by name."""


class Tokens(Dataset):
    """``count`` samples of random tokens, each with its index."""

    def __init__(self, count: int, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "index": torch.tensor(index)}


def model():
    torch.manual_seed(0)
    return llama()


def adamw(parameters, lr=1e-3):
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-6)


def forward(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["labels"])


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """Every entry within ``tolerance`` of the largest of its tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = (found[name] - value).abs().max(), value.abs().max().clamp(min=1e-8)
        assert error <= tolerance * scale, f"{name} is off by {error / scale:.3g} of its largest entry"

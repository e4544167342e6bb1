"""A tiny model and its data, and the command line."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

VOCABULARY = 96
(SCRIPT,) = metadata.entry_points(group="console_scripts", name="neuron-accel")


def main(words: list[str]) -> int:
    """Runs ``neuron-accel`` in this process."""
    return SCRIPT.load()(words)


def bound(events: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Names of the arrows of a trace, and the two ranges that Perfetto joins by each.

    It multiplies times by 1000 and drops the fraction, takes events in the order of their times, and those of one time
    in that of the file. Ranges that have ended are removed from a stack when the next one begins, and one that ends
    after that around it is discarded. Each end of an arrow belongs to the range on top.
    """
    stacks: dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]] = {}
    starts: dict[int, dict[str, Any]] = {}
    found = []

    def nanoseconds(time: float) -> int:
        return int(time * 1000.0)

    for event in sorted(events, key=lambda each: nanoseconds(each["ts"])):
        now, stack = nanoseconds(event["ts"]), stacks.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "X":
            end = now + nanoseconds(event["dur"])
            while stack and stack[-1][1] <= now:
                stack.pop()
            assert not stack or end <= stack[-1][1], event
            stack.append((now, end, event))
        elif event["ph"] in "sf":
            assert type(event["id"]) is int
            begin, end, around = stack[-1]
            assert begin <= now < end, event
            if event["ph"] == "s":
                assert event["id"] not in starts
                starts[event["id"]] = around
            else:
                found.append((event["name"], starts[event["id"]], around))
    assert len(found) == len(starts)
    return found


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )


def token_batches(count: int, *, size: int = 4, length: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(VOCABULARY, (size, length), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]

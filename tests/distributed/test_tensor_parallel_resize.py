"""Tokens added and taken away, before and after a model is divided: rows keep their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin, Zero1Plugin
from neuron_accel.testing import run_ranks
from tests.distributed.tensor_parallel_support import gpt2, llama

MODELS = {
    "tied gpt2": gpt2,
    "llama": llama,
    "llama, padding": lambda: llama(pad_token_id=100),
}


def _batches(tokens: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, tokens, (3, 4, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": rows, "labels": rows} for rows in ids]


def _resize(model: Any, tokens: int, mean: bool, rank: int = 0) -> Any:
    torch.manual_seed(12 + rank)  # what the first rank draws counts
    model.train()
    return model.resize_token_embeddings(tokens, mean_resizing=mean)


def _alone(family: str, tokens: int, mean: bool) -> dict[str, torch.Tensor]:
    model = MODELS[family]()
    _resize(model, tokens, mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for batch in _batches(tokens):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _divided(family: str, tokens: int, mean: bool, after: bool, plugins: list[Any], expected: dict) -> None:
    accelerator = NeuronAccelerator(plugins=plugins)
    model = MODELS[family]()
    if not after:
        _resize(model, tokens, mean)
    model = accelerator.prepare(model)
    if after:
        before = accelerator.get_state_dict(model)
        embedding = _resize(model, tokens, mean, accelerator.process_index)
        assert embedding is model.get_input_embeddings()
        assert model.config.vocab_size == tokens
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            name = next(name for name in before if "embed_tokens" in name or "wte" in name)
            kept = min(tokens, 101)
            assert torch.equal(weights[name][:kept], before[name][:kept])
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6))
    share = 4 // accelerator.data_parallel_size
    mine = slice(accelerator.data_parallel_rank * share, (accelerator.data_parallel_rank + 1) * share)
    for batch in _batches(tokens):
        accelerator.backward(model(**{name: value[mine] for name, value in batch.items()}).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


TP = ModelParallelismPlugin(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("family", "tokens", "mean", "after", "ranks", "plugins"),
    [
        ("tied gpt2", 107, False, True, 2, [TP]),
        ("llama", 108, True, True, 2, [TP, SequenceParallelPlugin()]),
        ("llama, padding", 97, False, True, 4, [TP]),
        ("llama", 107, False, True, 4, [TP, Zero1Plugin()]),
        ("tied gpt2", 107, False, False, 2, [TP]),
    ],
    ids=["more-tied", "more-sequence", "fewer-dp", "more-zero1", "before"],
)
def test_training_goes_on_with_other_tokens(family, tokens, mean, after, ranks, plugins):
    run_ranks(_divided, ranks, family, tokens, mean, after, plugins, _alone(family, tokens, mean))


def _refused() -> list[str]:
    messages = []
    pipeline = ModelParallelismPlugin(tensor_parallel_size=2, pipeline_parallel_size=2)
    accelerator = NeuronAccelerator(plugins=[pipeline])
    model = accelerator.prepare(llama())
    try:
        model.resize_token_embeddings(107)
    except Exception as error:
        messages.append(str(error))
    accelerator = NeuronAccelerator(plugins=[TP, Zero1Plugin()])
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    try:
        model.resize_token_embeddings(107)
    except Exception as error:
        messages.append(str(error))
    assert model.lm_head.weight.shape[0] == 51
    return messages


def test_what_is_too_late_is_refused():
    for pipeline, optimizer in run_ranks(_refused, 4):
        assert "not possible after `prepare` in a pipeline" in pipeline
        assert "an optimizer was prepared" in optimizer

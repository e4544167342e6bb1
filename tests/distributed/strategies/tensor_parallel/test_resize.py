"""Tokens added and taken away, before and after a model is sharded: rows keep their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin, Zero1Plugin
from neuron_accel.errors import UnsupportedModelError, UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import gpt2, llama, randomise


def bert() -> BertLMHeadModel:
    """Its head's bias has a second name, outside of the head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return randomise(BertLMHeadModel(BertConfig(vocab_size=101, is_decoder=True, **sizes, **dropout)))


MODELS = {
    "tied gpt2": gpt2,
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "llama, padding": lambda: llama(pad_token_id=100),
    "bert": bert,
}


def _batches(tokens: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, tokens, (3, 4, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": rows, "labels": rows} for rows in ids]


def _resize(model: Any, tokens: int, mean: bool, rank: int = 0) -> Any:
    torch.manual_seed(12 + rank)  # what the first rank draws counts
    model.train()
    return model.resize_token_embeddings(tokens, mean_resizing=mean)


def _alone(family: str, tokens: int, mean: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = MODELS[family](), []
    _resize(model, tokens, mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for batch in _batches(tokens):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _sharded(family: str, tokens: int, mean: bool, after: bool, plugins: list[Any], expected: tuple) -> None:
    accelerator = NeuronAccelerator(plugins=plugins)
    model = MODELS[family]()
    if not after:
        _resize(model, tokens, mean)
    model = accelerator.prepare(model)
    if after:
        before = accelerator.get_state_dict(model)
        embedding = _resize(model, tokens, mean, accelerator.state.process_index)
        torch.manual_seed(12)  # what ranks draw from then on has to be the same
        assert embedding is model.get_input_embeddings()
        assert model.config.vocab_size == tokens
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            name = next(
                name for name in before if any(part in name for part in ("embed_tokens", "wte", "word_embeddings"))
            )
            kept = min(tokens, 101)
            assert torch.equal(weights[name][:kept], before[name][:kept])
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6))
    share = 4 // accelerator.data_parallel_size
    mine = slice(accelerator.data_parallel_rank * share, (accelerator.data_parallel_rank + 1) * share)
    losses = []
    for batch in _batches(tokens):
        loss = model(**{name: value[mine] for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = accelerator.get_state_dict(model)
    expected_losses, expected_weights = expected
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    if accelerator.is_main_process:
        assert weights.keys() == expected_weights.keys()
        for name, value in expected_weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


TP = ModelParallelismPlugin(tensor_parallel_size=2)
PP = ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=2)
TP_PP = ModelParallelismPlugin(tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("family", "tokens", "mean", "after", "ranks", "plugins"),
    [
        ("tied gpt2", 107, False, True, 2, [TP]),
        ("llama", 108, True, True, 2, [TP, SequenceParallelPlugin()]),
        ("llama, padding", 97, False, True, 4, [TP]),
        ("llama", 107, False, True, 4, [TP, Zero1Plugin()]),
        ("tied gpt2", 107, False, False, 2, [TP]),
        ("bert", 107, False, True, 2, [TP]),
        ("llama", 107, True, True, 2, [PP]),
        ("tied gpt2", 107, False, True, 2, [PP]),
        ("llama, padding", 97, False, True, 4, [PP, Zero1Plugin()]),
        ("llama", 107, True, True, 4, [TP_PP, SequenceParallelPlugin()]),
        ("tied llama", 107, False, True, 4, [TP_PP]),
        ("llama", 107, False, False, 2, [PP]),
        ("tied gpt2", 107, True, False, 4, [TP_PP]),
    ],
    ids=[
        *("more-tied", "more-sequence", "fewer-dp", "more-zero1", "before", "second-name"),
        *("pp-more", "pp-more-tied", "pp-fewer-dp", "pp-tp-sequence", "pp-tp-tied", "pp-before", "pp-tp-before-tied"),
    ],
)
def test_training_goes_on_with_other_tokens(family, tokens, mean, after, ranks, plugins):
    run_ranks(_sharded, ranks, family, tokens, mean, after, plugins, _alone(family, tokens, mean))


def _too_late() -> str:
    accelerator = NeuronAccelerator(plugins=[TP, Zero1Plugin()])
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError) as caught:
        model.resize_token_embeddings(107)
    assert model.lm_head.weight.shape[0] == 51
    return str(caught.value)


def test_what_is_too_late_is_refused():
    for message in run_ranks(_too_late, 4):
        assert "an optimizer was prepared" in message


def _fails() -> None:
    accelerator = NeuronAccelerator(plugins=[PP])
    model = accelerator.prepare(llama())
    before = dict(model.named_parameters())
    error, says = (ValueError, "integer") if accelerator.is_main_process else (UnsupportedModelError, "another rank")
    with pytest.raises(error, match=says):
        model.resize_token_embeddings(107, pad_to_multiple_of="8" if accelerator.is_main_process else None)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())

    model = accelerator.prepare(bert())
    where = "is on another pipeline stage" if accelerator.is_main_process else "another rank"
    with pytest.raises(UnsupportedModelError, match=where):
        model.resize_token_embeddings(107)


def test_what_fails_on_one_rank_fails_on_all():
    run_ranks(_fails, 2)

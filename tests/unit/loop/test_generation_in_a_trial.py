"""Texts that are generated in a trial of ``precompile``, where the device says zero."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accel.loop.precompile_mode import FullLength


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=None
    )
    return LlamaForCausalLM(config).eval()


def test_a_text_ends_at_its_maximum_length_though_the_device_never_says_so(monkeypatch):
    generates = model()
    monkeypatch.setattr(LlamaForCausalLM, "_has_unfinished_sequences", lambda *args, **more: True)
    FullLength(generates)
    ids = torch.ones(1, 3, dtype=torch.long)
    assert generates.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4).shape == (1, 7)


def test_beam_search_is_named_as_not_collected():
    generates = model()
    FullLength(generates)
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="beam search are not collected"):
        generates.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, num_beams=2)

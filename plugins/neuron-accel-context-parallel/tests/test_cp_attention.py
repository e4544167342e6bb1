"""The ring against attention written down plainly, in float64."""

from __future__ import annotations

import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin, blocks
from neuron_accel_context_parallel.blocks import Dropout, Rule, Scores, attend, attend_backward
from neuron_accel_context_parallel.ring import AttentionOptions, Ring
from neuron_accel_context_parallel.zigzag import Zigzag, table

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks

LENGTH = 48
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 20 + [2] * 23, [0] * 30 + [1] * 18])
SEEN = torch.ones(2, LENGTH, dtype=torch.long)
SEEN[0, -9:], SEEN[1, :4] = 0, 0
CODES = {"all": None, "documents": 2 * DOCUMENTS + 1, "padding": SEEN, "both": 2 * DOCUMENTS + SEEN}


def plain(query, key, value, codes, window, cap):
    groups, index = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    seen = (index[:, None] >= index)[None]
    if window is not None:
        seen = seen & (index[:, None] - index < window)
    if codes is not None:
        seen = seen & (codes[:, :, None] // 2 == codes[:, None] // 2) & (codes[:, None] % 2 == 1)
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1) * seen.any(-1)[:, None, :, None]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 6), (2, LENGTH, 4, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def on_rank() -> list[float]:
    degree = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 0
    accelerator = NeuronAccelerator(plugins=[ContextParallelPlugin(context_parallel_size=degree or 2)])
    run = accelerator.run
    zigzag, ring = Zigzag(run.backend, run.group("cp")), Ring(run.backend, run.group("cp"))
    *whole, weights = inputs()
    errors = []
    for codes in CODES.values():
        for window, cap in ((None, None), (7, None), (None, 2.0)):
            leaves = [x.clone().requires_grad_() for x in whole]
            expected = plain(*leaves, codes, window, cap)
            expected.backward(weights)
            shares = [zigzag.shard(x, 2, 0.0).requires_grad_() for x in whole]
            actual = ring.attention(*shares, AttentionOptions(scores=Scores(scale=0.3, cap=cap), window=window), codes)
            actual.backward(zigzag.shard(weights, 1, 0.0))
            pairs = [(actual, zigzag.shard(expected, 1, 0.0))]
            pairs += [(s.grad, zigzag.shard(x.grad, 2, 0.0)) for s, x in zip(shares, leaves, strict=True)]
            errors += [float((a - b).abs().max()) for a, b in pairs]
    return errors


@pytest.mark.parametrize("degree", [2, 4])
def test_the_ring_is_attention(degree):
    for errors in run_ranks(on_rank, degree):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("tile", [5, 16, 256])
@pytest.mark.parametrize("codes", CODES)
def test_tiles_of_any_size(monkeypatch, tile, codes):
    monkeypatch.setattr(blocks, "TILE", tile)
    query, key, value, weights = (x.requires_grad_() for x in inputs())
    places = None
    if CODES[codes] is not None:
        document = CODES[codes] // 2
        visible = torch.where(CODES[codes] % 2 == 1, document, -2)
        places = blocks.Places(index=torch.arange(LENGTH), document=document, visible=visible)
    expected = plain(query, key, value, CODES[codes], None, None)
    gradients = torch.autograd.grad(expected, [query, key, value], weights)
    with torch.no_grad():
        for reads in (False, True):
            rule = Rule(diagonal=True, queries=places, keys=places, reads=reads)
            output, log = attend(query, key, value, Scores(scale=0.3), rule)
            torch.testing.assert_close(output.transpose(1, 2), expected)
            gradient = weights.transpose(1, 2)
            product = (output * gradient).sum(-1)
            of_query, of_pair = attend_backward(query, key, value, gradient, log, product, Scores(scale=0.3), rule)
            for mine, theirs in zip((of_query, *of_pair.split([8, 6], -1)), gradients, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_dropped_weights_are_the_same_in_the_backward_pass():
    query, key, value, weights = inputs()
    query, key, value = query[..., :6, :], key[..., :6, :], value[..., :6, :]
    dropout, scores, rule = Dropout(0.4, 3), Scores(scale=0.3), Rule(diagonal=True)

    def value_of(q, k, v):
        return (attend(q, k, v, scores, rule, dropout)[0] * weights[:, :6].transpose(1, 2)).sum()

    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = torch.autograd.grad(value_of(*leaves), leaves)  # autograd through the tiles of the forward pass
    output, log = attend(query, key, value, scores, rule, dropout)
    gradient = weights[:, :6].transpose(1, 2)
    of_query, of_pair = attend_backward(
        query, key, value, gradient, log, (output * gradient).sum(-1), scores, rule, dropout
    )
    for mine, theirs in zip((of_query, *of_pair.split([8, 6], -1)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(output, attend(query, key, value, scores, rule)[0])
    many = Dropout(0.4, 3).scales(torch.Size([200, 200]), slice(0, 200), slice(0, 200), torch.device("cpu"))
    assert float(many.mean()) == pytest.approx(1, abs=0.02)
    assert float((many == 0).float().mean()) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_rank_has_as_many_scores(degree):
    rows = table(16 * degree, degree)
    assert torch.equal(rows.flatten().sort().values, torch.arange(16 * degree))
    assert len({int((row + 1).sum()) for row in rows}) == 1  # a token sees as many as stand before it, and itself

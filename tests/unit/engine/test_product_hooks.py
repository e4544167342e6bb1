"""Hooks that modify a layer's product before it is reduced over ranks, and parameters that a strategy adds."""

from __future__ import annotations

import torch
from torch import nn

from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.engine.sharding.product_hooks import WithProductHooks, register_product_hook


class _Exchanging(WithProductHooks, nn.Linear):
    """A stand-in for a layer whose output is all-reduced over two ranks: it doubles its product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * self._product(input, nn.functional.linear(input, self.weight))


def _add_input(module: nn.Module, args: tuple, product: torch.Tensor) -> torch.Tensor:
    return product + args[0]


def test_a_product_is_changed_before_it_is_exchanged() -> None:
    layer, x = _Exchanging(3, 3, bias=False), torch.ones(2, 3)
    plain = layer(x)
    handle = register_product_hook(layer, _add_input)
    assert torch.equal(layer(x), plain + 2 * x)
    handle.remove()
    assert torch.equal(layer(x), plain)


def test_in_a_layer_of_one_rank_it_is_the_output_that_is_changed() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    plain = layer(x)
    register_product_hook(layer, _add_input)
    assert torch.equal(layer(x), plain + x)


def test_what_a_strategy_adds_is_known_as_added() -> None:
    model = nn.Linear(2, 2)
    parameters = ParameterMap(model)
    model.extra = nn.Parameter(torch.zeros(3))
    parameters.follow(model)
    assert [record.fqn for record in parameters if record.added] == ["extra"]


def test_random_numbers_agree_inside_together_and_differ_inside_apart() -> None:
    """Ranks draw equal numbers inside `together` and different numbers inside `apart`, however they are nested, and no
    number is drawn twice."""

    def draw(index: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        source = RankRandomness(torch.device("cpu"), index)
        drawn = []
        for differ in (False, True):
            source.begin(differ)
            for place in (source.together, source.apart, source.together):
                with place():
                    drawn.append(torch.rand(8))
            source.end()
        drawn.append(torch.rand(8))
        assert len({tuple(t.tolist()) for t in drawn}) == len(drawn)
        return drawn

    same = [torch.equal(a, b) for a, b in zip(draw(0), draw(1), strict=True)]
    assert same == [True, False, True, True, False, True, True]

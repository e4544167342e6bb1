"""``plan.explain()`` prints the first sentence of every hook that a strategy overrides, so each has a short one."""

from __future__ import annotations

import pytest

from neuron_accel.engine.plan.plan import _first_sentence
from neuron_accel.engine.plan.plugin import HOOKS, overrides
from neuron_accel.engine.plan.registry import default_registry

BUILT_IN = [entry for entry in default_registry().entries() if entry.distribution == "neuron-accel"]


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_every_hook_of_a_built_in_strategy_says_briefly_what_it_does(entry):
    cls = entry.load()
    plugin = object.__new__(cls)
    described = {name: _first_sentence(plugin, name) for name in HOOKS if overrides(plugin, name)}
    inherited = [name for name, text in described.items() if text == name or " " not in text]
    assert not inherited, "no docstring of their own"
    assert not {name: text for name, text in described.items() if len(text) > 65}


def test_there_are_built_in_strategies():
    assert len(BUILT_IN) >= 10

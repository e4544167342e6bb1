"""Compiler flags under autocast, and warnings about updates lost to rounding."""

from __future__ import annotations

import warnings

import pytest

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.precision import lost_updates, set_precision_flags


def settled(environ, mixed_precision="bf16", neuron=True):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_precision_flags(environ, mixed_precision=mixed_precision, compiles_for_neuron=neuron)
    return environ


def test_under_autocast_the_compiler_casts_nothing():
    assert settled({"NEURON_CC_FLAGS": "-O1"}) == {"NEURON_CC_FLAGS": "-O1 --auto-cast=none"}
    assert settled({"NEURON_CC_FLAGS": "--auto-cast=none"}) == {"NEURON_CC_FLAGS": "--auto-cast=none"}


@pytest.mark.parametrize(("mixed_precision", "neuron"), [("no", True), ("bf16", False)])
def test_else_its_flags_are_left_alone(mixed_precision, neuron):
    assert settled({}, mixed_precision, neuron) == {}


def test_a_cast_of_its_own_contradicts_autocast():
    with pytest.raises(ConfigurationError, match="auto-cast"):
        settled({"NEURON_CC_FLAGS": "--auto-cast=all"})


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_legacy_variables_are_named_with_what_to_use(name):
    with pytest.warns(FutureWarning, match=rf"{name} .*mixed_precision='bf16'.*STOCHASTIC_ROUNDING_EN=1"):
        set_precision_flags({name: "1"}, mixed_precision="no", compiles_for_neuron=False)
    settled({name: "0"}, "no")


@pytest.mark.parametrize(
    ("rounds", "low", "masters", "words"),
    [
        ("", True, False, "rounded away"),
        ("0", True, False, "Zero1Plugin"),
        ("1", True, False, None),
        ("", True, True, None),
        ("1", True, True, "unset it"),
        ("", False, False, None),
    ],
)
def test_updates_that_would_be_lost(rounds, low, masters, words):
    said = lost_updates({"NEURON_RT_STOCHASTIC_ROUNDING_EN": rounds}, low_precision=low, masters=masters)
    assert said is None if words is None else words in said


@pytest.mark.parametrize(("rounds", "masters"), [("1", False), ("1", True), ("0", False), ("", True)])
def test_random_rounding_of_what_autocast_casts_is_said(rounds, masters):
    environ = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": rounds}
    said = lost_updates(environ, low_precision=False, masters=masters, autocast=True)
    assert ("autocast" in said and "unset it" in said) if rounds == "1" else said is None

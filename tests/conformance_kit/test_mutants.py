"""The kit finds each fault of a plugin with the check for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_accel.testing import PluginConformance, RanksError, Training, run_ranks
from neuron_accel.testing._obligations import PROMISES, broken, promised, told
from tests.conformance_kit import mutants


class Kit(PluginConformance):
    """Not collected; its checks are called one by one. One rank is enough for most faults."""

    ranks = 1


def refusal(check, plugin, *arguments, kit=Kit, **keywords) -> str:
    """The failure message of a check for a plugin."""
    with pytest.raises((pytest.fail.Exception, AssertionError, Exception)) as caught:
        getattr(kit(), check)(plugin, *arguments, **keywords)
    assert not isinstance(caught.value, (TypeError, NameError, AttributeError)), caught.value
    return str(caught.value)


FORM = {
    "ByPosition": "width can be given by position",
    "Misspelt": "transform_optimiser is not a hook and never called; did you mean transform_optimizer?",
    "TooFewArguments": "step does not accept its arguments",
    "UnclaimedDuty": "gradients is only called on the owner of gradient_reduction",
    "OtherVersion": "written for version 99",
}


@pytest.mark.parametrize("name", FORM)
def test_form(name):
    assert FORM[name] in refusal("test_keeps_the_form_of_the_contract", getattr(mutants, name)())


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [
        ("test_is_found_by_name", mutants.Healthy(), "no plugin 'healthy'"),
        ("test_configuration_round_trip", mutants.Doubles(width=3), "is read back as"),
        ("test_configuration_is_strict", mutants.TakesAnything(), "option 'width' accepts values of any type"),
        ("test_plan_is_pure", mutants.LooksAtItsRank(), "depends on the process, its rank or its environment"),
        ("test_plan_is_pure", mutants.CountsPlans(), "planning twice makes two different plans"),
        ("test_plan_is_pure", mutants.OtherVersion(), "planning for "),
        ("test_plan_is_independent_of_order", mutants.CountsPlans(), "different outcomes"),
    ],
)
def test_what_needs_no_training(check, plugin, message):
    assert message in refusal(check, plugin)


def test_planning_that_changes_something(monkeypatch):
    monkeypatch.delenv("SET_BY_A_PLUGIN_WHILE_PLANNING", raising=False)
    assert "planning changed environment variables" in refusal("test_plan_is_pure", mutants.SetsVariables())
    monkeypatch.delenv("SET_BY_A_PLUGIN_WHILE_PLANNING")


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [
        ("test_accumulates_like_one_process", mutants.DividesTwice(), "norms[0] is"),
        ("test_frozen_parameters", mutants.Unfreezes(), "the reference has no"),
        ("test_frozen_parameters", mutants.Decays(), "is frozen and has changed"),
        ("test_tied_parameters", mutants.Unties(), "was tied to 'model.embed_tokens.weight' and is not any more"),
    ],
)
def test_training(check, plugin, message):
    assert message in refusal(check, plugin, "gloo")


def test_another_loss():
    message = refusal("test_trains_like_one_process", mutants.HalvesGradients(), "alone", "gloo", {})
    assert "norms[0] is" in message
    assert "losses[0]" not in message


def test_conflicts():
    def outcome(plugin, declared):
        class Declares(Kit):
            conflicts = declared

        return refusal("test_trains_like_one_process", plugin, "zero1", "gloo", {}, kit=Declares)

    assert "cannot run together with 'zero1'" in outcome(mutants.RefusesZero1(), {})
    assert "does not contain 'something else'" in outcome(mutants.RefusesZero1(), {"zero1": "something else"})
    assert "or has no fix" in outcome(mutants.RefusesWithoutAdvice(), {"zero1": "does not go together"})
    assert "is declared as a conflict, but works" in outcome(mutants.Healthy(), {"zero1-gloo": "anything"})


def test_declared_conflict_is_accepted():
    class Declares(Kit):
        conflicts = {"zero1": "declares this conflict"}  # noqa: RUF012

    Declares().test_trains_like_one_process(mutants.RefusesZero1(), "zero1", "gloo", {})


XLA_CHECKS = [
    "test_accumulates_like_one_process",
    "test_frozen_parameters",
    "test_tied_parameters",
    "test_unwrap_model_is_the_original",
    "test_resumes",
    "test_reshards",
    "test_consolidates",
    "test_leaves_nothing_behind",
    "test_exits_cleanly",
]


@pytest.mark.parametrize("check", XLA_CHECKS)
def test_a_declared_conflict_counts_in_every_check(check, tmp_path_factory):
    """With gloo in place of xla, which need not be installed."""

    class Declares(Kit):
        conflicts = {"gloo": "cannot run"}  # noqa: RUF012

    files = ({}, tmp_path_factory) if check in ("test_resumes", "test_reshards", "test_consolidates") else ()
    backend = () if check in ("test_consolidates", "test_leaves_nothing_behind", "test_exits_cleanly") else ("gloo",)
    getattr(Declares(), check)(mutants.RefusesAlways(), *backend, *files)
    assert "is declared as a conflict, but works" in refusal(check, mutants.Healthy(), *backend, *files, kit=Declares)


def test_a_fault_that_needs_data_parallel_ranks_beside_tensor_parallel_ones():
    check = "test_trains_like_one_process"

    class Default(PluginConformance):
        """With as many ranks as the kit chooses."""

    Default().test_trains_like_one_process(mutants.PairsNeighbours(), "alone", "gloo", {})
    for composition in ("tp2", "tp2-sp"):
        assert "weights[" in refusal(check, mutants.PairsNeighbours(), composition, "gloo", {}, kit=Default)


class LocalKit(PluginConformance):
    training = Training(optimizer=mutants.sgd)
    steps = 4
    train_reference = staticmethod(mutants.train_in_local_steps)


def test_an_algorithm_that_is_not_that_of_one_process(tmp_path_factory):
    LocalKit().test_trains_like_one_process(mutants.LocalSteps(), "alone", "gloo", {})
    LocalKit().test_tied_parameters(mutants.LocalSteps(), "gloo")
    LocalKit().test_frozen_parameters(mutants.LocalSteps(), "gloo")
    check = "test_trains_like_one_process"
    assert "weights[" in refusal(check, mutants.LocalStepsTooRarely(), "alone", "gloo", {}, kit=LocalKit)

    class InOneProcess(LocalKit):
        train_reference = staticmethod(PluginConformance.train_reference)

    assert "losses[" in refusal(check, mutants.LocalSteps(), "alone", "gloo", {}, kit=InOneProcess)


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [
        ("test_resumes", mutants.ForgetsItsCount(), "weights["),
        ("test_reshards", mutants.DependsOnTheNumberOfRanks(), "weights["),
        ("test_consolidates", mutants.ShowsOtherWeights(), "model.norm.weight differs from the run"),
    ],
)
def test_files(check, plugin, message, tmp_path_factory):
    backend = () if check == "test_consolidates" else ("gloo",)
    assert message in refusal(check, plugin, *backend, {}, tmp_path_factory)


def test_state_of_a_plugin_is_part_of_checkpoints(tmp_path_factory):
    made_once = {}
    Kit().test_resumes(mutants.RemembersItsCount(), "gloo", made_once, tmp_path_factory)
    Kit().test_reshards(mutants.RemembersItsCount(), "gloo", made_once, tmp_path_factory)


def test_another_model():
    message = refusal("test_unwrap_model_is_the_original", mutants.TrainsACopy(), "gloo")
    assert "a LlamaForCausalLM instead of the LlamaForCausalLM that was prepared" in message


def test_litter():
    message = refusal("test_leaves_nothing_behind", mutants.Litters())
    for found in (
        "thread litter",
        "1 more process groups",
        "variable SET_BY_A_PLUGIN has changed",
        "mutants has changed in 'SEEN'",
        "torch.nn.functional.silu was replaced",
        "the model has a new attribute 'litter'",
        "module 'lm_head' has 1 forward hooks, and had 0",
        "parameter 'lm_head.weight' has new hooks",
    ):
        assert found in message
    assert "no_sync" not in message


def test_a_bad_end():
    assert "ended with exit code 3" in refusal("test_exits_cleanly", mutants.EndsBadly())


# ---- owning a responsibility -----------------------------------------------------------------------------------------
def each_breaks(owners):
    """For each owner, what is found of each promise in ``owners``, on this rank."""
    return {cls.__name__: broken((cls(),), names, "gloo") for cls, names in owners.items()}


@pytest.fixture(scope="module")
def breaks():
    """What the kit finds in an owner without a fault, and in each that breaks a promise: all in one call."""
    healthy = promised(mutants.Owner(), "gloo")
    owners = {mutants.Owner: healthy} | {cls: [name] for cls, name in mutants.BREAKS.items()}
    results = run_ranks(each_breaks, 2, owners, timeout=110)
    return {name: told([result[name] for result in results]) for name in results[0]}


def test_an_owner_that_keeps_its_promises(breaks):
    assert breaks["Owner"] == []


@pytest.mark.parametrize("cls", mutants.BREAKS, ids=lambda cls: cls.__name__)
def test_each_promise_that_is_broken_is_found(breaks, cls):
    (found,) = breaks[cls.__name__]
    assert found.startswith(mutants.BREAKS[cls])


def test_every_promise_is_broken_by_one_of_the_owners():
    assert {*mutants.BREAKS.values(), "uneven"} == set(PROMISES)


def test_a_rank_without_data_that_takes_no_part():
    """The others wait for it, or receive something else, depending on what connects them."""
    try:
        found = run_ranks(broken, 2, (mutants.DoesNotJoin(),), ["uneven"], "gloo", timeout=5)
    except RanksError:
        return
    assert any(found)


def test_the_check_says_which_promises_are_broken():
    class Declares(Kit):
        opt_out = {  # noqa: RUF012
            "test_keeps_its_promises[no_sync]": "it is faster to reduce at once",
            "test_keeps_its_promises[step_inside_no_sync]": "its ranks always step together",
        }

    message = refusal("test_keeps_its_promises", mutants.KeepsBuffersApart(), "gloo")
    assert "buffers: the buffer of rank 1 is not that of the first rank" in message
    assert "no_sync: 4 reductions inside `no_sync`" in refusal(
        "test_keeps_its_promises", mutants.IgnoresNoSync(), "gloo"
    )
    Declares().test_keeps_its_promises(mutants.IgnoresNoSync(), "gloo")


# ---- opting out ------------------------------------------------------------------------------------------------------
def test_opting_out_without_a_reason():
    class Evasive(PluginConformance):
        opt_out = {"test_resumes": "no", "test_resume": "there is no such check at all"}  # noqa: RUF012
        conflicts = {"tp3": "anything", "pp2": ""}  # noqa: RUF012

        def test_exits_cleanly(self):
            pass

    with pytest.raises(pytest.fail.Exception) as caught:
        Evasive().test_is_opted_out_of_with_reasons_only()
    for found in (
        "the reason for 'test_resumes' is 'no'",
        "opt_out contains 'test_resume', which is not a check",
        "conflicts contains 'tp3', which is not a composition",
        "conflicts has no text of the error message for 'pp2'",
        "Evasive overrides test_exits_cleanly",
    ):
        assert found in str(caught.value)


OPTING_OUT = """
import pytest
from neuron_accel.testing import PluginConformance, RanksError, Training, run_ranks
from neuron_accel.testing._obligations import PROMISES, broken, promised, told
from tests.conformance_kit.mutants import Healthy

class TestHealthy(PluginConformance):
    opt_out = {
        "test_is_found_by_name": "it is part of a test and in no distribution",
        "test_plan_is_independent_of_order": "no",
    }

    @pytest.fixture
    def plugin(self):
        return Healthy()

class TestForgetful(PluginConformance):
    pass
"""


def test_reasons_are_printed(tmp_path):
    (tmp_path / "test_opting_out.py").write_text(OPTING_OUT)
    chosen = "found_by_name or round_trip or (independent and Healthy)"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    line = "OPTED OUT of test_is_found_by_name (TestHealthy): it is part of a test and in no distribution"
    assert line in result.stdout
    assert "TestForgetful needs a fixture 'plugin'" in result.stdout
    assert "2 passed, 1 skipped" in result.stdout  # a reason of two letters opts nobody out
    assert "2 errors" in result.stdout

"""Variables with which the Neuron runtime records profiles."""

from __future__ import annotations

from neuron_accel.neuron.profiling import profiling_problem, set_profiling_variables


def test_variables_are_set_where_the_caller_has_not():
    environ = {"NEURON_RT_INSPECT_DEVICE_PROFILE": "session"}
    set_profiling_variables(environ, "profiles")
    assert environ == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "session",
        "NEURON_RT_INSPECT_OUTPUT_DIR": "profiles",
        "XLA_IR_DEBUG": "1",
        "XLA_HLO_DEBUG": "1",
    }
    assert profiling_problem(environ, native=False) is None


def test_a_profile_without_the_device_is_a_warning():
    assert "NEURON_RT_INSPECT_ENABLE=1" in profiling_problem({}, native=False)
    assert "ProfileKwargs" in profiling_problem({"NEURON_RT_INSPECT_ENABLE": "0"}, native=False)
    assert "conflicts" in profiling_problem({"NEURON_RT_INSPECT_ENABLE": "1"}, native=True)
    assert profiling_problem({}, native=True) is None

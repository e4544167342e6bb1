"""A collective call that only some ranks make is reported with the file and line of every rank."""

from __future__ import annotations

import inspect
import re
import time

import pytest

from neuron_accel.errors import ConfigurationError
from neuron_accel.loop.watchdog import VARIABLE, seconds_before_warning
from neuron_accel.testing import run_ranks

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
DELAY_S = 0.3


def only_main_saves(folder):
    from neuron_accel import NeuronAccelerator
    from tests.distributed.loop.loops_support import model

    accelerator = NeuronAccelerator(config={"plugins": [TP2]})
    net = accelerator.prepare(model())
    if accelerator.is_main_process:
        net.save_pretrained(folder)
    else:
        time.sleep(2.5)
        net.save_pretrained(folder)
    accelerator.end_training()


def one_is_in_another_call():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    with accelerator.run.events.open("gather" if accelerator.is_main_process else "wait_for_everyone", "call"):
        time.sleep(2)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def all_are_slow(folder):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    with accelerator.run.events.open("save_state", "call"):
        time.sleep(1.5)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return [first + i for i, line in enumerate(lines) if text in line]


def test_the_file_and_line_of_both_ranks_are_reported_and_the_call_completes(tmp_path, capfd):
    run_ranks(only_main_saves, 2, str(tmp_path), env={VARIABLE: str(DELAY_S)})
    said = "".join(capfd.readouterr())
    waits = line_of(only_main_saves, "save_pretrained")[0]
    elsewhere = line_of(only_main_saves, "time.sleep")[0]
    assert re.search(
        rf"rank 0 of 2 has waited for other ranks for \d+ s, in `save_pretrained` at .*test_watchdog.py:{waits}\.",
        said,
    )
    assert re.search(rf"Rank 1 is at .*test_watchdog.py:{elsewhere}\.", said)
    assert "Every rank has to call `save_pretrained`" in said
    assert said.count("has waited for other ranks") <= 2
    assert (tmp_path / "config.json").exists()


def test_two_different_calls_are_both_reported(capfd):
    run_ranks(one_is_in_another_call, 2, env={VARIABLE: str(DELAY_S)})
    said = "".join(capfd.readouterr())
    place = r"at .*test_watchdog.py:\d+\."
    in_gather, in_barrier = f"in `gather` {place}", f"in `wait_for_everyone` {place}"
    both = [(0, in_gather, 1, in_barrier), (1, in_barrier, 0, in_gather)]  # the rank that asks last reports
    assert any(
        re.search(rf"rank {one} of 2 has waited .*{here}\n.*Rank {other} is {there}", said)
        for one, here, other, there in both
    )


def test_nothing_is_reported_if_all_ranks_are_in_the_same_call(tmp_path, capfd):
    run_ranks(all_are_slow, 2, str(tmp_path), env={VARIABLE: str(DELAY_S)})
    assert "waited for other ranks" not in "".join(capfd.readouterr())


def test_the_delay_is_a_number_of_seconds():
    assert seconds_before_warning({}) == 10.0
    assert seconds_before_warning({VARIABLE: "0"}) == 0.0
    for wrong in ("-1", "soon", "nan", "inf"):
        with pytest.raises(ConfigurationError, match=VARIABLE):
            seconds_before_warning({VARIABLE: wrong})

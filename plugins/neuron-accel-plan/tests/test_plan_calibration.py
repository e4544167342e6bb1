"""The file of measured constants: what it holds is what is used, and what is wrong in it is named."""

from __future__ import annotations

import copy

import pytest
import yaml
from neuron_accel_plan.calibration import FORM_ERROR, CalibrationFile, dump_calibration, load_calibration

from neuron_accel.commands import main
from neuron_accel.errors import ConfigurationError
from neuron_accel.testing import run_ranks

FILE = {
    "neuron_accel_calibration": 1,
    "machine": "a test",
    "ranks": 2,
    "kernels": {"product": {"float32": [[1e6, 1e9], [1e9, 4e9]]}, "element-wise": {"float32": [[1e3, 1e8]]}},
    "fixed": {"forward": 2e-5, "": 1e-5},
    "collectives": {"all_reduce": {2: [[1e3, 1e-4]]}},
    "in_training": {"forward": 1.5},
    "overlap": 0.25,
    "spread": {"kernels": [0.5, 2.0]},
}


def test_constants_are_those_of_the_file(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(FILE))
    machine = load_calibration(path)
    product = machine.kernels["product"]["float32"]
    assert product.points == ((1e6, 1e9), (1e9, 4e9))
    assert product.at(1e9, "best") == pytest.approx(4e9 * 2 * (1 + FORM_ERROR))
    assert product.at(1e9, "worst") == pytest.approx(4e9 / 2 / (1 + FORM_ERROR))
    assert machine.collectives["all_reduce"][2].at(1e3, "worst") == pytest.approx(1e-4 * (1 + FORM_ERROR))
    assert machine.in_training["forward"].at() == 1.5
    assert (machine.overlap.at(), machine.measured_ranks, machine.fuses) == (0.25, 2, False)
    assert set(machine.sources().values()) == {"calibrated (on a test, 2 ranks)"}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("kernel",), {}, ["'kernel' is not an option", "kernels"]),
        (("neuron_accel_calibration",), 2, ["version 2", "reads version 1", "neuron-accel calibrate"]),
        (("kernels", "product", "float32"), [[1e9, 1e9], [1e6, 1e9]], ["not in order", "kernels.product.float32"]),
        (("kernels", "product", "float32"), [[1e6, 0.0]], ["above 0"]),
        (("kernels", "product", "float32"), [[1e6, float("nan")]], ["kernels.product.float32"]),
        (("kernels", "product", "float32"), "fast", ["kernels.product.float32", "line"]),
        (("kernels", "products"), {}, ["'products' is not a kind", "batched product"]),
        (("kernels", "element-wise"), {}, ["no rate of element-wise"]),
        (("fixed",), {"forward": 1e-5}, ["no fixed cost"]),
        (("fixed", "forward"), -1.0, ["-1.0 seconds", "fixed.forward"]),
        (("in_training", "forward"), 0.0, ["factor of 0.0", "in_training.forward"]),
        (("overlap",), 1.5, ["overlap is 1.5", "from 0 to 1"]),
        (("ranks",), 0, ["ranks is 0"]),
        (("spread", "kernels"), [2.0, 0.5], ["spread of [2.0, 0.5]"]),
        (("collectives", "all_reduce", 2), [], ["collectives.all_reduce.2"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, path, value, words):
    found = copy.deepcopy(FILE)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(found))
    with pytest.raises(ConfigurationError) as caught:
        load_calibration(file)
    for word in [*words, "machine.yaml"]:
        assert word in str(caught.value)


def test_a_file_cannot_name_code(tmp_path):
    file = tmp_path / "machine.yaml"
    file.write_text("machine: !!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigurationError, match=r"python/object/apply|not valid YAML"):
        load_calibration(file)


@pytest.mark.parametrize("output", ["", "missing/machine.yaml"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys, output):
    assert main(["calibrate", "--output", str(tmp_path / output)]) == 2
    assert "--output" in capsys.readouterr().err


def measured():
    from neuron_accel_plan.measure import measure

    from neuron_accel import NeuronAccelerator

    run = NeuronAccelerator(cpu=True).run
    stages: list[str] = []
    return measure(run.backend, run.world, stages.append, quick=True), stages


def test_ranks_measure_this_machine():
    results = run_ranks(measured, 2, timeout=110)
    found, stages = results[0]
    assert isinstance(found, CalibrationFile)
    assert "all_gather between 2 ranks" in stages
    machine = load_calibration(yaml.safe_load(dump_calibration(found)))
    assert machine.measured_ranks == 2
    assert set(machine.kernels) >= {"product", "batched product", "element-wise", "special functions", "indexed"}
    assert 1e6 < machine.kernels["product"]["float32"].at(1e8) < 1e13
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"):
        (least, quick), (most, slow) = machine.collectives[op][2].points
        assert least < most
        assert quick > 0
        assert slow > 0
    assert machine.fixed["forward"].at() > 0
    assert {*machine.in_training} == {"forward", "backward", "optimizer step"}
    assert all(factor.at() > 0 for factor in machine.in_training.values())  # a busy machine takes any time

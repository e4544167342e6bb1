"""The table of instances, and the plans that the planner rejects for an instance."""

from __future__ import annotations

import dataclasses

import pytest

from neuron_accel.backends.select import Decision
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.neuron import INSTANCES, environment, find_instance
from neuron_accel.neuron.environment import hardware_of_run
from neuron_accel.neuron.instances import detect_instance, most_partitions

# name, chips, physical and logical cores, HBM GiB, TFLOPS, HBM bandwidth, link, EFA Gbit/s, vCPU, host GiB
ROWS = [
    ("trn1.2xlarge", 1, 2, 2, 32, 190, 820, None, 25, 8, 32),
    ("trn1.32xlarge", 16, 32, 32, 512, 3_040, 820, 384, 800, 128, 512),
    ("trn1n.32xlarge", 16, 32, 32, 512, 3_040, 820, 768, 1_600, 128, 512),
    ("trn2.48xlarge", 16, 128, 64, 1_536, 10_700, 2_900, 1_024, 3_200, 192, 2_048),
    ("trn2u-ultraserver", 64, 512, 256, 6_144, 42_800, 2_900, 1_024, 3_200, 768, 8_192),
    ("trn2.3xlarge", 1, 8, 4, 96, 667, 2_900, None, 200, 12, 128),
    ("trn3.48xlarge", 16, 128, 64, 2_304, 10_736, 4_900, 2_048, 3_200, 192, 2_048),
    ("trn3e.24xlarge", 4, 32, 16, 576, 2_684, 4_900, 2_048, 800, 64, 768),
    ("trn3sn.3xlarge", 1, 8, 4, 144, 671, 4_900, None, None, None, None),
    ("trn3-gen1-ultraserver", 64, 512, 256, 9_216, 42_944, 4_900, 2_048, 12_800, 768, 8_192),
    ("trn3-gen2-ultraserver", 144, 1_152, 576, 20_736, 96_624, 4_900, 2_048, 28_800, 2_304, 27_648),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table(row):
    name, chips, physical, logical, hbm, tflops, bandwidth, link, efa, vcpus, host = row
    instance = find_instance(name)
    assert (instance.chips, instance.physical_cores, instance.cores()) == (chips, physical, logical)
    assert (instance.hbm_gib, instance.bf16_tflops, instance.hbm_gb_per_s) == (hbm, tflops, bandwidth)
    assert (instance.link_gb_per_s, instance.efa_gbps) == (link, efa)
    assert (instance.vcpus, instance.host_gib) == (vcpus, host)


def test_every_instance_is_consistent():
    for instance in INSTANCES.values():
        for lnc in instance.lnc:
            assert max(instance.workers[lnc]) == instance.cores(lnc)
            assert set(instance.model_groups[lnc]) <= set(range(2, instance.cores(lnc) + 1))
        assert instance.family in instance.name
        assert hash(instance)


@pytest.mark.parametrize(
    ("name", "lnc", "peak"),
    [
        ("trn1.32xlarge", None, 90),
        ("trn1n.32xlarge", 1, 90),
        ("trn2.48xlarge", None, 158),
        ("trn2.48xlarge", 1, 79),
        ("trn3.48xlarge", 2, 158),
    ],
)
def test_what_utilization_is_a_part_of(name, lnc, peak):
    instance = find_instance(name)
    assert instance.peak_tflops(lnc) == peak
    assert instance.peak_tflops(lnc) * instance.cores(lnc) < instance.bf16_tflops


@pytest.mark.parametrize(
    ("host", "whole"), [("trn3.48xlarge", "trn3-gen1-ultraserver"), ("trn3e.24xlarge", "trn3-gen2-ultraserver")]
)
def test_a_host_is_its_part_of_an_ultraserver(host, whole):
    host, whole = find_instance(host), find_instance(whole)
    for name in ("chips", "physical_cores", "hbm_gib", "bf16_tflops", "vcpus", "host_gib", "efa_gbps"):
        assert getattr(whole, name) == whole.hosts * getattr(host, name), name


@pytest.mark.parametrize(
    ("name", "lnc", "memory", "tflops", "network"),
    [
        ("trn1.32xlarge", 1, 16, 95, 25),
        ("trn1n.32xlarge", 1, 16, 95, 50),
        ("trn2.48xlarge", 2, 24, 167.2, 50),
        ("trn2.48xlarge", 1, 12, 83.6, 25),
        ("trn3-gen1-ultraserver", 1, 18, 83.9, 25),
    ],
)
def test_what_a_core_has(name, lnc, memory, tflops, network):
    instance = find_instance(name)
    cores = instance.cores(lnc)
    assert instance.hbm_gib / cores == memory
    assert instance.bf16_tflops / cores == pytest.approx(tflops, rel=0.005)
    assert instance.efa_gbps / cores == network


def test_logical_cores():
    assert find_instance("trn2.48xlarge").cores(1) == 128
    for name, lnc in (("trn1.32xlarge", 2), ("trn2.48xlarge", 4)):
        with pytest.raises(ConfigurationError, match="does not exist on") as caught:
            find_instance(name).cores(lnc)
        assert "NEURON_LOGICAL_NC_CONFIG" in caught.value.where


def test_a_wrong_name_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'trn1\.32xlage' is not a known Trainium instance") as caught:
        find_instance("trn1.32xlage", "--instance")
    assert "Did you mean 'trn1.32xlarge'?" in caught.value.fix
    assert caught.value.where == "--instance"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("trn2.48xlarge\n", "trn2.48xlarge"),
        ("trn2u.48xlarge\n", "trn2u.48xlarge"),
        ("trn2p.48xlarge\n", "trn2.48xlarge"),
        ("trn3.48xlarge\n", "trn3.48xlarge"),
        ("trn3sn-es.48xlarge\n", "trn3.48xlarge"),
        ("trn3pds.48xlarge\n", "trn3.48xlarge"),
        ("trn3e.24xlarge\n", "trn3e.24xlarge"),
        ("trn3e-dev0.24xlarge\n", "trn3e.24xlarge"),
        ("trn3pd98.3xlarge\n", "trn3sn.3xlarge"),
        ("trn3s-es.3xlarge\n", "trn3sn.3xlarge"),
        ("trn1.3xlarge\n", None),
        ("trn1x.48xlarge\n", None),
        ("m5.large\n", None),
        ("\n", None),
        (None, None),
    ],
)
def test_the_machine_says_what_it_is(tmp_path, content, name):
    path = tmp_path / "product_name"
    if content:
        path.write_text(content)
    found = detect_instance(path)
    assert (found.name if found else None) == name
    if name:
        assert find_instance(content.strip()) is found
        assert find_instance(f"ml.{content.strip()}") is found  # SageMaker's spelling


@pytest.mark.parametrize(
    ("name", "lnc", "legal", "wrong", "fix"),
    [
        ("trn1.2xlarge", None, [1, 2], 4, "start 2 ranks"),
        ("trn1.32xlarge", None, [1, 2, 8, 32, 64, 320], 4, "start 2 or 8 ranks"),
        ("trn1.32xlarge", None, [32], 16, "start 8 or 32 ranks"),
        ("trn1n.32xlarge", None, [64], 48, "start 32 or 64 ranks"),
        ("trn2.48xlarge", None, [1, 2, 4, 8, 16, 32, 64, 128], 65, "start 64 or 128 ranks"),
        ("trn2.48xlarge", 1, [128, 256], 96, "start 64 or 128 ranks"),
        ("trn2.3xlarge", None, [1, 2, 4, 8], 3, "start 2 or 4 ranks"),
        ("trn3-gen1-ultraserver", None, [64, 96, 256], 40, "start 32 or 64 ranks"),
    ],
)
def test_numbers_of_ranks(name, lnc, legal, wrong, fix):
    hardware = find_instance(name).hardware(lnc)
    for ranks in legal:
        hardware.check_ranks(ranks)
    with pytest.raises(PlanError, match=f"{wrong} ranks cannot run on {name}") as caught:
        hardware.check_ranks(wrong)
    assert caught.value.fix == fix


def test_an_instance_without_groups_between_hosts():
    with pytest.raises(PlanError) as caught:
        find_instance("trn1.2xlarge").hardware().check_ranks(4)  # two instances
    assert caught.value.why == "one runs at most 2 ranks, and several instances of it cannot form groups"


def mesh(ranks, **degrees):
    kinds = {"pp": AxisKind.STAGE, "cp": AxisKind.SEQUENCE, "tp": AxisKind.MODEL}
    return Mesh.build([AxisSpec(name=name, degree=d, kind=kinds[name]) for name, d in degrees.items()], ranks)


@pytest.mark.parametrize(
    ("name", "lnc", "ranks", "legal", "wrong", "fix"),
    [
        ("trn1.32xlarge", None, 64, [1, 2, 4, 8, 32], 16, "choose degree 8 or 32"),
        ("trn1.32xlarge", None, 64, [], 64, "choose degree 32"),
        ("trn1.2xlarge", None, 2, [1, 2], None, None),
        ("trn2.48xlarge", 2, 64, [2, 4, 8, 16, 32, 64], None, None),
        ("trn2.48xlarge", 2, 192, [], 48, "choose degree 32 or 64"),
        ("trn3.48xlarge", 2, 64, [2, 4, 8, 16, 32, 64], None, None),
        ("trn2.48xlarge", 1, 128, [4, 8, 16, 32, 64, 128], None, None),
        ("trn2.3xlarge", 2, 4, [2, 4], None, None),
    ],
)
def test_tensor_parallel_groups(name, lnc, ranks, legal, wrong, fix):
    hardware = find_instance(name).hardware(lnc)
    for degree in legal:
        hardware.check_mesh(mesh(ranks, tp=degree))
    if wrong:
        with pytest.raises(PlanError, match=f"'tp' of degree {wrong} cannot be formed on {name}") as caught:
            hardware.check_mesh(mesh(ranks, tp=wrong))
        assert caught.value.fix == fix


def test_a_published_layout_for_70b_is_possible():
    """AWS trains it on 8 trn2.48xlarge with logical cores of 2, tensor parallelism of 32 and 4 stages."""
    find_instance("trn2.48xlarge").hardware(2).check_mesh(mesh(512, pp=4, tp=32))


def test_groups_between_hosts_are_alike_on_each():
    hardware = find_instance("trn1.32xlarge").hardware()
    hardware.check_mesh(mesh(192, pp=3, tp=8))
    hardware.check_mesh(mesh(192, cp=4, tp=8))
    with pytest.raises(PlanError, match="unevenly") as caught:
        hardware.check_mesh(mesh(192, cp=3, tp=8))
    assert caught.value.fix == "choose degree 2 or 4"
    assert "'cp' of degree 3" in caught.value.what


def test_the_planner_refuses_what_the_hardware_cannot_do():
    from neuron_accel.strategies.data_parallel.plugin import DataParallelPlugin
    from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin

    given = [ModelParallelismPlugin(tensor_parallel_size=16), DataParallelPlugin()]
    assert make_plan(given, world_size=32).mesh.degree("tp") == 16
    with pytest.raises(PlanError, match=r"trn1\.32xlarge") as caught:
        make_plan(given, world_size=32, hardware=find_instance("trn1.32xlarge").hardware())
    assert caught.value.fix == "choose degree 8 or 32"


@pytest.mark.parametrize("axes", [1, 2, 3, 4, 5])
def test_a_step_divides_the_ranks_in_few_enough_ways(axes):
    hardware = find_instance("trn1.32xlarge").hardware()
    hardware.check_mesh(with_further_axes(axes))


def with_further_axes(count):
    """Axes of degree 2, as plugins of others might bring, within the first 32 ranks, and data parallelism."""
    kinds = [AxisKind.MODEL, AxisKind.SEQUENCE, AxisKind.STAGE, AxisKind.DATA, *[AxisKind.MODEL] * 9]
    return Mesh.build(
        [AxisSpec(name=f"a{n}", degree=2, kind=kinds[n]) for n in range(count)], 32 * 2 ** max(0, count - 5)
    )


def test_more_ways_to_divide_the_ranks_than_one_graph_can_have_are_refused():
    hardware = find_instance("trn1.32xlarge").hardware()
    with pytest.raises(PlanError, match="7 axes divide the ranks into groups in 15 ways") as caught:
        hardware.check_mesh(with_further_axes(7))
    assert "allows 12" in caught.value.what
    assert "communicators" in caught.value.why
    dataclasses.replace(hardware, partitions=None).check_mesh(with_further_axes(7))


def test_newer_runtimes_allow_more_ways():
    trn2 = find_instance("trn2.48xlarge")
    mesh = with_further_axes(7)  # 15 ways
    with pytest.raises(PlanError, match="allows 12"):
        trn2.hardware().check_mesh(mesh)
    trn2.hardware(runtime=(2, 34)).check_mesh(mesh)
    assert [most_partitions(runtime) for runtime in ((2, 33), (2, 34), (2, 35))] == [12, 16, 16]
    trained = ("2.9.1", "2.13.0+cpu", "2.14.0", "3.0.0")
    assert [trn2.runtime(torch) for torch in trained] == [(2, 33), (2, 35), (2, 35), (2, 35)]
    assert find_instance("trn1.32xlarge").runtime("2.13.0") == (2, 33), "the native device does not support it"


@pytest.mark.parametrize(
    ("device", "torch", "most"),
    [("neuron", "2.13.0", 16), ("xla", "2.13.0", 12), ("cpu", "2.13.0", 16), ("cpu", "2.9.1", 12)],
)
def test_the_limits_of_a_run_are_those_of_its_runtime(device, torch, most, monkeypatch):
    monkeypatch.setattr(environment, "version", lambda name: torch)
    way = Decision(backend="xla" if device == "xla" else "torch", device=device, reason="")
    assert hardware_of_run({"NEURON_ACCEL_INSTANCE": "trn2.48xlarge"}, way).partitions == most

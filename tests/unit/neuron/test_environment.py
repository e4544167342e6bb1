"""Environment variables for Neuron: settings for each instance, errors for invalid values, and remarks."""

from __future__ import annotations

import socket

import pytest

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import CompileCache, RuntimeOptions, find_instance
from neuron_accel.neuron.cache import location_of, remark_on_place, shared_by_machines
from neuron_accel.neuron.environment import check_visible_cores, root_address
from neuron_accel.neuron.quantities import parse_duration, parse_size
from neuron_accel.neuron.variables import VARIABLES, review


def settings(instance, *, nnodes=1, native=False, kernel=None, **options):
    found = RuntimeOptions(**options).settings(find_instance(instance), nnodes=nnodes, native=native, kernel=kernel)
    assert all(setting.why for setting in found)
    return {setting.name: setting.value for setting in found}


ALWAYS = {"NEURON_RT_EXEC_TIMEOUT": "600", "NEURON_FUSE_SOFTMAX": "1"}
LARGE = {**ALWAYS, "MALLOC_ARENA_MAX": "64"}
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


@pytest.mark.parametrize(
    ("instance", "nnodes", "options", "expected"),
    [
        ("trn1.2xlarge", 1, {}, ALWAYS),
        ("trn1.32xlarge", 1, {}, LARGE),
        ("trn1.32xlarge", 4, {}, {**LARGE, **EFA}),
        ("trn1n.32xlarge", 2, {}, {**LARGE, **EFA}),
        ("trn2.3xlarge", 1, {}, {**ALWAYS, "NEURON_LOGICAL_NC_CONFIG": "2"}),
        ("trn2.48xlarge", 1, {}, {**LARGE, "NEURON_LOGICAL_NC_CONFIG": "2"}),
        ("trn2.48xlarge", 2, {"lnc": 1}, {**LARGE, **EFA, "NEURON_LOGICAL_NC_CONFIG": "1"}),
        ("trn2u-ultraserver", 1, {}, {**LARGE, "NEURON_LOGICAL_NC_CONFIG": "2"}),
        ("trn3-gen1-ultraserver", 2, {}, {**LARGE, **EFA, "NEURON_LOGICAL_NC_CONFIG": "2"}),
        ("trn3-gen2-ultraserver", 1, {"exec_timeout": 30}, {**LARGE, "NEURON_LOGICAL_NC_CONFIG": "2"}),
    ],
)
def test_what_is_set_for_each_instance(instance, nnodes, options, expected):
    if "exec_timeout" in options:
        expected = {**expected, "NEURON_RT_EXEC_TIMEOUT": str(options["exec_timeout"])}
    assert settings(instance, nnodes=nnodes, **options) == expected


def test_machines_of_an_unknown_kind_get_what_every_kind_needs():
    options = RuntimeOptions(socket_interface="eth0")
    found = {s.name: s.value for s in options.settings(None, nnodes=2, native=False, kernel=(5, 10))}
    assert found == {**LARGE, **EFA, "FI_EFA_FORK_SAFE": "1", "CCOM_SOCKET_IFNAME": "eth0"}
    chosen = RuntimeOptions(lnc=1).settings(None, nnodes=1, native=True)
    assert {s.name: s.value for s in chosen}["NEURON_LOGICAL_NC_CONFIG"] == "1"


@pytest.mark.parametrize(
    ("cores", "address", "port", "value"),
    [
        ("", None, None, None),
        ("", "10.0.0.1", None, None),
        ("0-7", None, None, "127.0.0.1:62182"),
        ("8-15", None, None, "127.0.0.1:62190"),
        ("8-15", None, 30000, "127.0.0.1:30001"),
        ("", "10.0.0.1", 29542, "10.0.0.1:29543"),
        ("", "fe80::1", 29542, "[fe80::1]:29543"),
    ],
)
def test_jobs_on_one_machine_let_their_ranks_meet_at_different_ports(cores, address, port, value):
    found = root_address({"NEURON_RT_VISIBLE_CORES": cores}, address=address, port=port)
    assert (found.value if found else None) == value
    if found:
        review({found.name: found.value})
        assert f"ip_local_reserved_ports={value.rpartition(':')[2]}" in found.why


def test_the_last_ports_leave_none_for_the_runtime():
    with pytest.raises(ConfigurationError, match="Port 65535") as caught:
        root_address({}, address=None, port=65535)
    assert caught.value.where == "--master-port"


MOUNTS = (
    ("/", "ext4"),
    ("/fsx", "lustre"),
    ("/home", "nfs4"),
    ("/home/local", "xfs"),
    ("/hidden", "nfs4"),
    ("/hidden", "ext4"),
)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/tmp/cache", None),
        ("/fsx/team/cache", "lustre"),
        ("/fsxcache", None),
        ("/home/me/cache", "nfs4"),
        ("/home/local/cache", None),
        ("/hidden/cache", None),
        ("s3://bucket/fsx", None),
    ],
)
def test_a_folder_on_a_network_file_system(place, kind):
    assert shared_by_machines(place, MOUNTS) == kind


def test_a_cache_that_machines_would_share_is_remarked_upon():
    said = remark_on_place("/fsx/cache", MOUNTS, "trn-1")
    assert "on lustre" in said
    assert "--cache-dir '/fsx/cache/{host}'" in said
    assert remark_on_place("/fsx/cache/trn-1", MOUNTS, "trn-1") is None
    assert remark_on_place("/var/tmp/cache", MOUNTS, "trn-1") is None


def test_each_host_has_its_own_folder_where_the_location_says_so():
    assert CompileCache(location="/fsx/{host}/x").location == f"/fsx/{socket.gethostname()}/x"


def test_details_of_the_environment():
    assert settings("trn1.32xlarge", nnodes=2, kernel=(5, 10))["FI_EFA_FORK_SAFE"] == "1"
    assert "FI_EFA_FORK_SAFE" not in settings("trn1.32xlarge", nnodes=2, kernel=(5, 15))
    assert "FI_EFA_FORK_SAFE" not in settings("trn1.32xlarge", kernel=(5, 10))
    assert settings("trn1.32xlarge", nnodes=2, socket_interface="eth0")["CCOM_SOCKET_IFNAME"] == "eth0"
    rounding = settings("trn1.2xlarge", stochastic_rounding=True, rounding_seed=3)
    assert rounding["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    assert rounding["NEURON_RT_STOCHASTIC_ROUNDING_SEED"] == "3"
    assert "NEURON_FUSE_SOFTMAX" not in settings("trn2.48xlarge", native=True)
    assert "NEURON_RT_EXEC_TIMEOUT" not in settings("trn1.2xlarge", exec_timeout=None)


@pytest.mark.parametrize("wrong", [{"rounding_seed": 1}, {"exec_timeout": 0}])
def test_options_that_do_nothing_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="RuntimeOptions"):
        RuntimeOptions(**wrong)
    with pytest.raises(ConfigurationError, match="does not exist"):
        settings("trn1.32xlarge", lnc=2)


# name, values that are fine, values that cannot be
VALUES = [
    ("PJRT_DEVICE", ["NEURON", "CPU"], ["a b"]),
    ("NEURON_RT_NUM_CORES", ["0", "32"], ["-1", "all"]),
    ("NEURON_RT_VISIBLE_CORES", ["3", "0-3", "0,1,2", "4-7"], ["3-0", "0,2", "a", "1,0", "0-"]),
    ("NEURONCORE_NUM_DEVICES", ["1"], ["0", "x"]),
    ("NEURON_RT_ROOT_COMM_ID", ["10.0.0.1:62182", "host:46820"], ["10.0.0.1", "host:port"]),
    ("NEURON_PJRT_WORLD_SIZE", ["32"], ["0"]),
    ("NEURON_PJRT_PROCESSES_NUM_DEVICES", ["1,1", "2"], ["1,", "x"]),
    ("NEURON_PJRT_PROCESS_INDEX", ["0"], ["-1"]),
    ("NEURON_LOGICAL_NC_CONFIG", ["1", "2"], ["0", "4"]),
    ("NEURON_RT_VIRTUAL_CORE_SIZE", ["1", "2"], ["3"]),
    ("NEURON_EXTRACT_GRAPHS_ONLY", ["0", "1"], ["yes please"]),
    ("NEURON_PARALLEL_COMPILE_MAX_RETRIES", ["0", "3"], ["many"]),
    ("NEURON_PARALLEL_COMPILE_DUMP_RESULTS", ["1"], ["2"]),
    ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", ["0"], ["2"]),
    ("NEURON_NUM_RECENT_MODELS_TO_KEEP", ["3"], ["0"]),
    ("NEURON_FUSE_SOFTMAX", ["1"], ["on"]),
    ("NEURON_CUSTOM_SILU", ["1"], ["2"]),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", ["1", "true"], ["2"]),
    ("NEURON_RT_STOCHASTIC_ROUNDING_SEED", ["0"], ["-1"]),
    ("XLA_USE_BF16", ["1"], ["2"]),
    ("XLA_DOWNCAST_BF16", ["0"], ["x"]),
    ("XLA_DISABLE_FUNCTIONALIZATION", ["0", "1"], ["2"]),
    ("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", ["50"], ["-5"]),
    ("BUCKET_CAP_MB", ["50"], ["x"]),
    ("ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB", ["130"], ["x"]),
    ("XLA_USE_DUMMY_STORE", ["1"], ["2"]),
    ("TORCH_DIST_INIT_BARRIER", ["0"], ["2"]),
    ("NEURON_RT_EXEC_TIMEOUT", ["600"], ["0", "10m"]),
    ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", ["0", "7", "63"], ["64", "x"]),
    ("NEURON_RT_HIERARCHICAL_CC", ["1", "true"], ["2"]),
    ("NEURON_RT_ALLOW_LEGACY_NEFF", ["FALSE", "1"], ["x"]),
    ("NEURON_RT_ONE_THREAD_PER_CORE", ["1", "TRUE"], ["x"]),
    ("NEURON_RT_RANKS_PER_NETWORK_PROXY", ["1"], ["0"]),
    ("FI_PROVIDER", ["efa"], ["e f a"]),
    ("FI_EFA_USE_DEVICE_RDMA", ["1"], ["yes"]),
    ("FI_EFA_FORK_SAFE", ["1"], ["2"]),
    ("CCOM_SOCKET_IFNAME", ["eth0"], ["eth 0"]),
    ("MALLOC_ARENA_MAX", ["64", "128"], ["0"]),
    ("TORCH_NEURONX_NEFF_DISABLE_CACHE", ["1"], ["x"]),
    ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", ["1200"], ["0"]),
    ("NEURON_LAUNCH_BLOCKING", ["0"], ["2"]),
    ("NEURON_RT_ENABLE_HOST_CC", ["0", "1"], ["true"]),  # read as "not on" by the device
    ("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS", ["1", "true"], ["x"]),
    ("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", ["1", "True"], ["x"]),
    ("TORCH_NEURONX_LOG_LEVEL", ["0", "3"], ["4", "debug"]),
    ("COLLECTIVE_BUCKETSIZE_IN_MB", ["512"], ["0"]),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD", ["1"], ["x"]),
]


@pytest.mark.parametrize(("name", "fine", "wrong"), VALUES, ids=[row[0] for row in VALUES])
def test_values_of_variables(name, fine, wrong):
    for value in fine:
        review({name: value})
    for value in wrong:
        with pytest.raises(ConfigurationError, match=f"{name}=") as caught:
            review({name: value})
        assert VARIABLES[name].meaning in caught.value.where


KNOWN = """
PJRT_DEVICE NEURON_RT_NUM_CORES NEURON_RT_VISIBLE_CORES NEURONCORE_NUM_DEVICES NEURON_RT_ROOT_COMM_ID
NEURON_PJRT_WORLD_SIZE NEURON_PJRT_PROCESSES_NUM_DEVICES NEURON_PJRT_PROCESS_INDEX NEURON_CC_FLAGS
NEURON_COMPILE_CACHE_URL NEURON_EXTRACT_GRAPHS_ONLY NEURON_PARALLEL_COMPILE_MAX_RETRIES
NEURON_PARALLEL_COMPILE_DUMP_RESULTS NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE NEURON_NUM_RECENT_MODELS_TO_KEEP
NEURON_FUSE_SOFTMAX NEURON_CUSTOM_SILU NEURON_TRANSFER_WITH_STATIC_RING_OPS NEURON_RT_STOCHASTIC_ROUNDING_EN
NEURON_RT_STOCHASTIC_ROUNDING_SEED XLA_USE_BF16 XLA_DOWNCAST_BF16 XLA_DISABLE_FUNCTIONALIZATION
ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB BUCKET_CAP_MB ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB XLA_USE_32BIT_LONG
XLA_USE_DUMMY_STORE
TORCH_DIST_INIT_BARRIER XLA_ENABLE_PARAM_ALIASING XLA_IR_DEBUG XLA_HLO_DEBUG NEURON_FRAMEWORK_DEBUG
NEURON_LOGICAL_NC_CONFIG NEURON_RT_VIRTUAL_CORE_SIZE NEURON_RT_EXEC_TIMEOUT NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS
NEURON_RT_HIERARCHICAL_CC DISABLE_NUMERIC_CC_TOKEN NEURON_ENABLE_NOSEED_DROPOUT NEURON_RT_ONE_TMPBUF_PAGE_SIZE_MB
NEURON_RT_ALLOW_LEGACY_NEFF NEURON_RT_ONE_THREAD_PER_CORE NEURON_RT_RANKS_PER_NETWORK_PROXY FI_PROVIDER
FI_EFA_USE_DEVICE_RDMA FI_EFA_FORK_SAFE CCOM_SOCKET_IFNAME MALLOC_ARENA_MAX TORCH_NEURONX_NEFF_CACHE_DIR
TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR TORCH_NEURONX_NEFF_DISABLE_CACHE TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT
NEURON_LAUNCH_BLOCKING TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS TORCH_NEURONX_MLIR_ATEN_OPS
TORCH_NEURONX_ENABLE_ASYNC_NRT TORCH_NEURONX_DEBUG_DIR TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS
TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION TORCH_NEURONX_COMPLEX_DECOMPOSE TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY
NEURON_USE_SPLIT_ALLGATHER NEURON_USE_SPLIT_REDUCE_SCATTER COLLECTIVE_BUCKETSIZE_IN_MB COLLECTIVE_MIN_BUCKETS
NEURON_RT_ENABLE_HOST_CC TORCH_DEVICE_BACKEND_AUTOLOAD NEURON_RT_LOG_LEVEL NEURON_RT_LOG_LOCATION
TORCH_NEURONX_RETAIN_DEVICE_MODE TORCH_NEURONX_ENABLE_STACK_TRACE TORCH_NEURONX_LOG_LEVEL
TORCH_NEURONX_ENABLED_METRIC_TABLES TORCH_NEURONX_METRICS_DIR
"""


def test_every_known_variable_is_in_the_table():
    assert set(VARIABLES) == set(KNOWN.split())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "7", "removed in runtime 2.34"),
        ("NEURON_RT_VIRTUAL_CORE_SIZE", "2", "NEURON_LOGICAL_NC_CONFIG"),
        ("BUCKET_CAP_MB", "50", "renamed: ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"),
        ("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "50", "DataParallelPlugin"),
        ("XLA_USE_BF16", "1", "mixed_precision='bf16'"),
        ("XLA_DOWNCAST_BF16", "1", "mixed_precision='bf16'"),
        ("NEURON_RT_NUM_CORES", "2", "NEURON_RT_VISIBLE_CORES overrides"),
        ("XLA_HLO_DEBUG", "1", "cache's key"),
    ],
)
def test_what_is_worth_saying(name, value, words):
    (remark,) = review({name: value, "UNRELATED": "1"}, "xla")
    assert (remark.name, remark.value) == (name, value)
    assert words in remark.text
    assert review({name: ""}, "xla") == []


def test_variables_of_the_other_way_are_remarked_upon():
    (remark,) = review({"NEURON_CC_FLAGS": "-O1"}, "native")
    assert "only the XLA path" in remark.text
    (remark,) = review({"TORCH_NEURONX_NEFF_CACHE_DIR": "/x"}, "xla")
    assert "only the native device" in remark.text
    assert review({"NEURON_CC_FLAGS": "-O1", "XLA_USE_BF16": "0"}, "xla") == []


@pytest.mark.parametrize(
    ("value", "ranks", "message"),
    [
        ("", 4, None),
        ("0-3", 4, None),
        ("4-7", 4, None),
        ("0-3", 2, "4 cores are visible to 2 ranks"),
        ("2-5", 4, "cannot begin at core 2"),
    ],
)
def test_visible_cores_are_those_of_the_ranks(value, ranks, message):
    environ = {"NEURON_RT_VISIBLE_CORES": value}
    if message is None:
        check_visible_cores(environ, ranks)
        return
    with pytest.raises(ConfigurationError, match=message):
        check_visible_cores(environ, ranks)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, "/var/tmp/neuron-compile-cache"),
        ({"NEURON_COMPILE_CACHE_URL": "/fsx/cache"}, "/fsx/cache"),
        ({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"}, "s3://bucket/x"),
        ({"NEURON_COMPILE_CACHE_URL": "/fsx", "NEURON_CC_FLAGS": "-O1 --cache_dir=/wins"}, "/wins"),
        ({"NEURON_CC_FLAGS": "--cache_dir s3://bucket/y"}, "s3://bucket/y"),
    ],
)
def test_where_the_cache_is(environ, place):
    assert location_of(environ) == place


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"location": ""}, "empty"),
        ({"location": "s3://"}, "not a valid S3 address"),
        ({"location": "https://somewhere"}, "cannot be at"),
        ({"no_cache": True, "retry_failed_compilation": True}, "contradict"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'"),
    ],
)
def test_a_cache_that_cannot_be(options, words):
    with pytest.raises(ConfigurationError, match=words):
        CompileCache(**options)


@pytest.mark.parametrize(
    ("size", "count"), [("200GB", 200 * 10**9), ("1.5 GiB", 3 * 2**29), ("10k", 10240), (7, 7), ("7", 7), ("0", 0)]
)
def test_sizes(size, count):
    assert parse_size(size, "size") == count
    for wrong in ("200 potatoes", -1):
        with pytest.raises(ConfigurationError, match="not a size"):
            parse_size(wrong, "size")


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("90min", 5_400), (60, 60), ("1w", 604_800)]
)
def test_durations(ttl, seconds):
    assert parse_duration(ttl, "ttl") == seconds


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written") as caught:
        CompileCache(location=str(tmp_path / "file" / "below")).check_writable({})
    assert "NEURON_COMPILE_CACHE_URL" in caught.value.fix
    CompileCache(location=str(tmp_path / "new")).check_writable({})
    assert list((tmp_path / "new").iterdir()) == []
    CompileCache().check_writable({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"})
    CompileCache(no_cache=True).check_writable({"NEURON_COMPILE_CACHE_URL": str(tmp_path / "file")})

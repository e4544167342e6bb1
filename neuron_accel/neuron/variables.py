# SPDX-License-Identifier: Apache-2.0
"""Environment variables of Neuron training: their meaning, valid values, and remarks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An environment variable for the ranks, with the reason. Only a ``binding`` one overrides the environment."""

    name: str
    value: str
    why: str
    binding: bool = False


# ---- The variables: their meaning, default and valid values ----------------------------------------------------------
# Sources: the SDK's pages on PyTorch environment variables and on configuring the runtime, its release notes, and the
# scripts of aws-neuron-samples. An invalid value is an error; a variable without effect, or with a misleading name,
# causes a remark.
Way = Literal["xla", "native", "both"]
Check = Callable[[str], "str | None"]


def _matches(pattern: str, form: str) -> Check:
    return lambda value: None if re.fullmatch(pattern, value) else form


def _one_of(*values: str) -> Check:
    return lambda value: None if value.lower() in values else " or ".join(values)


def _number(low: int = 0, high: int | None = None) -> Check:
    form = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(value: str) -> str | None:
        return None if value.isdecimal() and low <= int(value) <= (high or int(value)) else form

    return check


def _cores(value: str) -> str | None:
    """Checks a list of cores and ranges of cores, which must be ascending and without gaps."""
    form = "ascending cores without gaps, such as 3, 0-3 or 0,1"
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        return form
    cores = visible_cores(value)
    return None if cores and cores == list(range(cores[0], cores[0] + len(cores))) else form


def visible_cores(value: str) -> list[int]:
    """Parses a value of NEURON_RT_VISIBLE_CORES, such as ``0-3`` or ``0,1``."""
    found: list[int] = []
    for part in value.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


_SWITCH, _TRUTH = _one_of("0", "1"), _one_of("0", "1", "true", "false")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable.

    Args:
        meaning: what it does.
        default: the behaviour without it.
        check: returns None for a valid value, else a description of valid values; None: all values are valid.
        path: which path reads it: "xla", "native", or "both".
        remark: a warning for users who set it, or None.
    """

    meaning: str
    default: str
    check: Check | None = None
    path: Way = "both"
    remark: str | None = None


def _xla(meaning: str, default: str, check: Check | None = None, remark: str | None = None) -> Variable:
    return Variable(meaning=meaning, default=default, check=check, path="xla", remark=remark)


def _native(meaning: str, default: str, check: Check | None = None, remark: str | None = None) -> Variable:
    return Variable(meaning=meaning, default=default, check=check, path="native", remark=remark)


def _both(meaning: str, default: str, check: Check | None = None, remark: str | None = None) -> Variable:
    return Variable(meaning=meaning, default=default, check=check, remark=remark)


_BF16 = "deprecated: use mixed_precision='bf16', or a model in bf16 with Zero1Plugin(), which keeps fp32 weights"
_SAMPLE = "known from a sample of 2023 only; current runtimes do not document it"

VARIABLES: Mapping[str, Variable] = {
    # placement of ranks
    "PJRT_DEVICE": _xla("PJRT's client", "NEURON with libneuronxla, else CPU", _matches(r"\w+", "a name")),
    "NEURON_RT_NUM_CORES": _both(
        "cores that a process uses",
        "all",
        _number(),
        "leave it to the launcher, which gives every rank one core; NEURON_RT_VISIBLE_CORES overrides it",
    ),
    "NEURON_RT_VISIBLE_CORES": _both("cores that a process may use", "LOCAL_RANK", _cores),
    "NEURONCORE_NUM_DEVICES": _xla("ranks of xmp.spawn", "1", _number(1), "read by xmp.spawn only, which is not used"),
    "NEURON_RT_ROOT_COMM_ID": _both(
        "address at which ranks meet to form groups",
        "MASTER_ADDR:62182 on the XLA path, a free port on the native device",
        _matches(r".+:\d{1,5}", "address:port"),
    ),
    "NEURON_PJRT_WORLD_SIZE": _xla("number of processes", "WORLD_SIZE", _number(1)),
    "NEURON_PJRT_PROCESSES_NUM_DEVICES": _xla("devices of each process", "1 each", _matches(r"\d+(,\d+)*", "1,1,...")),
    "NEURON_PJRT_PROCESS_INDEX": _xla("this process", "RANK", _number()),
    "NEURON_LOGICAL_NC_CONFIG": _both("physical cores in a logical one (Trn2, Trn3)", "2", _one_of("1", "2")),
    "NEURON_RT_VIRTUAL_CORE_SIZE": _both(
        "physical cores in a logical one",
        "that of NEURON_LOGICAL_NC_CONFIG",
        _one_of("1", "2"),
        "the older name of NEURON_LOGICAL_NC_CONFIG",
    ),
    # compilation
    "NEURON_CC_FLAGS": _xla("options of the compiler and of the compile cache", "none"),
    "NEURON_COMPILE_CACHE_URL": _xla("the compile cache", "/var/tmp/neuron-compile-cache"),
    "NEURON_EXTRACT_GRAPHS_ONLY": _xla("collect graphs without executing them; results are zeros", "off", _TRUTH),
    "NEURON_PARALLEL_COMPILE_MAX_RETRIES": _xla("further attempts at a graph that fails to compile", "0", _number()),
    "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": _xla("write the results of compiling as JSON", "0", _TRUTH),
    "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE": _xla("compile the graphs of a script that failed", "0", _TRUTH),
    "NEURON_NUM_RECENT_MODELS_TO_KEEP": _xla("graphs that a process keeps loaded", "all", _number(1)),
    "NEURON_FUSE_SOFTMAX": _xla("softmax as one operation", "off", _SWITCH),
    "NEURON_CUSTOM_SILU": _xla("SiLU as one operation", "off", _SWITCH),
    "NEURON_TRANSFER_WITH_STATIC_RING_OPS": _xla("modules whose parameters use static rings", "none since SDK 2.21"),
    # numbers
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": _both("round fp32 to smaller dtypes stochastically", "off", _TRUTH),
    "NEURON_RT_STOCHASTIC_ROUNDING_SEED": _both("seed of stochastic rounding", "0", _number()),
    "XLA_USE_BF16": _xla("torch.float is bf16 on the device", "off", _TRUTH, _BF16),
    "XLA_DOWNCAST_BF16": _xla("torch.float is bf16 and torch.double fp32 on the device", "off", _TRUTH, _BF16),
    "XLA_DISABLE_FUNCTIONALIZATION": _xla("no functionalization", "1 on Neuron", _SWITCH),
    # collectives
    "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": _xla(
        "buckets of xm.reduce_gradients", "50", _number(), "not read here: DataParallelPlugin(bucket_cap_mb=...)"
    ),
    "BUCKET_CAP_MB": _xla(
        "buckets of xm.reduce_gradients", "50", _number(), "renamed: ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"
    ),
    "ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB": _xla(
        "buckets of ZeRO-1 in neuronx-distributed",
        "130",
        _number(),
        "read by neuronx-distributed only: Zero1Plugin(bucket_cap_mb=...)",
    ),
    "XLA_USE_DUMMY_STORE": _xla("no TCP store, for very many ranks", "off", _SWITCH),
    "TORCH_DIST_INIT_BARRIER": _both("wait for all ranks when groups are made", "1", _SWITCH),
    "NEURON_RT_EXEC_TIMEOUT": _both("seconds that an execution may take", "30 or 600, by version", _number(1)),
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": _both(
        "concurrent executions", "0", _number(0, 63), "removed in runtime 2.34 (SDK 2.32)"
    ),
    "NEURON_RT_HIERARCHICAL_CC": _both("hierarchical collectives", "chosen by the runtime", _SWITCH, _SAMPLE),
    "DISABLE_NUMERIC_CC_TOKEN": _xla("no numeric token between collectives", "off", _SWITCH, _SAMPLE),
    "NEURON_ENABLE_NOSEED_DROPOUT": _xla("dropout without a seed tensor", "off", _SWITCH, _SAMPLE),
    "NEURON_RT_ONE_TMPBUF_PAGE_SIZE_MB": _both("page of temporary buffers, MiB", "chosen", _number(1), _SAMPLE),
    "NEURON_RT_ALLOW_LEGACY_NEFF": _both("run programs compiled for an older architecture", "false", _TRUTH),
    "NEURON_RT_ONE_THREAD_PER_CORE": _both("one network thread for each core", "off", _SWITCH),
    "NEURON_RT_RANKS_PER_NETWORK_PROXY": _both("ranks that share a network thread", "chosen", _number(1)),
    "NEURON_RT_ENABLE_HOST_CC": _native("collectives through the host", "off", _TRUTH),
    "FI_PROVIDER": _both("libfabric's provider; efa between instances", "none", _matches(r"\w+", "a name")),
    "FI_EFA_USE_DEVICE_RDMA": _both("RDMA to device memory, needed between instances", "off", _SWITCH),
    "FI_EFA_FORK_SAFE": _both("make fork safe on kernels before 5.15", "off", _SWITCH),
    "CCOM_SOCKET_IFNAME": _both(
        "network interface of the rendezvous, in containers", "detected", _matches(r"\S+", "a name")
    ),
    # debugging
    "XLA_ENABLE_PARAM_ALIASING": _xla("updates in place", "1", _SWITCH),
    "XLA_IR_DEBUG": _xla("record the source of operations", "off", _SWITCH, "slows tracing down"),
    "XLA_HLO_DEBUG": _xla("record the source of operations in the graph", "off", _SWITCH, "part of the cache's key"),
    "NEURON_FRAMEWORK_DEBUG": _both("keep the input of the compiler", "off", _SWITCH),
    # the host
    "MALLOC_ARENA_MAX": _both("glibc's arenas, which cost host memory", "8 for each core", _number(1)),
    # the native device
    "TORCH_NEURONX_NEFF_CACHE_DIR": _native("compiled programs, shared", "/tmp/neff_cache"),
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": _native("compiled programs, of this machine", "/tmp/local_cache"),
    "TORCH_NEURONX_NEFF_DISABLE_CACHE": _native("keep no compiled programs", "off", _TRUTH),
    "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": _native(
        "seconds to wait for another process to compile", "1200", _number(1)
    ),
    "NEURON_LAUNCH_BLOCKING": _native("wait for every operation", "0", _SWITCH, "for debugging: it is slow"),
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": _native("fall back to the host only if needed", "1", _SWITCH),
    "TORCH_NEURONX_MLIR_ATEN_OPS": _native("operations through MLIR", "1", _SWITCH),
    "TORCH_NEURONX_ENABLE_ASYNC_NRT": _native("asynchronous execution", "1", _SWITCH),
    "TORCH_NEURONX_DEBUG_DIR": _native("folder of debugging output", "/tmp/neuron_backend"),
    "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS": _native("keep files of the compilation", "0", _SWITCH),
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": _native("no operations on the host", "true since SDK 2.33", _TRUTH),
    "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": _native("torch.compile copies nothing from the host", "0", _SWITCH),
    "NEURON_USE_SPLIT_ALLGATHER": _native("split large all-gathers", "1", _SWITCH),
    "NEURON_USE_SPLIT_REDUCE_SCATTER": _native("split large reduce-scatters", "1", _SWITCH),
    "COLLECTIVE_BUCKETSIZE_IN_MB": _native("size at which collectives are split, MiB", "512", _number(1)),
    "COLLECTIVE_MIN_BUCKETS": _native("least number of buckets", "0", _number()),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": _native(
        "`import torch` registers the device", "1", _SWITCH, "with 0 the native device is not found"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A remark on a variable that is set."""

    name: str
    value: str
    text: str


def review(environ: Mapping[str, str], path: Way = "both") -> list[Remark]:
    """Checks the variables that are set.

    Args:
        environ: environment variables.
        path: the path of the run, "xla" or "native"; a variable that only the other one reads causes a remark.

    Returns:
        the remarks.

    Raises:
        ConfigurationError: if a value is not valid.
    """
    remarks = []
    for name, variable in VARIABLES.items():
        value = environ.get(name, "").strip()
        if not value:
            continue
        form = variable.check(value) if variable.check else None
        if form:
            raise ConfigurationError(
                f"{name}={value} is not valid.",
                where=f"environment variable {name}: {variable.meaning}",
                fix=f"set it to {form}, or unset it ({variable.default})",
            )
        if path not in ("both", variable.path) and variable.path != "both":
            other = "native device" if variable.path == "native" else "XLA path"
            remarks.append(Remark(name=name, value=value, text=f"no effect: only the {other} reads it"))
        elif variable.remark and value.lower() not in ("0", "false"):
            remarks.append(Remark(name=name, value=value, text=variable.remark))
    return remarks

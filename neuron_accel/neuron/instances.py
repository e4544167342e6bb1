# SPDX-License-Identifier: Apache-2.0
"""Trainium instances: cores, memory, bandwidth, and the groups of ranks that the hardware can form.

The rows are in ``facts.json``. Groups are from the release notes of the runtime and its training guides of 2023 to
2025 (numbers of workers), from neuron-runtime/about/collectives (the torus of NeuronLinks; chips are numbered row by
row), and from error messages of the runtime ("Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"; for
Trn2 "1, 2, 4, 8, 16 or a multiple of 32").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel.backends.select import hardware_root
from neuron_accel.engine.plan.hardware import Hardware
from neuron_accel.errors import ConfigurationError, did_you_mean
from neuron_accel.neuron.facts import FACTS

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""The file with the product name (DMI), which is the instance type on EC2 (Nitro)."""

OLDEST_RUNTIME: tuple[int, int] = tuple(FACTS["releases"][0]["runtime"])
"""The runtime of the last SDK with torch-neuronx for XLA; newer ones have wider limits."""


def most_partitions(runtime: tuple[int, int] = OLDEST_RUNTIME) -> int:
    """Largest number of distinct partitions of the ranks into replica groups in one graph, by version of the runtime
    (NEC_MAX_COMM_N)."""
    return max(row["most"] for row in FACTS["partitions"] if tuple(row["runtime"]) <= runtime)


def _release(torch: str) -> tuple[int, ...]:
    return tuple(map(int, torch.split(".")[:2]))


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An instance type. An UltraServer, whose hosts are connected by NeuronLink, is one instance.

    Args:
        name: its EC2 instance type.
        family: the compiler's name of the target: trn1, trn1n, trn2, trn3.
        chips: number of Trainium chips.
        physical_cores: number of physical NeuronCores.
        lnc: possible numbers of physical cores in a logical core, which one rank uses.
        hbm_gib: device memory of the full instance, GiB.
        bf16_tflops: dense BF16 of the full instance, TFLOPS, according to its product page.
        core_tflops: dense BF16 of the tensor engine of one physical core, TFLOPS: the base of model FLOPs utilization.
            From the SDK's pages neuron-core-v2 (90), -v3 and -v4 (79), as in pytorch/torchtitan#2382 by AWS. It is less
            than the product page's figure per core (95 and 83), which includes the other engines.
        hbm_gb_per_s: bandwidth of the device memory of one chip, GB/s (GiB/s on Trn1).
        link_gb_per_s: NeuronLink bandwidth of one chip within the instance, GB/s (GiB/s on Trn3); None if it has one
            chip.
        efa_gbps: network bandwidth to other instances, Gbit/s; None if no figure is published.
        efa_interfaces: number of EFA network interfaces; None if no number is published.
        multi_node: whether groups may span several instances.
        vcpus: host processors; None if no figure is published.
        host_gib: host memory, GiB; None if no figure is published.
        workers: possible numbers of ranks on one instance, by ``lnc``.
        model_groups: possible sizes of tensor-parallel groups within one instance, by ``lnc``.
        hosts: number of machines that the instance consists of.
        torus: number of chips along each dim of the NeuronLink torus; empty if a switch connects the chips, or there is
            one chip.
    """

    name: str
    family: str
    chips: int
    physical_cores: int
    lnc: tuple[int, ...]
    hbm_gib: int
    bf16_tflops: int
    core_tflops: int
    hbm_gb_per_s: int
    link_gb_per_s: int | None
    efa_gbps: int | None
    efa_interfaces: int | None
    multi_node: bool
    vcpus: int | None
    host_gib: int | None
    workers: dict[int, tuple[int, ...]] = field(hash=False)
    model_groups: dict[int, tuple[int, ...]] = field(hash=False)
    hosts: int = 1
    torus: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.name}, {self.chips} chips with {self.physical_cores} physical cores>"

    def cores(self, lnc: int | None = None) -> int:
        """Number of logical cores, which is the largest number of ranks."""
        return self.physical_cores // self.logical(lnc)

    def peak_tflops(self, lnc: int | None = None) -> int:
        """Dense BF16 of one logical core, TFLOPS: the denominator of model FLOPs utilization."""
        return self.core_tflops * self.logical(lnc)

    def logical(self, lnc: int | None = None) -> int:
        """The number of physical cores in a logical core: ``lnc``, or the default of the runtime.

        Raises:
            ConfigurationError: if the instance does not support it.
        """
        if lnc is None:
            return max(self.lnc)
        if lnc not in self.lnc:
            known = " or ".join(map(str, self.lnc))
            raise ConfigurationError(
                f"A logical core of {lnc} physical cores does not exist on {self.name}.",
                where="NEURON_LOGICAL_NC_CONFIG (--lnc)",
                why="Trn1 has no logical cores" if self.lnc == (1,) else "logical cores have one or two physical ones",
                fix=f"pass {known}, or leave it out",
            )
        return lnc

    def runtime(self, torch: str) -> tuple[int, int]:
        """Version of the Neuron runtime with which the version ``torch`` of PyTorch trains on this instance; where none
        is released, the oldest."""
        released = self._released(torch)
        return tuple(released[-1]["runtime"]) if released else OLDEST_RUNTIME

    def native(self, torch: str) -> bool:
        """Whether the version ``torch`` of PyTorch trains on this instance through the native device."""
        released = self._released(torch)
        return bool(released) and released[-1]["path"] == "native"

    def _released(self, torch: str) -> list[Mapping[str, Any]]:
        given = _release(torch)
        return [row for row in FACTS["releases"] if self.family in row["families"] and _release(row["torch"]) <= given]

    def hardware(self, lnc: int | None = None, runtime: tuple[int, int] = OLDEST_RUNTIME) -> Hardware:
        """The limits that the planner checks, with ``runtime`` as the version of the Neuron runtime."""
        degree = self.logical(lnc)
        suffix = f" with logical cores of {degree}" if len(self.lnc) > 1 else ""
        return Hardware(
            name=f"{self.name}{suffix}",
            ranks_per_host=self.workers[degree],
            model_groups=self.model_groups[degree],
            several_hosts=self.multi_node,
            partitions=most_partitions(runtime),
            torus=self.torus,
            ranks_per_chip=max(1, self.cores(degree) // self.chips),
            core_bytes=self.core_bytes(degree),
            peak_flops=self.peak_tflops(degree) * 1e12,
        )

    def core_bytes(self, lnc: int | None = None) -> int:
        """Device memory of one logical core, in bytes."""
        return (self.hbm_gib << 30) // self.cores(lnc)


# Sizes are those of the runtime's rule. Groups are contiguous, as the mesh arranges ranks; neuronx-distributed orders
# 32 of 64 ranks, and 64 of 128, otherwise (rows 0 and 3 of the torus, and 1 and 2). 8 of 64 logical cores is possible
# since runtime 2.24 (SDK 2.22, April 2025); every release for torch 2.9 and for the native device is newer. No groups
# are published for Trn3, nor across the hosts of an UltraServer, so that those of one Trn2 host apply.
def _instance(row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> Instance:
    """The instance of a row: what it leaves out is that of the row which it names as ``like``."""
    values = {**rows.get(row.get("like", ""), {}), **row}
    kwargs = {each.name: values[each.name] for each in dataclasses.fields(Instance) if each.name in values}
    for name in ("workers", "model_groups"):
        kwargs[name] = {int(lnc): tuple(sizes) for lnc, sizes in kwargs[name].items()}
    if kwargs.get("hosts", 1) > 1:  # and the multiples of 32 up to all logical cores
        for lnc, sizes in kwargs["workers"].items():
            kwargs["workers"][lnc] = (*sizes, *range(32, kwargs["physical_cores"] // lnc + 1, 32))
    return Instance(**{**kwargs, "lnc": tuple(kwargs["lnc"]), "torus": tuple(kwargs.get("torus", ()))})


_ROWS: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in FACTS["instances"]}
INSTANCES = {name: _instance(row, _ROWS) for name, row in _ROWS.items()}
"""Instances by name. Trn3 is sold as UltraServers, whose hosts have product names of their own."""


def _known(name: str) -> Instance | None:
    """The instance of this name, which may have SageMaker's ``ml.`` before it, or be that of a variant: trn2p.48xlarge,
    trn3sn.48xlarge, trn3pd98.3xlarge (v3_platform_map and v4_platform_map of aws-neuron-driver), which differ from the
    row in how hosts are connected."""
    name = name.removeprefix("ml.")
    family, _, size = name.partition(".")
    rows = (like for like, row in _ROWS.items() if row.get("variants") and like.partition(".")[2] == size)
    return INSTANCES.get(name) or INSTANCES.get(next((like for like in rows if family.startswith(like[:4])), ""))


def find_instance(name: str, where: str = "instance type") -> Instance:
    """Returns the instance of this name.

    Args:
        name: the instance type.
        where: where the name is from, for the error message.

    Raises:
        ConfigurationError: if it is not known.
    """
    found = _known(name)
    if found is None:
        raise ConfigurationError(
            f"{name!r} is not a known Trainium instance.",
            where=where,
            why="the instance determines which groups of ranks are possible, and settings of the runtime",
            fix=did_you_mean(name, INSTANCES, cutoff=0.75),
        )
    return found


def detect_instance(product_name: Path | None = None) -> Instance | None:
    """Returns the instance that this machine is, or of which it is a variant; None if it is not known."""
    return _known(read_product(product_name) or "")


def read_product(product_name: Path | None = None) -> str | None:
    """Returns the product name of this machine; None if it has none.

    Args:
        product_name: the file with the name; None: :data:`PRODUCT_NAME` below the hardware root.
    """
    product_name = product_name or hardware_root() / PRODUCT_NAME.relative_to("/")
    try:
        return product_name.read_text(errors="replace").strip() or None
    except OSError:
        return None

# SPDX-License-Identifier: Apache-2.0
"""Trainium instances as data: cores, memory, bandwidth, and the groups of ranks that the hardware can form.

Sources: the Neuron SDK documentation, about-neuron/arch/neuron-hardware (cores, memory, bandwidth), the release notes
of its runtime and its training guides of 2023 to 2025 (numbers of workers), neuron-runtime/about/collectives
(the torus of NeuronLinks; chips are numbered row by row), the error messages of the runtime
("Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"; for Trn2 "1, 2, 4, 8, 16 or a multiple of 32"),
and the public source of the driver, aws-neuron-driver, for the product names of machines. Where two of these sources
disagree, the smaller set of possibilities is used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from neuron_accel.backends.select import hardware_root
from neuron_accel.engine.plan.hardware import Hardware
from neuron_accel.errors import ConfigurationError, did_you_mean

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""The file with the product name (DMI), which is the instance type on EC2 (Nitro)."""

DEFAULT_LNC = 2
"""Default number of physical cores in a logical core, on instances that support several (NEURON_LOGICAL_NC_CONFIG)."""

MAX_PARTITIONS = 12
"""Largest number of distinct partitions of the ranks into replica groups in one graph (NEC_MAX_COMM_N of the runtime;
16 since runtime 2.34, which does not support training on the XLA path)."""


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

    def hardware(self, lnc: int | None = None) -> Hardware:
        """The limits that the planner checks."""
        degree = self.logical(lnc)
        suffix = f" with logical cores of {degree}" if len(self.lnc) > 1 else ""
        return Hardware(
            name=f"{self.name}{suffix}",
            ranks_per_host=self.workers[degree],
            model_groups=self.model_groups[degree],
            several_hosts=self.multi_node,
            partitions=MAX_PARTITIONS,
            torus=self.torus,
            ranks_per_chip=max(1, self.cores(degree) // self.chips),
            core_bytes=self.core_bytes(degree),
            peak_flops=self.peak_tflops(degree) * 1e12,
        )

    def core_bytes(self, lnc: int | None = None) -> int:
        """Device memory of one logical core, in bytes."""
        return (self.hbm_gib << 30) // self.cores(lnc)


# Contiguous groups only, as the mesh arranges ranks. 32 of 64 ranks, and 64 of 128, would need another order of ranks
# (neuronx_distributed/parallel_layers/parallel_state.py). 8 of 64 logical cores is possible since runtime 2.24 (SDK
# 2.22, April 2025), which added 8 groups of 8; every release for torch 2.9 and for the native device is newer.
_TRN2_WORKERS: dict[int, tuple[int, ...]] = {1: (1, 2, 4, 8, 16, 32, 64, 128), 2: (1, 2, 4, 8, 16, 32, 64)}
_TRN2_GROUPS: dict[int, tuple[int, ...]] = {1: (2, 4, 8, 32, 128), 2: (2, 4, 8, 16, 64)}

_TRN1 = Instance(
    name="trn1.32xlarge",
    family="trn1",
    chips=16,
    physical_cores=32,
    lnc=(1,),
    hbm_gib=512,
    bf16_tflops=3_040,
    core_tflops=90,
    hbm_gb_per_s=820,
    link_gb_per_s=384,
    efa_gbps=800,
    efa_interfaces=8,
    multi_node=True,
    vcpus=128,
    host_gib=512,
    workers={1: (1, 2, 8, 32)},
    model_groups={1: (2, 4, 8, 32)},
    torus=(4, 4),
)
_TRN2 = Instance(
    name="trn2.48xlarge",
    family="trn2",
    chips=16,
    physical_cores=128,
    lnc=(1, 2),
    hbm_gib=1_536,
    bf16_tflops=10_700,
    core_tflops=79,
    hbm_gb_per_s=2_900,
    link_gb_per_s=1_024,
    efa_gbps=3_200,
    efa_interfaces=16,
    multi_node=True,
    vcpus=192,
    host_gib=2_048,
    workers=_TRN2_WORKERS,
    model_groups=_TRN2_GROUPS,
    torus=(4, 4),
)
# A host of a Gen1 UltraServer. No groups are published for Trn3, nor across the hosts of an UltraServer, so that those
# of one Trn2 host apply.
_TRN3 = Instance(
    name="trn3.48xlarge",
    family="trn3",
    chips=16,
    physical_cores=128,
    lnc=(1, 2),
    hbm_gib=2_304,
    bf16_tflops=10_736,
    core_tflops=79,
    hbm_gb_per_s=4_900,
    link_gb_per_s=2_048,
    efa_gbps=3_200,
    efa_interfaces=None,
    multi_node=True,
    vcpus=192,
    host_gib=2_048,
    workers=_TRN2_WORKERS,
    model_groups=_TRN2_GROUPS,
)


def _ultraserver_workers(physical_cores: int) -> dict[int, tuple[int, ...]]:
    """1, 2, 4, 8, 16 and the multiples of 32 up to all logical cores, by ``lnc``."""
    return {lnc: (1, 2, 4, 8, 16, *range(32, physical_cores // lnc + 1, 32)) for lnc in (1, 2)}


def _ultraserver(name: str, host: Instance, hosts: int, *, efa_gbps: int, torus: tuple[int, ...] = ()) -> Instance:
    """An UltraServer of ``hosts`` equal hosts: cores, memory and processors of all of them."""
    return dataclasses.replace(
        host,
        name=name,
        chips=hosts * host.chips,
        physical_cores=hosts * host.physical_cores,
        hbm_gib=hosts * host.hbm_gib,
        bf16_tflops=hosts * host.bf16_tflops,
        efa_gbps=efa_gbps,
        efa_interfaces=None,
        vcpus=hosts * (host.vcpus or 0),
        host_gib=hosts * (host.host_gib or 0),
        workers=_ultraserver_workers(hosts * host.physical_cores),
        hosts=hosts,
        torus=torus,
    )


INSTANCES = {
    instance.name: instance
    for instance in (
        dataclasses.replace(
            _TRN1,
            name="trn1.2xlarge",
            chips=1,
            physical_cores=2,
            hbm_gib=32,
            bf16_tflops=190,
            link_gb_per_s=None,
            efa_gbps=25,
            efa_interfaces=None,
            multi_node=False,
            vcpus=8,
            host_gib=32,
            workers={1: (1, 2)},
            model_groups={1: (2,)},
            torus=(),
        ),
        _TRN1,
        dataclasses.replace(
            _TRN1, name="trn1n.32xlarge", family="trn1n", link_gb_per_s=768, efa_gbps=1_600, efa_interfaces=16
        ),
        dataclasses.replace(
            _TRN2,
            name="trn2.3xlarge",
            chips=1,
            physical_cores=8,
            hbm_gib=96,
            bf16_tflops=667,
            link_gb_per_s=None,
            efa_gbps=None,
            efa_interfaces=1,
            vcpus=None,
            host_gib=None,
            workers={1: (1, 2, 4, 8), 2: (1, 2, 4)},
            model_groups={1: (2, 4, 8), 2: (2, 4)},
            torus=(),
        ),
        _TRN2,
        dataclasses.replace(_TRN2, name="trn2u.48xlarge"),
        _ultraserver("trn2u-ultraserver", _TRN2, 4, efa_gbps=3_200, torus=(4, 4, 4)),
        _TRN3,
        _ultraserver("trn3-gen1-ultraserver", _TRN3, 4, efa_gbps=12_800),
        dataclasses.replace(  # hosts of 4 chips
            _TRN3,
            name="trn3-gen2-ultraserver",
            chips=144,
            physical_cores=1_152,
            hbm_gib=20_736,
            bf16_tflops=96_624,
            efa_gbps=28_800,
            vcpus=2_304,
            host_gib=27_648,
            workers=_ultraserver_workers(1_152),
            hosts=36,
        ),
    )
}
"""Instances by name. Trn3 is sold as UltraServers, whose hosts have product names of their own."""

_WITH_VARIANTS = ("trn2.48xlarge", "trn3.48xlarge")
"""Hosts of 16 chips, for which variants exist: trn2p.48xlarge, trn2eu.48xlarge, trn3s.48xlarge, trn3sn.48xlarge and
trn3p.48xlarge (v3_platform_map and v4_platform_map of aws-neuron-driver), which differ in how hosts are connected."""


def find_instance(name: str, where: str = "instance type") -> Instance:
    """Returns the instance of this name.

    Args:
        name: the instance type.
        where: where the name is from, for the error message.

    Raises:
        ConfigurationError: if it is not known.
    """
    if name not in INSTANCES:
        raise ConfigurationError(
            f"{name!r} is not a known Trainium instance.",
            where=where,
            why="the instance determines which groups of ranks are possible, and settings of the runtime",
            fix=did_you_mean(name, INSTANCES, cutoff=0.75),
        )
    return INSTANCES[name]


def detect_instance(product_name: Path | None = None) -> Instance | None:
    """Returns the instance that this machine is, or of which it is a variant; None if it is not known."""
    name = read_product(product_name) or ""
    family, _, size = name.partition(".")
    alike = (like for like in _WITH_VARIANTS if family.startswith(like[:4]) and size == like.partition(".")[2])
    return INSTANCES.get(name) or INSTANCES.get(next(alike, ""))


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

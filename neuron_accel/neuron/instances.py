"""Trainium instances as data: cores, memory, bandwidth, and the groups of ranks that the hardware can form.

Sources: the Neuron SDK documentation, about-neuron/arch/neuron-hardware (cores, memory, bandwidth), the release notes
of its runtime and its training guides of 2023 to 2025 (numbers of workers), neuron-runtime/about/collectives
(the torus of NeuronLinks; chips are numbered row by row), the text of the runtime's own refusals
("Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"; for Trn2 "1, 2, 4, 8, 16 or a multiple of 32"),
and the public source of the driver, aws-neuron-driver, for the names that machines of one kind have. Where two of these
disagree, the narrower answer is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from neuron_accel.backends.select import hardware_root
from neuron_accel.engine.plan.hardware import Hardware
from neuron_accel.errors import ConfigurationError, did_you_mean

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""Where instances of EC2 (Nitro) say what they are."""

DEFAULT_LNC = 2
"""Physical cores in a logical one where an instance has the choice (NEURON_LOGICAL_NC_CONFIG)."""

MOST_PARTITIONS = 12
"""Distinct replica groups in one compiled graph (NEC_MAX_COMM_N of the runtime; 16 since 2.34, which runs no XLA
training)."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One type of instance. An UltraServer of several hosts that share NeuronLink counts as one.

    Args:
        name: as EC2 calls it.
        family: what the compiler calls its target: trn1, trn1n, trn2, trn3.
        chips: Trainium chips.
        physical_cores: NeuronCores, whatever their logical configuration.
        lnc: the logical configurations it knows: how many physical cores one rank may drive. ``(1,)``: no choice.
        hbm_gib: device memory of the full instance, GiB.
        bf16_tflops: dense BF16 of the full instance, TFLOPS, as its product page says.
        core_tflops: dense BF16 of the tensor engine of one physical core, TFLOPS: the base of model FLOPs utilization.
            From the SDK's pages neuron-core-v2 (90), -v3 and -v4 (79), as in pytorch/torchtitan#2382 by AWS. It is less
            than the product page's figure by core (95 and 83), which counts the other engines, too.
        hbm_gb_per_s: bandwidth of the device memory of one chip, GB/s (GiB/s on Trn1).
        link_gb_per_s: NeuronLink bandwidth of one chip within the instance, GB/s (GiB/s on Trn3); None where there is
            one chip.
        efa_gbps: network bandwidth for ranks on other instances, Gbit/s; None where no figure is published.
        efa_interfaces: EFA network interfaces; None where the documentation names none.
        multi_node: whether ranks of several of these may form groups.
        vcpus: host processors; None where no figure is published.
        host_gib: host memory, GiB; likewise.
        workers: numbers of ranks that may run on one, by ``lnc``.
        model_groups: sizes of tensor-parallel groups within one, by ``lnc``.
        hosts: machines that one of these consists of.
        torus: chips along each dim of the torus of NeuronLinks; empty where a switch links all, or there is one chip.
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

    def cores(self, lnc: int | None = None) -> int:
        """Logical cores, which is the most ranks there can be."""
        return self.physical_cores // self.logical(lnc)

    def peak_tflops(self, lnc: int | None = None) -> int:
        """Dense BF16 of one rank, TFLOPS: the denominator of model FLOPs utilization."""
        return self.core_tflops * self.logical(lnc)

    def logical(self, lnc: int | None = None) -> int:
        """The logical configuration: ``lnc``, or what the runtime takes by default.

        Raises:
            ConfigurationError: if the instance does not know it.
        """
        if lnc is None:
            return max(self.lnc)
        if lnc not in self.lnc:
            known = " or ".join(map(str, self.lnc))
            raise ConfigurationError(
                f"A logical core of {lnc} physical cores does not exist on {self.name}.",
                where="NEURON_LOGICAL_NC_CONFIG (--lnc)",
                why="Trn1 has no logical cores" if self.lnc == (1,) else "logical cores have one or two physical ones",
                fix=f"give {known}, or leave it out",
            )
        return lnc

    def hardware(self, lnc: int | None = None) -> Hardware:
        """What a planner needs to know of it."""
        degree = self.logical(lnc)
        suffix = f" with logical cores of {degree}" if len(self.lnc) > 1 else ""
        return Hardware(
            name=f"{self.name}{suffix}",
            ranks_per_host=self.workers[degree],
            model_groups=self.model_groups[degree],
            several_hosts=self.multi_node,
            partitions=MOST_PARTITIONS,
            torus=self.torus,
            ranks_per_chip=max(1, self.cores(degree) // self.chips),
        )

    def core_bytes(self, lnc: int | None = None) -> int:
        """Device memory of one logical core."""
        return (self.hbm_gib << 30) // self.cores(lnc)


_TRN1_WORKERS, _TRN1_GROUPS = (1, 2, 8, 32), (2, 4, 8, 32)
# Contiguous groups only, as the mesh lays them out. 32 of 64, and 64 of 128, would need ranks in another order
# (neuronx_distributed/parallel_layers/parallel_state.py). 8 of 64 logical cores is possible since runtime 2.24 (SDK
# 2.22, April 2025), which added 8 groups of 8; every release that torch 2.9 and the native device need is newer.
_TRN2_WORKERS: dict[int, tuple[int, ...]] = {1: (1, 2, 4, 8, 16, 32, 64, 128), 2: (1, 2, 4, 8, 16, 32, 64)}
_TRN2_GROUPS: dict[int, tuple[int, ...]] = {1: (2, 4, 8, 32, 128), 2: (2, 4, 8, 16, 64)}
# Nothing is published on groups across the hosts of an UltraServer, nor on those of Trn3: those of one Trn2 host.
_TRN3_WORKERS = _TRN2_WORKERS
_TRN3_GROUPS = _TRN2_GROUPS


def _multiples(step: int, most: int) -> tuple[int, ...]:
    return tuple(range(step, most + 1, step))


INSTANCES = {
    instance.name: instance
    for instance in (
        Instance(
            name="trn1.2xlarge",
            family="trn1",
            chips=1,
            physical_cores=2,
            lnc=(1,),
            hbm_gib=32,
            bf16_tflops=190,
            core_tflops=90,
            hbm_gb_per_s=820,
            link_gb_per_s=None,
            efa_gbps=25,
            efa_interfaces=None,
            multi_node=False,
            vcpus=8,
            host_gib=32,
            workers={1: (1, 2)},
            model_groups={1: (2,)},
        ),
        Instance(
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
            workers={1: _TRN1_WORKERS},
            model_groups={1: _TRN1_GROUPS},
            torus=(4, 4),
        ),
        Instance(
            name="trn1n.32xlarge",
            family="trn1n",
            chips=16,
            physical_cores=32,
            lnc=(1,),
            hbm_gib=512,
            bf16_tflops=3_040,
            core_tflops=90,
            hbm_gb_per_s=820,
            link_gb_per_s=768,
            efa_gbps=1_600,
            efa_interfaces=16,
            multi_node=True,
            vcpus=128,
            host_gib=512,
            workers={1: _TRN1_WORKERS},
            model_groups={1: _TRN1_GROUPS},
            torus=(4, 4),
        ),
        Instance(
            name="trn2.3xlarge",
            family="trn2",
            chips=1,
            physical_cores=8,
            lnc=(1, 2),
            hbm_gib=96,
            bf16_tflops=667,
            core_tflops=79,
            hbm_gb_per_s=2_900,
            link_gb_per_s=None,
            efa_gbps=None,
            efa_interfaces=1,
            multi_node=True,
            vcpus=None,
            host_gib=None,
            workers={1: (1, 2, 4, 8), 2: (1, 2, 4)},
            model_groups={1: (2, 4, 8), 2: (2, 4)},
        ),
        Instance(
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
        ),
        Instance(
            name="trn2u.48xlarge",
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
        ),
        Instance(
            name="trn2u-ultraserver",
            family="trn2",
            chips=64,
            physical_cores=512,
            lnc=(1, 2),
            hbm_gib=6_144,
            bf16_tflops=42_800,
            core_tflops=79,
            hbm_gb_per_s=2_900,
            link_gb_per_s=1_024,
            efa_gbps=3_200,
            efa_interfaces=None,
            multi_node=True,
            vcpus=768,
            host_gib=8_192,
            workers={1: (1, 2, 4, 8, 16, *_multiples(32, 512)), 2: (1, 2, 4, 8, 16, *_multiples(32, 256))},
            model_groups=_TRN2_GROUPS,
            hosts=4,
            torus=(4, 4, 4),
        ),
        Instance(  # a host of a Gen1 UltraServer: a quarter of it
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
            workers=_TRN3_WORKERS,
            model_groups=_TRN3_GROUPS,
        ),
        Instance(
            name="trn3-gen1-ultraserver",
            family="trn3",
            chips=64,
            physical_cores=512,
            lnc=(1, 2),
            hbm_gib=9_216,
            bf16_tflops=42_944,
            core_tflops=79,
            hbm_gb_per_s=4_900,
            link_gb_per_s=2_048,
            efa_gbps=12_800,
            efa_interfaces=None,
            multi_node=True,
            vcpus=768,
            host_gib=8_192,
            workers={1: (1, 2, 4, 8, 16, *_multiples(32, 512)), 2: (1, 2, 4, 8, 16, *_multiples(32, 256))},
            model_groups=_TRN3_GROUPS,
            hosts=4,
        ),
        Instance(
            name="trn3-gen2-ultraserver",
            family="trn3",
            chips=144,
            physical_cores=1_152,
            lnc=(1, 2),
            hbm_gib=20_736,
            bf16_tflops=96_624,
            core_tflops=79,
            hbm_gb_per_s=4_900,
            link_gb_per_s=2_048,
            efa_gbps=28_800,
            efa_interfaces=None,
            multi_node=True,
            vcpus=2_304,
            host_gib=27_648,
            workers={1: (1, 2, 4, 8, 16, *_multiples(32, 1_152)), 2: (1, 2, 4, 8, 16, *_multiples(32, 576))},
            model_groups=_TRN3_GROUPS,
            hosts=36,
        ),
    )
}
"""By name. Trn3 is sold as UltraServers, whose hosts say what they are by names of their own."""

_LIKE = ("trn2.48xlarge", "trn3.48xlarge")
"""Hosts of 16 chips. The driver knows further ones of their families and this size, as trn2p.48xlarge, trn2eu.48xlarge,
trn3s.48xlarge, trn3sn.48xlarge and trn3p.48xlarge (v3_platform_map and v4_platform_map of aws-neuron-driver), which
differ in how hosts are connected."""


def find_instance(name: str, where: str = "instance type") -> Instance:
    """The instance of that name.

    Raises:
        ConfigurationError: if there is none.
    """
    if name not in INSTANCES:
        raise ConfigurationError(
            f"{name!r} is not a known Trainium instance.",
            where=where,
            why="what it can do decides which groups of ranks are possible and what is set for them",
            fix=did_you_mean(name, INSTANCES, cutoff=0.75),
        )
    return INSTANCES[name]


def detect_instance(product_name: Path | None = None) -> Instance | None:
    """The instance that this is, or of which it is a variant, if the table knows it."""
    name = read_product(product_name) or ""
    family, _, size = name.partition(".")
    alike = (like for like in _LIKE if family.startswith(like[:4]) and size == like.partition(".")[2])
    return INSTANCES.get(name) or INSTANCES.get(next(alike, ""))


def read_product(product_name: Path | None = None) -> str | None:
    """What this machine says it is; None where it does not say it.

    Args:
        product_name: the file that says so; None for the hardware's.
    """
    product_name = product_name or hardware_root() / PRODUCT_NAME.relative_to("/")
    try:
        return product_name.read_text(errors="replace").strip() or None
    except OSError:
        return None

"""Ranks with a stand-in for the native Neuron device (TorchNeuron), without Neuron hardware or its packages.

Each rank is a process with a device ``neuron`` made in Python over the memory of the CPU, and a process group of that
name over gloo, which offers what AWS documents for the real one and refuses the rest (:class:`StandIn`). So the library
finds a native Neuron device by its own probes and takes its native code path. The stand-in shows that this code is
right; it says nothing about the speed of the device, its memory, or what its compiler accepts.

It needs torch 2.13 or newer, for ``torch.utils.backend_registration._setup_privateuseone_for_python_backend``. What has
to be written in C++ is missing: ``torch.Generator(device="neuron")``, streams and events, statistics of memory. Pinned
memory is an ordinary copy. Nothing is registered by importing this module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accel.errors import ConfigurationError, UsageError

OPTIONS = "NEURON_ACCEL_STAND_IN"
"""Environment variable of a rank: which :class:`StandIn` it has, as :meth:`StandIn.environ` writes it."""

_PACKAGE = "torch_neuronx"
_VERSION = "2.13.3.0.stand.in"
_METADATA = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {_VERSION}\n"
_SOURCE = '''"""Stands for the native Neuron device; see neuron_accel.testing.native_ranks."""


def _autoload():
    from neuron_accel.testing.native_ranks import register

    register()
'''
_ENTRY_POINTS = "[torch.backends]\ntorch_neuronx = torch_neuronx:_autoload\n"


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What the device of a rank can do beyond what is always there.

    Args:
        send_receive: whether ranks can send to a single rank, which AWS's release notes announce and its public
            sources of April 2026 lack.
        integers: whether integers and booleans are combined, in float32 (exact to 2**24); False for the compilers that
            refuse it.
    """

    send_receive: bool = False
    integers: bool = True

    def environ(self) -> dict[str, str]:
        return {OPTIONS: ",".join(name for name, value in vars(self).items() if value)}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StandIn:
        names = [name for name in environ.get(OPTIONS, "integers").split(",") if name]
        unknown = set(names) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigurationError(
                f"{OPTIONS} names {', '.join(sorted(unknown))}.", fix=f"use {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**{name: name in names for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Counts:
    """What the device of this rank has done so far.

    Args:
        collectives: how many, by kind (``"all_reduce"``, ``"send"``, ...), those on tensors.
        collective_shapes: different ones among them, by kind, shape, dtype and number of ranks; the real device
            compiles each of them once.
        integers_combined: collectives that added or compared integers or booleans in float32.
        kernels: different operations, by shapes and dtypes, likewise.
    """

    collectives: Mapping[str, int]
    collective_shapes: int
    integers_combined: int
    kernels: int


def counts() -> Counts:
    """Of this rank.

    Raises:
        UsageError: in a process without the stand-in.
    """
    rules = _registered()
    if rules is None:
        raise UsageError(
            "This process has no stand-in for the native Neuron device.",
            fix='call this in a function that run_ranks(..., backend="native") runs',
        )
    combined = {"all_reduce", "reduce_scatter", "broadcast"}
    return Counts(
        collectives=Counter(kind for kind, *_ in rules.issued),
        collective_shapes=len(set(rules.issued)),
        integers_combined=sum(
            kind in combined and not (dtype.is_floating_point or dtype.is_complex) for kind, _, dtype, _ in rules.issued
        ),
        kernels=len(rules.runtime.kernels),
    )


def register(stand_in: StandIn | None = None) -> None:
    """Gives this process the device and the process group. It cannot be taken back.

    Args:
        stand_in: what it can do; by default what the environment says.

    Raises:
        UsageError: if torch is too old, or the process has another device of this kind.
    """
    if _registered() is not None:
        return
    import torch
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise UsageError(
            f"torch {torch.__version__} cannot have a device that is made in Python.",
            where="neuron_accel.testing.native_ranks",
            fix="use torch 2.13 or newer for ranks of the stand-in for the native Neuron device",
        )
    if hasattr(torch, "neuron"):
        raise UsageError(
            "This process has a device 'neuron' already.", fix="use the stand-in where there is no real one"
        )
    stand_in = stand_in or StandIn.of(os.environ)
    from neuron_accel.testing import _native_device, _native_group

    runtime = _native_device.Runtime()
    rules = _native_group.Rules(runtime, sends=stand_in.send_receive, integers=stand_in.integers)
    libraries = _native_device.install(runtime)
    _native_group.install(rules)
    module: Any = torch.get_device_module(_native_device.NAME)
    module.stand_in, module.libraries = rules, libraries  # as long as the process has the device


def _registered() -> Any:
    """The rules of this process' device, if it is a stand-in."""
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "neuron", None), "stand_in", None)


def write_package(folder: Path) -> None:
    """Writes a package ``torch_neuronx`` with its metadata, found by whatever looks for the native one. A process with
    ``folder`` on its PYTHONPATH has the device once it imports torch."""
    package, info = folder / _PACKAGE, folder / f"{_PACKAGE}-{_VERSION}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(_SOURCE)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)


def enter(folder: Path) -> None:
    """Makes this process, which has imported torch already, one with the stand-in.

    Args:
        folder: where :func:`write_package` wrote.
    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    register()
    imports = sys.modules.get("accelerate.utils.imports")
    if imports is not None:  # it has looked before this process was forked, and remembers
        imports.is_neuron_available.cache_clear()

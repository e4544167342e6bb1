# SPDX-License-Identifier: Apache-2.0
"""Ranks with a stand-in for the native Neuron device (TorchNeuron), without Neuron hardware or its packages.

Each rank is a process with a device ``neuron``, implemented in Python with tensors in CPU memory, and a process group
of that name, implemented with gloo. The process group supports what AWS documents for the real one, and raises errors
for the rest (:class:`StandIn`). The library detects it as a native Neuron device and uses the code path for it. The
stand-in tests this code, but not the speed or memory of the device, nor what its compiler accepts.

It needs torch 2.13 or newer, for ``torch.utils.backend_registration._setup_privateuseone_for_python_backend``. Features
that have to be written in C++ are missing: ``torch.Generator(device="neuron")``, streams and events, memory statistics.
Pinned memory is an ordinary copy. ``torch.compile(backend="neuron")`` runs graphs as they are, and refuses symbolic
sizes. Importing this module registers nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accel.errors import ConfigurationError, UsageError

OPTIONS = "NEURON_ACCEL_STAND_IN"
"""Environment variable with the options of the :class:`StandIn` of a rank."""

_PACKAGE = "torch_neuronx"
_VERSION = "2.13.3.0.stand.in"
_METADATA = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {_VERSION}\n"
_SOURCE = '''"""A stand-in for the native Neuron device; see neuron_accel_emulation.native_ranks."""


def _autoload():
    from neuron_accel_emulation.native_ranks import register

    register()
'''
_ENTRY_POINTS = """[torch.backends]
torch_neuronx = torch_neuronx:_autoload
[torch_dynamo_backends]
neuron = neuron_accel_emulation.native_ranks:compile_graph
"""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Optional features of the device of a rank.

    Args:
        send_receive: whether point-to-point communication is supported. AWS's release notes announce it; the public
            sources of April 2026 do not contain it.
        integers: whether integers and booleans can be reduced, in float32 (exact up to 2**24); False for compilers that
            reject it.

    Raises:
        ConfigurationError: in :meth:`of`, for an unknown option.
    """

    send_receive: bool = False
    integers: bool = True

    library = "neuron"  # the process group of ranks

    def environ(self) -> dict[str, str]:
        """The options as an environment variable."""
        return {OPTIONS: ",".join(name for name, value in vars(self).items() if value)}

    def prepare(self, folder: Path) -> dict[str, str]:
        """Writes the package of :func:`write_package` for ranks of :func:`neuron_accel.testing.run_ranks`, and returns
        their environment variables."""
        write_package(folder)
        return self.environ()

    def enter(self, folder: Path) -> None:
        """Registers the stand-in in a rank, with the options of its environment."""
        enter(folder)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StandIn:
        """Reads the options from the environment."""
        names = [name for name in environ.get(OPTIONS, "integers").split(",") if name]
        unknown = set(names) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigurationError(
                f"{OPTIONS} contains unknown options: {', '.join(sorted(unknown))}.",
                fix=f"use {', '.join(cls.__dataclass_fields__)}",
            )
        return cls(**{name: name in names for name in cls.__dataclass_fields__})


NATIVE = StandIn()
NATIVE_P2P = StandIn(send_receive=True)


@dataclass(frozen=True)
class Counts:
    """The operations of the device of this rank so far.

    Args:
        collectives: number of collectives on tensors, by kind (``"all_reduce"``, ``"send"``, ...).
        collective_shapes: number of different ones, by kind, shape, dtype and number of ranks; the real device compiles
            each once.
        integers_combined: number of collectives that reduced integers or booleans in float32.
        kernels: number of different operations, by shapes and dtypes; the real device compiles each once.
    """

    collectives: Mapping[str, int]
    collective_shapes: int
    integers_combined: int
    kernels: int


def counts() -> Counts:
    """Returns the counts of this rank.

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
    """Registers the device and the process group in this process. They cannot be removed.

    Args:
        stand_in: the options; None: those of the environment.

    Raises:
        UsageError: if torch is too old, or the process has another device of this kind.
    """
    if _registered() is not None:
        return
    import torch
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise UsageError(
            f"torch {torch.__version__} does not support a device implemented in Python.",
            where="neuron_accel_emulation.native_ranks",
            fix="use torch 2.13 or newer for ranks of the stand-in for the native Neuron device",
        )
    if hasattr(torch, "neuron"):
        raise UsageError(
            "This process has a device 'neuron' already.", fix="use the stand-in on a machine without a real one"
        )
    stand_in = stand_in or StandIn.of(os.environ)
    from neuron_accel_emulation import _native_device, _native_group

    runtime = _native_device.Runtime()
    rules = _native_group.Rules(runtime, sends=stand_in.send_receive, integers=stand_in.integers)
    libraries = _native_device.install(runtime)
    _native_group.install(rules)
    module: Any = torch.get_device_module(_native_device.NAME)
    module.stand_in, module.libraries = rules, libraries  # kept alive with the process


def compile_graph(graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend ``neuron`` of torch.compile: runs a graph as it is.

    Raises:
        UsageError: for symbolic sizes, which the compiler of the device refuses.
    """
    import torch

    sizes = [size for each in inputs if isinstance(each, torch.Tensor) for size in each.shape]
    if any(isinstance(each, torch.SymInt) for each in (*inputs, *sizes)):
        raise UsageError(
            "NCC_EMOD025: Dynamic shape is not supported.",
            where="torch.compile(backend='neuron')",
            why="the Neuron compiler requires that all sizes are known",
            fix="torch.compile(..., dynamic=False)",
        )
    return graph.forward  # type: ignore[no-any-return]


def _registered() -> Any:
    """The rules of the device of this process; None if it is not a stand-in."""
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "neuron", None), "stand_in", None)


def write_package(folder: Path) -> None:
    """Writes a package ``torch_neuronx`` with its metadata to ``folder``. A process with ``folder`` on its PYTHONPATH
    has the device when it has imported torch."""
    package, info = folder / _PACKAGE, folder / f"{_PACKAGE}-{_VERSION}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(_SOURCE)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)


def enter(folder: Path) -> None:
    """Registers the stand-in in this process, which has imported torch already.

    Args:
        folder: the folder of :func:`write_package`.
    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    register()
    imports = sys.modules.get("accelerate.utils.imports")
    if imports is not None:  # it has cached the result from before the fork
        imports.is_neuron_available.cache_clear()

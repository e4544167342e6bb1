"""Which backend a run uses, and making Accelerate follow.

Accelerate takes XLA whenever torch_xla can be imported, and decides when it is imported itself. So the decision falls
here, before that: :func:`settle`. Nothing in this module imports torch_xla, because that alone sets environment
variables and patches torch.distributed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

from neuron_accel.backends.base import Backend
from neuron_accel.errors import ConfigurationError, UsageError, did_you_mean

BackendName = Literal["torch", "xla"]
NeuronFlavour = Literal["native", "xla"]

HARDWARE_ROOT_VARIABLE = "NEURON_ACCEL_HARDWARE_ROOT"
"""Names the folder below which /dev and /sys are looked at, for machines that are emulated."""

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f")


class Probes(Protocol):
    """What is known about this machine."""

    @property
    def native_neuron(self) -> bool:
        """torch has a ``neuron`` device that works (TorchNeuron: Trn2, Trn3)."""

    @property
    def xla_neuron(self) -> bool:
        """The XLA flavour of the Neuron packages is installed (Trn1, Trn2)."""

    @property
    def neuron_hardware(self) -> bool:
        """The machine has a Neuron device."""

    @property
    def torch_xla(self) -> bool:
        """torch_xla can be imported."""

    @property
    def cuda(self) -> bool:
        """torch sees a CUDA device."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The backend of a run.

    Args:
        backend: which implementation of :class:`~neuron_accel.backends.base.Backend`.
        device: type of the device that tensors live on.
        reason: why, as a sentence.
    """

    backend: BackendName
    device: Literal["cpu", "cuda", "neuron", "xla"]
    reason: str


def hardware_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that has the files of the hardware: ``/``, unless a test emulates a machine."""
    return Path(environ.get(HARDWARE_ROOT_VARIABLE, "").strip() or "/")


class Machine:
    """:class:`Probes` of the machine that this runs on; looks when asked, once."""

    @cached_property
    def native_neuron(self) -> bool:
        if self._flavour != "native":  # some inference packages put a torch.neuron of their own there
            return False
        import torch

        try:
            return bool(torch.get_device_module("neuron").is_available())
        except Exception:  # no such device, or a runtime that cannot start: in both cases no device to train on
            return False

    @cached_property
    def xla_neuron(self) -> bool:
        return self.torch_xla and (_importable("libneuronxla") or self._flavour == "xla")

    @cached_property
    def neuron_hardware(self) -> bool:
        return any((hardware_root() / "dev").glob("neuron[0-9]*"))

    @cached_property
    def torch_xla(self) -> bool:
        return _importable("torch_xla")

    @cached_property
    def cuda(self) -> bool:
        import torch

        return torch.cuda.is_available()

    @cached_property
    def _flavour(self) -> NeuronFlavour | None:
        try:
            distribution = importlib.metadata.distribution("torch-neuronx")
        except importlib.metadata.PackageNotFoundError:
            return None
        return neuron_flavour(distribution.version, {point.group for point in distribution.entry_points})


def neuron_flavour(version: str, entry_point_groups: set[str]) -> NeuronFlavour | None:
    """Which of the two packages called torch-neuronx is installed, or None if it is neither.

    The XLA variant has five-part versions up to release 2.9 (``2.9.0.2.15.32035``), the native one starts with 2.13
    (``2.13.3.0``) and registers itself with torch; builds from source carry ``0.1.0``. The ``1.0`` of the public index
    is a placeholder without content.
    """
    if "torch.backends" in entry_point_groups:
        return "native"
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version).group().split(".") if part]  # type: ignore[union-attr]
    if tuple(numbers[:2]) >= (2, 13):
        return "native"
    return "xla" if len(numbers) >= 5 and tuple(numbers[:2]) >= (1, 13) else None


def choose(requested: str | None, environ: Mapping[str, str], probes: Probes, *, cpu: bool = False) -> Decision:
    """The backend to use. Pure.

    In this order: the argument, ``NEURON_ACCEL_BACKEND``, the wish for the CPU (``cpu=True``, ``ACCELERATE_USE_CPU``),
    and for "auto" what the machine has: native Neuron, XLA on Neuron hardware (unless ``DISABLE_XLA`` or
    ``USE_TORCH_XLA=false``), CUDA, the CPU. That torch_xla is installed means nothing by itself.

    Args:
        requested: ``"auto"``, ``"torch"``, ``"xla"``, or None for what the environment says.
        environ: environment variables.
        probes: what the machine has.
        cpu: whether the caller wants the CPU.

    Raises:
        ConfigurationError: for an unknown name, or wishes that exclude each other.
    """
    name, source = _requested(requested, environ)
    forbidden = _xla_forbidden(environ)
    wants_cpu = "cpu=True" if cpu else "ACCELERATE_USE_CPU" if flag(environ, "ACCELERATE_USE_CPU") else None
    if name == "xla":
        _check_xla(source, forbidden, wants_cpu, probes)
        return Decision(backend="xla", device="xla", reason=f"{source} asks for it")
    if wants_cpu:
        return Decision(backend="torch", device="cpu", reason=f"{wants_cpu} asks for the CPU")
    if probes.native_neuron:
        return Decision(backend="torch", device="neuron", reason="torch has a native neuron device")
    without = _why_not_xla(name, source, forbidden, probes)
    if without is None:
        return Decision(backend="xla", device="xla", reason="this is Neuron hardware with the XLA packages for it")
    if probes.cuda:
        return Decision(backend="torch", device="cuda", reason=f"torch sees a CUDA device, {without}")
    return Decision(backend="torch", device="cpu", reason=f"no accelerator can be used, {without}")


def settle(
    environ: MutableMapping[str, str],
    *,
    requested: str | None = None,
    cpu: bool = False,
    probes: Probes | None = None,
    modules: Mapping[str, ModuleType] = sys.modules,
) -> Decision:
    """Chooses, and sees to it that Accelerate chooses the same. Call it before Accelerate is imported.

    Where XLA is not to be used although torch_xla can be imported it sets ``USE_TORCH_XLA=false`` in ``environ``, which
    is what Accelerate looks at.

    Args:
        environ: environment variables, ``os.environ``.
        requested, cpu, probes: as for :func:`choose`; the machine itself by default.
        modules: what is imported already.

    Raises:
        ConfigurationError: as for :func:`choose`.
        UsageError: if Accelerate was imported earlier and has decided otherwise.
    """
    probes = probes or Machine()
    decision = choose(requested, environ, probes, cpu=cpu)
    has_decided = modules.get("accelerate.utils.imports")
    if has_decided is not None:
        _check_agrees(decision, bool(has_decided.is_torch_xla_available()))
    if decision.backend != "xla" and probes.torch_xla:
        environ["USE_TORCH_XLA"] = "false"
    return decision


def connect(
    decision: Decision,
    *,
    timeout: timedelta | None = None,
    adopts: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Backend:
    """The backend that was decided on, connected to the other ranks.

    Args:
        timeout: how long a collective may take.
        adopts: whether a connection that exists was made for this backend, and ends with it.
        environ: ``NEURON_ACCEL_POINT_TO_POINT=0`` says that ranks on the native Neuron device do not send, and
            leaves out the attempt.

    Raises:
        ConfigurationError: if that variable is neither true nor false.
        UsageError: if the backend cannot serve this process.
        CommunicationError: if the other ranks cannot be reached.
    """
    if decision.backend == "xla":
        from neuron_accel.backends.xla import XlaBackend

        return XlaBackend.connect(timeout=timeout)
    from neuron_accel.backends.torch_distributed import TorchBackend

    sends = flag(environ, "NEURON_ACCEL_POINT_TO_POINT", default=True)
    return TorchBackend.connect(decision.device, timeout=timeout, adopts=adopts, tries_sending=sends)


def flag(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    """The boolean value of an environment variable.

    Raises:
        ConfigurationError: if it is set to something that is neither true nor false.
    """
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    if value:
        raise ConfigurationError(
            f"{name}={environ[name]} is neither true nor false.",
            where=f"environment variable {name}",
            fix="set it to 1 or 0, or unset it",
        )
    return default


def _requested(requested: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """What was asked for, and by whom."""
    if requested is not None:
        name, source = requested, "the backend argument"
    else:
        name, source = environ.get("NEURON_ACCEL_BACKEND", "").strip() or "auto", "NEURON_ACCEL_BACKEND"
    known = ("auto", "torch", "xla")
    if name not in known:
        raise ConfigurationError(f"Unknown backend {name!r}.", where=source, fix=did_you_mean(name, known))
    return name, source


def _xla_forbidden(environ: Mapping[str, str]) -> str | None:
    """The variable that rules XLA out, if one does."""
    if flag(environ, "DISABLE_XLA"):
        return "DISABLE_XLA"
    return None if flag(environ, "USE_TORCH_XLA", default=True) else "USE_TORCH_XLA=false"


def _check_xla(source: str, forbidden: str | None, wants_cpu: str | None, probes: Probes) -> None:
    for other in (forbidden, wants_cpu):
        if other is not None:
            raise ConfigurationError(
                f"{source} asks for the xla backend and {other} for another.",
                why="one of them has to give way, and silently choosing would surprise",
                fix="drop one of the two; for XLA without hardware set PJRT_DEVICE=CPU",
            )
    if not probes.torch_xla:
        raise ConfigurationError(
            f"{source} asks for the xla backend, but torch_xla is not installed.",
            fix="install the extra: pip install 'neuron-accel[xla]', or leave the backend to be chosen",
        )


def _why_not_xla(name: str, source: str, forbidden: str | None, probes: Probes) -> str | None:
    """The reason why "auto" or "torch" does not mean XLA here; None if it does."""
    if name == "torch":
        return f"{source} asks for torch"
    if not probes.xla_neuron:
        return "the XLA packages for Neuron are not installed"
    if not probes.neuron_hardware:
        return "the XLA packages for Neuron are installed but the machine has no Neuron device"
    return None if forbidden is None else f"{forbidden} rules out XLA"


def _check_agrees(decision: Decision, accelerate_uses_xla: bool) -> None:
    if (decision.backend == "xla") == accelerate_uses_xla:
        return
    theirs, ours = ("XLA", "torch") if accelerate_uses_xla else ("torch", "XLA")
    switch = "USE_TORCH_XLA=false" if accelerate_uses_xla else "NEURON_ACCEL_BACKEND=xla (and unset USE_TORCH_XLA)"
    raise UsageError(
        f"Accelerate was imported earlier and uses {theirs}, but this run is to use {ours}.",
        where=f"backend {decision.backend!r}, because {decision.reason}",
        why="Accelerate chooses when it is imported and cannot change afterwards",
        fix=f"set {switch} in the environment, or import neuron_accel.NeuronAccelerator before accelerate",
    )


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # an entry of sys.modules without a spec, as tests and stubs put there
        return False

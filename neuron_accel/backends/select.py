# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend of a run, and makes Accelerate choose the same.

Accelerate uses XLA whenever torch_xla can be imported, and decides this when Accelerate itself is imported.
:func:`settle` therefore has to be called before. This module does not import torch_xla, since the import sets
environment variables and patches torch.distributed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from neuron_accel.backends.base import Backend
from neuron_accel.errors import ConfigurationError, UsageError, did_you_mean

BackendName = Literal["torch", "xla", "dryrun"]
NeuronFlavour = Literal["native", "xla", "inference"]

HARDWARE_ROOT_VARIABLE = "NEURON_ACCEL_HARDWARE_ROOT"
"""Environment variable for the folder that contains ``dev`` and ``sys`` of an emulated machine."""

SHARED_MEMORY_VARIABLE = "NEURON_ACCEL_SHARED_MEMORY"
"""Environment variable: false if CPU ranks use gloo although a package that connects them is installed."""

DRY_RUN_SIZE_VARIABLE = "NEURON_ACCEL_DRYRUN_WORLD_SIZE"
"""Environment variable for the number of ranks of a dry run; 1 by default."""

DRY_RUN_RANK_VARIABLE = "NEURON_ACCEL_DRYRUN_RANK"
"""Environment variable for the rank that a dry run is; 0 by default."""

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f")


class Probes(Protocol):
    """What a machine provides."""

    @property
    def native_neuron(self) -> bool:
        """Whether torch has a usable ``neuron`` device (TorchNeuron: Trn2, Trn3)."""

    @property
    def native_problem(self) -> Exception | None:
        """Why the native device that is installed cannot be used; None if it can, or none is installed."""

    @property
    def missing(self) -> str:
        """What the installed torch lacks to use a Neuron device, as an advice."""

    @property
    def xla_neuron(self) -> bool:
        """Whether the XLA variant of the Neuron packages is installed (Trn1, Trn2)."""

    @property
    def neuron_hardware(self) -> bool:
        """Whether the machine has a Neuron device."""

    @property
    def torch_xla(self) -> bool:
        """Whether torch_xla can be imported."""

    @property
    def cuda(self) -> bool:
        """Whether torch finds a CUDA device."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run of which this process is one rank and the other ranks do not exist; tensors have shapes and no memory.

    Args:
        world_size: number of ranks.
        rank: the rank that this process is.
        observers: plugins that are added to those of the run.

    Raises:
        ConfigurationError: if there is no such rank.
    """

    world_size: int = 1
    rank: int = 0
    observers: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigurationError(
                f"A dry run of {self.world_size} ranks is not possible.", where="DryRun", fix="pass at least 1"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"There is no rank {self.rank} among {self.world_size}.",
                where="DryRun",
                fix=f"pass a rank from 0 to {self.world_size - 1}",
            )

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """A context in which every run of this thread is this one, whatever backend it asks for."""
        token = _RUNS_DRY.set(self)
        try:
            yield
        finally:
            _RUNS_DRY.reset(token)


_RUNS_DRY: ContextVar[DryRun | None] = ContextVar("neuron_accel.runs_dry", default=None)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The backend of a run.

    Args:
        backend: name of the implementation of :class:`~neuron_accel.backends.base.Backend`.
        device: type of the device of tensors.
        reason: why it was chosen, for messages.
        dry_run: the ranks of a dry run; None for other backends.
    """

    backend: BackendName
    device: Literal["cpu", "cuda", "neuron", "xla", "meta"]
    reason: str
    dry_run: DryRun | None = None


def hardware_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder that contains ``dev`` and ``sys``: ``/``, unless a machine is emulated."""
    return Path(environ.get(HARDWARE_ROOT_VARIABLE, "").strip() or "/")


class Machine:
    """:class:`Probes` of this machine. Each property is computed on first access and cached.

    Args:
        apart: whether a native device is opened by a process of its own, so that this one holds no core.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart

    @cached_property
    def native_neuron(self) -> bool:
        return self._flavour == "native" and self.native_problem is None

    @cached_property
    def native_problem(self) -> Exception | None:
        if self._flavour != "native":  # some inference packages add another torch.neuron
            return None
        return _open_apart() if self._apart else _open_native()

    @cached_property
    def missing(self) -> str:
        return _missing_piece(_version("torch"), _version("torch-neuronx"), self._flavour, self._product)

    @cached_property
    def xla_neuron(self) -> bool:
        return self.torch_xla and (_importable("libneuronxla") or self._flavour == "xla")

    @cached_property
    def neuron_hardware(self) -> bool:
        return any((hardware_root() / "dev").glob("neuron[0-9]*")) or self._product.startswith("trn")

    @cached_property
    def torch_xla(self) -> bool:
        return _importable("torch_xla")

    @cached_property
    def cuda(self) -> bool:
        import torch

        return torch.cuda.is_available()

    @cached_property
    def _product(self) -> str:
        """The instance type, in the product name of this machine (DMI); its devices are missing without the driver."""
        try:
            name = (hardware_root() / "sys/devices/virtual/dmi/id/product_name").read_text(errors="replace")
        except OSError:
            return ""
        return name.strip().removeprefix("ml.")

    @cached_property
    def _flavour(self) -> NeuronFlavour | None:
        try:
            distribution = importlib.metadata.distribution("torch-neuronx")
        except importlib.metadata.PackageNotFoundError:
            return None
        return neuron_flavour(distribution.version, {point.group for point in distribution.entry_points})


def _open_native() -> Exception | None:
    try:
        import torch

        module = torch.get_device_module("neuron")
        if module.is_available():
            return None
        return RuntimeError(f"torch.neuron.device_count() is {module.device_count()}")  # or raises what was hidden
    except Exception as error:
        return error


def _open_apart() -> Exception | None:
    """As :func:`_open_native`, in a process that ends before ranks start."""
    code = (
        "import sys; from neuron_accel.backends.select import Machine; error = Machine().native_problem; "
        "sys.exit(0 if error is None else f'{type(error).__name__}: {error}')"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return None if done.returncode == 0 else RuntimeError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing_piece(torch: str | None, neuronx: str | None, flavour: NeuronFlavour | None, product: str) -> str:
    release = ".".join((torch or "none").split(".")[:2])
    what = (
        f"torch-neuronx {neuronx}" + ("" if flavour else " (an empty placeholder)") if neuronx else "no torch-neuronx"
    )
    found = f"torch {release} and {what} are installed"
    if product.startswith("trn1") and release != "2.9":
        return f"{found}; Trn1 needs torch 2.9 with torch-neuronx of Neuron SDK 2.31 (constraints/xla.txt)"
    if flavour == "native":
        return f"{found}; look at the driver with neuron-ls, and whether another process holds the cores"
    if release == "2.9":
        return f"{found}; install torch-neuronx 2.9 and torch_xla from AWS's package index (constraints/xla.txt)"
    if release in ("2.13", "2.14"):
        return f"{found}; install torch-neuronx {release} from AWS's package index (constraints/native-{release}.txt)"
    return f"{found}; torch-neuronx is released for torch 2.14, 2.13 and, through torch_xla, 2.9"


def neuron_flavour(version: str, entry_point_groups: set[str]) -> NeuronFlavour | None:
    """Returns the variant of an installed torch-neuronx distribution, or None if it is none of them.

    Versions of the XLA variant have five parts, up to release 2.9 (``2.9.0.2.15.32035``); later ones
    (``2.11.0.1.0.696``) are for inference by vLLM and cannot train. The native variant starts with 2.13 (``2.13.3.0``)
    and registers itself with torch; its builds from source have version ``0.1.0``. Version ``1.0`` on PyPI is an empty
    placeholder.
    """
    if "torch.backends" in entry_point_groups:
        return "native"
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version).group().split(".") if part]  # type: ignore[union-attr]
    if tuple(numbers[:2]) >= (2, 13):
        return "native"
    if len(numbers) < 5 or tuple(numbers[:2]) < (1, 13):
        return None
    return "xla" if tuple(numbers[:2]) <= (2, 9) else "inference"


def choose(
    requested: str | DryRun | None, environ: Mapping[str, str], probes: Probes, *, cpu: bool = False
) -> Decision:
    """Returns the backend to use. A pure function.

    In order of precedence: the argument, ``NEURON_ACCEL_BACKEND``, a request for the CPU (``cpu=True`` or
    ``ACCELERATE_USE_CPU``), and for ``"auto"`` the first that the machine provides of native Neuron, XLA on Neuron
    hardware (unless ``DISABLE_XLA`` or ``USE_TORCH_XLA=false`` is set), CUDA, and the CPU. An installed torch_xla alone
    does not select XLA. ``"dryrun"`` is chosen only by name, and needs no device.

    Args:
        requested: ``"auto"``, ``"torch"``, ``"xla"``, ``"dryrun"`` (of the ranks that the environment names), a
            :class:`DryRun`, or None to use the environment.
        environ: environment variables.
        probes: what the machine provides.
        cpu: whether the caller requests the CPU.

    Raises:
        ConfigurationError: for an unknown name, requests that contradict each other, or Neuron hardware that cannot be
            used where the CPU is not requested.
    """
    if isinstance(requested, DryRun):
        return _dry("the backend argument", requested, environ)
    name, source = _requested(requested, environ)
    if name == "dryrun":
        return _dry(source, _dry_run_of(environ), environ)
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
    problem = probes.native_problem
    if probes.neuron_hardware:
        if probes.xla_neuron and problem is None:  # all is installed
            advice = f"do without {source if name == 'torch' else forbidden}"
        else:
            advice = f"{probes.missing}; neuron-accel doctor looks at the rest"
        raise ConfigurationError(
            "This machine has Neuron hardware, which cannot be used.",
            where="the choice of a backend",
            why=without if problem is None else f"the native device does not open: {type(problem).__name__}: {problem}",
            fix=f"{advice}. To train on its CPU, pass --cpu or cpu=True",
        ) from problem
    if problem is not None:
        without += f"; the native Neuron device does not open: {problem}"
    if probes.cuda:
        return Decision(backend="torch", device="cuda", reason=f"torch sees a CUDA device, {without}")
    return Decision(backend="torch", device="cpu", reason=f"no accelerator can be used, {without}")


def settle(
    environ: MutableMapping[str, str],
    *,
    requested: str | DryRun | None = None,
    cpu: bool = False,
    probes: Probes | None = None,
    modules: Mapping[str, ModuleType] = sys.modules,
) -> Decision:
    """Chooses the backend and makes Accelerate choose the same. Must be called before Accelerate is imported.

    If torch_xla can be imported but XLA is not used, sets ``USE_TORCH_XLA=false`` in ``environ``, which Accelerate
    reads. Inside :meth:`DryRun.everywhere` every run is that one.

    Args:
        environ: environment variables, ``os.environ``.
        requested, cpu, probes: as for :func:`choose`; ``probes`` is this machine by default.
        modules: the modules that are already imported.

    Raises:
        ConfigurationError: as for :func:`choose`.
        UsageError: if Accelerate was imported before and chose differently.
    """
    probes = probes or Machine()
    decision = choose(_RUNS_DRY.get() or requested, environ, probes, cpu=cpu)
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
    """Returns the chosen backend, connected to the other ranks.

    Args:
        timeout: timeout of a collective.
        adopts: whether the backend's ``shutdown`` ends a connection that already exists.
        environ: environment variables. ``NEURON_ACCEL_POINT_TO_POINT=0`` disables point-to-point messages on the native
            Neuron device, so that they are not probed.

    Raises:
        ConfigurationError: if that variable is neither true nor false.
        UsageError: if the backend cannot be used in this process.
        CommunicationError: if the other ranks cannot be reached.
    """
    if decision.backend == "xla":
        from neuron_accel.backends.xla import XlaBackend

        return XlaBackend.connect(timeout=timeout)
    if decision.dry_run is not None:
        from neuron_accel.backends.dry_run import DryRunBackend

        return DryRunBackend(world_size=decision.dry_run.world_size, rank=decision.dry_run.rank)
    assert decision.device != "meta"
    from neuron_accel.backends.process_group import installed_library
    from neuron_accel.backends.torch_distributed import TorchBackend

    sends = flag(environ, "NEURON_ACCEL_POINT_TO_POINT", default=True)
    shares = flag(environ, SHARED_MEMORY_VARIABLE, default=True)
    library = installed_library() if shares and decision.device == "cpu" else "gloo"
    return TorchBackend.connect(decision.device, timeout=timeout, adopts=adopts, tries_sending=sends, library=library)


def flag(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Returns the boolean value of an environment variable, or ``default`` if it is not set.

    Raises:
        ConfigurationError: if its value is neither true nor false.
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
    """Returns the requested name, and what requested it, for messages."""
    if requested is not None:
        name, source = requested, "the backend argument"
    else:
        name, source = environ.get("NEURON_ACCEL_BACKEND", "").strip() or "auto", "NEURON_ACCEL_BACKEND"
    known = ("auto", "torch", "xla", "dryrun")
    if name not in known:
        raise ConfigurationError(f"Unknown backend {name!r}.", where=source, fix=did_you_mean(name, known))
    return name, source


def _dry_run_of(environ: Mapping[str, str]) -> DryRun:
    """The ranks of a dry run, from the environment: one rank by default."""
    values: dict[str, Any] = {}
    for name, option in ((DRY_RUN_SIZE_VARIABLE, "world_size"), (DRY_RUN_RANK_VARIABLE, "rank")):
        text = environ.get(name, "").strip()
        if text and not text.isdecimal():
            raise ConfigurationError(
                f"{name}={text} is not a number.", where=f"environment variable {name}", fix="set it to an integer"
            )
        if text:
            values[option] = int(text)
    return DryRun(**values)


def _dry(source: str, dry_run: DryRun, environ: Mapping[str, str]) -> Decision:
    started = environ.get("WORLD_SIZE", "").strip() or "1"
    if started != "1":
        raise ConfigurationError(
            f"{source} asks for a dry run, and a launcher has started {started} processes.",
            where="environment variable WORLD_SIZE",
            why="a dry run is one process, which stands for one rank of any number",
            fix=f"start one process with python, and set {DRY_RUN_SIZE_VARIABLE}={started}",
        )
    return Decision(backend="dryrun", device="meta", reason=f"{source} asks for it", dry_run=dry_run)


def _xla_forbidden(environ: Mapping[str, str]) -> str | None:
    """Returns the environment variable that disables XLA, if one does."""
    if flag(environ, "DISABLE_XLA"):
        return "DISABLE_XLA"
    return None if flag(environ, "USE_TORCH_XLA", default=True) else "USE_TORCH_XLA=false"


def _check_xla(source: str, forbidden: str | None, wants_cpu: str | None, probes: Probes) -> None:
    for other in (forbidden, wants_cpu):
        if other is not None:
            raise ConfigurationError(
                f"{source} asks for the xla backend and {other} for another.",
                why="the two contradict each other",
                fix="remove one of the two; for XLA without hardware set PJRT_DEVICE=CPU",
            )
    if not probes.torch_xla:
        raise ConfigurationError(
            f"{source} asks for the xla backend, but torch_xla is not installed.",
            fix="pip install 'torch==2.9.*' 'torch_xla==2.9.0', or leave the backend to be chosen",
        )


def _why_not_xla(name: str, source: str, forbidden: str | None, probes: Probes) -> str | None:
    """Returns the reason why XLA is not chosen, or None if it is."""
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
    except ValueError:  # an entry of sys.modules without a spec, as tests add them
        return False

# SPDX-License-Identifier: Apache-2.0
"""Runs a function, or a launcher, on ranks of an emulated Trainium instance, with one process per Neuron core.

The parts of torch_xla for Neuron are the real ones: they load the plugin, assign cores to processes, and connect ranks
through the same environment variables. The plugin is compiled with the C compiler when it is first needed, and uses
XLA's CPU backend (package ``xla-cpu-pjrt``). Programs are written to a compile cache with the layout of the Neuron
compiler's wrapper, and one process executes them for all ranks, including collectives. Without the compiler and the
device, this does not test whether a program compiles for the device, its speed, or its memory use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel import find_instance
from neuron_accel.errors import UsageError
from neuron_accel.testing.devices import XlaTask, pickle_call, run_forked
from neuron_accel_emulation.xla_flags import quick_flags

_SOURCES = Path(__file__).with_name("emulation")
_CORES_OF_A_CHIP = 2
_PRODUCT_NAME = "sys/devices/virtual/dmi/id/product_name"  # DMI, which is the instance type on EC2 (Nitro)
_STUB = """\
def configure_environment():
    pass
"""
_STUB_PATH = """\
import os


def libneuronpjrt_path():
    return os.environ["NEURON_ACCEL_EMULATED_DEVICE"]
"""
_COMMAND = """\
#!/bin/sh
exec "{python}" -m {module} "$@"
"""
_LIST = """\
#!/bin/sh
cat "{path}"
"""


def missing() -> str | None:
    """Why this machine cannot emulate a Neuron device, as a sentence; None if it can."""
    if not sys.platform.startswith("linux"):
        return "an emulated Neuron device needs Linux"
    if importlib.util.find_spec("torch_xla") is None:
        return "an emulated Neuron device needs torch_xla: pip install 'torch==2.9.*' 'torch_xla==2.9.0'"
    if _plugin() is None:
        return "an emulated Neuron device needs xla-cpu-pjrt: pip install xla-cpu-pjrt==0.0.1"
    if _compiler() is None:
        return "an emulated Neuron device needs a C compiler: cc, gcc or clang on the PATH, or CC"
    return None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A program that a rank requested to compile.

    Args:
        outcome: "collected" in a run that only collects programs, "found" in the cache, or "compiled".
        rank: the rank.
        module: name of the program in the cache.
    """

    outcome: str
    rank: int
    module: str


@dataclass(frozen=True, kw_only=True)
class EmulatedInstance:
    """An emulated machine with Neuron cores, created by :func:`emulated_instance`.

    Args:
        folder: its files: devices in ``dev``, commands in ``bin``, the compile cache in ``cache``.
        cores: number of Neuron cores; each rank uses one.
        environ: the environment of this process with the variables for processes on the machine added. With it a
            launcher (``neuron-accel launch``, ``torchrun``) finds the cores, and ``neuron_parallel_compile`` is on the
            PATH.
    """

    folder: Path
    cores: int
    environ: Mapping[str, str] = field(repr=False)

    @property
    def cache(self) -> Path:
        """The compile cache of runs that do not set another one."""
        return self.folder / "cache"

    def run(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        env: Mapping[str, str] | None = None,
        trial: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on ``n`` ranks and returns the results by rank.

        Each rank is a process with one core and the environment of a rank of torchrun. ``torch.distributed`` is not
        initialised; ``NeuronAccelerator()`` does that.

        Args:
            fn, n, args, kwargs, timeout, grace, env: as for :func:`neuron_accel.testing.run_ranks`.
            trial: whether to only collect programs, as with ``neuron_parallel_compile``; all results are zero. A rank
                that ends with ``SystemExit(0)``, as such a run does, returns None.

        Raises:
            RanksError: if a rank raises, ends early, or runs out of time.
            UsageError: if the call itself is wrong.
        """
        call, main = pickle_call(fn, args, kwargs)
        if not 1 <= n <= self.cores:
            raise UsageError(f"{n} ranks do not fit on an emulated instance of {self.cores} cores.")
        task = XlaTask(
            size=n,
            call=call,
            environ={**self.environ, **_ranks_environment(n), **(_TRIAL if trial else {}), **(env or {})},
            timeout=timeout,
            grace=grace,
            syspath=list(sys.path),
            main=main,
        )
        return run_forked("neuron_accel_emulation._neuron_server", task, self.environ)

    @property
    def compilations(self) -> list[Compilation]:
        """Every program that ranks have requested to compile on this machine, in order."""
        path = self.folder / "compilations"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Compilation(outcome=o, rank=int(r), module=m) for o, r, m in map(str.split, lines)]

    def graphs(self, rank: int) -> list[Path]:
        """Files with the programs that a rank compiled in the last run, in order, as serialized HloModuleProtos."""
        return sorted((self.folder / "graphs").glob(f"rank{rank}_*.hlo"))

    def forget_graphs(self) -> None:
        """Deletes the files of :meth:`graphs`."""
        for path in (self.folder / "graphs").iterdir():
            path.unlink()


_TRIAL = {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}


@contextmanager
def emulated_instance(instance: str | None = None, *, cores: int = 8) -> Iterator[EmulatedInstance]:
    """A context manager that yields an emulated machine, in a temporary folder that only this user can read.

    Args:
        instance: the instance type, such as "trn1.2xlarge", which determines the number of cores; None: the machine has
            no product name.
        cores: number of cores of a machine without an instance type.

    Raises:
        UsageError: if this machine lacks something, see :func:`missing`.
        ConfigurationError: for an instance that does not exist.
    """
    lacks = missing()
    if lacks:
        raise UsageError(f"A Neuron device cannot be emulated on this machine: {lacks}.")
    if instance is not None:
        cores = find_instance(instance).cores()
    built = build()
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-neuron-{os.getpid()}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _make_machine(folder, instance, cores)
        yield EmulatedInstance(folder=folder, cores=cores, environ=_environment(folder, cores, built))


class EmulatedCores:
    """Ranks of :func:`neuron_accel.testing.run_ranks` on a machine of their own with a core for each."""

    def run(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout: float,
        grace: float,
        env: Mapping[str, str] | None,
        **kwargs: Any,
    ) -> list[Any]:
        with emulated_instance(cores=n) as machine:
            return machine.run(fn, n, *args, timeout=timeout, grace=grace, env=env, **kwargs)


CORES = EmulatedCores()


def _make_machine(folder: Path, instance: str | None, cores: int) -> None:
    for part in ("dev", "bin", "site/libneuronxla", "graphs", "cache"):
        (folder / part).mkdir(parents=True)
    chips = -(-cores // _CORES_OF_A_CHIP)
    for chip in range(chips):
        (folder / "dev" / f"neuron{chip}").touch()
    if instance is not None:
        product = folder / _PRODUCT_NAME
        product.parent.mkdir(parents=True)
        product.write_text(f"{instance}\n")
    (folder / "site/libneuronxla/__init__.py").write_text(_STUB)
    (folder / "site/libneuronxla/libneuronpjrt_path.py").write_text(_STUB_PATH)
    metadata = folder / "site/torch_neuronx-2.9.0.0.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.9.0.0.0\n")
    listing = [{"neuron_device": chip, "nc_count": _CORES_OF_A_CHIP} for chip in range(chips)]
    (folder / "neuron-ls.json").write_text(json.dumps(listing))
    compiler = _COMMAND.format(python=sys.executable, module="neuron_accel_emulation._parallel_compile")
    for name, text in {
        "neuron_parallel_compile": compiler,
        "neuron-ls": _LIST.format(path=folder / "neuron-ls.json"),
    }.items():
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o700)


def _environment(folder: Path, cores: int, built: _Built) -> dict[str, str]:
    removed = {
        *("ACCELERATE_USE_CPU", "USE_TORCH_XLA", "DISABLE_XLA", "PJRT_DEVICE", "NEURON_ACCEL_BACKEND"),
        *("NEURON_CC_FLAGS", "NEURON_LIBRARY_PATH", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
    return {
        **{name: value for name, value in os.environ.items() if name not in removed},
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), *(path for path in sys.path if path)]),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
        "NEURON_ACCEL_HARDWARE_ROOT": str(folder),
        "NEURON_COMPILE_CACHE_URL": str(folder / "cache"),
        "NEURON_ACCEL_EMULATION": str(folder),
        "NEURON_ACCEL_EMULATED_DEVICE": str(built.device),
        "NEURON_ACCEL_EMULATED_BROKER": str(built.broker),
        "NEURON_ACCEL_EMULATED_PLUGIN": str(_plugin()),
        "NEURON_ACCEL_EMULATED_CORES": str(cores),
        "NEURON_ACCEL_EMULATED_GRAPHS": str(folder / "graphs"),
        "XLA_FLAGS": quick_flags(xla_cpu_use_fusion_emitters="false"),  # they take most of the compilation
        "NPROC": "64",  # every rank of a collective blocks a thread of XLA
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _ranks_environment(size: int) -> dict[str, str]:
    """The environment variables of torchrun that all ranks have in common."""
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "emulated",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- building -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Built:
    device: Path
    broker: Path


def build() -> _Built:
    """Compiles the plugin and its broker, unless they were compiled from the same sources before. Safe in parallel.

    Raises:
        UsageError: if compilation fails.
    """
    plugin = _plugin()
    compiler = _compiler()
    assert plugin is not None
    assert compiler is not None
    include = plugin.parent / "include"
    digest = hashlib.sha256()
    for path in (*sorted(_SOURCES.glob("*.[ch]")), include / "pjrt_c_api.h"):
        digest.update(path.read_bytes())
    folder = _build_folder() / digest.hexdigest()[:16]
    built = _Built(device=folder / "device.so", broker=folder / "broker")
    if not (built.device.exists() and built.broker.exists()):
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as name:
            temporary = Path(name, "built")
            temporary.mkdir()
            common = [*compiler, "-O1", f"-I{include}"]
            _compile([*common, "-shared", "-fPIC", _SOURCES / "device.c", "-o", temporary / "device.so"])
            _compile([*common, _SOURCES / "broker.c", "-o", temporary / "broker"])
            with contextlib.suppress(OSError):  # another process was faster
                temporary.rename(folder)
    return built


def _build_folder() -> Path:
    """The folder of compiled files. They are executed, so no other user may have write permission."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(home, "neuron_accel"), Path(tempfile.gettempdir(), f"neuron_accel-{os.getuid()}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
    raise UsageError(
        "There is no folder for the compiled emulation of a Neuron device.",
        fix="set XDG_CACHE_HOME to a folder that you own",
    )


def _compile(command: list[str | Path]) -> None:
    result = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise UsageError(
            f"The emulated Neuron device cannot be built: {result.stderr.strip()[-2000:]}",
            where=" ".join(map(str, command)),
            fix="install a C compiler with its headers, or set CC to another one",
        )


def _compiler() -> list[str] | None:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = name.split()
        if words and shutil.which(words[0]):
            return words
    return None


def _plugin() -> Path | None:
    """Path of XLA's CPU plugin, if it is installed with its header."""
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found = Path(folder, "xla_cpu_pjrt.so")
            if found.exists() and Path(folder, "include", "pjrt_c_api.h").exists():
                return found
    return None

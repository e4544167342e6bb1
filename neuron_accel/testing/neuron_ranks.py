"""Runs a function, or a launcher, on ranks of an emulated Trainium instance: one process for each Neuron core.

What is Neuron's own is torch_xla's part of it: the plugin is loaded as Neuron's is, cores are assigned to processes by
the same code, ranks meet through the same variables. Behind it are XLA's CPU (package ``xla-cpu-pjrt``) and a plugin
that is built with the C compiler when it is first needed. Programs go into a compile cache as the compiler's wrapper
lays it out, and are executed by one process for all ranks, so that their collectives have values. There is no
compiler for the device and no device: nothing here says whether a program compiles for it, how fast it is, or whether
its memory suffices.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accel.backends.select import HARDWARE_ROOT_VARIABLE, Machine
from neuron_accel.errors import UsageError
from neuron_accel.neuron.instances import PRODUCT_NAME, find_instance
from neuron_accel.testing._call import free_port, main_script, pickle_call
from neuron_accel.testing.xla_ranks import QUICK_FLAGS, XlaTask, run_forked

_SOURCES = Path(__file__).with_name("emulation")
_CORES_OF_A_CHIP = 2
_QUICK_FLAGS = {**QUICK_FLAGS, "--xla_cpu_use_fusion_emitters": "false"}  # which take most of the time of compiling
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
    """What this machine lacks for an emulated device, as a sentence; None if it has everything."""
    if not sys.platform.startswith("linux"):
        return "an emulated Neuron device needs Linux"
    if not Machine().torch_xla:
        return "an emulated Neuron device needs torch_xla: pip install 'neuron-accel[xla]'"
    if _plugin() is None:
        return "an emulated Neuron device needs xla-cpu-pjrt: pip install 'neuron-accel[emulation]'"
    if _compiler() is None:
        return "an emulated Neuron device needs a C compiler: cc, gcc or clang on the PATH, or CC"
    return None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One program that a rank came to compile.

    Args:
        outcome: "collected" by a trial, "found" in the cache, or "compiled" because the cache did not have it.
        rank: the rank.
        module: its name in the cache.
    """

    outcome: str
    rank: int
    module: str


@dataclass(frozen=True, kw_only=True)
class EmulatedInstance:
    """A machine with Neuron cores that are emulated. Made by :func:`emulated_instance`.

    Args:
        folder: its files: devices below ``dev``, commands in ``bin``, the compile cache in ``cache``.
        cores: number of Neuron cores; a rank takes one.
        environ: environment variables of this process with those for processes on it. A launcher
            (``neuron-accel launch``, ``torchrun``) finds the cores with them, and ``neuron_parallel_compile`` on the
            PATH.
    """

    folder: Path
    cores: int
    environ: Mapping[str, str]

    @property
    def cache(self) -> Path:
        """The compile cache of runs that name no other."""
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
        """Calls ``fn(*args, **kwargs)`` on ``n`` ranks and returns what they returned, by rank.

        Each is a process with one core, started as torchrun starts one. ``torch.distributed`` is left to ``fn``, which
        ``NeuronAccelerator()`` initialises.

        Args:
            fn, n, args, kwargs, timeout, grace, env: as for :func:`neuron_accel.testing.run_ranks`.
            trial: only collect programs, as under ``neuron_parallel_compile``: all results are zero. A rank that ends
                with ``SystemExit(0)``, as a trial does, returns None.

        Raises:
            RanksError: if a rank raises, ends early, or runs out of time.
            UsageError: if the call itself is wrong.
        """
        call = pickle_call(fn, args, kwargs)
        if not 1 <= n <= self.cores:
            raise UsageError(f"{n} ranks do not fit on an emulated instance of {self.cores} cores.")
        task = XlaTask(
            size=n,
            call=call,
            environ={**self.environ, **_ranks_environment(n), **(_TRIAL if trial else {}), **(env or {})},
            timeout=timeout,
            grace=grace,
            syspath=list(sys.path),
            main=main_script(call),
        )
        return run_forked("neuron_accel.testing._neuron_server", task, self.environ)

    @property
    def compilations(self) -> list[Compilation]:
        """Every program that ranks came to compile since the machine was made, in order."""
        path = self.folder / "compilations"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Compilation(outcome=o, rank=int(r), module=m) for o, r, m in map(str.split, lines)]

    def graphs(self, rank: int) -> list[Path]:
        """Files of the programs that a rank compiled, each a serialized HloModuleProto, in order; the latest run's."""
        return sorted((self.folder / "graphs").glob(f"rank{rank}_*.hlo"))

    def forget_graphs(self) -> None:
        """Empties what :meth:`graphs` shows."""
        for path in (self.folder / "graphs").iterdir():
            path.unlink()


_TRIAL = {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}


@contextmanager
def emulated_instance(instance: str | None = None, *, cores: int = 8) -> Iterator[EmulatedInstance]:
    """An emulated machine, in a temporary folder that only this user may read and that ends with the context.

    Args:
        instance: the type that it says it is, such as "trn1.2xlarge", which has its number of cores; None for one that
            says nothing.
        cores: number of cores of one that says nothing.

    Raises:
        UsageError: if this machine lacks something, see :func:`missing`.
        ConfigurationError: for an instance that does not exist.
    """
    lacks = missing()
    if lacks:
        raise UsageError(f"There is no emulated Neuron device here: {lacks}.")
    if instance is not None:
        cores = find_instance(instance).cores()
    built = build()
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-neuron-{os.getpid()}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _make_machine(folder, instance, cores)
        yield EmulatedInstance(folder=folder, cores=cores, environ=_environment(folder, cores, built))


def _make_machine(folder: Path, instance: str | None, cores: int) -> None:
    for part in ("dev", "bin", "site/libneuronxla", "graphs", "cache"):
        (folder / part).mkdir(parents=True)
    chips = -(-cores // _CORES_OF_A_CHIP)
    for chip in range(chips):
        (folder / "dev" / f"neuron{chip}").touch()
    if instance is not None:
        product = folder / PRODUCT_NAME.relative_to("/")
        product.parent.mkdir(parents=True)
        product.write_text(f"{instance}\n")
    (folder / "site/libneuronxla/__init__.py").write_text(_STUB)
    (folder / "site/libneuronxla/libneuronpjrt_path.py").write_text(_STUB_PATH)
    metadata = folder / "site/torch_neuronx-2.9.0.0.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.9.0.0.0\n")
    listing = [{"neuron_device": chip, "nc_count": _CORES_OF_A_CHIP} for chip in range(chips)]
    (folder / "neuron-ls.json").write_text(json.dumps(listing))
    compiler = _COMMAND.format(python=sys.executable, module="neuron_accel.testing._parallel_compile")
    for name, text in {
        "neuron_parallel_compile": compiler,
        "neuron-ls": _LIST.format(path=folder / "neuron-ls.json"),
    }.items():
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o700)


def _environment(folder: Path, cores: int, built: _Built) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    removed = {
        *("ACCELERATE_USE_CPU", "USE_TORCH_XLA", "DISABLE_XLA", "PJRT_DEVICE", "NEURON_ACCEL_BACKEND"),
        *("NEURON_CC_FLAGS", "NEURON_LIBRARY_PATH", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
    return {
        **{name: value for name, value in os.environ.items() if name not in removed},
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), *(path for path in sys.path if path)]),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
        HARDWARE_ROOT_VARIABLE: str(folder),
        "NEURON_COMPILE_CACHE_URL": str(folder / "cache"),
        "NEURON_ACCEL_EMULATION": str(folder),
        "NEURON_ACCEL_EMULATED_DEVICE": str(built.device),
        "NEURON_ACCEL_EMULATED_BROKER": str(built.broker),
        "NEURON_ACCEL_EMULATED_PLUGIN": str(_plugin()),
        "NEURON_ACCEL_EMULATED_CORES": str(cores),
        "NEURON_ACCEL_EMULATED_GRAPHS": str(folder / "graphs"),
        "XLA_FLAGS": " ".join([flags, *(f"{k}={v}" for k, v in _QUICK_FLAGS.items() if k not in flags)]).strip(),
        "NPROC": "64",  # every rank of a collective blocks a thread of XLA's
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _ranks_environment(size: int) -> dict[str, str]:
    """What torchrun says to all ranks; a rank adds its number."""
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "emulated",
        "GLOO_SOCKET_IFNAME": "lo",
    }


# ---- building -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Built:
    device: Path
    broker: Path


def build() -> _Built:
    """The plugin and its broker, built unless a build of the same sources is there. Safe beside other builders.

    Raises:
        UsageError: if the compiler refuses.
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
            with contextlib.suppress(OSError):  # another builder was first
                temporary.rename(folder)
    return built


def _build_folder() -> Path:
    """Where builds are kept. Programs are executed from there, so no other user may write to it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(home, "neuron_accel"), Path(tempfile.gettempdir(), f"neuron_accel-{os.getuid()}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
    raise UsageError(
        "There is no folder to build the emulated Neuron device in.", fix="set XDG_CACHE_HOME to a folder of your own"
    )


def _compile(command: list[str | Path]) -> None:
    result = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise UsageError(
            f"The emulated Neuron device cannot be built: {result.stderr.strip()[-2000:]}",
            where=" ".join(map(str, command)),
            fix="install a C compiler with its headers, or name another one in CC",
        )


def _compiler() -> list[str] | None:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = name.split()
        if words and shutil.which(words[0]):
            return words
    return None


def _plugin() -> Path | None:
    """XLA's CPU plugin, which comes with its header."""
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found = Path(folder, "xla_cpu_pjrt.so")
            if found.exists() and Path(folder, "include", "pjrt_c_api.h").exists():
                return found
    return None

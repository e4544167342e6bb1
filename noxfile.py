"""Tasks of this repository, each in an environment of its own: ``nox --list`` shows them.

``nox`` runs what must hold: lint, then the tests on both lines of torch, and those of each package under ``plugins``.
``nox -s tests -- -k launch`` passes arguments on to pytest. Sessions run on the Python that runs nox;
``--force-python 3.12`` takes another.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "xla", "plugins", "tests"]
nox.options.reuse_venv = "yes"

NATIVE_TORCH = "torch==2.13.*"
"""The line of torch that native Neuron (Trn2, Trn3) is built for. Named first in every installation: left to a range,
pip would take the newest release there is."""


ON_TORCH_2_9 = [
    "tests/distributed/backends/test_collectives.py",
    "tests/distributed/backends/test_collectives_autograd.py",
    "tests/distributed/cli/test_restarts.py",
    "tests/distributed/cli/test_smoke.py",
    "tests/xla",
    "tests/neuron",
    "tests/docs/test_guides.py::test_what_a_guide_shows_of_torch_xla_runs",
]
"""What tells, beside the unit tests, whether the older line of torch works; the newer one runs everything."""

PARALLEL = ["-n", "auto", "--maxprocesses", "8"]
"""One process a core. Tests with ranks wait more than they compute; a process and its ranks take about 2 GB."""

PACKAGES = sorted(path.parent.name for path in Path("plugins").glob("*/pyproject.toml"))

PACKAGES_ON_XLA = [
    "neuron-accel-context-parallel/tests/test_cp_xla.py::test_a_step_is_one_graph_on_every_rank",
    "neuron-accel-expert-parallel/tests/test_ep_padded.py::test_trains_like_one_process_on_xla[ep2]",
    "neuron-accel-expert-parallel/tests/test_ep_padded.py::test_a_step_is_one_graph_on_every_rank",
    "neuron-accel-local-sgd/tests/test_local_sgd_conformance.py::TestDiLoCo::test_trains_like_one_process[alone-xla]",
    "neuron-accel-lora/tests/test_lora_conformance.py::TestLora::test_trains_like_one_process[alone-xla]",
    "neuron-accel-lora/tests/test_lora_parity.py::test_weights_under_adapters_are_sharded_on_xla_ranks[fully-sharded-xla]",
]
"""One training of each package under ``plugins`` on XLA ranks, and that a step is one graph. Their own session has no
torch_xla; ``pytest -k xla`` in a package's folder runs all that it has, which takes minutes."""


@nox.session
def lint(session: nox.Session) -> None:
    """Style, imports, formatting and types, also those that a user's script sees (tests/typing)."""
    install(session, NATIVE_TORCH, ".[lint]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, on torch 2.13."""
    install(session, NATIVE_TORCH, ".[test]")
    if not session.posargs:
        check_installation(session)
    record, environment = record_of(session), {"ACCELERATE_SDIST": accelerates_tests(session)}
    if not session.posargs:
        session.run("pytest", *PARALLEL, "tests/unit")
    rest = session.posargs or [*PARALLEL, "--ignore-glob=tests/unit/*"]
    session.run("pytest", f"--record-runs={record}", *rest, env=environment)
    if not session.posargs:
        session.run("python", "-m", "tests.what_runs", record, "--check", "--kinds", "gloo", "native")


@nox.session
def xla(session: nox.Session) -> None:
    """On torch 2.9 with torch_xla (the line of Trn1): real XLA ranks, an emulated Neuron device where there is a C
    compiler, and that the CPU stays the default there."""
    install(session, ".[emulation,test]")
    session.run("python", "-c", "import torch, torch_xla; print(torch.__version__, torch_xla.__version__)")
    record = record_of(session)
    if not session.posargs:
        session.run("pytest", *PARALLEL, "tests/unit")
    session.run("pytest", f"--record-runs={record}", *(session.posargs or [*PARALLEL, *ON_TORCH_2_9]))
    if not session.posargs:
        session.run("pytest", "-k", "xla", "tests/conformance_kit")
        for package in PACKAGES:
            shutil.rmtree(Path("plugins", package, "build"), ignore_errors=True)
        session.install("--no-deps", *(f"./plugins/{package}" for package in PACKAGES))
        session.install("peft>=0.21")  # what LoRA needs beside the others
        session.run("pytest", *(f"plugins/{test}" for test in PACKAGES_ON_XLA))
        session.run("python", "-m", "tests.what_runs", record, "--check", "--kinds", "xla", "neuron")


ON_TORCH_2_14 = [
    "tests/unit",
    "tests/distributed/test_parity.py",
    "tests/distributed/backends",
    "tests/distributed/cli/test_smoke.py",
    "tests/distributed/strategies/zero1",
]
"""What tells whether the newest torch that is allowed works."""


@nox.session
def newest(session: nox.Session) -> None:
    """On torch 2.14, the newest line that native Neuron is built for."""
    install(session, "-c", "constraints/native-2.14.txt", ".[native,test]")
    session.run("pytest", *(session.posargs or ON_TORCH_2_14))


@nox.session
def storage(session: nox.Session) -> None:
    """Checkpoints on an S3 server on the loopback, which some fifty further packages make possible."""
    install(session, NATIVE_TORCH, ".[s3,test]", "moto[server]>=5")
    session.run("pytest", "tests/storage", "tests/unit/test_storage.py", *session.posargs)


@nox.session
def trackers(session: nox.Session) -> None:
    """Figures of a run report in each tracker of Accelerate; those beside tensorboard install some 150 packages."""
    install(session, NATIVE_TORCH, ".[test]", "wandb", "mlflow", "aim")
    file = "tests/distributed/strategies/run_report/test_run_report.py"
    session.run("pytest", file, "-m", "slow or not slow", "-k", "tracker or tensorboard", *session.posargs)


@nox.session
def cuda(session: nox.Session) -> None:
    """On however many NVIDIA GPUs there are: parity, compositions, checkpoints. Skipped without one."""
    if shutil.which("nvidia-smi") is None:
        session.skip("this machine has no NVIDIA GPU (no nvidia-smi)")
    install(session, NATIVE_TORCH, ".[test]")
    session.run("pytest", "tests/cuda", *session.posargs)


BESIDE = {"neuron-accel-expert-parallel": ["neuron-accel-lora"]}
"""Further packages with which the tests of one combine it."""


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def plugins(session: nox.Session, package: str) -> None:
    """A strategy shipped as a package of its own: its tests, in an environment without those that it does not name."""
    folder, beside = Path("plugins", package), [f"./plugins/{other}" for other in BESIDE.get(package, [])]
    for path in (folder, *map(Path, beside)):
        shutil.rmtree(path / "build", ignore_errors=True)
    install(session, NATIVE_TORCH, ".[conformance]", f"./{folder}[test]", *beside, "pytest-xdist>=3.6")
    with session.chdir(folder):
        session.run("pytest", *(session.posargs or PARALLEL))


@nox.session
def families(session: nox.Session) -> None:
    """Every causal family of transformers, tiny, sharded and in one process; writes docs/supported_models.md."""
    install(session, NATIVE_TORCH, ".[test]")
    sweep = ["python", "-m", "tests.sweeps.families"]
    if session.posargs:
        session.run(*sweep, *session.posargs)
        return
    for layouts in (["tp2", "tp2+sp"], ["pp2"], ["tp2 x dp2 + zero1", "tp4, 2 key/value heads"]):
        session.run(*sweep, "--write", "docs/supported_models.md", "--layouts", *layouts)


@nox.session
def families_graphs(session: nox.Session) -> None:
    """The graphs of a step of every causal family on XLA, checked for Trainium; writes docs/supported_models.md."""
    install(session, ".[xla,test]")
    sweep = ["python", "-m", "tests.sweeps.families", "--layouts", "graphs of zero1"]
    session.run(*sweep, *(session.posargs or ["--write", "docs/supported_models.md"]))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random training programs against one process: nox -s fuzz -- --cases 100 --first 1000 [--seed 17 --shrink]"""
    on_xla = any(argument.endswith("xla") for argument in session.posargs)
    if on_xla:
        install(session, ".[xla,test]")
    else:
        install(session, NATIVE_TORCH, ".[test]")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """An hour of training with saves, loads, evaluations and restarts, in which nothing may grow:
    nox -s soak -- --minutes 10 --backend xla"""
    if any(argument.endswith("xla") for argument in session.posargs):
        install(session, ".[xla,test]")
    else:
        install(session, NATIVE_TORCH, ".[test]")
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kills ranks and tools at every point, some hundred times, after which no checkpoint may be lost (40 minutes):
    nox -s chaos -- --kills 50 --launches 10"""
    install(session, NATIVE_TORCH, ".[test]")
    session.run("python", "-m", "tests.kills", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in docs/_build/html. Its links are followed, and its pages opened in a browser if there is Chromium."""
    install(session, NATIVE_TORCH, ".[docs]", "selenium>=4.20")
    session.run("sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html", *session.posargs)
    session.run("python", "-m", "tests.docs.site", "docs/_build/html")


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main example: nox -s quickstart -- --verify"""
    install(session, NATIVE_TORCH, ".[examples]")
    session.run("neuron-accel", "launch", "--nproc-per-node", "4", "examples/quickstart/train.py", *session.posargs)


def install(session: nox.Session, *requirements: str) -> None:
    """Installs requirements and this package, built from what is there now: setuptools would reuse files in ``build``
    that the sources no longer have."""
    shutil.rmtree("build", ignore_errors=True)
    session.install(*requirements)


def record_of(session: nox.Session) -> str:
    """The file in which a run of the tests writes down what ran where (tests/what_runs.py)."""
    return str(Path(session.virtualenv.location, "runs.json").absolute())


def accelerates_tests(session: nox.Session) -> str:
    """A folder with the source distribution of the Accelerate that is installed: only that has Accelerate's tests. It
    may lack it, where the package index does."""
    folder = Path(session.virtualenv.location, "accelerate_sdist")
    show = "import importlib.metadata; print(importlib.metadata.version('accelerate'))"
    version = str(session.run("python", "-c", show, silent=True)).strip()
    if not (folder / f"accelerate-{version}.tar.gz").is_file():
        download = ["pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "accelerate"]
        session.run(
            "python", "-m", *download, "--dest", str(folder), f"accelerate=={version}", success_codes=range(256)
        )
    return str(folder.absolute())


def check_installation(session: nox.Session) -> None:
    """Runs the smoke test away from the sources, which finds what the built package lacks. Not in nox's own temporary
    folder: that would become the tests' too, inside the sources and perhaps closed to other users."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        session.run("neuron-accel", "test")

"""Tasks of this repository, each in an environment of its own: ``nox --list`` shows them.

``nox`` runs what a change is judged by: style, types, and the first tier of the tests (tests/tiers.py) on both lines of
torch. ``nox -s full`` runs everything. ``nox -s tests -- -k launch`` passes arguments on to pytest. Sessions run on the
Python that runs nox; ``--force-python 3.12`` takes another.

Environments are made by uv where it is installed (``pip install 'nox[uv]'``), by pip otherwise.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests", "xla"]
nox.options.reuse_venv = "yes"

STARTED = time.monotonic()
atexit.register(lambda: print(f"nox > all of it took {(time.monotonic() - STARTED) / 60:.1f} minutes", flush=True))

NATIVE_TORCH = "torch==2.13.*"
"""The line of torch that native Neuron (Trn2, Trn3) is built for. Named first in every installation: left to a range,
pip would take the newest release there is."""

PACKAGES = sorted(path.parent.name for path in Path("plugins").glob("*/pyproject.toml"))
PACKAGE_FOLDERS = [f"./plugins/{package}" for package in PACKAGES]
PACKAGE_TESTS = [f"plugins/{package}/tests" for package in PACKAGES]
GUARDS = "./plugins/neuron-accel-guards"
EMULATION = "./plugins/neuron-accel-emulation"
FOLDERS_ON_XLA = [f"{EMULATION}[xla]", *(folder for folder in PACKAGE_FOLDERS if folder != EMULATION)]
BESIDE = {
    "neuron-accel-expert-parallel": ["neuron-accel-emulation", "neuron-accel-lora"],
    "neuron-accel-report": ["neuron-accel-emulation"],
}
"""Further packages with which the tests of one combine it."""
TESTING = "neuron-accel-testing"
"""With which packages are tested."""

PYTEST = ["python", "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.tiers", "-p", "tests.summary", "-rfEX"]
PARALLEL = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
"""One process a core. Tests with ranks wait more than they compute; a process and its ranks take about 2 GB."""

ON_TORCH_2_9 = [
    "tests/distributed/backends/test_collectives.py",
    "tests/distributed/backends/test_collectives_autograd.py",
    "tests/distributed/launch/test_restarts.py",
    "tests/distributed/cli/test_smoke.py",
    "tests/xla",
    "tests/neuron",
    "tests/conformance_kit/test_built_in.py::TestZero1::test_trains_like_one_process[alone-xla]",
    "tests/conformance_kit/test_built_in.py::TestZero1::test_frozen_parameters[xla]",
    "tests/conformance_kit/test_built_in.py::TestZero1::test_resumes[xla]",
    "tests/conformance_kit/test_built_in.py::TestSequenceParallel::test_trains_like_one_process[zero1-xla]",
    "tests/conformance_kit/test_built_in.py::TestSequenceParallel::test_trains_like_one_process[tp2-zero1-xla]",
    "tests/conformance_kit/test_cookbook.py::TestBF16Gradients::test_trains_like_one_process[alone-xla]",
    "tests/conformance_kit/test_cookbook.py::test_the_noise_scale_is_that_of_every_micro_batch_by_itself",
    "tests/conformance_kit/test_cookbook.py::test_the_average_is_the_one_of_torch_and_loads_on_another_mesh",
    "tests/conformance_kit/test_kit.py::test_on_xla_ranks",
    "tests/docs/test_guides.py::test_what_a_guide_shows_of_torch_xla_runs",
    "plugins/neuron-accel-context-parallel/tests/test_cp_xla.py::test_a_step_is_one_graph_on_every_rank",
    "plugins/neuron-accel-emulation/tests",
    "plugins/neuron-accel-expert-parallel/tests/test_ep_padded.py::test_trains_like_one_process_on_xla[ep2]",
    "plugins/neuron-accel-expert-parallel/tests/test_ep_padded.py::test_a_step_is_one_graph_on_every_rank",
    "plugins/neuron-accel-guards/tests/test_guards_xla.py",
    "plugins/neuron-accel-plan/tests/test_plan_script.py::test_every_strategy_counts_as_for_a_model",
    "plugins/neuron-accel-report/tests/test_report_xla.py",
    "plugins/neuron-accel-local-sgd/tests/test_local_sgd_conformance.py::TestDiLoCo::test_trains_like_one_process[alone-xla]",
    "plugins/neuron-accel-lora/tests/test_lora_conformance.py::TestLora::test_trains_like_one_process[alone-xla]",
    "plugins/neuron-accel-lora/tests/test_lora_parity.py::test_weights_under_adapters_are_sharded_on_xla_ranks[fully-sharded-xla]",
]
"""What tells, beside the unit tests, whether the older line of torch works; the newer one runs everything else."""


@nox.session
def tests(session: nox.Session) -> None:
    """Style, types and the first tier of all tests, on torch 2.13; nox -s tests -- --tier full: both tiers."""
    install(session, NATIVE_TORCH, ".[lint,test]", *PACKAGE_FOLDERS)
    tier = tier_of(session)
    if tier is None:
        session.run(*PYTEST, *session.posargs)
        return
    environment = {"ACCELERATE_SDIST": accelerates_tests(session)}
    if tier != "second":
        check_style(session)
        check_installation(session)
    packages = PACKAGE_TESTS if tier == "first" else []  # the others: in environments of their own
    run_tier(session, tier, "tests", *packages, env=environment)
    check_what_ran(session, tier, "gloo", "native")


@nox.session
def xla(session: nox.Session) -> None:
    """The first tier on torch 2.9 with torch_xla (the line of Trn1): real XLA ranks, an emulated Neuron device where
    there is a C compiler, and that the CPU stays the default there; nox -s xla -- --tier full: both tiers, and the unit
    tests."""
    install(session, ".[xla,test]", *FOLDERS_ON_XLA)
    tier = tier_of(session)
    if tier is None:
        session.run(*PYTEST, *session.posargs)
        return
    session.run("python", "-c", "import torch, torch_xla; print(torch.__version__, torch_xla.__version__)")
    if tier != "first":
        session.run(*PYTEST, *PARALLEL, "tests/unit")
    run_tier(session, tier, *ON_TORCH_2_9)
    check_what_ran(session, tier, "xla", "neuron")


@nox.session(default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def plugins(session: nox.Session, package: str) -> None:
    """A strategy shipped as a package of its own, in an environment without those that it does not name."""
    beside = [f"./plugins/{other}" for other in sorted({*BESIDE.get(package, []), TESTING} - {package})]
    install(
        session,
        NATIVE_TORCH,
        ".[conformance]",
        f"./plugins/{package}[test]",
        *beside,
        "pytest-xdist>=3.6",
    )
    codes = [0, 5] if session.posargs == ["--tier", "second"] else [0]  # 5: all of its cases are in the first tier
    session.run(*PYTEST, *PARALLEL, f"plugins/{package}/tests", *session.posargs, success_codes=codes)


@nox.session(default=False, venv_backend="none")
def full(session: nox.Session) -> None:
    """Both tiers on both lines of torch, and each package in an environment of its own; nox -s full -- --tier second:
    what nox has not run."""
    tier = session.posargs or ["--tier", "full"]
    for name in ("tests", "xla", *(f"plugins({package})" for package in PACKAGES)):
        session.notify(name, tier)


@nox.session(default=False)
def tiers(session: nox.Session) -> None:
    """Chooses the first tier anew by what each case executes (tests/tiers.py): nox -s tiers --force-python 3.12"""
    if sys.version_info < (3, 12):
        session.error("what is executed can be recorded from Python 3.12 on: nox -s tiers --force-python 3.12")
    folders = []
    for name, requirement, paths in (
        ("native", [NATIVE_TORCH, ".[test]", *PACKAGE_FOLDERS], ["tests", *PACKAGE_TESTS]),
        ("xla", [".[xla,test]", *FOLDERS_ON_XLA], ["tests/unit", *ON_TORCH_2_9]),
    ):
        install(session, *requirement)
        show = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = str(session.run("python", "-c", show, silent=True)).strip()
        imported = f"sys.path.append({str(Path.cwd())!r}); import tests.line_recorder as r; r.record_this_process()"
        hook = f"import sys; {imported}\n"
        Path(packages, "record_lines.pth").write_text(hook)
        folders.append(Path(session.create_tmp(), name).absolute())
        folders[-1].mkdir(exist_ok=True)
        environment = {"NEURON_ACCEL_RECORD_LINES": str(folders[-1])}
        session.run(*PYTEST, *PARALLEL, *paths, env=environment, success_codes=[0, 1])
    session.run("python", "-m", "tests.tiers", *map(str, folders), *(session.posargs or ["--write"]))


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Style, imports, formatting and types, also those that a user's script sees (tests/typing)."""
    install(session, NATIVE_TORCH, ".[lint]")
    check_style(session)


UPSTREAM = ["torch", "transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "packaging"]
"""What changes beneath this package."""


def is_installed(python: str) -> bool:
    """Whether an interpreter starts: that of a version manager may be there and refuse to."""
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0


NEWEST_PYTHON = next((version for version in ("3.14", "3.13", "3.12") if is_installed(f"python{version}")), None)


@nox.session(default=False, python=NEWEST_PYTHON)
def newest(session: nox.Session) -> None:
    """The first tier on the newest releases that are allowed, and on the newest Python up to 3.14 that is installed."""
    if session.python != "3.14":
        session.warn(f"Python 3.14 is not installed: this runs on {session.python or 'the Python that runs nox'}")
    install(session, ".[test]", *PACKAGE_FOLDERS)
    session.run(*PYTEST, *(session.posargs or ["--tier=first", *PARALLEL, "tests", *PACKAGE_TESTS]))


@nox.session(default=False)
def oldest(session: nox.Session) -> None:
    """The first tier on the lowest releases that are allowed; needs uv, which finds them."""
    if session.venv_backend != "uv":
        session.skip("finding the lowest releases needs uv: pip install 'nox[uv]'")
    install(session, "--resolution", "lowest-direct", ".[test]")
    session.run(*PYTEST, *(session.posargs or ["--tier=first", *PARALLEL, "tests"]))


@nox.session(default=False)
def upstream(session: nox.Session) -> None:
    """The first tier on the newest release of everything beneath this package, whatever its bounds say, and a table of
    what broke."""
    install(session, ".[test]", *PACKAGE_FOLDERS)
    session.install("--upgrade", *UPSTREAM)
    report = Path(session.create_tmp(), "report.xml").absolute()
    arguments = session.posargs or ["--tier=first", *PARALLEL, "tests", *PACKAGE_TESTS]
    session.run(*PYTEST, f"--junit-xml={report}", *arguments, success_codes=[0, 1])
    session.run("python", "-m", "tests.upstream", str(report), *UPSTREAM)


@nox.session(default=False)
def storage(session: nox.Session) -> None:
    """Checkpoints on an S3 server on the loopback, which some fifty further packages make possible."""
    install(session, NATIVE_TORCH, ".[s3,test]", "moto[server]>=5")
    session.run("pytest", "tests/storage", "tests/unit/test_storage.py", *session.posargs)


@nox.session(default=False)
def slurm(session: nox.Session) -> None:
    """Batch files of launch, run by Slurm: a controller and three nodes on this machine, started and stopped here."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        session.skip("this starts Slurm's daemons as root: apt-get install slurmctld slurmd slurm-client munge")
    install(session, ".[xla,test]", f"{EMULATION}[xla]")
    session.run(*PYTEST, "tests/slurm", *session.posargs, env={"NEURON_ACCEL_SLURM": "1"})


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """Ray Train on a cluster of nodes on this machine, of which one is removed."""
    install(session, NATIVE_TORCH, ".[test]", "ray[train]>=2.60")
    session.run(*PYTEST, "tests/ray", *session.posargs)


@nox.session(default=False)
def trackers(session: nox.Session) -> None:
    """Figures of a run report in each tracker of Accelerate; those beside tensorboard install some 150 packages."""
    install(session, NATIVE_TORCH, ".[test]", "wandb", "mlflow", "aim")
    file = "plugins/neuron-accel-report/tests/test_report_runs.py"
    session.run("pytest", file, "-m", "slow or not slow", "-k", "tracker or tensorboard", *session.posargs)


@nox.session(default=False)
def cuda(session: nox.Session) -> None:
    """On however many NVIDIA GPUs there are: parity, the conformance kit, the Trainer. Skipped without one."""
    if shutil.which("nvidia-smi") is None:
        session.skip("this machine has no NVIDIA GPU (no nvidia-smi)")
    install(session, NATIVE_TORCH, ".[test]", GUARDS)
    session.run("pytest", "tests/cuda", *session.posargs)


@nox.session(default=False)
def families(session: nox.Session) -> None:
    """Every family of transformers, and many of diffusers, tiny, sharded and in one process; writes
    docs/supported_models.md."""
    install(session, NATIVE_TORCH, ".[test]")
    sweep = ["python", "-m", "tests.sweeps.families"]
    if session.posargs:
        session.run(*sweep, *session.posargs)
        return
    for layouts in (["tp2", "tp2+sp"], ["pp2"], ["tp2 x dp2 + zero1", "tp4, 2 key/value heads"]):
        session.run(*sweep, "--write", "docs/supported_models.md", "--layouts", *layouts)
    for kind in ("images", "images with text", "sequences to sequences", "speech to text", "speech, aligned"):
        for layouts in ([], ["--layouts", "tp2", "tp2+sp"]):
            session.run(*sweep, "--write", "docs/supported_models.md", "--kind", kind, *layouts)
    session.run(*sweep, "--write", "docs/supported_models.md", "--kind", "diffusion")  # no plan for other layouts
    # Columns of the first table alone: families that tests/sweeps/families.py names.
    session.run(*sweep, "--write", "docs/supported_models.md", "--popular", "--layouts", "planned")
    session.run(*sweep, "--write", "docs/supported_models.md", "--popular", "--layouts", "experts over 2 ranks")


@nox.session(default=False)
def scripts(session: nox.Session) -> None:
    """Training scripts of diffusers, transformers and accelerate, unmodified, with the class swapped, in checkouts:
    nox -s scripts -- ../diffusers ../transformers ../accelerate --write docs/guides/from-accelerate.md"""
    install(session, NATIVE_TORCH, ".[test]", "torchvision", "timm>=1")
    session.run("python", "-m", "tests.sweeps.scripts", *session.posargs)


@nox.session(default=False)
def families_graphs(session: nox.Session) -> None:
    """The graphs of a step of every causal family on XLA, checked for Trainium; writes docs/supported_models.md."""
    install(session, ".[xla,test]", EMULATION)
    sweep = ["python", "-m", "tests.sweeps.families", "--layouts", "graphs of zero1"]
    session.run(*sweep, *(session.posargs or ["--write", "docs/supported_models.md"]))


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Random training programs against one process: nox -s fuzz -- --cases 100 --first 1000 [--seed 17 --shrink]"""
    on_xla = any(argument.endswith("xla") for argument in session.posargs)
    if on_xla:
        install(session, ".[xla,test]", GUARDS)
    else:
        install(session, NATIVE_TORCH, ".[test]", GUARDS)
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """An hour of training with saves, loads, evaluations and restarts, in which nothing may grow:
    nox -s soak -- --minutes 10 --backend xla"""
    if any(argument.endswith("xla") for argument in session.posargs):
        install(session, ".[xla,test]")
    else:
        install(session, NATIVE_TORCH, ".[test]")
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session(default=False)
def chaos(session: nox.Session) -> None:
    """Kills ranks and tools at every point, some hundred times, after which no checkpoint may be lost (40 minutes):
    nox -s chaos -- --kills 50 --launches 10"""
    install(session, NATIVE_TORCH, ".[test]")
    session.run("python", "-m", "tests.kills", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, in docs/_build/html. Its links are followed, and its pages opened in a browser if there is Chromium."""
    install(session, NATIVE_TORCH, ".[docs]", *PACKAGE_FOLDERS, "selenium>=4.20")
    session.run("sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html", *session.posargs)
    session.run("python", "-m", "tests.docs.site", "docs/_build/html")


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """The main example: nox -s quickstart -- --verify"""
    install(session, NATIVE_TORCH, ".[examples]")
    session.run("neuron-accel", "launch", "--nproc-per-node", "4", "examples/quickstart/train.py", *session.posargs)


def install(session: nox.Session, *requirements: str) -> None:
    """Installs requirements and this package, built from what is there now: setuptools would reuse files in ``build``
    that the sources no longer have. Packages come from where pip is told to look, also with uv.

    Modules are compiled once, also where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers: otherwise each of
    some thousand processes of the tests compiles torch anew, for two to four seconds."""
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    for folder in (Path("."), *Path("plugins").iterdir()):
        shutil.rmtree(folder / "build", ignore_errors=True)
    same = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
    session.install(*requirements, env={uv: os.environ[pip] for uv, pip in same.items() if pip in os.environ})


def tier_of(session: nox.Session) -> str | None:
    """``"first"``, ``"second"`` or ``"full"``; None: the arguments are for pytest."""
    if not session.posargs:
        return "first"
    return session.posargs[1] if session.posargs[0] == "--tier" and len(session.posargs) == 2 else None


def run_tier(session: nox.Session, tier: str, *paths: str, env: Mapping[str, str] | None = None) -> None:
    """Runs a tier. What fails is repeated alone, which tells a fault from a test that depends on others or on a busy
    machine; of the latter a few are listed and let pass."""
    folder = Path(session.virtualenv.location).absolute()
    record, cache = folder / f"runs-{tier}.json", folder / "pytest_cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [*PYTEST, "-o", f"cache_dir={cache}"]
    try:
        session.run(*command, f"--tier={tier}", *PARALLEL, f"--record-runs={record}", *paths, env=env)
    except nox.command.CommandFailed:
        failed = cache / "v" / "cache" / "lastfailed"
        cases = list(json.loads(failed.read_text())) if failed.is_file() else []
        if not cases or len(cases) > 3 or not all(passes_alone(session, case, env) for case in cases):
            raise
        session.warn("failed beside other tests, passed alone: " + ", ".join(cases))


def passes_alone(session: nox.Session, case: str, env: Mapping[str, str] | None) -> bool:
    try:
        session.run(*PYTEST, "-p", "no:cacheprovider", case, env=env)
    except nox.command.CommandFailed:
        session.warn(f"fails alone, too: {case}")
        return False
    return True


def check_what_ran(session: nox.Session, tier: str, *kinds: str) -> None:
    """That both tiers together ran what the table of docs/guides/what-runs-where.md says."""
    if tier != "first":
        records = sorted(map(str, Path(session.virtualenv.location).absolute().glob("runs-*.json")))
        session.run("python", "-m", "tests.what_runs", *records, "--check", "--kinds", *kinds)


def check_style(session: nox.Session) -> None:
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


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

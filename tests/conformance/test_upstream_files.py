"""Accelerate's own test files, unmodified and whole, with the class swapped.

That of the schedulers forks two ranks. One more case runs several: ``test_map_location`` of
``test_state_checkpointing.py`` launches the file itself, whose main part trains, saves, and loads with every
``map_location``. Upstream skips it on the CPU (``require_non_cpu``), so
:func:`test_the_part_that_runs_on_several_ranks` runs that main part on two gloo ranks. Two cases with
``require_multi_device`` quantize with bitsandbytes over two GPUs of one process.

They are in Accelerate's source distribution only. ``nox -s tests`` downloads that of the version which is installed and
says where in ``ACCELERATE_SDIST``; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OF_THE_MACHINE = "test_free_memory_dereferences_prepared_components"
"""Compares the free memory of the machine, which others change; tests/distributed/loop/test_freed.py tells more."""
LACKING = ("test requires", "test is slow")
"""How Accelerate begins the reasons of tests that need other hardware, other packages, or much time."""


def source_distribution():
    """The archive of the installed version, or a skipped test."""
    version = importlib.metadata.version("accelerate")
    folder = os.environ.get("ACCELERATE_SDIST", "")
    archive = Path(folder, f"accelerate-{version}.tar.gz")
    if not folder or not archive.is_file():
        pytest.skip(
            f"ACCELERATE_SDIST={folder or '(not set)'} has no {archive.name}: pip download --no-deps --no-binary "
            f"accelerate accelerate=={version}"
        )
    return archive


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """A folder with ``tests``."""
    pytest.importorskip("parameterized", reason="Accelerate's tests need it")
    folder = tmp_path_factory.mktemp("accelerate")
    with tarfile.open(source_distribution()) as archive:
        members = [m for m in archive.getmembers() if Path(m.name).parts[1:2] == ("tests",)]
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.10.12 and 3.11.4
        archive.extractall(folder, members, **safely)
    (root,) = folder.iterdir()
    return root


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "test_accelerator.py",
        "test_data_loader.py",
        "test_optimizer.py",
        "test_scheduler.py",
        "test_state_checkpointing.py",
    ],
)
def test_upstream_file(upstream, tmp_path, name):
    report = tmp_path / "report.xml"
    options = ["-p", "swap_in", "-p", "no:cacheprovider", "-p", "no:cov", "-q", "--rootdir", ".", "-c", os.devnull]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--timeout",
            "120",
            f"--junitxml={report}",
            f"tests/{name}",
            "-k",
            f"not {OF_THE_MACHINE}",
        ],
        cwd=upstream,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",  # no test needs the hub; some would ask it all the same, and wait
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skipped = [case.find("skipped").get("message") for case in cases if case.find("skipped") is not None]
    assert len(cases) > len(skipped)
    assert all(reason.startswith(LACKING) for reason in skipped), skipped


@pytest.mark.parametrize("plugins", ["", "zero1"], ids=["plain", "zero1"])
@pytest.mark.parametrize("safetensors", ["True", "False"])
def test_the_part_that_runs_on_several_ranks(upstream, safetensors, plugins):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = upstream / "tests" / "test_state_checkpointing.py"
    result = subprocess.run(
        [*command, str(HERE / "run_upstream.py"), str(script), "--plugins", plugins],
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "USE_SAFETENSORS": safetensors,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    with contextlib.suppress(OSError):
        os.rmdir("/tmp/accelerate")  # the script's own folder, which it empties
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    assert ("writes safetensors and JSON too" in result.stderr) == (safetensors == "False")

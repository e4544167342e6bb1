"""Fixtures for tests that start ``neuron-accel``."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
import tempfile

import pytest

from neuron_accel.cli.main import main
from tests.forked_launch import PRELOADED, forked_ranks

MARKS = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "OMP_NUM_THREADS", "ACCELERATE_", "GLOO_", "LOCAL_", "GROUP_")
SECONDS = 60


class Launch:
    """``neuron-accel`` in a process forked from one that has imported torch, which is most of its start; with
    ``forked`` its ranks are, too. With ``host``, a network namespace, all of them are in it."""

    def __init__(self, command, environment, folder, forked, host=None):
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # there is one such process for all tests
        outputs = (str(self.stdout), str(self.stderr))
        self.process = context.Process(target=run_launcher, args=(command, environment, *outputs, forked, host))
        self.process.start()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def finish(self, timeout=SECONDS):
        """Exit code, standard output and error of the launcher and the ranks that it shows."""
        timeout *= float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
        self.process.join(timeout)
        assert not self.process.is_alive(), f"still running after {timeout} s: {self.stderr.read_text()}"
        return self.process.exitcode, self.stdout.read_text(), self.stderr.read_text()


def run_launcher(command, environment, stdout, stderr, forked, host):
    if host is not None:
        with open(f"/run/netns/{host}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    with forked_ranks() if forked else contextlib.nullcontext():
        code = main(command)
    sys.exit(code)


@pytest.fixture
def environment(tmp_path):
    """The environment of a shell: nothing that a launch sets is set already. Logs go where the test's files go."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(MARKS)}
    return {**inherited, "TMPDIR": str(tmp_path)}


@pytest.fixture
def start(environment, tmp_path):
    """Starts a launch in the background; ends it, should the test not have."""
    started = []

    def run(*arguments, command="launch", forked=False, host=None):
        folder = tmp_path / f"launch_{len(started)}"
        folder.mkdir()
        started.append(Launch([command, *arguments], environment, folder, forked, host))
        return started[-1]

    yield run
    for launch in started:
        launch.process.kill()
        launch.process.join(10)

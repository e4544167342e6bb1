"""Connecting to torch_xla's ranks, however the script that does it has set up torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Two devices of one process, each with a thread that is a rank, as torch_xla has them before replicas are set.
THREADS = """
import sys, threading
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from neuron_accel import ZeroRedundancyOptimizer
from neuron_accel.backends.xla import XlaBackend
from neuron_accel.backends.xla_channel import MEETING, Meeting

meeting, found, errors = Meeting(2, timeout=60), {}, []

def train(rank, device):
    torch_xla._XLAC._xla_set_default_device(device)
    MEETING.set(meeting)
    backend = XlaBackend.connect()
    weight = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0, grad_clipping=False, backend=backend)
    backend.step_boundary()
    gradient = torch.full((4,), float(2 * rank)).to(device)
    (weight * gradient).sum().backward()
    optimizer.step()
    found[rank] = (backend.rank, backend.world_size, backend.to_host(weight.detach()).tolist())

def begin(rank, device):
    try:
        train(rank, device)
    except BaseException as error:
        errors.append(error)
        meeting.abort()

threads = [threading.Thread(target=begin, args=item) for item in enumerate(xm.get_xla_supported_devices())]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
print([found[rank] for rank in sorted(found)])
"""

ALONE = """
import torch, torch_xla
from neuron_accel import ZeroRedundancyOptimizer
from neuron_accel.errors import UsageError

weight = torch.nn.Parameter(torch.zeros(4, device=torch_xla.device()))
try:
    ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)
    print("connected")
except UsageError as error:
    print(error)
"""


def run(script, **environ):
    left = {k: v for k, v in os.environ.items() if k not in ("ACCELERATE_USE_CPU", "USE_TORCH_XLA", "WORLD_SIZE")}
    settings = {"PJRT_DEVICE": "CPU", "NEURON_ACCEL_BACKEND": "xla", "NPROC": "8", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**left, **settings, **environ}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_replicas_that_no_one_has_set_are_set():
    printed = run(THREADS, CPU_NUM_DEVICES="2", XLA_FLAGS="--xla_backend_optimization_level=0")
    mean = [-1.0] * 4  # the mean of the gradients 0 and 2, once down
    assert printed.strip().splitlines()[-1] == str([(0, 2, mean), (1, 2, mean)])


@pytest.mark.parametrize(("launched", "said"), [("1", "connected"), ("2", "each rank would train alone")])
def test_ranks_that_torch_xla_cannot_connect_do_not_train_alone(launched, said):
    assert said in run(ALONE, WORLD_SIZE=launched, RANK="0", LOCAL_RANK="0")

"""The library finds the stand-in for the native Neuron device as it would the device."""

from __future__ import annotations

import os
import subprocess
import sys

from neuron_accel_emulation import native_ranks

from neuron_accel.testing import run_ranks


def found() -> dict:
    from accelerate import Accelerator
    from accelerate.utils import is_neuron_available

    from neuron_accel.backends.select import Machine, settle

    return {
        "probe": Machine().native_neuron,
        "decision": settle(os.environ).device,
        "accelerate": is_neuron_available(),
        "type": str(Accelerator().distributed_type),
        "device": str(Accelerator().device),
    }


def test_the_library_and_accelerate_find_it_by_themselves():
    for rank in run_ranks(found, 2, backend="native"):
        assert rank == {
            "probe": True,
            "decision": "neuron",
            "accelerate": True,
            "type": "DistributedType.MULTI_NEURON",
            "device": "neuron:0",
        }


def test_a_process_with_the_package_on_its_path_has_the_device_once_it_imports_torch(tmp_path):
    native_ranks.write_package(tmp_path)
    code = (
        "import torch\n"
        "assert torch.neuron.is_available() and torch.ones(2, device='neuron').sum().item() == 2\n"
        "from neuron_accel.backends.select import Machine\n"
        "assert Machine().native_neuron\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})

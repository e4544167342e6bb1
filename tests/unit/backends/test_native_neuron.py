"""The native backend on a fake ``neuron`` device: what can be tested without TorchNeuron."""

from __future__ import annotations

import os
import types
from unittest import mock

from neuron_accel.testing import run_ranks


def joined():
    """Runs in a process of its own, because a device can be registered only once per process."""
    import torch

    from neuron_accel.backends import process_group
    from neuron_accel.backends.torch_distributed import TorchBackend

    happened = []

    def current_device():
        happened.append("use of the device")
        return 0  # the runtime shows each process its own core only

    torch.utils.rename_privateuse1_backend("neuron")
    stand_in = types.ModuleType("torch.neuron")
    stand_in.is_available, stand_in.current_device = (lambda: True), current_device
    torch._register_device_module("neuron", stand_in)
    os.environ.update(WORLD_SIZE="4", RANK="3", LOCAL_RANK="3")
    with mock.patch("torch.distributed.init_process_group", lambda library, **_: happened.append(library)):
        device, owns = process_group.join("neuron", None)
    return happened, str(device), owns, TorchBackend(device).capabilities


def test_the_process_group_comes_first_and_each_process_has_one_device():
    happened, device, owns, capabilities = run_ranks(joined, 1, backend=None)[0]
    assert happened == ["neuron", "use of the device"]
    assert device == "neuron:0", "not the local rank's: one core is visible"
    assert owns
    assert "point-to-point" not in capabilities, "sending and receiving is not assumed"
    assert "host-reads" not in capabilities

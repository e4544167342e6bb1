"""The environment of a rank on an emulated core, and errors of such ranks."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from neuron_accel_emulation import emulated_instance
from neuron_accel_emulation.neuron_ranks import build, missing

from neuron_accel.errors import UsageError
from neuron_accel.testing import RanksError, run_ranks


def describe():
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    result = {
        "rank": accelerator.process_index,
        "ranks": accelerator.num_processes,
        "device": str(accelerator.device),
        "hardware": xm.xla_device_hw(accelerator.device),
        "pjrt": os.environ["PJRT_DEVICE"],
        "own devices": xr.addressable_device_count(),
        "core": os.environ["NEURON_RT_VISIBLE_CORES"],
        "process": os.getpid(),
    }
    accelerator.end_training()
    return result


@pytest.mark.timeout(240)
def test_a_rank_is_a_process_with_a_core_of_the_instance():
    with emulated_instance("trn1.32xlarge") as machine:
        found = machine.run(describe, 2, timeout=150, env={"NEURON_RT_VISIBLE_CORES": "4-5"})
    assert [rank["rank"] for rank in found] == [0, 1]
    assert [rank["core"] for rank in found] == ["4", "5"]
    assert len({rank["process"] for rank in found}) == 2
    for rank in found:
        assert rank["hardware"] == rank["pjrt"] == "NEURON"
        assert (rank["ranks"], rank["own devices"], rank["device"]) == (2, 1, "xla:0")


def reduced():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    mine = torch.arange(6.0).reshape(2, 3) * (accelerator.process_index + 1)
    mine = mine.to(accelerator.device)
    total = accelerator.reduce(mine, "sum").cpu()
    gathered = accelerator.gather(mine.to(torch.bfloat16)).cpu()
    flags = accelerator.gather(torch.tensor([accelerator.is_main_process]).to(accelerator.device)).cpu()
    scalar = accelerator.reduce(torch.tensor(5.5 + accelerator.process_index).to(accelerator.device), "mean").cpu()
    accelerator.end_training()
    return total.tolist(), gathered.tolist(), flags.tolist(), scalar.item()


@pytest.mark.timeout(240)
def test_collectives_between_processes_have_values():
    rows = torch.arange(6.0).reshape(2, 3)
    for found in run_ranks(reduced, 3, backend="neuron", timeout=150):
        assert found == ((rows * 6).tolist(), torch.cat([rows, rows * 2, rows * 3]).tolist(), [True, False, False], 6.5)


def one_fails():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    if accelerator.process_index:
        raise ValueError("this one")
    accelerator.reduce(torch.ones(2).to(accelerator.device)).cpu()


@pytest.mark.timeout(240)
def test_a_failure_ends_the_others_and_leaves_nothing():
    with emulated_instance() as machine:
        machine.run(os.getpid, 1)  # which starts the process that ranks are forked from
        with pytest.raises(RanksError, match="ValueError: this one"):
            machine.run(one_fails, 2, timeout=150, grace=1)
        for _ in range(100):
            if not processes_of(machine.folder):
                break
            time.sleep(0.1)
        assert not processes_of(machine.folder)
        assert not list(machine.folder.glob("broker-*")), "no socket"


def in_order(folder):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    path = Path(folder, "order")
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        with first(), path.open("a") as file:
            file.write(str(accelerator.process_index))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return path.read_text()


@pytest.mark.timeout(240)
def test_waiting_for_others_compiles_nothing(tmp_path):
    """torch_xla's own rendezvous sums integers on the device, in a graph of its own for each rank."""
    with emulated_instance() as machine:
        for order in machine.run(in_order, 2, str(tmp_path), timeout=150):
            assert order in ("0101", "0011")
        assert machine.compilations == []


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: brokers of its ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text:
            found.append(text)
    return found


def constants_of_ranks():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    # torch_xla makes 0 and 1 constants of the graph, which then differs between ranks.
    mine = torch.ones(2).to(accelerator.device) + accelerator.process_index
    accelerator.reduce(mine).cpu()


@pytest.mark.timeout(240)
def test_ranks_in_different_programs_are_told_so():
    with pytest.raises(RanksError, match="must compile the same program"):
        run_ranks(
            constants_of_ranks,
            2,
            backend="neuron",
            timeout=150,
            env={"NEURON_ACCEL_EMULATED_PATIENCE": "2"},
        )


@pytest.mark.timeout(240)
def test_a_core_has_one_process():
    with emulated_instance("trn1.2xlarge") as machine:
        path = machine.folder / "core0.lock"
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            with pytest.raises(RanksError, match="another process uses core 0"):
                machine.run(describe, 1, timeout=150)
        with pytest.raises(RanksError, match="there is no core 7 among 2"):
            machine.run(describe, 1, timeout=150, env={"NEURON_RT_VISIBLE_CORES": "7"})
        with pytest.raises(UsageError, match="3 ranks do not fit"):
            machine.run(describe, 3)


def test_the_machine_has_devices_and_commands():
    with emulated_instance("trn1.32xlarge") as machine:
        assert len(list((machine.folder / "dev").iterdir())) == 16
        assert machine.folder.stat().st_mode & 0o077 == 0
        listed = subprocess.run(["neuron-ls"], env=dict(machine.environ), capture_output=True, text=True, check=True)
        assert listed.stdout.count("nc_count") == 16
    assert not machine.folder.exists()


def test_two_builders_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=build) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(100)
        assert builder.exitcode == 0
    assert build().device.exists()
    (folder,) = (tmp_path / "neuron_accel").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["broker", "device.so"]


def test_without_a_compiler_it_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in missing()
    with pytest.raises(UsageError, match="C compiler"):
        run_ranks(describe, 1, backend="neuron")

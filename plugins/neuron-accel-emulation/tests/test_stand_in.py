"""The stand-in for the native Neuron device: a device and a process group that behave as documented."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from neuron_accel_emulation import StandIn, native_ranks
from torch import nn

from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.testing import RanksError, run_ranks


def test_nothing_is_registered_by_importing():
    code = (
        "import sys, torch\n"
        "from neuron_accel.testing import run_ranks, train_alone\n"
        "from neuron_accel_emulation.native_ranks import NATIVE\n"
        "assert not hasattr(torch, 'neuron')\n"
        "assert 'neuron' not in torch.distributed.Backend.backend_list\n"
        "assert not any(name.endswith(('_native_device', '_native_group')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(torch, "neuron")
    with pytest.raises(UsageError, match="no stand-in"):
        native_ranks.counts()


def test_options_are_read_strictly():
    for stand_in in (StandIn(), StandIn(send_receive=True), StandIn(integers=False)):
        assert StandIn.of(stand_in.environ()) == stand_in
    assert StandIn.of({}) == StandIn()
    with pytest.raises(ConfigurationError, match="colour"):
        StandIn.of({native_ranks.OPTIONS: "colour"})


# ---- tensors ---------------------------------------------------------------------------------------------------------
def views() -> None:
    t = torch.arange(6.0).view(2, 3).to("neuron")
    assert t.device == torch.device("neuron", 0)
    t.view(3, 2).t().mul_(2)
    assert t.cpu().tolist() == [[0, 2, 4], [6, 8, 10]], "views share memory"
    t[0, :2] = 5
    t.add_(1)[1].zero_()
    assert t.tolist() == [[6, 6, 5], [0, 0, 0]]
    assert t[t > 5].tolist() == [6, 6]
    out = torch.empty(0, device="neuron")
    torch.add(t, t, out=out)
    assert out.tolist() == [[12, 12, 10], [0, 0, 0]], "an output that grows"
    assert copy.deepcopy(t).data_ptr() != t.data_ptr()
    assert torch.equal(copy.deepcopy(t).cpu(), t.cpu())
    assert torch._foreach_add([t, out], 1)[1].tolist()[1] == [1, 1, 1]
    for bad in (lambda: torch.empty(2, device="neuron:1"), lambda: torch.neuron.set_device(1)):
        with pytest.raises(RuntimeError, match="one device"):
            bad()


def test_tensors():
    run_ranks(views, 1, backend="native")


def stored(folder: str) -> None:
    from safetensors.torch import load_file, save_file

    t = torch.arange(6.0, device="neuron")[1:4]
    file = io.BytesIO()
    torch.save({"t": t}, file)
    for where in ("cpu", "neuron", None):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["t"]
        assert loaded.device.type == (where or "neuron")
        assert loaded.tolist() == [1, 2, 3]
    path = str(Path(folder, "t.safetensors"))
    save_file({"t": t.contiguous()}, path)
    assert load_file(path)["t"].to("neuron").tolist() == [1, 2, 3]
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1, pin_memory=True)
    assert [batch.to("neuron", non_blocking=True).tolist() for batch in loader] == [[0, 1], [2, 3]]


def freed_memory():
    """A tensor whose storage is freed, and has memory again."""
    flat = torch.ones(6, device="neuron")
    view, storage = flat[2:].view(2, 2), flat.untyped_storage()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) was freed"):
        view + 1
    with pytest.raises(RuntimeError, match="24 bytes or none, not 8"):
        storage.resize_(8)
    storage.resize_(24)
    again = bool(view.isnan().all())
    flat.fill_(2)
    return again, view.cpu()


def test_storages_are_freed_and_allocated_anew():
    ((again, view),) = run_ranks(freed_memory, 1, backend="native")
    assert again
    assert torch.equal(view, torch.full((2, 2), 2.0))


def test_files_and_loaders(tmp_path):
    run_ranks(stored, 1, str(tmp_path), backend="native")


def random() -> None:
    torch.manual_seed(3)
    first, host = torch.randn(4, device="neuron"), torch.randn(4)
    state = torch.neuron.get_rng_state()
    dropped = F.dropout(torch.ones(64, device="neuron"))
    torch.neuron.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(64, device="neuron")).cpu(), dropped.cpu())
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4), host), "the device has a state of its own"
    assert torch.equal(torch.randn(4, device="neuron").cpu(), first.cpu())
    x = torch.ones(64, device="neuron", requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x), x, use_reentrant=False).sum().backward()
    assert set(x.grad.tolist()) == {0.0, 2.0}


def test_random_numbers():
    run_ranks(random, 1, backend="native")


def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 10))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        x = torch.arange(10, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(x)
            assert logits.dtype == torch.bfloat16
            loss = F.cross_entropy(logits, x.flip(0))
        assert loss.dtype == torch.float32
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def test_training_under_autocast_is_that_of_the_cpu():
    here, there = train("cpu"), run_ranks(train, 1, "neuron", backend="native")[0]
    assert there[0] == pytest.approx(here[0], rel=1e-2)
    for one, other in zip(here[1], there[1], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=2e-2)


# ---- the process group -----------------------------------------------------------------------------------------------
def documented() -> None:
    import torch.distributed as dist

    t = torch.ones(4, device="neuron")
    with pytest.raises(ValueError, match="splits have to be equal"):
        dist.all_to_all_single(torch.empty_like(t), t, [1, 3], [1, 3])
    for send in (lambda: dist.send(t, 1 - dist.get_rank()), lambda: dist.irecv(t, 1 - dist.get_rank())):
        with pytest.raises(NotImplementedError, match="does not implement"):
            send()
    with pytest.raises(ValueError, match="got one on cpu"):
        dist.all_reduce(torch.ones(1))
    big = torch.tensor([2**24 + 1 if dist.get_rank() else 0], device="neuron")
    dist.all_reduce(big)
    assert big.item() == 2**24, "sums of integers go through float32"
    alone = dist.new_group([0, 1])
    with pytest.raises(NotImplementedError, match="default group"):
        dist.barrier(group=alone)
    dist.barrier()


def test_the_process_group_offers_what_is_documented():
    run_ranks(documented, 2, backend="native")


def refuses_integers() -> None:
    import torch.distributed as dist

    with pytest.raises(RuntimeError, match="no integer reduction"):
        dist.all_reduce(torch.ones(1, dtype=torch.int64, device="neuron"))


def test_compilers_that_refuse_sums_of_integers():
    run_ranks(refuses_integers, 2, backend="native", env=StandIn(integers=False).environ())


def used_too_early() -> None:
    import torch.distributed as dist

    torch.ones(1, device="neuron")
    dist.init_process_group("neuron", init_method="env://")


def test_the_device_must_not_be_used_before_the_process_group_is_made(tmp_path):
    native_ranks.write_package(tmp_path)
    code = "from test_stand_in import used_too_early; used_too_early()"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "used before init_process_group" in done.stderr


def symbolic(dynamic):
    compiled = torch.compile(lambda x: x * 2, backend="neuron", dynamic=dynamic)
    return [compiled(torch.ones(rows, 3, device="neuron")).sum().item() for rows in (4, 5)]


def test_symbolic_sizes_are_refused_as_the_device_does():
    assert run_ranks(symbolic, 1, False, backend="native") == [[24.0, 30.0]]
    with pytest.raises(RanksError, match="Dynamic shape is not supported"):
        run_ranks(symbolic, 1, None, backend="native")  # torch.compile makes the second shape symbolic

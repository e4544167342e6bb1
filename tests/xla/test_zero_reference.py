"""ZeRO-1 against torch_xla's own ZeroRedundancyOptimizer, on the same ranks."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, token_batches
from tests.xla.hlo import collectives, instructions
from tests.xla.watching import StepWatcher, compiled, executed

STEPS = 4


def build():
    with one_at_a_time():
        torch.manual_seed(0)
        return MODELS["llama"]()


def shares(backend):
    for batch in token_batches(STEPS):
        yield {k: v.chunk(backend.world_size)[backend.rank].to(backend.device) for k, v in batch.items()}


def options():
    return {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01}


def ours():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": [{"zero1": {"max_norm": 0.5}}]}, plugins=[StepWatcher()]
    )
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **options()))
    norms = []
    for batch in shares(accelerator.run.backend):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        norms.append(optimizer.optimizer.grad_norm)
        optimizer.zero_grad()
    counts = {"graphs": compiled(), "executions": executed() // accelerator.world_size}
    hlo = accelerator.run.state(accelerator.plan.plugin("step_watcher"))["hlo"][-1]
    return accelerator.get_state_dict(model), [float(norm) for norm in norms], counts, hlo


def theirs():
    import torch_xla
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    model = build().to(backend.device)
    with one_at_a_time():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, max_norm=0.5, pin_layout=False, **options()
        )
    norms = []
    for batch in shares(backend):
        model(**batch).loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad(set_to_none=True)
        hlo = torch_xla._XLAC._get_xla_tensors_hlo(list(model.parameters()))
        backend.step_boundary()
    counts = {"graphs": compiled(), "executions": executed() // backend.world_size}
    return {name: value.cpu() for name, value in model.state_dict().items()}, [float(n) for n in norms], counts, hlo


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_weights_and_norms(ranks):
    ours_, norms, counts, hlo = run_ranks(ours, ranks, backend="xla", timeout=110)[0]
    theirs_, reference, their_counts, their_hlo = run_ranks(theirs, ranks, backend="xla", timeout=110)[0]
    assert norms == pytest.approx(reference, rel=1e-5)
    assert ours_.keys() == theirs_.keys()
    for name, value in theirs_.items():
        torch.testing.assert_close(ours_[name], value, rtol=1e-5, atol=1e-6)
    assert counts["graphs"] <= their_counts["graphs"], (counts, their_counts)
    assert counts["executions"] <= their_counts["executions"], (counts, their_counts)
    mine, other = collectives(hlo), collectives(their_hlo)
    print(
        f"{ranks} ranks, ours / theirs: {counts} / {their_counts}, instructions {instructions(hlo)} / "
        f"{instructions(their_hlo)}, collectives {len(mine)} / {len(other)}, bytes into them "
        f"{sum(c.size for c in mine)} / {sum(c.size for c in other)}"
    )
    assert len(mine) <= len(other)
    assert sum(c.size for c in mine) <= sum(c.size for c in other)

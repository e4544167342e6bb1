"""Optimizers that change weights outside of their step, and ones that hold another: under every strategy as in one
process, or an error."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.models import llama, token_batches
from tests.distributed.optimizers import SAM, Curvature, Delegating, Lookahead, ScheduleFree

STEPS = 4
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
LAYOUTS = {
    "dp": (2, []),
    "zero1": (2, ["zero1"]),
    "fully-sharded": (2, ["fully_sharded"]),
    "tp": (2, [TP2]),
    "tp-zero1": (4, [TP2, "zero1"]),
}
MASTERS = {"zero1-bf16": (2, ["zero1"]), "fully-sharded-bf16": (2, ["fully_sharded"])}


# ---- optimizers ------------------------------------------------------------------------------------------------------
def sgd(params, **options):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


ELEMENTWISE = {
    "schedule-free": ScheduleFree,
    "lookahead-sgd": lambda params: Lookahead(sgd(params)),
    "lookahead-adagrad": lambda params: Lookahead(torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1)),
    "lookahead-sgd-1": lambda params: Lookahead(sgd(params), k=1),
    "lookahead-adagrad-1": lambda params: Lookahead(torch.optim.Adagrad(params, lr=0.01), k=1),
    "average": lambda params: Delegating(sgd(params)),
}
FULL = {
    "curvature": Curvature,
    "lookahead-adafactor": lambda params: Lookahead(torch.optim.Adafactor(params, lr=1e-2)),
    "sam-closure": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "sam-steps": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
}


# ---- one loop, with and without an accelerator -----------------------------------------------------------------------
def train(make, name, batches, accelerator=None, dtype=torch.float32, between=None):
    torch.manual_seed(0)
    model = llama().to(dtype)
    optimizer = make(model.parameters())
    rank = 0 if accelerator is None else accelerator.data_parallel_rank
    size = 1 if accelerator is None else accelerator.data_parallel_size
    own, backward, reduce = optimizer, torch.Tensor.backward, lambda value: value
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        own, backward = optimizer.optimizer, accelerator.backward
        reduce = lambda value: accelerator.reduce(value, "mean")  # noqa: E731
    losses = []

    def forward(batch):
        mine = {k: v.chunk(size)[rank] for k, v in batch.items()}
        return model(**mine).loss

    for index, batch in enumerate(batches):
        if index == 2 and between is not None:
            between(accelerator, model, optimizer)
        model.train()
        if name == "schedule-free":
            optimizer.train()
        loss = forward(batch)
        backward(loss)
        losses.append(float(reduce(loss.detach())))
        if name == "sam-steps":
            own.first_step(zero_grad=True)
            backward(forward(batch))
            own.second_step(zero_grad=True)
        elif name == "sam-closure":

            def closure(batch=batch):
                optimizer.zero_grad()
                backward(forward(batch))

            optimizer.step(closure)
        else:
            if name == "curvature" and index % 2 == 0:
                own.update_curvature(decay=0.5)
            optimizer.step()
        optimizer.zero_grad()
        if index % 2 and name in ("schedule-free", "average"):
            model.eval()
            own.eval()
            with torch.no_grad():
                losses.append(float(reduce(forward(batches[0]))))
            if name == "average" and index + 1 < len(batches):
                own.train()
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return losses, {k: v.float().clone() for k, v in weights.items()}


def train_all(names, plugins, dtype=torch.float32):
    from neuron_accel import NeuronAccelerator, NeuronAccelError

    found = {}
    for name in names:
        accelerator = NeuronAccelerator(config={"plugins": [p if isinstance(p, dict) else {p: {}} for p in plugins]})
        try:
            found[name] = train({**ELEMENTWISE, **FULL}[name], name, token_batches(STEPS), accelerator, dtype)
        except NeuronAccelError as error:
            found[name] = f"{type(error).__name__}: {error}"
        accelerator.free_memory()
    return found


def assert_equal(found, expected, tolerance=1e-5):
    (losses, weights), (expected_losses, expected_weights) = found, expected
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    for key, value in expected_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=tolerance * 10 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_and_evaluates_like_one_process(layout):
    ranks, plugins = LAYOUTS[layout]
    shards_state = "zero1" in layout or "fully" in layout
    names = [name for name in (*ELEMENTWISE, *([] if shards_state else FULL)) if not name.endswith("-1")]
    found = run_ranks(train_all, ranks, names, plugins)[0]
    for name in names:
        assert not isinstance(found[name], str), f"{name}: {found[name]}"
        assert_equal(found[name], train({**ELEMENTWISE, **FULL}[name], name, token_batches(STEPS)))


@pytest.mark.parametrize("layout", MASTERS)
def test_what_an_optimizer_shows_of_its_master_weights(layout):
    """Masters are float32, so the model is compared with a float32 model's, to the precision of bfloat16."""
    ranks, plugins = MASTERS[layout]
    found = run_ranks(train_all, ranks, ["schedule-free", "average"], plugins, torch.bfloat16)[0]
    for name in ("schedule-free", "average"):
        losses, weights = found[name]
        expected = train(ELEMENTWISE[name], name, token_batches(STEPS))
        assert losses == pytest.approx(expected[0], rel=3e-3)
        for key, value in expected[1].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-2 * float(value.abs().max()), msg=key)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def train_through_a_checkpoint(names, plugins, folder):
    from neuron_accel import NeuronAccelerator

    def reload(accelerator, model, optimizer):
        accelerator.save_state(str(folder / name))
        accelerator.backward(model(**{k: v[:2] for k, v in token_batches(STEPS + 1)[-1].items()}).loss)
        optimizer.step()  # what follows undoes it
        optimizer.zero_grad()
        accelerator.load_state(str(folder / name))

    found = {}
    for name in names:
        accelerator = NeuronAccelerator(config={"plugins": [p if isinstance(p, dict) else {p: {}} for p in plugins]})
        found[name] = train(ELEMENTWISE[name], name, token_batches(STEPS), accelerator, between=reload)
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("layout", ["dp", "zero1", "tp"])
def test_a_checkpoint_has_the_state_of_the_optimizer_inside(layout, tmp_path):
    ranks, plugins = LAYOUTS[layout]
    names = ["lookahead-sgd-1", "lookahead-adagrad-1"]
    found = run_ranks(train_through_a_checkpoint, ranks, names, plugins, tmp_path)[0]
    for name in names:
        assert_equal(found[name], train(ELEMENTWISE[name], name, token_batches(STEPS)))


# ---- what cannot be done ---------------------------------------------------------------------------------------------
class Apart(torch.optim.Optimizer):
    """Holds an optimizer of some of its parameters."""

    def __init__(self, params):
        super().__init__(params, {})
        mine = self.param_groups[0]["params"]
        self.parts = [sgd(mine[:3]), sgd(mine[3:])]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Scheduled(torch.optim.SGD):
    """Holds a scheduler of itself."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self)


class Normalized(Curvature):
    """Shows weights that depend on all parameters."""

    eval = Curvature.normalize


def refused(plugin, make, method=None):
    from neuron_accel import NeuronAccelerator, NeuronAccelError

    accelerator = NeuronAccelerator(config={"plugins": [plugin]})
    model = llama()
    try:
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        accelerator.backward(model(**token_batches(1)[0]).loss)
        method(optimizer)
    except NeuronAccelError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        accelerator.free_memory()
    return "nothing"


BY_PARAMETER = {"zero1": {"partition": "parameters"}}
REFUSED = {
    "a closure": (BY_PARAMETER, FULL["sam-closure"], None, "SAM evaluates a closure inside its step"),
    "other groups": ({"zero1": {}}, Apart, None, "Apart holds an optimizer whose parameter groups"),
    "a scheduler": ({"zero1": {}}, Scheduled, None, "Scheduled holds a ConstantLR that refers to an optimizer"),
    "all parameters": ({"zero1": {}}, Curvature, lambda o: o.optimizer.normalize(), "Curvature.normalize cannot"),
    "some parameters": (BY_PARAMETER, Curvature, lambda o: o.optimizer.normalize(), "Curvature.normalize cannot"),
    "gradients": ({"zero1": {}}, Curvature, lambda o: o.optimizer.update_curvature(), "Curvature.update_curvature"),
    "a function": ({"zero1": {}}, Curvature, lambda o: o.optimizer.normalize(print), "with a builtin_function"),
    "an eval": ({"zero1": {}}, Normalized, None, "Normalized uses all parameters together"),
    "no tensors": ({"zero1": {}}, Curvature, lambda o: o.optimizer.rates(), "nothing"),
}


def refuse_all():
    return {name: refused(*given) for name, (*given, _) in REFUSED.items()}


def test_what_would_not_be_as_in_one_process_is_refused_by_name():
    for found in run_ranks(refuse_all, 2):
        for name, (*_, message) in REFUSED.items():
            assert message in found[name], name
        assert "or in its `train` and `eval`" in found["all parameters"]

"""Parameters that are frozen and unfrozen while a model trains: as in one process, whoever reduces their gradients."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from neuron_accel import DataParallelPlugin, Zero1Plugin
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import llama, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import pipeline
from tests.distributed.strategies.zero1.test_zero1 import Lamb

ROWS = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared = self.layers[1]

    def forward(self, x):
        for layer in (*self.layers, self.shared):
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def net():
    torch.manual_seed(0)
    return Net()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 6, generator=generator) for _ in range(count)]


# ---- which parameters train at which step ----------------------------------------------------------------------------
def gradually(step):
    """The last layer, then one more every two steps."""
    return {i for i in range(4) if i >= 3 - step // 2}


def backwards(step):
    """All, then one less every two steps."""
    return {i for i in range(4) if i >= step // 2}


def in_turns(step):
    """As in adversarial training; the second half has not trained when everything is prepared."""
    return {0, 1} if step % 2 == 0 else {2, 3}


def there_and_back(step):
    return {0, 1, 2, 3} if step in (0, 1, 5, 6, 7) else {1, 3}


SCHEDULES = {s.__name__: s for s in (gradually, backwards, in_turns, there_and_back)}


def train_only(model, trains):
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index in trains)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-2, weight_decay=0.1)


def adagrad(parameters):
    """It has state from the start, also for what is frozen."""
    return torch.optim.Adagrad(parameters, lr=3e-2, initial_accumulator_value=0.3)


def late_groups(optimizer, model, trains):
    """Groups for those that begin to train."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for index in sorted(trains):
        new = [p for p in model.layers[index].parameters() if p not in held]
        if new:
            optimizer.add_param_group({"params": new, "lr": 1e-2})


# ---- one process -----------------------------------------------------------------------------------------------------
def alone(make, schedule, *, adds=False, accumulation=1, max_norm=None, steps=8, zeroes=True):
    model = net()
    train_only(model, schedule(0))
    optimizer = make([p for p in model.parameters() if p.requires_grad or not adds])
    data = iter(batches(steps * accumulation))
    for step in range(steps):
        train_only(model, schedule(step))
        if adds:
            late_groups(optimizer, model, schedule(step))
        for x in itertools.islice(data, accumulation):
            (model(x) / accumulation).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- ranks -----------------------------------------------------------------------------------------------------------
def on_ranks(
    plugins,
    make,
    schedule,
    *,
    adds=False,
    accumulation=1,
    max_norm=None,
    steps=8,
    plain=False,
    lazily=False,
    by="accumulate",
):
    from neuron_accel import NeuronAccelerator
    from neuron_accel.engine.optim.twin import make_optimizer_constructor_lazy

    accelerator = NeuronAccelerator(
        plugins=plugins, gradient_accumulation_steps=accumulation if by == "accumulate" else 1
    )
    model = net()
    train_only(model, schedule(0))
    given = [p for p in model.parameters() if p.requires_grad or not adds]
    if lazily:
        optimizer = make_optimizer_constructor_lazy(torch.optim.Adagrad)(given, lr=3e-2, initial_accumulator_value=0.3)
    else:
        optimizer = make(given)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = iter(batches(steps * accumulation))
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    for step in range(steps):
        train_only(model, schedule(step))
        if adds:
            late_groups(optimizer, model, schedule(step))
        for index, x in enumerate(itertools.islice(data, accumulation)):
            last = index == accumulation - 1
            if by == "accumulate":
                context = accelerator.accumulate(model)
            else:
                context = nullcontext() if last else accelerator.no_sync(model)
            with context:
                loss = model(x.chunk(size)[rank])
                if plain:
                    (loss / accumulation).backward()
                else:
                    accelerator.backward(loss / (accumulation if by != "accumulate" else 1))
                if (by == "accumulate" and accelerator.sync_gradients) or (by != "accumulate" and last):
                    if max_norm:
                        accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.free_memory()
    return trained


def assert_same(expected, results, **tolerance):
    for found in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


REDUCERS = {
    "data-parallel": [],
    "data-parallel-buckets": [DataParallelPlugin(bucket_cap_mb=0.0002)],
    "zero1": [Zero1Plugin(bucket_cap_mb=0.0002)],
    "zero1-at-once": [Zero1Plugin()],
    "zero1-hook": [Zero1Plugin(use_grad_acc_hook=True)],
}


WAYS = {
    "accumulation": {"accumulation": 2},
    "no_sync": {"accumulation": 2, "by": "no_sync"},
    "plain backward": {"accumulation": 2, "plain": True, "by": "no_sync"},
    "clipping": {"max_norm": 0.01},
    "added groups": {"adds": True},
    "added groups, plain backward": {"adds": True, "plain": True, "by": "no_sync"},
}
CASES = {
    **{(reducer, schedule): (adamw, {}) for reducer in ("data-parallel", "zero1") for schedule in SCHEDULES},
    **{(reducer, "there_and_back"): (adamw, {}) for reducer in REDUCERS},
    **{(reducer, way): (adamw, {**WAYS[way]}) for reducer in ("data-parallel", "zero1") for way in WAYS},
    ("zero1", "state from the start"): (adagrad, {}),
    ("zero1", "state from a promise"): (adagrad, {"lazily": True}),
}


def all_cases():
    """Every case, one after another."""
    results = {}
    for (reducer, what), (make, options) in CASES.items():
        try:
            results[reducer, what] = on_ranks(REDUCERS[reducer], make, SCHEDULES.get(what, gradually), **options)
        except Exception as error:
            error.add_note(f"case {reducer}, {what}") if hasattr(error, "add_note") else None
            raise
    return results


@pytest.fixture(scope="module")
def found():
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_trains_like_one_process(case, found):
    make, options = CASES[case]
    of_one = {key: value for key, value in options.items() if key in ("adds", "accumulation", "max_norm")}
    expected = alone(make, SCHEDULES.get(case[1], gradually), **of_one)
    assert_same(expected, [results[case] for results in found])


# ---- together with model parallelism ---------------------------------------------------------------------------------
MODEL_STEPS = 5
COMPOSITIONS = {
    "tp2-sp": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"],
    "tp2-sp-zero1": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel", "zero1"],
    "tp2-zero1-whole": [{"model_parallelism": {"tensor_parallel_size": 2}}, {"zero1": {"partition": "parameters"}}],
    "pp2": [pipeline(2, 2)],
    "pp2-zero1": [pipeline(2, 2), "zero1"],
}


def tied_llama():
    torch.manual_seed(0)
    return llama(tied=True, kv_heads=2)


def train_layers(model, step):
    """The norm, then the layers from above, then the embedding, which is the head, too; the second layer no more at the
    end."""
    for name, parameter in model.named_parameters():
        if ".layers.0." in name:
            parameter.requires_grad_(step >= 1)
        elif ".layers.1." in name:
            parameter.requires_grad_(step < 4)
        elif "embed" in name:
            parameter.requires_grad_(step >= 2)


def lamb(parameters):
    return Lamb(parameters, lr=1e-2)


def usual(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.01)


def llama_alone(make, data):
    model = tied_llama()
    train_layers(model, 0)
    optimizer = make(model.parameters())
    norms = []
    for step, batch in enumerate(data):
        train_layers(model, step)
        model(**batch).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, norms


def llamas_on_ranks(compositions, data, backend=None):
    from neuron_accel import NeuronAccelerator

    results = {}
    for name, plugins in compositions.items():
        accelerator = NeuronAccelerator(config={"plugins": plugins, "backend": backend})
        with one_at_a_time():
            model = tied_llama()
        train_layers(model, 0)
        model, optimizer = accelerator.prepare(model, (lamb if "whole" in name else usual)(model.parameters()))
        rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
        norms = []
        for step, batch in enumerate(data):
            train_layers(model, step)
            share = {key: value.chunk(size)[rank].to(accelerator.device) for key, value in batch.items()}
            accelerator.backward(model(**share).loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        results[name] = accelerator.get_state_dict(model), [float(norm) for norm in norms]
        accelerator.free_memory()
    return results if accelerator.is_main_process else None


def assert_llamas(compositions, results, data):
    for name in compositions:
        weights, norms = results[name]
        expected, of_one = llama_alone(lamb if "whole" in name else usual, data)
        assert norms == pytest.approx(of_one, rel=1e-5), name
        for key, value in expected.items():
            torch.testing.assert_close(weights[key].cpu(), value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


def test_partial_and_tied_gradients():
    data = token_batches(MODEL_STEPS)
    assert_llamas(COMPOSITIONS, run_ranks(llamas_on_ranks, 4, COMPOSITIONS, data)[0], data)


# ---- ranks that run out of data --------------------------------------------------------------------------------------
COUNTS = (5, 2)
SHARES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(8)]


def uneven_alone(schedule):
    """What the first rank has, and the second while it has some, whose share counts half all the time."""
    model = net()
    train_only(model, schedule(0))
    optimizer = adamw(model.parameters())
    for step in range(max(COUNTS)):
        train_only(model, schedule(step))
        for rank in range(2):
            if step < COUNTS[rank]:
                (model(SHARES[step + 3 * rank]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, trained(model)


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def uneven_on_ranks():
    from neuron_accel import NeuronAccelerator

    results = {}
    for plugins in (DataParallelPlugin(bucket_cap_mb=0.0002), Zero1Plugin()):
        for name, schedule in SCHEDULES.items():
            accelerator = NeuronAccelerator(plugins=[plugins])
            model = net()
            train_only(model, schedule(0))
            model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
            rank = accelerator.process_index
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for step in range(COUNTS[rank]):
                    train_only(model, schedule(step))
                    accelerator.backward(model(SHARES[step + 3 * rank]))
                    optimizer.step()
                    optimizer.zero_grad()
            weights = {key: value.clone() for key, value in model.state_dict().items()}
            results[plugins.spec.name, name] = weights, trained(model)
            accelerator.free_memory()
    return results


def test_a_rank_without_data_follows_those_that_have_some():
    found = run_ranks(uneven_on_ranks, 2)
    for name, schedule in SCHEDULES.items():
        expected, names = uneven_alone(schedule)
        for plugin in ("data_parallel", "zero1"):
            assert_same(expected, [results[plugin, name][0] for results in found])
            assert [results[plugin, name][1] for results in found] == [names, names]


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def resume(folder, plugins, make, written, read):
    """Saves after step ``written`` of a gradual schedule, and goes on from there in a new run, prepared as at step
    ``read``."""
    from neuron_accel import NeuronAccelerator

    results = []
    for begins in (0, written + 1):
        accelerator = NeuronAccelerator(plugins=plugins)
        model = net()
        train_only(model, gradually(0 if begins == 0 else read))
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        if begins:
            accelerator.load_state(folder)
        rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
        for step, x in enumerate(batches(8)):
            if step < begins:
                continue
            train_only(model, gradually(step))
            accelerator.backward(model(x.chunk(size)[rank]))
            optimizer.step()
            optimizer.zero_grad()
            if step == written and not begins:
                accelerator.save_state(folder)
        results.append({key: value.clone() for key, value in model.state_dict().items()})
        accelerator.free_memory()
    return results


def resume_all(folder):
    cases = [(Zero1Plugin(), adamw), (DataParallelPlugin(), adamw), (Zero1Plugin(), adagrad)]
    return [
        result
        for number, (plugin, make) in enumerate(cases)
        for written, read in ((1, 1), (1, 5), (5, 0))
        for result in resume(folder / f"{number}-{written}-{read}", [plugin], make, written, read)
    ]


def test_checkpoints_from_before_and_after_unfreezing(tmp_path):
    of_adamw, of_adagrad = (alone(make, gradually) for make in (adamw, adagrad))
    for results in run_ranks(resume_all, 2, tmp_path):
        assert_same(of_adamw, results[:12])
        assert_same(of_adagrad, results[12:])


# ---- ranks that differ -----------------------------------------------------------------------------------------------
def differ(plugins):
    from neuron_accel import NeuronAccelerator, NeuronAccelError

    accelerator = NeuronAccelerator(plugins=plugins)
    model = net()
    train_only(model, {3})
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    try:
        for step, x in enumerate(batches(3)):
            train_only(model, {3} if step == 0 else {3, 1 + accelerator.process_index})
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
    except NeuronAccelError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("plugin", [DataParallelPlugin(), Zero1Plugin()], ids=["data-parallel", "zero1"])
def test_ranks_that_unfreeze_different_parameters_raise(plugin):
    for kind, message in run_ranks(differ, 2, [plugin]):
        assert kind == "DesyncError"
        assert "'layers.1.bias'" in message


def one_rank_unfreezes(plugins, layers, odd):
    """What is said where only one rank's layer 1 begins to train at step 1; ``layers``: those that trained at step 0,
    of which layer 1 rests at step 1."""
    from neuron_accel import NeuronAccelerator
    from neuron_accel.engine.optim import reducer

    reducer.MEET_S = 1.0
    accelerator = NeuronAccelerator(plugins=plugins)
    model = net()
    train_only(model, layers)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    rank = accelerator.process_index
    for step, x in enumerate(batches(4)):
        train_only(model, layers if step == 0 else {3, 1} if rank == odd and step > 1 else {3})
        accelerator.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plugin", [DataParallelPlugin(bucket_cap_mb=0.0002), Zero1Plugin(bucket_cap_mb=0.0002)])
@pytest.mark.parametrize("layers", [{3}, {1, 3}], ids=["never trained", "rested"])
def test_a_parameter_that_one_rank_alone_unfreezes_is_named_after_a_while(plugin, layers):
    with pytest.raises(RanksError) as caught:
        run_ranks(one_rank_unfreezes, 2, [plugin], layers, 1, timeout=60)
    error = caught.value.errors[1]
    assert type(error).__name__ == "DesyncError"
    assert "'layers.1." in str(error)
    assert "has begun to require a gradient on rank 1, and not on others" in str(error)


# ---- parameters that no optimizer holds ------------------------------------------------------------------------------
def unfreezes_what_no_optimizer_holds(plugins, adds):
    from neuron_accel import NeuronAccelerator
    from neuron_accel.errors import ParameterError

    accelerator = NeuronAccelerator(plugins=plugins)
    model = net()
    train_only(model, {3})
    model, optimizer = accelerator.prepare(model, adamw(p for p in model.parameters() if p.requires_grad))
    for step, x in enumerate(batches(4)):
        train_only(model, {3} if step < 2 else {2, 3})
        if adds and step == 2:
            optimizer.add_param_group({"params": list(model.layers[2].parameters())})
        accelerator.backward(model(x))
        try:
            optimizer.step()
        except ParameterError as error:
            return step, str(error)
        optimizer.zero_grad()
    return None, ""


@pytest.mark.parametrize("plugins", [[], [Zero1Plugin()]], ids=["data-parallel", "zero1"])
def test_a_parameter_that_begins_to_train_and_that_no_optimizer_holds_is_named(plugins):
    for rank, (step, message) in enumerate(run_ranks(unfreezes_what_no_optimizer_holds, 2, plugins, False)):
        assert step == 2
        assert "No optimizer holds layers.2.weight, layers.2.bias." in message
        assert f"rank {rank}" in message
    assert run_ranks(unfreezes_what_no_optimizer_holds, 2, plugins, True) == [(None, "")] * 2


class Switched(nn.Module):
    """The rows of one rank do not use the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(x if x.shape[0] == 1 else torch.tanh(self.second(x))).square().mean()


def unfreezes_while_buckets_are_sent(plugin):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[plugin])
    torch.manual_seed(0)
    model = Switched()
    model.first.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1 + accelerator.process_index, 6)))
        optimizer.step()
        optimizer.zero_grad()
        model.first.requires_grad_(True)
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    "plugin", [DataParallelPlugin(bucket_cap_mb=0.0001), Zero1Plugin()], ids=["data-parallel", "zero1"]
)
def test_parameters_join_in_a_pass_of_which_some_ranks_have_sent_more_than_others(plugin):
    model = torch.manual_seed(0) and Switched()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for rows in (1, 2):
            (model(torch.ones(rows, 6)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.first.requires_grad_(True)
    found = run_ranks(unfreezes_while_buckets_are_sent, 2, plugin, timeout=20)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


# ---- several backward passes for a step ------------------------------------------------------------------------------
def gradients_of_two_passes(compositions, data):
    from neuron_accel import NeuronAccelerator

    results = {}
    for name in compositions:
        accelerator = NeuronAccelerator(config={"plugins": COMPOSITIONS[name]})
        model = tied_llama()
        model, _ = accelerator.prepare(model, usual(model.parameters()))
        rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
        for batch in data:
            accelerator.backward(model(**{key: value.chunk(size)[rank] for key, value in batch.items()}).loss)
        results[name] = accelerator.get_gradients(model)
        accelerator.free_memory()
    return results


def test_gradients_that_are_sums_already_are_not_summed_again():
    data = token_batches(3)
    model = tied_llama()
    for batch in data:
        model(**batch).loss.backward()
    for name, gradients in run_ranks(gradients_of_two_passes, 4, ("tp2-sp", "tp2-sp-zero1"), data)[0].items():
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")

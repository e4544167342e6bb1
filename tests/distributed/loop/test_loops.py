"""An ordinary training loop has the results of one process under every composition of plugins."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.loop.loops_support import COMPOSITIONS, TP2, Tokens, adamw, assert_close, forward, model

SAMPLES, GLOBAL_BATCH, ACCUMULATION, EPOCHS, MAX_NORM = 18, 4, 2, 2, 0.5


def lr_factor(step):
    return 1 / (1 + step)


def epoch_in_one_process(ranks_with_data):
    """The indices of an epoch's global batches; the last is smaller, or padded if ranks need batches of equal size."""
    batches = [list(range(i, min(i + GLOBAL_BATCH, SAMPLES))) for i in range(0, SAMPLES, GLOBAL_BATCH)]
    if ranks_with_data > 1:
        batches[-1] += range(GLOBAL_BATCH - len(batches[-1]))
    return batches


def train_alone(ranks_with_data):
    torch.manual_seed(0)
    data, net = Tokens(SAMPLES), model()
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    norms, rates = [], []
    for _ in range(EPOCHS):
        batches = epoch_in_one_process(ranks_with_data)
        for i, indices in enumerate(batches):
            batch = torch.utils.data.default_collate([data[j] for j in indices])
            (forward(net, batch).loss / ACCUMULATION).backward()
            if (i + 1) % ACCUMULATION == 0 or i + 1 == len(batches):
                norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
                optimizer.step()
                for _ in range(ranks_with_data):
                    scheduler.step()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
    return norms, rates, net.state_dict()


def train_on_rank(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=ACCUMULATION)
    loader = DataLoader(Tokens(SAMPLES), batch_size=GLOBAL_BATCH // accelerator.data_parallel_size)
    net = model()
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    norms, rates, seen, norms_between = [], [], [], []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(forward(net, batch).loss)
                norm = accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(batch["index"]).tolist()
            if accelerator.sync_gradients:
                norms.append(float(norm))
                rates.append(scheduler.get_last_lr()[0])
            else:
                norms_between.append(float(norm))
    assert all(norm != norm for norm in norms_between)  # there is none yet: NaN
    return norms, rates, seen, accelerator.get_state_dict(net), accelerator.data_parallel_size


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_loop_with_everything(composition):
    ranks, plugins = COMPOSITIONS[composition]
    norms, rates, seen, weights, ranks_with_data = run_ranks(train_on_rank, ranks, plugins)[0]
    expected = run_ranks(train_alone, 1, ranks_with_data, backend=None)[0]
    assert norms == pytest.approx(expected[0], rel=1e-5)
    assert rates == pytest.approx(expected[1])
    assert seen == list(range(SAMPLES)) * EPOCHS
    assert_close(weights, expected[2])


def values_on_rank(plugins):
    """Calls every collective method of the accelerator that a loop uses."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    found = {
        "gather": accelerator.gather({"x": torch.tensor([rank, rank + 10])})["x"].tolist(),
        "gather scalar": accelerator.gather(torch.tensor(float(rank))).tolist(),
        "sum": accelerator.reduce(torch.tensor(rank + 1.0)).item(),
        "mean": accelerator.reduce(torch.tensor(rank + 1.0), "mean").item(),
        "scaled": accelerator.reduce(torch.tensor(rank + 1.0), "sum", scale=0.5).item(),
        "objects": accelerator.gather_for_metrics([f"from {rank}"], use_gather_object=True),
        "padded": tuple(accelerator.pad_across_processes(torch.ones(rank + 1, 2)).shape),
    }
    with accelerator.split_between_processes(["a", "b", "c"]) as mine:
        found["split"] = mine
    with accelerator.split_between_processes({"x": torch.arange(3)}, apply_padding=True) as mine:
        found["padded split"] = accelerator.gather(mine["x"]).tolist()
    found["no trigger"] = accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    found["trigger"] = accelerator.check_trigger()
    found["trigger again"] = accelerator.check_trigger()
    return size, rank, found


@pytest.mark.parametrize("composition", ["none", "tp2", "tp2-dp2-zero1-sp"])
def test_values_of_several_ranks(composition):
    ranks, plugins = COMPOSITIONS[composition]
    for size, rank, found in run_ranks(values_on_rank, ranks, plugins):
        everyone = range(size)
        assert found == {
            "gather": [x for r in everyone for x in (r, r + 10)],
            "gather scalar": [float(r) for r in everyone],
            "sum": sum(r + 1.0 for r in everyone),
            "mean": sum(r + 1.0 for r in everyone) / size,
            "scaled": 0.5 * sum(r + 1.0 for r in everyone),
            "objects": [f"from {r}" for r in everyone],
            "padded": (size, 2),
            "split": ["a", "b", "c"] if size == 1 else (["a", "b"], ["c"])[rank],
            "padded split": [0, 1, 2] if size == 1 else [0, 1, 2, 2],
            "no trigger": False,
            "trigger": True,
            "trigger again": False,
        }


class Numbers(IterableDataset):
    """Numbers from ``start``; fails on ranks that must not read it."""

    def __init__(self, count, start=0, readable=True):
        self.count, self.start, self.readable = count, start, readable

    def __len__(self):
        return self.count

    def __iter__(self):
        if not self.readable:
            raise AssertionError("only the main process reads")
        yield from torch.arange(self.start, self.start + self.count)


class Unsized(Numbers):
    """A dataset of unknown length."""

    __len__ = None  # type: ignore[assignment]


class PerWorker(Unsized):
    """A dataset of which each worker reads a different part."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


def read_on_rank(plugins):
    """The samples of loaders of every kind, gathered."""
    from accelerate.utils import DataLoaderConfiguration

    from neuron_accel import NeuronAccelerator

    def epochs(loader, options=None, skip=0, count=1):
        accelerator = NeuronAccelerator(
            config={"plugins": plugins}, dataloader_config=DataLoaderConfiguration(**(options or {}))
        )
        prepared = accelerator.prepare(loader)
        if skip:
            prepared = accelerator.skip_first_batches(prepared, skip)
        shares = [[b.tolist() for b in prepared] for _ in range(count)]
        seen = []
        for batch in prepared:
            seen += accelerator.gather_for_metrics(batch).tolist()
        return shares, seen, accelerator.data_parallel_rank

    main = int(torch.distributed.get_rank()) == 0
    numbers = torch.arange(11)
    dispatch, own, split = {"dispatch_batches": True}, {"dispatch_batches": False}, {"split_batches": True}
    return {
        "map": epochs(DataLoader(numbers, batch_size=2)),
        "map dispatched": epochs(DataLoader(numbers, batch_size=2), dispatch),
        "shuffled": epochs(DataLoader(numbers, batch_size=2, shuffle=True), count=2),
        "shuffled seedable": epochs(DataLoader(numbers, batch_size=2, shuffle=True), {"use_seedable_sampler": True}),
        "split": epochs(DataLoader(numbers, batch_size=4), {"split_batches": True}),
        "drop last": epochs(DataLoader(numbers, batch_size=2, drop_last=True)),
        "iterable": epochs(DataLoader(Numbers(11, readable=main), batch_size=2)),
        "iterable read by each": epochs(DataLoader(Numbers(11), batch_size=2), own, count=2),
        "iterable read by each, of no length": epochs(DataLoader(Unsized(13), batch_size=2), own),
        "iterable read by each, skipped": epochs(DataLoader(Unsized(13), batch_size=2), own, skip=1),
        "iterable read by each, split": epochs(DataLoader(Unsized(9), batch_size=4), {**own, "split_batches": True}),
        "iterable read by workers": epochs(DataLoader(PerWorker(11), batch_size=2, num_workers=2), own),
        "skipped": epochs(DataLoader(numbers, batch_size=2), skip=1),
        "skipped dispatched": epochs(DataLoader(Numbers(11, readable=main), batch_size=2), dispatch, skip=1),
        "map skipped dispatched": epochs(DataLoader(numbers, batch_size=2), dispatch, skip=1),
        "map skipped dispatched split": epochs(DataLoader(numbers, batch_size=4), {**dispatch, **split}, skip=1),
    }


@pytest.mark.parametrize("composition", ["none", "tp2", "tp2-dp2-zero1-sp"])
def test_loaders_of_every_kind(composition):
    ranks, plugins = COMPOSITIONS[composition]
    results = run_ranks(read_on_rank, ranks, plugins)
    size = len({result["map"][2] for result in results})
    for kind in results[0]:
        by_place = {}
        for result in results:
            shares, seen, place = result[kind]
            assert by_place.setdefault(place, shares) == shares, f"{kind}: ranks that share data read differently"
            assert seen == results[0][kind][1]
        shares, seen, _ = results[0][kind]
        expected = {
            "drop last": list(range(10 if size == 1 else 8)),
            "iterable read by each, of no length": list(range(13)),
            "iterable read by each, skipped": list(range(2 * size, 13)),
            "iterable read by each, split": list(range(9)),
            "skipped": list(range(2 * size, 11)),
            "skipped dispatched": list(range(2 * size, 11)),
            "map skipped dispatched": list(range(2 * size, 11)),
            "map skipped dispatched split": list(range(4, 11)),
        }.get(kind, list(range(11)))
        assert sorted(seen) == expected, kind
        if kind == "map skipped dispatched":  # the end is filled up with the same samples
            assert [results[0]["map dispatched"][0][0][1:]] == shares
        if kind == "shuffled":
            assert len({str(epoch) for epoch in [*shares, sorted(range(11))]}) == 3, "two epochs in the same order"


def unlike_samples_on_rank(plugins, dispatch):
    from accelerate.utils import DataLoaderConfiguration

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"plugins": plugins}, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    start = 100 * torch.distributed.get_rank()
    loader = accelerator.prepare(DataLoader(torch.arange(start, start + 8), batch_size=2))
    return [batch.tolist() for batch in loader]


def test_ranks_that_share_samples_must_read_the_same():
    with pytest.raises(RanksError) as caught:
        run_ranks(unlike_samples_on_rank, 2, COMPOSITIONS["tp2"][1], False)
    assert {type(error).__name__ for error in caught.value.errors.values()} == {"DesyncError"}
    assert "Rank 1 reads other samples than rank 0." in str(caught.value)
    results = run_ranks(unlike_samples_on_rank, 2, COMPOSITIONS["tp2"][1], True)
    assert results[0] == results[1] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def several_models_on_rank(plugins):
    """Two models that are trained in turn on each other's output, as in generative adversarial training."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}) if plugins is not None else None
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, n)) for n in (4, 1)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    data = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1))
    if accelerator is not None:
        maker, judge, *optimizers = accelerator.prepare(*nets, *optimizers)
    else:
        maker, judge = nets
    for batch in data:
        if accelerator is not None:
            batch = batch.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank]
        for turn, optimizer in ((1, optimizers[1]), (0, optimizers[0])):
            made = maker(batch)
            if turn:
                loss = judge(batch).square().mean() - judge(made.detach()).square().mean()
            else:
                loss = judge(made).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            optimizer.step()
    return [p.detach() for net in (maker, judge) for p in net.parameters()]


@pytest.mark.parametrize("composition", ["none", "zero1"])
def test_two_models_that_train_in_turn(composition):
    ranks, plugins = COMPOSITIONS[composition]
    expected = run_ranks(several_models_on_rank, 1, None, backend=None)[0]
    for found in run_ranks(several_models_on_rank, ranks, plugins):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def life_on_rank(plugins):
    """Preparing again after ``free_memory``, copies, trackers, and batch sizes that are too large."""
    from accelerate.tracking import GeneralTracker, on_main_process
    from accelerate.utils import find_executable_batch_size

    from neuron_accel import NeuronAccelerator

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "list", False

        def __init__(self):
            super().__init__()
            self.logged = []

        @property
        def tracker(self):
            return self.logged

        @on_main_process
        def store_init_configuration(self, values):
            self.logged.append(values)

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.logged.append((step, values))

    tracker = Tracker()
    accelerator = NeuronAccelerator(config={"plugins": plugins}, log_with=tracker)
    accelerator.init_trackers("project", {"lr": 1})
    batch = torch.utils.data.default_collate([Tokens(2)[i] for i in range(2)])
    tried, losses = [], []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        original = model()
        net, optimizer = accelerator.prepare(original, adamw(original.parameters()))
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        for _ in range(2):
            loss = forward(net, batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert accelerator.unwrap_model(net) is original
        copied = copy.deepcopy(accelerator.unwrap_model(net))
        with torch.no_grad():
            same = torch.equal(forward(copied, batch).loss, forward(net, batch).loss)
        accelerator.log({"loss": losses[-1]}, step=1)
        return same, len(accelerator._models)

    same, held = train()
    accelerator.clear()
    accelerator.end_training()
    return tried, losses, same, held, tracker.logged


@pytest.mark.parametrize("composition", ["none", "zero1", "tp2", "tp2-dp2-zero1-sp"])
def test_life_of_an_accelerator(composition):
    ranks, plugins = COMPOSITIONS[composition]
    results = run_ranks(life_on_rank, ranks, plugins)
    for rank, (tried, losses, same, held, logged) in enumerate(results):
        assert tried == [3, 2]
        assert losses[1] < losses[0]
        assert losses == pytest.approx(results[0][1])
        assert same
        assert held == 1
        assert logged == ([{"lr": 1}, (1, {"loss": losses[-1]})] if rank == 0 else [])


def prepared_again_on_rank(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, mixed_precision="bf16")
    net = torch.nn.Linear(2, 1)
    for _ in range(3):
        prepared, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(prepared(torch.ones(1, 2) * (1 + accelerator.data_parallel_rank)).sum())
        optimizer.step()
        accelerator.free_memory()
    return net.weight.detach().clone()


@pytest.mark.parametrize("composition", ["none", "zero1"])
def test_a_whole_model_can_be_prepared_again(composition):
    ranks, plugins = COMPOSITIONS[composition]
    weights = run_ranks(prepared_again_on_rank, ranks, plugins)
    assert torch.equal(weights[0], weights[1])


def local_sgd_on_rank(plugins):
    from accelerate.local_sgd import LocalSGD

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1, bias=False)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    apart = []
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2, enabled=True) as local:
        for step in range(8):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.full((1, 2), float(step + accelerator.data_parallel_rank))).sum())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    weights = accelerator.gather(net.weight.detach())
                    apart.append(not torch.equal(weights[0], weights[1]))
                    local.step()
    return apart, net.weight.detach()


def test_local_sgd():
    results = run_ranks(local_sgd_on_rank, 2, [])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0] == [True, True, True, True]  # before each meeting, ranks went their own way
    torch.manual_seed(0)
    start = torch.nn.Linear(2, 1, bias=False).weight
    mean_inputs = sum(step + 0.5 for step in range(8)) / 2  # linear: averaging weights is averaging gradients
    torch.testing.assert_close(results[0][1], start - 0.1 * mean_inputs)


LOCAL_STEPS, LOCAL_ACCUMULATION, LOCAL_UPDATES = 2, 2, 5


def batches_of_each(ranks_with_data):
    """The rows of each data-parallel rank, for every micro-batch."""
    data = Tokens(2 * ranks_with_data * LOCAL_ACCUMULATION * LOCAL_UPDATES).ids
    return data.view(LOCAL_ACCUMULATION * LOCAL_UPDATES, ranks_with_data, 2, -1)


def local_sgd_of_a_llama(plugins, enabled, max_norm=None, low_precision=False):
    """The weights, and the warnings of steps."""
    from accelerate.local_sgd import LocalSGD

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=LOCAL_ACCUMULATION)
    net = model().bfloat16() if low_precision else model()
    net, optimizer = accelerator.prepare(net, adamw(net.parameters(), 1e-2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=LOCAL_STEPS, enabled=enabled) as local:
            for batch in batches_of_each(accelerator.data_parallel_size):
                with accelerator.accumulate(net):
                    ids = batch[accelerator.data_parallel_rank]
                    accelerator.backward(net(input_ids=ids, labels=ids).loss)
                    if max_norm:
                        accelerator.clip_grad_norm_(net.parameters(), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        local.step()
    return accelerator.get_state_dict(net), [str(w.message) for w in caught if "LocalSGD" in str(w.message)]


def local_sgd_by_hand(ranks_with_data, max_norm):
    """One model per data-parallel rank, in one process."""
    nets = [model() for _ in range(ranks_with_data)]
    optimizers = [adamw(net.parameters(), 1e-2) for net in nets]

    def meet():
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack([p.data for p in parameters]).mean(0)
            for parameter in parameters:
                parameter.data.copy_(mean)

    for i, batch in enumerate(batches_of_each(ranks_with_data), 1):
        for net, optimizer, ids in zip(nets, optimizers, batch, strict=True):
            (net(input_ids=ids, labels=ids).loss / LOCAL_ACCUMULATION).backward()
            if i % LOCAL_ACCUMULATION == 0:
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        if i % (LOCAL_ACCUMULATION * LOCAL_STEPS) == 0:
            meet()
    meet()
    return nets[0].state_dict()


PP2 = {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}


@pytest.mark.parametrize(
    ("ranks", "plugins"),
    [(2, []), (4, [TP2]), (4, [TP2, "sequence_parallel"]), (4, [PP2])],
    ids=["plain", "tp2-dp2", "tp2-dp2-sp", "pp2-dp2"],
)
def test_local_sgd_where_several_ranks_hold_a_model(ranks, plugins):
    """Under LocalSGD each replica of the model is updated separately; the ranks of one replica stay equal."""
    weights, said = run_ranks(local_sgd_of_a_llama, ranks, plugins, True, 0.5)[0]
    assert not said
    assert_close(weights, run_ranks(local_sgd_by_hand, 1, 2, 0.5, backend=None)[0], tolerance=1e-3)


@pytest.mark.parametrize(
    ("ranks", "plugins", "low_precision"),
    [
        (2, ["zero1"], False),
        (2, ["zero1"], True),
        (2, [{"zero1": {"use_grad_acc_hook": True}}], False),
        (4, [TP2, "sequence_parallel", "zero1"], False),
        (4, [PP2, "zero1"], False),
    ],
    ids=["dp2", "masters", "hook", "tp2-dp2-sp", "pp2-dp2"],
)
def test_local_sgd_under_zero1_is_synchronous_training(ranks, plugins, low_precision):
    max_norm = None if low_precision else 0.5
    found = run_ranks(local_sgd_of_a_llama, ranks, plugins, True, max_norm, low_precision)
    expected, _ = run_ranks(local_sgd_of_a_llama, ranks, plugins, False, max_norm, low_precision)[0]
    assert_close(found[0][0], expected, tolerance=0)
    for _, said in found:
        assert len(said) == 1
        assert "saves no communication" in said[0]


def replaced_weights_on_rank(low_precision):
    """The weights before and after two steps of size 1, with the weights replaced before the first."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"]})
    net = torch.nn.Linear(3, 1, bias=False, dtype=torch.bfloat16 if low_precision else torch.float32)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for parameter in net.parameters():
        parameter.data = torch.full_like(parameter, 5.0)
    for _ in range(2):
        accelerator.backward(net(torch.ones(1, 3, dtype=net.weight.dtype)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach().clone()


@pytest.mark.parametrize("low_precision", [False, True])
def test_weights_that_a_loop_puts_in_place_train(low_precision):
    for weight in run_ranks(replaced_weights_on_rank, 2, low_precision):
        assert torch.equal(weight, torch.full_like(weight, 3.0))


def branches_on_rank(steps):
    """In each step, only the given branch of each rank receives a gradient."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("a", "b", "c")})
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
    found = []
    for step in steps:
        accelerator.backward(net[step[accelerator.process_index]](torch.ones(1, 1)).sum())
        optimizer.step()
        found.append({name: None if (g := net[name].weight.grad) is None else g.item() for name in net})
        optimizer.zero_grad()
    return found


def test_a_parameter_that_no_rank_used_has_no_gradient():
    for found in run_ranks(branches_on_rank, 2, [("a", "b"), ("c", "c"), ("b", "b")]):
        assert found == [
            {"a": 0.5, "b": 0.5, "c": None},
            {"a": None, "b": None, "c": 1.0},
            {"a": None, "b": 1.0, "c": None},
        ]


def gather_uneven_batches():
    from accelerate.utils import DataLoaderConfiguration

    from neuron_accel import NeuronAccelerator
    from neuron_accel.errors import UsageError

    accelerator = NeuronAccelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    found = []
    for batch in accelerator.prepare(DataLoader(list(range(11)), batch_size=2)):
        try:
            found.append(sorted(accelerator.gather(batch).tolist()))
        except UsageError as error:
            found.append(str(error))
            found.append(sorted(accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)))
    return found


def test_gathering_uneven_batches_says_what_differs():
    first, second = run_ranks(gather_uneven_batches, 2)
    assert first == second
    assert first[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "Rank 1 gathers tensors of other shapes than rank 0: [(1,)] and [(2,)]." in first[2]
    assert "even_batches=False" in first[2]
    assert first[3] == [8, 9, 10]


def exchanges(plugins):
    """What the functions of Accelerate exchange, and what the methods of the accelerator do."""
    from accelerate import utils

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    mine = torch.tensor([float(accelerator.process_index)])
    return {
        "gather": (utils.gather(mine).tolist(), accelerator.gather(mine).tolist()),
        "gather_object": (
            utils.gather_object([int(mine)]),
            accelerator.gather_for_metrics([int(mine)], use_gather_object=True),
        ),
        "sum": (utils.reduce(mine, "sum").tolist(), accelerator.reduce(mine, "sum").tolist()),
        "mean": (utils.reduce(mine, "mean").tolist(), accelerator.reduce(mine, "mean").tolist()),
        "shape": (
            utils.pad_across_processes(torch.ones(1 + int(mine))).tolist(),
            accelerator.pad_across_processes(torch.ones(1 + int(mine))).tolist(),
        ),
        "first": utils.broadcast(mine.clone()).tolist(),
        "first_object": utils.broadcast_object_list([int(mine)]),
    }


def test_functions_of_accelerate_count_processes_and_methods_count_samples():
    for rank, found in enumerate(run_ranks(exchanges, 4, [{"model_parallelism": {"tensor_parallel_size": 2}}])):
        own = [1.0, 1.0] if rank >= 2 else [1.0, 0.0]
        assert found == {
            "gather": ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0]),
            "gather_object": ([0, 0, 1, 1], [0, 1]),
            "sum": ([2.0], [1.0]),
            "mean": ([0.5], [0.5]),
            "shape": (own, own),
            "first": [0.0],
            "first_object": [0],
        }

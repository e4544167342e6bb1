"""ZeRO-1: parity over optimizers and options, what is held and what is sent."""

from __future__ import annotations

import copy
import importlib.util
import statistics
import warnings

import pytest
import torch
from torch import nn

from neuron_accel.backends.select import SHARED_MEMORY_VARIABLE
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Tolerance, Training, compare, train_alone, train_on_rank
from tests.distributed.models import llama, token_batches

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


# ---- optimizers ------------------------------------------------------------------------------------------------------
class Lamb(torch.optim.Optimizer):
    """Adam's direction scaled by the ratio of the parameter's norm to its own (You et al. 2019)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * p
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm()))


class MuonForMatrices(torch.optim.Optimizer):
    """Matrices are orthogonalised (Jordan et al. 2024), the rest gets plain momentum."""

    def __init__(self, params, lr=1e-2, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = buffer
                if p.dim() == 2:
                    u, _, v = torch.linalg.svd(buffer, full_matrices=False)
                    update = u @ v
                p.add_(update, alpha=-group["lr"])


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def two_groups(parameters):
    parameters = list(parameters)
    decayed = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0, "lr": 3e-3}, {"params": decayed}], lr=1e-3, eps=1e-6
    )


OPTIMIZERS = {
    "adamw": (Training().optimizer, "even"),
    "sgd": (sgd, "even"),
    "groups": (two_groups, "even"),
    "adafactor": (adafactor, "parameters"),
    "lamb": (Lamb, "parameters"),
    "muon": (MuonForMatrices, "parameters"),
}
LAYOUTS = {"dp2": (2, []), "dp4": (4, []), "tp2-dp2": (4, [TP2])}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_like_one_process(name, layout, accumulation, max_norm):
    optimizer, partition = OPTIMIZERS[name]
    ranks, plugins = LAYOUTS[layout]
    training = Training(optimizer=optimizer, accumulation=accumulation, max_norm=max_norm)
    batches = token_batches(3 * accumulation)
    reference = run_ranks(train_alone, 1, llama, batches, training)[0]
    config = {"plugins": [*plugins, {"zero1": {"partition": partition, "bucket_cap_mb": 0.01}}]}
    compare(reference, run_ranks(train_on_rank, ranks, llama, batches, config, training)[0])


def lamb_of_a_library(parameters):
    from pytorch_optimizer import Lamb

    return Lamb(parameters, lr=1e-2, weight_decay=0.01)


def lars_of_a_library(parameters):
    from pytorch_optimizer import LARS

    return LARS(parameters, lr=1.0, momentum=0.9, weight_decay=0.01)


def shampoo_of_a_library(parameters):
    from pytorch_optimizer import Shampoo

    return Shampoo(parameters, lr=1e-2)


def schedule_free_of_a_library(parameters):
    from pytorch_optimizer import ScheduleFreeAdamW

    optimizer = ScheduleFreeAdamW(parameters, lr=1e-2, eps=1e-6)
    optimizer.train()
    return optimizer


def muon_of_torch(parameters):
    """It takes matrices only, and iterates in bfloat16."""
    return torch.optim.Muon([p for p in parameters if p.requires_grad], lr=1e-2)


def llama_with_fixed_norms():
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("optimizer", "partition", "tolerance"),
    [
        (lamb_of_a_library, "parameters", None),
        (lars_of_a_library, "parameters", None),
        (shampoo_of_a_library, "parameters", None),
        (muon_of_torch, "parameters", Tolerance(loss=1e-3, norm=1e-2, gradient=2e-2, weight=5e-3)),
        (schedule_free_of_a_library, "even", None),
    ],
    ids=["lamb", "lars", "shampoo", "muon", "schedule-free"],
)
def test_third_party_optimizers(optimizer, partition, tolerance, layout):
    ranks, plugins = LAYOUTS[layout]
    training = Training(optimizer=optimizer)
    batches = token_batches(3)
    model = llama_with_fixed_norms if optimizer is muon_of_torch else llama
    reference = run_ranks(train_alone, 1, model, batches, training)[0]
    config = {"plugins": [*plugins, {"zero1": {"partition": partition, "bucket_cap_mb": 0.01}}]}
    compare(reference, run_ranks(train_on_rank, ranks, model, batches, config, training)[0], tolerance)


def soap_of_a_library(parameters):
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=1e-2, precondition_frequency=2)


def adamw_of_8_bits(parameters):
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2)


def llama_with_large_matrices():
    return llama(vocabulary=256)  # of 8192 elements: smaller ones than 4096 are not quantized


def train_with_each(model, batches, plugins, training):
    return [train_on_rank(model, batches, {"plugins": each}, training) for each in plugins]


SHARDED = {"zero1": {"partition": "parameters", "bucket_cap_mb": 0.01}}, {"fully_sharded": {"partition": "parameters"}}


@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
@pytest.mark.parametrize(
    ("optimizer", "package"),
    [(soap_of_a_library, "pytorch_optimizer"), (adamw_of_8_bits, "torchao")],
    ids=["soap", "8-bit"],
)
def test_updates_that_depend_on_rounding_are_those_of_unsharded_state(optimizer, package, layout):
    """Eigenvectors of the eigenvalue zero, and values between two codes: the reference has the gradients of the same
    ranks, to the bit."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    ranks, plugins = LAYOUTS[layout]
    compared = [plugins, *([*plugins, each] for each in SHARDED)]
    batches, training = token_batches(4), Training(optimizer=optimizer)
    model, eager = llama_with_large_matrices, {"TORCHDYNAMO_DISABLE": "1"}  # torchao compiles its step for every shape
    reference, *found = run_ranks(train_with_each, ranks, model, batches, compared, training, env=eager)[0]
    for trace in found:
        compare(reference, trace, Tolerance(loss=0, norm=0, gradient=0, weight=0))


@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_optimizers_of_full_parameters_receive_them_under_tensor_parallelism_alone(name):
    training = Training(optimizer=OPTIMIZERS[name][0])
    batches = token_batches(3)
    reference = run_ranks(train_alone, 1, llama, batches, training)[0]
    compare(reference, run_ranks(train_on_rank, 2, llama, batches, {"plugins": [TP2]}, training)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"use_grad_acc_hook": True},
        {"overlap": False},
        {"higher_cc_precision": True},
        {"bucket_cap_mb": 0.001},
        {"partition": "parameters"},
    ],
    ids=str,
)
def test_options_do_not_change_what_is_computed(options):
    training = Training(accumulation=2, max_norm=0.5)
    batches = token_batches(6)
    reference = run_ranks(train_alone, 1, llama, batches, training)[0]
    config = {"plugins": [{"zero1": options}]}
    compare(reference, run_ranks(train_on_rank, 2, llama, batches, config, training)[0])


# ---- bf16 with master weights ----------------------------------------------------------------------------------------
def bf16_llama():
    return llama().to(torch.bfloat16)


def train_bf16(optimizer, accumulation, max_norm, batches, partition):
    """Final weights and losses of bf16 parameters with fp32 masters, by this project or, on one rank, by hand."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(
        plugins=[Zero1Plugin(partition=partition)], gradient_accumulation_steps=accumulation
    )
    torch.manual_seed(0)
    model = bf16_llama()
    model, opt = accelerator.prepare(model, optimizer(model.parameters()))
    losses = []
    for batch in batches:
        share = {k: v.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank] for k, v in batch.items()}
        with accelerator.accumulate(model):
            loss = model(**share).loss
            accelerator.backward(loss)
            if max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            opt.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    return losses, {k: v.float() for k, v in accelerator.get_state_dict(model).items()}


def train_bf16_by_hand(optimizer, accumulation, max_norm, batches):
    torch.manual_seed(0)
    model = bf16_llama()
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    opt = optimizer(masters)
    losses = []
    for i, batch in enumerate(batches):
        loss = model(**batch).loss
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (i + 1) % accumulation == 0:
            for master, p in zip(masters, parameters, strict=True):
                master.grad = p.grad.float()
                p.grad = None
            if max_norm is not None:
                nn.utils.clip_grad_norm_(masters, max_norm)
            opt.step()
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    p.copy_(master)
    return losses, {k: v.float() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (3, 0.5)])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_bf16_parameters_with_fp32_masters(name, accumulation, max_norm, ranks):
    optimizer, partition = OPTIMIZERS[name]
    batches = token_batches(3 * accumulation)
    losses, weights = run_ranks(train_bf16_by_hand, 1, optimizer, accumulation, max_norm, batches)[0]
    found, sharded = run_ranks(train_bf16, ranks, optimizer, accumulation, max_norm, batches, partition)[0]
    # bf16 keeps 8 bits: gradients summed in another order differ in the last of them, and so do losses
    assert found == pytest.approx(losses, rel=1e-2)
    for key, expected in weights.items():
        step = 2**-8 * expected.abs().max()
        assert (sharded[key] - expected).abs().max() <= 4 * step, key
        # and most weights are the same number
        assert (sharded[key] == expected).float().mean() > 0.6, key


# ---- exactness -------------------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """0-dim, short, frozen, unused and sometimes unused parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 33), nn.Linear(33, 4), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.short = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((7,), 2.0), requires_grad=False)
        self.bonus = nn.Linear(8, 4)

    def forward(self, x, y, bonus=False):
        out = self.second(torch.tanh(self.first(x))) * self.scale + self.short + self.frozen.sum() * 1e-3
        if bonus:
            out = out + self.bonus(x)
        return ((out - y) ** 2).mean()


def odd_data(steps=4):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(steps)]


def train_odd(optimizer_class, options, sharded, lazy=False):
    """The reference reduces exactly as ZeRO does: the sum of shards in the order of ranks, gathered."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin, make_optimizer_constructor_lazy

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(bucket_cap_mb=1e-3)] if sharded else [])
    torch.manual_seed(0)
    model = Odd()
    make = make_optimizer_constructor_lazy(optimizer_class) if lazy else optimizer_class
    optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    backend, group = accelerator.run.backend, accelerator.run.world
    if sharded:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for step, (x, y) in enumerate(odd_data()):
        # in the last but one step only one rank uses the bonus
        bonus = step == 1 or (step == 2 and rank == 0)
        loss = model(x.chunk(size)[rank], y.chunk(size)[rank], bonus=bonus)
        if sharded:
            accelerator.backward(loss)
        else:
            loss.backward()
            used = backend.all_reduce(torch.tensor([float(p.grad is not None) for p in model.parameters()]), group)
            for p, flag in zip(model.parameters(), used.tolist(), strict=True):
                if flag:
                    grad = p.grad if p.grad is not None else torch.zeros_like(p)
                    flat = torch.nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % size))
                    flat = backend.all_gather(backend.reduce_scatter(flat, group), group) / size
                    p.grad = flat[: p.numel()].view_as(p).clone()
        optimizer.step()
        for _ in range(1 if sharded else size):
            scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return {k: v.clone() for k, v in model.state_dict().items()}, rates


CASES = {
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
}


@pytest.mark.parametrize("lazy", [False, True], ids=["plain", "lazy"])
@pytest.mark.parametrize("name", CASES)
def test_elementwise_optimizers_are_bit_identical(name, lazy):
    cls = getattr(torch.optim, name)
    expected, rates = run_ranks(train_odd, 2, cls, CASES[name], False)[0]
    for found, found_rates in run_ranks(train_odd, 2, cls, CASES[name], True, lazy=lazy):
        assert found_rates == rates
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


# ---- what is held, what is sent --------------------------------------------------------------------------------------
def count_state():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(bucket_cap_mb=0.02)])
    model = llama(vocabulary=301)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = token_batches(1)[0]
    with accelerator.run.backend.record() as traffic:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
    moments = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
    parameters = sum(p.numel() for p in model.parameters())
    return moments, parameters, traffic.sent(op="reduce_scatter"), traffic.sent(op="all_gather"), traffic.sent()


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_is_one_nth_and_traffic_equals_one_all_reduce(ranks):
    for moments, parameters, scattered, gathered, sent in run_ranks(count_state, ranks):
        assert moments == pytest.approx(2 * parameters / ranks, rel=0.01)
        half = (ranks - 1) / ranks * parameters * 4
        assert scattered == pytest.approx(half, rel=0.01)
        assert gathered == pytest.approx(half, rel=0.01)
        assert sent == pytest.approx(2 * half, rel=0.02)


def count_whole_parameters():
    """The moments of this rank, and what it sends and has room for, where every matrix is larger than a bucket."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(partition="parameters", bucket_cap_mb=0.001)])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters(), lr=1e-3))
    with accelerator.run.backend.record() as traffic:
        accelerator.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
    own = sum(piece.parameter.numel() for piece in optimizer.optimizer.state_pieces())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return own, traffic.sent(), sum(storages.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_parameters_are_balanced_also_if_each_is_larger_than_a_bucket(ranks):
    elements = 8 * 64 * 64
    for own, sent, memory in run_ranks(count_whole_parameters, ranks):
        assert own == elements / ranks
        assert sent <= 1.01 * 4 * elements * (2 * (ranks - 1) / ranks + 1 / ranks)
        assert memory == 4 * elements


def count_wire():
    """Bytes that the kernel sent over this process's TCP connections in a step, against parameter bytes."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin
    from neuron_accel.testing.resources import bytes_sent

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    sent = []
    for _ in range(3):
        accelerator.wait_for_everyone()
        before = bytes_sent()
        accelerator.backward(model(torch.ones(2, 1024)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        sent.append(bytes_sent() - before)
    return min(sent), sum(p.numel() * 4 for p in model.parameters())


def test_wire_traffic_is_at_the_floor():
    results = run_ranks(count_wire, 2, env={SHARED_MEMORY_VARIABLE: "0"})
    sent = sum(sent for sent, _ in results) / 2
    floor = results[0][1]  # 2 (N - 1) / N of the parameters' bytes, at two ranks
    assert floor * 0.99 <= sent <= 1.05 * floor


def peak_of_preparing(name, lazy):
    """Memory above the model's own that preparing it and one step take, in units of its bf16 parameters."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin, make_optimizer_constructor_lazy
    from neuron_accel.testing.resources import PeakMemory

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(bucket_cap_mb=4)])
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))).to(torch.bfloat16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    cls = getattr(torch.optim, name)
    small = nn.Linear(2, 2)
    accelerator.prepare(small, cls(small.parameters()))  # what torch imports at a first step does not count
    memory = PeakMemory()
    make = make_optimizer_constructor_lazy(cls) if lazy else cls
    accelerator.prepare(model, make(model.parameters()))
    return memory.bytes() / size


def test_no_full_copy_is_held_if_the_partition_is_configured():
    # Adagrad's state exists from the start. At four ranks fp32 masters and state are half a model each; there are a
    # few buckets, and memory of the old weights that the allocator keeps. With an fp32 copy of the whole: over 3.
    promised = statistics.mean(run_ranks(peak_of_preparing, 4, "Adagrad", True))
    assert promised < 2.5
    # the measure sees what it is to see: built at once, the state is a bf16 model of its own before it is sharded
    assert statistics.mean(run_ranks(peak_of_preparing, 4, "Adagrad", False)) > promised + 0.4


def accumulate_quietly():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()], gradient_accumulation_steps=3)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    counts = []
    for batch in token_batches(3):
        with accelerator.run.backend.record() as traffic, accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(traffic.count())
    return counts


def test_nothing_is_sent_before_the_boundary():
    first, second, third = run_ranks(accumulate_quietly, 2)[0]
    assert (first, second) == (0, 0)
    assert third > 0


def overlap_order(overlap):
    """Whether the first bucket was sent before backward had reached the first layer."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin(bucket_cap_mb=0.01, overlap=overlap)])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    seen = {}
    with accelerator.run.backend.record() as traffic:
        model[0].weight.register_hook(lambda _: seen.update(sent=traffic.count()))
        accelerator.backward(model(torch.ones(2, 64)).sum())
    return seen["sent"]


def test_reduction_overlaps_the_backward_pass():
    assert run_ranks(overlap_order, 2, True)[0] > 0
    assert run_ranks(overlap_order, 2, False)[0] == 0


# ---- loops -----------------------------------------------------------------------------------------------------------
def add_group():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    torch.manual_seed(0)
    model = Odd()
    for p in model.second.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.first.parameters(), lr=1e-2)
    for p in (model.third.weight, model.third.bias, model.scale, model.short, *model.bonus.parameters()):
        p.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = odd_data(1)[0]
    share = slice(accelerator.data_parallel_rank * 4, accelerator.data_parallel_rank * 4 + 4)

    def step():
        accelerator.backward(model(x[share], y[share]))
        optimizer.step()
        optimizer.zero_grad()

    step()
    for p in model.second.parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 1e-1})
    step()
    return {k: v.clone() for k, v in model.state_dict().items()}


def add_group_alone():
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.first.parameters(), lr=1e-2)
    x, y = odd_data(1)[0]
    for added in (False, True):
        if added:
            optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 1e-1})
        model(x, y).backward()
        optimizer.step()
        model.zero_grad()
    return model.state_dict()


def test_groups_can_be_added():
    expected = run_ranks(add_group_alone, 1)[0]
    for found in run_ranks(add_group, 2):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def step_with_closure():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    torch.manual_seed(0)
    model = Odd()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    x, y = odd_data(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = model(x, y)
        accelerator.backward(loss)
        return loss

    before = model(x, y).item()
    optimizer.step(closure)
    return before, model(x, y).item()


def test_a_closure_runs_before_the_update():
    before, after = run_ranks(step_with_closure, 2)[0]
    assert after < before


class NormedSGD(torch.optim.SGD):
    """Divides by the norm of all gradients together."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        super().step(closure)


def refuse(kind):
    from neuron_accel import NeuronAccelerator, NeuronAccelError, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    try:
        if kind == "lbfgs":
            model = nn.Linear(2, 2)
            accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
        elif kind == "adafactor":
            model = nn.Linear(2, 2)
            accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
        elif kind == "coupled":
            model = nn.Linear(2, 2)
            accelerator = NeuronAccelerator(plugins=[Zero1Plugin(partition="parameters")])
            accelerator.prepare(model, NormedSGD(model.parameters(), lr=0.1))
        elif kind.startswith("sparse"):
            accelerator = NeuronAccelerator() if kind == "sparse, without ZeRO-1" else accelerator
            model = nn.Embedding(10, 3, sparse=True)
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.tensor([1, 2])).sum())
    except NeuronAccelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lbfgs", ["LBFGS", "closure", "without sharding"]),
        ("adafactor", ["Adafactor", "partition='parameters'", "full parameter"]),
        ("coupled", ["NormedSGD", "all parameters together", "without ZeRO-1"]),
        ("sparse", ["'weight'", "sparse=False"]),
        ("sparse, without ZeRO-1", ["'weight'", "sparse=False"]),
    ],
)
def test_what_is_unsupported_raises(kind, words):
    for message in run_ranks(refuse, 2, kind):
        for word in words:
            assert word in message


# ---- against torch's own ---------------------------------------------------------------------------------------------
def train_torch_zero(batches):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(llama())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.01)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for batch in batches:
        model(**{k: v.chunk(size)[rank] for k, v in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k.removeprefix("module."): v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_torchs_own_zero(ranks):
    batches = token_batches(4)
    expected = run_ranks(train_torch_zero, ranks, batches)[0]
    trace = run_ranks(train_on_rank, ranks, llama, batches, {"plugins": ["zero1"]}, Training())[0]
    for key, value in expected.items():
        torch.testing.assert_close(trace.weights[key], value, rtol=1e-5, atol=1e-6)


# ---- without an accelerator ------------------------------------------------------------------------------------------
def train_standalone(batches, accumulation, hook, groups=None):
    from neuron_accel import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = llama()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, max_norm=0.5, use_grad_acc_hook=hook, pin_layout=False,
        sharding_groups=groups, lr=1e-3, eps=1e-6, weight_decay=0.01,
    )  # fmt: skip
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    norms = []
    for i, batch in enumerate(batches):
        (model(**{k: v.chunk(size)[rank] for k, v in batch.items()}).loss / accumulation).backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
            optimizer.zero_grad()
    return model.state_dict(), norms, [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_wrapper_without_an_accelerator(accumulation, hook):
    batches = token_batches(3 * accumulation)
    reference = run_ranks(train_alone, 1, llama, batches, Training(accumulation=accumulation, max_norm=0.5))[0]
    weights, norms, _ = run_ranks(train_standalone, 2, batches, accumulation, hook)[0]
    assert norms == pytest.approx(reference.norms, rel=1e-5)
    for key, value in reference.weights.items():
        assert (weights[key] - value).abs().max() <= 1e-4 * value.abs().max()


def count_replicas_once():
    """Two ranks as tensor-parallel peers, each alone along the data axis."""
    from neuron_accel import ZeroRedundancyOptimizer

    rank = torch.distributed.get_rank()
    cut, copied = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    cut.tensor_model_parallel = True
    optimizer = ZeroRedundancyOptimizer(
        [cut, copied], torch.optim.SGD, sharding_groups=[[0], [1]], grad_norm_groups=[[0, 1]], max_norm=100.0, lr=1.0
    )
    cut.grad, copied.grad = torch.full((4,), 1.0 + rank), torch.full((2,), 3.0)
    (cut * cut.grad.clone()).sum().backward()
    (copied * copied.grad.clone()).sum().backward()
    optimizer.step()
    return float(optimizer.grad_norm), rank


def test_copies_count_once_in_the_norm():
    # gradients are twice what was planted: 4 elements of 2 and of 4 on the two ranks, and 2 copied elements of 6
    expected = (4 * 2.0**2 + 4 * 4.0**2 + 2 * 6.0**2) ** 0.5
    for norm, _ in run_ranks(count_replicas_once, 2):
        assert norm == pytest.approx(expected)


def round_trip(batches):
    from neuron_accel import ZeroRedundancyOptimizer

    def build():
        torch.manual_seed(0)
        model = llama().to(torch.bfloat16)
        groups = [{"params": list(model.model.parameters()), "lr": 2e-3}, {"params": list(model.lm_head.parameters())}]
        return model, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3, save_master_weights=True)

    def steps(model, optimizer, some):
        for batch in some:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    steps(model, optimizer, batches[:2])
    saved = copy.deepcopy(optimizer.state_dict())  # like any optimizer, it returns what it goes on working with
    other, reloaded = build()
    other.load_state_dict(model.state_dict())
    reloaded.load_state_dict(saved)
    same_groups = [g["lr"] for g in reloaded.param_groups] == [g["lr"] for g in optimizer.param_groups]
    steps(model, optimizer, batches[2:])
    steps(other, reloaded, batches[2:])
    return same_groups and all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_state_and_groups_round_trip():
    assert all(run_ranks(round_trip, 2, token_batches(4)))


def reload_without_masters(batches):
    from neuron_accel import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, save_master_weights=False)
    model(**batches[0]).loss.backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    pieces = [piece for shard in optimizer.shards for piece in shard.pieces]
    finer = any(not torch.equal(p.master, p.master.bfloat16().float()) for p in pieces)
    optimizer.load_state_dict(saved)
    rounded = all(torch.equal(p.master, p.master.bfloat16().float()) for p in pieces)
    return "master_weights" in saved, finer, rounded


def test_without_saved_masters_a_run_goes_on_from_the_rounded_weights():
    assert run_ranks(reload_without_masters, 2, token_batches(1)) == [(False, True, True)] * 2

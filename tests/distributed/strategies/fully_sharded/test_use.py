"""Fully sharded parameters: what is kept and sent, checkpoints, loops of many kinds, and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from neuron_accel import FullyShardedPlugin
from neuron_accel.backends.process_group import let_threads_finish
from neuron_accel.contract.events import Observer
from neuron_accel.errors import ConfigurationError, DesyncError, NeuronAccelError, UsageError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import llama, token_batches
from tests.distributed.strategies.fully_sharded.values import has_values

STAGE_3, STAGE_2 = [{"fully_sharded": {}}], [{"fully_sharded": {"reshard_after_forward": False}}]
HYBRID, NEAR = [{"fully_sharded": {"hybrid_shard_size": 2}}], [{"fully_sharded": {"reshard_after_forward": 2}}]
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
RECOMPUTE = "activation_checkpointing"


def prepared(plugins, model_fn=llama, **options):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, **options)
    torch.manual_seed(0)
    model = model_fn()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6))
    return accelerator, model, optimizer


def own_rows(accelerator, batch):
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    return {name: value.chunk(size)[rank] for name, value in batch.items()}


def step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = model(**own_rows(accelerator, batch)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# ---- what is sent ----------------------------------------------------------------------------------------------------
def bytes_of_a_step(plugins, recomputes=False):
    """What a step sends, in multiples of an all-reduce of the gradients, and how often."""
    accelerator, model, optimizer = prepared(plugins, functools.partial(llama, blocks=6, vocabulary=32))
    if recomputes:
        model.gradient_checkpointing_enable()
    batches = token_batches(2, vocabulary=32)
    step(accelerator, model, optimizer, batches[0])
    with accelerator.run.backend.record() as traffic:
        step(accelerator, model, optimizer, batches[1])
    size = accelerator.num_processes
    one = 2 * (size - 1) / size * sum(4 * p.numel() for p in model.parameters())
    gathers = sum(transfer.op == "all_gather" for transfer in traffic.transfers)
    return sum(transfer.sent for transfer in traffic.transfers) / one, gathers


@pytest.mark.parametrize(
    ("plugins", "expected", "gathers", "recomputes"),
    [
        (STAGE_3, 1.5, 13, False),
        (STAGE_2, 1.0, 7, False),
        ([*STAGE_3, RECOMPUTE], 1.5, 13, False),
        (STAGE_3, 1.5, 13, True),
    ],
    ids=["stage 3", "stage 2", "recomputed", "recomputed by transformers"],
)
def test_a_step_sends_no_more_than_it_must(plugins, expected, gathers, recomputes):
    for ratio, count in run_ranks(bytes_of_a_step, 2, plugins, recomputes):
        assert ratio == pytest.approx(expected, rel=0.05)
        assert count == gathers


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        # of the weights: gathered 1/2 and 1/2, reduce-scattered 1/2, and half of them all-reduced over two groups
        (HYBRID, 2 / 1.5),
        # gathered 3/4 for the forward and 1/2 for the backward pass, reduce-scattered 3/4
        (NEAR, 2 / 1.5),
    ],
    ids=["sharded in groups", "resharded in groups"],
)
def test_a_step_of_four_ranks(plugins, expected):
    for ratio, _ in run_ranks(bytes_of_a_step, 4, plugins):
        assert ratio == pytest.approx(expected, rel=0.05)


# ---- what is kept ----------------------------------------------------------------------------------------------------
def bytes_in_memory():
    let_threads_finish()  # gloo's thread lets go of the tensors of the last collective
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class BlocksInMemory(Observer):
    """The most blocks that had memory when a collective was issued."""

    categories = frozenset({"collective"})

    def __init__(self, flats):
        self.flats, self.most = flats, 0

    def begin(self, event):
        self.most = max(self.most, sum(flat.untyped_storage().nbytes() > 0 for flat in self.flats))


def memory(plugins, make=llama):
    """Bytes of all tensors after a step, of one copy of the weights, and the most blocks that had values at once."""
    before = bytes_in_memory()
    accelerator, model, optimizer = prepared(plugins, functools.partial(make, blocks=8, vocabulary=32))
    flats = [shard._flat for shard in optimizer.optimizer.shards if ".layers." in shard.bucket.records[0].fqn]
    look = BlocksInMemory(flats)
    accelerator.run.events.observe(look)
    for batch in token_batches(2, vocabulary=32):
        step(accelerator, model, optimizer, batch)
    after = bytes_in_memory() - before
    return after, sum(4 * p.numel() for p in model.parameters()), look.most


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_and_the_blocks_in_flight(ranks):
    for kept, weights, most in run_ranks(memory, ranks, STAGE_3):
        assert kept <= 1.1 * 3 * weights / ranks  # weights and two moments
        assert most == 2  # the one that computes, and the next one
    for kept, weights, most in run_ranks(memory, ranks, STAGE_2):
        assert kept <= 1.1 * 3 * weights / ranks
        assert most == 8
    if ranks == 4:
        for kept, weights, most in run_ranks(memory, 4, HYBRID):
            assert 3 * weights / 2 <= kept <= 1.1 * 3 * weights / 2  # shards of groups of two
            assert most == 2


def gathers_ahead(prefetch):
    """How many gathers a step has started when its first block has run, beside those of that block and the model."""
    accelerator, model, optimizer = prepared(
        [{"fully_sharded": {"prefetch": prefetch}}], functools.partial(llama, blocks=6)
    )
    first, second = token_batches(2)
    step(accelerator, model, optimizer, first)
    counts = []
    with accelerator.run.backend.record() as traffic:
        model.model.layers[0].mlp.register_forward_hook(lambda *_: counts.append(traffic.count(op="all_gather")))
        step(accelerator, model, optimizer, second)
    return counts[0] - 2


@pytest.mark.parametrize("prefetch", [0, 3])
def test_as_many_units_are_gathered_ahead_as_asked(prefetch):
    assert run_ranks(gathers_ahead, 2, prefetch) == [prefetch] * 2


def kept_small(folder):
    """Which parameters have values between steps; and a checkpoint."""
    accelerator, model, optimizer = prepared([{"fully_sharded": {"persistence_threshold": 33}}])
    step(accelerator, model, optimizer, token_batches(1)[0])
    accelerator.save_state(folder)
    return {name for name, parameter in model.named_parameters() if has_values(parameter)}


def test_small_parameters_are_kept(tmp_path):
    names = {name for name, parameter in llama().named_parameters() if parameter.numel() <= 32}
    assert 0 < len(names) < 6
    assert run_ranks(kept_small, 2, str(tmp_path / "c")) == [names] * 2
    _, expected = run_ranks(train, 2, ["zero1"], steps=(0, 2))[0]
    _, found = run_ranks(train, 2, STAGE_3, load=str(tmp_path / "c"), steps=(1, 2))[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def bf16_llama():
    return llama().to(torch.bfloat16)


def train(plugins, model_fn=llama, save=None, load=None, steps=(0, 4), **options):
    """Losses and weights; every rank has the latter."""
    accelerator, model, optimizer = prepared(plugins, model_fn, **options)
    if load is not None:
        accelerator.load_state(load)
    losses = [step(accelerator, model, optimizer, batch).item() for batch in token_batches(4)[slice(*steps)]]
    if save is not None:
        accelerator.save_state(save)
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return losses, {name: value.clone() for name, value in weights.items()}


WAYS = {
    "zero1 to stage 3": (["zero1"], 2, STAGE_3, 2, True),
    "stage 3 to zero1": (STAGE_3, 2, ["zero1"], 2, True),
    "data parallel to stage 2": ([], 2, STAGE_2, 2, True),
    "stage 3 to data parallel": (STAGE_3, 2, [], 2, True),
    "stage 3 to tp2 x stage 2": (STAGE_3, 2, [TP2, *STAGE_2], 4, False),
    "in groups to stage 3": (HYBRID, 4, STAGE_3, 2, False),
    "zero1 to resharded in groups": (["zero1"], 2, NEAR, 4, False),
    "tp2 x stage 3 to stage 3": ([TP2, *STAGE_3], 4, STAGE_3, 2, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_others_are_loaded(way, tmp_path):
    first, ranks, second, others, exact = WAYS[way]
    folder = str(tmp_path / "checkpoint")
    run_ranks(train, ranks, first, save=folder, steps=(0, 2))
    _, expected = run_ranks(train, 2, ["zero1"])[0]
    _, found = run_ranks(train, others, second, load=folder, steps=(2, 4))[0]
    for name, value in expected.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 2e-6}
        torch.testing.assert_close(found[name], value, **tolerance, msg=name)


# ---- large parameters outside of the blocks --------------------------------------------------------------------------
def large():
    return llama(vocabulary=1 << 17, blocks=1)  # embeddings and head are sent where autograd has put their gradients


def sizes_sent(plugins):
    """Elements of each reduce-scatter of a step, in order, and those of the head and the embeddings."""
    accelerator, model, optimizer = prepared(plugins, large)
    for _ in range(2):
        step(accelerator, model, optimizer, token_batches(1)[0])
    with accelerator.run.backend.record() as traffic:
        step(accelerator, model, optimizer, token_batches(1)[0])
    sent = [t.sent * accelerator.num_processes // 4 for t in traffic.transfers if t.op == "reduce_scatter"]
    return sent, model.lm_head.weight.numel()


@pytest.mark.parametrize("plugins", [STAGE_3, STAGE_2], ids=["stage 3", "stage 2"])
def test_the_head_is_reduced_first_and_the_embeddings_last(plugins):
    for sent, size in run_ranks(sizes_sent, 2, plugins):
        assert sent.index(size) == 0
        assert sent.count(size) == 2
        assert size not in sent[1:3]


@pytest.mark.parametrize("plugins", [STAGE_3, STAGE_2, HYBRID], ids=["stage 3", "stage 2", "sharded in groups"])
def test_large_gradients_are_those_of_zero1(plugins):
    _, expected = run_ranks(train, 2, ["zero1"], large, steps=(0, 3))[0]
    _, found = run_ranks(train, 2, plugins, large, steps=(0, 3))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


class UsesItsHead(nn.Module):
    """A head that is used at the end, also before the blocks, or not at all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1 << 17, bias=False)

    def forward(self, x, use):
        x = x + 0.1 * self.head(x)[:, :16] if "before" in use else x
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)[:, :32].square().mean() if "end" in use else x.square().mean()


USES = [
    ["end", "end"],
    ["end", "end"],
    ["before end", "end"],
    ["end", "none"],
    ["none", "none"],
    ["before end", "before end"],
    ["end", "end"],
]


def uses_its_head(plugins, uses, accumulation=1):
    """Trains with another use of the head in each step, and on each rank."""
    options = {"gradient_accumulation_steps": accumulation}
    accelerator, model, optimizer = prepared(plugins, UsesItsHead, **options)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for of_ranks in uses:
        with accelerator.accumulate(model):
            loss = model(torch.randn(4, 16, generator=generator), of_ranks[accelerator.process_index])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    agreed = getattr(optimizer.optimizer, "_ahead", None)
    return accelerator.get_state_dict(model), agreed and agreed.agreed


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("uses", "ahead"), [(USES, False), (USES[:2] + USES[3:5], True)], ids=["late", "in time"])
def test_a_head_that_is_used_elsewhere_now_and_then(uses, ahead, accumulation):
    blocks = [{"fully_sharded": {"modules": "blocks.*"}}]
    expected, _ = run_ranks(uses_its_head, 2, ["zero1"], uses, accumulation)[0]
    found, agreed = run_ranks(uses_its_head, 2, blocks, uses, accumulation)[0]
    assert bool(agreed) == ahead  # where its gradient comes late once, it is reduced at the end from then on
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("plugins", [STAGE_3, STAGE_2], ids=["stage 3", "stage 2"])
def test_bf16_weights_with_fp32_masters_are_those_of_zero1(plugins, tmp_path):
    losses, expected = run_ranks(train, 2, ["zero1"], bf16_llama)[0]
    assert run_ranks(train, 2, plugins, bf16_llama)[0][0] == losses
    run_ranks(train, 2, plugins, bf16_llama, save=str(tmp_path / "one"), steps=(0, 2))
    _, found = run_ranks(train, 2, plugins, bf16_llama, load=str(tmp_path / "one"), steps=(2, 4))[0]
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_autocast_is_that_of_zero1():
    expected, _ = run_ranks(train, 2, ["zero1"], mixed_precision="bf16")[0]
    assert run_ranks(train, 2, STAGE_3, mixed_precision="bf16")[0][0] == pytest.approx(expected, rel=1e-6)


# ---- loops -----------------------------------------------------------------------------------------------------------
def uneven(plugins, model_fn=llama):
    """The second rank has one batch less than the first."""
    accelerator, model, optimizer = prepared(plugins, model_fn)
    batches = token_batches(4)[: 4 if accelerator.process_index == 0 else 3]
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in batches:
            step(accelerator, model, optimizer, batch)
    return accelerator.get_state_dict(model)


def plain_backward(plugins, model_fn=llama):
    """A loop that evaluates in between, and calls backward itself."""
    accelerator, model, optimizer = prepared(plugins, model_fn)
    for batch in token_batches(2):
        with torch.no_grad():
            model(**own_rows(accelerator, batch))
        model(**own_rows(accelerator, batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def two_forward_passes(plugins, model_fn=llama):
    """Two forward passes, and one backward pass through both, after a step with one."""
    accelerator, model, optimizer = prepared(plugins, model_fn)
    step(accelerator, model, optimizer, token_batches(1)[0])
    one, two = (own_rows(accelerator, batch) for batch in token_batches(2))
    for _ in range(2):
        accelerator.backward(model(**one).loss + 2 * model(**two).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def unfreezing(plugins):
    """A block begins to train later, and the head stops."""
    accelerator, model, optimizer = prepared(plugins, frozen_block)
    for index, batch in enumerate(token_batches(4)):
        if index == 2:
            model.model.layers[0].requires_grad_(True)
            model.lm_head.requires_grad_(False)
        step(accelerator, model, optimizer, batch)
    return accelerator.get_state_dict(model)


def frozen_block():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    return model


def assigning(plugins):
    """Weights that a loop assigns are those that train on."""
    accelerator, model, optimizer = prepared(plugins)
    step(accelerator, model, optimizer, token_batches(1)[0])
    norm = model.model.norm.weight
    norm.data = torch.full(norm.shape, 0.5)
    nn.init.constant_(model.model.layers[1].input_layernorm.weight, 0.25)
    model.model.layers[1].mlp.down_proj.weight.data.fill_(0.125)
    projection = model.model.layers[0].mlp.up_proj.weight
    projection.data = torch.linspace(-1, 1, projection.numel()).view(projection.shape)
    step(accelerator, model, optimizer, token_batches(1)[0])
    return accelerator.get_state_dict(model)


def writing(plugins):
    """Weights that a loop changes in place between micro-batches, while they have their values."""
    accelerator, model, optimizer = prepared(plugins, gradient_accumulation_steps=2)
    for index, batch in enumerate(token_batches(4)):
        step(accelerator, model, optimizer, batch)
        if index == 2:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
                model.model.norm.weight.add_(0.25)
    return accelerator.get_state_dict(model)


def test_weights_that_are_kept_between_micro_batches_may_be_changed():
    expected, found = run_ranks(writing, 2, ["zero1"])[0], run_ranks(writing, 2, STAGE_2)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("plugins", [STAGE_3, STAGE_2], ids=["stage 3", "stage 2"])
@pytest.mark.parametrize("loop", [uneven, plain_backward, two_forward_passes, unfreezing, assigning])
def test_loops_train_as_under_zero1(loop, plugins):
    expected, found = run_ranks(loop, 2, ["zero1"])[0], run_ranks(loop, 2, plugins)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("loop", [uneven, plain_backward, two_forward_passes])
def test_loops_with_a_large_head_train_as_under_zero1(loop):
    expected, found = run_ranks(loop, 2, ["zero1"], large)[0], run_ranks(loop, 2, STAGE_3, large)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputed_by_transformers(accumulation):
    training = Training(max_norm=0.5, accumulation=accumulation, prepare_model=checkpointed)
    assert_parallel_equivalence(llama, token_batches(2 * accumulation), STAGE_3, ranks=2, training=training)


def generates(plugins):
    accelerator, model, _ = prepared(plugins)
    ids = token_batches(1)[0]["input_ids"][:1, :4]
    found = []
    for samples, cache in ((False, None), (True, None), (True, "static")):
        torch.manual_seed(5)
        options = {"do_sample": samples, "pad_token_id": 0, "cache_implementation": cache}
        with torch.no_grad():
            found.append(accelerator.unwrap_model(model).generate(ids, max_new_tokens=8, **options))
    before = {name: hooks_of(module) for name, module in model.named_modules()}
    accelerator.end_training()
    after = {name: hooks_of(module) for name, module in model.named_modules()}
    return found, sum(before.values()), sum(after.values())


def hooks_of(module):
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_pre_hooks)
    return sum(map(len, hooks)) + ("_is_fsdp_managed_module" in vars(module))


def test_it_generates_and_leaves_no_hooks():
    expected, _, _ = run_ranks(generates, 1, [])[0]
    for found, before, after in run_ranks(generates, 2, STAGE_3):
        assert all(map(torch.equal, found, expected))
        assert before > 8
        assert after == 0


def generates_of_its_own_length(lengths):
    """Each rank generates from its own prompt, as many tokens as it wants, and then trains."""
    accelerator, model, optimizer = prepared(STAGE_3)
    batch, rank = token_batches(1)[0], accelerator.process_index
    ids, length = batch["input_ids"][rank : rank + 1, :4], lengths[rank]
    with torch.no_grad():
        found = accelerator.unwrap_model(model).generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0)
    return found, float(accelerator.gather(step(accelerator, model, optimizer, batch)).mean())


def test_ranks_generate_texts_of_different_lengths():
    (alone, loss), lengths = run_ranks(generates_of_its_own_length, 1, [6])[0], [6, 2]
    ranks = run_ranks(generates_of_its_own_length, 2, lengths, timeout=20)
    assert torch.equal(ranks[0][0], alone)
    assert [texts.shape[1] - 4 for texts, _ in ranks] == lengths
    assert [found for _, found in ranks] == pytest.approx([loss, loss])


def drops_layers(of_rank):
    """A model of transformers that drops layers at random, of another seed on each rank."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    ears = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(vocab_size=8, layerdrop=0.5, apply_spec_augment=False, **small, **ears, **places)
    accelerator, model, optimizer = prepared(STAGE_3, lambda: Wav2Vec2ForCTC(config))
    torch.manual_seed(accelerator.process_index if of_rank else 0)
    for _ in range(3):
        loss = model(torch.randn(2, 64), labels=torch.ones(2, 4, dtype=torch.long)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return bool(loss.isfinite())


def test_layers_that_a_model_drops_at_random_are_called_by_all_ranks():
    assert run_ranks(drops_layers, 2, True, timeout=20) == [True, True]


# ---- what is refused -------------------------------------------------------------------------------------------------
def misused():
    """What happens to what has no values between uses."""
    accelerator, model, optimizer = prepared(STAGE_3)
    step(accelerator, model, optimizer, token_batches(1)[0])
    weight = model.model.layers[0].mlp.up_proj.weight
    accelerator.get_state_dict(model)
    found, average = {}, torch.zeros(weight.shape)
    tries = {
        "read": lambda: weight.sum(),
        "read detached": lambda: weight.detach().clone(),
        "average": lambda: average.lerp_(weight.data, 0.5),
        "average of many": lambda: torch._foreach_lerp_([average], [weight.detach()], 0.5),
        "scaled": lambda: weight.data.mul_(0.5),
        "scaled and assigned": lambda: setattr(weight, "data", weight.data * 0.5),
        "rows": lambda: weight.data[:2].fill_(0.5),
        "saved": lambda: torch.save(weight, io.BytesIO()),
        "state_dict": model.state_dict,
        "of a part": model.model.layers[1].state_dict,
        "load_state_dict": lambda: model.load_state_dict({name: torch.zeros(()) for name in ("model.norm.weight",)}),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "write": lambda: nn.init.normal_(weight),
        "shape": lambda: wrong_shape(accelerator, model, weight),
    }
    for name, attempt in tries.items():
        try:
            found[name] = str(attempt())
        except (NeuronAccelError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def wrong_shape(accelerator, model, weight):
    weight.data = torch.zeros(3)
    model(**own_rows(accelerator, token_batches(1)[0]))


def test_what_has_no_values_is_not_read_silently():
    for found in run_ranks(misused, 2):
        for name in (*(name for name in found if name[:4] in ("read", "aver", "scal", "rows", "save")), "write"):
            assert "UsageError: A weight of shape" in found[name], name
            assert "with accelerator.full_weights(model):" in found[name]
        for name in ("state_dict", "of a part", "load_state_dict"):
            assert "UsageError" in found[name]
            assert "parameters are sharded" in found[name]
        for name in ("deepcopy", "pickle"):
            assert "cannot be copied or pickled" in found[name]
        assert "up_proj.weight' is torch.float32 (3,)" in found["shape"]


class Elsewhere(nn.Module):
    """The weight of a module is also used after its forward pass, or before it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, after=False, before=False):
        x = x @ self.second.weight if before else x
        x = self.second(self.first(x))
        return x @ self.second.weight if after else x


def elsewhere(modules):
    accelerator, model, _ = prepared([{"fully_sharded": {"modules": modules}}], Elsewhere)
    loss = model(torch.ones(2, 4), after=True).sum()
    accelerator.backward(loss)
    return bool(loss.isnan())


def test_a_use_after_a_module_is_not_wrong_by_a_little():
    assert run_ranks(elsewhere, 2, "first") == [False, False]
    with pytest.raises(RanksError, match=r"A weight of shape \(4, 4\) is used outside .*by `matmul`"):
        run_ranks(elsewhere, 2, "second")


def late():
    """In the second micro-batch the weight still has values before the forward pass of its module."""
    options = {"modules": "second", "reshard_after_forward": False}
    accelerator, model, _ = prepared([{"fully_sharded": options}], Elsewhere, gradient_accumulation_steps=2)
    for before in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4), before=before).sum())


def test_a_gradient_that_comes_after_its_module_is_an_error():
    with pytest.raises(RanksError) as raised:
        run_ranks(late, 2)
    assert all(isinstance(error, UsageError) for error in raised.value.errors.values())
    assert "'second.weight' arrived after the gradients of its module had been sent" in str(raised.value)


class Chooses(nn.Module):
    """One rank alone runs a unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def chooses():
    plugins = [{"fully_sharded": {"modules": ["first", "second"]}}, {"desync_guard": {"timeout_s": 5.0}}]
    accelerator, model, _ = prepared(plugins, Chooses)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4), both=accelerator.process_index == 0).sum())


def test_a_unit_that_one_rank_alone_runs_is_named_by_the_guard():
    pytest.importorskip("neuron_accel_guards")
    with pytest.raises(RanksError) as raised:
        run_ranks(chooses, 2)
    assert any(isinstance(error, DesyncError) for error in raised.value.errors.values())


def compiled(plugins):
    """Compiled after it was prepared."""
    accelerator, model, optimizer = prepared(plugins, Elsewhere)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    loss = torch.compile(model, backend="eager")(x).square().sum()
    accelerator.backward(loss)
    optimizer.step()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_a_compiled_model_is_refused():
    with pytest.raises(RanksError, match="cannot be compiled"):
        run_ranks(compiled, 2, [{"fully_sharded": {"modules": ["first", "second"]}}])


def refused(plugins, model_fn=llama):
    prepared(plugins, model_fn)


CONTEXT = {
    "unknown blocks": (STAGE_3, Elsewhere, "name them by a pattern"),
    "no such module": ([{"fully_sharded": {"modules": "model.layer.*"}}], llama, "has no module 'model.layer.*'"),
    "stage 1 beside it": ([*STAGE_3, "zero1"], llama, "claim"),
    "groups of three": ([{"fully_sharded": {"hybrid_shard_size": 3}}], llama, "cannot be divided into groups of 3"),
}


@pytest.mark.parametrize("case", CONTEXT)
def test_refusals(case):
    plugins, model_fn, text = CONTEXT[case]
    with pytest.raises(RanksError) as raised:
        run_ranks(refused, 2, plugins, model_fn)
    assert all(isinstance(error, NeuronAccelError) and text in str(error) for error in raised.value.errors.values())


@pytest.mark.parametrize(
    "options",
    [
        {"modules": ""},
        {"modules": ()},
        {"reshard_after_forward": 1},
        {"reshard_after_forward": 0},
        {"hybrid_shard_size": 1},
        {"hybrid_shard_size": 4, "reshard_after_forward": 3},
        {"prefetch": -1},
    ],
    ids=str,
)
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        FullyShardedPlugin(**options)


def freed_by_one_collection():
    accelerator, model, optimizer = prepared(STAGE_3, functools.partial(llama, blocks=5))
    batch = token_batches(1)[0]
    for _ in range(2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    found = weakref.ref(model)
    del accelerator, model, optimizer
    gc.collect()
    return found() is None


def test_a_deep_model_is_freed_by_one_garbage_collection():
    assert run_ranks(freed_by_one_collection, 2) == [True, True]

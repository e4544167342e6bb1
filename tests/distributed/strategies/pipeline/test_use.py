"""What a loop around a pipelined model can do, what each rank holds, and what is refused."""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch
from torch import nn

from neuron_accel.errors import CommunicationError, NeuronAccelError, PlanError, UnsupportedModelError, UsageError
from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.strategies.pipeline.pipeline_support import BLOCKS, batches, gpt2, llama, mixtral, pipeline


def prepared(model_fn, plugins, **options):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, **options})
    torch.manual_seed(0)
    model = model_fn()
    alone = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer, alone


def train(accelerator, model, optimizer, made):
    losses = []
    for batch in made:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- evaluation ------------------------------------------------------------------------------------------------------
def evaluate(plugins, size):
    _, model, _, alone = prepared(llama, plugins)
    (batch,) = batches("padded", 1, size)
    model.eval(), alone.eval()
    result = []
    for module in (model, alone):
        with torch.no_grad():
            output = module(**batch)
            unlabelled = module(input_ids=batch["input_ids"]).logits
        result.append((output.loss, output.get("logits"), unlabelled, output[0]))
    return result


@pytest.mark.parametrize("size", [8, 6, 5])  # of which 4 micro-batches divide one
@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"schedule": "interleaved", "virtual_stages": 2}],
    ids=["pp", "tp", "v"],
)
def test_evaluation_returns_loss_and_logits_on_every_rank(options, size):
    ranks = 2 * options.get("tensor_parallel_size", 1)
    for found, expected in run_ranks(evaluate, ranks, [pipeline(2, 4, **options)], size):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_evaluation_returns_the_loss_alone_if_that_is_enough():
    for found, expected in run_ranks(evaluate, 2, [pipeline(2, 2, evaluation_logits=False)], 4):
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] is None
        torch.testing.assert_close(found[2], expected[2])  # without labels there is nothing else


def train_evaluate_train():
    """Training goes on as if there had been no evaluation in between, with batches of other shapes, too."""
    losses = []
    for evaluates in (False, True):
        accelerator, model, optimizer, _ = prepared(gpt2, [pipeline(2, 2)])
        made = batches("plain", 4, 4)
        for i, batch in enumerate(made):
            short = {name: value[:, : 12 - i] for name, value in batch.items()}
            loss = model(**short).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(**made[-1])
                model.train()
        losses.append(loss.item())
        accelerator.free_memory()
    return losses


def test_evaluation_does_not_disturb_training():
    for without, with_evaluation in run_ranks(train_evaluate_train, 2):
        assert without == with_evaluation


# ---- what each rank holds --------------------------------------------------------------------------------------------
def held(model_fn, stages, microbatches, options):
    accelerator, model, optimizer, alone = prepared(model_fn, [pipeline(stages, microbatches, **options)])
    train(accelerator, model, optimizer, batches("plain", 1, microbatches))
    (pipe,) = accelerator.plan.plugin("pipeline_parallel").pipelines(accelerator.run)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    original = list(alone.named_parameters(remove_duplicate=False))
    own = sum(p.numel() for p in model.parameters())
    return {
        "names": names,
        "own": own,
        "expected": sum(p.numel() for n, p in {id(p): (n, p) for n, p in original if n in names}.values()),
        "total": sum(p.numel() for p in alone.parameters()),
        "known": sum(r.current.numel() for r in accelerator.run.models[0].parameters if r.current is not None),
        "state": sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim()),
        "in_flight": pipe.most_in_flight,
        "all": {name for name, _ in original},
    }


def eight_blocks():
    return llama(blocks=8)


def test_each_rank_holds_its_stage_and_no_more():
    ranks = run_ranks(held, 4, llama, 4, 8, {})
    assert set().union(*(rank["names"] for rank in ranks)) == ranks[0]["all"]
    assert sum(rank["own"] for rank in ranks) == ranks[0]["total"]
    for rank in ranks:
        assert rank["own"] == rank["expected"] == rank["known"]
        assert rank["state"] == 2 * rank["own"]
        blocks = {name.split(".")[2] for name in rank["names"] if ".layers." in name}
        assert len(blocks) == 1


@pytest.mark.parametrize(
    ("schedule", "allowed"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("zero-bubble", [4, 4, 4, 4]),
        ("interleaved", [11, 9, 7, 5]),  # parts of the model for one micro-batch: 2 (P - rank - 1) + (V - 1) P + 1
    ],
)
def test_no_more_micro_batches_are_in_flight_than_the_schedule_allows(schedule, allowed):
    virtual = 2 if schedule == "interleaved" else 1
    options = {"schedule": schedule, "virtual_stages": virtual}
    found = [rank["in_flight"] for rank in run_ranks(held, 4, eight_blocks, 4, 8, options)]
    assert found == allowed


def clips_parts():
    """Norms of parameters that only some ranks hold, or none of them does alone."""
    accelerator, model, _, alone = prepared(llama, [pipeline(2, 2)])
    (batch,) = batches("plain", 1, 4)
    accelerator.backward(model(**batch).loss)
    alone(**batch).loss.backward()
    norms = []
    for part in ("lm_head", "model.embed_tokens", "model.layers.3", "model.layers"):
        mine, whole = model.get_submodule(part), alone.get_submodule(part)
        found = accelerator.clip_grad_norm_(mine.parameters(), 1e6)
        norms.append((float(found), float(nn.utils.clip_grad_norm_(whole.parameters(), 1e6))))
    return norms


def test_norms_of_parts_that_other_ranks_hold():
    for norms in run_ranks(clips_parts, 2):
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=1e-5)


# ---- tied weights ----------------------------------------------------------------------------------------------------
def tied_weights(plugins):
    accelerator, model, optimizer, _ = prepared(gpt2, plugins)
    made = batches("plain", 6, 4 * accelerator.data_parallel_size)
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    train(accelerator, model, optimizer, [{k: v.chunk(size)[rank] for k, v in b.items()} for b in made])
    copies = [model.transformer.wte, model.lm_head]
    return [copy.weight.detach().clone() for copy in copies if hasattr(copy, "weight")]


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["plain", "zero1"])
def test_tied_weights_stay_equal(plugins):
    ranks = run_ranks(tied_weights, 4, [pipeline(2, 2), *plugins])
    weights = [weight for rank in ranks for weight in rank]
    assert len(weights) == 4
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def unfreezes(name, adds):
    """Gradient norms, and weights by FQN: the embedding is frozen at first, and one name of it unfrozen later."""
    from neuron_accel import NeuronAccelerator

    results = []
    for plugins in ([], [pipeline(2, 2)]):
        accelerator = NeuronAccelerator(config={"plugins": plugins}) if plugins else None
        torch.manual_seed(0)
        model = gpt2()
        model.transformer.wte.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad or not adds], lr=0.1)
        if accelerator:
            model, optimizer = accelerator.prepare(model, optimizer)
        norms = []
        for step, batch in enumerate(batches("plain", 4, 4)):
            if step == 1:
                found = [p.requires_grad_(True) for n, p in model.named_parameters() if name in n]
                if adds:
                    optimizer.add_param_group({"params": found, "lr": 0.05})
            loss = model(**batch).loss
            (accelerator.backward if accelerator else torch.autograd.backward)(loss)
            clip = accelerator.clip_grad_norm_ if accelerator else nn.utils.clip_grad_norm_
            norms.append(float(clip(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        results.append((norms, accelerator.get_state_dict(model) if accelerator else model.state_dict()))
    return results


@pytest.mark.parametrize("adds", [False, True], ids=["held", "added to the optimizer"])
def test_a_tied_weight_that_is_unfrozen_by_name_trains_on_all_its_stages(adds):
    (norms, weights), (found, stages) = run_ranks(unfreezes, 2, "wte", adds, timeout=40)[0]
    assert found == pytest.approx(norms, rel=1e-4)
    for key, value in weights.items():
        torch.testing.assert_close(stages[key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_a_tied_weight_that_is_unfrozen_under_another_name_only_is_an_error_on_all_stages():
    with pytest.raises(RanksError) as raised:
        run_ranks(unfreezes, 2, "lm_head", False, timeout=40)
    assert {type(error) for error in raised.value.errors.values()} == {UsageError}
    assert "only the copy on stage 1 of the pipeline was unfrozen" in str(raised.value)
    assert "freeze or unfreeze 'transformer.wte.weight'" in str(raised.value)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def goes_on(plugins, folder, saves):
    """Losses of two more steps, after two steps that were saved, or after loading them."""
    accelerator, model, optimizer, _ = prepared(gpt2, plugins)
    made = batches("plain", 4, 4)
    if saves:
        train(accelerator, model, optimizer, made[:2])
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return train(accelerator, model, optimizer, made[2:])


def test_what_a_pipeline_saved_any_mesh_loads(tmp_path):
    folder = str(tmp_path / "saved")
    (expected, _) = run_ranks(goes_on, 2, [pipeline(2, 2)], folder, True)
    for ranks, plugins in ((2, [pipeline(2, 2)]), (1, []), (4, [pipeline(4, 4), "zero1"])):
        for losses in run_ranks(goes_on, ranks, plugins, folder, False):
            assert losses == pytest.approx(expected, rel=1e-5)


# ---- models of one's own ---------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width, as_tuple):
        super().__init__()
        self.linear, self.as_tuple = nn.Linear(width, width), as_tuple

    def forward(self, x):
        x = x + torch.tanh(self.linear(x))
        return (x, None) if self.as_tuple else x


class Own(nn.Module):
    """A regression model that takes a dict, a tuple, or two tensors, and returns a dict, a tuple or a loss."""

    def __init__(self, *, gives="loss", takes="tensors", as_tuple=False):
        super().__init__()
        self.gives, self.takes, self.as_tuple = gives, takes, as_tuple
        self.embed, self.norm_in = nn.Linear(6, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block(8, as_tuple) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x, y=None):
        if self.takes == "dict":
            x, y = x["x"], x["y"]
        elif self.takes == "tuple":
            x, y = x
        h = self.norm_in(self.embed(x))
        for block in self.blocks:
            h = block(h)[0] if self.as_tuple else block(h)
        prediction = self.head(h).squeeze(-1)
        loss = ((prediction - y) ** 2).mean()
        return {"loss": loss, "dict": {"loss": loss, "prediction": prediction}, "tuple": (loss, prediction)}[self.gives]


def call(model, takes, x, y):
    return model({"x": x, "y": y}) if takes == "dict" else model((x, y)) if takes == "tuple" else model(x, y)


def own_model(gives, takes, as_tuple):
    plugins = [pipeline(2, 4, stage_cuts=("blocks.1",))]
    accelerator, model, optimizer, alone = prepared(
        functools.partial(Own, gives=gives, takes=takes, as_tuple=as_tuple), plugins
    )
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator)
        losses = []
        for module in (model, alone):
            output = call(module, takes, x, y)
            losses.append(output if gives == "loss" else output["loss"] if gives == "dict" else output[0])
        torch.testing.assert_close(*losses)
        accelerator.backward(losses[0])
        losses[1].backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(weights, dict(alone.state_dict()))
    model.eval(), alone.eval()
    found, expected = call(model, takes, x, y), call(alone, takes, x, y)
    if gives == "dict":
        found = dict(found)
    torch.testing.assert_close(found, expected)
    return sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("gives", "takes", "as_tuple"), [("loss", "tensors", False), ("dict", "dict", False), ("tuple", "tuple", True)]
)
def test_a_model_of_ones_own_is_cut_where_one_says(gives, takes, as_tuple):
    first, second = run_ranks(own_model, 2, gives, takes, as_tuple)
    assert {name.split(".")[1] for name in second if name.startswith("blocks")} == {"1", "2", "3"}
    assert [name for name in first if not name.startswith("blocks")] == [
        "embed.bias", "embed.weight", "norm_in.bias", "norm_in.weight"
    ]  # fmt: skip


class RememberingBlock(nn.Module):
    def __init__(self, width, packs):
        super().__init__()
        self.linear, self.gate, self.packs = nn.Linear(width, width), nn.Linear(width, width), packs

    def forward(self, h, memory=None, chosen=None):
        h = h + torch.tanh(self.linear(h))
        if memory is not None:
            memory = memory[0] if self.packs else memory
            h = h + self.gate(memory) + 0.1 * nn.functional.one_hot(chosen, h.shape[-1])
        memory = torch.tanh(h if memory is None else memory + h)
        return h, [memory] if self.packs else memory, h.argmax(-1), h * 2


class Remembering(Own):
    """Blocks hand on more than hidden states: a tensor that learns, integers, and something that nobody takes."""

    def __init__(self, packs=False):
        super().__init__()
        self.blocks = nn.ModuleList(RememberingBlock(8, packs) for _ in range(4))

    def forward(self, x, y):
        h, memory, chosen = self.norm_in(self.embed(x)), None, None
        for block in self.blocks:
            h, memory, chosen, _ = block(h, memory=memory, chosen=chosen)
        return ((self.head(h).squeeze(-1) - y) ** 2).mean()


def remembers(schedule, packs):
    """Gradients on this rank and in one process, and how many messages each of two steps took."""
    cuts = tuple(f"blocks.{i}" for i in range(1, 4))
    plugins = [pipeline(4, 4, schedule=schedule, stage_cuts=cuts)]
    accelerator, model, _, alone = prepared(functools.partial(Remembering, packs), plugins)
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.ones(8)
    sent = []
    for _ in range(2):
        with accelerator.run.backend.record() as traffic:
            try:
                accelerator.backward(model(x, y))
            except UnsupportedModelError as error:
                return str(error)
        alone(x, y).backward()
        sent.append(traffic.count(op="send"))
    whole = dict(alone.named_parameters())
    return [(p.grad, whole[name].grad) for name, p in model.named_parameters()], sent


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_blocks_hand_on_what_the_next_ones_take(schedule):
    ranks = run_ranks(remembers, 4, schedule, False)
    for gradients, _ in ranks:
        for found, expected in gradients:
            torch.testing.assert_close(found, expected)
    # 3 tensors forward, 2 gradients back for each of 4 micro-batches; once, what they look like
    assert [sent for _, sent in ranks] == [[13, 12], [21, 20], [21, 20], [8, 8]]


def test_what_blocks_hand_on_is_a_tensor():
    for message in run_ranks(remembers, 4, "1f1b", True):
        assert "'blocks.0' returns something other than a tensor" in message
        assert "(list, Tensor, Tensor), and the next block takes it" in message


# ---- precision -------------------------------------------------------------------------------------------------------
def in_bfloat16(schedule):
    accelerator, model, optimizer, alone = prepared(llama, [pipeline(2, 2, schedule=schedule)], mixed_precision="bf16")
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    (batch,) = batches("plain", 1, 4)
    found, expected = [], []
    for _ in range(8):
        loss = model(**batch).loss
        accelerator.backward(loss)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = alone(**batch).loss
        other.backward()
        found.append(loss.item())
        expected.append(other.item())
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    dtypes = {p.dtype for p in model.parameters()}
    return found, expected, dtypes


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_bfloat16(schedule):
    for found, expected, dtypes in run_ranks(in_bfloat16, 2, schedule):
        assert dtypes == {torch.float32}
        assert expected[-1] < expected[0] - 1
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0)


# ---- what is refused -------------------------------------------------------------------------------------------------
def refused(plugins, model_fn, size, change):
    """The error of every rank; none hangs."""
    try:
        accelerator, model, _optimizer, _ = prepared(model_fn, plugins)
        (batch,) = batches("plain", 1, size)
        loss = model(**batch, **(change if isinstance(change, dict) else {})).loss
        accelerator.backward(loss * change if isinstance(change, float) else loss)
    except NeuronAccelError as error:
        return type(error), str(error)
    return None, ""


def replaced_losses():
    """What becomes of losses that a forward hook assigns."""
    changes = {
        "same": lambda model, loss: loss * 1.0,
        "halved": lambda model, loss: loss / 2,
        "item": lambda model, loss: loss / 2,
        "another": lambda model, loss: torch.ones((), requires_grad=False),
        "regularised": lambda model, loss: loss + next(model.parameters()).square().sum(),
        "of others": lambda model, loss: loss + other.square(),
    }
    found, other = {}, torch.ones((), requires_grad=True)
    for name, change in changes.items():
        accelerator, model, _optimizer, _ = prepared(llama, [pipeline(2, 2)])
        (batch,) = batches("plain", 1, 4)

        def hook(module, args, output, name=name, change=change):
            loss = change(module, output.loss)
            if name == "item":
                output["loss"] = loss
            else:
                output.loss = loss
            assert output["loss"] is output.loss is output[0] is loss

        model.register_forward_hook(hook)
        try:
            accelerator.backward(model(**batch).loss)
            found[name] = ""
        except UsageError as error:
            found[name] = str(error)
        accelerator.free_memory()
    return found, other.grad


def test_a_loss_that_a_hook_assigns_is_honoured_or_refused():
    for found, gradient in run_ranks(replaced_losses, 2):
        assert found["same"] == found["of others"] == ""
        assert gradient == 2
        assert "was multiplied by 0.5" in found["halved"]
        assert "was multiplied by 0.5" in found["item"]
        assert "another tensor took its place" in found["another"]
        assert "depends on the model's parameters" in found["regularised"]


class NoPlan(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, input_ids, labels):
        raise AssertionError("never called")


def sharing_memory():
    model = llama()
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    return model


@pytest.mark.parametrize(
    ("error", "message", "plugins", "model_fn", "size", "change"),
    [
        (UnsupportedModelError, "has 4 blocks and cannot be split into 8", 8, llama, 8, None),
        (UsageError, "batch of 6 samples cannot be split into 4", [pipeline(2, 4)], llama, 6, None),
        (UnsupportedModelError, r"stage_cuts=\('stack.1',\)", [pipeline(2, 2)], NoPlan, 4, None),
        (UnsupportedModelError, "share memory", [pipeline(2, 2)], sharing_memory, 4, None),
        (UnsupportedModelError, "is not a block", [pipeline(2, 2, stage_cuts=("model.norm",))], llama, 4, None),
        (UnsupportedModelError, "leave a stage", [pipeline(2, 2, stage_cuts=("model.layers.0",))], llama, 4, None),
        (UnsupportedModelError, "2 stage_cuts make 3 stages", [pipeline(2, 2, stage_cuts=("a", "b"))], llama, 4, None),
        (UsageError, "output_hidden_states", [pipeline(2, 2)], llama, 4, {"output_hidden_states": True}),
        (UsageError, "output_router_logits", [pipeline(2, 2)], mixtral, 4, {"output_router_logits": True}),
        (UsageError, "key/value cache", [pipeline(2, 2)], llama, 4, {"use_cache": True}),
        (UsageError, "multiplied by 0.5", [pipeline(2, 2)], llama, 4, 0.5),
        (PlanError, "has no effect without a pipeline", [pipeline(1, 4)], llama, 4, None),
        (NeuronAccelError, "use 2 or 4", [pipeline(2, 3, schedule="interleaved", virtual_stages=2)], llama, 4, None),
    ],
)  # fmt: skip
def test_refused_on_every_rank(error, message, plugins, model_fn, size, change):
    ranks = 2
    if plugins == 8:  # more stages than blocks, through virtual ones
        plugins, ranks = [pipeline(2, 2, schedule="interleaved", virtual_stages=4)], 2
    for kind, text in run_ranks(refused, ranks, plugins, model_fn, size, change):
        assert kind is not None
        assert issubclass(kind, error)
        assert message.replace("\\", "") in text


class Fault(nn.Module):
    """Wraps a layer and raises where and when it is told to."""

    def __init__(self, layer, when, in_backward):
        super().__init__()
        self.layer, self.when, self.in_backward, self.calls = layer, when, in_backward, 0

    def forward(self, hidden_states, *args, **kwargs):
        self.calls += 1
        output = self.layer(hidden_states, *args, **kwargs)
        if self.calls == self.when:
            if not self.in_backward:
                raise ArithmeticError("this stage is at fault")
            output.register_hook(self.fail)
        return output

    def fail(self, gradient):
        raise ArithmeticError("this stage is at fault")


def faulty(block, when, in_backward):
    model = llama()
    model.model.layers[block].mlp = Fault(model.model.layers[block].mlp, when, in_backward)
    return model


def stage_raises(block, when, in_backward, schedule, stages):
    accelerator, model, optimizer, _ = prepared(
        functools.partial(faulty, block, when, in_backward), [pipeline(stages, 4, schedule=schedule)]
    )
    try:
        train(accelerator, model, optimizer, batches("plain", 2, 4))
    except Exception as error:
        return repr(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("block", "when", "in_backward", "schedule", "stages"),
    [
        (0, 1, False, "1f1b", 4),  # before anybody knows a shape
        (2, 1, False, "gpipe", 4),
        (BLOCKS - 1, 1, False, "1f1b", 2),
        (1, 3, False, "1f1b", 4),
        (3, 6, False, "1f1b", 2),  # in the second step
        (0, 2, True, "1f1b", 2),
        (3, 4, True, "zero-bubble", 2),
    ],
)
def test_all_ranks_end_with_the_error_of_a_stage(block, when, in_backward, schedule, stages):
    found = run_ranks(stage_raises, stages, block, when, in_backward, schedule, stages, timeout=40)
    assert found == ["ArithmeticError('this stage is at fault')"] * stages


def replica_raises(when, in_backward, plugins, accumulation):
    """The last stage of the second of two replicas raises."""
    try:
        sick = int(os.environ["RANK"]) % 2
        model_fn = functools.partial(faulty, BLOCKS - 1, when if sick else None, in_backward)
        accelerator, model, optimizer, _ = prepared(model_fn, plugins, gradient_accumulation_steps=accumulation)
        for batch in batches("plain", 4, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return repr(error), str(error.__cause__)
    return "nothing raised", ""


@pytest.mark.parametrize(
    ("when", "in_backward", "plugins", "accumulation"),
    [
        (1, False, [], 1),
        (4, True, ["zero1"], 1),  # in the last backward pass of the second step, while others send gradients
        (3, False, ["zero1"], 2),  # before the call in which gradients are sent
    ],
)
def test_replicas_end_with_the_error_of_a_stage_of_another(when, in_backward, plugins, accumulation):
    plugins = [pipeline(2, 2), *plugins]
    found = run_ranks(replica_raises, 4, when, in_backward, plugins, accumulation, timeout=40, full_exit=True)
    direction, microbatch = "backward" if in_backward else "forward", (when - 1) % 2
    place = f"Rank 3 (stage 1, {direction} pass of micro-batch {microbatch}) raised this; all ranks raise it."
    assert found == [("ArithmeticError('this stage is at fault')", place)] * 4


def replica_raises_in_evaluation():
    sick = int(os.environ["RANK"]) % 2
    accelerator, model, _, _ = prepared(functools.partial(faulty, 0, sick or None, False), [pipeline(2, 2)])
    model.eval()
    with torch.no_grad():
        for batch in batches("plain", 2, 4):
            accelerator.gather_for_metrics(model(**batch).logits)


def test_replicas_do_not_wait_for_one_that_raised_in_evaluation():
    with pytest.raises(RanksError) as caught:
        run_ranks(replica_raises_in_evaluation, 4, timeout=40)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert all(isinstance(caught.value.errors[rank], CommunicationError) for rank in (0, 2))


def ragged_on_one_replica():
    accelerator, model, optimizer, _ = prepared(llama, [pipeline(2, 2)])
    try:
        train(accelerator, model, optimizer, batches("plain", 1, 4 - accelerator.data_parallel_rank))
    except UsageError as error:
        return error.what
    return "nothing raised"


def test_replicas_end_with_the_error_of_a_batch_of_another():
    found = run_ranks(ragged_on_one_replica, 4, timeout=40)
    assert found == ["A batch of 3 samples cannot be split into 2 micro-batches."] * 4


def uneven(counts):
    """Weights after replicas have trained on different numbers of batches."""
    accelerator, model, optimizer, _ = prepared(gpt2, [pipeline(2, 2), "zero1"])
    with accelerator.join_uneven_inputs([model], even_batches=False):
        train(accelerator, model, optimizer, batches("plain", counts[accelerator.data_parallel_rank], 4))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_replicas_may_run_out_of_data():
    ranks = run_ranks(uneven, 4, (3, 1))
    for stage in (ranks[:2], ranks[2:]):
        one, other = stage
        assert one
        assert one.keys() == other.keys()
        assert all(torch.equal(other[name], value) for name, value in one.items())


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(RanksError):
        run_ranks(dies, 2, timeout=40)


def dies():
    accelerator, model, optimizer, _ = prepared(llama, [pipeline(2, 2)])
    if accelerator.run.backend.rank == 1:
        os._exit(3)
    train(accelerator, model, optimizer, batches("plain", 1, 4))

"""A user's own modules, divided by a plan of theirs; what is said of a divided model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.ranks import run_ranks
from tests.distributed import models

PLAN = {
    "blocks.*.qkv": "colwise:3",
    "blocks.*.heads": "per_rank",
    "blocks.*.out": "rowwise",
    "blocks.*.fc1": "colwise",
    "blocks.*.scale": "shared",
    "blocks.*.fc2": "rowwise",
}


SEQUENCE = ["sequence_parallel"]


class Scale(nn.Module):
    """Something learned that is the same for every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.scale, self.fc2 = nn.Linear(width, 24), Scale(), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.scale(self.fc1(x))))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(4, 5, 16, generator=generator)} for _ in range(3)]


@pytest.mark.parametrize("sequence", [False, True])
def test_trains_like_one_process(sequence: bool) -> None:
    plan = PLAN | ({"blocks.*": "block"} if sequence else {})
    plugin = {"model_parallelism": {"tensor_parallel_size": 2, "tensor_parallel_plan": plan}}
    plugins = [plugin, *(SEQUENCE if sequence else [])]
    assert_parallel_equivalence(Own, _batches(), plugins, training=Training(max_norm=0.5))


class MyBlock(nn.Module):
    """The block that the documentation has a plan for."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 24), nn.Linear(24, width)
        self.gate = nn.Linear(width, 1)  # without a style

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.size)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.gate(x).tanh() * self.fc2(F.gelu(self.fc1(self.norms[1](x))))


class OfBlocks(nn.Module):
    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([MyBlock() for _ in range(3)])
        self.between = nn.Linear(16, 16) if between else None
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
            x = x if self.between is None else self.between(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _documented() -> nn.Module:
    """A model of the documentation's blocks, with the documentation's plan registered, as it is written there."""
    text = (Path(__file__).parents[4] / "docs" / "tensor_parallel.md").read_text()
    section = text.partition("## Your own models")[2]
    exec(section.partition("```python")[2].partition("```")[0], {"MyBlock": MyBlock})
    return OfBlocks()


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("others", [[], SEQUENCE], ids=["tp", "sp"])
def test_the_documented_plan_of_a_block_trains_like_one_process(degree: int, others: list[str]) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [{"ids": torch.randint(30, (2, 7), generator=generator)} for _ in range(2)]  # 7: shards are padded
    plugins = [{"model_parallelism": {"tensor_parallel_size": degree}}, *others]
    assert_parallel_equivalence(_documented, batches, plugins, training=Training(max_norm=0.5))


def _every_block() -> dict[str, Any]:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin

    model = _documented()
    whole = sum(p.numel() for name, p in model.named_parameters())
    of_layers = sum(
        p.numel()
        for name, p in model.named_parameters()
        if any(part in name for part in ("qkv.", "fc1.", "out.weight", "fc2.weight"))
    )
    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2)])
    prepared = accelerator.prepare(model)
    held = sum(p.numel() for p in prepared.parameters())
    found: dict[str, Any] = {"explained": accelerator.explain(prepared), "held": (held, whole - of_layers // 2)}
    accelerator.free_memory()
    plugins = [ModelParallelismPlugin(tensor_parallel_size=2), SequenceParallelPlugin()]
    accelerator = NeuronAccelerator(plugins=plugins)
    between = accelerator.prepare(OfBlocks(between=True))
    try:
        between(torch.zeros(2, 4, dtype=torch.long))
    except Exception as error:
        found["between"] = str(error)
    convolution = OfBlocks()
    convolution.blocks[1].gate = nn.Conv1d(16, 16, 3)
    nested = nn.Sequential(OfBlocks(), OfBlocks())
    for name, refused in (("convolution", convolution), ("two lists", nested)):
        try:
            accelerator.prepare(refused)
        except Exception as error:
            found[name] = str(error)
    return found


def test_a_registered_plan_holds_for_every_module_of_the_class() -> None:
    found = run_ranks(_every_block, 2)[0]
    rows = [line.split() for line in found["explained"].splitlines() if "blocks.*." in line]
    names = [row[0] for row in rows]
    assert len(set(names)) == len(names)
    assert {tuple(row[1:3]) for row in rows if row[0].endswith("qkv.weight")} == {("3", "colwise")}
    assert {tuple(row[1:3]) for row in rows if row[0].endswith("fc2.weight")} == {("3", "rowwise")}
    assert found["held"][0] == found["held"][1]
    assert "'between' is called after the first block" in found["between"]
    assert "'blocks.1.gate' is a Conv1d" in found["convolution"]
    assert "are in '0.blocks' and '1.blocks'" in found["two lists"]


class Wrapped(nn.Module):
    """A model of a registered class inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Derived(Own):
    pass


def _registering(make: Any) -> nn.Module:
    from neuron_accel import register_tensor_parallel_plan

    register_tensor_parallel_plan(Own, PLAN, override=True)
    return make()


@pytest.mark.parametrize("make", [Derived, Wrapped])
def test_a_registered_plan_is_found(make: Any) -> None:
    plugin = {"model_parallelism": {"tensor_parallel_size": 2}}
    assert_parallel_equivalence(functools.partial(_registering, make), _batches(), [plugin])


def _registered() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, register_tensor_parallel_plan
    from neuron_accel.models import plan_for

    found: dict[str, Any] = {}
    register_tensor_parallel_plan(Own, PLAN)
    register_tensor_parallel_plan("my-llama", plan_for("llama"))
    for name, again in (
        ("twice", lambda: register_tensor_parallel_plan(Own, {})),
        ("built in", lambda: register_tensor_parallel_plan("llama", {})),
        ("no target", lambda: register_tensor_parallel_plan(3, {})),
        ("whole", lambda: register_tensor_parallel_plan(Block, plan_for("llama"))),
    ):
        try:
            again()
        except Exception as error:
            found[name] = str(error)
    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2)])
    found["explained"] = accelerator.explain(Own())

    class MyConfig(LlamaConfig):
        model_type = "my-llama"

    config = MyConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    found["family"] = accelerator.explain(LlamaForCausalLM(config))
    return found


def test_what_is_registered() -> None:
    found = run_ranks(_registered, 2)[0]
    assert "a plan for 'Own' already" in found["twice"]
    assert "a plan for 'llama' already" in found["built in"]
    assert "a class of modules or to a family" in found["no target"]
    assert "describes a family" in found["whole"]
    row = next(line for line in found["explained"].splitlines() if "blocks.*.qkv.weight" in line)
    assert "colwise  Shard(0) over tp (3 blocks)" in row
    assert "vocabulary" in found["family"] or "embedding" in found["family"]


def _refusals() -> dict[str, str]:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, SequenceParallelPlugin

    plans = {
        "style": PLAN | {"blocks.*.fc1": "diagonal"},
        "nowhere": PLAN | {"blocks.*.fc9": "colwise"},
        "no linear": PLAN | {"blocks.*.norm": "colwise"},
        "no number": PLAN | {"blocks.*.norm": "per_rank"},
        "uneven": PLAN | {"blocks.*.size": "per_rank"},
    }
    messages = {}
    for name, plan in plans.items():
        own = Own()
        for block in own.blocks:
            block.size = 3 if name == "uneven" else block.size
        accelerator = NeuronAccelerator(
            plugins=[ModelParallelismPlugin(tensor_parallel_size=2, tensor_parallel_plan=plan)]
        )
        try:
            accelerator.prepare(own)
        except Exception as error:
            messages[name] = str(error)
    plugins = [ModelParallelismPlugin(tensor_parallel_size=2, tensor_parallel_plan=PLAN), SequenceParallelPlugin()]
    try:
        NeuronAccelerator(plugins=plugins).prepare(Own())
    except Exception as error:
        messages["sequence"] = str(error)
    return messages


def test_plans_that_do_not_fit() -> None:
    messages = run_ranks(_refusals, 2)[0]
    assert "'diagonal', for 'blocks.*.fc1', is not a valid style" in messages["style"]
    assert "no module 'blocks.*.fc9'" in messages["nowhere"]
    assert "'blocks.0.norm' is a LayerNorm" in messages["no linear"]
    assert "is for an integer attribute" in messages["no number"]
    assert "'blocks.*.size' = 3 is not divisible by 2" in messages["uneven"]
    assert "cannot be sharded along the sequence" in messages["sequence"]
    assert "names no blocks" in messages["sequence"]
    assert "{'blocks.*': 'block', ...}" in messages["sequence"]


def _explained() -> dict[str, Any]:
    from neuron_accel import ModelParallelismPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2)])
    model = models.llama(kv_heads=1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = accelerator.explain(model) if accelerator.state.process_index == 0 else ""  # no rank waits for another
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    prepared = accelerator.prepare(model)
    held = sum(parameter.numel() * 4 for parameter in prepared.parameters())
    step = accelerator.explain(prepared, tokens=100)
    return {"before": before, "text": accelerator.explain(prepared), "step": step, "held": held}


def test_explain_of_a_model() -> None:
    found = run_ranks(_explained, 2)[0]
    text = found["text"]
    assert found["before"] == text
    assert f"Parameters on rank 0: {found['held']:,} bytes" in text
    row = next(line for line in text.splitlines() if "layers.*.self_attn.k_proj.weight" in line)
    assert "Shard(0) over tp (2 replicas of each shard)" in row
    assert row.split()[2] == "colwise"
    assert next(line for line in text.splitlines() if "input_layernorm" in line).split()[2:4] == ["-", "Replicate"]
    assert row.count("(8, 32)") == 2
    row = next(line for line in text.splitlines() if line.strip().startswith("model.layers.1.mlp "))
    assert row.split()[-1] == str(2 * 32 * 4)
    row = next(line for line in found["step"].splitlines() if line.strip().startswith("model.layers.1.mlp "))
    assert row.split()[-1] == f"{100 * 2 * 32 * 4:,}"
    assert "ranks that hold the same heads" in text


@pytest.mark.parametrize(("degree", "reason"), [(2, ""), (3, ""), (64, "num_attention_heads = 4 is not")])
def test_explain_of_a_configuration(degree: int, reason: str) -> None:
    from transformers import LlamaConfig, XLMConfig

    from neuron_accel import ModelParallelismPlugin

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    report = ModelParallelismPlugin.supports(config, tensor_parallel_size=degree)
    assert bool(report) is (not reason)
    assert reason in report.reason
    if report:
        total = sum(parameter.numel() for parameter in models.llama().__class__(config).parameters())
        assert report.sharded + report.replicated == total
        assert report.replicated == 3 * 16
        assert (report.local == report.replicated + report.sharded // 2) is (degree == 2)
    assert "'xlm'" in ModelParallelismPlugin.supports(XLMConfig(n_layers=1, emb_dim=16, n_heads=2)).reason

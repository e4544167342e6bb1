"""What tensor parallelism decides before it changes a model: plans, shards, layouts and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    XLMConfig,
    XLMModel,
)

from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.runtime.run import PreparedModel
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import LayoutError, PlanError, UnsupportedModelError
from neuron_accel.models import Architecture, colwise, known_model_types, plan_for
from neuron_accel.models.plan import matches_fqn
from neuron_accel.strategies.data_parallel.plugin import DataParallelPlugin
from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin
from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin
from neuron_accel.strategies.tensor_parallel.shard_plan import plan_shards
from tests.distributed.models import gpt2_config, llama_config
from tests.sweeps.tiny import tiny_model


def _llama(**options) -> LlamaForCausalLM:
    sizes = {"vocab_size": 50, "num_attention_heads": 8, "num_key_value_heads": 4}
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(**sizes | options))


def _gpt2(**options) -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(gpt2_config(**{"vocab_size": 50, "n_head": 8, "n_positions": 16} | options))


def _layouts(model: nn.Module, degree: int, **options) -> dict[str, Layout]:
    divisions = plan_shards(Architecture.of(model), degree, **options)
    return {f"{d.fqn}.{name}": layout for d in divisions for name, layout in d.layouts.items()}


# ---- plans and where they apply --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "text", "head", "sequence"),
    [
        ("gemma3", "model.language_model", "lm_head", ""),
        ("llama4", "language_model.model", "language_model.lm_head", ""),  # the text model has the head
        ("qwen3_vl", "model.language_model", "lm_head", "adds the features of images to hidden states"),
    ],
)
def test_of_a_model_of_images_and_text_the_text_is_sharded(family, text, head, sequence):
    with torch.device("meta"):
        model = tiny_model(family, "images with text")
    architecture = Architecture.of(model)
    assert (architecture.base_name, architecture.head[0]) == (text, head)
    assert sequence in architecture.plan.sequence
    assert bool(sequence) == bool(architecture.plan.sequence)
    sharded = {name for name, layout in _layouts(model, 2).items() if layout.cuts}
    assert f"{text}.layers.1.self_attn.q_proj.weight" in sharded
    assert all(name.startswith(text) or name == f"{head}.weight" for name in sharded)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp", "layers.0.mlp", True),
        ("layers.*.mlp", "layers.12.mlp", True),
        ("layers.*.mlp", "layers.0.mlp.up_proj", False),
        ("layers.*.mlp", "layers.0.self_attn.mlp", False),
        ("layers.*", "layers", False),
        ("h.*", "xh.0", False),
        ("norm", "normal", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches_fqn(pattern, name) is expected


def test_every_known_family_is_found_by_its_name() -> None:
    for model_type in known_model_types():
        assert model_type in plan_for(model_type).model_types
    assert plan_for("no such family") is None


@pytest.mark.parametrize(
    ("model", "base_name", "head"),
    [
        (lambda: _llama(), "model", "lm_head"),
        (lambda: LlamaModel(_llama().config), "", None),
        (lambda: LlamaForSequenceClassification(_llama().config), "model", None),
        (lambda: _gpt2(), "transformer", "lm_head"),
        (lambda: GPT2Model(_gpt2().config), "", None),
        (lambda: nn.ModuleDict({"inner": _llama()}), "inner.model", "inner.lm_head"),
        (lambda: tiny_model("llama4_text"), "model", "lm_head"),  # its class says "language_model"
    ],
)
def test_where_the_parts_of_a_model_are(model, base_name: str, head: str | None) -> None:
    model = model()
    architecture = Architecture.of(model)
    assert architecture.base_name == base_name
    assert model.get_submodule(base_name) is architecture.base
    assert (architecture.head or (None,))[0] == head
    assert len(architecture.blocks) == 2
    assert len(architecture.regions) == 4
    for name, module in [
        *architecture.blocks,
        *architecture.regions,
        architecture.last,
        architecture.token_embedding,
    ]:
        assert model.get_submodule(name) is module


def test_models_without_a_plan() -> None:
    with pytest.raises(UnsupportedModelError, match="No plan is known for Linear"):
        Architecture.of(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="model type 'xlm' of XLMModel") as error:
        Architecture.of(XLMModel(XLMConfig(emb_dim=8, n_layers=1, n_heads=2)))
    assert all(name in error.value.fix for name in known_model_types())
    with pytest.raises(UnsupportedModelError, match="add_cross_attention=True"):
        Architecture.of(_gpt2(add_cross_attention=True))


# ---- divisions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("degree", [2, 4])
def test_llama_shards(degree: int) -> None:
    shapes = {name: layout.local_shape for name, layout in _layouts(_llama(attention_bias=True), degree).items()}
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert shapes[attention + "q_proj.weight"] == (32 // degree, 32)
    assert shapes[attention + "q_proj.bias"] == (32 // degree,)
    assert shapes[attention + "k_proj.weight"] == shapes[attention + "v_proj.weight"] == (16 // degree, 32)
    assert shapes[attention + "o_proj.weight"] == (32, 32 // degree)
    assert shapes[attention + "o_proj.bias"] == (32,)
    assert shapes[mlp + "gate_proj.weight"] == shapes[mlp + "up_proj.weight"] == (48 // degree, 32)
    assert shapes[mlp + "down_proj.weight"] == (32, 48 // degree)
    rows = -(-50 // degree)
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (rows, 32)


def test_gpt2_fused_projection_keeps_query_key_and_value_of_a_head_together() -> None:
    layout = _layouts(_gpt2(), 4)["transformer.h.0.attn.c_attn.weight"]
    assert layout.local_shape == (32, 24)
    columns = torch.arange(96).expand(32, 96)
    assert layout.shard(columns, {"tp": 1})[0].tolist() == [*range(8, 16), *range(40, 48), *range(72, 80)]
    (cut,) = layout.cuts
    assert (cut.dim, cut.blocks, cut.unit) == (1, (32, 32, 32), 4)


def test_linear_attention_is_sharded_by_heads_of_different_widths() -> None:
    model = tiny_model("qwen3_5_text", linear_value_head_dim=16)  # 2 key heads and 4 value heads
    layout = _layouts(model, 2)["model.layers.0.linear_attn.conv1d.weight"]
    (cut,) = layout.cuts
    assert (cut.blocks, cut.unit) == ((16, 16, 64), 8)
    channels = torch.arange(96).view(96, 1, 1).expand(layout.shape)
    own = [*range(8, 16), *range(24, 32), *range(64, 96)]
    assert layout.shard(channels, {"tp": 1})[:, 0, 0].tolist() == own


def test_linear_attention_is_replicated_if_its_heads_do_not_divide() -> None:
    model = tiny_model("qwen3_5_text")
    linear = {name for name in _layouts(model, 4) if ".linear_attn." in name}
    assert not linear
    assert any(".self_attn." in name for name in _layouts(model, 4))
    assert not any("linear_attn" in name for name, _ in Architecture.of(model).at(4).regions)


def test_a_second_table_of_tokens_is_sharded_too() -> None:
    layout = _layouts(tiny_model("gemma4_text"), 2)["model.embed_tokens_per_layer.weight"]
    assert layout.local_shape == (51, 16)


def test_embeddings_can_be_replicated() -> None:
    layouts = _layouts(_llama(), 2, parallelize_embeddings=False)
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(layouts)


@pytest.mark.parametrize("model", [_llama, _gpt2])
def test_every_weight_of_a_region_is_sharded(model) -> None:
    model = model()
    layouts = _layouts(model, 2)
    for region, module in Architecture.of(model).regions:
        for name, parameter in module.named_parameters():
            layout = layouts[f"{region}.{name}"]
            assert layout.shape == parameter.shape
            assert bool(layout.cuts) is (parameter.dim() == 2 or "c_attn" in name or "c_fc" in name)


_SIX = {"hidden_size": 48, "num_attention_heads": 6}


@pytest.mark.parametrize(
    ("options", "degree", "message", "fix"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "num_attention_heads = 2 is not", "1, 2"),
        (_SIX | {"num_key_value_heads": 2}, 4, "num_attention_heads = 6 is not", "1, 2, 6"),
        (_SIX | {"num_key_value_heads": 3}, 4, "num_key_value_heads = 3 is not", "1, 3, 6"),
    ],
)
def test_what_does_not_divide(options: dict, degree: int, message: str, fix: str) -> None:
    with pytest.raises(LayoutError, match=message) as error:
        plan_shards(Architecture.of(_llama(**options)), degree)
    assert error.value.fix == f"choose tensor_parallel_size from: {fix}"
    assert f"tensor_parallel_size={degree}" in error.value.where


def test_more_ranks_than_key_value_heads() -> None:
    layouts = _layouts(_llama(num_key_value_heads=2), 4)
    layout = layouts["model.layers.0.self_attn.k_proj.weight"]
    assert layout.local_shape == (4, 32)
    assert layout.replicas == 2
    rows = torch.arange(8).unsqueeze(1).expand(8, 32)
    assert [layout.shard(rows, {"tp": rank})[0, 0].item() for rank in range(4)] == [0, 0, 4, 4]
    assert layouts["model.layers.0.self_attn.q_proj.weight"].replicas == 1


def test_heads_that_do_not_divide_are_padded_with_those_that_share_a_key() -> None:
    layouts = _layouts(_llama(num_attention_heads=8, num_key_value_heads=4), 3)
    shapes = {name.rpartition("layers.0.")[2]: layout.local_shape for name, layout in layouts.items()}
    assert shapes["self_attn.q_proj.weight"] == (2 * 2 * 4, 32)
    assert shapes["self_attn.k_proj.weight"] == (2 * 4, 32)
    assert shapes["self_attn.o_proj.weight"] == (32, 2 * 2 * 4)
    layout = layouts["model.layers.0.self_attn.q_proj.weight"]
    full = torch.arange(32 * 32.0).view(32, 32) + 1
    assert not layout.shard(full, {"tp": 2}).any()
    back = torch.zeros(32, 32)
    for rank in range(3):
        layout.write(layout.shard(full, {"tp": rank}), back, {"tp": rank})
    assert torch.equal(back, full)


def test_features_are_padded_where_zero_stays_zero() -> None:
    assert _layouts(_llama(intermediate_size=42), 4)["model.layers.0.mlp.up_proj.weight"].local_shape == (11, 32)
    with pytest.raises(LayoutError, match="not evenly divisible") as error:
        plan_shards(Architecture.of(_llama(intermediate_size=42, hidden_act="sigmoid")), 4)
    assert "activation" in error.value.why
    assert _layouts(_gpt2(n_inner=30), 4)["transformer.h.0.mlp.c_fc.weight"].local_shape == (32, 8)
    assert _layouts(_gpt2(), 8)["transformer.h.0.mlp.c_fc.weight"].local_shape == (32, 16)


def test_a_model_is_searched_as_often_with_more_blocks(monkeypatch) -> None:
    searches = []
    find = Architecture.find
    monkeypatch.setattr(Architecture, "find", lambda self, pattern: searches.append(pattern) or find(self, pattern))
    counts = []
    for blocks in (2, 6):
        searches.clear()
        _layouts(_llama(intermediate_size=42, num_hidden_layers=blocks), 4)
        counts.append(len(searches))
    assert 0 < counts[0] == counts[1]


def test_gpt2_xl_heads_on_eight_ranks() -> None:
    layouts = _layouts(_gpt2(n_head=25, n_embd=50), 8)
    assert layouts["transformer.h.0.attn.c_attn.weight"].local_shape == (50, 3 * 4 * 2)
    assert layouts["transformer.h.0.attn.c_proj.weight"].local_shape == (4 * 2, 50)


def test_attention_over_latent_features_divides_heads() -> None:
    layouts = _layouts(tiny_model("deepseek_v3"), 2)
    attention = "model.layers.0.self_attn."
    assert layouts[attention + "q_b_proj.weight"].local_shape == (2 * (8 + 8), 16)
    assert layouts[attention + "kv_b_proj.weight"].local_shape == (2 * (8 + 8), 16)
    assert layouts[attention + "o_proj.weight"].local_shape == (32, 2 * 8)
    assert not layouts[attention + "kv_a_proj_with_mqa.weight"].cuts


def test_a_single_key_head_is_replicated() -> None:
    model = tiny_model("falcon", new_decoder_architecture=False, multi_query=True)
    layouts = _layouts(model, 2)
    assert not layouts["transformer.h.0.self_attention.query_key_value.weight"].cuts
    assert layouts["transformer.h.0.self_attention.dense.weight"].local_shape == (32, 16)


class _Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * self.weight.dtype.itemsize


class _Shifted(nn.Embedding):
    def forward(self, input):
        return super().forward(input) - self.weight.mean()


class _Quantised(nn.Linear):
    def forward(self, input):
        return super().forward(input).round()


def test_modules_that_are_not_what_the_plan_takes_them_for() -> None:
    model = _llama()
    model.model.layers[1].self_attn.q_proj = _Quantised(32, 32)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj' is a _Quantised"):
        plan_shards(Architecture.of(model), 2)

    model = _llama()
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match="up_proj"):
        plan_shards(Architecture.of(model), 2)

    model = _llama()
    model.model.embed_tokens = _Scaled(50, 32)
    plan_shards(Architecture.of(model), 2)
    model.model.embed_tokens = _Shifted(50, 32)
    with pytest.raises(UnsupportedModelError, match="not a plain Embedding") as error:
        plan_shards(Architecture.of(model), 2)
    assert "parallelize_embeddings=False" in error.value.fix
    plan_shards(Architecture.of(model), 2, parallelize_embeddings=False)

    model = _llama()
    model.model.layers[0].mlp.gate = nn.Linear(32, 1)
    with pytest.raises(UnsupportedModelError, match=r"The parameter '.*mlp\.gate"):
        plan_shards(Architecture.of(model), 2)

    model = _llama()
    for layer in model.model.layers:
        del layer.mlp.up_proj
    with pytest.raises(UnsupportedModelError, match=r"no module 'layers\.\*\.mlp\.up_proj'"):
        plan_shards(Architecture.of(model), 2)


def test_a_style_that_nothing_handles() -> None:
    architecture = Architecture.of(_llama())
    styles = {**architecture.plan.styles, "layers.*.mlp.up_proj": replace(colwise(), kind="diagonal")}
    with pytest.raises(UnsupportedModelError, match="style 'diagonal' of 'model"):
        plan_shards(replace(architecture, plan=replace(architecture.plan, styles=styles)), 2)


# ---- plugins ---------------------------------------------------------------------------------------------------------
def _plan(*plugins, world_size: int = 4):
    return make_plan(plugins, world_size=world_size, default_owners={Claim.GRADIENT_REDUCTION: DataParallelPlugin()})


def test_plans_with_tensor_parallelism() -> None:
    plan = _plan(SequenceParallelPlugin(), ModelParallelismPlugin(tensor_parallel_size=2))
    assert plan.mesh.degree("tp") == plan.mesh.degree("dp") == 2
    assert plan.mesh.model_axes == ("tp",)
    names = [plugin.spec.name for plugin in plan.plugins]
    assert names.index("model_parallelism") < names.index("sequence_parallel")


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ([ModelParallelismPlugin(pipeline_parallel_size=2)], "pipeline_parallel_size=2"),
        ([ModelParallelismPlugin(tensor_parallel_size=2, num_microbatches=4)], "num_microbatches=4"),
        ([ModelParallelismPlugin(tensor_parallel_size=3)], "4 ranks cannot be divided"),
        ([SequenceParallelPlugin()], "sequence_parallel"),
        ([SequenceParallelPlugin(), ModelParallelismPlugin(tensor_parallel_size=1)], "sequence_parallel"),
    ],
)
def test_plans_that_cannot_be(plugins: list, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(*plugins)


def test_sequence_parallelism_of_a_model_that_is_not_sharded() -> None:
    model = _llama()
    with pytest.raises(PlanError, match="no tensor-parallel region in LlamaForCausalLM"):
        SequenceParallelPlugin().transform_model(PreparedModel(model, model, ParameterMap(model)), None)


def test_importing_the_plugins_is_cheap() -> None:
    code = (
        "import sys, json; import neuron_accel.models, neuron_accel.strategies.model_parallelism.plugin, "
        "neuron_accel.strategies.sequence_parallel.plugin, neuron_accel.strategies.tensor_parallel.rewrite; "
        "print(json.dumps([n for n in ('transformers', 'torch_xla', 'accelerate') if n in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == []


# ---- random numbers --------------------------------------------------------------------------------------------------
def _draw(index: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random numbers that a rank draws while ranks draw different numbers, and afterwards."""
    torch.manual_seed(seed)
    randomness = RankRandomness(torch.device("cpu"), index)
    randomness.begin(True)
    inside = torch.rand(4)
    randomness.end()
    after = torch.rand(4)
    randomness.end()  # a second time does nothing
    return inside, torch.cat([after, torch.rand(4)])


def test_a_random_number_context_left_by_an_error_is_reset() -> None:
    randomness = RankRandomness(torch.device("cpu"), 0)
    randomness.begin(True)
    randomness.begin(False)
    before = torch.get_rng_state()
    randomness.end()
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_of_a_rank_depend_on_seed_and_rank_alone() -> None:
    assert torch.equal(_draw(0, 1)[0], _draw(0, 1)[0])
    assert not torch.equal(_draw(0, 1)[0], _draw(1, 1)[0])
    assert not torch.equal(_draw(0, 1)[0], _draw(0, 2)[0])
    assert torch.equal(_draw(0, 1)[1], _draw(1, 1)[1])
    after = _draw(0, 1)[1]
    assert not torch.equal(after[:4], after[4:])

"""What cannot be exact, or would silently do nothing, is refused; and what is decided without ranks."""

from __future__ import annotations

import pickle

import pytest
import torch
from lora_support import gpt2, llama
from neuron_accel_lora import LoraPlugin
from neuron_accel_lora.layers import Dropout
from neuron_accel_lora.survey import Target, take_survey
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, NeuronAccelError
from neuron_accel.contract import RankRandomness
from neuron_accel.errors import ConfigurationError, ParameterError, UsageError
from neuron_accel.testing import run_ranks


def _survey(model: nn.Module, **options):
    return take_survey(model, LoraPlugin(peft_config=options).options())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_dora": True}, "use_dora=True is not possible"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 1)]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"lora_alhpa": 3}, "Did you mean 'lora_alpha'"),
    ],
)
def test_options_that_are_not_exact_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says.replace("(", r"\(")) as caught:
        LoraPlugin(peft_config=options).options()
    assert caught.value.fix


@pytest.mark.parametrize("options", [{"r": 0}, {"r": 2.5}, {"lora_dropout": 1.0}, {"lora_alpha": -1}])
def test_numbers_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        LoraPlugin(**options)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        LoraPlugin(peft_config=options)


def test_one_configuration_only() -> None:
    with pytest.raises(ConfigurationError, match="configured in two ways"):
        LoraPlugin(r=4, adapter="folder")
    with pytest.raises(ConfigurationError, match="configured in two ways"):
        LoraPlugin(r=4, peft_config={"r": 4})
    with pytest.raises(ConfigurationError, match="IA3Config"):
        LoraPlugin(peft_config=IA3Config())


def test_a_configuration_of_pefts_is_the_same_as_its_options() -> None:
    given = LoraPlugin(peft_config=LoraConfig(r=4, target_modules={"b", "a"}, task_type="CAUSAL_LM"))
    assert given == LoraPlugin(peft_config={"r": 4, "target_modules": ["a", "b"], "task_type": "CAUSAL_LM"})
    assert pickle.loads(pickle.dumps(given)) == given
    assert given.options().target_modules == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target_modules": ["q_prj"]}, "q_prj"),
        ({"target_modules": ["q_proj", "v_prj"]}, "'v_prj' in target_modules matches no module"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]}, "Did you mean 'lm_head'"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}}, "k_proj"),
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}, "'up_proj' in target_modules matches"),
    ],
)
def test_names_that_match_nothing_are_refused(options: dict, says: str) -> None:
    model = llama()
    with pytest.raises(ConfigurationError, match=says):
        _survey(model, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_module_cannot_be_trained_as_it_is() -> None:
    with pytest.raises(ConfigurationError, match="is tied to"):
        _survey(gpt2(), target_modules=["c_attn"], modules_to_save=["lm_head"])


def test_layers_of_other_kinds_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2))
    with pytest.raises(NeuronAccelError, match="Conv2d, cannot be adapted"):
        _survey(model, target_modules=["0", "1"])
    scaled = nn.ModuleDict({"table": nn.Embedding(4, 2, max_norm=1.0)})
    with pytest.raises(NeuronAccelError, match="cannot be adapted"):
        _survey(scaled, target_modules=["table"])


def test_a_model_with_adapters_is_refused() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UsageError, match="has adapters already"):
        _survey(model, target_modules=["q_proj"])


def test_what_is_found_is_what_peft_trains() -> None:
    options = {"target_modules": "all-linear", "r": 3, "bias": "all", "modules_to_save": ["ln_f"]}
    model, theirs = gpt2(), get_peft_model(gpt2(), LoraConfig(**options))
    before = dict(model.named_parameters())
    survey = _survey(model, **options)
    assert survey.count == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert {target.fqn.rpartition(".")[2] for target in survey.targets} == {"c_attn", "c_proj", "c_fc"}
    assert dict(model.named_parameters()).keys() == before.keys()  # nothing is attached yet
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(survey.base)
    assert "base_model.model.transformer.h.0.attn.c_attn.base_layer.bias" in survey.base.values()


def test_adapters_of_half_precision_weights_train_in_single_precision() -> None:
    options = {"target_modules": ["q_proj", "embed_tokens"], "r": 2}
    survey = _survey(llama().bfloat16(), **options)  # which seeds
    theirs = dict(get_peft_model(llama().bfloat16(), LoraConfig(**options)).named_parameters())
    for target in survey.targets:
        for name, value in zip(target.names, (target.a, target.b), strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(theirs[f"base_model.model.{name}"], value)


def _target(dropout: float) -> Target:
    one = torch.zeros(1, 1)
    return Target(fqn="layer", embedding=False, turned=False, scaling=1.0, dropout=dropout, a=one, b=one)


def _dropped(index: int, own: bool, inside: bool) -> torch.Tensor:
    """What rank ``index`` drops, in or outside a place where ranks draw different numbers."""
    torch.manual_seed(5)
    source = RankRandomness(torch.device("cpu"), index)
    source.begin(inside)
    first, second = (Dropout(_target(0.5), own, [source])(torch.ones(64)) for _ in range(2))
    source.end()
    assert not torch.equal(first, second)
    return torch.cat([first, second, torch.rand(4)])  # and what is drawn afterwards


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_drop_the_same_of_the_same_inputs(inside: bool) -> None:
    assert torch.equal(_dropped(0, False, inside), _dropped(1, False, inside))
    mine, other = _dropped(0, True, inside), _dropped(1, True, inside)
    assert not torch.equal(mine[:64], other[:64])
    assert torch.equal(mine[-4:], other[-4:])


def test_dropping_that_cannot_be_repeated_is_refused() -> None:
    source = RankRandomness(torch.device("cpu"), 0)
    drop = Dropout(_target(0.5), False, [source])

    def run(x: torch.Tensor) -> torch.Tensor:
        return drop(x) * 1.0

    source.begin(True)
    y = torch.utils.checkpoint.checkpoint(run, torch.ones(8, requires_grad=True), use_reentrant=False)
    source.end()
    with pytest.raises(UsageError, match="cannot be recomputed"):
        y.sum().backward()


def _resize(layer: str, plugins: list) -> str:
    accelerator = NeuronAccelerator(plugins=[LoraPlugin(target_modules=[layer]), *plugins])
    model = accelerator.prepare(llama())
    try:
        model.resize_token_embeddings(120)
    except UsageError as error:
        return str(error)
    return "resized"


@pytest.mark.parametrize(
    ("layer", "says"), [("embed_tokens", "'model.embed_tokens' has an adapter"), ("q_proj", "resized")]
)
def test_an_adapted_table_keeps_its_shape(layer: str, says: str) -> None:
    for found in run_ranks(_resize, 2, layer, [ModelParallelismPlugin(tensor_parallel_size=2)]):
        assert says in found


def _prepare(*, optimizer_of: str = "", **options) -> str:
    accelerator = NeuronAccelerator(plugins=[LoraPlugin(target_modules=["q_proj"], **options)])
    model = llama()
    parameters = [p for name, p in model.named_parameters() if optimizer_of in name]
    optimizer = torch.optim.Adagrad(parameters) if optimizer_of == "q_proj" else torch.optim.SGD(parameters, lr=0.1)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
    except NeuronAccelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "nothing was wrong"),
        ({"r": 2, "trainable_parameters": 2 * 2 * (32 + 32)}, "nothing was wrong"),
        ({"r": 2, "trainable_parameters": 100}, "256 elements would be trained, not 100"),
        ({"optimizer_of": "v_proj"}, "No optimizer holds"),
        ({"optimizer_of": "q_proj"}, "Adagrad has state for weights that are frozen"),
    ],
)
def test_what_would_not_be_trained_is_said(options: dict, says: str) -> None:
    (found,) = run_ranks(_prepare, 1, **options)
    assert says in found
    assert says == "nothing was wrong" or found.startswith(ParameterError.__name__)


def test_a_dry_run_has_adapters():
    """Without values: what planning counts."""
    from neuron_accel import DryRun, NeuronAccelerator, TensorParallelPlugin, Zero1Plugin

    plugins = [LoraPlugin(r=4, target_modules=["q_proj"]), TensorParallelPlugin(tensor_parallel_size=2), Zero1Plugin()]
    accelerator = NeuronAccelerator(plugins=plugins, backend=DryRun(world_size=4, rank=3))
    with torch.device("meta"):
        model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.zeros(2, 8, dtype=torch.long, device=accelerator.device)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    accelerator.end_training()

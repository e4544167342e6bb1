"""Divided models in the ways people use models: evaluation, generation, other heads and losses, frozen parts, hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from neuron_accel.errors import LayoutError, UsageError
from neuron_accel.strategies.tensor_parallel.vocabulary import VocabularyShard
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import (
    FAMILIES,
    batch,
    compare_step,
    difference,
    full_gradients,
    full_values,
    gpt2,
    gpt2_config,
    llama,
    llama_config,
    make_run,
    randomise,
    reference_gradients,
    shard,
    step,
)

BOTH_FLOWS = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
BOTH_FAMILIES = pytest.mark.parametrize("family", sorted(FAMILIES))


def _pair(model, degree=2, **options):
    """A model whole and sharded, and the run and parameters of the sharded one."""
    whole = copy.deepcopy(model)
    run = make_run(degree=degree, **options)
    parameters = shard(model, run)
    return whole, model, run, parameters


def _close(actual, expected) -> None:
    assert type(actual) is torch.Tensor
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ---- evaluation and generation ---------------------------------------------------------------------------------------
def _evaluate(family: str, sequence_parallel: bool) -> None:
    whole, model, *_ = _pair(FAMILIES[family](), sequence_parallel=sequence_parallel)
    whole.eval(), model.eval()
    for length in (7, 1):
        inputs = batch(length) if length > 1 else {"input_ids": torch.tensor([[3], [4]])}
        with torch.no_grad():
            expected = whole(**inputs, output_hidden_states=True, output_attentions=True)
            actual = model(**inputs, output_hidden_states=True, output_attentions=True)
        if "labels" in inputs:
            _close(actual.loss, expected.loss)
        _close(actual.logits, expected.logits)
        for field in ("hidden_states", "attentions"):
            assert len(actual[field]) == len(expected[field]) > 0
            for mine, theirs in zip(actual[field], expected[field], strict=True):
                _close(mine, theirs)
    options = {"output_hidden_states": sequence_parallel, "output_attentions": True, "return_dict": False}
    with pytest.raises(UsageError, match="return_dict"):
        model.base_model(batch()["input_ids"], **options)
    prompt = batch(5)["input_ids"]
    for cached in (True, False):
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": cached, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(prompt)
        assert torch.equal(model.generate(prompt, **options), whole.generate(prompt, **options))
    sampled = []
    for each in (model, whole):
        torch.manual_seed(5)
        options |= {"do_sample": True, "use_cache": True}
        sampled += [each.generate(prompt, **options), each.generate(prompt, **options, cache_implementation="static")]
    assert torch.equal(sampled[0], sampled[2])
    assert torch.equal(sampled[1], sampled[3])


@BOTH_FLOWS
@BOTH_FAMILIES
def test_evaluation_and_generation(family: str, sequence_parallel: bool) -> None:
    run_ranks(_evaluate, 2, family, sequence_parallel)


# ---- losses ----------------------------------------------------------------------------------------------------------
def _own_loss(logits, labels, vocab_size, **_):
    assert isinstance(logits, VocabularyShard)
    probabilities = logits.softmax(-1)[..., :-1, :]
    return -probabilities.gather(-1, labels[..., 1:].clamp_min(0).unsqueeze(-1)).mean()


def _losses(family: str) -> None:
    inputs = batch(8)
    for change in (
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(5)},
        {"shift_labels": inputs["labels"].roll(-1, 1)},
        {"labels": torch.full_like(inputs["labels"], -100), "num_items_in_batch": 3},
    ):
        result = compare_step(FAMILIES[family](), inputs | change, degree=2)
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-5), change
        assert result["error"] < 1e-4, (change, result)

    # no label counts: the mean over nothing is NaN, and no gradient is
    whole, model, run, parameters = _pair(FAMILIES[family]())
    nothing = inputs | {"labels": torch.full_like(inputs["labels"], -100)}
    assert torch.tensor([step(whole, nothing), step(model, nothing)]).isnan().all()
    assert difference(full_gradients(parameters, run), reference_gradients(whole))[0] == 0

    # a loss function of the user's sees the full logits
    whole, model, run, parameters = _pair(FAMILIES[family]())
    model.loss_function = _own_loss
    expected = _own_loss_of_whole(whole, inputs)
    assert step(model, inputs) == pytest.approx(expected, rel=1e-5)
    assert difference(full_gradients(parameters, run), reference_gradients(whole))[0] < 1e-4

    # so does a loss outside the model, with and without labels given to it
    for labels in (inputs["labels"], None):
        whole, model, run, parameters = _pair(FAMILIES[family]())
        for m in (whole, model):
            logits = m(inputs["input_ids"], labels=labels).logits
            assert (type(logits) is VocabularyShard) is (m is model and labels is not None)
            (
                F.cross_entropy(logits.view(-1, 101), inputs["input_ids"].view(-1)) + logits.logsumexp(-1).mean()
            ).backward()
        assert difference(full_gradients(parameters, run), reference_gradients(whole))[0] < 1e-4


def _own_loss_of_whole(whole, inputs) -> float:
    outputs = whole(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    targets = inputs["labels"][..., 1:].clamp_min(0).unsqueeze(-1)
    loss = -outputs.logits.softmax(-1)[..., :-1, :].gather(-1, targets).mean()
    loss.backward()
    return loss.item()


@BOTH_FAMILIES
def test_losses(family: str) -> None:
    run_ranks(_losses, 2, family)


# ---- other models of the families ------------------------------------------------------------------------------------
def _other_models(sequence_parallel: bool) -> None:
    inputs = batch(7)
    without_labels = {k: v for k, v in inputs.items() if k != "labels"}
    options = {"degree": 2, "sequence_parallel": sequence_parallel}
    mistral = llama_config().to_dict() | {"model_type": "mistral", "sliding_window": 4}
    qwen2 = llama_config().to_dict() | {"model_type": "qwen2"}
    qwen3 = llama_config().to_dict() | {"model_type": "qwen3", "head_dim": 8}
    torch.manual_seed(0)
    other_shape = gpt2(n_inner=12, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
    cases = {
        "mistral": (MistralForCausalLM(MistralConfig(**mistral)), inputs),
        "qwen2": (Qwen2ForCausalLM(Qwen2Config(**qwen2)), inputs),
        "qwen3": (Qwen3ForCausalLM(Qwen3Config(**qwen3)), inputs),
        "llama with biases": (llama(attention_bias=True, mlp_bias=True), inputs),
        "llama with a pad token": (llama(pad_token_id=3), inputs | {"input_ids": inputs["input_ids"] % 4}),
        "llama classification": (
            LlamaForSequenceClassification(llama_config(pad_token_id=0, num_labels=3)),
            without_labels | {"labels": torch.tensor([0, 2])},
        ),
        "gpt2 classification": (
            GPT2ForSequenceClassification(gpt2_config(pad_token_id=0, num_labels=3)),
            without_labels | {"labels": torch.tensor([0, 2])},
        ),
        "llama questions": (
            LlamaForQuestionAnswering(llama_config()),
            without_labels | {"start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([3, 4])},
        ),
        "gpt2 double heads": (
            GPT2DoubleHeadsModel(gpt2_config(summary_first_dropout=0.0)),
            {"input_ids": inputs["input_ids"], "mc_token_ids": torch.tensor([5, 6]), "labels": inputs["labels"]},
        ),
        "gpt2 with token types": (gpt2(), inputs | {"token_type_ids": inputs["input_ids"].flip(1)}),
        "gpt2 of another shape": (other_shape, inputs),
    }
    for name, (model, given) in cases.items():
        result = compare_step(randomise(model), given, **options)
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-5), (name, result)
        assert result["error"] < 1e-4, (name, result)

    base, sharded, *_ = _pair(randomise(LlamaModel(llama_config())), sequence_parallel=sequence_parallel)
    _close(sharded(inputs["input_ids"]).last_hidden_state, base(inputs["input_ids"]).last_hidden_state)


@BOTH_FLOWS
def test_other_models_of_the_families(sequence_parallel: bool) -> None:
    run_ranks(_other_models, 2, sequence_parallel)


# ---- training in other ways ------------------------------------------------------------------------------------------
def _lengths(family: str) -> None:
    """Backward passes in another order than forward passes, over sequences of different lengths, recomputed."""
    for reentrant in (False, True):
        whole, model, run, parameters = _pair(FAMILIES[family](), sequence_parallel=True)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for m in (whole, model):
            losses = [m(**batch(length)).loss for length in (7, 8, 5)]
            losses[1].backward()
            losses[0].backward()
            m(**batch(6)).loss.backward()
            losses[2].backward()
            (m(**batch(5)).loss + m(**batch(8)).loss).backward()
            early = m(**batch(7), output_hidden_states=True).hidden_states[1].square().mean()
            m(**batch(8))
            early.backward()
        error, where = difference(full_gradients(parameters, run), reference_gradients(whole))
        assert error < 1e-4, (reentrant, where, error)


@BOTH_FAMILIES
def test_lengths_that_change_under_checkpointing(family: str) -> None:
    run_ranks(_lengths, 2, family)


def _details(family: str) -> None:
    # what was frozen stays frozen, what was attached stays attached, on modules that are replaced too
    model = FAMILIES[family]()
    embedding = model.get_input_embeddings()
    embedding.weight.requires_grad_(False)
    seen = []
    embedding.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model.enable_input_require_grads()
    whole, model, run, parameters = _pair(model)
    assert not parameters[_name(model, embedding)].current.requires_grad
    step(whole, batch()), step(model, batch())
    assert seen == [(2, 8, 16)] * 2
    gradients = full_gradients(parameters, run)
    assert _name(model, embedding) not in gradients
    assert difference(gradients, reference_gradients(whole))[0] < 1e-4

    # what a layer says of itself is what it holds
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.shape[0] < 101 // 2:
            assert (module.out_features, module.in_features) == module.weight.shape
        if hasattr(module, "nf"):
            assert (module.nx, module.nf) == module.weight.shape

    # weights put together again are those of before, a copy of the model works, and nothing divides it a second time
    values = full_values(parameters, run, lambda record: record.current)
    for name, value in whole.named_parameters():
        assert torch.equal(values[name], value), name
    other = copy.deepcopy(model)
    other.zero_grad()
    assert other(**batch()).loss.item() == model(**batch()).loss.item()
    assert not set(other.parameters()) & set(model.parameters())


def _name(model, embedding) -> str:
    return {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[model.config.model_type]


@BOTH_FAMILIES
def test_what_is_attached_to_a_model_survives(family: str) -> None:
    run_ranks(_details, 2, family)


def _mixed(family: str, sequence_parallel: bool) -> None:
    whole, model, run, parameters = _pair(FAMILIES[family](), sequence_parallel=sequence_parallel)
    for m in (whole, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = m(**batch(7))
        assert outputs.logits.dtype == torch.bfloat16
        outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    assert difference(full_gradients(parameters, run), reference_gradients(whole))[0] < 0.1

    whole, model, run, parameters = _pair(FAMILIES[family]().bfloat16(), sequence_parallel=sequence_parallel)
    assert step(model, batch(7)) == pytest.approx(step(whole, batch(7)), rel=1e-2)
    assert difference(full_gradients(parameters, run), reference_gradients(whole))[0] < 0.1


@BOTH_FLOWS
@BOTH_FAMILIES
def test_half_precision(family: str, sequence_parallel: bool) -> None:
    run_ranks(_mixed, 2, family, sequence_parallel)


def _unsharded(family: str) -> None:
    model = FAMILIES[family]()
    types = [type(module) for module in model.modules()]
    shard(model, make_run(degree=1))
    assert [type(module) for module in model.modules()] == types

    odd = (
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 12} if family == "llama" else {"n_head": 1}
    )
    model = FAMILIES[family](**odd)
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(LayoutError, match=r"heads = [13] is not divisible by 2"):
        shard(model, make_run(degree=2))
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before


@BOTH_FAMILIES
def test_nothing_changes_at_degree_one_or_after_an_error(family: str) -> None:
    run_ranks(_unsharded, 2, family)

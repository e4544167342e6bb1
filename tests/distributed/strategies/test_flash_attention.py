"""Attention without stored scores gives the numbers of transformers' own, under every strategy."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
import types

import pytest
import torch

from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import pipeline

FLASH = {"flash_attention": {"block_size": 5}}
CORE = {"activation_checkpointing": {"modules": "core_attention"}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "dp2": ("llama", [FLASH], 2),
    "zero1-core": ("gpt2-tied", ["zero1", CORE], 2),
    "zero1-recompute": ("gpt2-tied", ["zero1", FLASH, "activation_checkpointing"], 2),
    "tp2-sp-dp2-zero1": ("llama-tied", [TP2, "sequence_parallel", "zero1", FLASH], 4),
    "pp2": ("llama", [pipeline(2, 2), FLASH], 2),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins, ranks = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=2 if composition == "dp2" else 1)
    assert_parallel_equivalence(MODELS[model], token_batches(2), plugins, ranks=ranks, training=training)


# ---- exact against transformers' own ---------------------------------------------------------------------------------
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    "bert": {"is_decoder": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
}
HEADS = {"bert": "AutoModelForMaskedLM", "bart": "AutoModelForSeq2SeqLM"}


def family(name):
    import transformers

    config = transformers.AutoConfig.for_model(name, **(SIZES | FAMILIES[name] if name != "gpt2" else FAMILIES[name]))
    for option in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, option):
            setattr(config, option, 0.0)
    torch.manual_seed(0)
    head = getattr(transformers, HEADS.get(name, "AutoModelForCausalLM"))
    return head.from_config(config, attn_implementation="eager").train()


def inputs(padding):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (3, 12), generator=generator)
    if padding is None:
        return {"input_ids": ids, "labels": ids.clone()}
    if padding == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(3, -1)
        # transformers keeps packed sequences apart only where it has no cache
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "use_cache": False}
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 3, 5)):
        mask[row, slice(0, count) if padding == "left" else slice(12 - count, 12)] = 0
    # nor the first token behind padding on the left: a padded position, whose output is undefined, predicts it
    ignored = (mask == 0) | (mask.roll(1, 1) == 0)
    return {"input_ids": ids * mask, "labels": ids.masked_fill(ignored, -100), "attention_mask": mask}


def results(model, batch):
    loss = model(**batch).loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare_with_eager(name):
    from neuron_accel import FlashAttentionPlugin, NeuronAccelerator

    kinds = [None, "left", "right"] + (["packed"] if name in ("llama", "mistral") else [])
    expected = [results(family(name), inputs(kind)) for kind in kinds]
    accelerator = NeuronAccelerator(plugins=[FlashAttentionPlugin(block_size=5)])
    model = accelerator.prepare_model(family(name))
    for kind, (loss, gradients) in zip(kinds, expected, strict=True):
        own_loss, own = results(model, inputs(kind))
        torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-7, msg=f"{name}, {kind}")
        assert own.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(own[parameter], gradient, rtol=1e-5, atol=2e-7, msg=f"{kind} {parameter}")
    accelerator.end_training()
    assert accelerator.unwrap_model(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_attention_equals_transformers_own(name):
    run_ranks(compare_with_eager, 1, name)


def compare_right_padding():
    from neuron_accel import FlashAttentionPlugin, NeuronAccelerator

    loss, gradients = results(family("llama"), inputs("right"))
    accelerator = NeuronAccelerator(plugins=[FlashAttentionPlugin(block_size=5, right_padded=True)])
    own_loss, own = results(accelerator.prepare_model(family("llama")), inputs("right"))
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-7)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(own[parameter], gradient, rtol=1e-5, atol=2e-7, msg=parameter)
    accelerator.end_training()


def test_padding_on_the_right_needs_no_mask():
    run_ranks(compare_right_padding, 1)


# ---- what is kept ----------------------------------------------------------------------------------------------------
def saved_elements(plugins, length=96):
    """The most elements of one tensor that autograd keeps or that a layer's softmax makes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    config = LlamaConfig(**(SIZES | {"max_position_embeddings": length, "vocab_size": 4}))
    model = accelerator.prepare_model(LlamaForCausalLM._from_config(config, attn_implementation="eager").train())
    kept, made = [], []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "softmax" in str(function):
                made.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    ids = torch.randint(4, (1, length))
    with Seen(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    accelerator.end_training()
    return max(kept), max(made)


def compare_memory():
    scores = 4 * 96 * 96
    assert saved_elements([]) == (scores, scores)
    kept, made = saved_elements([{"flash_attention": {"block_size": 8}}])
    assert made == 4 * 8 * 96, "the scores of one block"
    assert kept < scores / 4
    kept, made = saved_elements([CORE])
    assert (made, kept < scores / 4) == (scores, True)


def test_scores_are_made_a_block_at_a_time_and_not_kept():
    run_ranks(compare_memory, 1)


def dropout_twice():
    from transformers import GPT2Config, GPT2LMHeadModel

    from neuron_accel import FlashAttentionPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FlashAttentionPlugin(block_size=5)])
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0, embd_pdrop=0)
    torch.manual_seed(0)
    model = accelerator.prepare_model(GPT2LMHeadModel._from_config(config, attn_implementation="eager").train())
    batch = inputs(None)
    weight = model.transformer.wte.weight

    def loss_at(step):
        torch.manual_seed(3)
        with torch.no_grad():
            weight.add_(step * direction)
            found = model(**batch).loss.double()
            weight.sub_(step * direction)
        return found

    direction = torch.randn_like(weight)
    torch.manual_seed(3)
    model(**batch).loss.backward()
    slope = (loss_at(2e-3) - loss_at(-2e-3)) / 4e-3
    torch.testing.assert_close((weight.grad * direction).sum().double(), slope, rtol=1e-2, atol=0)
    accelerator.end_training()


def test_dropout_is_drawn_the_same_again():
    run_ranks(dropout_twice, 1)


def generates_and_copies():
    from neuron_accel import FlashAttentionPlugin, NeuronAccelerator

    prompt = inputs("left")
    batch = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    expected = family("llama").eval().generate(**batch, max_new_tokens=6, do_sample=False)
    accelerator = NeuronAccelerator(plugins=[FlashAttentionPlugin(block_size=5)])
    model = accelerator.prepare_model(family("llama")).eval()
    assert torch.equal(model.generate(**batch, max_new_tokens=6, do_sample=False), expected)
    loss = model(**prompt).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert torch.equal(other(**prompt).loss, loss)
    assert "attention in blocks of 5 queries" in accelerator.explain(model)
    assert "neuron_accel" not in json.dumps(accelerator.unwrap_model(model).config.to_dict(), default=str)
    accelerator.end_training()


def test_prepared_models_generate_and_are_copied():
    run_ranks(generates_and_copies, 1)


# ---- what is refused -------------------------------------------------------------------------------------------------
def refusals():
    from transformers import T5Config, T5ForConditionalGeneration

    from neuron_accel import FlashAttentionPlugin, NeuronAccelerator

    def prepare(model, **options):
        return NeuronAccelerator(plugins=[FlashAttentionPlugin(**options)]).prepare_model(model)

    with pytest.raises(UnsupportedModelError, match="no attention that can be replaced"):
        prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="run on Neuron devices"):
        prepare(family("llama"), kernel="nki")
    with pytest.raises(UsageError, match="neuron_accel_blockwise' already"):
        NeuronAccelerator(config={"plugins": [FLASH, CORE]}).prepare_model(family("llama"))
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UnsupportedModelError, match="T5"):
        prepare(T5ForConditionalGeneration(config))(input_ids=ids, labels=ids)


def test_what_cannot_be_computed_is_refused():
    run_ranks(refusals, 1)


def test_options_are_checked():
    from neuron_accel import ActivationCheckpointingPlugin, FlashAttentionPlugin

    for options in ({"block_size": 0}, {"kernel": "cuda"}, {"block_size": 1.5}):
        with pytest.raises(ConfigurationError):
            FlashAttentionPlugin(**options)
    with pytest.raises(ConfigurationError, match="one attention function"):
        ActivationCheckpointingPlugin(modules="core_attention", every=2)


# ---- where a kernel is used ------------------------------------------------------------------------------------------
def refused(query, key, masked, other):
    """What this kernel cannot compute."""
    return "it has a mask" if masked else "it has sinks" if other else ""


def with_kernel(name, **options):
    """A model whose attention has a kernel, and what that is called with."""
    from neuron_accel.models.attention import BlockwiseAttention

    calls = []

    def kernel(query, key, value, scale, causal):
        calls.append((tuple(query.shape), tuple(key.shape), scale, causal))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=True
        )

    model = family(name)
    attention = BlockwiseAttention(None, 5, kernel=kernel, why_no_kernel=refused, **options)
    undo = attention.install(model, "the test")
    return model, calls, undo


def same_as_eager(name, padding, **options):
    """Calls of the kernel by a model that gives the numbers of transformers' own."""
    model, calls, undo = with_kernel(name, **options)
    (loss, gradients), (own_loss, own) = (results(each, inputs(padding)) for each in (family(name), model))
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-7)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(own[parameter], gradient, rtol=1e-5, atol=2e-7, msg=parameter)
    undo()
    used = len(calls)
    model(**inputs(padding))
    assert len(calls) == used, "after undoing it the model has its own attention again"
    return calls


def kernel_where_it_can_be():
    call = ((3, 4, 12, 8), (3, 2, 12, 8), 8**-0.5)
    assert same_as_eager("llama", None) == [(*call, True)] * 2
    assert same_as_eager("qwen2", None) == [(*call, True)], "the second layer has a window: blocks"
    for name, padding in (("llama", "left"), ("llama", "right"), ("llama", "packed"), ("mistral", None)):
        assert same_as_eager(name, padding) == [], f"{name}, {padding}: masked, so blocks"
    assert same_as_eager("gpt_oss", None) == [], "sinks, so blocks"
    assert same_as_eager("llama", "right", ignores_padding=True) == [(*call, True)] * 2
    assert {causal for *_, causal in same_as_eager("bert", None)} == {False}
    model, calls, _ = with_kernel("llama")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.25
    model(**inputs(None))
    model.eval()(**inputs(None))
    assert len(calls) == 2, "with dropout in blocks, without it by the kernel"


def test_a_kernel_is_used_where_it_can_be_and_blocks_elsewhere():
    run_ranks(kernel_where_it_can_be, 1, backend=None)


def kernel_or_nothing():
    from neuron_accel.models.attention import NAME

    assert len(same_as_eager("llama", None, kernel_only=True)) == 2
    assert len(same_as_eager("llama", "right", kernel_only=True, ignores_padding=True)) == 2
    for name, padding, what in (
        ("llama", "left", "LlamaAttention: it has a mask"),
        ("qwen2", None, "Qwen2Attention: it has a mask"),
        ("gpt_oss", None, "GptOssAttention: it has"),
    ):
        model, _, _ = with_kernel(name, kernel_only=True)
        with pytest.raises(UnsupportedModelError, match=f"cannot compute the attention of {what}") as caught:
            model(**inputs(padding))
        assert "kernel='auto'" in caught.value.fix
    named = family("llama")
    named.set_attn_implementation(NAME)  # transformers knows the name by now
    with pytest.raises(UsageError, match=f"LlamaAttention was not prepared for attn_implementation='{NAME}'") as caught:
        named(**inputs(None))
    assert "FlashAttentionPlugin" in caught.value.fix


def test_what_only_the_kernel_may_compute_and_the_bare_name_are_refused():
    run_ranks(kernel_or_nothing, 1, backend=None)


# ---- the kernel's interface ------------------------------------------------------------------------------------------
KERNELS = '''
"""Stands for kernels of nkilib: their documented layouts, computed by torch."""
import torch


class Launched:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, cores):
        assert cores == 2
        return self.function


def attend(q, k, v, scale, causal):
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    return torch.softmax(scores, -1) @ v, -top, 1 / (scores - top).exp().sum(-1, keepdim=True)


def tiles(statistic):
    return statistic.squeeze(-1).unflatten(-1, (-1, 128)).transpose(-1, -2)


@Launched
def attention_cte(q, k, v, *, scale, causal_mask, cache_softmax):
    batch, length, dim = q.shape
    assert k.shape == (len(v), dim, length) and v.shape[1:] == (length, dim) and cache_softmax and length % 128 == 0
    k, v = (each.repeat_interleave(batch // len(v), 0) for each in (k.transpose(1, 2), v))
    output, top, reciprocal = attend(q, k, v, scale, causal_mask)
    return output, tiles(top), tiles(reciprocal)


@Launched
def attention_bwd(q, k, v, o, dy, lse, *, use_causal_mask, mixed_precision, softmax_scale):
    batch, heads, dim, length = q.shape
    assert k.shape == v.shape and q.shape == o.shape == dy.shape and mixed_precision and length % 512 == 0
    assert lse.shape == (batch, heads, 128, length // 128)
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        query, *rest = (leaf.transpose(2, 3) for leaf in leaves)
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in rest)
        output, top, reciprocal = attend(query, key, value, softmax_scale, use_causal_mask)
        torch.testing.assert_close(lse, tiles(-top - reciprocal.log()))
        torch.testing.assert_close(o, output.transpose(2, 3))
        return torch.autograd.grad(output, leaves, dy.transpose(2, 3))
'''


class OnNeuron:
    """What is asked of a backend."""

    is_lazy = False
    device = types.SimpleNamespace(type="neuron")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes packages importable: names of modules with their text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**modules):
        for name, text in modules.items():
            folder = tmp_path.joinpath(*name.split("__"))
            folder.mkdir(parents=True)
            folder.joinpath("__init__.py").write_text(text)
        importlib.invalidate_caches()

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nki", "nkilib", "neuronxcc")]:
        del sys.modules[name]


def test_the_kernel_is_called_as_documented(packages):
    from neuron_accel.strategies.flash_attention.nki import nki_attention, why_not_nki, why_not_nki_here

    packages(
        nki="",
        nkilib__core__attention__attention_cte=KERNELS,
        nkilib__core__attention__attention_bwd="from nkilib.core.attention.attention_cte import *",
    )
    assert why_not_nki_here(OnNeuron, "") == ""
    torch.manual_seed(0)
    shape = (2, 4, 512, 8)
    query = torch.randn(shape, requires_grad=True)
    key, value = (torch.randn(2, 2, 512, 8, requires_grad=True) for _ in range(2))
    assert not why_not_nki(query, key, False, False)
    output = nki_attention(query, key, value, 0.3, True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    gradient = torch.randn(shape)
    for own, theirs in zip(
        torch.autograd.grad(output, (query, key, value), gradient),
        torch.autograd.grad(expected, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-4)


def test_why_no_layer_can_use_the_kernel(packages):
    from neuron_accel.strategies.flash_attention.nki import why_not_nki_here

    assert "package nki is not installed" in why_not_nki_here(OnNeuron, "")
    packages(neuronxcc__nki__kernels="")
    assert "no longer compile since SDK 2.30" in why_not_nki_here(OnNeuron, "")
    packages(nki="")
    assert "nkilib" in why_not_nki_here(OnNeuron, "trn2.48xlarge with logical cores of 2")
    assert "Trn1" in why_not_nki_here(OnNeuron, "trn1.32xlarge")


def test_plain_torch_is_the_default():
    from neuron_accel import FlashAttentionPlugin

    assert FlashAttentionPlugin().kernel == "torch"


@pytest.mark.parametrize(
    ("queries", "keys", "dims", "masked", "other", "why"),
    [
        (2048, 2048, 128, True, False, "right_padded"),
        (2048, 2048, 128, False, True, "softcap, sinks or dropout"),
        (2048, 4096, 64, False, False, "the same multiple of 512"),
        (1000, 1000, 64, False, False, "the same multiple of 512"),
        (2048, 2048, 256, False, False, "more than 128"),
    ],
)
def test_why_a_layer_cannot_use_the_kernel(queries, keys, dims, masked, other, why):
    from neuron_accel.strategies.flash_attention.nki import why_not_nki

    query, key = (torch.empty(1, 1, length, dims, device="meta") for length in (queries, keys))
    assert why in why_not_nki(query, key, masked, other)

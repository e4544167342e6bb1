"""The ways people call models: evaluation, generation, losses of their own, other inputs; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import cp_models
import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin
from neuron_accel_context_parallel.blocks import Scores
from neuron_accel_context_parallel.ring import AttentionOptions, Ring
from torch import nn
from torch.nn import functional as F

from neuron_accel import NeuronAccelerator
from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError
from neuron_accel.testing import run_ranks


def prepare(model: nn.Module, degree: int = 2, **options):
    """A model whole, the same prepared, and the accelerator."""
    accelerator = NeuronAccelerator(plugins=[ContextParallelPlugin(context_parallel_size=degree, **options)])
    whole = copy.deepcopy(model)
    return whole, accelerator.prepare(model), accelerator


def built(make=cp_models.grouped, **changes) -> nn.Module:
    torch.manual_seed(0)
    return make(**changes)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def same_gradients(accelerator, model, whole) -> None:
    gradients = accelerator.get_gradients(model)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad)
    whole.zero_grad()
    model.zero_grad()


# ---- evaluation and generation ---------------------------------------------------------------------------------------
def evaluate() -> None:
    whole, model, _ = prepare(built())
    whole.eval(), model.eval()
    batch = cp_models.batches(1)[0]
    with torch.no_grad():
        expected = whole(**batch, output_hidden_states=True)
        actual = model(**batch, output_hidden_states=True)
        close(actual.loss, expected.loss)
        close(actual.logits, expected.logits)
        for mine, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
            close(mine, theirs)
        as_tuple = model(batch["input_ids"], labels=batch["labels"], return_dict=False)
        close(as_tuple[0], expected.loss)
        close(as_tuple[1], expected.logits)
        prompt = batch["input_ids"][:, :6]
        mask = torch.ones_like(prompt)
        mask[1, :3] = 0
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        for cached in (True, False):
            theirs = whole.generate(prompt, use_cache=cached, **options)
            assert torch.equal(model.generate(prompt, use_cache=cached, **options), theirs)
    close(model(**batch).loss, expected.loss)  # and divided again


def test_evaluation_and_generation():
    run_ranks(evaluate, 2)


# ---- losses and inputs -----------------------------------------------------------------------------------------------
def lose() -> None:
    whole, model, accelerator = prepare(built())
    batch = cp_models.batches(1)[0]
    ids, labels = batch["input_ids"], batch["labels"]

    # a loss of the user's, of outputs that are whole
    for each in (whole, model):
        logits = each.train()(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + logits.logsumexp(-1).mean()
        accelerator.backward(loss) if each is model else loss.backward()
    same_gradients(accelerator, model, whole)

    # a sum over a number of tokens that the user gives, as a number and as a tensor
    for items in (31, torch.tensor(31)):
        expected = whole(**batch, num_items_in_batch=items).loss
        loss = model(**batch, num_items_in_batch=items).loss
        close(loss, expected)
        expected.backward()
        accelerator.backward(loss)
        same_gradients(accelerator, model, whole)

    # an average over tokens that the loop counts
    items = (labels[:, 1:] != -100).sum()
    whole(**batch).loss.backward()
    accelerator.backward(model(**batch).loss, num_items=items)
    same_gradients(accelerator, model, whole)

    # labels that are shifted already
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    close(model(ids, labels=labels, shift_labels=shifted).loss, whole(**batch).loss)

    # embeddings that somebody trains
    embeddings = [whole.get_input_embeddings()(ids).detach().requires_grad_() for _ in range(2)]
    for each, given in zip((whole, model), embeddings, strict=True):
        each(inputs_embeds=given, labels=labels).loss.backward()
    close(embeddings[1].grad, embeddings[0].grad)
    assert model(**batch).logits is None


def test_losses_and_inputs():
    run_ranks(lose, 2)


def keep_logits() -> None:
    whole, model, _ = prepare(built(), training_logits=True)
    batch = cp_models.batches(1)[0]
    close(model.train()(**batch).logits, whole.train()(**batch).logits)
    # documents of one row, as kernels for packed batches take them, without positions
    ids, ends = batch["input_ids"][:1], torch.tensor([0, 5, 13, cp_models.LENGTH], dtype=torch.int32)
    parts = [whole(part).logits for part in ids.split((5, 8, cp_models.LENGTH - 13), 1)]
    positions = torch.cat([torch.arange(n) for n in (5, 8, cp_models.LENGTH - 13)])[None]
    for given in ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9}, {"position_ids": positions}):
        close(model(ids, **given).logits, torch.cat(parts, 1))  # rotations depend on distances only


def test_logits_in_training_and_packed_rows():
    run_ranks(keep_logits, 2)


def drop() -> float:
    """The derivative along a direction, by backward and by differences, with the same weights dropped."""
    accelerator = NeuronAccelerator(plugins=[ContextParallelPlugin(context_parallel_size=2)])
    backend, group = accelerator.run.backend, accelerator.run.group("cp")
    ring, look = Ring(backend, group), AttentionOptions(scores=Scores(scale=0.4), dropout=0.5)
    generator = torch.Generator().manual_seed(group.index)
    shares = [torch.randn(2, 2, 10, 4, generator=generator, dtype=torch.float64) for _ in range(6)]

    def total(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return ring.attention(*given, look).square().sum()

    leaves = [share.requires_grad_() for share in shares[:3]]
    total(*leaves).backward()
    along = sum((leaf.grad * d).sum() for leaf, d in zip(leaves, shares[3:], strict=True))
    with torch.no_grad():
        ahead, back = (total(*(x + e * d for x, d in zip(leaves, shares[3:], strict=True))) for e in (1e-5, -1e-5))
    pair = torch.stack([along, (ahead - back) / 2e-5])
    mine, theirs = backend.all_reduce(pair, group)
    return abs(float(mine - theirs)) / abs(float(theirs))


def test_dropout_of_attention_has_the_right_gradient():
    assert max(run_ranks(drop, 2)) < 1e-7


# ---- what is refused -------------------------------------------------------------------------------------------------
class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def state_space() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))


def both_ways() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertModel(BertConfig(vocab_size=32, **sizes))


def other_mixture() -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=32, layer_types=kinds, **sizes, **experts))


def classifier() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=96, pad_token_id=0, **sizes))


MODELS = {
    "plain": (Plain, "not a model of transformers"),
    "state space": (state_space, "linear_attention"),
    "both ways": (both_ways, "only causal"),
    "linear attention": (other_mixture, "linear_attention"),
}


def refuse_models() -> dict[str, str]:
    messages = {}
    for name, (make, _) in MODELS.items():
        accelerator = NeuronAccelerator(plugins=[ContextParallelPlugin(context_parallel_size=2)])
        model = make()
        before = model.config._attn_implementation if hasattr(model, "config") else None
        try:
            accelerator.prepare(model)
        except UnsupportedModelError as error:
            messages[name] = str(error)
        if before is not None:
            assert model.config._attn_implementation == before
    return messages


def test_models_that_look_elsewhere_are_refused():
    for messages in run_ranks(refuse_models, 2):
        assert set(messages) == set(MODELS)
        for name, (_, text) in MODELS.items():
            assert text in messages[name]
            assert "fix:" in messages[name]


def refuse_calls() -> None:
    _, model, _ = prepare(built())
    ids = cp_models.tokens()
    length = ids.shape[1]
    calls = {
        "mask": {"attention_mask": torch.ones(4, 1, length, length)},
        "output_attentions": {"output_attentions": True},
        "use_cache": {"use_cache": True},
        "logits_to_keep": {"logits_to_keep": 1},
        "neither": {"input_ids": None},
        "marks": {"marks": torch.ones(4, length)},
        "position_ids": {"position_ids": torch.zeros(3, 4, length, dtype=torch.long)},
    }
    for text, change in calls.items():
        with pytest.raises(UsageError, match=text):
            model.train()(**{"input_ids": ids, **change})
    with pytest.raises(UsageError, match="outside of a sharded call"):
        model.model(ids)
    with pytest.raises(UsageError, match="called without the ring"):
        model.model.layers[0](torch.ones(1, 4, 32), position_embeddings=(torch.ones(1, 4, 8),) * 2)
    model(ids)  # and is as good as before

    _, model, _ = prepare(classifier())
    with pytest.raises(UsageError, match="loss"):
        model(ids, labels=torch.zeros(4, dtype=torch.long))


def test_calls_that_cannot_be_sharded_are_refused():
    run_ranks(refuse_calls, 2)


@pytest.mark.parametrize("degree", [0, -1, 1.5, True, "2"])
def test_a_degree_is_a_number_of_ranks(degree):
    with pytest.raises(ConfigurationError, match="context_parallel_size"):
        ContextParallelPlugin(context_parallel_size=degree)


# ---- the end ---------------------------------------------------------------------------------------------------------
def leave(folder: str) -> None:
    whole, model, accelerator = prepare(built())
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        assert "context_parallel" not in Path(folder, "config.json").read_text()
    assert "keys and values" in accelerator.explain(model)
    accelerator.free_memory()
    assert model.config._attn_implementation == whole.config._attn_implementation
    close(model(cp_models.tokens()).logits, whole(cp_models.tokens()).logits)


def test_a_model_is_what_it_was(tmp_path):
    run_ranks(leave, 2, str(tmp_path))


def alone() -> None:
    whole, model, _ = prepare(built(), degree=1)
    assert model.config._attn_implementation == whole.config._attn_implementation
    assert torch.equal(model(cp_models.tokens()).logits, whole(cp_models.tokens()).logits)


def test_one_rank_changes_nothing():
    run_ranks(alone, 1)


@pytest.mark.parametrize(("batch", "sequence", "sizes"), [(64, 4096, []), (64, 16384, [2, 4]), (8, 4096, [2, 4])])
def test_a_search_tries_it_for_long_sequences_or_few_samples(batch, sequence, sizes):
    LayoutSpace = pytest.importorskip("neuron_accel_plan").LayoutSpace

    space = LayoutSpace(
        config=None, world_size=32, global_batch=batch, sequence=sequence, model_groups=(1, 8), ranks_per_host=32
    )
    assert [plugin.context_parallel_size for plugin in ContextParallelPlugin.layouts(space)] == sizes

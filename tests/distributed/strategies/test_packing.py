"""Several documents in a row, with positions that restart, train as the documents by themselves do in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, VOCABULARY
from tests.guests import is_installed

LENGTH = 12
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
SCORES = {"activation_checkpointing": {"modules": "core_attention"}}
COMPOSITIONS = {
    "data-parallel": [],
    "recomputed": ["activation_checkpointing"],
    "recomputed-scores": [SCORES],
    "zero1": ["zero1"],
    "fully-sharded": ["fully_sharded"],
    "fully-sharded-flash": ["fully_sharded", "flash_attention"],
    "tp2": [TP2],
    "tp2-sp": [TP2, "sequence_parallel"],
    "tp2-sp-flash": [TP2, "sequence_parallel", "flash_attention"],
    "pp2": [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}],
    "chunked-loss": ["chunked_loss"],
}


def packed():
    """Batches of four rows of two documents each, as transformers' collator joins them."""
    from transformers import DataCollatorWithFlattening

    join, generator = DataCollatorWithFlattening(), torch.Generator().manual_seed(7)
    batches = []
    for _ in range(2):
        rows = []
        for first in (3, 5, 4, 7):
            ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
            rows.append(join([{"input_ids": ids[:first]}, {"input_ids": ids[first:]}]))
        batches.append(
            {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels", "position_ids")}
        )
    return batches


def one_by_one(model):
    """The model, which is called for each document of a batch, and returns the mean over the tokens of all."""
    forward = model.forward

    def each(input_ids, labels, position_ids):
        losses = []
        for row, positions in zip(input_ids, position_ids, strict=True):
            starts = [*positions.eq(0).nonzero().flatten().tolist(), len(row)]
            for begin, end in pairwise(starts):
                document = row[begin:end].unsqueeze(0)
                losses.append(F.cross_entropy(forward(document).logits[0, :-1], document[0, 1:], reduction="none"))
        return torch.cat(losses).mean()

    model.forward = each
    return model


def without_cache(model):
    """With a cache, transformers does not look for packed documents."""
    model.config.use_cache = False


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_packed_documents_train_as_the_documents_do(composition):
    training = Training(max_norm=0.5, prepare_model=without_cache)
    plugins = COMPOSITIONS[composition]
    assert_parallel_equivalence(MODELS["llama"], packed(), plugins, ranks=2, training=training, reference=one_by_one)


# ---- batches without padding, as a loader makes them -----------------------------------------------------------------
ONE_ROW = {"pp2": [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 1}}]}
PLUGINS = COMPOSITIONS | ONE_ROW


def documents():
    """Documents of which each two in a row have as many tokens, so that ranks have equally many that count."""
    generator = torch.Generator().manual_seed(7)
    lengths = (3, 9, 5, 7, 4, 8, 6, 6)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def without_padding(plugins, by_lengths=False):
    """Losses and weights of a loop whose loader joins documents, with the lengths that kernels of attention want.

    Args:
        plugins: of the accelerator.
        by_lengths: whether lengths alone say where a document ends, and positions are left out.
    """
    from transformers import DataCollatorWithFlattening

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    join = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=not by_lengths)
    loader = torch.utils.data.DataLoader(documents(), batch_size=4 // accelerator.num_processes, collate_fn=join)
    torch.manual_seed(0)
    model = MODELS["llama"]()
    without_cache(model)
    if by_lengths:
        attend_by_lengths(model)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    losses = []
    for batch in loader:
        assert batch["input_ids"].shape[0] == 1
        assert batch["cu_seq_lens_q"].dtype == torch.int32
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def by_themselves(adapt=None):
    """The same with each document in a call of its own, in one process; ``adapt`` changes the model before."""
    torch.manual_seed(0)
    model, losses = MODELS["llama"](), []
    model = adapt(model) if adapt else model
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), documents()
    for first in (0, 4):
        terms = []
        for row in rows[first : first + 4]:
            ids = torch.tensor([row["input_ids"]])
            terms.append(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
        loss = torch.cat(terms).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_like(reference, ranks):
    losses, weights = reference
    for found, state in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("composition", PLUGINS)
def test_batches_without_padding_train_as_the_documents_do(composition):
    assert_like(by_themselves(), run_ranks(without_padding, 2, PLUGINS[composition]))


def test_one_row_is_not_split_into_micro_batches():
    with pytest.raises(RanksError, match="A batch of 1 samples cannot be split into 2 micro-batches"):
        run_ranks(without_padding, 2, COMPOSITIONS["pp2"])


# ---- an attention that reads lengths, as kernels for packed batches do -----------------------------------------------
BY_LENGTHS = ("data-parallel", "recomputed", "fully-sharded", "tp2-sp", "pp2", "chunked-loss")


def attend_by_lengths(model):
    from transformers import AttentionInterface

    AttentionInterface.register("by-lengths", attention_by_lengths)
    model.set_attn_implementation("by-lengths")


def attention_by_lengths(module, query, key, value, mask, *, scaling, cu_seq_lens_q, cu_seq_lens_k, **options):
    assert mask is None
    assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
    parts = [
        F.scaled_dot_product_attention(
            *(x[:, :, begin:end] for x in (query, key, value)), is_causal=True, scale=scaling
        )
        for begin, end in pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


@pytest.mark.parametrize("composition", BY_LENGTHS)
def test_lengths_alone_reach_the_attention(composition):
    """Positions go on from one document to the next, but rotations of queries and keys depend on distances only."""
    assert_like(by_themselves(), run_ranks(without_padding, 2, PLUGINS[composition], by_lengths=True))


# ---- adapters --------------------------------------------------------------------------------------------------------
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"], "init_lora_weights": False}
LORA = {"lora": {"peft_config": ADAPTERS}}
BESIDE_LORA = {"fully-sharded": ["fully_sharded"], "tp2-sp": COMPOSITIONS["tp2-sp"]}


def adapted_by_peft(model):
    """peft's own layers, under the names in which the base model keeps its own."""
    from peft import LoraConfig, inject_adapter_in_model

    model = inject_adapter_in_model(LoraConfig(**ADAPTERS), model)
    named, state = model.named_parameters, model.state_dict
    model.named_parameters = lambda *a, **k: [(plain(name), value) for name, value in named(*a, **k)]
    model.state_dict = lambda: {plain(name): value for name, value in state().items()}
    return model


def plain(name):
    return name.replace(".base_layer.", ".")


def adapted_one_by_one(model):
    return one_by_one(adapted_by_peft(model))


@pytest.mark.skipif(not is_installed("neuron-accel-lora"), reason="neuron-accel-lora is not installed")
@pytest.mark.parametrize("composition", BESIDE_LORA)
def test_adapters_train_on_packed_documents_as_on_the_documents(composition):
    plugins = [LORA, *BESIDE_LORA[composition]]
    training = Training(max_norm=0.5, prepare_model=without_cache)
    rows = packed()
    assert_parallel_equivalence(
        MODELS["llama"], rows, plugins, ranks=2, training=training, reference=adapted_one_by_one
    )
    assert_like(by_themselves(adapted_by_peft), run_ranks(without_padding, 2, plugins))

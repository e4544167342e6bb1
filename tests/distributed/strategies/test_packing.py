"""Several documents in a row, with positions that restart, train as the documents by themselves do in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, VOCABULARY

LENGTH = 12
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
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

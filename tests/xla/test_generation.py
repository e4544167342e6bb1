"""Greedy generation with a static cache on XLA ranks: the tokens of one process, and no graph for a second call."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import llama, token_batches
from tests.xla.watching import compiled

COMPOSITIONS = {"tp2": [{"model_parallelism": {"tensor_parallel_size": 2}}], "fully-sharded": ["fully_sharded"]}
STATIC = {"cache_implementation": "static", "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def built():
    torch.manual_seed(0)
    return llama(blocks=1)


def prompt():
    return token_batches(1)[0]["input_ids"][:2, :4]


def generates(plugins):
    """What is generated, and how many graphs a second call compiles."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, "backend": "xla"})
    with one_at_a_time():
        model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    model.eval()
    ids, counts, found = prompt().to(accelerator.device), [], []
    backend = accelerator.run.backend

    def compute(_, scores):
        """Ranks that are threads of one process compile a graph with collectives once for all in ``step_boundary``
        only, not where transformers reads whether a text has ended."""
        backend.step_boundary()
        return scores

    for _ in range(2):
        given = {"attention_mask": torch.ones_like(ids), "logits_processor": [compute]}
        with torch.no_grad():
            made = accelerator.unwrap_model(model).generate(ids, **given, **STATIC)
        found.append(backend.to_host(made))
        accelerator.wait_for_everyone()  # graphs of all ranks are counted
        counts.append(compiled())
    return found, counts[1] - counts[0]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_tokens_are_those_of_one_process(composition):
    with torch.no_grad():
        expected = built().eval().generate(prompt(), attention_mask=torch.ones_like(prompt()), **STATIC)
    for found, again in run_ranks(generates, 2, COMPOSITIONS[composition], backend="xla", timeout=110):
        assert all(torch.equal(made, expected) for made in found)
        assert again == 0

"""Generation on XLA ranks as docs/xla.md describes it, with a static cache and token ids on the host: the tokens are
those of one process, greedy and sampled, and the number of graphs does not depend on the number of tokens."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import llama, token_batches
from tests.xla.watching import compiled

COMPOSITIONS = {
    "one": (1, []),
    "tp2": (2, [{"model_parallelism": {"tensor_parallel_size": 2}}]),
    "fully-sharded": (2, ["fully_sharded"]),
}
STATIC = {"cache_implementation": "static", "max_cache_len": 16, "pad_token_id": 0}
CALLS = [(4, False), (12, False), (12, True)]
"""Number of new tokens, and whether they are sampled."""


def built():
    torch.manual_seed(0)
    return llama(blocks=1).eval()


def prompt():
    """Two texts, the first of which is padded."""
    ids = token_batches(1)[0]["input_ids"][:2, :4]
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return {"inputs": ids, "attention_mask": mask}


class OwnNumbers:
    """Ranks that are threads share the generator of the CPU. Each continues its own sequence, from the last step before
    it samples until its next forward pass, while the others wait. Ranks that are processes have no need of it."""

    def __init__(self, seed):
        self._state, self._turn = torch.Generator().manual_seed(seed).get_state(), None

    def begin(self, _, scores):
        self._turn = contextlib.ExitStack()
        self._turn.enter_context(one_at_a_time())
        torch.set_rng_state(self._state)
        return scores

    def end(self, *_):
        if self._turn is not None:
            self._state = torch.get_rng_state()
            self._turn.close()
            self._turn = None


def generates(plugins):
    """What each call makes, and how many graphs it compiles."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, "backend": "xla"})
    with one_at_a_time():
        model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(model).eval()
    model.register_forward_hook(lambda *_: accelerator.run.backend.step_boundary())
    found, counts = [], [compiled()]
    for length, sample in CALLS:
        numbers = OwnNumbers(5)
        hook = model.register_forward_pre_hook(numbers.end, prepend=True)  # before ranks meet
        given = {"max_new_tokens": length, "do_sample": sample, "logits_processor": [numbers.begin]}
        with torch.no_grad():
            found.append(model.generate(**prompt(), **STATIC, **given))
        numbers.end()
        hook.remove()
        accelerator.wait_for_everyone()  # graphs of all ranks are counted
        counts.append(compiled())
    return found, [after - before for before, after in itertools.pairwise(counts)]


def expected():
    """The same calls in one process, on the CPU."""
    for length, sample in CALLS:
        model = built()
        torch.manual_seed(5)
        yield model.generate(**prompt(), max_new_tokens=length, do_sample=sample, **STATIC)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_tokens_are_those_of_one_process(composition):
    ranks, plugins = COMPOSITIONS[composition]
    texts = list(expected())
    assert not texts[1].equal(texts[2])
    for found, graphs in run_ranks(generates, ranks, plugins, backend="xla", timeout=110):
        assert all(map(torch.equal, found, texts))
        assert graphs[0]
        assert graphs[1:] == [0, 0]  # neither more tokens nor sampling are further graphs

"""Logits that are computed chunk by chunk for the loss give the numbers of full logits, and never exist in full."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import pipeline

CHUNKED = {"chunked_loss": {"chunks": 3}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "dp2": ("llama", [CHUNKED], 2),
    "tp2-sp-dp2-zero1": ("llama-tied", [TP2, "sequence_parallel", "zero1", CHUNKED], 4),
    "tp2-fully-sharded": ("llama", [TP2, "fully_sharded", "activation_checkpointing", CHUNKED], 4),
    "pp2-tied": ("gpt2-tied", [pipeline(2, 2), CHUNKED], 2),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins, ranks = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=2 if composition == "dp2" else 1)
    assert_parallel_equivalence(MODELS[model], token_batches(2), plugins, ranks=ranks, training=training)


# ---- a loss that the loop computes, and what exists meanwhile --------------------------------------------------------
class Largest(TorchDispatchMode):
    """Remembers the largest tensor, in elements, whose last dim is a size of the vocabulary."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.elements = sizes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] in self.sizes:
                self.elements = max(self.elements, tensor.numel())
        return result


def step_of_a_loop(plugins, inside):
    """Loss and gradients of a step, and the elements of the largest tensor along the vocabulary of 97 ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).train()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = token_batches(1, length=20)[0]
    labels = batch["labels"].clone()
    labels[0, :7] = -100
    largest = Largest({97, 49})
    with largest:
        if inside:
            loss = model(input_ids=batch["input_ids"], labels=labels).loss
        else:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
            loss = nn.CrossEntropyLoss()(logits.reshape(-1, 97), labels[:, 1:].reshape(-1))
        accelerator.backward(loss)
    gradients = {name: value.clone() for name, value in accelerator.get_gradients(model).items()}
    text = accelerator.explain(model)
    accelerator.end_training()
    return loss.detach(), gradients, largest.elements / batch["input_ids"].numel(), text


@pytest.mark.parametrize("strategies", [[], [TP2, "sequence_parallel"], ["fully_sharded"]], ids=["dp", "sp", "fs"])
def test_the_logits_of_a_step_are_never_complete(strategies):
    plain, gradients, _, _ = run_ranks(step_of_a_loop, 2, [], True)[0]
    for inside in (True, False):
        _, _, without, _ = run_ranks(step_of_a_loop, 2, strategies, inside)[0]
        loss, found, largest, text = run_ranks(
            step_of_a_loop, 2, [*strategies, {"chunked_loss": {"chunks": 5}}], inside
        )[0]
        sharded = 49 if TP2 in strategies else 97
        assert without >= sharded * 0.9  # of each token
        assert largest <= sharded / 4  # a chunk; of 19 tokens of 20 a fifth, rounded up
        assert "logits of 'lm_head' and their cross entropy in 5 chunks" in text
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


# ---- deferred logits look like full ones -----------------------------------------------------------------------------
IDS, TOKENS = 11, (2, 5)
LOSSES = {
    "mean": lambda x: F.cross_entropy(x.view(-1, IDS), torch.arange(10)),
    "sum": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(10), reduction="sum"),
    "none": lambda x: F.cross_entropy(x.reshape(10, IDS), torch.arange(10), reduction="none"),
    "smoothed": lambda x: F.cross_entropy(x.view(-1, IDS), torch.arange(10), label_smoothing=0.1),
    "ignored": lambda x: F.cross_entropy(x.view(-1, IDS), torch.arange(10).fill_(-100)),
    "some ignored": lambda x: nn.CrossEntropyLoss(ignore_index=3)(x.view(-1, IDS), torch.arange(10) % 5),
    "one token": lambda x: F.cross_entropy(x[0, 0], torch.tensor(4)),
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, IDS), torch.arange(8)),
    "capped": lambda x: F.cross_entropy((torch.tanh(x / 3.0) * 3.0).double().view(-1, IDS), torch.arange(10)),
    "selected": lambda x: F.cross_entropy(x[torch.tensor([[1, 0, 1, 0, 1]] * 2, dtype=torch.bool)], torch.arange(6)),
    "scaled by what trains": lambda x: F.cross_entropy(
        (x * nn.Parameter(torch.tensor(2.0))).view(-1, IDS), torch.arange(10)
    ),
    "class weights": lambda x: F.cross_entropy(
        x.view(-1, IDS), torch.arange(10), weight=torch.arange(11.0, dtype=x.dtype)
    ),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), torch.ones(2, 5, dtype=torch.long)),
    "log softmax": lambda x: -F.log_softmax(x, -1)[..., 3].mean(),
    "read twice": lambda x: x.sum() + x.view(-1, IDS).square().mean() + x.amax(),
    "detached": lambda x: F.cross_entropy(x.view(-1, IDS), x.detach().argmax(-1).view(-1)) + x.detach().sum(),
}


class Tiny(nn.Module):
    """A model of two linear layers."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 7, dtype=dtype), nn.Linear(7, IDS, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def tiny(plugins, dtype=torch.float64, frozen=""):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = Tiny(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return accelerator, accelerator.prepare_model(model.train())


def gradients(function, plugins, **options):
    accelerator, model = tiny(plugins, **options)
    dtype = next(model.parameters()).dtype
    loss = function(model(torch.linspace(-1, 1, 60, dtype=dtype).view(*TOKENS, 6)))
    scale = torch.linspace(1, 2, loss.numel()).view(loss.shape)
    accelerator.backward((loss * scale).sum())
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]
    accelerator.end_training()
    return found


def losses():
    deferred = [{"chunked_loss": {"chunks": 4, "head": "head"}}]
    for name, function in LOSSES.items():
        for options in ({}, {"frozen": "body"}, {"frozen": "head"}):
            expected, found = gradients(function, [], **options), gradients(function, deferred, **options)
            torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")
    for name in ("mean", "none", "capped"):
        expected, found = (gradients(LOSSES[name], plugins, dtype=torch.bfloat16) for plugins in ([], deferred))
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_losses_are_those_of_full_logits():
    run_ranks(losses, 1)


def class_of_logits():
    accelerator, model = tiny([{"chunked_loss": {"head": "head"}}], dtype=torch.float32)
    x = torch.ones(*TOKENS, 6)
    logits = model(x)
    assert repr(logits) == "DeferredLogits(shape=(2, 5, 11), dtype=torch.float32, in 8 chunks)"
    assert (logits.shape, logits.requires_grad, len(logits)) == ((2, 5, IDS), True, 2)
    assert type(logits.bfloat16()) is type(logits)
    assert logits.bfloat16().dtype == torch.bfloat16
    assert not logits.detach().requires_grad
    assert not logits.detach().full_tensor().requires_grad
    assert type(logits + 1) is torch.Tensor
    with pytest.raises(UsageError, match="does not hold in full"):
        logits.mul_(2)
    with pytest.raises(ValueError, match="logits of shape"):
        F.cross_entropy(logits.view(-1, IDS), torch.arange(3))
    with pytest.raises(IndexError):
        F.cross_entropy(logits.view(-1, IDS), torch.arange(10) + 2)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    with pytest.raises(UsageError, match="were passed to a custom autograd function"):
        Square.apply(logits).sum().backward()

    assert type(model.eval()(x)) is torch.Tensor
    with torch.no_grad():
        assert type(model.train()(x)) is torch.Tensor
    accelerator.end_training()
    assert type(model.train()(x)) is torch.Tensor, "left behind"


def test_logits_are_plain_unless_they_train():
    run_ranks(class_of_logits, 1)


# ---- errors ----------------------------------------------------------------------------------------------------------
def refusals():
    from neuron_accel import ChunkedLossPlugin

    with pytest.raises(ConfigurationError, match="chunks is 0"):
        ChunkedLossPlugin(chunks=0)
    with pytest.raises(UnsupportedModelError, match=r"(?s)computes the logits is not known.*head='lm_head'"):
        tiny(["chunked_loss"])
    with pytest.raises(ConfigurationError, match=r"(?s)no module 'hed'.*Did you mean 'head'"):
        tiny([{"chunked_loss": {"head": "hed"}}])


def test_a_head_that_is_not_there_is_named():
    run_ranks(refusals, 1)

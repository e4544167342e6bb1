"""On XLA ranks: what is recomputed stays in the graph, takes less memory, and gives the same numbers."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import FAMILIES, pipeline
from tests.xla.hlo import barriers, collectives, dots

NAME = "activation_checkpointing"
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "zero1": (["zero1", NAME], 2),
    "tp2-sp": ([TP2, "sequence_parallel", {NAME: {"every": 2}}], 2),
    "tp2-sp-attention": ([TP2, "sequence_parallel", {NAME: {"modules": "attention"}}], 2),
    "tp2-sp-dp2-zero1": ([TP2, "sequence_parallel", "zero1", NAME], 4),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    plugins, ranks = COMPOSITIONS[composition]
    training = Training(max_norm=0.5)
    assert_parallel_equivalence(
        MODELS["llama-tied"], token_batches(2), plugins, ranks=ranks, training=training, backend="xla", timeout=110
    )


def test_a_pipeline_trains_like_one_process():
    batches = token_batches(2)
    assert_parallel_equivalence(FAMILIES["llama"], batches, [pipeline(2, 2), NAME], backend="xla", timeout=110)


# ---- one step: its graph and its numbers -----------------------------------------------------------------------------
def one_step(plugins, enable, autocast=False):
    """Loss and gradients of one step of a model with dropout, and its graph."""
    import torch_xla
    from transformers import GPT2Config, GPT2LMHeadModel

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": plugins}, mixed_precision="bf16" if autocast else "no"
    )
    with one_at_a_time():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=3, n_head=4)).train()
        if enable == "before":
            model.gradient_checkpointing_enable()
    model = accelerator.prepare_model(model)
    if enable == "after":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    accelerator.run.backend.generator.seed(1)
    batch = {name: value.to(accelerator.device) for name, value in token_batches(1)[0].items()}
    loss = model(**batch).loss
    accelerator.backward(loss)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *(parameter.grad for parameter in parameters)])
    accelerator.run.backend.step_boundary()
    found = [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in parameters)]
    copied = copy.deepcopy(model)
    for layer in copied.transformer.h if enable else ():
        assert pickle.loads(pickle.dumps(layer._gradient_checkpointing_func)).keywords == {"use_reentrant": False}
    accelerator.end_training()
    return found, hlo


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_recomputation_is_in_the_graph_and_draws_the_same_numbers(autocast):
    def step(plugins, enable=None):
        return run_ranks(one_step, 2, plugins, enable, autocast, backend="xla", timeout=110)[0]

    plain, graph = step([TP2])
    again = {"plugin": step([TP2, NAME])}
    if not autocast:
        again |= {enable: step([TP2], enable) for enable in ("before", "after")}
    assert barriers(graph) == 0
    for name, (found, recomputed) in again.items():
        assert barriers(recomputed) == 3, f"{name}: one barrier for each block"
        # query-key-value, scores, values, projection and the two layers of the feed-forward: dropout follows the last
        assert dots(recomputed) == dots(graph) + 3 * 6, name
        assert len(collectives(recomputed)) == len(collectives(graph)) + 3 * 2, name
        for expected, value in zip(plain, found, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)


# ---- memory ----------------------------------------------------------------------------------------------------------
BLOCKS, ROWS, WIDTH, INNER = 8, 1024, 16, 128
STEP = f"""
import torch, torch_xla
from neuron_accel.backends.xla import XlaBackend
backend = XlaBackend.connect()
blocks = [torch.nn.Sequential(torch.nn.Linear({WIDTH}, {INNER}), torch.nn.Tanh(), torch.nn.Linear({INNER}, {INNER}),
                              torch.nn.Tanh(), torch.nn.Linear({INNER}, {WIDTH})) for _ in range({BLOCKS})]
blocks = torch.nn.ModuleList(blocks).to(backend.device)
hidden = torch.randn({ROWS}, {WIDTH}).to(backend.device)
torch_xla.sync()
for block in blocks:
    hidden = hidden + (backend.recompute(block, hidden) if RECOMPUTE else block(hidden))
loss = hidden.square().mean()
loss.backward()
del hidden
torch_xla.sync()
"""


def compiled_step(folder: Path, recompute: bool) -> tuple[int, int]:
    """What a compiled step allocates in all, in bytes, and its number of results. XLA's compiler for CPUs takes
    barriers out before it is done; that pass is switched off, as on devices whose compiler honours them."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_disable_hlo_passes=cse_barrier_expander"
    environment = {**os.environ, "XLA_FLAGS": flags, "PJRT_DEVICE": "CPU"}
    program = f"RECOMPUTE = {recompute}\n{STEP}"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    (report,) = folder.glob("*memory-usage-report.txt")
    (module,) = folder.glob("*before_optimizations.txt")
    size = re.match(r"Total bytes used: (\d+)", report.read_text(encoding="utf-8"))
    layout = module.read_text(encoding="utf-8").splitlines()[0]
    assert size
    return int(size[1]), layout.split("->")[1].count("[")


def test_the_compiled_step_takes_less_memory(tmp_path):
    plain, results = compiled_step(tmp_path / "plain", False)
    recomputed, results_again = compiled_step(tmp_path / "recomputed", True)
    activations = 2 * ROWS * INNER * 4  # of a block: what its two tanh return
    assert plain > BLOCKS * activations
    assert recomputed < plain - (BLOCKS - 3) * activations
    # The loss is alive, and with it the graph of autograd: of what was computed again, and from, nothing is.
    assert results == results_again


# ---- what a function may be given and return -------------------------------------------------------------------------
def calls():
    from neuron_accel.backends.xla import XlaBackend
    from neuron_accel.errors import UsageError

    backend = XlaBackend.connect()
    device = backend.device
    weight = torch.randn(4, 4).to(device).requires_grad_()
    arrivals = []
    weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(1))

    def nested(pair, *, options, scale):
        left, right = pair
        hidden = torch.tanh(left @ weight) * options["mask"] + right.sum() * scale
        return {"out": hidden.sin(), "rest": (hidden.argmax(-1), None, hidden.detach())}

    def gradients(call, repeats=1, change=False):
        torch.manual_seed(0)
        left, right = torch.randn(3, 4).to(device).requires_grad_(), torch.randn(2).to(device)
        mask = (torch.arange(4) > 1).to(device)
        weight.grad = None
        shifted = left * 2
        result = call(nested, [shifted, right], options={"mask": mask}, scale=0.5)
        if change:
            with torch.no_grad():
                right.zero_()  # the second pass uses what the first was given
        assert not result["rest"][0].requires_grad
        assert result["rest"][1] is None
        assert not result["rest"][2].requires_grad
        loss = (result["out"] * 3).sum()
        for index in range(repeats):
            loss.backward(retain_graph=index < repeats - 1)
        return left.grad.cpu(), weight.grad.cpu()

    def plainly(function, *inputs, **keywords):
        return function(*inputs, **keywords)

    def inside_another(function, *inputs, **keywords):
        return backend.recompute(lambda *i, **k: backend.recompute(function, *i, **k), *inputs, **keywords)

    expected = gradients(plainly)
    arrivals.clear()
    for call, options in (
        (backend.recompute, {}),
        (backend.recompute, {"change": True}),
        (inside_another, {}),
    ):
        for found, value in zip(gradients(call, **options), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)
    assert len(arrivals) == 3, "once in each backward pass"
    for found, value in zip(gradients(backend.recompute, repeats=2), gradients(plainly, repeats=2), strict=True):
        torch.testing.assert_close(found, value)
    # inputs may have no gradient at all, and there may be none to compute
    assert backend.recompute(lambda x: (x @ weight).sum(), torch.ones(1, 4).to(device)).requires_grad
    with torch.no_grad():
        assert not backend.recompute(lambda x: (x @ weight).sum(), torch.ones(1, 4).to(device)).requires_grad

    turns = []

    def fickle(x):
        turns.append(1)
        return (x @ weight).tanh().sum() if len(turns) == 1 else x.sum()

    with pytest.raises(UsageError, match="ran differently when it was called again"):
        backend.recompute(fickle, torch.ones(1, 4).to(device)).backward()


def test_arguments_and_results_of_any_kind():
    run_ranks(calls, 1, backend="xla", timeout=60)


# ---- the example -----------------------------------------------------------------------------------------------------
def train_gpt2_xl(folder):
    """The example's own program, on this rank."""
    script = Path(__file__).parents[2] / "examples" / "gpt2_xl_zero1" / "train.py"
    sys.argv = [str(script), "--scale=tiny", "--precision=FP32", "--max_steps=2", f"--output_dir={folder}"]
    with one_at_a_time():
        module = runpy.run_path(str(script))
    module["main"]()


def test_the_gpt2_xl_example_trains(tmp_path):
    """One rank: where ranks are threads, XLA ends those that wait ten seconds for the one that reads the text."""
    run_ranks(train_gpt2_xl, 1, str(tmp_path), backend="xla", timeout=170, env={"NEURON_ACCEL_BACKEND": "xla"})
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert all(5 < loss < 9 for loss in losses), "the logarithm of the vocabulary's size is 6.9"

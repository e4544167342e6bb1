"""``neuron_accel.plan`` and the command: what they print, that few blocks stand for many, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from neuron_accel_plan.plan_command import SCHEDULES

from neuron_accel.commands import main
from neuron_accel.contract import AxisKind, AxisSpec, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, PlanError, UsageError

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(num_hidden_layers=8, vocab_size=256, max_position_embeddings=128, **SIZE).save_pretrained(path)
    return path


def planned(folder, **options):
    from neuron_accel_plan import plan

    return plan(folder, **{"world_size": 8, "global_batch": 16, "sequence": 64, **options})


@pytest.mark.parametrize("names", [(), ("tp", "sp"), ("tp", "zero1", "recompute"), ("tp", "stage 3")], ids="+".join)
def test_few_blocks_stand_for_many(folder, names):
    from plan_support import plugins_of

    few, all_ = (planned(folder, plugins=plugins_of(names), full_depth=deep) for deep in (False, True))
    assert few.extrapolated
    assert not all_.extrapolated
    assert (few.step.operations, few.step.weights) == (all_.step.operations, all_.step.weights)
    assert few.step.peak.total == pytest.approx(all_.step.peak.total, rel=0.03)
    for exact in ("weights", "saved activations"):
        assert few.step.peak.parts[exact] == pytest.approx(all_.step.peak.parts[exact], rel=0.01)
    sent = [{(f.op, f.axis): f.sent for f in counted.step.flows} for counted in (few, all_)]
    assert sent[0] == pytest.approx(sent[1], rel=0.01, abs=256)


def test_few_recomputed_blocks_stand_for_many():
    """Gradients of a tied embedding, at the very end, are not part of the last block that is recomputed."""
    from transformers import LlamaConfig

    from neuron_accel import ActivationCheckpointingPlugin

    tied = LlamaConfig(num_hidden_layers=28, vocab_size=4096, tie_word_embeddings=True, **SIZE)
    few, all_ = (
        planned(tied, plugins=[ActivationCheckpointingPlugin()], full_depth=deep).step.peak for deep in (False, True)
    )
    assert few.total == pytest.approx(all_.total, rel=0.01)
    assert few.moment.module == all_.moment.module


def phases(count):
    return {phase: max(p.parts["temporary"] for p in count.step.peaks if p.moment.phase == phase) for phase in PHASES}


PHASES = ("clipping", "optimizer step")


def test_optimizers_that_update_all_parameters_at_once_take_a_copy_of_the_second_moments(folder):
    one, all_ = (planned(folder, foreach=foreach) for foreach in (False, True))
    moments = all_.parameters * 2
    assert phases(all_)["optimizer step"] == pytest.approx(moments, rel=0.01)
    assert phases(one)["optimizer step"] < 0.2 * moments


@pytest.mark.parametrize(("torch_version", "native"), [("2.9.0", False), ("2.13.0", True)])
def test_they_do_on_the_native_device(folder, monkeypatch, torch_version, native):
    from neuron_accel_plan.layout import Planner

    monkeypatch.setattr(torch, "__version__", torch_version)
    few = {"world_size": 2, "global_batch": 4, "sequence": 64}
    for instance, expected in {"trn1.32xlarge": False, "trn2.48xlarge": native, None: False}.items():
        assert Planner(folder, instance=instance, **few).foreach is expected
    assert Planner(folder, instance="trn1.32xlarge", foreach=True, **few).foreach


def test_clipping_takes_no_copy_of_the_gradients(folder):
    counted = planned(folder)
    assert phases(counted)["clipping"] < 0.01 * counted.step.weights


def test_attention_of_torch_is_counted_too(folder):
    eager, fused = (planned(folder, attention=kind).step for kind in ("eager", "sdpa"))
    assert fused.operations == eager.operations
    assert fused.peak.total == pytest.approx(eager.peak.total, rel=0.3)


def test_a_count_has_a_repr_that_one_can_read(folder):
    shown = repr(planned(folder))
    assert shown.startswith("<LayoutCount: LlamaForCausalLM, dp 8, rank 0; <StepCount: peak ")
    assert len(shown) < 200
    assert "\n" not in shown


def test_few_micro_batches_stand_for_many(folder):
    from neuron_accel import PipelineParallelPlugin

    options = {"global_batch": 16, "plugins": [PipelineParallelPlugin(pipeline_parallel_size=4, num_microbatches=4)]}
    few, all_ = (planned(folder, rank=0, full_depth=deep, **options) for deep in (False, True))
    assert few.extrapolated
    assert (few.micro_batch, few.accumulation, few.bubble) == (2, 4, pytest.approx(3 / 7))
    assert (few.step.operations, few.step.weights) == (all_.step.operations, all_.step.weights)
    assert few.step.peak.total == pytest.approx(all_.step.peak.total, rel=0.05)
    assert few.step.peak.parts["saved activations"] == pytest.approx(
        all_.step.peak.parts["saved activations"], rel=0.03
    )
    sent = [{(f.op, f.axis): f.sent for f in counted.step.flows} for counted in (few, all_)]
    assert sent[0] == pytest.approx(sent[1], rel=0.01, abs=256)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_with_few_blocks_runs_all_of_them(rank):
    """That is no more work than two other numbers of blocks, and exact, also where stages have unequal numbers."""
    from transformers import LlamaConfig

    from neuron_accel import PipelineParallelPlugin

    llama = LlamaConfig(num_hidden_layers=11, vocab_size=256, max_position_embeddings=128, **SIZE)
    pipeline = PipelineParallelPlugin(
        pipeline_parallel_size=4, num_microbatches=4, schedule="interleaved", virtual_stages=2
    )
    options = {"global_batch": 16, "plugins": [pipeline], "rank": rank}
    few, all_ = (planned(llama, full_depth=deep, **options) for deep in (False, True))
    assert few.extrapolated
    assert not all_.extrapolated
    assert few.step.blocks == all_.step.blocks
    assert len(few.step.blocks) in (2, 3)
    assert few.step.peaks == all_.step.peaks
    assert few.step.operations == all_.step.operations
    assert few.step.weights == all_.step.weights


def test_a_step_that_does_not_fit_need_not_be_counted_whole(folder, monkeypatch):
    """Few of its micro-batches are enough, and need no more than all of them."""
    from neuron_accel_plan.layout import Planner

    from neuron_accel import Instance, PipelineParallelPlugin

    plugins = [PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=8)]
    arguments = {"world_size": 2, "global_batch": 16, "sequence": 64, "instance": "trn1.2xlarge"}
    for core, fits in ((1 << 20, False), (1 << 30, True)):
        monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None, core=core: core)
        planner = Planner(folder, **arguments)
        few = planner.count(plugins, rank=0, only_if_fits=True)
        assert few.fits == fits
        assert few.accumulation == 8
        whole = planner.count(plugins, rank=0)
        assert (few.step.peak.total == whole.step.peak.total) == fits
        assert few.step.peak.total <= whole.step.peak.total
        assert whole.fits == fits


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_time_of_few_micro_batches_of_a_pipeline_stands_for_many(schedule):
    """All but the first add to gradients."""
    from transformers import LlamaConfig

    from neuron_accel import PipelineParallelPlugin

    wide = {**SIZE, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512}
    llama = LlamaConfig(num_hidden_layers=8, vocab_size=4096, **wide)
    pipeline = PipelineParallelPlugin(pipeline_parallel_size=4, num_microbatches=8, schedule=schedule)
    options = {"global_batch": 16, "sequence": 512, "instance": "trn1.32xlarge", "plugins": [pipeline]}
    few, all_ = (planned(llama, rank=0, full_depth=deep, **options) for deep in (False, True))
    assert few.predict().seconds == pytest.approx(all_.predict().seconds, rel=0.01)


def test_the_fullest_stage_is_found(folder):
    from neuron_accel import PipelineParallelPlugin

    plugins = [PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)]
    found = planned(folder, plugins=plugins)
    peaks = [planned(folder, plugins=plugins, rank=rank).step.peak.total for rank in (0, 4)]
    assert found.step.peak.total == max(peaks) > min(peaks)
    assert found.rank == (0, 4)[peaks.index(max(peaks))]


@pytest.mark.parametrize("rank", [0, 2])
def test_stages_are_cut_where_they_are_predicted_to_be(rank):
    """Where experts are sharded over ranks, blocks have less weights than the head, and do not cost less."""
    from transformers import MixtralConfig

    from neuron_accel import PipelineParallelPlugin
    from neuron_accel.commands import load_config

    pytest.importorskip("neuron_accel_expert_parallel")
    (experts,) = load_config({"plugins": [{"expert_parallel": {"expert_parallel_size": 2}}]}).plugins
    size = {"num_hidden_layers": 8, "vocab_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 1}
    mixtral = MixtralConfig(**size, max_position_embeddings=64, **SIZE)
    pipeline = PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)
    options = {"world_size": 4, "global_batch": 8, "plugins": [experts, pipeline], "rank": rank}
    few, all_ = (planned(mixtral, full_depth=deep, **options).step for deep in (False, True))
    assert few.weights == all_.weights
    assert few.operations == pytest.approx(all_.operations, rel=1e-6)


def test_a_calibration_alone_predicts_the_time_of_a_pipeline(folder):
    from neuron_accel_plan.calibration import machine_of

    from neuron_accel import PipelineParallelPlugin, find_instance

    counted = planned(folder, plugins=[PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)])
    with pytest.raises(UsageError, match="without an instance"):
        counted.predict()
    found = counted.predict(machine_of(find_instance("trn1.32xlarge")))
    waiting = found.parts["bubble"] / found.seconds
    assert 0 < waiting <= counted.bubble == pytest.approx(1 / 3)  # (stages - 1) / (micro-batches + stages - 1)


def sent(count):
    return tuple(flow for flow in count.step.flows if flow.dtype != "uint8")


@pytest.mark.parametrize("kind", ["zero1", "plain", "pipeline"])
def test_one_step_stands_for_the_second(kind):
    from neuron_accel_plan.layout import Planner
    from transformers import LlamaConfig

    from neuron_accel import PipelineParallelPlugin, Zero1Plugin

    pipeline = PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)
    plugins = {"zero1": [Zero1Plugin()], "plain": [], "pipeline": [pipeline, Zero1Plugin()]}[kind]
    llama = LlamaConfig(num_hidden_layers=6, vocab_size=256, max_position_embeddings=128, **SIZE)
    planner = Planner(llama, world_size=8, global_batch=32, sequence=64)
    exact, fast = (planner.count(plugins, quick=quick) for quick in (False, True))
    if kind == "pipeline":  # the first time, stages tell each other shapes
        exact, fast = (replace(count, step=replace(count.step, flows=sent(count))) for count in (exact, fast))
    assert fast.step.flows == exact.step.flows
    assert fast.step.operations == exact.step.operations
    assert fast.step.peak.total == pytest.approx(exact.step.peak.total, rel=0.03)
    for part in ("weights", "optimizer state", "buckets"):
        assert fast.step.peak.parts[part] == pytest.approx(exact.step.peak.parts[part], rel=0.01), part


def test_models_whose_blocks_differ_run_at_full_depth():
    from neuron_accel_plan.layout import _alike_blocks, model_without_weights
    from transformers import LlamaConfig, Qwen3Config

    alike = LlamaConfig(num_hidden_layers=5, vocab_size=256, **SIZE)
    assert _alike_blocks(alike, model_without_weights(alike)) == ("model.layers", 1)
    mixed = Qwen3Config(
        num_hidden_layers=5,
        vocab_size=256,
        use_sliding_window=True,
        max_window_layers=2,
        sliding_window=8,
        head_dim=8,
        **SIZE,
    )
    assert len(set(mixed.layer_types)) == 2
    assert _alike_blocks(mixed, model_without_weights(mixed)) == (None, 1)
    shallow = LlamaConfig(num_hidden_layers=3, vocab_size=256, **SIZE)
    assert _alike_blocks(shallow, model_without_weights(shallow)) == (None, 1)


def of_turns(kind, depth=8):
    """Attention in a window and to all tokens by turns, or every other block with experts, which are larger."""
    from transformers import GptOssConfig, Qwen3MoeConfig

    size = {**SIZE, "num_hidden_layers": depth, "vocab_size": 256, "head_dim": 8, "max_position_embeddings": 128}
    if kind == "windows":
        return GptOssConfig(num_local_experts=32, num_experts_per_tok=2, **size)
    return Qwen3MoeConfig(
        num_experts=32, num_experts_per_tok=2, moe_intermediate_size=96, decoder_sparse_step=2, **size
    )


@pytest.mark.parametrize(
    ("names", "micro_batches"), [([], 2), (["tp2", "core"], 1), (["chunked"], 1), (["tp2", "sp", "ac", "flash"], 1)]
)
def test_one_and_two_blocks_tell_what_two_and_three_do(names, micro_batches):
    """Samples of a search run no more, if all blocks are alike."""
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.step import extrapolate
    from transformers import LlamaConfig

    from neuron_accel import (
        ActivationCheckpointingPlugin,
        ChunkedLossPlugin,
        FlashAttentionPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
    )

    offered = {
        "tp2": TensorParallelPlugin(tensor_parallel_size=2),
        "sp": SequenceParallelPlugin(),
        "ac": ActivationCheckpointingPlugin(),
        "core": ActivationCheckpointingPlugin(modules="core_attention"),
        "chunked": ChunkedLossPlugin(),
        "flash": FlashAttentionPlugin(),
    }
    llama = LlamaConfig(num_hidden_layers=12, vocab_size=512, max_position_embeddings=512, **SIZE)
    planner = Planner(llama, world_size=8, global_batch=32, sequence=256, instance="trn1.32xlarge")
    assert planner.depths == (1, 2)
    found = []
    for planner.depths in ((1, 2), (2, 3)):
        counts = planner.shallow([offered[name] for name in names], 1, micro_batches)
        found.append(extrapolate(counts, 12, planner.blocks, 11, planner.depths))
    few, more = found
    assert (few.operations, few.weights, few.flows) == (more.operations, more.weights, more.flows)
    assert {peak.moment: peak.parts for peak in few.peaks} == {peak.moment: peak.parts for peak in more.peaks}


@pytest.mark.parametrize(
    ("first", "depth"), [("sliding_attention", 8), ("full_attention", 8), ("sliding_attention", 9)]
)
def test_one_and_three_blocks_bound_blocks_that_attend_to_fewer_tokens_in_turn(first, depth):
    """If the first attends to fewer: of the others the time without blocks would be taken for too long."""
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.step import extrapolate

    config = of_turns("windows", depth=depth)
    kinds = ("sliding_attention", "full_attention")
    config.layer_types = [kinds[(number + kinds.index(first)) % 2] for number in range(depth)]
    planner = Planner(config, world_size=8, global_batch=32, sequence=16, instance="trn1.32xlarge")
    assert planner.depths == ((1, 3) if (first, depth) == ("sliding_attention", 8) else (2 + depth % 2, 4 + depth % 2))
    found = []
    for planner.depths in ((1, 3), (2, 4)):
        found.append(extrapolate(planner.shallow([]), 8, planner.blocks, 7, planner.depths))
    few, more = found
    assert (few.operations, few.weights, few.flows) == (more.operations, more.weights, more.flows)
    assert few.peak.parts == more.peak.parts


@pytest.mark.parametrize(("names", "accumulation"), [((), 1), (("stage 3",), 1), (("stage 3",), 6)])
@pytest.mark.parametrize("kind", ["windows", "experts"])
def test_blocks_that_take_turns_stand_for_many(kind, names, accumulation):
    from neuron_accel_plan.layout import Planner
    from plan_support import plugins_of

    ranks = 8
    planner = Planner(
        of_turns(kind), world_size=ranks, global_batch=ranks * accumulation, sequence=16, instance="trn1.32xlarge"
    )
    assert (planner.blocks, planner.depths) == ("model.layers", {"windows": (1, 3), "experts": (2, 4)}[kind])
    plugins = plugins_of(names)
    few, all_ = (planner.count(plugins, accumulation, full_depth=deep) for deep in (False, True))
    assert few.extrapolated
    assert not all_.extrapolated
    assert few.step.peak.parts["weights"] == pytest.approx(all_.step.peak.parts["weights"], rel=0.01)
    assert (few.step.operations, few.step.weights) == (all_.step.operations, all_.step.weights)
    assert few.step.peak.total == pytest.approx(all_.step.peak.total, rel=0.01)
    assert few.step.peak.moment.module == all_.step.peak.moment.module


def test_operations_are_those_of_the_experts_that_a_token_visits():
    from transformers import MixtralConfig

    mixture = MixtralConfig(
        num_hidden_layers=4,
        vocab_size=256,
        max_position_embeddings=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SIZE,
    )
    counted = planned(mixture)
    idle = 4 * 2 * 3 * 64 * 128  # layers, experts that a token does not visit, matrices, dims
    tokens = 2 * 64
    looked_up = 256 * 64
    expected = 6 * (counted.parameters - idle - looked_up) * tokens
    assert counted.step.operations == pytest.approx(expected, rel=0.15)  # and scores of attention
    assert counted.step.operations > expected
    assert not counted.step.uncounted


def test_products_without_a_formula_are_named():
    import torch
    from neuron_accel_plan.memory import StepCounter

    with StepCounter(torch.device("cpu")) as counter:
        torch.ops.aten._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8))
        torch.ones(4, 4).sum()
    assert counter.uncounted == {"aten._int_mm"}


def test_storages_that_take_turns_have_no_peak_between_them():
    """Weights of one block are freed and those of another gathered: which is found first follows from addresses."""
    from neuron_accel_plan.memory import StepCounter

    with StepCounter(torch.device("cpu")) as counter:
        gathered = [torch.zeros(1000) for _ in range(16)]
        for tensor in gathered:
            tensor.untyped_storage().resize_(0)
        counter.forget_peaks()
        for tensor in gathered:
            tensor.untyped_storage().resize_(4000)
            torch.zeros(1)
            tensor.untyped_storage().resize_(0)
        (peak,) = counter.peaks()
    assert peak.total == 4004


def test_accumulation_splits_the_batch(folder):
    once, twice = (planned(folder, accumulation=steps) for steps in (1, 2))
    assert (once.micro_batch, twice.micro_batch) == (2, 1)
    assert twice.step.operations == once.step.operations
    assert twice.step.peak.parts["saved activations"] < once.step.peak.parts["saved activations"]


def test_another_accelerator_is_not_disturbed(folder):
    from accelerate.state import AcceleratorState, PartialState

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(cpu=True)
    before = dict(PartialState._shared_state)
    planned(folder)
    assert dict(PartialState._shared_state) == before
    assert accelerator.device.type == "cpu"
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"global_batch": 12}, PlanError, ["12 samples", "8 data-parallel ranks", "8 or 16"]),
        ({"sequence": 256}, ConfigurationError, ["256 tokens", "128 positions", "at most 128"]),
        ({"instance": "trn1.33xlarge"}, ConfigurationError, ["trn1.33xlarge", "Did you mean 'trn1.32xlarge'"]),
        ({"instance": "trn1.32xlarge", "world_size": 48}, PlanError, ["48 ranks", "32"]),
        ({"dtype": "float8"}, ConfigurationError, ["float8", "bfloat16"]),
        ({"world_size": 0}, ConfigurationError, ["world_size is 0"]),
        (
            {"config": {"gradient_accumulation_steps": 2}, "accumulation": 4},
            ConfigurationError,
            ["accumulation=4", "contradict", "leave one of them out"],
        ),
        ({"config": {"mixed_precision": "bf16"}}, ConfigurationError, ["mixed_precision", "convert the model"]),
        (
            {"config": {"plugins": [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 3}}]}},
            PlanError,
            ["4 samples", "3 micro-batches", "2 or 4 micro-batches"],
        ),
        (
            {"config": {"plugins": [{"pipeline_parallel": {"pipeline_parallel_size": 2}}]}, "accumulation": 3},
            PlanError,
            ["16 samples", "12 or 24"],
        ),
    ],
)
def test_what_is_not_possible_is_refused_with_the_nearest_choice(folder, options, error, words):
    with pytest.raises(error) as caught:
        planned(folder, **options)
    for word in words:
        assert word in str(caught.value)


def test_popular_models_are_known_by_name():
    """Numbers of parameters are those that are published."""
    from neuron_accel_plan.layout import _configuration, _with_depth, model_without_weights
    from neuron_accel_plan.models import known_models

    published = {
        "llama-2-7b": 6_738_415_616,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "mistral-7b": 7_248_023_552,
        "mixtral-8x7b": 46_702_792_704,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "qwen3-30b-a3b": 30_532_122_624,
        "gpt-oss-20b": 20_914_757_184,
    }
    for name in known_models():
        config = _configuration(name)
        sizes = []
        for depth in (1, 2):
            shallow = model_without_weights(_with_depth(config, depth))
            sizes.append(sum(parameter.numel() for parameter in shallow.parameters()))
        full = sizes[0] + (config.num_hidden_layers - 1) * (sizes[1] - sizes[0])
        if name in published:
            assert full == published[name], name
        size = float(re.search(r"([0-9.]+)b", name)[1]) if name != "mixtral-8x7b" else 46.7
        assert full / 1e9 == pytest.approx(size, rel=0.3), name


def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    cache = tmp_path / "models--somebody--llama"
    LlamaConfig(num_hidden_layers=4, vocab_size=256, **SIZE).save_pretrained(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert planned("somebody/llama").model == "LlamaForCausalLM"
    with pytest.raises(ConfigurationError) as caught:
        planned("somebody/else")
    for words in ("nothing is downloaded", "hf download somebody/else config.json", "llama-3.1-8b"):
        assert words in str(caught.value)


def test_the_fewest_micro_batches_that_fit_are_chosen(folder, capsys, monkeypatch):
    from neuron_accel import Instance

    options = {"instance": "trn1.32xlarge", "world_size": 8, "global_batch": 64}
    full, half = (planned(folder, **options, accumulation=number).step.peak.total for number in (1, 2))
    assert half < full
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: round((full + half) / 2 / 0.9))
    assert planned(folder, **options).accumulation == 2
    assert command(folder, "--instance", "trn1.32xlarge", "--world-size", "8", "--global-batch", "64") == 0
    text = capsys.readouterr().out
    assert "2 micro-batches are chosen, the fewest that fit (--accumulation)" in text
    assert text.splitlines()[-1].startswith("fits: ")


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing is downloaded"):
        planned(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no model_type"):
        planned(tmp_path)


def test_gradients_that_wait_for_the_last_micro_batch_are_gradients(folder):
    from neuron_accel import Zero1Plugin

    once, twice = (planned(folder, plugins=[Zero1Plugin()], accumulation=steps).step for steps in (1, 2))
    most = [max(peak.parts["gradients"] for peak in step.peaks) for step in (once, twice)]
    assert most[0] == pytest.approx(once.weights / 4, rel=0.01)  # this rank's eighth, in fp32
    assert most[1] == pytest.approx(1.25 * twice.weights, rel=0.01)


def test_gradients_that_accumulate_as_shards_need_less(folder):
    from neuron_accel import Zero1Plugin

    layouts = [Zero1Plugin(use_grad_acc_hook=hook, bucket_cap_mb=0.02) for hook in (False, True)]
    full, shards = (planned(folder, plugins=[layout], accumulation=2, sequence=8).step for layout in layouts)
    assert 0.7 * full.weights < full.peak.total - shards.peak.total < full.weights


def test_fully_sharded_gradients_that_accumulate_as_shards_are_reduced_each_time(folder):
    from neuron_accel import FullyShardedPlugin

    layouts = [FullyShardedPlugin(use_grad_acc_hook=hook) for hook in (False, True)]
    full, shards = (planned(folder, plugins=[layout], accumulation=2, sequence=8).step for layout in layouts)
    most = [max(peak.parts["gradients"] for peak in step.peaks) for step in (full, shards)]
    assert most[1] < 0.6 * most[0]
    sent = [sum(flow.sent for flow in step.flows if flow.op == "reduce_scatter") for step in (full, shards)]
    assert sent[1] == 2 * sent[0]


def test_micro_batches_are_extrapolated_one_by_one():
    """Gradients of the first micro-batch wait, and grow with the depth; those of the second are reduced as they come.
    Which of the two peaks is larger differs between two and three blocks."""
    from neuron_accel_plan.memory import GRADIENTS, PARTS, TEMPORARY, Moment, Peak
    from neuron_accel_plan.step import StepCount, extrapolate

    def count(depth):
        def peak(time, **parts):
            return Peak(Moment("backward", "head", True, time), {**dict.fromkeys(PARTS, 0), **parts})

        first, second = {GRADIENTS: 10 * depth}, {GRADIENTS: 1, TEMPORARY: 25}
        return StepCount(peaks=(peak(0, **first), peak(1, **second)), flows=(), operations=0, weights=0)

    found = extrapolate([count(2), count(3)], 10, "layers", 9)
    assert {peak.moment.time: peak.total for peak in found.peaks} == {0: 100, 1: 26}


def test_a_peak_that_is_at_two_moments_does_not_grow_by_more_than_a_block_keeps():
    """The largest of a place is late with two blocks, when little is saved, and early with three."""
    from neuron_accel_plan.memory import ACTIVATIONS, GRADIENTS, PARTS, Moment, Peak
    from neuron_accel_plan.step import StepCount, extrapolate

    def count(depth, late):
        def peak(phase, **parts):
            return Peak(Moment(phase, "head", True), {**dict.fromkeys(PARTS, 0), **parts})

        other = {ACTIVATIONS: 1, GRADIENTS: 50} if late else {ACTIVATIONS: 10 * depth, GRADIENTS: 2}
        peaks = (peak("forward", **{ACTIVATIONS: 10 * depth}), peak("backward", **other))
        return StepCount(peaks=peaks, flows=(), operations=0, weights=0)

    found = extrapolate([count(2, True), count(3, False)], 12, "layers", 11)
    assert max(peak.parts[ACTIVATIONS] for peak in found.peaks) == 120


def test_changes_that_need_less_memory_are_counted(folder, monkeypatch):
    from neuron_accel_plan import plan_text
    from neuron_accel_plan.changes import _changes, smaller
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout

    from neuron_accel import ActivationCheckpointingPlugin, FullyShardedPlugin, TensorParallelPlugin, Zero1Plugin

    kinds = [TensorParallelPlugin, ActivationCheckpointingPlugin, Zero1Plugin, FullyShardedPlugin]
    monkeypatch.setattr("neuron_accel_plan.changes.offering", lambda: kinds)
    monkeypatch.setattr(
        ActivationCheckpointingPlugin, "layouts", classmethod(lambda cls, space: [cls()]), raising=False
    )
    planner = Planner(folder, world_size=8, global_batch=16, sequence=64, instance="trn1.32xlarge")
    layout = Layout(plugins=(Zero1Plugin(),), accumulation=2)
    counted = planner.count(layout.plugins, layout.accumulation)
    changes = smaller(planner, counted, layout)
    found = {change.what: change.count.step.peak.total for change in changes}
    tried = {what for what, _ in _changes(planner, layout)}
    names = {"tensor_parallel(tensor_parallel_size=2)", "activation_checkpointing", "fully_sharded instead of zero1"}
    names.add("zero1(use_grad_acc_hook=True)")
    assert tried == {*names, "accumulation 4"}
    assert {*found} == names  # for 4 micro-batches there are too few samples
    assert [*found.values()] == sorted(found.values())
    recomputed = planner.count([Zero1Plugin(), ActivationCheckpointingPlugin()], 2).step.peak.total
    assert found["activation_checkpointing"] == pytest.approx(recomputed, rel=0.05)
    text = "\n".join(plan_text.describe_changes(changes))
    assert sorted(found, key=lambda what: text.index(f"\n{what}")) == [*found]


def test_a_change_that_the_model_cannot_run_is_left_out_and_a_fault_of_ours_is_not(folder, monkeypatch):
    from neuron_accel_plan import changes, layout
    from neuron_accel_plan.search import Layout
    from transformers import LlamaForCausalLM

    def refuses(*args, **kwargs):
        raise RuntimeError("this attention does not run so")

    planner = layout.Planner(folder, world_size=8, global_batch=16, sequence=64, instance="trn1.32xlarge")
    counted, tried = planner.count([], quick=True), Layout(plugins=(), accumulation=1)
    monkeypatch.setattr(changes, "offering", list)
    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "forward", refuses)
        assert changes.smaller(planner, counted, tried) == []
    monkeypatch.setattr(layout, "count_step", None)
    with pytest.raises(TypeError, match="not callable"):
        changes.smaller(planner, counted, tried)


def test_what_fits_leaves_a_reserve(folder):
    from neuron_accel_plan.layout import verdict_of

    assert [verdict_of(peak, 100, 10) for peak in (90, 91, 100, 101)] == ["fits", "tight", "tight", "does NOT fit"]
    counted = planned(folder, instance="trn1.32xlarge")
    assert counted.reserve == round(0.1 * counted.core_bytes)
    assert (counted.fits, counted.verdict) == (True, "fits")
    tight = replace(counted, core_bytes=round(counted.step.peak.total / 0.95), reserve=counted.step.peak.total // 9)
    assert (tight.fits, tight.verdict) == (False, "tight")
    assert replace(tight, reserve=0).fits
    for wrong, words in ((16 << 30, "16 GiB is not possible"), (-1, "is not possible")):
        with pytest.raises(ConfigurationError, match=words):
            planned(folder, instance="trn1.32xlarge", reserve=wrong)
    with pytest.raises(ConfigurationError, match="without an instance"):
        planned(folder, reserve=1)


# ---- the command -----------------------------------------------------------------------------------------------------
def command(folder, *words):
    return main(
        ["plan", "--model", str(folder), "--world-size", "32", "--global-batch", "32", "--sequence", "64", *words]
    )


def test_the_command_prints_memory_traffic_and_operations(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--tensor-parallel-size", "2", "--sequence-parallel", "--zero-1", "--recompute")
    assert command(folder, *options, "--instance", "trn1.32xlarge") == 0
    text = capsys.readouterr().out
    assert "as rank 0 of dp 16 x tp 2" in text
    for part in ("weights", "master weights", "optimizer state", "saved activations"):
        assert f"\n{part}" in text
    assert "reduce_scatter" in text
    assert "extrapolated to 8 blocks" in text
    assert text.splitlines()[-1] == "fits: 0% of the 16.00 GiB of a core of trn1.32xlarge"
    assert max(map(len, text.splitlines())) <= 80


def test_what_does_not_fit_is_an_exit_code(folder, capsys, monkeypatch):
    from neuron_accel import Instance

    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: 1 << 18)
    assert command(folder, "--instance", "trn1.32xlarge") == 1
    text = capsys.readouterr().out
    assert "does NOT fit" in text
    assert "what needs less memory, each counted" in text


def test_a_price_and_the_constants_of_the_time_are_printed(folder, capsys):
    from neuron_accel_plan.plan_command import _instances

    options = ("--instance", "trn1.32xlarge", "--price-per-hour", "21.5")
    assert command(folder, *options, "--why", "--world-size", "64", "--global-batch", "64") == 0
    text = capsys.readouterr().out
    counted = planned(folder, instance="trn1.32xlarge", world_size=64, global_batch=64)
    assert _instances(counted) == 2
    price = 2 * 21.5 / 3600 * counted.predict().seconds / (64 * 64) * 1e6
    assert f"{price:,.4g} USD for a million tokens, an hour of an instance at 21.50 USD" in text
    assert "constants\n  product kernels: public" in text


def test_strategies_are_options(folder, capsys):
    """Of the core and of packages; what is recomputed has a name."""
    from neuron_accel_plan import plan_command

    from neuron_accel.commands import Parser

    parser = Parser(prog="plan")
    plan_command.add_arguments(parser)
    pytest.importorskip("neuron_accel_context_parallel")
    pytest.importorskip("neuron_accel_expert_parallel")
    words = ["--fully-sharded", "--chunked-loss", "--context-parallel-size", "2", "--expert-parallel-size", "4"]
    args = parser.parse_args(["--model", "model", *words, "--recompute", "core_attention"])
    made = {plugin.spec.name: plugin for plugin in plan_command._plugins(args)}
    names = {"fully_sharded", "chunked_loss", "context_parallel", "expert_parallel", "activation_checkpointing"}
    assert {*made} == names
    assert made["context_parallel"].context_parallel_size == 2
    assert made["activation_checkpointing"].modules == "core_attention"
    assert plan_command._plugins(parser.parse_args(["--model", "m", "--recompute"]))[0].modules == "blocks"
    assert command(folder, "--zero-1", "--fully-sharded") == 2
    assert "exclude each other" in capsys.readouterr().err
    assert command(folder, "--fully-sharded", "--chunked-loss", "--recompute", "attention", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found["plugins"]} >= {"fully_sharded", "chunked_loss", "activation_checkpointing"}


def test_json_has_plain_numbers(folder, capsys):
    assert command(folder, "--zero-1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == "dp 32"
    assert sum(found["memory"]["parts"].values()) == found["memory"]["total"]
    assert {flow["axis"] for flow in found["traffic"]} == {"dp"}


def test_errors_name_options(folder, capsys):
    assert command(folder, "--sequence-parallel") == 2
    assert "--tensor-parallel-size" in capsys.readouterr().err
    assert command(folder, "--tensor-parallel-size", "0") == 2
    assert "--tensor-parallel-size is 0" in capsys.readouterr().err
    for size in ("0.5", "a lot"):
        assert command(folder, "--instance", "trn1.32xlarge", "--reserve", size) == 2
        assert "write 1.5GiB" in capsys.readouterr().err
    assert command(folder, "--tensor-parallel-size", "3") == 2
    assert "32 ranks cannot be divided into groups of 3" in capsys.readouterr().err


def test_the_command_counts_a_pipeline(folder, capsys):
    from neuron_accel import PipelineParallelPlugin

    degrees = {"pipeline_parallel_size": 2, "num_microbatches": 4, "virtual_stages": 2}
    options = [word for name, value in degrees.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert command(folder, "--schedule", "interleaved", *options, "--world-size", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    layout = [PipelineParallelPlugin(**degrees, schedule="interleaved")]
    counted = planned(folder, global_batch=32, plugins=layout)
    assert {**found, "time": None} == {**json.loads(json.dumps(counted.to_dict())), "time": None}
    assert found["bubble"] == pytest.approx(counted.bubble) == pytest.approx(1 / 9)
    assert command(folder, "--num-microbatches", "4", "--schedule", "gpipe") == 2
    assert "--num-microbatches, --schedule have no effect without a pipeline" in capsys.readouterr().err
    assert command(folder, *options[:4], "--virtual-stages", "0") == 2
    assert "--virtual-stages" in capsys.readouterr().err


def test_schedules_are_those_of_pipelines():
    from neuron_accel import PipelineParallelPlugin

    with pytest.raises(ConfigurationError) as caught:
        PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2, schedule="none")
    assert re.search(r"Known: (.*)\.", str(caught.value))[1].split(", ") == [*SCHEDULES]


def test_a_plugin_stays_beside_its_companion(folder):
    """The companion finds the plugin that it belongs to, as adapters of LoRA find their options."""
    from dataclasses import dataclass
    from typing import ClassVar

    from plan_support import plugins_of

    from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin

    class Helper(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="helper", api_version=4, phase=Phase.ACTIVATIONS)

        def transform_model(self, model, run):
            assert run.plan.plugin("helped").companions()

    @dataclass(frozen=True, kw_only=True)
    class Helped(StrategyPlugin):
        spec: ClassVar[PluginSpec] = PluginSpec(name="helped", api_version=4, phase=Phase.ADAPTATION)

        def companions(self):
            return (Helper(),)

    assert planned(folder, plugins=[Helped(), *plugins_of(("tp", "pp"))]).plugins.count("helper") == 1


def test_a_layout_is_held_against_the_runtime_that_it_will_have():
    """More groups than a graph of the XLA path may have, on an instance that trains natively with torch 2.13."""
    from neuron_accel_plan.layout import Planner
    from transformers import LlamaConfig

    from neuron_accel import find_instance

    kinds = [AxisKind.MODEL, AxisKind.SEQUENCE, AxisKind.STAGE, AxisKind.DATA, *[AxisKind.MODEL] * 3]

    class FurtherAxes(StrategyPlugin):
        spec = PluginSpec(name="further", api_version=4, phase=Phase.LAYOUT)

        def axes(self):
            return tuple(AxisSpec(name=f"a{n}", degree=2, kind=kind) for n, kind in enumerate(kinds))

    def plan_on(instance):
        planner = Planner(LlamaConfig(), world_size=128, global_batch=128, sequence=8, instance=instance)
        return planner.make_plan([FurtherAxes()])

    with pytest.raises(PlanError, match=r"in 15 ways, and trn1\.32xlarge allows 12"):
        plan_on("trn1.32xlarge")
    if find_instance("trn2.48xlarge").runtime(version("torch")) > (2, 33):  # torch 2.9 has the XLA path only
        assert plan_on("trn2.48xlarge").mesh.world_size == 128

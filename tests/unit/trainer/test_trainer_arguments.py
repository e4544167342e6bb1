"""The Trainer's arguments that select strategies: flags, plugins, and errors before a model is loaded."""

from __future__ import annotations

import shlex

import pytest

from neuron_accel.errors import ConfigurationError, NeuronAccelError, PlanError
from neuron_accel.strategies.fully_sharded import FullyShardedPlugin
from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin
from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin
from neuron_accel.strategies.zero1 import Zero1Plugin
from neuron_accel.testing import run_ranks

YAML = "plugins:\n  - zero1: {bucket_cap_mb: 3.0}\n"
TOO_MUCH = "mixed_precision: bf16\nplugins: [zero1]\n"

GOOD = {
    "--zero_1": [Zero1Plugin()],
    "--fully_sharded": [FullyShardedPlugin()],
    "--plugins zero1": [Zero1Plugin()],
    "--neuron_config {yaml}": [Zero1Plugin(bucket_cap_mb=3.0)],
    "--tensor_parallel_size 2": [ModelParallelismPlugin(tensor_parallel_size=2), SequenceParallelPlugin()],
    "--tensor_parallel_size=2 --disable_sequence_parallel --disable_embedding_parallelization": [
        ModelParallelismPlugin(tensor_parallel_size=2, parallelize_embeddings=False)
    ],
    "--pipeline_parallel_size 2 --per_device_train_batch_size 6": [
        ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=6)
    ],
    "--pipeline_parallel_size=2 --pipeline_parallel_num_microbatches=4 --zero_1": [
        ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=4),
        Zero1Plugin(),
    ],
}
BAD = {
    "--tensor_parallel_size 3": (PlanError, ["3"]),
    "--tensor_parallel_size 0": (ConfigurationError, ["tensor_parallel_size=0"]),
    "--pipeline_parallel_num_microbatches 4": (ConfigurationError, ["without a pipeline"]),
    "--output_dir s3://bucket/runs": (ConfigurationError, ["s3://bucket/runs", "save_state"]),
    "--plugins zero2": (NeuronAccelError, ["zero2", "zero1"]),
    "--plugins zero1 --zero_1": (PlanError, ["zero1"]),
    "--zero_1 --fully_sharded": (PlanError, ["zero1", "fully_sharded"]),
    "--pipeline_parallel_size=2 --pipeline_parallel_num_microbatches=3": (PlanError, ["8 samples", "3 micro-batches"]),
    "--fsdp full_shard": (ConfigurationError, ["fsdp", "fully_sharded"]),
    "--pipeline_parallel_size=2 --predict_with_generate": (PlanError, ["predict_with_generate", "cache"]),
    "--neuron_config {too_much}": (ConfigurationError, ["mixed_precision", "bf16", "too_much.yaml"]),
}


def parsed(all_flags):
    """On a rank: the strategies for command-line flags, or the error."""
    from transformers import HfArgumentParser

    from neuron_accel import NeuronSeq2SeqTrainingArguments

    parser, results = HfArgumentParser(NeuronSeq2SeqTrainingArguments), []
    for flags in all_flags:
        try:
            (arguments,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *shlex.split(flags)])
            arguments.to_json_string()
            results.append(arguments.strategies())
        except NeuronAccelError as error:
            results.append(error)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "plan.yaml").write_text(YAML)
    (folder / "too_much.yaml").write_text(TOO_MUCH)
    every = [*GOOD, *BAD]
    files = {
        name: shlex.quote(str(folder / f"{file}.yaml")) for name, file in (("yaml", "plan"), ("too_much", "too_much"))
    }
    flags = [f.format(**files) for f in every]
    ranks = run_ranks(parsed, 2, flags)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(every)}


@pytest.mark.parametrize("flags", GOOD)
def test_flags_stand_for_plugins(flags, results):
    assert results[flags] == [GOOD[flags]] * 2


@pytest.mark.parametrize("flags", BAD)
def test_refused_on_every_rank_before_a_model_is_loaded(flags, results):
    kind, words = BAD[flags]
    for error in results[flags]:
        assert isinstance(error, kind)
        for word in words:
            assert word in str(error)


def where_a_rank_stands(folder):
    """On a rank: what counts samples, what counts processes, and whether the other process was first."""
    import time
    from dataclasses import dataclass, field
    from pathlib import Path

    from transformers import TrainingArguments

    from neuron_accel.trainer import NeuronTrainer
    from neuron_accel.trainer.arguments import StrategyArguments
    from tests.distributed.models import llama

    @dataclass
    class TheirArguments(TrainingArguments):
        """As TRL's: a number of samples is computed while the arguments are constructed."""

        generation_batch_size: int = field(default=0)

        def __post_init__(self):
            super().__post_init__()
            self.generation_batch_size = self.per_device_train_batch_size * self.world_size

    @dataclass
    class Arguments(StrategyArguments, TheirArguments):
        pass

    args = Arguments(str(folder), tensor_parallel_size=2, per_device_train_batch_size=3, report_to="none")
    done = Path(folder, "done")
    with args.main_process_first():
        early = done.exists()
        if args.should_save:
            time.sleep(0.2)
            done.touch()
    trainer = NeuronTrainer(llama(), args)
    return {
        "pair": (args.process_index, args.world_size),
        "samples": args.generation_batch_size,
        "first": (args.should_save, args.should_log, trainer.is_world_process_zero(), not early),
        "trainer": (trainer.accelerator.process_index, trainer.accelerator.num_processes),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_world_size_and_process_index_count_data_parallel_ranks(ranks, tmp_path):
    for rank, found in enumerate(run_ranks(where_a_rank_stands, ranks, tmp_path)):
        pair = rank // 2, ranks // 2
        assert found == {"pair": pair, "samples": 3 * pair[1], "first": (rank == 0,) * 4, "trainer": pair}

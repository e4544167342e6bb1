"""What a rank does in a run does not grow with the number of ranks, counted in a run whose ranks are threads."""

from __future__ import annotations

import math

from benchmarks.world import Part, play, step
from neuron_accel.strategies.fully_sharded.plugin import FullyShardedPlugin
from neuron_accel.strategies.tensor_parallel.plugin import TensorParallelPlugin


def fully_sharded():
    return [FullyShardedPlugin(modules="*")]


def check(few: dict[str, Part], many: dict[str, Part], growth: float, *kinds: str, main: bool = True) -> None:
    for name, part in many.items():
        before = few[name]
        for kind in kinds:
            assert part.most[kind] <= growth * before.most[kind], (name, kind)
            assert not main or part.main[kind] <= growth * before.main[kind], (name, kind)


def test_start_steps_and_an_interruption_grow_as_the_logarithm_of_the_number_of_ranks(tmp_path):
    growth = math.log(512) / math.log(8)
    few, many = (play(fully_sharded, size, tmp_path, loads=False) for size in (8, 512))
    assert all(few[name].total[kind] for name, kind in (("start", "messages"), ("five steps", "store")))
    check(
        few,
        {name: part for name, part in many.items() if name != "begin to train"},
        growth,
        "messages",
        "bytes",
        "peers",
        "store",
    )
    # Ranks that wait for others look ever less often: at most 2000 times a second together.
    meeting = many["begin to train"]
    assert 0 < meeting.total["store"] < 60 * 512
    assert not meeting.total["messages"]
    assert step(fully_sharded(), 8) == step(fully_sharded(), 512)


def test_saves_and_loads_grow_as_the_logarithm_of_the_number_of_ranks(tmp_path):
    growth, found = math.log(128) / math.log(8), []
    for size in (2, 8, 128):  # the first imports what is imported when it is needed
        (folder := tmp_path / f"{size:03}").mkdir()  # names of equal length, which are sent
        found.append(play(fully_sharded, size, folder))
    few, many = ({name: each[name] for name in ("prepare", "save", "load")} for each in found[1:])
    check(few, many, growth, "messages", "peers", "opens", "stats", main=False)
    check(few, {"load": many["load"]}, growth, "messages", "bytes", "peers", "opens", "stats")
    # The main process gets the files and the state of generators of each rank. Each rank reads what names all files.
    assert many["save"].most["bytes"] < growth * few["save"].most["bytes"] + 100 * 128
    assert many["save"].main["bytes"] < 128 * 15_000
    assert many["load"].total["read"] / 128 < 30_000 + 1_000 * 128


def test_groups_of_overlapping_partitions_are_made_whoever_is_late(tmp_path):
    def plugins():
        return [TensorParallelPlugin(tensor_parallel_size=4), FullyShardedPlugin(modules="*")]

    parts = play(plugins, 16, tmp_path, delay=0.05, loads=False)
    # Of two partitions a rank has one group each: those that share a model, and those that average gradients.
    assert parts["start"].most["groups"] == parts["start"].main["groups"] == 2

"""The search of layouts: what it finds, rules out and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from neuron_accel.commands import main
from neuron_accel.errors import ConfigurationError, UsageError

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(num_hidden_layers=8, vocab_size=256, max_position_embeddings=128, **SIZE).save_pretrained(path)
    return path


def command(folder, *words):
    known = ["plan", "--model", str(folder), "--global-batch", "4", "--sequence", "64"]
    return main([*known, "--instances", "1", "--instance", "trn1.2xlarge", *words])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_search_ranks_what_fits_and_writes_a_configuration_that_loads(folder, tmp_path, capsys, monkeypatch):
    from neuron_accel import Instance
    from neuron_accel.commands import load_config

    # Few layouts to run: a core that holds what is sharded, and not the whole state.
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: 3 << 20)
    path = tmp_path / "train.yaml"
    assert command(folder, "--best", "2", "--jobs", "1", "--price-per-hour", "1.5", "--write", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["layouts"]
    assert first["seconds"]["likely"] <= second["seconds"]["likely"]
    for layout in (first, second):
        assert layout["memory"]["total"] <= 3 << 20
        assert layout["seconds"]["low"] <= layout["seconds"]["likely"] <= layout["seconds"]["high"]
        assert layout["price_per_million_tokens"] > 0
        assert layout["sent_by_link"]["EFA"] == 0
    assert len(found["ruled_out"]) > 20
    assert all(ruled["reason"] for ruled in found["ruled_out"])
    loaded = load_config(path)
    names = {entry if isinstance(entry, str) else next(iter(entry)) for entry in first["config"]["plugins"]}
    assert {plugin.spec.name for plugin in loaded.plugins} == names
    assert loaded.accelerate.get("gradient_accumulation_steps", 1) == first["config"].get(
        "gradient_accumulation_steps", 1
    )


@pytest.mark.timeout(120)
def test_several_processes_answer_like_one_and_their_end_is_an_error(folder, monkeypatch):
    from neuron_accel_plan import search
    from neuron_accel_plan.layout import Planner

    from neuron_accel import TensorParallelPlugin

    monkeypatch.setattr(search, "_WORTHWHILE", 0.0)
    arguments = {"model": folder, "world_size": 2, "global_batch": 4, "sequence": 64, "instance": "trn1.2xlarge"}
    tensor = TensorParallelPlugin(tensor_parallel_size=2)
    tasks = {
        "sample": search._Sample((tensor,), 2),
        "layout": search.Layout(plugins=(tensor,), accumulation=2),
        "impossible": search.Layout(plugins=(TensorParallelPlugin(tensor_parallel_size=64),), accumulation=1),
    }
    planner = Planner(**arguments)
    alone, two = (search._DryRuns(planner, arguments, None, jobs) for jobs in (1, 2))
    expected = dict(alone.answers(tasks.items(), 3))
    try:
        found = dict(two.answers(tasks.items(), 3))
        assert list(found) == list(tasks)
        assert repr(found) == repr(expected)
        assert "64" in found["impossible"].reason
        for process in two._processes.values():
            process.kill()
            process.join()
        with pytest.raises(UsageError, match="--jobs 1"):
            list(two.answers(tasks.items(), 3))
    finally:
        two.close()
    assert not two._processes


@pytest.mark.parametrize(
    ("names", "core"),
    [
        (("TensorParallelPlugin", "Zero1Plugin"), 22 << 20),
        pytest.param(("PipelineParallelPlugin", "FullyShardedPlugin"), 22 << 20, marks=pytest.mark.slow),
    ],
    ids=["tensor", "pipeline"],
)
@pytest.mark.timeout(300)
def test_a_search_finds_what_counting_all_layouts_finds(folder, monkeypatch, names, core):
    """Every layout is counted and predicted: those that fit, in order, are what the search finds, and nothing is
    faster than its bound."""
    from neuron_accel_plan import search
    from neuron_accel_plan.layout import Planner

    import neuron_accel
    from neuron_accel import Instance, find_instance

    monkeypatch.setattr(search, "offering", lambda: [getattr(neuron_accel, name) for name in names])
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: core)
    arguments = {"model": folder, "world_size": 2, "global_batch": 4, "sequence": 128, "instance": "trn1.2xlarge"}
    planner = Planner(**arguments)
    dry_runs = search._DryRuns(planner, arguments, None, 1)
    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), dry_runs, None, lambda done, total: None)
    found, slower, ruled_out = searcher.run(3)
    every = {str(each): planner.count(each.plugins, each.accumulation) for each in searcher._layouts()}
    fitting = {name: counted.predict().seconds for name, counted in every.items() if counted.fits}
    fastest = sorted(fitting, key=fitting.__getitem__)[:3]
    assert [str(ranked.layout) for ranked in found] == fastest
    assert [ranked.time.seconds for ranked in found] == pytest.approx([fitting[name] for name in fastest])
    assert {str(each.layout) for each in (*found, *slower)} == {*fitting}
    assert {str(each.layout) for each in ruled_out} == {*every} - {*fitting}
    for each in slower:  # a bound, and one that is close: else it would save no count
        assert 0.7 < each.seconds / fitting[str(each.layout)] <= 1 + 1e-9, each


def test_what_is_found_first_is_predicted_and_below_all_bounds(folder):
    """The first is slower than its bound, the third does not fit, and the last need not be counted."""
    from neuron_accel_plan import search
    from neuron_accel_plan.layout import Planner

    from neuron_accel import find_instance

    planner, asked = Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge"), []
    count = planner.count([])
    taken = {"1": 3.0, "2": 1.5, "4": None, "8": 2.5}

    class Answers:
        width = 1

        def answers(self, tasks, number):
            for name, layout in tasks:
                asked.append(str(layout.accumulation))
                seconds = taken[asked[-1]]
                time = replace(count.predict(), seconds=seconds or 0.0)
                yield (
                    name,
                    search.Ranked(layout=layout, count=count, time=time) if seconds else search._Failed("does not fit"),
                )

    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), Answers(), None, lambda done, total: None)
    layouts = {each: search.Layout(plugins=(), accumulation=int(each)) for each in taken}
    estimates = [
        search._Estimate(layouts[each], 1, 0.0, seconds)
        for each, seconds in zip(taken, (1.0, 1.2, 1.3, 2.0), strict=True)
    ]
    found, slower, ruled_out = searcher._best_first(estimates, 1, lambda done, more: None)
    assert asked == ["1", "2", "4"]
    assert [ranked.layout for ranked in found] == [layouts["2"]]
    assert [(each.layout, each.seconds, each.counted) for each in slower] == [
        (layouts["8"], 2.0, False),
        (layouts["1"], 3.0, True),
    ]
    assert [ruled.layout for ruled in ruled_out] == [layouts["4"]]


def test_layouts_that_keep_the_same_activations_are_judged_by_one(folder):
    """The first is counted and does not fit; the second is not counted, and the third fits by the same correction."""
    from neuron_accel_plan import search
    from neuron_accel_plan.layout import Planner

    from neuron_accel import FullyShardedPlugin, Zero1Plugin, find_instance

    arguments = {"model": folder, "world_size": 2, "global_batch": 4, "sequence": 64, "instance": "trn1.2xlarge"}
    planner, asked = Planner(**arguments), []
    count = planner.count([])

    class Answers:
        width = 1

        def answers(self, tasks, number):
            for name, layout in tasks:
                asked.append(layout.plugins)
                fit = search.Ranked(layout=layout, count=count, time=count.predict())
                yield name, search._Failed("counted", 150) if len(asked) == 1 else fit

    plugins = [(), (Zero1Plugin(),), (FullyShardedPlugin(),)]
    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), Answers(), None, lambda done, total: None)
    searcher._core = 100
    estimates = [
        search._Estimate(search.Layout(plugins=each, accumulation=1), 1, memory, memory * -1e-9)
        for each, memory in zip(plugins, (90, 80, 30), strict=True)
    ]
    found, _, ruled_out = searcher._best_first(estimates, 1, lambda done, more: None)
    assert asked == [plugins[0], plugins[2]]
    assert [ranked.layout.plugins for ranked in found] == [plugins[2]]
    assert [ruled.reason.split(";")[0] for ruled in ruled_out] == [
        "counted",
        "about 0.0 GiB, from one that keeps the same activations",
    ]


def test_what_is_written_trains_with_the_layout(folder, tmp_path):
    """Every option of the layout, also those of plugins that others bring."""
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout, Ranked, Search

    from neuron_accel import (
        ActivationCheckpointingPlugin,
        FullyShardedPlugin,
        PipelineParallelPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
        Zero1Plugin,
    )
    from neuron_accel.commands import load_config

    tensor, sequence = TensorParallelPlugin(tensor_parallel_size=2), SequenceParallelPlugin()
    pipeline = PipelineParallelPlugin(
        pipeline_parallel_size=2, num_microbatches=4, schedule="interleaved", virtual_stages=2
    )
    recompute = ActivationCheckpointingPlugin(modules="core_attention")
    layouts = [
        Layout(plugins=(), accumulation=1),
        Layout(plugins=(tensor, sequence, pipeline, recompute, Zero1Plugin(bucket_cap_mb=8)), accumulation=1),
        Layout(plugins=(tensor, FullyShardedPlugin(reshard_after_forward=False)), accumulation=4),
    ]
    planner = Planner(folder, world_size=8, global_batch=32, sequence=64, instance="trn1.32xlarge")
    counted, meshes = planner.count([tensor]), []
    ranked = tuple(Ranked(layout=layout, count=counted, time=counted.predict()) for layout in layouts)
    found = Search(
        model="LlamaForCausalLM",
        parameters=1,
        instance="trn1.32xlarge",
        instances=1,
        tokens=2048,
        best=ranked,
        ruled_out=(),
    )
    for number, layout in enumerate(layouts, start=1):
        path = tmp_path / f"{number}.yaml"
        found.write(path, number)
        loaded = load_config(path)
        assert tuple(loaded.plugins) == layout.plugins
        assert loaded.accelerate.get("gradient_accumulation_steps", 1) == layout.accumulation
        meshes.append(str(planner.make_plan(loaded.plugins).mesh))
    assert meshes == ["dp 8", "pp 2 x dp 2 x tp 2", "dp 4 x tp 2"]
    assert "LlamaForCausalLM on 1 x trn1.32xlarge: dp 4 x tp 2" in (tmp_path / "1.yaml").read_text()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        found.write(tmp_path / "nowhere" / "train.yaml")


def test_nothing_fits_is_an_exit_code_and_says_why(folder, capsys, monkeypatch):
    from neuron_accel import Instance

    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: 1 << 10)
    assert command(folder, "--why") == 1
    text = capsys.readouterr().out
    assert "no layout fits" in text
    assert "weights, gradients and optimizer state are" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"instances": 2, "instance": "trn1.2xlarge"},
            ["2 instances", "no network", "larger instance"],
        ),
        ({"instances": 0, "instance": "trn1.32xlarge"}, ["instances is 0", "at least 1"]),
        ({"instances": 1, "instance": "trn1.32xlarge", "best": 0}, ["best is 0", "at least 1"]),
        ({"instances": 1, "instance": "trn1.32xlarge", "price_per_hour": -3.0}, ["price_per_hour is -3", "above 0"]),
        ({"instances": 1, "instance": "trn1.32xlarge", "rank": 3}, ["does not take rank"]),
        ({"instances": 1}, ["needs an instance"]),
        ({}, ["world_size", "instances"]),
    ],
)
def test_what_a_search_refuses(folder, options, words):
    from neuron_accel_plan import plan

    with pytest.raises(ConfigurationError) as caught:
        plan(folder, global_batch=4, sequence=64, **options)
    for word in words:
        assert word in str(caught.value)


def test_the_command_searches_or_counts(folder, capsys):
    assert command(folder, "--zero-1", "--tensor-parallel-size", "2") == 2
    error = capsys.readouterr().err
    assert "--zero-1" in error
    assert "--tensor-parallel-size" in error
    assert main(["plan", "--model", str(folder), "--global-batch", "4", "--sequence", "64"]) == 2
    assert "--instances" in capsys.readouterr().err

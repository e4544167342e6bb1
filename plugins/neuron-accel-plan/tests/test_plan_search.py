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
    return main([*known, "--instances", "1", "--instance", "trn1.2xlarge", "--within", "0", *words])


@pytest.mark.timeout(120)
def test_a_search_with_a_limit_of_time_says_what_is_left(folder, capsys, monkeypatch):
    """It ends with the first layout that fits, here not the fastest, and bounds what was not counted."""
    from neuron_accel_plan import candidates

    from neuron_accel import Instance

    offering = [cls for cls in candidates.offering() if cls.spec.name in ("tensor_parallel", "zero1")]
    monkeypatch.setattr(candidates, "offering", lambda: offering)
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: 8 << 20)
    assert command(folder, "--best", "3", "--jobs", "1", "--within", "0.001", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 1
    least = [left["seconds_at_least"] for left in found["left"]]
    assert least == sorted(least)
    assert len(least) > 1
    assert least[0] > 0
    assert command(folder, "--best", "3", "--jobs", "1", "--within", "0.001") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(least)} layouts are left, since the time of the search was over (--within), at most" in printed
    assert command(folder, "--best", "3", "--jobs", "1", "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["layouts"]) == 3
    assert not whole["left"]
    assert min(least) <= whole["layouts"][0]["seconds"]["likely"] <= found["layouts"][0]["seconds"]["likely"]
    assert command(folder, "--within", "-1") == 2


@pytest.mark.parametrize(
    ("least", "said"),
    [
        ((1.6, 3.0), "2 layouts are left, since the time of the search was over (--within), at most 25.0% faster"),
        ((2.0,), "1 layout is left, since the time of the search was over (--within), and not faster than the first"),
        ((0.0, 1.0), "2 layouts are left, since the time of the search was over (--within): nothing is known of their"),
        ((), "the 1 fastest that fit; 0 are slower"),
    ],
)
def test_what_is_left_is_said_in_a_sentence(folder, least, said):
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.plan_text import describe_search
    from neuron_accel_plan.search import Layout, Left, Ranked, Search

    layout = Layout(plugins=(), accumulation=1)
    count = Planner(folder, world_size=2, global_batch=2, sequence=64, instance="trn1.2xlarge").count([], quick=True)
    first = Ranked(layout=layout, count=count, time=replace(count.predict(), seconds=2.0))
    left = tuple(Left(layout=layout, seconds=seconds) for seconds in least)
    names = {"model": "Llama", "parameters": 1, "instance": "trn1.2xlarge", "instances": 1, "tokens": 128}
    text = describe_search(Search(**names, best=(first,), ruled_out=(), left=left), why=True)
    assert said in " ".join(text.split())
    assert ("\nleft\n" in text) == bool(least)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_search_ranks_what_fits_and_writes_a_configuration_that_loads(folder, tmp_path, capsys, monkeypatch):
    from neuron_accel import Instance
    from neuron_accel.commands import load_config

    # Few layouts to run: a core that holds what is sharded, and not the whole state.
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: 3 << 20)
    path = tmp_path / "train.yaml"
    page = tmp_path / "page.html"
    words = ["--best", "2", "--jobs", "1", "--price-per-hour", "1.5", "--write", str(path), "--html", str(page)]
    assert command(folder, *words, "--json") == 0
    assert "by published runs" in page.read_text()
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
    from neuron_accel_plan import dry_runs
    from neuron_accel_plan.layout import Planner

    from neuron_accel import TensorParallelPlugin

    monkeypatch.setattr(dry_runs, "_WORTHWHILE", 0.0)
    arguments = {"model": folder, "world_size": 2, "global_batch": 4, "sequence": 64, "instance": "trn1.2xlarge"}
    tensor = TensorParallelPlugin(tensor_parallel_size=2)
    tasks = {
        "sample": dry_runs.Sample((tensor,), 2),
        "layout": dry_runs.Layout(plugins=(tensor,), accumulation=2),
        "impossible": dry_runs.Layout(plugins=(TensorParallelPlugin(tensor_parallel_size=64),), accumulation=1),
    }
    planner = Planner(**arguments)
    alone, two = (dry_runs.DryRuns(planner, arguments, None, jobs) for jobs in (1, 2))

    def answers(runs):
        following = iter(tasks.items())
        return runs.answers(lambda: next(following, None), 3)

    expected = dict(answers(alone))
    try:
        found = dict(answers(two))
        assert {*found} == {*tasks}
        assert repr([found[name] for name in tasks]) == repr([expected[name] for name in tasks])
        assert "64" in found["impossible"].reason
        for process in two._processes.values():
            process.kill()
            process.join()
        with pytest.raises(UsageError, match="--jobs 1"):
            list(answers(two))
    finally:
        two.close()
    assert not two._processes


def test_who_waits_for_other_processes_is_told_that_the_time_is_over():
    """A task that takes longer than the search may does not delay its end."""
    import multiprocessing

    from neuron_accel_plan.dry_runs import DryRuns, Failed

    here, there = multiprocessing.Pipe()
    runs = DryRuns(None, {}, None, jobs=2)
    runs._processes = {here: None}
    tasks, time_left = iter([("slow", "a task")]), iter([0.01, None])
    answers = runs.answers(lambda: next(tasks, None), 1, lambda: next(time_left))
    assert next(answers) is None
    assert there.recv() == "a task"
    there.send(Failed("at last"))
    assert list(answers) == [("slow", Failed("at last"))]


@pytest.mark.parametrize("many", [1, 1000])
def test_processes_are_started_at_once_if_there_are_many_layouts(folder, monkeypatch, many):
    from neuron_accel_plan import dry_runs, search
    from neuron_accel_plan.layout import Planner

    from neuron_accel import find_instance

    class Runs(dry_runs.DryRuns):
        started = 0

        def start(self):
            self.started += 1
            return super().start()

    monkeypatch.setattr(search, "_MANY", many)
    arguments = {"model": folder, "world_size": 2, "global_batch": 2, "sequence": 64, "instance": "trn1.2xlarge"}
    planner = Planner(**arguments)
    runs = Runs(planner, arguments, None, 1)
    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), runs, None, lambda done, total: None)
    monkeypatch.setattr(searcher, "layouts", lambda: [search.Layout(plugins=(), accumulation=n) for n in (1, 2)])
    monkeypatch.setattr(dry_runs, "_WORTHWHILE", 1e9)
    assert searcher.run(1).found
    assert runs.started == (many == 1)


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError])
def test_an_error_of_our_own_is_not_taken_for_a_layout_that_cannot_run(folder, monkeypatch, kind):
    """As in :mod:`neuron_accel_plan.changes`; one of the model's code is a reason."""
    from neuron_accel_plan import dry_runs, layout
    from transformers import LlamaForCausalLM

    planner = layout.Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge")
    task = dry_runs.Layout(plugins=(), accumulation=1)

    def fail(*args, **kwargs):
        raise kind("a mistake")

    with monkeypatch.context() as patch:
        patch.setitem(fail.__globals__, "__name__", "somewhere_else")
        patch.setattr(LlamaForCausalLM, "forward", fail)
        assert dry_runs.answer(planner, None, task) == dry_runs.Failed("its dry run failed: a mistake")
    with monkeypatch.context() as patch:
        patch.setitem(fail.__globals__, "__name__", "neuron_accel_plan.step")
        patch.setattr(layout, "count_step", fail)
        for each in (task, dry_runs.Sample((), 1)):
            with pytest.raises(kind, match="a mistake"):
                dry_runs.answer(planner, None, each)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    pytest.importorskip("neuron_accel_expert_parallel")
    from transformers import Qwen3MoeConfig

    path = tmp_path_factory.mktemp("mixture")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 8}
    config = Qwen3MoeConfig(num_hidden_layers=8, vocab_size=256, max_position_embeddings=128, **SIZE, **experts)
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """A model whose blocks attend in a window and to all tokens in turn."""
    from transformers import Gemma2Config

    path = tmp_path_factory.mktemp("windows")
    size = {**SIZE, "num_hidden_layers": 8, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32}
    Gemma2Config(vocab_size=256, max_position_embeddings=128, **size).save_pretrained(path)
    return path


WORLDS = {
    "tensor": ("folder", {"tensor_parallel", "zero1"}, 4, 22 << 20),
    "windows": ("windows", {"tensor_parallel", "zero1"}, 4, 22 << 20),
    "recomputed": ("folder", {"activation_checkpointing", "chunked_loss"}, 2, 8 << 20),
    "pipeline": ("folder", {"pipeline_parallel", "fully_sharded"}, 2, 22 << 20),
    "experts": ("mixture", {"expert_parallel", "activation_checkpointing", "zero1"}, 4, 30 << 20),
}
"""The model, plugins that offer layouts, samples in a step, and bytes of a core, which some layouts exceed."""


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.timeout(180)
def test_a_search_finds_what_counting_all_layouts_finds(request, monkeypatch, world):
    """Every layout is counted and predicted: those that fit, in order, are what the search finds, and nothing is
    faster than its bound."""
    from neuron_accel_plan import candidates, dry_runs, search
    from neuron_accel_plan.layout import Planner

    from neuron_accel import Instance, find_instance

    model, names, batch, core = WORLDS[world]
    offering = [cls for cls in candidates.offering() if cls.spec.name in names]
    monkeypatch.setattr(candidates, "offering", lambda: offering)
    monkeypatch.setattr(Instance, "core_bytes", lambda self, lnc=None: core)
    arguments = {
        "model": request.getfixturevalue(model),
        "world_size": 2,
        "global_batch": batch,
        "sequence": 128,
        "instance": "trn1.2xlarge",
    }
    planner = Planner(**arguments)
    runs = dry_runs.DryRuns(planner, arguments, None, 1)
    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), runs, None, lambda done, total: None)
    queue = searcher.run(3)
    found, slower, ruled_out = queue.found, queue.slower(), queue.ruled_out
    assert not queue.left()
    every = {str(each): dry_runs.answer(planner, None, each) for each in searcher.layouts()}
    fitting = {name: ranked for name, ranked in every.items() if isinstance(ranked, search.Ranked)}
    assert len(fitting) > 3
    fastest = sorted(fitting, key=lambda name: search.rank(fitting[name]))[:3]
    assert [str(ranked.layout) for ranked in found] == fastest
    assert [ranked.time for ranked in found] == [fitting[name].time for name in fastest]
    assert {str(each.layout) for each in (*found, *slower)} >= {*fitting}
    assert {str(each.layout) for each in ruled_out} <= {*every} - {*fitting}
    for each in slower:  # a bound, and one that is close: else it would save no count
        if str(each.layout) in fitting:
            assert 0.6 < each.seconds / fitting[str(each.layout)].time.seconds <= 1 + 1e-9, each


@pytest.mark.parametrize("end", ["all known", "in time"])
def test_what_is_found_first_is_predicted_and_below_all_bounds(bounds, folder, end):
    """The first is slower than its bound, the third does not fit, and the last need not be counted. If the time is over
    after the first, it is what was found."""
    from neuron_accel_plan import search
    from neuron_accel_plan.bounds import Estimate
    from neuron_accel_plan.dry_runs import Failed
    from neuron_accel_plan.layout import Planner

    from neuron_accel import find_instance

    planner, asked = Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge"), []
    count = planner.count([])
    taken = {"1": 3.0, "2": 1.5, "4": None, "8": 2.5}

    class Answers:
        def answers(self, following, number, time_left):
            while (task := following()) is not None:
                name, layout = task
                asked.append(str(layout.accumulation))
                seconds = taken[asked[-1]]
                time = replace(count.predict(), seconds=seconds or 0.0)
                yield (
                    name,
                    search.Ranked(layout=layout, count=count, time=time) if seconds else Failed("does not fit"),
                )

    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), Answers(), None, lambda done, total: None)
    layouts = {each: search.Layout(plugins=(), accumulation=int(each)) for each in taken}
    estimates = [
        Estimate(layouts[each], 1, 0.0, seconds) for each, seconds in zip(taken, (1.0, 1.2, 1.3, 2.0), strict=True)
    ]
    queue = search._Queue(bounds, estimates, 1)
    deadline = search.Deadline() if end == "all known" else search.Deadline(seconds=1e-9)
    searcher._best_first(queue, deadline, lambda done, more: None)
    if end == "in time":
        assert asked == ["1"]
        assert [ranked.layout for ranked in queue.found] == [layouts["1"]]
        assert [(each.layout, each.seconds) for each in queue.left()] == [
            (layouts["2"], 1.2),
            (layouts["4"], 1.3),
            (layouts["8"], 2.0),
        ]
        assert not queue.slower()
        assert not queue.ruled_out
        return
    assert asked == ["1", "2", "4"]
    assert [ranked.layout for ranked in queue.found] == [layouts["2"]]
    assert [(each.layout, each.seconds, each.counted) for each in queue.slower()] == [
        (layouts["8"], 2.0, False),
        (layouts["1"], 3.0, True),
    ]
    assert [ruled.layout for ruled in queue.ruled_out] == [layouts["4"]]
    assert not queue.left()


def test_a_search_that_hurries_counts_first_what_is_likely_to_fit(bounds, folder, monkeypatch):
    """What may not fit, also by a guess, waits until one is found that does, or none is left that is likely to. No
    further sample of one that is likely to fit is run."""
    from neuron_accel_plan.bounds import Estimate
    from neuron_accel_plan.dry_runs import Failed, Sample
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout, Ranked, _Queue

    from neuron_accel import Zero1Plugin

    count = Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge").count([], quick=True)
    large, guessed, small, other = (
        Layout(plugins=p, accumulation=a) for p, a in (((), 1), ((), 2), ((Zero1Plugin(),), 1), ((Zero1Plugin(),), 2))
    )
    core = float(bounds._core)
    for fits, sample in ((True, None), (True, Sample((), 2)), (False, None)):
        estimates = [
            Estimate(large, 1, core, 1.0),
            Estimate(guessed, 1, 0.0, 1.1, Sample((), 4), guess=core),
            Estimate(small, 1, 0.5 * core, 1.2, sample),
            Estimate(other, 1, core, 1.3, sample),
        ]
        monkeypatch.setattr(bounds, "estimate", {each.layout: each for each in estimates}.get)
        queue = _Queue(bounds, estimates, 1)
        queue.hurry()
        assert queue.following() == (repr(small), small)
        assert not queue.end()
        time = replace(count.predict(), seconds=1.25)
        queue.take(repr(small), Ranked(layout=small, count=count, time=time) if fits else Failed("cannot run"))
        assert queue.following() == (repr(large), large)  # as long as there is time
        assert queue.end() == fits
        assert [ranked.layout for ranked in queue.found] == [small] * fits
        assert [each.layout for each in queue.left()] == [large, guessed] * fits
        assert [each.layout for each in queue.slower()] == ([other] if fits else [large, guessed, other])


def test_layouts_that_tell_of_each_other_are_counted_one_after_the_other(bounds, folder):
    """Others are counted beside them, and what is slower by its bound is not waited for."""
    from neuron_accel_plan.bounds import Estimate
    from neuron_accel_plan.dry_runs import Failed
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout, Ranked, _Queue

    from neuron_accel import ActivationCheckpointingPlugin, TensorParallelPlugin

    count = Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge").count([], quick=True)
    whole, recomputed = (Layout(plugins=p, accumulation=1) for p in ((), (ActivationCheckpointingPlugin(),)))
    tensor = Layout(plugins=(TensorParallelPlugin(tensor_parallel_size=2),), accumulation=1)
    estimates = zip((whole, recomputed, tensor), (1.0, 1.1, 1.2), strict=True)
    queue = _Queue(bounds, [Estimate(layout, 1, 0.0, seconds) for layout, seconds in estimates], 1)
    assert [queue.following() for _ in range(3)] == [(repr(whole), whole), (repr(tensor), tensor), None]
    queue.take(repr(whole), Failed("does not fit"))
    assert queue.following() == (repr(recomputed), recomputed)
    queue.take(repr(recomputed), Ranked(layout=recomputed, count=count, time=replace(count.predict(), seconds=1.15)))
    assert [ranked.layout for ranked in queue.found] == [recomputed]
    assert queue.following() is None
    assert [(each.layout, each.counted) for each in queue.slower()] == [(tensor, False)]
    assert [ruled.layout for ruled in queue.ruled_out] == [whole]


def test_of_equal_times_the_fewest_micro_batches_are_first(bounds, folder):
    """Whichever bound is lower: what is equal but for rounding is equal."""
    from neuron_accel_plan import search
    from neuron_accel_plan.bounds import Estimate
    from neuron_accel_plan.layout import Planner

    from neuron_accel import find_instance

    planner = Planner(folder, world_size=2, global_batch=4, sequence=64, instance="trn1.2xlarge")
    count = planner.count([], quick=True)
    seconds = {4: 2.0, 2: 2.0 * (1 + 1e-13), 1: 2.0 * (1 - 1e-13)}

    class Answers:
        def answers(self, following, number, time_left):
            while (task := following()) is not None:
                name, layout = task
                time = replace(count.predict(), seconds=seconds[layout.accumulation])
                counted = replace(count, accumulation=layout.accumulation)
                yield name, search.Ranked(layout=layout, count=counted, time=time)

    searcher = search._Searcher(planner, find_instance("trn1.2xlarge"), Answers(), None, lambda done, total: None)
    layouts = [search.Layout(plugins=(), accumulation=number) for number in seconds]
    least = [1.0, 2.0, seconds[1] * (1 + 1e-12)]
    estimates = [
        Estimate(layout, layout.accumulation, 0.0, bound) for layout, bound in zip(layouts, least, strict=True)
    ]
    queue = search._Queue(bounds, estimates, 3)
    searcher._best_first(queue, search.Deadline(), lambda done, more: None)
    assert [ranked.layout.accumulation for ranked in queue.found] == [1, 2, 4]


@pytest.fixture
def bounds(folder):
    """Of layouts of a small model on 8 ranks, of which nothing was run."""
    from neuron_accel_plan.bounds import Bounds
    from neuron_accel_plan.layout import Planner

    from neuron_accel import find_instance

    planner = Planner(folder, world_size=8, global_batch=64, sequence=64, instance="trn1.32xlarge")
    return Bounds(planner, find_instance("trn1.32xlarge"), None)


def test_the_memory_of_what_recomputes_is_guessed_by_what_that_saved_elsewhere(bounds):
    from neuron_accel_plan.dry_runs import Sample
    from neuron_accel_plan.search import Layout

    from neuron_accel import ActivationCheckpointingPlugin, TensorParallelPlugin, Zero1Plugin

    blocks, tensor = ActivationCheckpointingPlugin(), TensorParallelPlugin(tensor_parallel_size=2)
    elsewhere = Layout(plugins=(blocks, Zero1Plugin()), accumulation=2)
    layout = Layout(plugins=(tensor, blocks, Zero1Plugin()), accumulation=4)

    def learn(*samples: Sample) -> None:
        for sample in samples:
            bounds.learn(sample, bounds._planner.shallow(sample.family, sample.rows))

    learn(bounds.first_sample(layout))
    assert (bounds.estimate(layout).guess, bounds.estimate(layout).memory) == (0.0, 0.0)
    learn(bounds.first_sample(elsewhere), Sample((blocks,), 1))
    guess = bounds.estimate(layout).guess
    learn(Sample((tensor, blocks), 1))
    found = bounds.estimate(layout)
    assert found.guess == 0.0
    assert 0.8 * found.memory < guess < 1.2 * found.memory


def test_what_recomputes_is_not_faster_than_what_does_not(bounds):
    from neuron_accel_plan.search import Layout

    from neuron_accel import ActivationCheckpointingPlugin, ChunkedLossPlugin, Zero1Plugin

    blocks, loss, zero1 = ActivationCheckpointingPlugin(), ChunkedLossPlugin(), Zero1Plugin()
    plain, more = Layout(plugins=(zero1,), accumulation=2), Layout(plugins=(loss, zero1), accumulation=2)
    most = Layout(plugins=(blocks, loss, zero1), accumulation=2)
    assert bounds.by_layouts(more) == (None, 0.0)
    bounds.learn_layout(plain, 2.0)
    assert bounds.by_layouts(plain) == (None, 0.0)
    assert bounds.by_layouts(replace(more, accumulation=4)) == (None, 0.0)
    for each in (more, most):
        reason, seconds = bounds.by_layouts(each)
        assert reason is None
        assert 2.0 < seconds < 2.0 * (1 + 1e-6)
    bounds.learn_layout(more, 3.0)
    assert bounds.by_layouts(most)[1] > 3.0
    bounds.learn_impossible(plain)  # tells nothing of the time of the others
    assert bounds.by_layouts(more) == (None, 0.0)
    assert bounds.by_layouts(most)[1] > 3.0


@pytest.mark.parametrize(
    ("ranks", "accumulation", "fits"),
    [
        (
            2,
            2,
            {"zero1", "none", "all, accumulation 1", "all, accumulation 4"},
        ),  # 16 bytes over 2 are those of 4 weights
        (8, 2, {"all, accumulation 1", "all, accumulation 4"}),
        (8, 1, {"all, accumulation 2", "all, accumulation 4"}),
        (8, 4, {"all, accumulation 1"}),
    ],
)
def test_what_shards_less_or_has_larger_micro_batches_needs_no_less_memory(bounds, ranks, accumulation, fits):
    """Of what is alike otherwise, where the state is sharded over enough ranks; gradients that wait for another
    micro-batch are needed only if there is one."""
    from neuron_accel_plan.dry_runs import Failed
    from neuron_accel_plan.search import Layout

    from neuron_accel import FullyShardedPlugin, TensorParallelPlugin, Zero1Plugin

    tensor = (TensorParallelPlugin(tensor_parallel_size=8 // ranks),) if ranks < 8 else ()
    every = Layout(plugins=(*tensor, FullyShardedPlugin()), accumulation=accumulation)
    others = {
        f"all, accumulation {number}": replace(every, accumulation=number) for number in {1, 2, 4} - {accumulation}
    }
    others["zero1"] = replace(every, plugins=(*tensor, Zero1Plugin()))
    others["none"] = replace(every, plugins=tensor)
    bounds.learn_impossible(every, Failed("an error"))
    assert all(bounds.by_layouts(each) == (None, 0.0) for each in others.values())
    bounds.learn_impossible(every, Failed("24 GiB", memory=24 << 30))
    reasons = {name: bounds.by_layouts(each)[0] for name, each in others.items()}
    assert {name for name, reason in reasons.items() if reason is None} == fits
    assert all(reason is None or (str(every) in reason and "24 GiB" in reason) for reason in reasons.values())


@pytest.mark.parametrize("stages", [4, 8])
def test_a_stage_with_half_finished_micro_batches_is_not_estimated_too_large(stages):
    """They keep neither logits nor what was recomputed: the last of eight stages was estimated to need 1.5 times what
    it needs, and the fourth of the fastest layouts was ruled out."""
    from neuron_accel_plan.bounds import Bounds
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout
    from transformers import LlamaConfig

    from neuron_accel import ActivationCheckpointingPlugin, PipelineParallelPlugin, find_instance

    wide = {**SIZE, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    llama = LlamaConfig(num_hidden_layers=8, vocab_size=4096, max_position_embeddings=512, **wide)
    planner = Planner(llama, world_size=8, global_batch=32, sequence=512, instance="trn1.32xlarge")
    pipeline = PipelineParallelPlugin(
        pipeline_parallel_size=stages, num_microbatches=4 * stages, schedule="zero-bubble"
    )
    layout = Layout(plugins=(pipeline, ActivationCheckpointingPlugin()), accumulation=1)
    bounds = Bounds(planner, find_instance("trn1.32xlarge"), None)
    sample = bounds.first_sample(layout)
    while sample is not None and sample.micro_batches == 1:
        bounds.learn(sample, planner.shallow(sample.family, sample.rows))
        sample = bounds.estimate(layout).sample
    counted = planner.count(layout.plugins).step.peak.total
    assert 0.4 * counted < bounds.estimate(layout).memory < 1.05 * counted


def test_what_was_counted_corrects_estimates_of_layouts_that_are_alike(bounds):
    """From two of them on, by the least that was found, which only makes estimates larger."""
    from neuron_accel_plan.bounds import Estimate
    from neuron_accel_plan.dry_runs import Sample
    from neuron_accel_plan.search import Layout

    from neuron_accel import FullyShardedPlugin, Zero1Plugin

    layouts = [Layout(plugins=(FullyShardedPlugin(),), accumulation=number) for number in (1, 2, 4, 8)]
    core = bounds._core
    last = Estimate(layouts[3], 8, core * 0.9, 1.0)
    for layout, factor in zip(layouts, (1.5, 1.3), strict=False):
        assert bounds.too_large(last.layout, last.memory) is None
        bounds.learn_memory(Estimate(layout, 1, 1000.0, 1.0), round(1000 * factor))
    assert "GiB, estimated" in bounds.too_large(last.layout, last.memory)  # 0.9 * 1.3 is more than 1.1
    assert not bounds.is_likely(last)
    other = Layout(plugins=(Zero1Plugin(),), accumulation=8)
    assert bounds.too_large(other, last.memory) is None
    assert bounds.is_likely(replace(last, layout=other))
    for layout in (replace(other, accumulation=number) for number in (1, 2)):  # estimated by one sample only
        bounds.learn_memory(Estimate(layout, 1, 1000.0, 1.0, Sample((), 2)), 1500)
    assert bounds.too_large(other, last.memory) is None
    assert not bounds.is_likely(replace(last, layout=other))
    for factor in (0, 0.5):  # one that cannot run, and one of another stage
        bounds.learn_memory(Estimate(layouts[2], 4, 1000.0, 1.0), round(1000 * factor))
    assert bounds.too_large(last.layout, last.memory) is None
    assert bounds.too_large(last.layout, 1.2 * core) is not None


@pytest.mark.parametrize("in_block", [True, False])
def test_a_chunked_loss_does_not_help_where_a_block_needs_too_much(bounds, in_block):
    from neuron_accel_plan.dry_runs import Failed
    from neuron_accel_plan.search import Layout

    from neuron_accel import ChunkedLossPlugin, FullyShardedPlugin, Zero1Plugin

    whole, loss = Layout(plugins=(FullyShardedPlugin(),), accumulation=2), ChunkedLossPlugin()
    bounds.learn_impossible(whole, Failed("24 GiB", memory=24 << 30, in_block=in_block))
    for others in ((FullyShardedPlugin(),), (Zero1Plugin(),), ()):  # those that shard less do not help either
        reason, _ = bounds.by_layouts(replace(whole, plugins=(loss, *others)))
        assert (reason is None) != in_block
        assert reason is None or (str(whole) in reason and "24 GiB" in reason)


@pytest.mark.parametrize(("package", "by"), [("context_parallel", 8), ("expert_parallel", 4)])
def test_state_is_sharded_over_all_ranks_that_average_gradients(package, by):
    """Along a sequence, too. That of experts, which are not averaged over the ranks that hold them between them, is
    sharded over the others: half of the state over 8 ranks, and half over 4 would be 5.3; all are experts here."""
    from neuron_accel_plan.bounds import Bounds
    from neuron_accel_plan.layout import Planner
    from neuron_accel_plan.search import Layout
    from transformers import MixtralConfig

    from neuron_accel import find_instance
    from neuron_accel.commands import load_config

    pytest.importorskip(f"neuron_accel_{package}")
    plugins = load_config({"plugins": [{package: {f"{package}_size": 2}}, "zero1"]}).plugins
    config = MixtralConfig(num_hidden_layers=4, vocab_size=256, num_local_experts=4, num_experts_per_tok=2, **SIZE)
    planner = Planner(config, world_size=8, global_batch=8, sequence=64, instance="trn1.32xlarge")
    bounds = Bounds(planner, find_instance("trn1.32xlarge"), None)
    whole = 2 * planner.parameters
    weights = whole if package == "context_parallel" else whole / 2
    assert bounds._sharding(Layout(plugins=tuple(plugins), accumulation=1), weights) == pytest.approx(by)


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

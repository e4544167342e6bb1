"""How long a training of so many tokens takes, what it costs, and how many instances it needs."""

from __future__ import annotations

import json

import pytest
from neuron_accel_plan import plan_command
from neuron_accel_plan.time import StepTime
from neuron_accel_plan.totals import Limits, long, parse_hours, parse_tokens

from neuron_accel.commands import main
from neuron_accel.errors import ConfigurationError

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(num_hidden_layers=4, vocab_size=256, max_position_embeddings=128, **SIZE).save_pretrained(path)
    return path


def test_hours_and_price_of_a_training():
    limits = Limits(tokens=1e9, hours=24, budget=1000, price_per_hour=20)
    total = limits.total(StepTime(seconds=3.6, low=1.8, high=7.2, parts={}, sources={}), 100_000, 2)
    assert (total.hours, total.low, total.high) == pytest.approx((10, 5, 20))
    assert (total.instance_hours, total.price) == pytest.approx((20, 400))
    assert str(total) == "1 B tokens in 10 h (5 h to 20 h), 20 instance-hours, 400 USD"
    assert total.verdict() == "ends within 24 h, costs less than 1,000 USD"
    late = Limits(tokens=1e10, hours=24, budget=1000, price_per_hour=20)
    total = late.total(StepTime(seconds=3.6, low=1.8, high=7.2, parts={}, sources={}), 100_000, 2)
    assert total.verdict() == "does NOT end within 24 h, costs MORE than 1,000 USD"
    assert (total.in_time, total.in_budget) == (False, False)


def test_numbers_have_units():
    assert [parse_tokens(text) for text in ("2T", "1.5B", "100G", "7")] == [2e12, 1.5e9, 1e11, 7.0]
    assert [parse_hours(text) for text in ("90m", "12h", "3d", "2w")] == [1.5, 12, 72, 336]
    assert [long(hours) for hours in (0.5, 10, 72, 30_000)] == ["30 min", "10 h", "3 d", "1,250 d"]
    for wrong in ("2 trillion", "-1B", "0", "T"):
        with pytest.raises(ConfigurationError, match="--tokens"):
            parse_tokens(wrong)
    for wrong in ("3", "-1d", "0h"):
        with pytest.raises(ConfigurationError, match="--finish-in"):
            parse_hours(wrong)


def test_the_command_answers_how_long_and_how_much(folder, capsys):
    words = ["plan", "--model", str(folder), "--global-batch", "64", "--sequence", "64", "--world-size", "64"]
    asked = ["--instance", "trn1.32xlarge", "--tokens", "100B", "--price-per-hour", "21.5"]
    assert main([*words, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hours = 100e9 / 4096 * found["time"]["seconds"] / 3600
    assert found["training"]["hours"]["likely"] == pytest.approx(hours)
    assert found["training"]["price"] == pytest.approx(hours * 2 * 21.5)
    assert main([*words, *asked, "--finish-in", "1m", "--budget", "1e9"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "fits: 0% of the 16.00 GiB of a core of trn1.32xlarge; does NOT end within 1 min, costs less"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--finish-in", "3d"], ["--finish-in needs --tokens"]),
        (["--tokens", "2T", "--instance", "trn1.32xlarge", "--budget", "1"], ["--budget needs --price-per-hour"]),
        (["--tokens", "2T"], ["--tokens needs --instance"]),
        (["--tokens", "2T", "--instance", "trn1.32xlarge"], ["number of ranks", "--finish-in"]),
    ],
)
def test_questions_that_miss_something(folder, options, words, capsys):
    assert main(["plan", "--model", str(folder), "--global-batch", "64", "--sequence", "64", *options]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("limits", "tried", "chosen"),
    [
        (["--finish-in", "31h"], [1, 2, 4], 4),
        (["--budget", "130", "--price-per-hour", "1"], [1, 2, 4, 8], 4),
        (["--finish-in", "31h", "--budget", "115", "--price-per-hour", "1"], [1, 2, 4], None),
        (["--finish-in", "1m"], [1, 2, 4, 8], None),
    ],
)
def test_how_many_instances_are_needed(limits, tried, chosen, monkeypatch, capsys):
    """Of a model that takes 100 hours on one instance, and 5 hours more on each, which has samples for 16."""

    class Found:
        def __init__(self, instances):
            class Best:
                time = StepTime(seconds=100 / instances + 5, low=1.0, high=200.0, parts={}, sources={})
                layout = "zero1"
                count = type("Count", (), {"mesh": "dp", "step": type("S", (), {"peak": type("P", (), {"total": 1})})})

            self.instances, self.tokens = instances, 1000
            self.best = [Best] if instances <= 8 else []

        def to_dict(self):
            return {"instances": self.instances}

    monkeypatch.setattr(plan_command, "_searched", lambda args, instances, best: Found(instances))
    words = "plan --model llama-3.1-8b --global-batch 64 --sequence 64 --instance trn1.32xlarge --tokens 3.6M"
    code = main([*words.split(), *limits, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["instances"] for each in found["tried"]] == tried
    assert (found["chosen"] or {}).get("instances") == chosen
    assert code == (0 if chosen else 1)
    main([*words.split(), *limits])
    last = capsys.readouterr().out
    assert (f"{chosen} x trn1.32xlarge with zero1: 3.6 M tokens in" if chosen else "no number of instances") in last

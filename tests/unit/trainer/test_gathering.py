"""Trainers that gather samples by functions of Accelerate are refused where ranks have the same samples."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import accelerate.utils
import pytest
from accelerate.utils import gather, gather_object

from neuron_accel.errors import UsageError
from neuron_accel.trainer.gathering import check_gathering


def logged(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


class Rewards:
    accelerator = args = None

    def advantages(self, rewards):
        return gather(rewards)[self.accelerator.process_index]


class Prompts:
    accelerator = args = None

    @logged
    def prompts(self, mine):
        return gather_object(mine)[self.accelerator.process_index]


class Derived(Prompts):
    pass


class Builder:
    """What SDPO has beside its trainer."""

    def __init__(self, trainer):
        self.trainer = trainer

    def rows(self, mine):
        return gather_object(mine)[self.trainer.accelerator.process_index]


class Builds:
    def __init__(self):
        self.builder = Builder(self)


def take_mine(accelerator, rows):
    return gather(rows)[accelerator.process_index]


class Calls:
    accelerator = None

    def rows(self, mine):
        return take_mine(self.accelerator, mine)


class Imports:
    accelerator = None

    def rows(self, mine):
        from accelerate.utils import gather_object as all_of

        return all_of(mine)[self.accelerator.process_index]


class Names:
    accelerator = None

    def rows(self, mine):
        return accelerate.utils.gather(mine)[self.accelerator.process_index]


class OnlyLogs:
    accelerator = args = None

    def log(self, texts):
        return gather_object(texts)

    def rows(self, rewards):
        return self.accelerator.gather(rewards)[self.accelerator.process_index]

    def seed(self):
        return self.args.seed + self.args.process_index


def check(trainer, samples, processes, **args):
    check_gathering(trainer, SimpleNamespace(**args), SimpleNamespace(data_parallel_size=samples, world_size=processes))


@pytest.mark.parametrize("trainer", [Rewards, Prompts, Derived])
def test_rows_of_all_processes_are_no_rows_of_samples(trainer):
    assert accelerate.utils.gather is gather
    with pytest.raises(UsageError, match=f"{trainer.__name__} would train on samples of other ranks") as caught:
        check(trainer, 2, 4)
    assert f"{'Prompts' if trainer is Derived else trainer.__name__}." in str(caught.value)
    check(trainer, 4, 4)
    check(trainer, 1, 1)
    check(trainer, 1, 2)


@pytest.mark.parametrize(
    ("trainer", "method"),
    [(Builds, "Builder.rows"), (Calls, "take_mine"), (Imports, "Imports.rows"), (Names, "Names.rows")],
)
def test_what_a_trainer_uses_counts_too(trainer, method):
    with pytest.raises(UsageError, match=f"{trainer.__name__} would train on samples of other ranks") as caught:
        check(trainer, 2, 4)
    assert method in str(caught.value)


def test_one_group_with_the_same_samples_counts_them_once():
    check(Rewards, 1, 2, scale_rewards="group", normalize_advantages=False)
    aggregation = {"multi_objective_aggregation": "normalize_then_sum"}
    for given in ({"scale_rewards": "batch"}, {"normalize_advantages": True}, aggregation):
        with pytest.raises(UsageError, match="would count each sample 2 times"):
            check(Rewards, 1, 2, **given)
        check(OnlyLogs, 1, 2, **given)


def test_a_trainer_that_only_logs_what_it_gathers():
    check(OnlyLogs, 2, 4)

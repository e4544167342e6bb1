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


def test_one_group_with_the_same_samples_counts_them_once():
    check(Rewards, 1, 2, scale_rewards="group", normalize_advantages=False)
    aggregation = {"multi_objective_aggregation": "normalize_then_sum"}
    for given in ({"scale_rewards": "batch"}, {"normalize_advantages": True}, aggregation):
        with pytest.raises(UsageError, match="would count each sample 2 times"):
            check(Rewards, 1, 2, **given)
        check(OnlyLogs, 1, 2, **given)


def test_a_trainer_that_only_logs_what_it_gathers():
    check(OnlyLogs, 2, 4)

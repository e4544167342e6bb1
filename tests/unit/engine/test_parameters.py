"""A map of parameters knows those that were replaced for as long as something else holds them, and keeps none alive."""

from __future__ import annotations

import copy
import pickle
import weakref

import torch
from torch import nn

from neuron_accel.engine.optim.state import rebind
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.engine.sharding.parameters import ParameterMap


def _sharded():
    """A model whose first weight was sharded in two, with its map and the optimizer made before."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = ParameterMap(model)
    weight = model[0].weight
    layout = Layout(shape=(4, 4), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=2, size=4),))
    model[0].weight = nn.Parameter(layout.shard(weight.detach(), {"tp": 1}).clone())
    parameters.set_layout("0.weight", layout)
    parameters.follow(model)
    return model, optimizer, parameters


def test_a_replaced_parameter_is_known_until_its_optimizer_is_rebound():
    model, optimizer, parameters = _sharded()
    replaced = weakref.ref(optimizer.param_groups[0]["params"][0])
    assert parameters.find(replaced()) is parameters.find(model[0].weight) is parameters["0.weight"]
    rebind(optimizer, [parameters], {"tp": 1})
    assert [p.shape[0] for p in optimizer.param_groups[0]["params"]] == [2, 4]
    assert replaced() is None


def test_what_moved_to_another_rank_takes_no_memory_in_an_optimizer():
    model, optimizer, parameters = _sharded()
    del model[0]
    parameters.follow(nn.ModuleDict({"1": model[0]}), absent=["0.weight"])
    assert [p.numel() for p in optimizer.param_groups[0]["params"]] == [0, 16]
    rebind(optimizer, [parameters], {"tp": 1})
    assert [p.numel() for p in optimizer.param_groups[0]["params"]] == [16]


def test_a_copy_knows_the_current_parameters():
    _, _, parameters = _sharded()
    for other in (copy.deepcopy(parameters), pickle.loads(pickle.dumps(parameters))):
        assert [record.fqn for record in other] == ["0.weight", "1.weight"]
        for record in other:
            assert other.find(record.current) is record
            assert parameters.find(record.current) is None


def test_the_records_of_another_model_of_the_same_class_are_others():
    (*_, first), (*_, second) = _sharded(), _sharded()
    assert first["0.weight"] not in list(second)  # comparing their tensors would raise an error
    assert first["0.weight"] in list(first)

"""Models built without memory and materialized in one process have the weights, buffers and tied parameters that they
have without lazy loading."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from neuron_accel import lazy_load_for_parallelism, materialize
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import CheckpointError, UsageError
from neuron_accel.lazy import Origin
from neuron_accel.lazy.filling import flat_boxes
from neuron_accel.lazy.mapped import Mappings, Reader
from tests.sweeps.tiny import tiny_config


def _tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _check_same(actual, expected) -> None:
    mine, theirs = _tensors(actual), _tensors(expected)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name
        assert mine[name].requires_grad == value.requires_grad, name
    for tensors in (mine, theirs):
        names = list(tensors)
        tensors["ties"] = [(a, b) for a, b in itertools.combinations(names, 2) if tensors[a] is tensors[b]]
    assert mine["ties"] == theirs["ties"]
    assert actual.training == expected.training


# Normal and uniform initialisation; ties; fused experts; truncated normal; orthogonal; tables; a real buffer.
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "modernbert-decoder", "rwkv", "bloom", "apertus"])
def test_a_model_from_its_configuration_has_the_weights_it_would_have(family):
    torch.manual_seed(3)
    expected = AutoModelForCausalLM.from_config(tiny_config(family))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert torch.equal(torch.get_rng_state(), before)
    large = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    assert {parameter.device.type for parameter in large} == {"meta"}
    materialize(model)
    assert torch.equal(torch.get_rng_state(), before)
    _check_same(model, expected)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "modernbert-decoder", "phimoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_model_has_the_weights_it_would_have(family, dtype, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path, max_shard_size="50KB")
    expected, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    with lazy_load_for_parallelism():
        model, lazily = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert {tensor.device.type for tensor in _tensors(model).values()} == {"meta"}
    assert lazily == report
    filled = materialize(model)
    assert filled.straight >= len(list(model.parameters())) - 1  # of one a bias is padded
    _check_same(model, expected)


def test_what_a_folder_lacks_is_initialised_and_what_is_too_much_reported(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    torch.manual_seed(4)
    expected, report = LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert report["missing_keys"]
    assert report["unexpected_keys"]
    torch.manual_seed(4)
    with lazy_load_for_parallelism():
        model, lazily = LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert lazily == report
    materialize(model)
    _check_same(model, expected)


def test_pickled_weights_are_not_read_into_memory_in_full(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert materialize(model).bytes_read == sum(p.numel() * 4 for p in model.parameters())
    _check_same(model, expected)


@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_are_both_in_a_folder_are_tied_if_equal(tmp_path, equal):
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    model.save_pretrained(tmp_path)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    weights["lm_head.weight"] += 0 if equal else 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (expected.lm_head.weight is expected.transformer.wte.weight) is equal
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    materialize(model)
    _check_same(model, expected)


def test_tokens_can_be_added_inside(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected.resize_token_embeddings(120, mean_resizing=False)
    torch.manual_seed(5)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.resize_token_embeddings(120, mean_resizing=False)
    materialize(model)
    _check_same(model, expected)


def test_a_model_may_be_cast_afterwards(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    materialize(model.to(torch.bfloat16))
    for name, value in expected.to(torch.bfloat16).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


class _Own(nn.Module):
    """Has a tensor that is no buffer, draws random numbers between parameters, and modifies a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.table = torch.arange(4.0).exp() * torch.rand(4)
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.second = nn.Linear(5, 2, bias=False)
        with torch.no_grad():
            self.first.weight[2].fill_(7.0)
            self.second.weight.mul_(2.0)


def test_user_defined_modules():
    torch.manual_seed(6)
    expected = _Own()
    torch.manual_seed(6)
    with lazy_load_for_parallelism():
        model = _Own()
    assert {t.device.type for t in (model.table, model.noise, model.first.weight)} == {"meta"}
    materialize(model)
    _check_same(model, expected)
    assert torch.equal(model.table, expected.table)


def test_a_seed_that_is_set_inside_counts():
    with lazy_load_for_parallelism():
        torch.manual_seed(8)
        model = nn.Linear(3, 3)
        torch.manual_seed(9)
        other = nn.Linear(3, 3)
    materialize(other), materialize(model)
    for seed, lazily in ((8, model), (9, other)):
        torch.manual_seed(seed)
        assert torch.equal(lazily.weight, nn.Linear(3, 3).weight)


def test_a_rank_draws_what_all_draw_and_keeps_its_own():
    torch.manual_seed(10)
    expected = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8))
    for rank in range(2):
        torch.manual_seed(10)
        with lazy_load_for_parallelism():
            model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8))
        origin, parameters = Origin.of(model), ParameterMap(model)
        full = parameters["1.weight"].layout
        layout = Layout(shape=full.shape, dtype=full.dtype, cuts=(Cut(dim=0, axis="tp", degree=2, size=8),))
        parameters.set_layout("1.weight", layout)
        model[1].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
        model[0] = nn.Identity()
        parameters.follow(model, absent=["0.weight", "0.bias"])
        origin.fill(model, parameters, {"tp": rank})
        assert torch.equal(model[1].weight, expected[1].weight[4 * rank : 4 * rank + 4])


# ---- what cannot be done ---------------------------------------------------------------------------------------------
def test_a_file_that_was_replaced_is_noticed(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "old")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "old").read_bytes())
    with pytest.raises(CheckpointError, match="another file"):
        materialize(model)


def test_a_truncated_file_is_noticed(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 30_000)
    with pytest.raises(CheckpointError, match="ends too early"):
        materialize(model)


def test_models_that_cannot_be_materialized_are_refused():
    with lazy_load_for_parallelism():
        model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.empty(3, 4, device="meta"))
    with pytest.raises(UsageError, match="'weight' has no memory"):
        materialize(model)
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="has memory"), lazy_load_for_parallelism():
        model.weight.data.copy_(torch.randn(3, 3))


# ---- boxes of files --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [8, 4096], ids=["narrow", "wide"])
def test_only_a_slice_is_copied(tmp_path, width):
    shape = (3, 5, 7, width)
    value = torch.randn(shape).to(torch.bfloat16)
    save_file({"other": torch.ones(3), "value": value}, tmp_path / "f.safetensors")
    with safe_open(tmp_path / "f.safetensors", "pt", backend="mmap") as file:
        source = Mappings().find(file.get_slice("value")[...])
    assert Mappings().find(value) is None
    generator = torch.Generator().manual_seed(0)
    with Reader() as reader:
        for _ in range(40):
            bounds = [torch.randint(0, size + 1, (2,), generator=generator).sort().values.tolist() for size in shape]
            expected = value[tuple(slice(*b) for b in bounds)]
            for dtype in (torch.bfloat16, torch.float32):
                out = torch.empty(expected.shape, dtype=dtype)
                before = reader.bytes_read
                reader.read(source, tuple(map(tuple, bounds)), out)
                assert torch.equal(out, expected.to(dtype))
                assert reader.bytes_read - before == 2 * expected.numel()
            turned = torch.empty(expected.permute(3, 1, 0, 2).shape, dtype=torch.bfloat16).permute(2, 1, 3, 0)
            reader.read(source, tuple(map(tuple, bounds)), turned)
            assert torch.equal(turned, expected)


@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "not aligned"])
def test_large_slices_are_read_in_parts(tmp_path, odd, monkeypatch):
    monkeypatch.setattr("neuron_accel.lazy.mapped._WINDOW", 3 << 10)
    monkeypatch.setattr("neuron_accel.lazy.mapped._BUFFER", 3 << 10)
    value = torch.arange(40 * 30 * 50, dtype=torch.int32).view(40, 30, 50)
    save_file({"value": value, "byte": torch.ones(8, dtype=torch.uint8)}, path := tmp_path / "f.safetensors")
    data = bytearray(path.read_bytes())
    if odd:  # another writer may leave tensors anywhere
        length = int.from_bytes(data[:8], "little") + 1
        data[:8] = length.to_bytes(8, "little")
        data[length + 7 : length + 7] = b" "
        path.write_bytes(data)
    with safe_open(path, "pt", backend="mmap") as file:
        source = Mappings().find(file.get_slice("value")[...])
    assert bool(source.offset % 4) == bool(odd)
    with Reader() as reader:
        for box in (((3, 37), (0, 30), (0, 50)), ((3, 37), (2, 29), (7, 41)), ((5, 6), (4, 30), (0, 50))):
            expected = value[tuple(slice(*bounds) for bounds in box)]
            for dtype in (torch.int32, torch.float64):
                out = torch.empty(expected.shape, dtype=dtype)
                reader.read(source, box, out)
                assert torch.equal(out, expected.to(dtype))


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    save_file({"value": torch.ones(64, 4096)}, path := tmp_path / "f.safetensors")
    with safe_open(path, "pt", backend="mmap") as file:
        source = Mappings().find(file.get_slice("value")[...])
    os.truncate(path, path.stat().st_size // 2)
    with Reader() as reader, pytest.raises(CheckpointError, match="ends too early"):
        reader.read(source, ((0, 64), (0, 2048)), torch.empty(64, 2048))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 1, 5), (2, 3, 4)], ids=str)
def test_ranges_of_a_flattened_tensor_are_boxes(shape):
    full = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(full.numel() + 1), 2):
        found, place = [], start
        boxes = list(flat_boxes(shape, start, stop))
        for box, begin in boxes:
            assert begin == place
            found += full[box or ...].flatten().tolist()
            place = start + len(found)
        assert found == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert list(flat_boxes(shape, 1, 1)) == []

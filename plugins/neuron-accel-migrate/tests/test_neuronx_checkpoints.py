"""Checkpoints of neuronx-distributed and optimum-neuron: folders as they write them give the original model.

The folders are made here, after the public sources of neuronx-distributed 0.18 and optimum-neuron 0.4.5, 0.0.28 and
0.0.21. None was written on Trainium.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import types
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from neuron_accel.errors import CheckpointError

HEADS, KEY_VALUE, HEAD, HIDDEN, INNER, TENSOR, STAGES = 8, 2, 4, 32, 24, 4, 2
MULTIPLIER = TENSOR // KEY_VALUE
ATTENTION = "model.layers.{}.self_attn"


@pytest.fixture(scope="module")
def config():
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=STAGES,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE,
        head_dim=HEAD,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


@pytest.fixture(scope="module")
def state(config):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def reference(monkeypatch):
    """The class torch_xla.utils.serialization.TensorReference, which a pickle names."""

    class TensorReference:
        def __init__(self, tid):
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = "torch_xla.utils.serialization", "TensorReference"
    names = ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].TensorReference = TensorReference
    return TensorReference


# ---- neuron-accel consolidate ----------------------------------------------------------------------------------------
def consolidate(
    folder: Path, output: Path, *, config: Path | None = None, verify: bool = True, replica: int = 0
) -> str:
    """Runs the command and returns what it prints.

    Raises:
        CheckpointError: if it refuses the checkpoint, with its message.
    """
    (script,) = metadata.entry_points(group="console_scripts", name="neuron-accel")
    options = [*(["--config", str(config)] if config else []), *([] if verify else ["--no-verify"])]
    words = ["consolidate", "-q", *options, "--replica", str(replica), str(folder), str(output)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = script.load()(words)
    if code:
        raise CheckpointError(err.getvalue())
    return out.getvalue()


# ---- What a rank writes ----------------------------------------------------------------------------------------------
def assignment(adjacent: bool) -> list[tuple[list[int], list[int]]]:
    """Returns for each rank its query heads and its key/value heads."""
    order = [h for h in range(KEY_VALUE) for _ in range(MULTIPLIER)] if adjacent else [*range(KEY_VALUE)] * MULTIPLIER
    group = HEADS // KEY_VALUE
    waiting = {head: [head * group + index for index in range(group)] for head in range(KEY_VALUE)}
    each, share = len(order) // TENSOR, group // MULTIPLIER
    ranks = []
    for rank in range(TENSOR):
        mine = order[rank * each : (rank + 1) * each]
        ranks.append(([waiting[head].pop(0) for head in mine for _ in range(share)], mine))
    return ranks


def rows(weight: torch.Tensor, heads: list[int]) -> torch.Tensor:
    return weight.reshape(-1, HEAD, *weight.shape[1:])[heads].reshape(-1, *weight.shape[1:])


def stage_of(name: str) -> int:
    if "layers." in name:
        return int(name.split(".")[2])
    return 0 if "embed" in name else STAGES - 1


def shards_of(state, stage, rank, *, fuse_qkv=False, fuse_gate_up=True, adjacent=False) -> dict[str, torch.Tensor]:
    """Returns what a rank of a stage has in memory."""
    queries, keys = assignment(adjacent)[rank]
    result = {}
    for name, weight in state.items():
        if stage_of(name) != stage:
            continue
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        if layer == "q_proj":
            k, v = (state[f"{module}.{each}_proj.weight"] for each in "kv")
            parts = {"q": rows(weight, queries), "k": rows(k, keys), "v": rows(v, keys)}
            if fuse_qkv:
                parts = {"qkv": torch.cat(list(parts.values()))}
            result |= {f"{module}.qkv_proj.weight_{part}": value for part, value in parts.items()}
        elif layer == "o_proj":
            result[name] = rows(weight.t().contiguous(), queries).t()  # as the converter leaves it: not contiguous
        elif layer == "gate_proj" and fuse_gate_up:
            both = [each.chunk(TENSOR)[rank] for each in (weight, state[f"{module}.up_proj.weight"])]
            result[f"{module}.gate_up_proj.weight"] = torch.cat(both)
        elif layer in ("embed_tokens", "lm_head", "gate_proj") or (layer == "up_proj" and not fuse_gate_up):
            result[name] = weight.chunk(TENSOR)[rank].clone()
        elif layer == "down_proj":
            result[name] = weight.chunk(TENSOR, dim=1)[rank].clone()
        elif layer not in ("k_proj", "v_proj", "up_proj"):
            result[name] = weight.clone()
    return result


def write(path: Path, tensors, reference=None, around=None) -> None:
    """Writes what torch.save or, with ``reference``, xser writes; ``around`` makes the contents of the file of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    around = around or (lambda held: held)
    if reference is None:
        torch.save(around(tensors), path)
        return
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    info = {}
    for number, tensor in enumerate(tensors.values()):
        torch.save(tensor, folder / f"tensor_{number}.pt")
        info[number] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
    torch.save(around({name: reference(number) for number, name in enumerate(tensors)}), path)
    torch.save(info, f"{path}.info.pt")


def write_nxd(folder: Path, state, reference=None, **options) -> Path:
    for stage in range(STAGES):
        for rank in range(TENSOR):
            path = folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            write(path, shards_of(state, stage, rank, **options), reference)
    return folder


def write_optimum(folder: Path, state, config, reference=None, *, fuse_qkv=False) -> Path:
    write_nxd(folder / "shards", state, reference, fuse_qkv=fuse_qkv)
    for stage in range(STAGES):
        parameters = {}
        for name in shards_of(state, stage, 0, fuse_qkv=fuse_qkv):
            sharded = "norm" not in name and not name.endswith("weight_qkv")  # a known flaw of the attributes of qkv
            dims = {"partition_dim": int("o_proj" in name or "down_proj" in name), "num_partitions": TENSOR}
            stride = {"partition_stride": 2 if "gate_up" in name else 1}
            parameters[name] = {"tensor_model_parallel": sharded, **(dims | stride if sharded else {})}
        fused = {
            "fused_linear_name": "gate_up_proj",
            "linear_names": ["gate_proj", "up_proj"],
            "bias": False,
            "fuse_axis": 0,
            "original_dims": [INNER, INNER],
            "tp_size": TENSOR,
            "peft_type": None,
        }
        heads = {
            "gqa_qkv_projection_name": "qkv_proj",
            "query_projection_name": "q_proj",
            "key_projection_name": "k_proj",
            "value_projection_name": "v_proj",
            "output_projection_name": "o_proj",
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_VALUE,
            "kv_size_multiplier": MULTIPLIER,
            "q_output_size_per_partition": HEADS * HEAD // TENSOR,
            "kv_output_size_per_partition": KEY_VALUE * MULTIPLIER * HEAD // TENSOR,
            "fuse_qkv": fuse_qkv,
            "bias": False,
            "tp_size": TENSOR,
            "peft_type": None,
        }
        specs = [
            {
                "module_fully_qualified_name": ATTENTION.format(stage),
                "specs": [["GQAQKVColumnParallelLinearSpec", heads]],
            },
            {"module_fully_qualified_name": f"model.layers.{stage}.mlp", "specs": [["FusedLinearsSpec", fused]]},
        ]
        metadata = {"parameters": parameters, "model_weight_transformation_specs": specs}
        (folder / "shards" / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(metadata, indent=4))
    config.save_pretrained(folder)
    (folder / "trn_config.json").write_text("{}")
    return folder


def older_metadata(state, stage) -> dict:
    """Returns the metadata of optimum-neuron 0.0.21 to 0.1, which lists the parameters of all stages."""
    known, originals = {}, {}
    for each in range(STAGES):
        for name in shards_of(state, each, 0, fuse_gate_up=False):
            dim = None if "norm" in name else int("o_proj" in name or "down_proj" in name)
            known[name] = {"kind": "tied" if dim is None else "sharded", "partition_dim": dim}
    for part in "qkv":
        originals[f"{ATTENTION.format(stage)}.{part}_proj.weight"] = f"{ATTENTION.format(stage)}.qkv_proj.weight_{part}"
    return {
        "sharded_metadata": known,
        "gqa_qkv_metadata": {
            "original_names_to_gqa_qkv_names": originals,
            "output_projections_names": {f"{ATTENTION.format(stage)}.o_proj.weight"},
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_VALUE,
            "kv_size_multiplier": MULTIPLIER,
        },
    }


def expect(state, output: Path) -> None:
    """Checks that a folder has exactly the tensors of the original model."""
    found = load_file(output / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# ---- Tests -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fuse_qkv", [False, True], ids=["qkv", "fused-qkv"])
@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_optimum_neuron(tmp_path, state, config, reference, xser, fuse_qkv):
    folder = write_optimum(tmp_path / "old", state, config, reference if xser else None, fuse_qkv=fuse_qkv)
    consolidate(folder if xser else folder / "shards", tmp_path / "new")
    expect(state, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").glob("*.json")) == ["config.json"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(model.state_dict()["lm_head.weight"], state["lm_head.weight"])


@pytest.mark.parametrize("layout", ["shards", "tensor_parallel_shards"])
def test_older_versions_of_optimum_neuron(tmp_path, state, reference, layout):
    for stage in range(STAGES):
        metadata = older_metadata(state, stage)
        for rank in range(TENSOR):
            tensors, index = (
                shards_of(state, stage, rank, fuse_gate_up=False),
                f"tp_rank_{rank:02d}_pp_rank_{stage:02d}",
            )
            if layout == "shards":
                write(tmp_path / "old/shards/model" / f"dp_rank_00_{index}.pt", tensors, reference)
            else:
                write(tmp_path / "old" / layout / index, tensors, reference, lambda m, d=metadata: {"model": m, **d})
        if layout == "shards":
            torch.save(metadata, tmp_path / f"old/shards/mp_metadata_pp_rank_{stage}.pt")
    consolidate(tmp_path / "old", tmp_path / "new")
    expect(state, tmp_path / "new")


@pytest.mark.parametrize(
    ("xser", "options"),
    [
        (False, {}),
        (True, {"adjacent": True}),
        (False, {"adjacent": True, "fuse_qkv": True}),
        (True, {"fuse_qkv": True, "fuse_gate_up": False}),
    ],
    ids=["plain", "xser-trn2", "fused-qkv-trn2", "xser-fused-qkv"],
)
def test_neuronx_distributed(tmp_path, state, config, reference, xser, options):
    write_nxd(tmp_path / "old" / "step_5", state, reference if xser else None, **options)
    config.save_pretrained(tmp_path / "config")
    consolidate(tmp_path / "old", tmp_path / "new", config=tmp_path / "config")
    expect(state, tmp_path / "new")
    assert (tmp_path / "new" / "config.json").read_bytes() == (tmp_path / "config" / "config.json").read_bytes()


def test_the_first_layout_of_neuronx_distributed(tmp_path, state, config):
    for stage in range(STAGES):
        for rank in range(TENSOR):
            path = tmp_path / "old" / f"tp_rank_{rank:02d}_pp_rank_{stage:02d}" / "checkpoint.pt"
            write(path, shards_of(state, stage, rank), around=lambda model: {"model": model, "step": 5})
    config.save_pretrained(tmp_path / "config")
    said = consolidate(tmp_path / "old", tmp_path / "new", config=tmp_path / "config" / "config.json")
    assert "1 file of weights" in said
    expect(state, tmp_path / "new")


def test_a_tied_weight_is_written_once_and_fused_attention_is_split(tmp_path):
    """Plain multi-head attention, whose queries, keys and values are one layer with three blocks on each rank."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        tie_word_embeddings=True,
    )
    full = transformers.LlamaForCausalLM(config).state_dict()
    name = ATTENTION.format(0)
    for rank in range(2):
        tensors = {}
        for key, value in full.items():
            dim = 1 if "o_proj" in key or "down_proj" in key else 0
            tensors[key] = value.clone() if "norm" in key else value.chunk(2, dim)[rank].clone()
        tensors[f"{name}.qkv_proj.weight"] = torch.cat([tensors.pop(f"{name}.{part}_proj.weight") for part in "qkv"])
        write(tmp_path / "old/model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", tensors)
    config.save_pretrained(tmp_path / "old")
    consolidate(tmp_path / "old", tmp_path / "new")
    expect({key: value for key, value in full.items() if key != "lm_head.weight"}, tmp_path / "new")


@dataclass
class Command:
    """Whose unpickling runs a command, as malicious code would."""

    text: str

    def __reduce__(self):
        return os.system, (self.text,)


def refused(folder: Path, output: Path, match: str, **options) -> str:
    """Returns the message of the error that consolidating raises, and checks that no weights were written."""
    with pytest.raises(CheckpointError, match=match) as caught:
        consolidate(folder, output, **options)
    assert not list(output.glob("*.safetensors"))
    return str(caught.value)


FIRST = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
SECOND = "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"


@pytest.mark.parametrize(
    "place", [FIRST, f"{FIRST}.tensors/tensor_0.pt", "mp_metadata_pp_rank_0.pt"], ids=["dict", "tensor", "metadata"]
)
def test_code_is_refused_and_not_run(tmp_path, state, config, reference, place):
    folder = write_optimum(tmp_path / "old", state, config, reference)
    torch.save({"x": Command(f"touch {tmp_path / 'run'}")}, folder / "shards" / place)
    message = refused(folder, tmp_path / "new", "contains more than tensors")
    assert str(folder / "shards" / place) in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", ["../../../secret", -1, True, None], ids=repr)
def test_references_are_numbers(tmp_path, state, config, reference, number):
    folder = write_optimum(tmp_path / "old", state, config, reference)
    torch.save({"model.norm.weight": reference(number)}, folder / "shards" / FIRST)
    refused(folder, tmp_path / "new", "the reference of 'model.norm.weight' is not a number")


def test_files_outside_are_refused(tmp_path, state, config):
    folder = write_optimum(tmp_path / "old", state, config)
    (folder / "shards" / FIRST).rename(tmp_path / "elsewhere.pt")
    (folder / "shards" / FIRST).symlink_to(tmp_path / "elsewhere.pt")
    refused(folder, tmp_path / "new", "outside of the folder")


def change(folder: Path, place: str, name: str, tensor) -> None:
    """Replaces a tensor in a file; None removes it."""
    held = torch.load(folder / place, weights_only=True)
    if tensor is None:
        del held[name]
    else:
        held[name] = tensor(held[name])
    torch.save(held, folder / place)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (lambda t: t[:-1].clone(), "a shape that does not fit"),
        (lambda t: t.float(), "a shape that does not fit"),
        (lambda t: torch.zeros(1, dtype=t.dtype).expand(1 << 40), "fewer elements are stored"),
        (lambda t: t.to_sparse(), "not a dense tensor"),
        (lambda t: "weights", "not a dense tensor"),
        (None, "is in only one of it"),
    ],
    ids=["shape", "dtype", "expanded", "sparse", "text", "missing"],
)
@pytest.mark.parametrize("with_metadata", [True, False], ids=["optimum", "nxd"])
def test_a_shard_that_does_not_fit_is_named(tmp_path, state, config, tensor, match, with_metadata):
    folder = write_optimum(tmp_path / "old", state, config)
    for path in [] if with_metadata else (folder / "shards").glob("*.json"):
        path.unlink()
    change(folder / "shards", SECOND, "model.layers.0.mlp.down_proj.weight", tensor)
    assert SECOND in refused(folder, tmp_path / "new", match, config=folder)


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_a_missing_file_is_named(tmp_path, state, config, reference, xser):
    folder = write_optimum(tmp_path / "old", state, config, reference if xser else None)
    place = f"{SECOND}.tensors/tensor_2.pt" if xser else SECOND
    (folder / "shards" / place).unlink()
    assert str(folder / "shards" / place) in refused(folder, tmp_path / "new", "is missing")


def test_a_save_that_was_interrupted(tmp_path, state, config):
    folder = write_optimum(tmp_path / "old", state, config)
    (folder / "shards" / "checkpoint").write_text("1")
    refused(folder, tmp_path / "new", "has no file 'done'")
    (folder / "shards" / "done").write_text("1")
    consolidate(folder, tmp_path / "new")
    expect(state, tmp_path / "new")


def test_missing_ranks_and_stages(tmp_path, state, config):
    """All files of the last rank, or of the last stage, are missing, which names alone do not tell."""
    folder = write_optimum(tmp_path / "old", state, config)
    for path in folder.glob("shards/model/*pp_rank_01.pt"):
        path.rename(tmp_path / path.name)
    refused(folder, tmp_path / "new", "Stage 1 has metadata, but no shards")
    for path in folder.glob("shards/*.json"):
        path.rename(tmp_path / path.name)
    refused(folder, tmp_path / "new", "No shard has 'model.layers.1")
    for path in tmp_path.glob("*pp_rank_01.pt"):
        path.rename(folder / "shards/model" / path.name)
    for path in folder.glob("shards/model/*tp_rank_03*"):
        path.unlink()
    refused(folder, tmp_path / "new", "a shape that does not fit")
    for path in tmp_path.glob("*.json"):
        path.rename(folder / "shards" / path.name)
    refused(folder, tmp_path / "new", "a shape that does not fit|cannot be used")


@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm.weight", f"{ATTENTION.format(0)}.qkv_proj.weight_v"])
def test_replicas_that_differ(tmp_path, state, config, name):
    folder = write_optimum(tmp_path / "old", state, config)
    place = "model/dp_rank_00_tp_rank_02_pp_rank_00.pt"  # its key/value head is that of rank 0
    change(folder / "shards", place, name, lambda tensor: tensor + 1)
    message = refused(folder, tmp_path / "new", "hold different values")
    assert place in message
    assert "--no-verify" in message
    consolidate(folder, tmp_path / "first", verify=False)
    expect(state, tmp_path / "first")


def test_keys_in_no_known_order(tmp_path, state, config):
    folder = write_nxd(tmp_path / "old", state)
    config.save_pretrained(folder)
    change(folder, SECOND, f"{ATTENTION.format(0)}.qkv_proj.weight_k", lambda tensor: tensor + 1)
    refused(folder, tmp_path / "new", "Copies of key/value heads differ")


def test_configurations(tmp_path, state, config):
    folder = write_nxd(tmp_path / "old", state)
    assert "--config" in refused(folder, tmp_path / "new", "does not say how its tensors are sharded")
    for field, value, match in (
        ("intermediate_size", 2 * INNER, "a shape that does not fit"),
        ("num_hidden_layers", 1, "The model has no 'model.layers.1"),
        ("num_hidden_layers", STAGES + 1, "No shard has 'model.layers.2"),
        ("num_hidden_layers", 10**9, "fewer tensors"),
        ("num_key_value_heads", 1, "Copies of key/value heads differ"),
        ("model_type", "none of transformers", "There is no model for the configuration"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), field: value}))
        refused(folder, tmp_path / "new", match, config=tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        "[]",
        "{",
        "[" * 100_000,
        "{}",
        '{"parameters": {"model.norm.weight": {"tensor_model_parallel": true, "partition_dim": 9}}}',
        '{"parameters": {}, "model_weight_transformation_specs": [{"module_fully_qualified_name": "m", '
        '"specs": [["os.system", {"bias": false}]]}]}',
    ],
    ids=["list", "not-json", "deep", "empty", "dim", "unknown"],
)
def test_metadata_that_is_not_valid(tmp_path, state, config, metadata):
    folder = write_optimum(tmp_path / "old", state, config)
    path = folder / "shards" / "mp_metadata_pp_rank_0.json"
    path.write_text(metadata)
    assert path.name in refused(folder, tmp_path / "new", "cannot be used|not a file of a checkpoint")


def test_what_is_not_read(tmp_path, state):
    for tag in ("step_1", "step_2"):
        write(tmp_path / "several" / tag / FIRST, {"a": torch.zeros(1)})
    refused(tmp_path / "several", tmp_path / "new", "has 2 checkpoints: step_1, step_2")
    write(tmp_path / "experts/model/dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt", {"a": torch.zeros(1)})
    refused(tmp_path / "experts", tmp_path / "new", "shards of experts")
    write(tmp_path / "lora/adapter_default/adapter_shards" / FIRST, {"a": torch.zeros(1)})
    refused(tmp_path / "lora", tmp_path / "new", "adapters only")
    write(tmp_path / "one" / FIRST, {"a": torch.zeros(1)})
    refused(tmp_path / "one", tmp_path / "new", "no replica 1", replica=1)

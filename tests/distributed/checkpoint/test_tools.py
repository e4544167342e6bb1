"""The checkpoint tools (consolidate, inspect, verify), and loading folders of transformers."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neuron_accel.checkpoint.format.manifest import NAME, read_manifest
from neuron_accel.checkpoint.tools.consolidate import consolidate, parse_size
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.cli.main import main
from neuron_accel.errors import CheckpointError, UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import (
    BATCHES,
    MODELS,
    TOPOLOGIES,
    TP2,
    TP4,
    Trained,
    assert_equal,
    load_and_step,
    train_and_save,
)

CASES = {
    "gpt2-tied": (4, [TP2, "zero1"]),
    "llama": (4, [TP4]),
    "llama-tied": (2, [TP2]),
    "llama-padded": (4, [TP4]),
    "gpt2": (1, []),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns checkpoints by model, each created once: folder, contents and the loss of the next step."""
    made: dict = {}

    def get(model):
        if model not in made:
            ranks, plugins = CASES[model]
            folder = tmp_path_factory.mktemp("tools") / "state"
            made[model] = (folder, *run_ranks(train_and_save, ranks, str(folder), model, plugins)[0])
        return made[model]

    return get


def weights_of(contents):
    return {name: value for name, value in contents.items() if "/" not in name}


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
def test_consolidated_folders_load_in_transformers(saved, tmp_path, model, form):
    from transformers import AutoModelForCausalLM

    folder, contents, _ = saved(model)
    given = folder / "tensor_parallel_shards" if form == "pytorch" else folder
    assert main(["consolidate", "-q", "-f", form, "--max-shard-size", "20KB", str(given), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors" if form == "safetensors" else "*.bin"))) > 2
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, use_safetensors=form == "safetensors", weights_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_equal(weights_of(contents), loaded.state_dict())


def test_one_file_where_it_fits(saved, tmp_path):
    folder = saved("llama")[0]
    paths = consolidate(folder, tmp_path / "out")
    assert [path.name for path in paths] == ["model.safetensors"]
    assert not list((tmp_path / "out").glob("*.index.json"))
    with pytest.raises(CheckpointError, match="already contains weights"):
        consolidate(folder, tmp_path / "out")


def test_consolidating_what_is_damaged_leaves_no_weights(saved, tmp_path):
    """One bit of a weight is flipped, which only the checksum detects, after some weights have been written."""
    folder = tmp_path / "copy"
    shutil.copytree(saved("llama")[0], folder)
    path = folder / read_manifest(folder).of_kind("model")[0]
    contents = bytearray(path.read_bytes())
    contents[-5] ^= 1
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match="checksum does not match") as caught:
        consolidate(folder, tmp_path / "out", max_shard_size=20_000)
    assert path.name in str(caught.value)
    assert not (tmp_path / "out").exists()


def _load_pretrained(folder: str, plugins: list, model: str) -> dict:
    trained = Trained(model, plugins, seed=1)
    assert trained.accelerator.load_state(folder)
    return trained.contents()


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
@pytest.mark.parametrize("single", [True, False])
def test_a_folder_of_transformers_loads_as_model(saved, tmp_path, single, form):
    folder, contents, _ = saved("llama-tied")
    consolidate(folder, tmp_path / "out", form=form, max_shard_size=10**9 if single else 20_000)
    found = run_ranks(_load_pretrained, 4, str(tmp_path / "out"), [TP2, "zero1"], "llama-tied")[0]
    assert_equal(weights_of(contents), weights_of(found))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_an_old_folder_of_a_model_without_head_loads(tmp_path, zipped):
    """The folder is pickled, its names lack the prefix, it has buffers that are now computed, and one tensor is not
    contiguous."""
    from tests.distributed.checkpoint.checkpoint_support import MODELS

    weights = MODELS["gpt2-tied"]().transformer.state_dict()
    turned = weights["h.1.mlp.c_fc.weight"].t().contiguous().t()
    tables = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(
        {**weights, **tables, "h.1.mlp.c_fc.weight": turned},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    found = weights_of(run_ranks(_load_pretrained, 2, str(tmp_path), [TP2], "gpt2-tied")[0])
    assert torch.equal(found.pop("lm_head.weight"), weights["wte.weight"])
    assert_equal({f"transformer.{name}": value for name, value in weights.items()}, found)


def _damaged_pretrained(folder: str, file: str) -> None:
    trained = Trained("gpt2", [TP2], seed=1)
    before = trained.contents()
    with pytest.raises(CheckpointError, match=file):
        trained.accelerator.load_state(folder)
    assert_equal(before, trained.contents())


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
def test_a_truncated_folder_of_transformers_is_refused(saved, tmp_path, form):
    (path,) = consolidate(saved("gpt2")[0], tmp_path / "out", form=form)
    path.write_bytes(path.read_bytes()[:-100])
    run_ranks(_damaged_pretrained, 2, str(tmp_path / "out"), path.name)


@pytest.mark.parametrize(
    ("model", "ranks", "plugins"), [("llama-padded", 3, ["zero1"]), ("llama-padded", 2, [TP2]), ("gpt2", 4, [TP4])]
)
def test_other_families_on_other_meshes(saved, model, ranks, plugins):
    folder, contents, loss = saved(model)
    found, next_loss = run_ranks(load_and_step, ranks, str(folder), model, plugins)[0]
    assert_equal(contents, found)
    assert next_loss == pytest.approx(loss, rel=1e-5)


# ---- inspect and verify ----------------------------------------------------------------------------------------------
def parameters_of(model):
    from tests.distributed.checkpoint.checkpoint_support import MODELS

    with torch.device("meta"):
        return [name for name, _ in MODELS[model]().named_parameters()]


def test_inspect_says_what_is_there(saved, capsys):
    folder, contents, _ = saved("llama-padded")
    assert main(["inspect", "--json", str(folder / "tensor_parallel_shards")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"dp": 1, "tp": 4}
    tensors = {tensor["name"]: tensor for tensor in report["collections"]["model.0"]}
    order = parameters_of("llama-padded")
    assert [name for name in tensors if name in order] == order
    assert {name: tuple(t["shape"]) for name, t in tensors.items()} == {
        name: tuple(value.shape) for name, value in weights_of(contents).items()
    }
    head = tensors["lm_head.weight"]
    assert head["cuts"] == [{"dim": 0, "axis": "tp", "degree": 4, "blocks": [95], "padded": True}]
    assert main(["inspect", str(folder)]) == 0
    assert "Shard(0) over tp 4, padded" in capsys.readouterr().out


def test_every_unique_byte_is_written_once_and_by_all(saved):
    """Data-parallel ranks each write a part, and ranks with equal shards do not write them twice."""
    folder, contents, _ = saved("gpt2-tied")
    files = {path.name: path.stat().st_size for path in (folder / "tensor_parallel_shards").iterdir()}
    assert sorted(name.partition("-")[0] for name in files) == [
        f"dp_rank_0{d}_tp_rank_0{t}" for d in "01" for t in "01"
    ]
    unique = {value.data_ptr(): value for value in weights_of(contents).values()}
    size = sum(value.numel() * value.element_size() for value in unique.values())
    shards = list((folder / "tensor_parallel_shards").iterdir())
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in shards)
    tied = contents["lm_head.weight"].nbytes if len(unique) == len(weights_of(contents)) else 0
    assert sum(files.values()) - headers == size - tied
    assert max(files.values()) < 0.5 * sum(files.values())


def test_verify(saved, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(saved("gpt2-tied")[0], folder)
    assert main(["verify", str(folder)]) == 0
    assert verify(folder) == []
    victim = next(path for path, entry in read_manifest(folder).files.items() if entry.kind == "optimizer")
    (folder / victim).unlink()
    assert main(["verify", str(folder)]) == 1
    assert f"'{victim}' is missing" in capsys.readouterr().err


def test_verify_compares_with_the_configuration(saved, tmp_path):
    from neuron_accel.checkpoint.format.files import checksums_of
    from neuron_accel.checkpoint.format.manifest import FileEntry

    folder = tmp_path / "copy"
    shutil.copytree(saved("llama")[0], folder)
    config = json.loads((folder / "config.json").read_text())
    data = json.dumps({**config, "num_hidden_layers": 3, "vocab_size": 5}).encode()
    (folder / "config.json").write_bytes(data)
    manifest = read_manifest(folder)
    entry = FileEntry(size=len(data), checksums=checksums_of(data), kind="auxiliary")
    (folder / NAME).write_bytes(replace(manifest, files={**manifest.files, "config.json": entry}).to_bytes())
    problems = "\n".join(verify(folder))
    assert "config.json says 3 layers" in problems
    assert "config.json says (5, 32)" in problems


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["verify"]])
def test_looking_needs_no_torch(saved, command):
    folder = saved("llama")[0]
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'accelerate', 'transformers', 'torch_xla'): sys.modules[name] = None\n"
        "from neuron_accel.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate"])
def test_what_is_no_checkpoint_is_an_error_without_traceback(tmp_path, command, capsys):
    (tmp_path / "tensor_parallel_shards").mkdir()
    output = [str(tmp_path / "out")] if command == "consolidate" else []
    assert main([command, str(tmp_path), *output]) in (1, 2)
    assert "no manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("100", 100), ("2kb", 2000)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "many", "nan", "inf"])
def test_no_sizes(text):
    with pytest.raises(CheckpointError, match="not a valid size"):
        parse_size(text)


def test_consolidating_does_not_need_memory_for_the_model(tmp_path):
    """The peak memory stays far below the 64 MB of the model."""
    big = run_ranks(_save_big, 2, str(tmp_path / "c"))[0]
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy\n"
        "from neuron_accel.checkpoint.tools.consolidate import consolidate\n"
        "from neuron_accel.testing.resources import PeakMemory\n"
        "memory = PeakMemory()\n"
        "consolidate(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(memory.bytes())"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "c"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert big == 64 << 20
    assert 1 << 20 < int(done.stdout) < 24 << 20


def _save_big(folder: str) -> int:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    model = accelerator.prepare(model)
    accelerator.save_state(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


# ---- weights at the start, weights at the end ------------------------------------------------------------------------
def _start_from(folder: str, degree: int, model: str) -> dict:
    plugins = [{"model_parallelism": {"tensor_parallel_size": degree, "checkpoint_dir": folder}}, "zero1"]
    return Trained(model, plugins, seed=1).contents()


@pytest.mark.parametrize("inside", ["", "tensor_parallel_shards"])
def test_a_model_starts_from_the_weights_of_checkpoint_dir(saved, inside):
    folder, contents, _ = saved("llama-padded")
    assert_equal(weights_of(contents), run_ranks(_start_from, 4, str(folder / inside), 2, "llama-padded")[0])


def _save_in_full(folder: str, plugins: list, model: str) -> dict:
    trained = Trained(model, plugins)
    trained.step(BATCHES[0])
    trained.accelerator.unwrap_model(trained.model).save_pretrained(folder + "/pretrained", max_shard_size="20KB")
    said = io.StringIO()
    logging.getLogger("accelerate").addHandler(handler := logging.StreamHandler(said))
    trained.accelerator.save_model(trained.model, folder + "/model")
    logging.getLogger("accelerate").removeHandler(handler)
    assert said.getvalue() == ""  # that a tied weight is written once is no news
    return trained.contents()


@pytest.mark.parametrize("model", ["gpt2-tied", "llama-padded"])
@pytest.mark.parametrize("topology", ["dp1", "tp2-dp2-zero1", "pp2-tp2", "dp2-fully-sharded"])
def test_the_full_model_is_saved_from_any_mesh(tmp_path, model, topology):
    from transformers import AutoModelForCausalLM

    ranks, plugins = {**TOPOLOGIES, "dp2-fully-sharded": (2, ["fully_sharded"])}[topology]
    contents = run_ranks(_save_in_full, ranks, str(tmp_path), plugins, model)[0]
    for folder in ("pretrained", "model"):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert_equal(weights_of(contents), loaded.state_dict(), folder)


def _save_by_a_method_of_its_own(folder: str) -> str:
    from neuron_accel import NeuronAccelerator

    model = MODELS["llama"]()
    model.__class__ = type("OwnModel", (type(model),), {"save_pretrained": lambda self, folder: None})
    accelerator = NeuronAccelerator(config={"plugins": [TP2]})
    prepared = accelerator.prepare(model)
    with pytest.raises(UsageError, match="save_pretrained of OwnModel takes no `state_dict`") as raised:
        accelerator.unwrap_model(prepared).save_pretrained(folder)
    return str(raised.value)


def test_a_method_that_takes_no_weights_would_save_shards(tmp_path):
    for said in run_ranks(_save_by_a_method_of_its_own, 2, str(tmp_path / "out")):
        assert "accelerator.save_model" in said


def _copy_and_save(folder: str) -> None:
    import copy
    import pickle

    trained = Trained("llama", [TP2])
    model = trained.accelerator.unwrap_model(trained.model)
    attention = model.model.layers[0].self_attn.q_proj
    copies = [copy.deepcopy(model.save_pretrained), pickle.loads(pickle.dumps(model.save_pretrained))]
    trained.accelerator.end_training()
    for save in (*copies, model.save_pretrained):
        with pytest.raises(UsageError, match="one rank's shards"):
            save(folder)
    assert attention.weight.shape[0] == 16
    assert not Path(folder).exists()


def test_shards_are_never_saved_as_if_they_were_the_model(tmp_path):
    """Saving a copy of a sharded model, or the model after the run, is refused."""
    run_ranks(_copy_and_save, 2, str(tmp_path / "out"))


def test_files_may_have_any_names(saved, tmp_path):
    """Checkpoints load that were written before files were named by the axes of the mesh, when every name had tp, pp
    and dp, and there was no index."""
    folder, contents, loss = saved("gpt2-tied")
    shutil.copytree(folder, tmp_path / "old")
    manifest, files = read_manifest(folder), {}
    for number, (relative, entry) in enumerate(manifest.files.items()):
        path = Path(relative)
        if entry.kind == "index":
            continue
        renamed = path.with_name(f"tp_rank_{number:02d}_pp_rank_00_dp_rank_00.safetensors")
        renamed = renamed if entry.kind in ("model", "optimizer") else path
        (tmp_path / "old" / path).rename(tmp_path / "old" / renamed)
        files[str(renamed)] = entry
    (tmp_path / "old" / NAME).write_bytes(replace(manifest, files=files).to_bytes())
    assert verify(tmp_path / "old") == []
    found, next_loss = run_ranks(load_and_step, 2, str(tmp_path / "old"), "gpt2-tied", ["zero1"])[0]
    assert_equal(contents, found)
    assert next_loss == pytest.approx(loss, rel=1e-5)

"""Checkpoints with valid checksums and invalid contents: loading raises a CheckpointError before anything is changed,
or loads what it should. It never raises another error and never hangs."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from neuron_accel.checkpoint.format.files import checksums_of
from neuron_accel.checkpoint.format.manifest import NAME, FileEntry, Manifest, read_manifest
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.testing import run_ranks


class Counted:
    """A user's object whose state is a number and a tensor."""

    def __init__(self) -> None:
        self.count, self.table = 3, torch.arange(3.0)

    def state_dict(self):
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state):
        self.count, self.table = state["count"] + 0, state["table"].clone()


class Session:
    """A small training run with everything that a checkpoint holds, and running statistics that differ between
    ranks."""

    def __init__(self) -> None:
        from neuron_accel import NeuronAccelerator

        torch.manual_seed(0)
        self.accelerator = NeuronAccelerator(config={"plugins": ["zero1"]})
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.1}]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counted = Counted()
        self.accelerator.register_for_checkpointing(self.counted)

    def step(self) -> None:
        for batch in self.loader:
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            break

    def contents(self):
        """Returns everything that loading can change."""
        model, optimizer = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        return [
            model,
            optimizer,
            copy.deepcopy(self.scheduler.state_dict()),
            self.loader.position(),
            (self.counted.count, self.counted.table.clone(), self.accelerator.step),
            (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        ]


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# ---- forging ---------------------------------------------------------------------------------------------------------
ABSURD = [
    None,
    True,
    "",
    "absurd",
    "params",
    -1,
    0,
    7,
    10**30,
    1.5,
    1e308,
    [],
    {},
    [[]],
    [-1, 10**12],
    {"name": 1},
    {"$": "tensor", "v": "nowhere"},
    {"$": "tensor", "v": []},
    {"$": "scalar", "dtype": "int8", "v": 300},
    {"$": "scalar", "dtype": "object", "v": 1},
    {"$": "float", "v": "one"},
    {"$": "float", "v": "nan"},
    {"$": "float", "v": 10**400},
    {"$": "bytes", "v": "\u20ac"},
    {"$": "device", "v": "cuda:99999999999999"},
    {"$": "dtype", "v": "nn"},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[1, 2, 3]]},
    {"$": "size", "v": ["a"]},
    {"$": "nothing", "v": 1},
    {"$": []},
]


def places(data, path=()):
    """Yields the paths of all values in plain data, and of some items of long lists."""
    if path:
        yield path
    if isinstance(data, dict):
        for key in data:
            yield from places(data[key], (*path, key))
    elif isinstance(data, list):
        for index in dict.fromkeys([0, 1, len(data) - 1]):
            if 0 <= index < len(data):
                yield from places(data[index], (*path, index))


def forgeries(data, generator, share):
    """Yields a description and a copy of plain data with one value replaced, removed or added. ``share`` is the average
    number of times that each place is used; below 1, only some places are."""
    for path in places(data):
        number = int(share) + (generator.random() < share % 1)
        for value in generator.sample([*ABSURD, "REMOVED", "ADDED"], number):
            forged = json.loads(json.dumps(data))
            parent = forged
            for key in path[:-1]:
                parent = parent[key]
            if value == "REMOVED":
                del parent[path[-1]]
            elif value == "ADDED":
                if not isinstance(parent[path[-1]], dict):
                    continue
                parent[path[-1]]["absurd"] = generator.choice(ABSURD)
            else:
                parent[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {value!r:.60}", forged


def with_metadata(contents: bytes, key: str, text: str) -> bytes:
    """Returns a safetensors file with other metadata."""
    length = struct.unpack("<Q", contents[:8])[0]
    header = json.loads(contents[8 : 8 + length])
    header["__metadata__"][key] = text
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + contents[8 + length :]


def metadata(contents: bytes, key: str):
    return json.loads(json.loads(contents[8 : 8 + struct.unpack("<Q", contents[:8])[0]])["__metadata__"][key])


def put(folder: Path, relative: str, contents: bytes) -> None:
    """Replaces a file and its entry in the manifest."""
    manifest = read_manifest(folder)
    entry = FileEntry(size=len(contents), checksums=checksums_of(contents), kind=manifest.files[relative].kind)
    (folder / relative).write_bytes(contents)
    put_manifest(folder, Manifest(files={**manifest.files, relative: entry}, info=manifest.info))


def put_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / NAME).write_bytes(manifest.to_bytes())


def forged_checkpoints(good: Path, folder: Path, seed: int, share: float):
    """Repeatedly makes ``folder`` a copy of the checkpoint ``good`` with one forged value, and yields its
    description."""
    generator = random.Random(seed)
    manifest = read_manifest(good)
    kinds = {"state": "training_state", "model": "neuron_accel", "optimizer": "neuron_accel"}
    (index,) = manifest.of_kind("index")
    without = {path: entry for path, entry in manifest.files.items() if path != index}
    for kind, key in kinds.items():
        # Headers are read of checkpoints of earlier versions only, which have no index.
        put_manifest(folder, Manifest(files=without, info=manifest.info) if kind != "state" else manifest)
        relative = sorted(manifest.of_kind(kind))[0]
        contents = (good / relative).read_bytes()
        for what, forged in forgeries(metadata(contents, key), generator, share):
            put(folder, relative, with_metadata(contents, key, json.dumps(forged)))
            yield f"{kind}: {what}"
        put(folder, relative, contents)
    put_manifest(folder, manifest)
    contents = (good / index).read_bytes()
    for what, forged in forgeries(json.loads(contents), generator, share / 3):
        put(folder, index, json.dumps(forged).encode())
        yield f"index: {what}"
    put(folder, index, contents)
    for what, forged in forgeries(dict(manifest.info), generator, share):
        put_manifest(folder, Manifest(files=manifest.files, info=forged))
        yield f"info: {what}"
    put_manifest(folder, manifest)


def try_forgeries(good: str, folder: str, seed: int, share: float):
    """Loads every forgery on all ranks."""
    session = Session()
    accelerator, run = session.accelerator, session.accelerator.run
    session.step()
    accelerator.load_state(good)
    session.step()
    before = session.contents()
    main = accelerator.is_main_process
    source = forged_checkpoints(Path(good), Path(folder), seed, share) if main else None
    wrong, refused, loaded = [], 0, 0
    while True:
        what = run.backend.broadcast_object(next(source, None) if main else None, run.world)
        if what is None:
            return refused, loaded, wrong
        problem, ok = None, False
        try:
            accelerator.load_state(folder)
            ok = True
        except CheckpointError as error:
            if not what.startswith("state: custom.0.state") and not same(before, session.contents()):
                problem = f"changed something before it was refused: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        outcomes = run.backend.all_gather_object((ok, problem), run.world)
        wrong += [f"{what}: rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]
        if len({ok for ok, _ in outcomes}) > 1:
            wrong.append(f"{what}: ranks disagree: {outcomes}")
        refused, loaded = refused + (not ok), loaded + ok
        if (
            ok or problem or what.startswith("state: custom")
        ):  # whose state is judged by itself alone, when all is loaded
            accelerator.load_state(good)
            session.step()
            before = session.contents()


def save(folder: str) -> None:
    session = Session()
    session.step()
    session.accelerator.save_state(folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forged") / "good"
    run_ranks(save, 2, str(folder))
    return folder


@pytest.mark.timeout(240)
def test_whatever_is_forged_is_refused_before_anything_changes_or_loads(good, tmp_path):
    shutil.copytree(good, tmp_path / "forged")
    results = run_ranks(try_forgeries, 2, str(good), str(tmp_path / "forged"), 0, 0.3, timeout=200)
    refused, loaded, wrong = results[0]
    assert not wrong, "\n".join([f"{len(wrong)} of {refused + loaded}:", *wrong[:40]])
    assert refused > 50
    assert loaded > 5


# ---- tools -----------------------------------------------------------------------------------------------------------
def use(tool, folder: Path, output: Path) -> None:
    from neuron_accel.checkpoint.tools.consolidate import consolidate
    from neuron_accel.checkpoint.tools.report import inspect, verify
    from neuron_accel.cli.inspect import format_report

    if tool == "inspect":
        report = inspect(folder)
        json.dumps(report)
        format_report(report, everything=True)
    elif tool == "verify":
        assert all(isinstance(problem, str) for problem in verify(folder))
    else:
        consolidate(folder, output)


@pytest.mark.parametrize("tool", ["inspect", "verify", "consolidate"])
def test_tools_refuse_what_is_forged_in_words(tool, good, tmp_path):
    shutil.copytree(good, tmp_path / "forged")
    refused, wrong = 0, []
    for number, what in enumerate(forged_checkpoints(good, tmp_path / "forged", 1, 0.4)):
        if what.startswith("state"):  # which they do not read
            continue
        output = tmp_path / f"out{number}"
        try:
            use(tool, tmp_path / "forged", output)
        except NeuronAccelError:
            refused += 1
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        shutil.rmtree(output, ignore_errors=True)
    assert not wrong, "\n".join([f"{len(wrong)}:", *wrong[:40]])
    assert refused > 5 or tool == "verify"


def test_tensors_are_listed_in_the_order_of_their_numbers():
    from neuron_accel.checkpoint.tools.report import _by_number

    names = ["net.10.weight", "net.2.weight", "net.2.bias", "head.weight", "10", "2"]
    assert sorted(names, key=_by_number) == [
        "head.weight",
        "net.2.bias",
        "net.2.weight",
        "net.10.weight",
        "2",
        "10",
    ]


def test_an_auxiliary_file_does_not_take_the_place_of_weights(good, tmp_path):
    shutil.copytree(good, tmp_path / "forged")
    manifest = read_manifest(good)
    evil = b"not weights"
    entry = FileEntry(size=len(evil), checksums=checksums_of(evil), kind="auxiliary")
    for name in ("model.safetensors", "manifest.json"):
        (tmp_path / "forged" / name).write_bytes(evil)
        put_manifest(tmp_path / "forged", Manifest(files={**manifest.files, name: entry}, info=manifest.info))
        with pytest.raises(CheckpointError):
            use("consolidate", tmp_path / "forged", tmp_path / "out")
        assert not (tmp_path / "out" / name).exists() or (tmp_path / "out" / name).read_bytes() != evil
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


# ---- what is no file -------------------------------------------------------------------------------------------------
def replace_with(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))


def load_what_is_no_file(good: str, folder: str, kind: str) -> list[str]:
    session = Session()
    before = session.contents()
    answers = []
    names = [*read_manifest(Path(good)).files, NAME]
    for name in names:
        shutil.copytree(good, folder, symlinks=True)
        os.chdir(folder)
        replace_with(kind, Path(folder, name))
        for verify in (True, False):
            with pytest.raises(CheckpointError) as caught:
                session.accelerator.load_state(folder, verify=verify)
            answers.append(str(caught.value))
        for tool in ("inspect", "consolidate"):
            try:
                use(tool, Path(folder), Path(folder, "out", tool))
            except CheckpointError as error:
                answers.append(str(error))
        os.chdir("/")
        shutil.rmtree(folder)
    assert same(before, session.contents())
    return answers


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind, good, tmp_path):
    (answers,) = run_ranks(load_what_is_no_file, 1, str(good), str(tmp_path / "odd"), kind, timeout=60)
    assert all(answers)

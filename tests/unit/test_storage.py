"""Paths at URLs: what is read, written and listed, and the errors of a store."""

from __future__ import annotations

import gc
import sys
from pathlib import Path, PurePosixPath

import pytest

from neuron_accel.checkpoint.format.files import Extent, Files, checksum_of_block, checksums_of
from neuron_accel.checkpoint.state.save import is_of_a_save
from neuron_accel.errors import CheckpointError, ConfigurationError
from neuron_accel.storage import RemotePath, location, staged, upload_folder
from tests.object_store import PART, ObjectStore, contents_of, make_bucket, register, uploads_of

LARGE = bytes(range(256)) * (10 * PART // 256)  # more than one request


@pytest.fixture
def store(tmp_path):
    register()
    bucket, url = make_bucket(tmp_path)
    yield bucket, location(url)
    register()


def fail_at(name, error):
    def before(request, key):
        if request == name:
            raise error

    ObjectStore.before_request = staticmethod(before)


# ---- what names a path -----------------------------------------------------------------------------------------------
def test_a_location_is_a_url_or_a_local_path(tmp_path):
    register()
    assert location("runs/state") == Path("runs/state")
    assert location(tmp_path) == tmp_path
    assert location(f"file://{tmp_path}/x") == tmp_path / "x"
    remote = location("objects://a.bucket/runs/state/")
    assert isinstance(remote, RemotePath)
    assert str(remote) == "objects://a.bucket/runs/state"
    assert location(remote) is remote
    assert (remote.name, str(remote.parent), str(remote / "x" / "y")) == (
        "state",
        "objects://a.bucket/runs",
        f"{remote}/x/y",
    )
    assert (remote / "x").relative_to(remote) == PurePosixPath("x")
    assert str(remote.with_name("other")) == "objects://a.bucket/runs/other"
    assert remote == location("objects://a.bucket/runs/state")
    assert {remote: 1}[location(str(remote))] == 1
    bucket = location("objects://a.bucket")
    assert bucket.parent == bucket
    with pytest.raises(ValueError, match="not in"):
        bucket.relative_to(remote)


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("nosuch://bucket/runs", "nosuch", "another location"),
        ("gs://bucket/runs", "gcsfs", "the package that it names"),
        ("simplecache::s3://bucket/runs", "simplecache", "s3://bucket/runs/state"),
        ("memory://", "memory", "s3://bucket/runs/state"),
        (Path("s3://bucket/runs"), "s3:/bucket/runs", "as text"),
    ],
)
def test_an_address_that_cannot_be_used(given, what, fix, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigurationError) as caught:
        location(given)
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_the_extra_is_named_if_a_package_is_missing(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError) as caught:
        location("s3a://bucket/runs")  # which fsspec has not loaded before
    assert "pip install s3fs" in caught.value.fix


# ---- reading and listing ---------------------------------------------------------------------------------------------
def test_what_is_in_a_folder(store):
    bucket, root = store
    for name in ("runs/a.json", "runs/b.txt", "runs/deep/c.json", "runs-2/d.json"):
        (root / name).put(name.encode())
    folder = root / "runs"
    assert sorted(str(p.relative_to(root)) for p in folder.iterdir()) == ["runs/a.json", "runs/b.txt", "runs/deep"]
    assert [p.name for p in folder.glob("*.json")] == ["a.json"]
    listed = {p.name: p for p in folder.iterdir()}
    ObjectStore.requests.clear()
    assert listed["deep"].is_dir()
    assert listed["a.json"].is_file()
    assert listed["a.json"].size == len("runs/a.json")
    assert ObjectStore.requests == []  # the listing has said so
    assert (folder / "a.json").stat().st_mtime_ns > 0
    assert (folder / "a.json").exists()
    assert folder.exists()
    assert not (root / "runs/a").exists()
    assert list((root / "nothing").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        (folder / "nothing").stat()
    folder.remove()
    assert list(contents_of(bucket)) == ["runs-2/d.json"]
    folder.remove()  # nothing is left
    (root / "runs-2/d.json").remove()
    (root / "runs-2/d.json").unlink(missing_ok=True)
    assert contents_of(bucket) == {}


def test_an_empty_object_with_the_name_of_a_folder_is_not_in_it():
    root = location("memory://a-bucket/folder")
    (root / "x").put(b"1")
    root.store.pipe_file("/a-bucket/folder/y", b"2")
    assert sorted(p.name for p in root.iterdir()) == ["x", "y"]
    assert (root / "x").read_bytes() == b"1"
    root.remove()
    assert not root.exists()


def test_ranges_are_requested_no_further_than_needed(store):
    _, root = store
    path = root / "x"
    path.upload([LARGE])
    ObjectStore.requests.clear()
    assert b"".join(path.ranges(5, 9 * PART)) == LARGE[5 : 5 + 9 * PART]
    assert [(name, size) for name, _, size in ObjectStore.requests] == [("get", 8 * PART), ("get", PART)]
    assert len(b"".join(path.ranges(0, 64 * PART))) == len(LARGE)
    assert checksum_of_block(path, 0, len(LARGE)) == checksums_of(LARGE)[0]
    ObjectStore.requests.clear()
    assert path.read_range(3, 0) == b""
    assert ObjectStore.requests == []


@pytest.mark.parametrize("target", ["local", "store"])
@pytest.mark.parametrize("source", ["local", "store"])
def test_slices_are_copied_between_folders_and_stores(store, tmp_path, source, target):
    _, root = store
    given, made = ((tmp_path if kind == "local" else root) / "given" for kind in (source, target))
    made = made.with_name("made")
    given.write_bytes(LARGE) if isinstance(given, Path) else given.upload([LARGE])
    Files().assemble(made, [b"head", Extent(given, 7, 9 * PART), Extent(given, 0, 3)])
    assert made.read_bytes() == b"head" + LARGE[7 : 7 + 9 * PART] + LARGE[:3]
    with pytest.raises(CheckpointError, match="'given' ends too early"):
        Files().assemble(made.with_name("other"), [Extent(given, len(LARGE) - 1, 2)])


# ---- writing ---------------------------------------------------------------------------------------------------------
def test_a_small_file_is_one_request_and_a_large_one_several(store):
    bucket, root = store
    written = Files().write(root / "small", [b"abc", b"", memoryview(b"def")])
    assert [name for name, _, _ in ObjectStore.requests] == ["put"]
    assert (written.size, written.checksums) == (6, checksums_of(b"abcdef"))
    ObjectStore.requests.clear()
    written = Files().write(root / "large", [LARGE[:100], LARGE[100:]])
    assert (written.size, written.checksums) == (len(LARGE), checksums_of(LARGE))
    names = [name for name, _, _ in ObjectStore.requests]
    assert names[0] == "create upload"
    assert names[-1] == "complete upload"
    assert set(names[1:-1]) == {"upload part"}
    assert contents_of(bucket) == {"small": b"abcdef", "large": LARGE}
    Files().replace(root / "small", b"new")
    assert contents_of(bucket)["small"] == b"new"


@pytest.mark.parametrize("request_", ["create upload", "upload part", "complete upload", "put"])
def test_a_failed_upload_is_aborted_and_the_old_object_stays(store, request_):
    bucket, root = store
    (root / "x").put(b"old")
    fail_at(request_, OSError("the network is down"))
    with pytest.raises(CheckpointError, match="'x' could not be written: the network is down") as caught:
        Files().write(root / "x", [b"small"] if request_ == "put" else [LARGE])
    assert caught.value.where == f"{root}/x"
    assert "builtins.OSError" in caught.value.why
    ObjectStore.before_request = staticmethod(lambda name, key: None)
    del caught
    gc.collect()
    assert contents_of(bucket) == {"x": b"old"}
    assert not uploads_of(bucket).exists() or list(uploads_of(bucket).iterdir()) == []


@pytest.mark.parametrize("after", [0, 100, len(LARGE)])
@pytest.mark.parametrize("error", [CheckpointError("a shard is damaged"), KeyboardInterrupt(), OSError(5, "bad")])
def test_what_fails_while_it_is_read_is_not_written(store, error, after):
    """Leaving a `with` block of a file of fsspec would complete the upload, and so would its finalizer."""
    bucket, root = store

    def parts():
        yield LARGE[:after]
        raise error

    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError):
        Files().write(root / "x", parts())
    gc.collect()
    assert contents_of(bucket) == {}
    assert not uploads_of(bucket).exists() or list(uploads_of(bucket).iterdir()) == []


def test_a_folder_is_uploaded_with_its_configuration_last(store):
    bucket, root = store
    with staged(f"{root}/model") as folder:
        for name in ("config.json", "model.safetensors", "z/tokens.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(name)
        upload_folder(folder, f"{root}/model")
    assert not folder.exists()
    assert contents_of(bucket) == {
        f"model/{n}": n.encode() for n in ("config.json", "model.safetensors", "z/tokens.json")
    }
    assert ObjectStore.requests[-1][1] == "model/config.json"
    with staged(bucket.parent) as folder:
        assert folder == bucket.parent


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [PermissionError("denied"), OSError("reset"), RuntimeError("loop"), TimeoutError()])
def test_only_absence_is_absence(store, error):
    """`exists` of fsspec takes any error for it, and a checkpoint would then be overwritten as if it were not there."""
    _, root = store
    (root / "x").put(b"1")
    fail_at("head", error)
    for what in (RemotePath.exists, RemotePath.is_file, RemotePath.is_dir):
        with pytest.raises(CheckpointError, match="could not be read"):
            what(root / "x")
    fail_at("list", error)
    with pytest.raises(CheckpointError, match="could not be listed"):
        list(root.iterdir())
    fail_at("delete", error)
    with pytest.raises(CheckpointError, match="could not be removed"):
        (root / "x").remove()


def test_a_bucket_that_does_not_exist_is_named_and_not_made(tmp_path):
    register()
    path = location(f"objects://{tmp_path}/b.bucket/x")
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        Files().write(path, [b"1"])
    assert "not created here" in caught.value.fix
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_access_that_is_denied_says_what_to_permit(store):
    path = RemotePath("s3://bucket/runs/x", store[1].store)
    fail_at("put", PermissionError("Access Denied"))
    with pytest.raises(CheckpointError, match="Access Denied") as caught:
        path.put(b"1")
    assert "AWS_PROFILE" in caught.value.fix
    assert "s3:PutObject" in caught.value.fix


class Uploads(ObjectStore):
    """The requests of S3 for uploads of several parts, two on a page."""

    def __init__(self, keys, error=None):
        super().__init__()
        self.keys, self.error = list(keys), error

    def split_path(self, path):
        return "bucket", path.partition("bucket/")[2], None

    def call_s3(self, method, Bucket, Prefix, KeyMarker="", UploadIdMarker=""):
        assert (method, Bucket) == ("list_multipart_uploads", "bucket")
        if self.error is not None:
            raise self.error
        found = sorted(key for key in self.keys if key.startswith(Prefix) and key > KeyMarker)
        more = {"IsTruncated": True, "NextKeyMarker": found[1], "NextUploadIdMarker": "id"} if len(found) > 2 else {}
        return {"Uploads": [{"Key": key, "UploadId": "id"} for key in found[:2]], **more}

    def abort_mpu(self, bucket, key, upload):
        self.keys.remove(key)


def test_uploads_that_were_left_are_aborted_on_every_page_and_others_are_not(caplog):
    others = ["runs/c/x.bin", "runs/c/z/training_state.safetensors", "runs/c2/training_state.safetensors"]
    mine = ["runs/c/training_state-g0.safetensors"]
    mine += [f"runs/c/{inside}/rank_0{n}-g0.safetensors" for inside in ("optimizer", "plugin") for n in range(3)]
    store = Uploads([*mine, *others], None)
    RemotePath("s3://bucket/runs/c", store).abort_uploads(is_of_a_save)
    assert sorted(store.keys) == sorted(others)
    store.error = PermissionError("denied")
    RemotePath("s3://bucket/runs/c", store).abort_uploads(is_of_a_save)  # what was asked for is saved
    assert "s3:ListBucketMultipartUploads" in caplog.text
    store.error = OSError("the network is down")
    with pytest.raises(CheckpointError, match="the network is down"):
        RemotePath("s3://bucket/runs/c", store).abort_uploads(is_of_a_save)
    RemotePath("objects://bucket/runs/c", store).abort_uploads(is_of_a_save)  # has no such requests

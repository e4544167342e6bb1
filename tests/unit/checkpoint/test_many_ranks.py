"""What a rank does to load a checkpoint does not grow with the number of ranks that wrote it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from benchmarks.ranks import Model, checkpoint
from benchmarks.world import play
from neuron_accel.checkpoint.format.files import checksums_of
from neuron_accel.checkpoint.format.index import INDEX
from neuron_accel.checkpoint.format.manifest import NAME, read_manifest
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.strategies.fully_sharded.plugin import FullyShardedPlugin


def test_no_count_grows_by_more_than_the_logarithm_of_the_number_of_ranks(tmp_path):
    model, found = Model(layers=12), {}
    for ranks in (8, 512):
        (folder := tmp_path / str(ranks)).mkdir()
        found[ranks] = checkpoint(model, ranks, folder)
    few, many = found[8], found[512]
    growth = math.log(512) / math.log(8)
    for name in ("opens", "stats", "index_bytes", "objects", "received"):
        assert getattr(many, name) <= growth * getattr(few, name), name
    assert many.chunks > 20 * few.chunks  # what the headers would say


def test_an_index_that_says_something_else_than_the_files_is_found(tmp_path):
    play(lambda: [FullyShardedPlugin(modules="*")], 2, tmp_path)
    folder = tmp_path / "checkpoint"
    assert verify(folder) == []
    path = folder / read_manifest(folder).of_kind(INDEX)[0]
    body = json.loads(path.read_bytes())
    row = next(row for row in body["tensors"] if row[1]["collection"].startswith("model") and row[2][0][5])
    row[2][0][5] = 0  # the offset of another tensor in the same file
    path.write_text(json.dumps(body))
    manifest, contents = read_manifest(folder), path.read_bytes()
    entry = replace(manifest.files[path.name], size=len(contents), checksums=checksums_of(contents))
    (folder / NAME).write_bytes(replace(manifest, files={**manifest.files, path.name: entry}).to_bytes())
    assert verify(folder) == [f"The index says of {row[1]['name']!r} in model.0 what the headers of the files do not."]

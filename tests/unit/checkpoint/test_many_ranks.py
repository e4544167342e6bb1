"""What a rank does to load a checkpoint does not grow with the number of ranks that wrote it."""

from __future__ import annotations

import math

from benchmarks.ranks import Model, checkpoint


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

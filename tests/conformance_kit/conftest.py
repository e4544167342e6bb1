"""Which checks of the built-in plugins, and of those of the examples, every run makes. The others (`pytest -m slow`)
repeat what tests/distributed and tests/xla compare in more depth."""

from __future__ import annotations

import sys

import pytest

from tests.packages import ROOT

sys.path.insert(0, str(ROOT / "examples" / "own_plugin"))  # what test_cookbook.py tries

WHOLE = ("TestZero1", "TestSequenceParallel")
"""A plugin without axes, and one that needs another beside it, go through everything on gloo ranks."""

FORM = ("test_is_", "test_keeps_the_form", "test_configuration", "test_plan")
ON_XLA = {"TestZero1": ("alone", "frozen", "resumes"), "TestSequenceParallel": ("zero1",)}

COOKBOOK = {
    "TestGradientNoise": ("tp2-sp-gloo",),
    "TestWeightAverage": ("leaves_nothing",),
    "TestBlockRates": ("[tp2-zero1-gloo",),
    "TestBF16Gradients": ("[zero1-gloo", "[alone-xla"),
    "TestFreezingSchedule": ("[tp2-zero1-gloo", "resumes[gloo"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in ("test_built_in.py", "test_cookbook.py") and item.cls is not None and not _always(item):
            item.add_marker(pytest.mark.slow)


def _always(item) -> bool:
    plugin, backend = item.cls.__name__, getattr(item, "callspec", None) and item.callspec.params.get("backend")
    if plugin in COOKBOOK:
        return item.originalname.startswith(FORM) or any(part in item.name for part in COOKBOOK[plugin])
    if backend == "xla":
        return any(part in item.name for part in ON_XLA.get(plugin, ()))
    if plugin == "TestFullySharded" and item.originalname == "test_keeps_its_promises":
        return True  # the one owner that shards weights
    return plugin in WHOLE or item.name.startswith(FORM)

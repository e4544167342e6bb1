"""Which checks of the built-in plugins every run makes. The others (`pytest -m slow`) repeat what tests/distributed and
tests/xla compare in more depth."""

from __future__ import annotations

import pytest

WHOLE = ("TestZero1", "TestSequenceParallel")
"""A plugin without axes, and one that needs another beside it, go through everything on gloo ranks."""

FORM = ("test_is_", "test_keeps_the_form", "test_configuration", "test_plan")
ON_XLA = {"TestZero1": ("alone", "frozen", "resumes"), "TestSequenceParallel": ("zero1",)}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name == "test_built_in.py" and not _always(item):
            item.add_marker(pytest.mark.slow)


def _always(item) -> bool:
    plugin, backend = item.cls.__name__, getattr(item, "callspec", None) and item.callspec.params.get("backend")
    if backend == "xla":
        return any(part in item.name for part in ON_XLA.get(plugin, ()))
    return plugin in WHOLE or item.name.startswith(FORM)

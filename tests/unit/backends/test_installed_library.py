"""What connects CPU ranks: gloo, or the backend of torch.distributed of an installed package."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from neuron_accel.backends import process_group
from neuron_accel.errors import ConfigurationError


@pytest.fixture
def installed(monkeypatch):
    """Installs packages: name of a backend to its module."""

    def install(**modules):
        points = tuple(EntryPoint(name, value, process_group.TRANSPORTS) for name, value in modules.items())
        monkeypatch.setattr(process_group, "entry_points", lambda group: points)

    return install


def test_is_gloo_where_nothing_is_installed(installed):
    installed()
    assert process_group.installed_library() == "gloo"


def test_is_that_of_a_package_which_is_imported(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_ranks", types.ModuleType("fast_ranks"))
    installed(fast="fast_ranks")
    assert process_group.installed_library() == "fast"


def test_a_package_that_cannot_be_imported_is_named(installed):
    installed(fast="no_such_module")
    with pytest.raises(ConfigurationError, match="cannot be imported: No module named 'no_such_module'"):
        process_group.installed_library()


def test_several_packages_are_refused(installed):
    installed(fast="one", faster="another")
    with pytest.raises(ConfigurationError, match=r"fast \(one\), faster \(another\)"):
        process_group.installed_library()

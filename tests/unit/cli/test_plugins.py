"""The table of plugins, including those that cannot be loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from neuron_accel.cli.main import main
from neuron_accel.cli.plugins import describe, format_plugins
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec
from neuron_accel.engine.plan.plugin import API_VERSION, Claim, Phase, PluginSpec, StrategyPlugin
from neuron_accel.engine.plan.registry import PluginEntry


@dataclass(frozen=True, kw_only=True)
class Rings(StrategyPlugin):
    degree: int = 2
    spec: ClassVar[PluginSpec] = PluginSpec(
        name="rings",
        api_version=4,
        phase=Phase.ACTIVATIONS,
        claims=frozenset({Claim.BACKWARD}),
        requires=frozenset({"axis:tp"}),
    )

    def axes(self):
        return (AxisSpec(name="cp", degree=self.degree, kind=AxisKind.SEQUENCE),)


@dataclass(frozen=True, kw_only=True)
class NeedsOptions(StrategyPlugin):
    degree: int
    spec: ClassVar[PluginSpec] = PluginSpec(name="needs_options", api_version=4, phase=Phase.LAYOUT)


def entry(name, value, **changes):
    return PluginEntry(name=name, value=value, distribution="some-plugins", version="3.1", **changes)


def test_a_plugin_is_described_by_what_it_declares():
    shown = describe(entry("rings", f"{__name__}:Rings", loaded=Rings))
    assert shown["error"] is None
    assert (shown["phase"], shown["axes"]) == ("activations", ["cp"])
    assert (shown["claims"], shown["requires"]) == (["backward"], ["axis:tp"])
    assert (shown["distribution"], shown["version"]) == ("some-plugins", "3.1")
    assert shown["contract"] == API_VERSION


@dataclass(frozen=True, kw_only=True)
class Towers(StrategyPlugin):
    """A plugin with an axis, and optionally a companion with another axis."""

    storeys: int = 1
    spec: ClassVar[PluginSpec] = PluginSpec(name="towers", api_version=4, phase=Phase.LAYOUT)

    def axes(self):
        return (AxisSpec(name="tp", degree=2, kind=AxisKind.MODEL),)

    def companions(self):
        return (Rings(degree=self.storeys),) if self.storeys > 1 else ()


def test_axes_that_come_with_an_option_are_known():
    assert describe(entry("towers", f"{__name__}:Towers", loaded=Towers))["axes"] == ["tp", "cp"]


def test_the_table_becomes_paragraphs_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plugins"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search(r"model_parallelism .*\n(?:  .*\n)*  axes +tp, pp\n", narrow)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plugins"]) == 0
    wide = capsys.readouterr().out
    assert wide.startswith("name ")
    assert set(re.findall(r"[\w:]{5,}", wide.partition("\n")[2])) <= set(re.findall(r"[\w:]{5,}", narrow))


def test_axes_of_a_plugin_that_cannot_be_made_without_options_are_unknown():
    assert describe(entry("needs_options", f"{__name__}:NeedsOptions", loaded=NeedsOptions))["axes"] is None


def test_a_broken_plugin_is_listed_with_the_reason():
    plugins = [
        describe(entry("broken", "no_such_package.at_all:Plugin")),
        describe(entry("rings", f"{__name__}:Rings", loaded=Rings, disabled=True)),
    ]
    text = format_plugins(plugins)
    rows = text.splitlines()
    assert rows[2].split()[:4] == ["broken", "3.1", "some-plugins", "-"]
    assert rows[3].startswith("rings (disabled)")
    assert "no_such_package" in text.partition("cannot be loaded:")[2]


def test_the_command_lists_the_built_in_plugins(capsys):
    main(["plugins", "--json"])
    plugins = {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)}
    assert {"data_parallel", "zero1", "model_parallelism", "sequence_parallel"} <= set(plugins)
    assert plugins["zero1"]["distribution"] == "neuron-accel"


@dataclass(frozen=True, kw_only=True)
class Crashing(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(name="crashing", api_version=4, phase=Phase.LAYOUT)

    def axes(self):
        return 1 // 0


def test_a_plugin_that_crashes_when_it_is_made_is_listed_with_the_reason():
    shown = describe(entry("crashing", f"{__name__}:Crashing", loaded=Crashing))
    assert "ZeroDivisionError" in shown["error"]
    assert "some-plugins 3.1" in shown["error"]


def test_what_takes_the_name_of_another_is_reported(tmp_path, monkeypatch, capsys):
    info = tmp_path / "greedy-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[neuron_accel.plugins]\nzero1 = greedy_package:Zero1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plugins"]) == 1
    output = capsys.readouterr().out
    assert "'zero1' of greedy 3.1 is left out: neuron-accel has a plugin of that name" in output
    assert main(["plugins", "--json"]) == 1
    rows = [plugin for plugin in json.loads(capsys.readouterr().out) if plugin["name"] == "zero1"]
    assert [row["distribution"] for row in rows] == ["neuron-accel"]


def test_no_plugin_at_all_is_said_in_words():
    assert format_plugins([]) == "no plugin is installed"

"""The pictures of the documentation are those of the code: drawn anew they are the same, and so are their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures import charts, screens
from docs.figures.__main__ import FIGURES, IMAGES
from neuron_accel.contract import Claim, Phase
from neuron_accel.testing import run_ranks

DOCUMENTS = [*Path(__file__).parents[2].glob("docs/**/*.md"), Path(__file__).parents[2] / "README.md"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_current(name):
    drawn = FIGURES[name]().svg()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "draw the pictures anew: python -m docs.figures"
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_shown(name):
    assert any(f"images/{name}.svg)" in document.read_text() for document in DOCUMENTS)


def test_pictures_show_every_phase_and_responsibility():
    phases, owners = (FIGURES[name]().svg() for name in ("phases", "owners"))
    assert [phase.name for phase in Phase if f">{phase.name.lower()}<" not in phases] == []
    assert [claim.name for claim in Claim if f">{claim.value.replace('_', ' ')}<" not in owners] == []


def test_memory_is_what_dry_runs_count(monkeypatch):
    pytest.importorskip("neuron_accel_plan")
    some = ("fully sharded, recomputation", "tensor 8, ZeRO-1, recomputation")
    chosen = {name: plugins for name, plugins in charts.strategies().items() if name in some}
    monkeypatch.setattr(charts, "strategies", lambda: chosen)
    shown = charts.read("memory")
    for name, parts in charts.count_memory().items():
        assert sum(parts.values()) == pytest.approx(sum(shown[name].values()), rel=0.03), "docs.figures --count"
    assert len(chosen) == len(some)


def test_the_timeline_is_what_is_predicted():
    pytest.importorskip("neuron_accel_plan")
    shown, predicted = charts.read("timeline"), charts.predict_step()
    assert shown["seconds"] == pytest.approx(predicted["seconds"], rel=0.03), "docs.figures --count"
    assert {span[1] for span in shown["spans"]} == {span[1] for span in predicted["spans"]}


def test_losses_are_those_of_a_run():
    name, shown = "tensor and sequence 2, ZeRO-1 over 2", charts.read("loss")
    losses = run_ranks(charts.train, 4, name, 3)[0]
    assert losses == pytest.approx(shown[name][:3], rel=1e-4), "docs.figures --train"


def test_sharding_does_not_change_the_loss_that_is_shown():
    reference, *others = charts.read("loss").values()
    assert len(reference) == charts.STEPS
    assert reference[-1] < reference[0] / 2
    for losses in others:
        assert losses == pytest.approx(reference, rel=2e-5)
        assert losses != reference  # other runs, not copies


def test_the_terminal_that_is_shown_is_that_of_the_command(tmp_path):
    pytest.importorskip("neuron_accel_plan")
    shown = json.loads((screens.FOLDER / "screens.json").read_text())
    assert shown["plan"] == screens.plan(tmp_path), "docs.figures --report"


@pytest.mark.parametrize("name", screens.PAGES)
def test_a_screenshot_is_small_and_shown(name):
    path = IMAGES / f"{name}.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 150_000
    assert any(f"images/{name}.png)" in document.read_text() for document in DOCUMENTS)

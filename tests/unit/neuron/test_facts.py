"""Each fact about Trainium names a public source and its date, and the documentation tells the same."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from neuron_accel.neuron.facts import FACTS, SDK

ROOT = Path(__file__).parents[3]
TABLES = ("partitions", "releases", "support", "images", "instances", "flags", "variables")
ROWS = [("sdk", FACTS["sdk"]), *((table, row) for table in TABLES for row in FACTS[table])]


def test_each_fact_has_a_source_with_an_address_and_a_date():
    for table, row in ROWS:
        source = FACTS["sources"][row["source"]]
        assert source["url"].startswith("https://"), (table, row)
        assert datetime.date.fromisoformat(source["date"]) >= datetime.date(2025, 1, 1), (table, row)
    assert {row["source"] for _, row in ROWS} == set(FACTS["sources"])


def test_no_source_is_newer_than_the_release_that_this_is_written_for_by_more_than_a_month():
    release = datetime.date.fromisoformat(FACTS["sdk"]["date"])
    for name, source in FACTS["sources"].items():
        assert datetime.date.fromisoformat(source["date"]) - release < datetime.timedelta(days=31), name


def test_rows_are_named_once():
    for table in ("instances", "flags", "variables"):
        names = [row["name"] for row in FACTS[table]]
        assert len(names) == len(set(names)), table


@pytest.mark.parametrize("row", FACTS["releases"], ids=lambda row: row["torch"])
def test_constraints_and_guide_say_what_a_release_runs_on(row):
    name = "xla" if row["path"] == "xla" else f"native-{row['torch']}"
    constraints = " ".join((ROOT / "constraints" / f"{name}.txt").read_text().replace("#", "").split())
    guide = (ROOT / "docs/guides/what-runs-where.md").read_text()
    assert f"torch=={row['torch']}.*" in constraints
    pins = {line.partition("==")[0]: line.partition("==")[2] for line in constraints.split() if "==" in line}
    exact = row["path"] == "xla"  # as AWS pins it: newer compilers have other defaults
    assert pins["torch-neuronx"] == (row["torch-neuronx"] if exact else f"{row['torch-neuronx'][: len('2.13.3')]}.*")
    assert pins.get("neuronx-cc") == (row["neuronx-cc"] if exact else None)
    for said in (f"SDK {row['sdk']}", f"Python {row['python']}", row["system"]):
        assert said in constraints
    families = ", ".join(name.capitalize() for name in row["families"])
    path = "torch_xla" if row["path"] == "xla" else "native device"
    assert f"| {row['torch']} | {path} | {families} | {row['sdk']} | {row['python']} | {row['system']} |" in guide


@pytest.mark.parametrize("row", FACTS["images"], ids=lambda row: row["path"])
def test_the_guide_takes_images_by_name(row):
    guide = (ROOT / "docs/guides/from-an-empty-account.md").read_text()
    assert row["image"] in guide
    assert row["environment"] in guide
    assert any(row["torch"] == release["torch"] for release in FACTS["releases"])


def test_pages_of_the_xla_path_say_that_its_support_has_ended():
    ended = next(row["ends"] for row in FACTS["support"] if row["path"] == "xla")
    for name in ("README.md", "docs/xla.md", "docs/guides/what-runs-where.md", "constraints/xla.txt"):
        assert f"since SDK {ended}" in " ".join((ROOT / name).read_text().replace("#", "").split()), name


def test_the_guide_names_the_release():
    assert f"SDK {SDK}" in (ROOT / "docs/guides/what-runs-where.md").read_text()

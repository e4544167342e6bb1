"""The site is built without a warning, and opened page by page in a browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_browser
from tests.docs.site import dead_links, pages, seen_in_a_browser

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra docs)")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [*build, "docs", str(folder / "html")], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_no_link_of_the_site_is_dead(site):
    assert len(pages(site)) > 35
    assert [*dead_links(site)] == []


@needs_browser
def test_no_page_of_the_site_has_an_error(site):
    assert [*seen_in_a_browser(site)] == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#no">x</a><img src="no.png"><a href="../up.html">y</a><a href="#in">'
    )
    (tmp_path / "b.html").write_text('<p id="in"></p><a href="a.html">x</a><a href="https://example.org/no">y</a>')
    assert [each.split(": ")[1] for each in dead_links(tmp_path)] == [
        "b.html#no has no such anchor",
        "no.png does not exist",
        "../up.html is outside of the site",
        "#in has no such anchor",
    ]


@needs_browser
def test_errors_of_a_page_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<link rel="icon" href="data:,"><img src="no.png"><script>missing.thing()</script>'
    )
    found = [*seen_in_a_browser(tmp_path)]
    assert "a.html: the image no.png does not load" in found
    assert any("missing is not defined" in each for each in found)

"""The site is built without a warning, and opened page by page in a browser."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser import browser, needs_browser, resize
from tests.docs.site import dead_links, pages, seen_in_a_browser

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra docs)")
    for name in ("neuron_accel_report", "neuron_accel_plan", "neuron_accel_emulation"):
        pytest.importorskip(name, reason="the reference describes it, too")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    done = subprocess.run([*build, "docs", str(folder / "html")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_no_link_of_the_site_is_dead(site):
    assert len(pages(site)) > 35
    assert [*dead_links(site)] == []


MESSAGES = {
    "errors": [
        "A global batch of … samples cannot be split evenly",
        "Data-parallel ranks do not make the same calls",
        "The checkpoint has",
        "--budget is",
        "'plugins' must be a list",
    ],
    "guides/troubleshooting": ["NCC_EOOM001", "NRT_TIMEOUT", "Address already in use"],
}


@pytest.mark.parametrize("page", MESSAGES)
def test_errors_are_found_by_their_text(page, site):
    """On the page, and its words in the index of the search."""
    shown = re.sub(r"<[^>]+>", "", (site / f"{page}.html").read_text())
    assert [message for message in MESSAGES[page] if message not in shown] == []
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    number = index["docnames"].index(page)
    terms = [
        word for word, pages in index["terms"].items() if number in (pages if isinstance(pages, list) else [pages])
    ]
    assert {"errors": "micro", "guides/troubleshooting": "nrt_timeout"}[page] in terms


@needs_browser
def test_the_search_finds_messages_of_errors(site):
    """As they are printed, with values in the place of gaps: the page that explains them is the first result."""
    printed = {
        "A global batch of 6 samples cannot be split evenly": "errors.html",
        "Data-parallel ranks do not make the same calls": "errors.html",
        "The optimizer cannot step while the loop writes to the full weights": "errors.html",
        "NCC_EOOM001": "guides/troubleshooting.html",
        "There is no schedule zbh.": "errors.html",
        "No plan is known for the model type 'ctrl'": "errors.html",
        "NRT_TIMEOUT": "guides/troubleshooting.html",
        "NCC_EVRF001": "guides/troubleshooting.html",
        "out of memory": "guides/troubleshooting.html",
    }
    results = "return [...document.querySelectorAll('#search-results li > a')].map(a => a.getAttribute('href'))"
    found = {}
    with browser() as driver:
        for message in printed:
            driver.get(f"{(site / 'search.html').as_uri()}?q={quote(message)}")
            deadline = time.monotonic() + 20
            while not (first := driver.execute_script(results)[:1]) and time.monotonic() < deadline:
                time.sleep(0.1)
            found[message] = first[0].split("#")[0] if first else None
    assert found == printed


@needs_browser
def test_no_page_of_the_site_has_an_error(site):
    assert [*seen_in_a_browser(site)] == []


@needs_browser
@pytest.mark.parametrize("page", ["index", "recipes", "tutorial", "guides/run-report", "guides/from-accelerate"])
def test_code_of_first_pages_fits_at_1280_pixels_and_figures_of_phones_are_legible(page, site):
    with browser() as driver:
        resize(driver, 1280, 900)
        driver.get((site / f"{page}.html").as_uri())
        code = "return [...document.querySelectorAll('div[class^=highlight] pre')]"
        cut = f"{code}.filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText)"
        assert driver.execute_script(cut) == []
        assert driver.execute_script(f"{code}.every(code => code.parentNode.querySelector('button.copybtn'))")
        resize(driver, 400, 900)
        figures = driver.execute_script("return [...document.querySelectorAll('article p > img')].map(i => i.width)")
        window = driver.execute_script("return document.documentElement.scrollWidth")
        assert window == 400
        assert all(width >= 950 for width in figures)


# ---- the reference ---------------------------------------------------------------------------------------------------
LISTS = ("Parameters", "Keyword Arguments", "Variables")


def entries(site: Path) -> Iterator[tuple[str, Any]]:
    """The documented classes, functions and members: module and name, and their part of the page."""
    from sphinx import addnodes

    for page in ("api", "contract", "errors"):
        tree = pickle.loads((site.parent / "doctrees" / f"{page}.doctree").read_bytes())
        for entry in tree.findall(addnodes.desc):
            if entry[0].get("module"):
                yield f"{entry[0]['module']}:{entry[0]['fullname']}", entry


def doubled(entry: Any) -> list[str]:
    """Parameters that an entry lists twice, or lists and describes once more as members."""
    from docutils import nodes
    from sphinx import addnodes

    content = entry[-1]
    fields = [field for each in content if isinstance(each, nodes.field_list) for field in each]
    names = [
        name.astext()
        for field in fields
        if field[0].astext() in LISTS
        for name in field.findall(addnodes.literal_strong)
    ]
    names += [each[0]["fullname"].rpartition(".")[2] for each in content if isinstance(each, addnodes.desc)]
    return [name for name, count in Counter(names).items() if count > 1]


def text_of_others(name: str) -> str | None:
    """The class outside of this project whose docstring is that of a class or a method; None if it has its own."""
    module, _, path = name.partition(":")
    owner, value = None, importlib.import_module(module)
    for part in path.split("."):
        owner, value = value, getattr(value, part, None)
    leaf = path.rpartition(".")[2]
    if inspect.isclass(value):
        own, others = value.__doc__, [(base, base.__doc__) for base in value.__mro__[1:]]
    elif inspect.isclass(owner) and leaf in vars(owner):
        own = getattr(inspect.getattr_static(owner, leaf), "__doc__", None)
        others = [
            (base, getattr(vars(base)[leaf], "__doc__", None)) for base in owner.__mro__[1:] if leaf in vars(base)
        ]
    else:
        return None
    texts = [
        (base, text)
        for base, text in others
        if text and (own is None or inspect.cleandoc(own) == inspect.cleandoc(text))
    ]
    foreign = [base for base, _ in texts if not base.__module__.startswith("neuron_accel")]
    return foreign[0].__qualname__ if foreign and foreign[0] is texts[0][0] else None


def test_the_reference_lists_each_parameter_once(site):
    found = {name: names for name, entry in entries(site) if (names := doubled(entry))}
    assert found == {}
    assert sum(1 for _ in entries(site)) > 400


def test_the_reference_has_no_text_of_other_libraries(site):
    found = {name: text_of_others(name) for name, _ in entries(site)}
    assert {name: base for name, base in found.items() if base is not None} == {}


def test_doubled_parameters_are_found():
    from docutils import nodes
    from sphinx import addnodes

    def field(title, *names):
        return nodes.field(
            "", nodes.field_name("", title), nodes.field_body("", *(addnodes.literal_strong("", n) for n in names))
        )

    member = addnodes.desc("", addnodes.desc_signature("", "", fullname="Cls.b"), addnodes.desc_content())
    lists = nodes.field_list("", field("Parameters", "a", "b", "a"), field("Raises", "c", "c"))
    entry = addnodes.desc("", addnodes.desc_signature("", "", fullname="Cls"), addnodes.desc_content("", lists, member))
    assert doubled(entry) == ["a", "b"]


def test_texts_of_other_libraries_are_found(monkeypatch):
    import torch

    from neuron_accel.contract.sharded import ShardedOptimizer

    assert text_of_others("neuron_accel.contract.sharded:ShardedOptimizer.step") is None
    monkeypatch.setattr(ShardedOptimizer.step, "__doc__", torch.optim.Optimizer.step.__doc__)
    assert text_of_others("neuron_accel.contract.sharded:ShardedOptimizer.step") == "Optimizer"


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

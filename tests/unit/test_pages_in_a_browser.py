"""The pages that this package writes, opened in a browser: nothing on the console, every chart with its points, text of
files as text, on a phone, in dark colours and in print."""

from __future__ import annotations

import json
import re

import pytest

from tests.browser import browser, complaints, missing, needs_browser, resize, scheme
from tests.guests import helper

page = pytest.importorskip("neuron_accel_report.page").page
several = pytest.importorskip("neuron_accel_report.summary").several
html_report = pytest.importorskip("neuron_accel_plan.report").html_report
entry = helper("neuron-accel-plan", "test_plan_report").entry
made_up = helper("neuron-accel-report", "report_made_up")
late, write_run = made_up.late, made_up.write_run
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"

pytestmark = needs_browser
if missing() is None:
    from selenium.webdriver import ActionChains


@pytest.fixture(scope="module")
def driver():
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A page of a run with a late rank, one of two runs, one of a run whose files are hostile, one of layouts."""
    folder = tmp_path_factory.mktemp("pages")
    first = write_run(folder / "first", change=late(2, 37))
    second = write_run(folder / "second", steps=50, speed=1.4)
    hostile = write_run(folder / "hostile", plugins=("zero1", EVIL), host=EVIL, change=late(1, 5))
    pages = {
        "one": page(several([first])),
        "two": page(several([first, second])),
        "hostile": page(several([hostile])),
        "plan": html_report([entry(EVIL), entry("dp4", gib=2, seconds=1.0)]),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture(autouse=True)
def as_usual(driver):
    resize(driver, 1200, 900)
    scheme(driver, "light")


def drawn(driver):
    """Of each chart what it is called, and the number of points of its lines or areas."""
    return driver.execute_script(
        """const points = e => e.getAttribute("points").trim().split(" ").length;
           return Object.fromEntries([...document.querySelectorAll("figure")].map(figure => [
             figure.querySelector("svg").getAttribute("aria-label"),
             [...figure.querySelectorAll("[data-points]")].map(points)]))"""
    )


def move(driver, title, share, top=60):
    """Moves the pointer over a chart; returns what it says there."""
    (figure,) = [f for f in driver.find_elements("tag name", "figure") if f.get_attribute("aria-label") == title]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    svg = figure.find_element("tag name", "svg")
    left = 66 + share * (svg.size["width"] - 66 - 14)
    half = svg.size["width"] / 2, svg.size["height"] / 2
    ActionChains(driver).move_to_element_with_offset(svg, int(left - half[0]), int(top - half[1])).perform()
    return figure.find_element("class name", "tip").text


def test_every_chart_has_a_point_for_each_step(driver, reports):
    driver.get(reports["one"])
    assert complaints(driver) == []
    found = drawn(driver)
    for title in ("Loss", "Throughput", "Time of a step", "Memory of the device", "Gradient norm", "Learning rate"):
        assert found[title] == [60], title
    assert found["Parts of a step: first"] == [4 * 60] * 6  # both edges of a step, above and below
    driver.get(reports["two"])
    assert complaints(driver) == []
    assert drawn(driver)["Loss"] == [60, 50]
    assert {"Parts of a step: first", "Parts of a step: second"} <= set(drawn(driver))


def test_charts_are_there_when_the_page_is_loaded(driver, reports):
    """An observer of their size draws them again, if it changes; it is called later."""
    nothing = "window.ResizeObserver = class { observe() {} }"
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": nothing})
    try:
        driver.get(reports["one"])
        assert drawn(driver)["Loss"] == [60]
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_the_map_names_the_late_rank(driver, reports):
    driver.get(reports["one"])
    labels = driver.find_elements("css selector", "svg text.late")
    assert [label.text for label in labels] == ["\u25b6 rank 2"]
    said = move(driver, "Ranks by step: first", 37.5 / 60, top=10 + 2.5 * 22)
    assert re.fullmatch(r"rank 2, step 37\nbusy (49|50)\.?\d* ms longer than the median rank", said)
    said = move(driver, "Ranks by step: first", 20.5 / 60, top=10 + 3.5 * 22)
    assert said.startswith("rank 3, step 20\n")


def test_values_are_shown_under_the_pointer_and_by_keys(driver, reports):
    driver.get(reports["two"])
    said = move(driver, "Time of a step", 20 / 59)
    assert re.fullmatch(r"step 20\nfirst: 125\.?\d* ms\nsecond: \d+\.?\d* ms", said)
    crosses = driver.find_elements("css selector", ".cross[visibility=visible]")
    assert len(crosses) == len(driver.find_elements("tag name", "figure"))
    said = move(driver, "Parts of a step: first", 20.5 / 60)
    assert said.split("\n")[0].startswith("step 20: 125")
    assert {line.split(":")[0] for line in said.split("\n")[1:]} >= {"loader", "forward", "backward", "communication"}
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    figure = driver.find_element("tag name", "figure")
    figure.send_keys("\ue014\ue014\ue014")  # the right arrow
    assert figure.find_element("class name", "tip").text.startswith("step 3\n")


def test_runs_are_hidden_by_their_button_and_a_scale_can_be_logarithmic(driver, reports):
    driver.get(reports["two"])
    before = driver.find_element("css selector", "polyline").get_attribute("points")
    driver.find_element("css selector", "input[type=checkbox]").click()
    assert driver.find_element("css selector", "polyline").get_attribute("points") != before
    button = driver.find_element("css selector", 'button[data-run="0"]')
    button.click()
    assert drawn(driver)["Loss"] == [50]
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert drawn(driver)["Loss"] == [60, 50]


def test_a_loss_can_be_smoothed_and_drawn_by_time_and_tokens(driver, reports):
    """Other charts, which are drawn by steps, do not follow the pointer then."""
    driver.get(reports["two"])
    figure = driver.find_element("tag name", "figure")
    lines = "return [...arguments[0].querySelectorAll('polyline')].map(line => line.getAttribute('points'))"
    before = driver.execute_script(lines, figure)
    figure.find_element("name", "smooth").click()
    both = driver.execute_script(lines, figure)
    assert both[:2] == before
    assert not set(both[2:]) & set(before)
    figure.find_element("name", "smooth").click()
    axis = "return [...arguments[0].querySelectorAll('text')].at(-1).textContent"
    for by, said in (("time", r"step \d+, [0-9.]+ (s|min|h)"), ("tokens of a rank", r"step \d+, [0-9.]+ k? ?tokens")):
        figure.find_element("xpath", f".//option[.='{by}']").click()
        assert driver.execute_script(axis, figure) == by
        assert driver.execute_script(lines, figure) != before
        text = move(driver, "Loss", 0.5)
        assert re.match(said, text.split("\n")[0]), text
        seen = "return document.querySelectorAll('.cross[visibility=visible]').length"
        assert driver.execute_script(seen) == 1
    assert complaints(driver) == []


@pytest.mark.parametrize("name", ["hostile", "plan"])
def test_text_of_a_file_is_shown_and_not_run(name, driver, reports):
    driver.get(reports[name])
    assert complaints(driver) == []  # an image that is not found would be here, too
    assert EVIL in driver.find_element("tag name", "body").text
    assert "taken" not in driver.title.split("<")[0]
    assert driver.execute_script("return document.scripts.length") == (0 if name == "plan" else 2)
    assert driver.execute_script("return document.images.length") == 0


def test_a_script_that_is_not_the_page_s_own_is_refused(driver, reports, tmp_path):
    """The policy of the page is a second lock, should a string ever be written without its escapes."""
    import urllib.request

    text = urllib.request.urlopen(reports["one"]).read().decode()
    broken = text.replace("<h1>", "<script>document.title = 'taken'</script><h1>", 1)
    (tmp_path / "broken.html").write_text(broken)
    driver.get((tmp_path / "broken.html").as_uri())
    assert driver.title == "Run report: first"
    assert any("Content Security Policy" in each for each in complaints(driver))


@pytest.mark.parametrize("name", ["one", "two", "plan"])
def test_a_page_fits_a_phone_and_follows_the_scheme(name, driver, reports):
    resize(driver, 375, 740)
    driver.get(reports[name])
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 375
    colours = (
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor].map(c => c.match(/\\d+/g)[0])"
    )
    light = [int(value) for value in driver.execute_script(colours)]
    scheme(driver, "dark")
    dark = [int(value) for value in driver.execute_script(colours)]
    assert light[0] < 60 < 200 < light[1]
    assert dark[1] < 60 < 200 < dark[0]


def test_paper_is_white_also_where_the_screen_is_dark(driver, reports):
    driver.get(reports["one"])
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert json.loads(colour.replace("rgb(", "[").replace(")", "]")) == [255, 255, 255]
    paper = driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(paper["data"]) > 10_000

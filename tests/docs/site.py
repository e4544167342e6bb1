"""Opens every page of the built site in a browser: ``python -m tests.docs.site docs/_build/html``.

A page is right if the console says nothing, its images load, and its links within the site, with their anchors, lead
somewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.browser import browser, complaints, missing

BROKEN_IMAGES = """
const late = [...document.images].filter(image => !image.complete);
late.forEach(image => image.loading = "eager");
return Promise.all(late.map(image => new Promise(done => { image.onload = image.onerror = done; }))).then(
  () => [...document.images].filter(image => !image.naturalWidth).map(image => image.getAttribute("src")));
"""


class Page(HTMLParser):
    """What a page can be linked by, and what it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag != "link" or found.get("rel") == "stylesheet":
            self.targets += [value for name in ("href", "src") if (value := found.get(name))]


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def dead_links(site: Path) -> Iterator[str]:
    """Links of pages that lead nowhere in the site."""
    site = site.resolve()
    read = {path.resolve(): Page(path) for path in pages(site)}
    for path, page in read.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if to != site and site not in to.parents:
                yield f"{path.relative_to(site)}: {target} is outside of the site"
            elif not to.exists():
                yield f"{path.relative_to(site)}: {target} does not exist"
            elif to in read and unquote(parts.fragment) not in read[to].anchors:
                yield f"{path.relative_to(site)}: {target} has no such anchor"


def seen_in_a_browser(site: Path) -> Iterator[str]:
    """What a browser complains about: errors on the console, images that do not load."""
    with browser() as driver:
        for path in pages(site):
            driver.get(path.resolve().as_uri())
            for image in driver.execute_script(BROKEN_IMAGES):
                yield f"{path.relative_to(site)}: the image {image} does not load"
            for complaint in complaints(driver):
                yield f"{path.relative_to(site)}: {complaint}"


def main(folder: str) -> int:
    site = Path(folder)
    found = [*dead_links(site)]
    without = missing()
    if without is None:
        found += seen_in_a_browser(site)
    else:
        print(f"pages were not opened in a browser: {without}")
    print("\n".join(found) or f"{len(pages(site))} pages: no dead link" + ("" if without else ", no error"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

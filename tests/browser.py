"""A browser for tests: Chromium without a window, driven by selenium, with an empty profile and without a network.

Where Chromium or its driver is missing, tests that need it are skipped, and say so. On Debian:
``apt-get install chromium chromium-driver``.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def missing() -> str | None:
    """What of a browser is missing here; None if nothing is."""
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium on this machine (Debian: apt-get install chromium chromium-driver)"
    if shutil.which("chromedriver") is None:
        return "Chromium's driver is missing (Debian: apt-get install chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    return None


needs_browser = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@contextlib.contextmanager
def browser(width: int = 1200, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """Gives a selenium driver; the browser ends with the context.

    Args:
        width, height: of the window, in pixels.
        dark: whether pages are asked for dark colours.
    """
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, NAMES)))
        for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(90)
            resize(driver, width, height)
            scheme(driver, "dark" if dark else "light")
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Makes the page as large as is asked for, also narrower than a window can be."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(driver: Any, name: str) -> None:
    """Asks pages for ``"light"`` or ``"dark"`` colours."""
    feature = {"name": "prefers-color-scheme", "value": name}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def complaints(driver: Any) -> list[str]:
    """What the console says since the last call: errors of scripts, what a policy blocked, what could not be loaded."""
    return [f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")]


def screenshot(driver: Any, path: Path, *, full: bool = True) -> None:
    """Writes the page as PNG; with ``full`` all of it, not only what the window shows."""
    import base64

    data = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": full})
    path.write_bytes(base64.b64decode(data["data"]))

"""Synthetic experiments and a browser for the tests of reports and dashboard."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def _load_fixtures() -> ModuleType:
    name = "fedcohort_report_fixtures"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fixtures.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The generator of synthetic experiments."""
    return _load_fixtures()


@pytest.fixture(scope="session")
def experiment(toy: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment with every selector that has its own figure."""
    choices = [
        toy.Choice("uniform"),
        toy.Choice("fedcor", "", {"warmup": 4}),
        toy.Choice("fedcbs"),
        toy.Choice("fedcm-ts"),
        toy.Choice("fedcm-ucb"),
        toy.Choice("fedacs"),
        toy.Choice("flash"),
    ]
    path: Path = toy.make_experiment(
        tmp_path_factory.mktemp("runs") / "toy", choices, seeds=2, rounds=24, clients=20, size=5, shadows=("uniform",)
    )
    return path


@pytest.fixture
def small(toy: ModuleType, tmp_path: Path) -> Path:
    """A small finished experiment that a test may damage."""
    path: Path = toy.make_experiment(tmp_path / "small", seeds=2, rounds=10, clients=12, size=3)
    return path


class Page:
    """A browser page with its messages and requests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Every address requested since the last call; data and blob addresses stay inside the page."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith(("data:", "blob:"))]

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: self.js(f"return {condition}"))

    def size(self, width: int, height: int = 900) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def scheme(self, name: str) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]}
        )

    def overflow(self) -> list[str]:
        """Elements that stick out to the right of the window, except inside a box that scrolls by itself."""
        found: list[str] = self.js(
            """
            const limit = document.documentElement.clientWidth + 1, out = [];
            const wide = document.documentElement.scrollWidth;
            if (wide > limit) out.push('the page: ' + wide);
            for (const e of document.body.querySelectorAll('*')) {
              if (e.closest('.table, .items, svg, .tip') || !e.getClientRects().length) continue;
              if (e.getBoundingClientRect().right > limit) out.push(e.tagName + '.' + e.className);
            }
            return out;"""
        )
        return found


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option(
        "prefs",
        {
            "download.default_directory": str(tmp_path_factory.mktemp("downloads")),
            "download.prompt_for_download": False,
        },
    )
    chrome = selenium.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def violations() -> Callable[[Page], list[Any]]:
    """What axe-core finds on a page: rules of WCAG A and AA, and its best practices; empty if there are no problems."""
    code = Path(__file__).with_name("axe").joinpath("axe.min.js").read_text(encoding="utf-8")

    def look(page: Page) -> list[Any]:
        page.js(code)
        page.driver.set_script_timeout(60)
        found: list[Any] = page.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(r => done("
            "r.violations.map(v => [v.id, v.help, v.nodes.slice(0, 4).map(n => n.html.slice(0, 160) + ' ' + "
            "n.failureSummary)])), e => done([['axe', String(e), []]]))"
        )
        return found

    return look


@pytest.fixture
def page(_driver: Any) -> Iterator[Page]:
    """A blank page in a headless browser."""
    found = Page(_driver)
    _driver.get("about:blank")
    found.size(1200)
    found.scheme("light")
    found.errors()
    found.requests()
    yield found
    _driver.get("about:blank")


@pytest.fixture(scope="session")
def report_url(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of the finished experiment."""
    from fedcohort.report.page import assemble, build_report

    path = tmp_path_factory.mktemp("html") / "report.html"
    path.write_text(build_report(assemble([experiment])), encoding="utf-8")
    return path.as_uri()

"""Take the screenshots of reports and dashboards in docs/img again: ``python docs/_site/screenshots.py``.

Needs chromium and chromedriver. It runs the commands of the README and the demonstration in a temporary folder, and a
made-up live session for the dashboard.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

import fedcohort as fc
from fedcohort.core.protocol import RoundReport
from fedcohort.core.signals import Signal

IMAGES = Path(__file__).parents[1] / "img"
CLINICS = [f"clinic-{name}" for name in ("north", "hill", "valley", "east", "west", "harbour", "river", "castle")]
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")


def main() -> None:
    """Take all screenshots."""
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        here = Path(folder)
        compare = here / "compare"
        run("compare", "--selectors", "uniform,balanced,fedcbs", "--seeds", "5", "-o", compare)
        run("report", compare, "-o", here / "compare.html")
        page.get((here / "compare.html").as_uri())
        save(page, "report", 1200, 1100)
        card(page, "report-ranks", "All against all")
        card(page, "report-picks", "How often each client was picked")
        card(page, "fedcbs-balance", "Class balance of the cohorts")
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        save(page, "report-phone", 390, 1180)
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        (here / "runs").mkdir()
        demo = [*COMMAND, "demo", "-q", "-o", here / "runs" / "demo"]
        with subprocess.Popen(demo, stdout=subprocess.DEVNULL), dashboard(here, "runs") as address:
            page.get(address)
            wait_for(page, "/round (2[4-9]|3\\d) to/.test(document.body.innerText)")  # about half of the demo
            save(page, "dashboard", 1300, 1500)
        run("report", here / "runs" / "demo", "-o", here / "demo.html", "--round", "40")
        page.get((here / "demo.html").as_uri())
        card(page, "fedcor-map", "FedCor: the map of clients")
        card(page, "fedcm-arms", "FedCM: what each arm is worth")
        card(page, "report-why", "Why these clients?")
        with live_session(here / "server.sqlite"), dashboard(here, "server.sqlite") as address:
            page.get(address)
            wait_for(page, "document.querySelectorAll('.chart[data-state=drawn]').length > 1")
            save(page, "dashboard-session", 1300, 1500)


def wait_for(page: Any, condition: str) -> None:
    """Wait until an expression holds on the page."""
    WebDriverWait(page, 300).until(lambda page: page.execute_script(f"return {condition}"))


COMMAND = (sys.executable, "-m", "fedcohort.cli.app")


def run(*arguments: Any) -> None:
    """Run a command of fedcohort."""
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in _FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def dashboard(folder: Path, name: str) -> Iterator[str]:
    """Serve the dashboard of a name in a folder; yield its address."""
    command = [*COMMAND, "dashboard", name, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def save(page: Any, name: str, width: int, height: int) -> None:
    """Save the top of a page in a window of this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_script("scrollTo(0, 0)")
    time.sleep(1)  # charts are drawn for the new size
    write(name, page.get_screenshot_as_png())


def card(page: Any, name: str, title: str) -> None:
    """Save the first card with this heading."""
    size = {"width": 1200, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    element = page.execute_script(
        "return [...document.querySelectorAll('.card')].find("
        "card => card.querySelector('h2')?.textContent.trim() === arguments[0] && card.getClientRects().length)",
        title,
    )
    page.execute_script("arguments[0].scrollIntoView()", element)
    time.sleep(1)
    write(name, element.screenshot_as_png)


def write(name: str, png: bytes) -> None:
    """Write a picture with 256 colours: the most frequent ones exactly, all others approximately."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counts: list[Any] = image.getcolors(1 << 24)
    frequent = [part for _, colour in sorted(counts, reverse=True)[:128] for part in colour]
    others = image.quantize(128, method=Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*frequent, *others])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


@contextmanager
def live_session(path: Path) -> Iterator[None]:
    """Make a session with a journal, after 40 rounds and with a cohort at work."""
    draw = np.random.default_rng(4)
    usual = dict(zip(CLINICS, draw.uniform(30, 90, len(CLINICS)), strict=True))
    with fc.Session("oort", CLINICS, seed=4, journal=path, shadows={"uniform": "uniform"}) as session:
        for round_ in range(40):
            cohort = session.ask(4)
            learned = 1 - np.exp(-(round_ + 5) / 14)
            session.tell(
                cohort,
                status=[fc.Status.FAILED if draw.random() < 0.12 else fc.Status.OK for _ in cohort.names],
                duration=[usual[name] * draw.lognormal(0, 0.2) for name in cohort.names],
                loss_rms=list(2 * (1 - learned) + 0.3 * draw.random(cohort.size)),
            )
            session.record(round_, {"accuracy": 0.95 * learned, "loss": 1.8 * (1 - learned) + 0.2})
        cohort = session.ask(4)
        first = {Signal.DURATION: [44.0, 67.0], Signal.LOSS_RMS: [0.3, 0.4]}
        status = [fc.Status.OK, fc.Status.FAILED]
        session.tell(RoundReport(cohort.ticket, cohort.clients[:2], status=status, metrics=first, complete=False))
        yield


if __name__ == "__main__":
    main()

"""Figures as files for papers: a headless browser draws them with the report's own code.

One start of the browser writes SVG, PNG and CSV; PDF takes one print per figure. The browser must belong to the
Chromium family. It is found on the path, or named by the environment variable ``FEDCOHORT_BROWSER``.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedcohort.core.errors import FedcohortError, MissingExtraError, ParameterError
from fedcohort.core.files import write_file
from fedcohort.report.render import render

FORMATS = ("svg", "png", "pdf")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network: nothing here needs one
)  # fmt: skip
_WIDTH = 760  # of a figure, in points
_PIXELS = 3  # per point of a PNG, enough for print at column width


class _ExportError(FedcohortError, RuntimeError):
    """The browser that draws figures failed."""


def _find_browser() -> str:
    """Return the path of the browser; the error says what to install."""
    named = os.environ.get("FEDCOHORT_BROWSER")
    for name in (named,) if named else _BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    missing = f"{named!r} was not found" if named else f"none of {', '.join(_BROWSERS)} was found"
    raise MissingExtraError(
        f"Exporting figures needs a browser of the Chromium family; {missing}.",
        hint="install chromium, set FEDCOHORT_BROWSER, or save single figures with the buttons of the HTML report",
    )


def _browse(browser: str, page: Path, *actions: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fedcohort-browser-", ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")  # the sandbox refuses to run as root
        try:
            done = subprocess.run(
                [browser, *flags, *actions, page.absolute().as_uri()],
                capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _ExportError(f"The browser {browser} could not draw the figures: {error}.") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise _ExportError(f"The browser {browser} could not draw the figures: {last[0]}")
    return done.stdout


def export_charts(charts: Sequence[Mapping[str, Any]], folder: str | Path, form: str) -> list[Path]:
    """Write every view of the charts, and their numbers as CSV; return the files.

    Parameters
    ----------
    charts : sequence of mappings
        What :meth:`fedcohort.report.figure.Figure.chart` returns.
    folder : str or path
        Where the files go; created if missing.
    form : str
        "svg", "png" or "pdf".
    """
    if form not in FORMATS:
        raise ParameterError(f"Figures can be exported as {', '.join(FORMATS)}. Got {form!r}.")
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _ExportError(f"The folder {target} cannot be created: {error.strerror or error}.") from error
    browser = _find_browser()
    options = {"width": _WIDTH, "png": _PIXELS if form == "png" else 0}
    page = render("export.html", figures=charts, options=options)
    written: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="fedcohort-export-") as scratch:
        source = Path(scratch) / "figures.html"
        source.write_text(page, encoding="utf-8")
        dom = _browse(browser, source, "--virtual-time-budget=60000", "--dump-dom")
        result = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
        if result is None:
            raise _ExportError("The browser drew nothing; its version may be too old to draw the charts.")
        for item in json.loads(html.unescape(result[1])):
            path = target / f"{item['file']}.{item['kind']}"
            if item["kind"] == "png":
                write_figure(path, base64.b64decode(item["content"]))
            elif item["kind"] == "svg" and form == "pdf":
                path = path.with_suffix(".pdf")
                _print_pdf(browser, item["content"], Path(scratch), path)
            # The page returns the drawing that a PNG is made from, too.
            elif item["kind"] == "svg" and form == "png":
                continue
            else:
                write_figure(path, item["content"].encode())
            written.append(path)
    return sorted(written)


def _print_pdf(browser: str, svg: str, scratch: Path, path: Path) -> None:
    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg)
    assert size is not None  # the charts always write both
    single = scratch / "one.html"
    single.write_text(render("print.html", width=size[1], height=size[2], svg=Markup(svg)), encoding="utf-8")
    printed = scratch / "one.pdf"
    # A browser that prints nothing must not leave the figure before it in place.
    printed.unlink(missing_ok=True)
    _browse(browser, single, "--no-pdf-header-footer", f"--print-to-pdf={printed.absolute()}")
    try:
        write_figure(path, printed.read_bytes())
    except FileNotFoundError:
        raise _ExportError(f"The browser {browser} printed nothing for {path}.") from None


def write_figure(path: Path, data: bytes) -> None:
    """Write a figure; the error names the file."""
    try:
        write_file(path.resolve(), data)
    except OSError as error:
        raise _ExportError(f"The figure {path} could not be written: {error.strerror}.") from error

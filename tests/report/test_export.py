"""Figures as files."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import xml.etree.ElementTree as ET

import pytest

from fedcohort.core.errors import MissingExtraError
from fedcohort.report.export import export_charts
from fedcohort.report.page import assemble, figure_files

needs_browser = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("chromium", "google-chrome")), reason="chromium is not installed"
)


@needs_browser
def test_svg_is_self_contained(experiment, tmp_path):
    written = export_charts(figure_files(assemble([experiment])), tmp_path, "svg")
    names = {path.name for path in written}
    assert {"accuracy-rounds.svg", "accuracy-bytes.svg", "picks-fedcbs.svg", "accuracy.csv", "fedcor-map.svg"} <= names
    for path in written:
        if path.suffix == ".svg":
            root = ET.fromstring(path.read_text())
            assert root.tag == "{http://www.w3.org/2000/svg}svg" and float(root.get("width")) == 760
            text = "".join(root.itertext())
            assert "var(--" not in path.read_text() and text
    legend = "".join(ET.fromstring((tmp_path / "cost-bytes.svg").read_text()).itertext())
    assert "training" in legend and "queries" in legend


@needs_browser
def test_png_and_pdf(small, tmp_path):
    report = assemble([small])
    images = [path for path in export_charts(figure_files(report), tmp_path / "png", "png") if path.suffix == ".png"]
    for path in images:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", data[16:20])[0] == 760 * 3
    assert len(images) > 8
    loss = tuple(figure for figure in report.sections[0].figures if figure.name == "loss")
    one = dataclasses.replace(report, sections=(dataclasses.replace(report.sections[0], figures=loss),))
    (document,) = (path for path in export_charts(figure_files(one), tmp_path / "pdf", "pdf") if path.suffix == ".pdf")
    assert document.name == "loss.pdf" and document.read_bytes()[:5] == b"%PDF-"


def test_a_missing_browser_is_named(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOHORT_BROWSER", "no-such-browser")
    with pytest.raises(MissingExtraError, match="no-such-browser"):
        export_charts(figure_files(assemble([small])), tmp_path, "svg")

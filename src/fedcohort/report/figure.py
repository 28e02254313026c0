"""One figure: data for a chart, with a sentence computed from that data."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.core.text import escape_html
from fedcohort.report.export import export_charts, write_figure
from fedcohort.report.render import render


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes
    ----------
    name : short name, unique in a setting; used for file names
    title : heading
    sentence : what the figure shows, computed from its numbers
    spec : what the chart code draws
    """

    name: str
    title: str
    sentence: str
    spec: Mapping[str, Any]

    @property
    def views(self) -> tuple[str, ...]:
        """Names of its views: over rounds, over time, one per selector and so on."""
        return tuple(view["name"] for view in self.spec["views"])

    def save(self, path: str | Path, view: str | None = None) -> Path:
        """Write the figure as .svg, .png, .pdf, .csv (its numbers) or .html, by the suffix of ``path``.

        All but HTML need a browser of the Chromium family, which runs headless. ``view`` is one of :attr:`views`;
        default: the first.
        """
        target = Path(path)
        form = target.suffix.removeprefix(".").lower()
        if form == "html":
            write_figure(target, figure_html(self).encode())
            return target
        if view is not None and view not in self.views:
            raise UnknownNameError(
                f"The figure {self.name!r} has no view {view!r}. Known: {', '.join(self.views)}.",
                hint=suggest(view, self.views),
            )
        chosen = [v for v in self.spec["views"] if view in (None, v["name"])][:1]
        with tempfile.TemporaryDirectory(prefix="fedcohort-figure-") as folder:
            written = export_charts([{**self.chart(), "views": chosen}], folder, "svg" if form == "csv" else form)
            (drawing,) = [file for file in written if file.suffix == f".{form}"]
            write_figure(target, drawing.read_bytes())
        return target

    def chart(self, where: str | None = None) -> dict[str, Any]:
        """Return what the chart code draws, with a file name; ``where`` is the setting, if there are several."""
        slug = "" if where is None else "-" + "".join(c if c.isalnum() else "-" for c in where).strip("-")
        return {"title": self.title, "sentence": self.sentence, "file": f"{self.name}{slug}", **self.spec}

    def _repr_html_(self) -> str:
        page = html.escape(figure_html(self), quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" title="{escape_html(self.title)}" '
            'style="width:100%;height:520px;border:0"></iframe>'
        )


def figure_html(figure: Figure) -> str:
    """Return a page with one figure."""
    data = {"figures": {f"0-{figure.name}": figure.chart()}, "explanations": {}}
    return render("figure.html", figure=figure, data=data)

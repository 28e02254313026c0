"""Add to every page what the theme lacks for keyboards and screen readers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MENDED: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # Captions of the navigation are headings without a level, and two asides have no names.
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (r'<aside class="toc-drawer( no-toc)?">', r'<aside class="toc-drawer\1" aria-label="On this page">'),
    # What scrolls sideways must be reachable by keyboard.
    (r"<pre>", '<pre tabindex="0">'),
    (r'<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    # The corner cell of a table is not a heading.
    (r'<th class="head([^"]*)"><p></p></th>', r'<td class="head\1"></td>'),
    # Sphinx writes parameters on separate lines as descriptions without terms.
    (
        r'<dl>\s*((?:<dd><em class="sig-param">(?:(?!</dd>).)*</dd>\s*)+)</dl>',
        lambda m: '<div class="parameters">' + re.sub("(</?)dd>", r"\1div>", m[1]) + "</div>",
    ),
    # The page of search results has no heading.
    (r'(?<!</h1>)<div id="search-results"></div>', '<h1>Search</h1><div id="search-results"></div>'),
]


def mend(app: Any, exception: Exception | None) -> None:
    """Rewrite the pages, except those of results."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    for path in folder.rglob("*.html"):
        if path.relative_to(folder).parts[0] != "results":
            text = mended = path.read_text(encoding="utf-8")
            for old, new in _MENDED:
                mended = re.sub(old, new, mended, flags=re.DOTALL)
            if mended != text:
                path.write_text(mended, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Connect this to Sphinx."""
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

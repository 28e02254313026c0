"""The documentation site: its theme with our additions, on pages that use every feature."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# The settings of the site, without the pages that are written from code, which take minutes.
CONF = f"""
import runpy
from pathlib import Path

found = runpy.run_path({str(DOCS / "conf.py")!r})
types = (str, bool, int, list, dict)
globals().update({{k: v for k, v in found.items() if isinstance(v, types) and not k.startswith("_")}})
html_extra_path = []
"""
PAGE = """\
# A page

Text with `code`, a [link](other.md) and math $x_i^2$ in it.

![A picture](picture.svg)

| | first column | a column with a long heading | another column with a long heading | one more of these columns |
|---|--:|---|---|---|
| `a-name-that-does-not-break` | 1 | a-value-that-does-not-break-either | a-second-one-that-does-not-break | 4 |

```python
>>> print("a line of code that is so long that it is wider than a phone and even wider than the text on a screen, too")
a line of output
```

```console
$ fedcohort compare --selectors uniform,balanced,fedcbs --seeds 5 --out runs/a-folder-with-a-very-long-name-for-a-phone
```

$$V = \\lambda I + \\sum x x^\\top, \\qquad b = \\sum r x, \\qquad \\hat\\theta = V^{-1} b, \\qquad W = V + V + V + V$$

```{eval-rst}
.. autofunction:: fedcohort.compare
```

## A section

1. **Bold** and *italic*.

```{toctree}
:caption: A caption
:hidden:

other
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small site, built with the settings of the real one."""
    pytest.importorskip("furo")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS / "_static", source / "_static")
    (source / "conf.py").write_text(dedent(CONF))
    (source / "index.md").write_text(PAGE)
    (source / "other.md").write_text("# Another page\n\nNothing more.\n")
    (source / "picture.svg").write_text((DOCS / "img" / "which-selector.svg").read_text())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["index", "search", "genindex"])
def test_a_page_is_accessible_fits_the_window_and_requests_nothing(page, site, violations, name, width, scheme):
    page.size(width)
    page.scheme(scheme)
    page.driver.get((site / f"{name}.html").as_uri())
    page.wait("document.readyState === 'complete'")
    assert violations(page) == []
    assert page.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert [url for url in page.requests() if not url.startswith(site.as_uri())] == []


def test_scrolling_parts_can_be_reached_by_keyboard(page, site):
    page.size(390)
    page.driver.get((site / "index.html").as_uri())
    scrolling = page.js(
        """return [...document.querySelectorAll('article *')].filter(
          e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === 'auto'
        ).map(e => [e.className || e.tagName, e.tabIndex])"""
    )
    assert len(scrolling) >= 3  # the table, the code and the formula
    assert [name for name, index in scrolling if index < 0] == []

"""The tutorial notebook as a page, with the output of its cells when it was run for this site."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def page(notebook: Path, cache: Path) -> str:
    """Return the page; each version of the notebook is run once and kept in the folder ``cache``."""
    text = notebook.read_text(encoding="utf-8")
    kept = cache / f"{notebook.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.ipynb"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        nbformat.write(_executed(nbformat.reads(text, as_version=4)), kept)
    executed = nbformat.read(kept, as_version=4)
    lines: list[str] = []
    for cell in executed.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
        else:
            lines += ["```python", cell.source, "```", ""]
            for output in cell.outputs:
                lines += _shown(output)
    return "\n".join(lines)


def _executed(notebook: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("IPYTHONDIR", folder)
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}})
        logging.getLogger("traitlets").setLevel(logging.WARNING)
        client.execute()
    return notebook


def _shown(output: Any) -> list[str]:
    data = output.get("data", {})
    if "text/html" in data:
        if "<progress" in data["text/html"]:  # useless once it is over
            return []
        # A scrolling box keeps wide tables off the page's edge.
        box = '<div class="output" tabindex="0" role="group" aria-label="output">'
        return ["```{raw} html", f"{box}{_tidy(data['text/html'])}</div>", "```", ""]
    text = output.get("text") or data.get("text/plain", "")
    return ["```text", re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip(), "```", ""] if text.strip() else []


# Replacements from the notebook to the page.
_FITTED = [
    (r"\n\s*\n", "\n"),
    (r"(</?)h4>", r"\1h3>"),
    (r'role="region"', 'role="group"'),
    (r"<pre style", '<pre tabindex="0" style'),
    (r"<th></th>", "<td></td>"),
    (r"/tmp/fedcohort-\w+/", ""),  # the folder is temporary
]


def _tidy(html: str) -> str:
    for old, new in _FITTED:
        html = re.sub(old, new, html)
    return html

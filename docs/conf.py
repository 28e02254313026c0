"""Sphinx configuration, and pages that are generated from code and stored results (longer ones in ``_site``)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "bench" / "src"), str(HERE)]

from _site import commands, notebook, public, results
from sphinx.ext.autodoc.mock import mock

import fedcohort
from fedcohort.core.params import parameters

project = "fedcohort"
author = "The fedcohort authors"
copyright = "The fedcohort authors"
version = release = fedcohort.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "_site.mathml",
    "_site.accessible",
    "myst_parser",
    "sphinx_copybutton",
]
html_math_renderer = "mathml"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_site", "_results"]
html_extra_path = ["_results"]  # the pages of results, as files
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = f"fedcohort {release}"
html_copy_source = False
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"  # without prompts and output, copied commands can be pasted
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
autodoc_member_order = "groupwise"  # classes and functions first, constants last
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
# The extras that the documentation is built with do not include nvflare.
autodoc_mock_imports = [] if importlib.util.find_spec("nvflare") else ["nvflare"]
napoleon_google_docstring = False
napoleon_use_ivar = True
nitpicky = False
suppress_warnings = ["ref.python"]  # several modules have the same name

GENERATED = HERE / "reference"
RESULTS = HERE / "_results"
RESULTS.mkdir(exist_ok=True)  # Sphinx looks for it before it is filled


def write_reference(app: Any) -> None:
    """Write every page of the reference, so that no public name, parameter, command or result is missing."""
    for folder in (GENERATED, RESULTS / "results"):
        shutil.rmtree(folder, ignore_errors=True)
    GENERATED.mkdir()
    with mock(autodoc_mock_imports):
        (GENERATED / "python.md").write_text(public.python_page())
    (GENERATED / "methods.md").write_text(public.methods_page())
    (GENERATED / "parameters.md").write_text(_parameters())
    (GENERATED / "commands.md").write_text(commands.page())
    results.write_pages(RESULTS / "results")
    (GENERATED / "results.md").write_text(results.index())
    tutorial = notebook.page(HERE.parent / "examples" / "tutorial.ipynb", Path(app.doctreedir))
    (GENERATED / "tutorial.md").write_text(tutorial)


def _parameters() -> str:
    """Return everything configurable, with every parameter, its default, its allowed values and its meaning."""
    from fedcohort.core.protocol import SELECTORS
    from fedcohort.scenario.availability import AVAILABILITIES
    from fedcohort.scenario.latency import LATENCIES
    from fedcohort.scenario.partition import PARTITIONS
    from fedcohort.simulate.config.sections import RunOptions
    from fedcohort.simulate.data import DATASETS
    from fedcohort.simulate.tasks import TASKS
    from fedcohort.training.aggregators import AGGREGATORS
    from fedcohort.training.filters import FILTERS
    from fedcohort.training.local import LocalTraining

    lines = ["# Parameters", "", "Names, defaults and ranges, as the code checks them.", ""]
    for title, registry in (
        ("Selectors", SELECTORS),
        ("Filters", FILTERS),
        ("Aggregators", AGGREGATORS),
        ("Partitions", PARTITIONS),
        ("Availabilities", AVAILABILITIES),
        ("Latencies", LATENCIES),
        ("Datasets", DATASETS),
        ("Tasks", TASKS),
    ):
        lines += [f"## {title}", ""]
        for name in registry.names():
            lines += _table(name, registry.get(name))
    lines += ["## Sections of a configuration", "", *_table("local", LocalTraining), *_table("run", RunOptions)]
    return "\n".join(lines)


def _table(name: str, kind: Any) -> list[str]:
    rows = [
        f"| `{info.name}` | `{info.default!r}` | {_cell(info.constraint.describe())} | {_cell(info.meaning)} |"
        for info in parameters(kind)
    ]
    if not rows:
        return [f"### {name}", "", "No parameters.", ""]
    return [f"### {name}", "", "| parameter | default | allowed | meaning |", "|---|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def plain_citations(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn citations into text, because RST does not allow several files to cite the same paper."""
    text = "\n".join(lines)
    text = re.sub(r"^\.\. \[(\w+)\] ", r"**[\1]** ", text, flags=re.M)
    text = re.sub(r"(\*\*\[\w+\]\*\* .*(?:\n   +\S.*)*)", lambda m: re.sub(r"\n +", " ", m.group(1)) + "\n", text)
    text = re.sub(r"\[(\w+)\]_", r"[\1]", text)
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Connect these functions to Sphinx."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", plain_citations)

"""Sphinx configuration, and pages that are generated from code and stored results (longer ones in ``_site``)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "bench" / "src"), str(HERE)]

from _site import commands, notebook, results
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
html_title = "fedcohort"
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
# The packages in the order in which a reader meets them. Commands describe themselves with --help.
PAGES = {
    "core": "Protocol and foundations",
    "session": "Sessions",
    "selectors": "Selectors",
    "training": "Aggregators, filters and local training",
    "scenario": "Scenarios",
    "simulate": "Simulator",
    "report": "Reports",
    "hosts": "Hosts",
    "journal": "Journal",
    "audit": "Audit",
    "privacy": "Privacy",
    "testing": "Testing",
}
UNDOCUMENTED = {"cli"}  # and fedcohort_bench, whose commands are its interface
# For these packages, the reference shows what they export, not their modules.
INTERNAL = (
    *("simulate.engine", "simulate.processes", "simulate.rounds", "simulate.leaderboard", "simulate.store"),
    *("journal", "report.dashboard", "hosts.flower", "hosts.flare", "privacy"),
)


# Every name of ``fedcohort.__all__``, and why a user needs it.
SURFACE = {
    "Run experiments": (
        "The commands as functions, with the same defaults.",
        ["compare", "run", "extend", "load"],
    ),
    "Bring your own data": (
        "`data=` reads names, files and arrays. These make a dataset from anything else.",
        ["from_arrays", "from_pandas"],
    ),
    "Choose clients in your own loop": (
        "A session chooses and learns. A selector may be named, or built with other parameters.",
        ["Session", "create", "ClientTable", "LabelCounts", "Status", "Rules", "RoundRequest", "RoundReport", "Answer"],
    ),
    "Choose clients on Flower or FLARE": (
        "Imported on first use; they need the extras `flower` and `nvflare`. The guides to [Flower](../flower.md) and "
        "[FLARE](../flare.md) show them.",
        ["flower", "flare"],
    ),
    "Write a selector": (
        "What a selector's functions receive and return. [The guide](../writing-a-selector.md) uses all of it.",
        [
            "Selector",
            "register",
            "per_client",
            "Slate",
            "Cohort",
            "Outcome",
            "Signal",
            "LossOf",
            "LossMeasure",
            "VectorOf",
            "OnServer",
            "Losses",
            "Trial",
            "param",
            "Interval",
            "top_k",
            "plots",
            "check_selector",
        ],
    ),
    "Handle errors": (
        "Every error that fedcohort raises on purpose is a `FedcohortError`, and also the built-in error it resembles.",
        ["FedcohortError"],
    ),
}


def _public_modules(package: str) -> list[str]:
    """Return the public modules of a package: the package, modules that users import from, then the others by name."""
    root = importlib.import_module(package)
    with mock(autodoc_mock_imports):
        names = [module.name for module in pkgutil.walk_packages(root.__path__, f"{package}.")]
    names = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    inside = tuple(f"fedcohort.{name}." for name in INTERNAL)
    with mock(autodoc_mock_imports):
        used = {getattr(getattr(fedcohort, name), "__module__", "") for name in fedcohort.__all__}
    shown = [name for name in names if name in used or not name.startswith(inside)]
    return [package, *sorted(shown, key=lambda name: name not in used)]


def write_reference(app: Any) -> None:
    """Write every page of the reference, so that no public name, parameter, command or result is missing."""
    packages = {module.name for module in pkgutil.iter_modules(fedcohort.__path__) if module.ispkg}
    if packages != PAGES.keys() | UNDOCUMENTED:
        raise ValueError(f"docs/conf.py must give each package a page: {packages ^ (PAGES.keys() | UNDOCUMENTED)}")
    for folder in (GENERATED, RESULTS / "results"):
        shutil.rmtree(folder, ignore_errors=True)
    GENERATED.mkdir()
    for name, title in PAGES.items():
        blocks = [f"# {title}\n"]
        for module in _public_modules(f"fedcohort.{name}"):
            directive = (
                _exports(module)
                if module.removeprefix("fedcohort.") in INTERNAL
                # Names that a package re-exports from its modules are described in those modules only.
                else (f".. automodule:: {module}\n   :members:\n   :ignore-module-all:")
            )
            blocks.append(f"```{{eval-rst}}\n{module}\n{'-' * len(module)}\n\n{directive}\n```\n")
        (GENERATED / f"{name}.md").write_text("\n".join(blocks))
    results.write_pages(RESULTS / "results")
    (GENERATED / "parameters.md").write_text(_parameters())
    with mock(autodoc_mock_imports):
        (GENERATED / "surface.md").write_text(_surface())
    (GENERATED / "commands.md").write_text(commands.page())
    (GENERATED / "results.md").write_text(results.index())
    tutorial = notebook.page(HERE.parent / "examples" / "tutorial.ipynb", Path(app.doctreedir))
    (GENERATED / "tutorial.md").write_text(tutorial)


def _exports(package: str) -> str:
    """Return directives for a package's docstring and exports."""
    with mock(autodoc_mock_imports):
        module = importlib.import_module(package)
        things = [getattr(module, name) for name in getattr(module, "__all__", ())]
    things = [thing for thing in things if getattr(thing, "__module__", "").startswith(f"{package}.")]
    blocks = [f".. automodule:: {package}\n   :no-members:"]
    for thing in things:
        if inspect.isclass(thing):
            blocks.append(f".. autoclass:: {thing.__module__}.{thing.__qualname__}\n   :members:")
        elif inspect.isfunction(thing):
            blocks.append(f".. autofunction:: {thing.__module__}.{thing.__qualname__}")
    return "\n\n".join(blocks)


def _surface() -> str:
    """Return the page of the names that a user needs, each with its purpose."""
    listed = [name for _, names in SURFACE.values() for name in names]
    public = set(dir(fedcohort)) - {"__version__"}
    if sorted(listed) != sorted(public):
        raise ValueError(f"docs/conf.py must explain every public name: {set(listed) ^ public}")
    lines = [
        "# Python",
        "",
        "`import fedcohort as fc` gives you everything on this page, and loads neither torch nor Flower. The pages by",
        "package further down are for people who extend fedcohort.",
        "",
    ]
    for title, (purpose, names) in SURFACE.items():
        lines += [f"## {title}", "", purpose, "", "| name | what it is |", "|---|---|"]
        lines += [f"| `fc.{name}` | {_first_line(getattr(fedcohort, name))} |" for name in names]
        lines.append("")
        for name in names:
            thing = getattr(fedcohort, name)
            if inspect.isfunction(thing):
                lines += ["```{eval-rst}", f".. autofunction:: fedcohort.{name}", "   :no-index:", "```", ""]
            elif name == "Session":
                lines += [
                    "```{eval-rst}",
                    ".. autoclass:: fedcohort.Session",
                    "   :members:",
                    "   :no-index:",
                    "```",
                    "",
                ]
    return "\n".join(lines)


def _first_line(thing: Any) -> str:
    text = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    return _cell(re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`"))


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

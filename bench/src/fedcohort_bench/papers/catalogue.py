"""All tables and figures, by name, as the TOML files beside the records declare them.

A file has what is run (``studies``), what was published (``published``), and what is compared (``exhibits``). A study
or part is like its ``fragments``, in their order, with its own sections on top. Texts and claims that several exhibits
share have keys.
"""

from __future__ import annotations

import importlib.resources
import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.simulate.config.toml import merge_tables
from fedcohort_bench.papers.declare import Beats, Claim, Exhibit, Grid, Near, Published, Study
from fedcohort_bench.papers.measures import EXTRAS

RECORDS = importlib.resources.files("fedcohort_bench.papers") / "records"
_PAPERS = ("fedcor", "fedcbs", "fedacs", "fedcm", "flash", "hicsfl")
_NOT_RUN = ("seeds", "baseline", "differences", "measure", "names", "variants", "split", "parts", "chance", "clean")
Table = Mapping[str, Any]


def _read(paper: str) -> list[Exhibit]:
    source = tomllib.loads((RECORDS / f"{paper}.toml").read_text(encoding="utf-8"))
    studies = {name: _study(name, table, source) for name, table in source["studies"].items()}
    return [_exhibit(name, table, studies[table["study"]], source) for name, table in source["exhibits"].items()]


def _study(name: str, table: Table, source: Table) -> Study:
    whole = _whole(table, source)
    names, baseline = whole["names"] if "names" in whole else source["names"], whole["baseline"]
    sections = {key: value for key, value in whole.items() if key not in _NOT_RUN}
    sections["run"] |= {"baseline": baseline}
    parts = whole.get("parts", {"all": {}})
    if whole.get("split"):  # each setting can be run separately
        parts = {setting["name"]: {"settings": [setting]} for setting in sections["settings"]}
    experiments = {part: merge_tables(sections, _whole(own, source)) for part, own in parts.items()}
    if "variants" in whole:
        labels = [(label, end) for ends in whole["variants"] for label in sections["selectors"] for end in ends]
        names = {label + end: names[label] + source["variants"][end]["called"] for label, end in labels}
        for experiment in experiments.values():
            chosen = experiment["selectors"]
            experiment["selectors"] = {
                label + end: {"name": label, **chosen[label], **source["variants"][end]["changes"]}
                for label, end in labels
            }
    differences = _texts(whole["differences"], source)
    for experiment in experiments.values():  # a part may have only some of the methods
        only = experiment.pop("only", experiment["selectors"])
        experiment["selectors"] = {label: how for label, how in experiment["selectors"].items() if label in only}
    extra = EXTRAS.get(whole.get("measure", ""))
    chance, clean = whole.get("chance", 0.0), whole.get("clean", "")
    return Study(name, experiments, whole["seeds"], names, baseline, differences, extra, chance, clean)


def _whole(table: Table, source: Table) -> dict[str, Any]:
    """Return the fragments that a table is like, and on top of them the table itself."""
    merged: dict[str, Any] = {}
    for part in (*(source["fragments"][name] for name in table.get("like", ())), table):
        merged = merge_tables(merged, part)
    merged.pop("like", None)
    return merged


def _texts(keys: Iterable[str], source: Table) -> tuple[str, ...]:
    """Return the texts of keys; what is no key is the text itself."""
    return tuple(source.get("texts", {}).get(key, key) for key in keys)


def _exhibit(name: str, table: Table, study: Study, source: Table) -> Exhibit:
    grids = [
        Grid(grid["measure"], published(source["published"][grid["published"]]), grid.get("ours", ""))
        for grid in table.get("grids", ())
    ]
    claims = table.get("claims", [])
    return Exhibit(
        name,
        source["paper"],
        table["place"],
        table["title"],
        study,
        tuple(grids),
        tuple(
            claim
            for entry in (source["claims"][claims] if isinstance(claims, str) else claims)
            for claim in _claims(entry, source["names"])
        ),
        _texts(table.get("notes", ()), source),
        table.get("supplement", False),
    )


def published(table: Table) -> Published:
    """Return the figures of a table: a list by column, or such lists by row, for each setting.

    A figure is a mean, a mean and a standard deviation, or "N/A"; "" stands for none.

    >>> published({"columns": ["a", "b", "c"], "x": [1, "2.0 ± 0.5", "N/A"]})
    {'x': {'a': (1.0, None), 'b': (2.0, 0.5), 'c': None}}
    """
    figures = {}
    for setting, rows in table.items():
        if setting != "columns":
            figures[setting] = {
                f"{row}+{column}" if row else column: _figure(value)
                for row, values in (rows if isinstance(rows, Mapping) else {"": rows}).items()
                for column, value in zip(table["columns"], values, strict=True)
                if value != ""
            }
    return figures


def _figure(value: float | str) -> tuple[float, float | None] | None:
    if value == "N/A":
        return None
    if not isinstance(value, str):
        return float(value), None
    mean, deviation = map(json.loads, value.split(" ± "))
    return mean, deviation


def _claims(entry: Table, names: Mapping[str, str]) -> list[Claim]:
    """Return the claim of an entry, or one for ``each`` of several labels."""
    kind = Near if "within" in entry else Beats
    fields = {key: value for key, value in entry.items() if key != "each"}

    def filled(value: Any, label: str) -> Any:
        if isinstance(value, list):
            return tuple(filled(item, label) for item in value)
        return value.format(label=label, name=names[label]) if label and isinstance(value, str) else value

    return [kind(**{key: filled(value, label) for key, value in fields.items()}) for label in entry.get("each", [""])]


EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for paper in _PAPERS for exhibit in _read(paper)}
STUDIES: dict[str, Study] = {exhibit.study.name: exhibit.study for exhibit in EXHIBITS.values()}


def find(name: str) -> list[Exhibit]:
    """Return the exhibit of that name, or all exhibits of a paper.

    >>> [exhibit.name for exhibit in find("hicsfl")]
    ['hicsfl-table-2']
    """
    if name in EXHIBITS:
        return [EXHIBITS[name]]
    exhibits = [exhibit for key, exhibit in EXHIBITS.items() if key.startswith(f"{name}-") and "-" not in name]
    if not exhibits:
        papers = list(dict.fromkeys(key.split("-")[0] for key in EXHIBITS))
        raise UnknownNameError(
            f"There is no table or figure {name!r}.",
            hint=suggest(name, [*EXHIBITS, *papers]) or "`fedcohort reproduce --list` shows all",
        )
    return exhibits

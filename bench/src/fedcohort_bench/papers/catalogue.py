"""All tables and figures, by name."""

from __future__ import annotations

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort_bench.papers import fedacs, fedcbs, fedcm, fedcor, flash, hicsfl
from fedcohort_bench.papers.declare import Exhibit, Study

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit for paper in (fedcor, fedcbs, fedacs, fedcm, flash, hicsfl) for exhibit in paper.EXHIBITS
}
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

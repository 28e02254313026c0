"""Explanations for people and machines: from a run's journal, the same for terminal, report and dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.registry import suggest
from fedcohort.journal import Journal
from fedcohort.report.data import Setting
from fedcohort.session.explain import Explanation, ScoreRow, explain_round
from fedcohort.simulate.store.results import open_journal

NEARLY = 5  # how many of those not picked are shown


@dataclass(frozen=True)
class Why:
    """One explanation, ready to show.

    Attributes
    ----------
    picked : rows of the picked clients, best first
    nearly : rows of the best that were not picked
    total : how many candidates' scores were recorded
    """

    run: str
    selector: str
    explanation: Explanation
    picked: tuple[ScoreRow, ...]
    nearly: tuple[ScoreRow, ...]
    total: int

    @property
    def parts(self) -> list[str]:
        """Names of the score's parts."""
        return list(dict.fromkeys(name for row in (*self.picked, *self.nearly) for name in row.parts))


def find_journal(path: str | Path, run: str | None) -> Path:
    """Return the journal file meant by a path (an experiment's directory, or a journal) and a run's name."""
    place = Path(path)
    if place.is_file():
        if run is not None and run != place.stem:
            raise InputError(f"{place} is the journal of one run; --run {run} cannot choose another.")
        return place
    found = _journals_in(place)
    known = ", ".join(list(found)[:12]) + (", ..." if len(found) > 12 else "")
    if run is None and len(found) > 1:
        raise InputError(
            f"{place} holds {len(found)} runs: {known}.",
            hint=f"choose one with --run, for example --run {next(iter(found))}",
        )
    if run is not None and run not in found:
        raise InputError(f"There is no run {run!r} in {place}. Known: {known}.", hint=suggest(run, found))
    return next(iter(found.values())) if run is None else found[run]


def _journals_in(place: Path) -> dict[str, Path]:
    """Return the journals of an experiment's directory, or of a folder of journals, by the run's name."""
    if not place.exists():
        raise InputError(f"There is no experiment or journal at {place}.")
    folder = place / "journal" if (place / "journal").is_dir() else place
    found = {file.stem: file for file in sorted(folder.glob("*.sqlite"))}
    if not found:
        raise InputError(
            f"{place} holds no journal, so its choices cannot be explained.",
            hint="name an experiment's directory, or the .sqlite journal of a session",
        )
    return found


def explain(path: str | Path, round_: int, client: str | None = None, *, nearly: int = NEARLY) -> Why:
    """Explain a round, or one client's part in it, from a journal file."""
    with closing(open_journal(path)) as journal:
        return _explain(journal, Path(path).stem, round_, client, nearly)


def _explain(journal: Journal, run: str, round_: int, client: str | None, nearly: int) -> Why:
    selector = journal.meta().get("selector")
    name = selector.get("name", "") if isinstance(selector, dict) else str(selector or "")
    if client is None:
        explanation = explain_round(journal, round_)
        rows: Sequence[ScoreRow] = explanation.rows
    else:
        explanation = explain_round(journal, round_, client)
        rows = explain_round(journal, round_).rows
    picked = tuple(row for row in rows if row.picked)
    others = tuple(row for row in rows if not row.picked)
    return Why(run, name, explanation, picked, others[:nearly], len(rows))


def as_json(why: Why) -> dict[str, Any]:
    """Return an explanation for machines; numbers that are not finite become None."""
    found = why.explanation
    return {
        "run": why.run,
        "selector": why.selector,
        "round": found.round,
        "client": found.client,
        "name": found.name,
        "was_picked": found.picked if found.client is not None else None,
        "status": found.status,
        "failures": dict(found.failures),
        "reason": found.reason,
        "threshold": _finite(found.threshold),
        "rule": found.rule,
        "parts": why.parts,
        "meanings": dict(found.meanings),
        "picked": [_row(row) for row in why.picked],
        "nearly": [_row(row) for row in why.nearly],
        "asked": [_row(row) for row in found.rows] if found.client is not None else [],
        "recorded": why.total,
        "shadows": [_shadow(name, who, why.picked) for name, who in found.shadows.items()],
        "coverage": found.coverage,
        "notes": {key: _finite(value) if isinstance(value, float) else value for key, value in found.notes.items()},
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _row(row: ScoreRow) -> dict[str, Any]:
    return {
        "client": row.client,
        "name": row.name,
        "picked": row.picked,
        "rank": row.rank,
        "last_rank": row.last_rank,
        "place": row.place(),
        "score": _finite(row.score),
        "parts": {name: _finite(value) for name, value in row.parts.items()},
    }


def _shadow(name: str, who: tuple[str, ...] | str, picked: Iterable[ScoreRow]) -> dict[str, Any]:
    if isinstance(who, str):
        return {"name": name, "note": who, "picked": [], "same": None}
    ours = {row.name for row in picked}
    return {"name": name, "note": "", "picked": list(who), "same": sum(c in ours for c in who)}


def report_explanations(
    setting: Setting, rounds: Sequence[int], limit: int = 8
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return explanations of some rounds of one run per selector, and warnings about journals that cannot be read.

    ``rounds`` are always included; further ones are spread evenly over the run, ``limit`` in all.
    """
    found, warnings = [], []
    for group in setting.groups:
        run = next((run for run in group.runs if run.journal is not None), None)
        if run is None or run.journal is None:
            continue
        try:
            with closing(open_journal(run.journal)) as journal:
                explained = explanations_of(journal, run.id, group.label, run.seed, rounds, limit, group.color)
        except FedcohortError as error:
            warnings.append(f"The choices of {run.id} cannot be explained: {error.message}")
            continue
        if explained["rounds"]:
            found.append(explained)
    return found, warnings


def explanations_of(
    journal: Journal, run: str, label: str, seed: int, rounds: Sequence[int], limit: int = 8, color: int = 1
) -> dict[str, Any]:
    """Return explanations of ``rounds`` and of some that are spread evenly over a run, as a page browses them."""
    last, _ = journal.last()
    spread = {round(i * last / max(1, limit - 1)) for i in range(limit)} if last >= 0 else set()
    wanted = sorted({r for r in rounds if 0 <= r <= last} | spread)
    whys = [as_json(_explain(journal, run, r, None, NEARLY)) for r in wanted]
    return {"label": label, "color": color, "run": run, "seed": seed, "rounds": whys}

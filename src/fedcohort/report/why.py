"""Explanations from a run's journal, the same for the terminal, the report and the dashboard."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

NEARLY = 5  # clients to show that were not picked
_SPREAD = 8  # rounds of a run that a report explains, evenly spaced


@dataclass(frozen=True)
class Why:
    """One explanation, ready to show.

    Attributes
    ----------
    picked : rows of the picked clients, best first
    nearly : rows of the best clients that were not picked
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
    """Return the journal of a run; ``path`` is an experiment's directory, a folder of journals, or a journal."""
    path = Path(path)
    if path.is_file():
        if run is not None and run != path.stem:
            raise InputError(f"{path} is the journal of one run; --run {run} cannot choose another.")
        return path
    if not path.exists():
        raise InputError(f"There is no experiment or journal at {path}.")
    folder = path / "journal" if (path / "journal").is_dir() else path
    journals = {file.stem: file for file in sorted(folder.glob("*.sqlite"))}
    if not journals:
        raise InputError(
            f"{path} holds no journal, so its choices cannot be explained.",
            hint="name an experiment's directory, or the .sqlite journal of a session",
        )
    known = ", ".join(list(journals)[:12]) + (", ..." if len(journals) > 12 else "")
    first = next(iter(journals))
    if run is None and len(journals) > 1:
        hint = f"choose one with --run, for example --run {first}"
        raise InputError(f"{path} holds {len(journals)} runs: {known}.", hint=hint)
    if run is not None and run not in journals:
        raise InputError(f"There is no run {run!r} in {path}. Known: {known}.", hint=suggest(run, journals))
    return journals[run or first]


def explain(path: str | Path, round_: int, client: str | None = None, *, nearly: int = NEARLY) -> Why:
    """Explain a round, or one client's part in it, from a journal file."""
    with closing(open_journal(path)) as journal:
        return _explain(journal, Path(path).stem, round_, client, nearly)


def _explain(journal: Journal, run: str, round_: int, client: str | None, nearly: int) -> Why:
    selector = journal.meta().get("selector")
    name = selector.get("name", "") if isinstance(selector, dict) else str(selector or "")
    explanation = explain_round(journal, round_, client)
    # The question about one client is answered beside the scores of the whole round.
    rows: Sequence[ScoreRow] = explanation.rows if client is None else explain_round(journal, round_).rows
    picked = tuple(row for row in rows if row.picked)
    others = tuple(row for row in rows if not row.picked)
    return Why(run, name, explanation, picked, others[:nearly], len(rows))


def as_json(why: Why) -> dict[str, Any]:
    """Return an explanation for machines; numbers that are not finite become None."""
    explanation = why.explanation
    about_client = explanation.client is not None
    cohort = {row.name for row in why.picked}
    shadows = []
    for name, picks in explanation.shadows.items():  # a text says why it has no picks
        found = () if isinstance(picks, str) else picks
        same = None if isinstance(picks, str) else sum(client in cohort for client in found)
        note = picks if isinstance(picks, str) else ""
        shadows.append({"name": name, "note": note, "picked": list(found), "same": same})
    return {
        "run": why.run,
        "selector": why.selector,
        "round": explanation.round,
        "client": explanation.client,
        "name": explanation.name,
        "was_picked": explanation.picked if about_client else None,
        "status": explanation.status,
        "failures": dict(explanation.failures),
        "reason": explanation.reason,
        "threshold": _finite(explanation.threshold),
        "rule": explanation.rule,
        "parts": why.parts,
        "meanings": dict(explanation.meanings),
        "picked": [_row(row) for row in why.picked],
        "nearly": [_row(row) for row in why.nearly],
        "asked": [_row(row) for row in explanation.rows] if about_client else [],
        "recorded": why.total,
        "shadows": shadows,
        "coverage": explanation.coverage,
        "notes": {
            key: _finite(value) if isinstance(value, float) else value for key, value in explanation.notes.items()
        },
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _row(row: ScoreRow) -> dict[str, Any]:
    parts = {name: _finite(value) for name, value in row.parts.items()}
    return {**row._asdict(), "place": row.place(), "score": _finite(row.score), "parts": parts}


def report_explanations(setting: Setting, rounds: Sequence[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return explanations of some rounds of one run per selector, and warnings about journals that cannot be read.

    They cover ``rounds``, and others that are spread evenly over the run.
    """
    explanations, warnings = [], []
    for group in setting.groups:
        run = next((run for run in group.runs if run.journal is not None), None)
        if run is None or run.journal is None:
            continue
        try:
            with closing(open_journal(run.journal)) as journal:
                explained = explanations_of(journal, run.id, group.label, run.seed, rounds, group.color)
        except FedcohortError as error:
            warnings.append(f"The choices of {run.id} cannot be explained: {error.message}")
            continue
        if explained["rounds"]:
            explanations.append(explained)
    return explanations, warnings


def explanations_of(
    journal: Journal, run: str, label: str, seed: int, rounds: Sequence[int], color: int = 1
) -> dict[str, Any]:
    """Return explanations of ``rounds``, and of others that are spread evenly over a run, for a page."""
    last, _ = journal.last()
    # A page with every round of a long run would be too large to send.
    spread = {round(i * last / (_SPREAD - 1)) for i in range(_SPREAD)} if last >= 0 else set()
    chosen = sorted({r for r in rounds if 0 <= r <= last} | spread)
    whys = [as_json(_explain(journal, run, r, None, NEARLY)) for r in chosen]
    return {"label": label, "color": color, "run": run, "seed": seed, "rounds": whys}

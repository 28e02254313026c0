"""The report of a live run: one self-contained HTML file, from its journal alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.journal import read_journal
from fedcohort.report import palette
from fedcohort.report.account import Account, JournalHistory, account
from fedcohort.report.data import RunCurve, SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.figures import json_numbers, participation, picks
from fedcohort.report.page import Pane, build_page
from fedcohort.report.render import card
from fedcohort.report.why import explanations_of
from fedcohort.session.coverage import Tally, sentences
from fedcohort.simulate.leaderboard.formats import Cell, Table
from fedcohort.simulate.leaderboard.words import duration, names, quantity

_MOST_ROWS = 2000  # of a table on a page; the journal's export has everything


@dataclass(frozen=True)
class RunView:
    """What a page shows of one run."""

    account: Account
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]


def run_view(found: Account, past: JournalHistory, clients: int) -> RunView:
    """Return tables and figures of a run."""
    rows = [past.cohorts[ticket] for ticket in sorted(past.cohorts)]
    tally = Tally.of(clients, ((row.round, row.clients, row.n_candidates) for row in rows))
    active = np.array([client.member for client in found.clients], np.bool_)
    figures = (_curves(found), _durations(found), _outcomes(found), *_pick_figures(found, past, clients))
    tables = [clients_table(found), rounds_table(found)]
    if found.shadows:
        tables.insert(0, shadows_table(found))
    return RunView(
        found,
        tuple(tables),
        tuple(figure for figure in figures if figure is not None),
        tuple(sentences([(found.selector, tally.coverage(active))])),
    )


def build_live_report(
    paths: Sequence[str | Path], *, title: str | None = None, rounds: Sequence[int] = ()
) -> tuple[str, list[Account]]:
    """Return the HTML of a report on live runs, and their accounts.

    Parameters
    ----------
    paths : journals
    title : str, optional
        Heading; default: the journals' names.
    rounds : sequence of int
        Rounds whose choices the report explains, in addition to evenly spaced ones.
    """
    panes, accounts, warnings = [], [], []
    for number, path in enumerate(paths):
        run, pane = _pane(Path(path), number, rounds)
        panes.append(pane)
        accounts.append(run.account)
        where = f"{run.account.name}: " if len(paths) > 1 else ""
        warnings += [f"{where}{text}" for text in run.warnings]
    facts = [
        (max(a.done for a in accounts), "round"), (max(len(a.clients) for a in accounts), "client"),
        (sum(len(a.shadows) for a in accounts), "shadow"),
        (sum(sum(a.failures().values()) for a in accounts), "failure"),
    ]  # fmt: skip
    heading = title or ", ".join(found.name for found in accounts)
    return build_page(heading, facts, warnings, panes), accounts


def _pane(path: Path, number: int, rounds: Sequence[int]) -> tuple[RunView, Pane]:
    """Return what a page shows of the journal at ``path``, and its part of the page."""
    with closing(read_journal(path)) as journal:
        past = JournalHistory()
        found = account(journal, path.stem, past)
        if not found.rounds:
            raise InputError(f"No round has been recorded in {path} yet.", hint="follow it with: fedcohort dashboard")
        run = run_view(found, past, journal.table()[0].n)
        explained = explanations_of(journal, found.name, found.selector, found.seed, rounds)
    # The last two tables, of every client and every round, are long: figures come before them.
    blocks = [
        card("sentences", found.name, ending(found)),
        *(card("table", table) for table in run.tables[:-2]),
        *(card("figure", figure, number) for figure in run.figures),
        *(card("table", table) for table in run.tables[-2:]),
        card("why", number),
        _rules(found),
    ]
    return run, Pane(found.name, blocks, {figure.name: figure for figure in run.figures}, [explained])


# -- sentences and tables -------------------------------------------------------------------------------------------


def ending(found: Account) -> list[str]:
    """Return sentences on how far a run is, how it ended, and which clients failed or were never picked."""
    of = f" of {found.planned}" if found.planned is not None else ""
    what = "rounds" if found.models is None else "models"
    lines = [f"{found.selector} (seed {found.seed}): {found.done}{of} {what}, {found.state}."]
    if found.reason:
        lines[0] = f"{lines[0][:-1]}: {found.reason.rstrip('.')}."
    lines += [f"Selector changed in {change}." for change in found.changes]
    lines += _replies(found)
    given_up = sum(r.abandoned is not None for r in found.rounds)
    if given_up:
        lines.append(f"{quantity(given_up, 'cohort')} {'was' if given_up == 1 else 'were'} abandoned and chosen again.")
    members = sum(client.member for client in found.clients)
    if found.never:
        lines.append(f"Never picked, {len(found.never)} of {members}: {names(found.never, 50)}.")
    else:
        lines.append(f"Never picked: none of {quantity(members, 'member')}.")
    return lines


def _replies(found: Account) -> list[str]:
    """Return sentences on how many clients brought a model, and how many are still training."""
    lines = []
    failed = found.failures()
    asked = sum(sum(client.statuses.values()) for client in found.clients)  # without clients that are still training
    if failed:
        parts = ", ".join(f"{count} {status.lower()}" for status, count in failed.most_common())
        lines.append(
            f"Of {asked} times a client was asked to train, {sum(failed.values())} returned no model: {parts}."
        )
    elif asked:
        lines.append(f"All {asked} times a client was asked to train, it returned a valid model.")
    going = [r for r in found.rounds if r.seconds is None and r.abandoned is None]
    training = sum(len(r.clients) - r.sound - len(r.failures) for r in going)
    if training:
        lines.append(f"Asked, but no report yet: {quantity(training, 'client')}.")
    return lines


def _rules(found: Account) -> Markup:
    proof = found.proof
    if proof is None or proof.rules is None:
        return card("sentences", "Rules", ["The run had no rules."])
    held = " ".join([
        proof.verdict,
        *(f"Round {b.round}, {b.client}: {b.what}." for b in proof.breaches[:10]),
        *(f"{e.client}: {e.what}." for e in proof.exceeded[:10]),
    ])  # fmt: skip
    excluded: Counter[str] = Counter()
    for past in found.rounds:
        excluded.update(past.excluded)
    return card("rules", held, proof.rules.to_dict(), excluded.most_common(20))


def _seconds(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else duration(value)


def shadows_table(found: Account) -> Table:
    """Return what shadow selectors would have meant."""
    rows = []
    for s in found.shadows:
        both = [("–", "")] * 2
        if s.balance is not None:
            both[0] = (f"{s.balance[1]:.4f}", f"real: {s.balance[0]:.4f}")
        if s.seconds is not None:
            both[1] = (duration(s.seconds[1]), f"real: {duration(s.seconds[0])}")
        remark = s.dropped or s.note
        rows.append(
            (
                Cell(s.name),
                Cell(str(s.rounds), f"silent in {s.silent}" if s.silent else ""),
                Cell(f"{s.same:.0%}" if s.rounds else "–", f"{s.chance:.0%} by chance" if s.rounds else ""),
                *(Cell(text, note) for text, note in both),
                Cell(remark),
            )
        )
    note = (
        "Over all rounds: the share of a shadow's picks that were really picked, the class imbalance (QCID, 0 is even) "
        "of its cohorts if labels are known, and how long its rounds would take by the clients' mean durations."
    )
    columns = ("Shadow", "Rounds", "Same picks", "QCID", "Expected round", "Remark")
    return Table("shadows", "What shadow selectors would have meant", columns, tuple(rows), note, frozenset({5}))


def clients_table(found: Account) -> Table:
    """Return every client's history in one line each, most often picked first."""
    order = sorted(found.clients, key=lambda c: (-c.picked, c.name))[:_MOST_ROWS]
    rows = [
        (
            Cell(c.name, "" if c.member else "left"),
            Cell(str(c.picked)),
            Cell(str(c.statuses.get(Status.OK.name, 0))),
            Cell(", ".join(f"{n} {s.lower()}" for s, n in c.statuses.items() if s != Status.OK.name) or "–"),
            Cell("never" if c.last is None else f"{c.last}"),
            Cell(_seconds(c.seconds)),
            Cell(c.reason),
        )
        for c in order
    ]
    columns = ("Client", "Picked", "Sound", "Without a model", "Last round", "Mean time", "Last failure")
    note = f"The first {_MOST_ROWS} of {len(found.clients)} clients." if len(found.clients) > _MOST_ROWS else ""
    return Table("clients", "Every client", columns, tuple(rows), note, frozenset({3, 6}))


def rounds_table(found: Account) -> Table:
    """Return every round, newest first."""
    rows = [
        (
            Cell(str(r.round), "abandoned" if r.abandoned is not None else ""),
            Cell(f"{len(r.clients)} of {r.candidates}"),
            Cell("–" if r.seconds is None else str(r.sound)),
            Cell("training" if r.seconds is None else duration(r.seconds)),
            Cell("; ".join(f"{n}: {w}" for n, w in list(r.failures.items())[:12])
                 + (f"; given up: {r.abandoned}" if r.abandoned else "")),
            Cell(", ".join(r.clients[:40]) + (", ..." if len(r.clients) > 40 else "")),
        )
        for r in list(reversed(found.rounds))[:_MOST_ROWS]
    ]  # fmt: skip
    columns = ("Round", "Picked", "Sound models", "Duration", "Who returned none, and why", "Cohort")
    note = f"The newest {_MOST_ROWS} of {len(found.rounds)} cohorts." if len(found.rounds) > _MOST_ROWS else ""
    return Table("rounds", "Every round", columns, tuple(rows), note, frozenset({4, 5}))


# -- figures ----------------------------------------------------------------------------------------------------------


def _lines(views: list[dict[str, Any]], label: str) -> Mapping[str, Any]:
    return {"kind": "lines", "views": views, "y": {"label": label, "min": 0}}


_ROUNDS = {"label": "round", "format": "integer"}


def _curves(found: Account) -> Figure | None:
    keys = sorted({key for values in found.metrics.values() for key in values}, key=lambda k: (k != "accuracy", k))
    views, values_now = [], []
    for key in keys:
        at = [r for r, values in sorted(found.metrics.items()) if values.get(key) is not None]
        if not at:
            continue
        numbers = [found.metrics[r][key] for r in at]
        series = {"label": found.selector, "color": 1, "x": at, "y": json_numbers(np.array(numbers))}
        views.append({"name": key, "x": _ROUNDS, "series": [series]})
        values_now.append(f"{key} is {numbers[-1]:.4g} after round {at[-1]}")
    if not views:
        return None
    spec = {"kind": "lines", "views": views, "y": {"label": "value"}}
    return Figure("metrics", "The global model", f"{'; '.join(values_now[:3])}.", spec)


def _durations(found: Account) -> Figure | None:
    known = [(r.round, r.seconds) for r in found.rounds if r.seconds is not None and r.clients]
    if not known:
        return None
    slow, seconds = max(known, key=lambda pair: pair[1])
    middle = float(np.median([s for _, s in known]))
    y = json_numbers(np.array([s for _, s in known]))
    series = {"label": "rounds", "color": 1, "x": [r for r, _ in known], "y": y}
    text = f"Half of the rounds took {duration(middle)} or less; the longest, round {slow}, took {duration(seconds)}."
    return Figure("durations", "How long rounds took", text,
                  _lines([{"name": "Rounds", "x": _ROUNDS, "series": [series]}], "seconds"))  # fmt: skip


def _outcomes(found: Account) -> Figure | None:
    closed = [r for r in found.rounds if r.seconds is not None and r.clients]
    if not closed:
        return None
    by_status: dict[str, list[int]] = {}
    for i, r in enumerate(closed):
        by_status.setdefault("valid models", [0] * len(closed))[i] = r.sound
        for what in r.failures.values():
            by_status.setdefault(what.split(":")[0].lower(), [0] * len(closed))[i] += 1
    series = [
        {"label": label, "color": 1 + k, "x": [r.round for r in closed], "y": counts}
        for k, (label, counts) in enumerate(by_status.items())
    ]
    failed = sum(len(r.failures) for r in closed)
    reasons = Counter(what for r in closed for what in r.failures.values()).most_common(1)
    often = f" The most frequent reason: {reasons[0][0]} ({reasons[0][1]} times)." if reasons else ""
    text = f"{quantity(failed, 'reply', 'replies')} without a valid model in {quantity(len(closed), 'round')}.{often}"
    return Figure("outcomes", "What came back", text,
                  _lines([{"name": "Replies", "x": _ROUNDS, "series": series}], "clients"))  # fmt: skip


def _pick_figures(found: Account, past: JournalHistory, clients: int) -> Sequence[Figure | None]:
    rows = [past.cohorts[ticket] for ticket in sorted(past.cohorts)]
    if not any(len(row.clients) for row in rows):
        return ()
    at = np.array([row.round for row in rows], np.int64)
    curve = RunCurve(
        id=found.name,
        label=found.selector,
        selector=found.selector,
        seed=found.seed,
        state="running",
        reason="",
        federation="",
        params={},
        round=at,
        values={},
        pick_round=np.repeat(at, [len(row.clients) for row in rows]),
        pick_client=np.concatenate([row.clients for row in rows]).astype(np.int64),
        journal=None,
    )
    color, dash = palette.assign([found.selector])[found.selector]
    group = SelectorRuns(found.selector, found.selector, (curve,), color, dash)
    called = tuple(client.name for client in found.clients)
    setting = Setting(found.name, (group,), clients, {}, int(at.max()) + 1, names=called)
    return picks(setting), participation(setting)

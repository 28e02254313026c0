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

_MAX_ROWS = 2000  # of a table on a page; 'fedcohort journal export' writes everything


@dataclass(frozen=True)
class _RunView:
    """What a page shows about one run."""

    account: Account
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]


def run_view(run: Account, past: JournalHistory, clients: int) -> _RunView:
    """Return the tables and figures of a run."""
    tally = Tally.of(clients, ((row.round, row.clients, row.n_candidates) for row in past.in_order))
    active = np.array([client.member for client in run.clients], np.bool_)
    figures = (_curves(run), _durations(run), _outcomes(run), *_pick_figures(run, past, clients))
    tables = [_clients_table(run), _rounds_table(run)]
    if run.shadows:
        tables.insert(0, _shadows_table(run))
    return _RunView(
        run,
        tuple(tables),
        tuple(figure for figure in figures if figure is not None),
        tuple(sentences([(run.selector, tally.coverage(active))])),
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
        view, pane = _pane(Path(path), number, rounds)
        panes.append(pane)
        accounts.append(view.account)
        where = f"{view.account.name}: " if len(paths) > 1 else ""
        warnings += [f"{where}{text}" for text in view.warnings]
    facts = [
        (max(a.done for a in accounts), "round"), (max(len(a.clients) for a in accounts), "client"),
        (sum(len(a.shadows) for a in accounts), "shadow"),
        (sum(sum(a.failures().values()) for a in accounts), "failure"),
    ]  # fmt: skip
    heading = title or ", ".join(run.name for run in accounts)
    return build_page(heading, facts, warnings, panes), accounts


def _pane(path: Path, number: int, rounds: Sequence[int]) -> tuple[_RunView, Pane]:
    """Return what a page shows about the journal at ``path``, and its tab of the page."""
    with closing(read_journal(path)) as journal:
        past = JournalHistory()
        run = account(journal, path.stem, past)
        if not run.rounds:
            raise InputError(f"No round has been recorded in {path} yet.", hint="follow it with: fedcohort dashboard")
        view = run_view(run, past, journal.table()[0].n)
        explained = explanations_of(journal, run.name, run.selector, run.seed, rounds)
    # The tables of all clients and all rounds are long, so figures come before them.
    blocks = [
        card("sentences", run.name, summary_lines(run)),
        *(card("table", table) for table in view.tables[:-2]),
        *(card("figure", figure, number) for figure in view.figures),
        *(card("table", table) for table in view.tables[-2:]),
        card("why", number),
        _rules(run),
    ]
    return view, Pane(run.name, blocks, {figure.name: figure for figure in view.figures}, [explained])


# -- sentences and tables -------------------------------------------------------------------------------------------


def summary_lines(run: Account) -> list[str]:
    """Return sentences on a run's progress and end, and on clients that failed or were never picked."""
    of = f" of {run.planned}" if run.planned is not None else ""
    unit = "rounds" if run.models is None else "models"
    lines = [f"{run.selector} (seed {run.seed}): {run.done}{of} {unit}, {run.state}."]
    if run.reason:
        lines[0] = f"{lines[0][:-1]}: {run.reason.rstrip('.')}."
    lines += [f"Selector changed in {change}." for change in run.changes]
    lines += _replies(run)
    abandoned = sum(r.abandoned is not None for r in run.rounds)
    if abandoned:
        verb = "was" if abandoned == 1 else "were"
        lines.append(f"{quantity(abandoned, 'cohort')} {verb} abandoned and chosen again.")
    if run.waits:
        most = ", ".join(f"{client} {quantity(count, 'time')}" for client, count in run.waits.most_common(3))
        lines.append(f"A place stayed free, because a client had given its share of the newest answers: {most}.")
    if run.left_out:
        slower, asked = run.left_out
        lines.append(
            f"The automatic deadline leaves out {slower} of the {asked} clients asked so far: they take longer."
        )
    members = sum(client.member for client in run.clients)
    if run.never:
        lines.append(f"Never picked: {len(run.never)} of {members} clients ({names(run.never, 50)}).")
    else:
        lines.append(f"Never picked: none of {quantity(members, 'client')}.")
    return lines


def _replies(run: Account) -> list[str]:
    """Return sentences on how many clients returned a model, and how many are still training."""
    lines = []
    failed = run.failures()
    requests = sum(sum(client.statuses.values()) for client in run.clients)  # without clients that are still training
    if failed:
        parts = ", ".join(f"{count} {status.lower()}" for status, count in failed.most_common())
        lines.append(
            f"Clients were asked to train {quantity(requests, 'time')} and returned no model "
            f"{quantity(sum(failed.values()), 'time')}: {parts}."
        )
    elif requests:
        lines.append(f"Clients were asked to train {quantity(requests, 'time')} and always returned a valid model.")
    open_rounds = [r for r in run.rounds if r.seconds is None and r.abandoned is None]
    training = sum(len(r.clients) - r.valid - len(r.failures) for r in open_rounds)
    if training:
        lines.append(f"Asked, but no reply yet: {quantity(training, 'client')}.")
    return lines


def _rules(run: Account) -> Markup:
    proof = run.proof
    if proof is None or proof.rules is None:
        return card("sentences", "Rules", ["The run had no rules."])
    held = " ".join([
        proof.verdict,
        *(f"Round {b.round}, {b.client}: {b.what}." for b in proof.breaches[:10]),
        *(f"{e.client}: {e.what}." for e in proof.exceeded[:10]),
    ])  # fmt: skip
    excluded: Counter[str] = Counter()
    for summary in run.rounds:
        excluded.update(summary.excluded)
    return card("rules", held, proof.rules.to_dict(), excluded.most_common(20))


def _seconds(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else duration(value)


def _shadows_table(run: Account) -> Table:
    """Return what shadow selectors would have done."""
    rows = []
    for s in run.shadows:
        balance = seconds = Cell("–")
        if s.balance is not None:
            balance = Cell(f"{s.balance[1]:.4f}", f"actual: {s.balance[0]:.4f}")
        if s.seconds is not None:
            seconds = Cell(duration(s.seconds[1]), f"actual: {duration(s.seconds[0])}")
        rows.append(
            (
                Cell(s.name),
                Cell(str(s.rounds), f"no picks in {s.silent}" if s.silent else ""),
                Cell(f"{s.same:.0%}" if s.rounds else "–", f"{s.chance:.0%} by chance" if s.rounds else ""),
                balance,
                seconds,
                Cell(s.dropped or s.note),
            )
        )
    note = (
        "Over all rounds: the share of a shadow's picks that were actually picked, the class imbalance (QCID, 0 is "
        "even) of its cohorts if labels are known, and how long its rounds would take by the clients' mean durations."
    )
    columns = ("Shadow", "Rounds", "Same picks", "QCID", "Expected round", "Remark")
    return Table("shadows", "What shadow selectors would have done", columns, tuple(rows), note, frozenset({5}))


def _clients_table(run: Account) -> Table:
    """Return a summary of each client, most often picked first."""
    order = sorted(run.clients, key=lambda c: (-c.picked, c.name))[:_MAX_ROWS]
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
    columns = ("Client", "Picked", "Valid models", "Without a model", "Last round", "Mean time", "Last failure")
    note = f"The first {_MAX_ROWS} of {len(run.clients)} clients." if len(run.clients) > _MAX_ROWS else ""
    return Table("clients", "Every client", columns, tuple(rows), note, frozenset({3, 6}))


def _rounds_table(run: Account) -> Table:
    """Return every round, newest first."""
    rows = [
        (
            Cell(str(r.round), "abandoned" if r.abandoned is not None else ""),
            Cell(f"{len(r.clients)} of {r.candidates}"),
            Cell("–" if r.seconds is None else str(r.valid)),
            Cell("training" if r.seconds is None else duration(r.seconds)),
            Cell("; ".join(f"{n}: {w}" for n, w in list(r.failures.items())[:12])
                 + (f"; abandoned: {r.abandoned}" if r.abandoned else "")),
            Cell(", ".join(r.clients[:40]) + (", ..." if len(r.clients) > 40 else "")),
        )
        for r in list(reversed(run.rounds))[:_MAX_ROWS]
    ]  # fmt: skip
    columns = ("Round", "Picked", "Valid models", "Duration", "Clients without a model, and why", "Cohort")
    note = f"The newest {_MAX_ROWS} of {len(run.rounds)} cohorts." if len(run.rounds) > _MAX_ROWS else ""
    return Table("rounds", "Every round", columns, tuple(rows), note, frozenset({4, 5}))


# -- figures ----------------------------------------------------------------------------------------------------------


def _lines(views: list[dict[str, Any]], label: str) -> Mapping[str, Any]:
    return {"kind": "lines", "views": views, "y": {"label": label, "min": 0}}


_ROUNDS = {"label": "round", "format": "integer"}


def _curves(run: Account) -> Figure | None:
    keys = sorted({key for values in run.metrics.values() for key in values}, key=lambda k: (k != "accuracy", k))
    views, latest = [], []
    for key in keys:
        rounds = [r for r, values in sorted(run.metrics.items()) if values.get(key) is not None]
        if not rounds:
            continue
        numbers = [run.metrics[r][key] for r in rounds]
        series = {"label": run.selector, "color": 1, "x": rounds, "y": json_numbers(np.array(numbers))}
        views.append({"name": key, "x": _ROUNDS, "series": [series]})
        latest.append(f"{key} is {numbers[-1]:.4g} after round {rounds[-1]}")
    if not views:
        return None
    spec = {"kind": "lines", "views": views, "y": {"label": "value"}}
    return Figure("metrics", "The global model", f"{'; '.join(latest[:3])}.", spec)


def _durations(run: Account) -> Figure | None:
    known = [(r.round, r.seconds) for r in run.rounds if r.seconds is not None and r.clients]
    if not known:
        return None
    slow, seconds = max(known, key=lambda pair: pair[1])
    middle = float(np.median([s for _, s in known]))
    y = json_numbers(np.array([s for _, s in known]))
    series = {"label": "rounds", "color": 1, "x": [r for r, _ in known], "y": y}
    text = f"Half of the rounds took {duration(middle)} or less; the longest, round {slow}, took {duration(seconds)}."
    return Figure("durations", "How long rounds took", text,
                  _lines([{"name": "Rounds", "x": _ROUNDS, "series": [series]}], "seconds"))  # fmt: skip


def _outcomes(run: Account) -> Figure | None:
    closed = [r for r in run.rounds if r.seconds is not None and r.clients]
    if not closed:
        return None
    by_status: dict[str, list[int]] = {}
    for i, r in enumerate(closed):
        by_status.setdefault("valid models", [0] * len(closed))[i] = r.valid
        for failure in r.failures.values():
            by_status.setdefault(failure.split(":")[0].lower(), [0] * len(closed))[i] += 1
    series = [
        {"label": label, "color": 1 + k, "x": [r.round for r in closed], "y": counts}
        for k, (label, counts) in enumerate(by_status.items())
    ]
    failed = sum(len(r.failures) for r in closed)
    text = f"{quantity(failed, 'reply', 'replies')} without a valid model in {quantity(len(closed), 'round')}."
    if failed:
        ((reason, count),) = Counter(why for r in closed for why in r.failures.values()).most_common(1)
        text += f" The most frequent reason: {reason} ({quantity(count, 'time')})."
    return Figure("outcomes", "What came back", text,
                  _lines([{"name": "Replies", "x": _ROUNDS, "series": series}], "clients"))  # fmt: skip


def _pick_figures(run: Account, past: JournalHistory, clients: int) -> Sequence[Figure | None]:
    rows = past.in_order
    if not any(len(row.clients) for row in rows):
        return ()
    at = np.array([row.round for row in rows], np.int64)
    curve = RunCurve(
        id=run.name,
        label=run.selector,
        selector=run.selector,
        seed=run.seed,
        state="running",
        federation="",
        params={},
        round=at,
        values={},
        pick_round=np.repeat(at, [len(row.clients) for row in rows]),
        pick_client=np.concatenate([row.clients for row in rows]).astype(np.int64),
        journal=None,
    )
    color, dash = palette.assign([run.selector])[run.selector]
    group = SelectorRuns(run.selector, run.selector, (curve,), color, dash)
    client_names = tuple(client.name for client in run.clients)
    setting = Setting(run.name, (group,), clients, {}, int(at.max()) + 1, names=client_names)
    return picks(setting), participation(setting)

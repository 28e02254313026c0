"""The report of a live run: one self-contained HTML file, from its journal alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from markupsafe import Markup

from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.journal import read_journal
from fedcohort.report import palette
from fedcohort.report.account import Account, JournalHistory, account
from fedcohort.report.data import RunCurve, SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.figures import ROUNDS, json_numbers, lines, participation, picks
from fedcohort.report.page import Pane, build_page
from fedcohort.report.render import card
from fedcohort.report.why import explanations_of
from fedcohort.session.coverage import Tally
from fedcohort.session.coverage import sentences as coverage_sentences
from fedcohort.simulate.leaderboard.formats import Cell, Table
from fedcohort.simulate.leaderboard.words import duration, quantity

_MAX_ROWS = 2000  # of a table on a page; 'fedcohort journal export' writes everything
_OK = Status.OK.name


def run_view(
    run: Account, past: JournalHistory, clients: int
) -> tuple[tuple[Table, ...], tuple[Figure, ...], list[str]]:
    """Return the tables and figures of a run, and warnings; the tables of all clients and all rounds are the last."""
    tally = Tally.of(clients, ((row.round, row.clients, row.n_candidates) for row in past.in_order))
    active = np.array([client.member for client in run.clients], np.bool_)
    warnings = coverage_sentences([(run.selector, tally.coverage(active))])
    return _tables(run), _figures(run, past, clients), warnings


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
    panes: list[Pane] = []
    accounts: list[Account] = []
    warnings: list[str] = []
    for number, path in enumerate(map(Path, paths)):
        with closing(read_journal(path)) as journal:
            past = JournalHistory()
            run = account(journal, path.stem, past)
            if not run.rounds:
                hint = "follow it with: fedcohort dashboard"
                raise InputError(f"No round has been recorded in {path} yet.", hint=hint)
            tables, figures, remarks = run_view(run, past, journal.table()[0].n)
            explained = explanations_of(journal, run.name, run.selector, run.seed, rounds)
        # The tables of all clients and all rounds are long, so figures come before them.
        blocks = [
            card("sentences", run.name, run.sentences()),
            *(card("table", table) for table in tables[:-2]),
            *(card("figure", figure, number) for figure in figures),
            *(card("table", table) for table in tables[-2:]),
            card("why", number),
            _rules(run),
        ]
        panes.append(Pane(run.name, blocks, {figure.name: figure for figure in figures}, [explained]))
        accounts.append(run)
        warnings += [f"{run.name}: {text}" if len(paths) > 1 else text for text in remarks]
    facts = [
        (max(a.done for a in accounts), "round"), (max(len(a.clients) for a in accounts), "client"),
        (sum(len(a.shadows) for a in accounts), "shadow"), (sum(a.failures().total() for a in accounts), "failure"),
    ]  # fmt: skip
    heading = title or ", ".join(run.name for run in accounts)
    return build_page(heading, facts, warnings, panes), accounts


def _rules(run: Account) -> Markup:
    proof = run.proof
    if proof is None or proof.rules is None:
        return card("sentences", "Rules", ["The run had no rules."])
    held = [proof.verdict, *(f"Round {b.round}, {b.client}: {b.what}." for b in proof.breaches[:10])]
    held += [f"{e.client}: {e.what}." for e in proof.exceeded[:10]]
    excluded: Counter[str] = Counter()
    for summary in run.rounds:
        excluded.update(summary.excluded)
    return card("rules", " ".join(held), proof.rules.to_dict(), excluded.most_common(20))


def _tables(run: Account) -> tuple[Table, ...]:
    """Return what shadow selectors would have done, every client (most often picked first), and every round."""
    clients = [
        (
            Cell(c.name, "" if c.member else "left"),
            Cell(str(c.picked)),
            Cell(str(c.statuses.get(_OK, 0))),
            Cell(", ".join(f"{n} {s.lower()}" for s, n in c.statuses.items() if s != _OK) or "–"),
            Cell("never" if c.last is None else f"{c.last}"),
            Cell("–" if c.seconds is None else duration(c.seconds)),
            Cell(c.reason),
        )
        for c in sorted(run.clients, key=lambda c: (-c.picked, c.name))[:_MAX_ROWS]
    ]
    of_client = ("Client", "Picked", "Valid models", "Without a model", "Last round", "Mean time", "Last failure")
    note = f"The first {_MAX_ROWS} of {len(run.clients)} clients." if len(run.clients) > _MAX_ROWS else ""
    every_client = Table("clients", "Every client", of_client, tuple(clients), note, frozenset({3, 6}))

    rounds = []
    for r in run.rounds[: -_MAX_ROWS - 1 : -1]:  # newest first
        whys = "; ".join(f"{n}: {w}" for n, w in list(r.failures.items())[:12])
        closed = r.seconds is not None
        rounds.append(
            (
                Cell(str(r.round), "abandoned" if r.abandoned is not None else ""),
                Cell(f"{len(r.clients)} of {r.candidates}"),
                Cell(str(r.valid) if closed else "–"),
                Cell("training" if r.seconds is None else duration(r.seconds)),
                Cell(whys + (f"; abandoned: {r.abandoned}" if r.abandoned else "")),
                Cell(", ".join(r.clients[:40]) + (", ..." if len(r.clients) > 40 else "")),
            )
        )
    of_round = ("Round", "Picked", "Valid models", "Duration", "Clients without a model, and why", "Cohort")
    note = f"The newest {_MAX_ROWS} of {len(run.rounds)} cohorts." if len(run.rounds) > _MAX_ROWS else ""
    every_round = Table("rounds", "Every round", of_round, tuple(rounds), note, frozenset({4, 5}))
    if not run.shadows:
        return every_client, every_round

    shadows = []
    for s in run.shadows:
        cells = [Cell(s.name), Cell(str(s.rounds), f"no picks in {s.silent}" if s.silent else "")]
        cells.append(Cell("–") if s.same is None else Cell(f"{s.same:.0%}", f"{s.chance:.0%} by chance"))
        for values, text in ((s.qcid, "{:.4f}".format), (s.seconds, duration)):
            both = None if values is None else (text(values["with_it"]), f"actual: {text(values['as_it_was'])}")
            cells.append(Cell("–") if both is None else Cell(*both))
        shadows.append((*cells, Cell(s.dropped or s.note)))
    note = (
        "Over all rounds: the share of a shadow's picks that were actually picked, the class imbalance (QCID, 0 is "
        "even) of its cohorts if labels are known, and how long its rounds would take by the clients' mean durations."
    )
    of_shadow = ("Shadow", "Rounds", "Same picks", "QCID", "Expected round", "Remark")
    title = "What shadow selectors would have done"
    return Table("shadows", title, of_shadow, tuple(shadows), note, frozenset({5})), every_client, every_round


def _figures(run: Account, past: JournalHistory, clients: int) -> tuple[Figure, ...]:
    """Return the figures of what a run has so far: the global model, durations, failures and picks."""
    figures: list[Figure | None] = []
    keys = sorted({key for values in run.metrics.values() for key in values}, key=lambda k: (k != "accuracy", k))
    views, latest = [], []
    for key in keys:
        known = {r: values[key] for r, values in sorted(run.metrics.items()) if values.get(key) is not None}
        if known:
            y = json_numbers(np.array(list(known.values())))
            series = {"label": run.selector, "color": 1, "x": list(known), "y": y}
            views.append({"name": key, "x": ROUNDS, "series": [series]})
            latest.append("{1} is {0[1]:.4g} after round {0[0]}".format(list(known.items())[-1], key))
    if views:
        figures.append(lines("metrics", "The global model", f"{'; '.join(latest[:3])}.", views, {"label": "value"}))

    closed = [(r, r.seconds) for r in run.rounds if r.seconds is not None and r.clients]
    if closed:
        x, seconds = [r.round for r, _ in closed], np.array([seconds for _, seconds in closed])
        text = f"Half of the rounds took {duration(float(np.median(seconds)))} or less; the longest, round "
        text += f"{x[seconds.argmax()]}, took {duration(seconds.max())}."
        series = {"label": "rounds", "color": 1, "x": x, "y": json_numbers(seconds)}
        view = {"name": "Rounds", "x": ROUNDS, "series": [series]}
        figures.append(lines("durations", "How long rounds took", text, [view], {"label": "seconds", "min": 0}))

        counts = {"valid models": [r.valid for r, _ in closed]}
        whys: Counter[str] = Counter()
        for i, (r, _) in enumerate(closed):
            whys.update(r.failures.values())
            for why in r.failures.values():
                counts.setdefault(why.split(":")[0].lower(), [0] * len(closed))[i] += 1
        every = [{"label": label, "color": 1 + k, "x": x, "y": y} for k, (label, y) in enumerate(counts.items())]
        text = f"{quantity(whys.total(), 'reply', 'replies')} without a valid model in "
        text += f"{quantity(len(closed), 'round')}."
        for reason, count in whys.most_common(1):
            text += f" The most frequent reason: {reason} ({quantity(count, 'time')})."
        view = {"name": "Replies", "x": ROUNDS, "series": every}
        figures.append(lines("outcomes", "What came back", text, [view], {"label": "clients", "min": 0}))

    rows = past.in_order
    if any(len(row.clients) for row in rows):
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
        group = SelectorRuns(run.selector, run.selector, (curve,), *palette.assign([run.selector])[run.selector])
        names = tuple(client.name for client in run.clients)
        setting = Setting(run.name, (group,), clients, {}, int(at.max()) + 1, names=names)
        figures += [picks(setting), participation(setting)]
    return tuple(figure for figure in figures if figure is not None)

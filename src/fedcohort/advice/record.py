"""What a journal knows about a federation: who was there, who answered when, who failed, how the model improved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.core.selector_spec import described_name
from fedcohort.core.signals import Signal
from fedcohort.journal import CohortRow, Journal
from fedcohort.journal.events import ABANDONED, PROPOSED, SELECTOR, SETTINGS, SHADOW, TIMES
from fedcohort.report.account import account
from fedcohort.session.resume import is_asynchronous
from fedcohort.simulate.store.results import Results, load, open_journal

MAX_CLIENTS = 1_000  # a twin has at most so many clients, drawn at random


@dataclass(frozen=True, eq=False)
class Record:
    """A journal's content as arrays; a row is one client that was asked once, n in all.

    Attributes
    ----------
    names : tuple of str
        The N members.
    sizes : (N,) float array or None
    mixes : (N, B) float array or None
        Every client's label counts.
    squares : (N,) float array or None
        Every client's sum of squared label shares, if only label products are known, over ``classes`` classes.
    selector, parameters, cohort, models : str, mapping, int, int
        Who chose, with which parameters, how many per round, and how many global models there are.
    buffer : int or None
        Answers per model, if clients answer one by one.
    automatic, spares, deadline : bool, int, float or None
        Whether deadlines were automatic; how many more clients a round asked; the fixed deadline, as rounds with late
        clients show it.
    client, round, status : (n,) int array
        ``client`` is a place among the members.
    begun, seconds : (n,) float array
        When the client was asked, in seconds on the run's clock, and how long it took. NaN if that is not on record; a
        client that had not answered when its round closed has the time until then.
    answered : (n,) bool array
        Whether it returned a model at last, in time or late.
    asked : (r,) float array
        When each cohort was chosen.
    online : (r, N) bool array or None
        Who could be asked then.
    closed : (r,) float array
    curve : (m, 2) float array
        Round and score of the global model; higher is better.
    metric : str
    signals : frozenset of str
        What the host can supply to a selector.
    shadows : tuple of str
        What shadow selectors would have done, in sentences.
    shadowed : mapping of str to mapping
        The shadow selectors that did not fail, by registered name, with their parameters.
    remarks : tuple of str
    """

    name: str
    names: tuple[str, ...]
    sizes: FloatArray | None
    mixes: FloatArray | None
    squares: FloatArray | None
    classes: int | None
    selector: str
    parameters: Mapping[str, Any]
    cohort: int
    buffer: int | None
    automatic: bool
    spares: int
    deadline: float | None
    models: int
    client: IntArray
    round: IntArray
    status: IntArray
    begun: FloatArray
    seconds: FloatArray
    answered: BoolArray
    asked: FloatArray
    closed: FloatArray
    online: BoolArray | None
    midnight: float
    curve: FloatArray
    metric: str
    signals: frozenset[str]
    shadows: tuple[str, ...]
    shadowed: Mapping[str, Mapping[str, Any]]
    remarks: tuple[str, ...]

    @property
    def timed(self) -> bool:
        """Whether it says how long clients take."""
        return bool((np.isfinite(self.seconds) & self.answered & (self.seconds > 0)).any())

    @property
    def is_share(self) -> bool:
        """Whether the curve is an accuracy between 0 and 1."""
        return "loss" not in self.metric.lower() and bool(((self.curve[:, 1] >= 0) & (self.curve[:, 1] <= 1)).all())

    @property
    def span(self) -> float:
        """Seconds from the first cohort to the last."""
        return float(self.asked[-1] - self.asked[0])


def read_record(path: Path) -> Record:
    """Read the journal of a live or simulated run."""
    with closing(open_journal(path)) as journal:
        dropped = {body["ticket"] for body in journal.events(ABANDONED)}
        cohorts = [row for row in journal.cohorts() if len(row.clients)]
        if not any(row.told_at is not None or row.ticket in dropped for row in cohorts):
            raise InputError(f"No round has been recorded in {path} yet.", hint="make a twin once some rounds are over")
        return _read(journal, path, cohorts, dropped)


def _read(journal: Journal, path: Path, cohorts: Sequence[CohortRow], dropped: set[int]) -> Record:
    table, active = journal.table()
    if not active.any():
        raise InputError(f"The federation of {path} has no members any more, so it has no twin.")
    remarks = []
    members = np.flatnonzero(active)
    if len(members) < table.n:
        remarks.append(f"{table.n - len(members)} clients that left are not in the twin.")
    if len(members) > MAX_CLIENTS:
        remarks.append(f"The twin has {MAX_CLIENTS:,} of {len(members):,} clients, drawn at random.")
        members = np.sort(np.random.default_rng(0).permutation(members)[:MAX_CLIENTS])
    place = np.full(table.n, -1)
    place[members] = np.arange(len(members))
    asynchronous = is_asynchronous(journal)
    folder = path.resolve().parent  # a simulated run's experiment knows the simulated clock
    simulated = folder.name == "journal" and (folder.parent / "meta.json").exists()
    results = load(folder.parent) if simulated else None
    asked, closed = _times(cohorts, results, path.stem, asynchronous)
    rows = _rows(journal, cohorts, asked, closed, results, path.stem)
    kept = place[rows["client"]] >= 0
    rows = {key: values[kept] for key, values in rows.items()}
    counted = [row for row in cohorts if row.ticket not in dropped]
    if dropped:
        remarks.append(f"{len(dropped)} abandoned cohorts count for clients, not for rounds.")
    changes = journal.events(SELECTOR)
    if changes:
        remarks.append(f"The selector changed {len(changes)} times; the newest is the one compared with.")
    sizes = np.maximum(table.sizes[members].astype(np.float64), 1.0) if Signal.SIZES in table.signals else None
    labels = table.labels if Signal.LABEL_PRODUCTS in table.signals else None
    counts = labels.counts[members] if isinstance(labels, LabelCounts) else None
    squares = None
    if sizes is not None and isinstance(labels, LabelGram):
        squares = np.diag(labels.gram)[members] / sizes**2
    elif sizes is not None and isinstance(labels, LabelFactor):
        squares = (labels.factor[members] ** 2).sum(axis=1) / sizes**2
    curve, metric = _curve(journal.metrics())
    losses = np.isfinite(rows["loss"])
    if not len(curve) and losses.any():  # without a test, clients' losses of the model they received
        number, of = np.unique(rows["round"][losses], return_inverse=True)
        curve = np.stack([number, -np.bincount(of, rows["loss"][losses]) / np.bincount(of)], axis=1)
        metric = "mean loss of the clients"
    size = int(
        statistics.median([len(row.clients) if row.wanted is None else row.wanted for row in counted or cohorts])
    )
    automatic, spec = bool(journal.events(PROPOSED)), journal.meta()["selector"]
    settings = (journal.events(SETTINGS) or [{}])[-1]
    found = settings.get("spares")
    spares = max(found, 0) if isinstance(found, int) else 0
    if spares and isinstance(settings.get("cohort-size"), int):
        size = settings["cohort-size"]
    buffer = None
    if asynchronous:
        size, buffer = _flow(rows, asked)
    return Record(
        name=path.stem,
        names=tuple(table.names_of(members)),
        sizes=sizes,
        mixes=None if counts is None or not (counts.sum(axis=1) > 0).all() else counts,
        squares=squares,
        classes=None if labels is None else int(labels.classes),
        selector=described_name(spec),
        parameters=spec.get("params") or {} if isinstance(spec, Mapping) else {},
        cohort=max(1, size),
        buffer=buffer,
        automatic=automatic,
        spares=spares,
        deadline=None if automatic or spares or asynchronous else _deadline(rows, asked, closed),
        models=len({row.round for row in counted if row.told_at is not None}),
        client=place[rows["client"]],
        round=rows["round"],
        status=rows["status"],
        begun=rows["begun"],
        seconds=rows["seconds"],
        answered=rows["answered"],
        asked=asked,
        closed=closed,
        online=_online(journal, cohorts, members, rows, asked, place),
        midnight=0.0 if results is not None else -(cohorts[0].asked_at % 86400.0),
        curve=curve,
        metric=metric,
        signals=frozenset(map(str, journal.meta().get("signals") or ())),  # None: the host has not said
        shadows=tuple(s.sentence() for s in account(journal, path.stem).shadows),
        shadowed=_shadowed(journal),
        remarks=tuple(remarks),
    )


def _times(
    cohorts: Sequence[CohortRow], results: Results | None, run: str, asynchronous: bool
) -> tuple[FloatArray, FloatArray]:
    """Return when each cohort was chosen and closed, in seconds since the first."""
    if results is None:
        start = cohorts[0].asked_at
        asked = np.array([row.asked_at - start for row in cohorts])
        closed = np.array([math.nan if row.told_at is None else row.told_at - start for row in cohorts])
        return np.maximum.accumulate(asked), closed  # a clock may have been set back
    rounds, clock = results.column(run, "round").astype(int), results.column(run, "clock").astype(float)
    ends = dict(zip(rounds.tolist(), clock.tolist(), strict=True))
    longest = {
        number: float(np.nanmax(np.where(np.isfinite(d), d, np.nan), initial=0.0))
        for number, d in zip(rounds.tolist(), results.per_client(run, "durations"), strict=True)
    }
    closed = np.array([ends.get(row.round, math.nan) for row in cohorts])
    before = np.array([ends.get(row.round - 1, 0.0) for row in cohorts])
    # A round begins when a client is online, so it may begin later than the last one ended.
    asked = np.maximum(before, closed - np.array([longest.get(row.round, 0.0) for row in cohorts]))
    if asynchronous:
        # Clients were asked one by one between two models; the journal does not say when, so evenly.
        number = np.array([row.round for row in cohorts])
        first = np.searchsorted(number, number)
        part = (np.arange(len(cohorts)) - first) / np.bincount(number)[number]
        asked = before + part * np.maximum(np.where(np.isnan(closed), before, closed) - before, 0.0)
    return np.where(np.isnan(asked), before, asked), closed


def _rows(
    journal: Journal,
    cohorts: Sequence[CohortRow],
    asked: FloatArray,
    closed: FloatArray,
    results: Results | None,
    run: str,
) -> dict[str, AnyArray]:
    """Return a row for each client that was asked, as columns."""
    place = {row.ticket: i for i, row in enumerate(cohorts)}
    timed: dict[tuple[int, int], float] = {}
    for body in journal.events(TIMES):
        i = place.get(body["ticket"])
        if i is not None:
            chosen = cohorts[i].clients if "places" not in body else cohorts[i].clients[body["places"]]
            timed |= {(i, int(c)): s for c, s in zip(chosen.tolist(), body["seconds"], strict=False) if s is not None}
    if results is not None:
        seconds_of_round = dict(
            zip(results.column(run, "round").astype(int).tolist(), results.per_client(run, "durations"), strict=True)
        )
        used: dict[int, int] = {}
        for i, row in enumerate(cohorts):
            first = used.get(row.round, 0)
            used[row.round] = first + len(row.clients)
            values = seconds_of_round.get(row.round, np.zeros(0))[first : used[row.round]]
            timed |= {(i, int(c)): float(s) for c, s in zip(row.clients.tolist(), values, strict=False)}
    at_last = {(place[r.ticket], r.client): r for r in journal.replies() if r.ticket in place}
    columns: dict[str, list[Any]] = {
        key: [] for key in ("client", "round", "status", "begun", "seconds", "loss", "answered")
    }
    start = cohorts[0].asked_at
    for i, row in enumerate(cohorts):
        for client in row.clients.tolist():
            reply = at_last.get((i, client))
            if reply is None and math.isnan(closed[i]):
                continue  # still at work
            metrics: Mapping[str, Any] = {} if reply is None else reply.metrics
            status = int(Status.MISSING) if reply is None else reply.status
            answered = status in (Status.OK, Status.LATE) and reply is not None
            seconds = metrics.get(Signal.DURATION.name, timed.get((i, client), math.nan))
            if math.isnan(seconds) and reply is not None and len(row.clients) == 1 and results is None:
                seconds = reply.at - start - asked[i]  # one client, one report
            if status in (Status.LATE, Status.MISSING) and not math.isfinite(seconds):
                seconds, answered = closed[i] - asked[i], False  # all that is known is when its round closed
            values = (client, row.round, status, asked[i], seconds, metrics.get(Signal.LOSS.name, math.nan), answered)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    kinds = {"client": np.int64, "round": np.int64, "status": np.int64, "answered": np.bool_}
    return {key: np.array(values, kinds.get(key, np.float64)) for key, values in columns.items()}


def _online(
    journal: Journal,
    cohorts: Sequence[CohortRow],
    members: IntArray,
    rows: Mapping[str, AnyArray],
    asked: FloatArray,
    place: IntArray,
) -> BoolArray | None:
    """Return who could be asked when each cohort was chosen; None if that was pruned."""
    n = int(place.max()) + 1
    online = np.zeros((len(cohorts), n), np.bool_)
    for i, row in enumerate(cohorts):
        candidates = journal.candidates(row.ticket, len(place))
        if candidates is None:
            return None
        there = place[candidates]
        online[i, there[there >= 0]] = True
    # Whoever is at work is no candidate, but online.
    for client, begun, seconds in zip(rows["client"], rows["begun"], rows["seconds"], strict=True):
        if seconds > 0 and place[client] >= 0:
            first, last = np.searchsorted(asked, [begun, begun + seconds])
            online[first:last, place[client]] = True
    return online


def _shadowed(journal: Journal) -> dict[str, Mapping[str, Any]]:
    """Return the shadow selectors that did not fail, those whose trial is over included."""
    events = journal.events(SHADOW)
    failed = {body["name"] for body in events if body["what"] == "failed"}
    trials = [body["selector"] for body in events if "selector" in body and body["name"] not in failed]
    specs = [*journal.meta()["shadows"].values(), *trials]
    return {described_name(spec): spec["params"] for spec in specs}


def _deadline(rows: Mapping[str, AnyArray], asked: FloatArray, closed: FloatArray) -> float | None:
    """Return the usual length of the rounds in which somebody was late, if any."""
    late = np.isin(rows["status"], (int(Status.LATE), int(Status.MISSING)))
    lengths = (closed - asked)[np.isin(asked, rows["begun"][late])]
    lengths = lengths[np.isfinite(lengths) & (lengths > 0)]
    return float(np.median(lengths)) if len(lengths) >= 3 else None


def _flow(rows: Mapping[str, AnyArray], asked: FloatArray) -> tuple[int, int]:
    """Return how many clients were at work at a time, and how many answers made a model."""
    models = max(1, len(set(rows["round"].tolist())))
    buffer = max(1, round(float(rows["answered"].sum()) / models))
    end = rows["begun"] + np.where(np.isfinite(rows["seconds"]), rows["seconds"], 0.0)
    middle = asked[len(asked) // 4 :]
    at_work = [int(((rows["begun"] <= t) & (end > t)).sum()) for t in middle[:: max(1, len(middle) // 50)]]
    return max(1, int(np.median(at_work))) if at_work else 1, buffer


def _curve(metrics: Mapping[int, Mapping[str, float]]) -> tuple[FloatArray, str]:
    """Return the global model's score by round, and its name: an accuracy if there is one, otherwise minus a loss."""
    names = sorted({key for values in metrics.values() for key in values}, key=lambda key: (len(key), key))
    name = next((key for word in ("accuracy", "acc", "loss") for key in names if word in key.lower()), "")
    sign = -1.0 if "loss" in name.lower() else 1.0
    points = [(r, sign * v[name]) for r, v in sorted(metrics.items()) if v.get(name) is not None] if name else []
    curve = np.array(points, np.float64).reshape(-1, 2)
    return curve[np.isfinite(curve).all(axis=1)], name

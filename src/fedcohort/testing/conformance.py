"""The checks that every selector must pass. :func:`check_selector` runs them all."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.audit.participation import prove_participation
from fedcohort.core.clients import ClientTable, LabelCounts, LabelFactor
from fedcohort.core.errors import (
    DuplicateReportError,
    FedcohortError,
    InputError,
    ParameterError,
    SignalError,
    TicketError,
)
from fedcohort.core.params import parameters
from fedcohort.core.protocol import RoundReport, RoundRequest, Selector, is_per_client
from fedcohort.core.selector_spec import describe
from fedcohort.core.signals import Signal
from fedcohort.journal.codec import state_fields
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.session.validation import as_selector
from fedcohort.testing.host import ScriptedHost, Trace, mixed_statuses

AnySelector = Selector[Any]
Check = Callable[[AnySelector], None]
CHECKS: dict[str, Check] = {}
_SEEDS = 75  # sessions per federation in the check of relabelling
_ROUNDS_ELSEWHERE = 12  # rounds that are also played in another process
_P_VALUE = 1e-9  # so small because the suite runs thousands of times and must not fail by chance


class ConformanceError(FedcohortError, AssertionError):
    """A selector fails a conformance check."""


def _check(name: str) -> Callable[[Check], Check]:
    def decorate(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return decorate


ABOUT_THE_CLASS = frozenset({"parameters", "documentation"})
"""Checks that do not depend on the values of parameters."""


def checked_forms(selector: AnySelector) -> dict[str, AnySelector]:
    """Return by name the selector as given, and with each parameter set in its class's ``checked_params``.

    >>> from fedcohort.selectors import Astraea
    >>> checked_forms(Astraea())
    {'as given': Astraea(turns=True), 'without turns': Astraea(turns=False)}
    """
    kind = type(selector)
    return {"as given": selector, **{name: kind(**params) for name, params in kind.checked_params.items()}}


def check_selector(selector: AnySelector | type[AnySelector] | str, *, skip: dict[str, str] | None = None) -> None:
    """Run every conformance check on a selector, as given and with each parameter set of :func:`checked_forms`.

    Parameters
    ----------
    selector : Selector, type or str
        The selector to check, its class, or the name of a registered one.
    skip : mapping of check name to reason, optional
        Checks that do not apply, each with a written reason.

    Raises
    ------
    ConformanceError
        Names the first check that fails, and what happened.
    """
    is_class = isinstance(selector, type) and issubclass(selector, Selector)
    selector = as_selector(selector() if is_class else selector)  # type: ignore[operator]
    skip = skip or {}
    for name in skip:
        if name not in CHECKS:
            raise InputError(f"There is no check {name!r}. Known: {', '.join(CHECKS)}.")
    for form, variant in checked_forms(selector).items():
        for name in CHECKS:
            if name not in skip and (form == "as given" or name not in ABOUT_THE_CLASS):
                run_check(name, variant)


def run_check(name: str, selector: AnySelector) -> None:
    """Run one check by name; any error becomes a :class:`ConformanceError` that names the selector and the check."""
    spec = describe(selector)
    default = {info.name: info.default for info in parameters(type(selector))}
    changed = {key: value for key, value in spec["params"].items() if value != default[key]}
    title = spec["class"] + (f" with {changed}" if changed else "")
    try:
        CHECKS[name](selector)
    except ConformanceError as error:
        raise ConformanceError(f"{title} fails the check {name!r}: {error.message}") from error
    except Exception as error:
        raise ConformanceError(f"{title} fails the check {name!r}: {type(error).__name__}: {error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


# -- the cohort -----------------------------------------------------------------------------------------------------


@_check("cohort")
def _check_cohort_is_valid(selector: AnySelector) -> None:
    """Cohorts are unique, available clients, never more than asked for; also for k = 1, k >= N, changing clients."""
    host = ScriptedHost()
    for size in (1, 3, host.n, None):
        for some in (False, True):
            host.play(host.session(selector, seed=3), 8, size, some=some)  # the session checks every cohort
    lonely = ScriptedHost(n=1)
    trace = lonely.play(lonely.session(selector), 3, 1)
    _require(trace[0] == (0,), f"with one client the cohort must be that client, got {trace[0]}")
    session = host.session(selector)
    cohort = host.play_round(session, size=5, available=np.array([4, 7]))
    _require(set(cohort.clients.tolist()) <= {4, 7} and cohort.size >= 1, f"picked {cohort.clients} of [4, 7]")


@_check("rules")
def _check_rules_hold(selector: AnySelector) -> None:
    """An operator's rules hold: the selector never sees excluded clients, and demanded clients are in the cohort."""
    host = ScriptedHost()
    names = host.table.names
    rules = Rules(blocked=names[:2], pinned=names[2:3], min_separation=2, max_participations=4)
    session = Session(selector, host.table, seed=5, signals=host.signals, rules=rules)
    for _ in range(10):
        last = session.journal.cohorts()[-1:]
        before = set(last[0].clients.tolist()) if last else set()
        cohort = host.play_round(session, size=3)
        picked = set(cohort.clients.tolist())
        _require(not picked & {0, 1}, f"picked {sorted(picked)}, though 0 and 1 are blocked")
        _require(not picked & before, f"picked {sorted(picked & before)} in two rounds in a row, against the rules")
        seen = session.journal.candidates(cohort.ticket, host.n)
        offered = set() if seen is None else set(seen.tolist())
        _require(not offered & ({0, 1} | before), f"was offered {sorted(offered)}, though rules exclude some of them")
        if cohort.stop:
            break
    proof = prove_participation(session.journal)
    _require(proof.holds, f"the rules did not hold: {proof.breaches[:3]}")
    _require(any(2 in row.clients.tolist() for row in session.journal.cohorts()), "the pinned client never took part")


@_check("nobody-available")
def _check_nobody_available(selector: AnySelector) -> None:
    """A round without available clients is empty and does not disturb the next."""
    host = ScriptedHost()
    session = host.session(selector)
    host.play(session, 2)
    empty = host.play_round(session, available=np.empty(0, np.int64))
    _require(empty.size == 0, "a cohort was picked out of nobody")
    _require(host.play_round(session).size >= 1, "nobody was picked after an empty round")


# -- determinism ------------------------------------------------------------------------------------------------------


@_check("same-seed")
def check_same_seed(selector: AnySelector, rounds: int = 25) -> None:
    """The same seed gives the same cohorts, and global generators are neither read nor written."""
    host = ScriptedHost()
    before = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  # watched, not used
    try:
        first = host.play(host.session(selector, seed=5), rounds, some=True)
        after = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
        _require(str(before) == str(after), "a global random generator was changed")
        np.random.seed(12345)  # noqa: NPY002  # changes the cohorts of a selector that reads the global generator
        random.seed(12345)
        second = host.play(host.session(selector, seed=5), rounds, some=True)
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])
    _require(first == second, f"two runs with one seed differ: {_first_difference(first, second)}")


@_check("other-process")
def _check_other_process(selector: AnySelector) -> None:
    """Another process with another hash seed gives the same cohorts; only for selectors that can be imported."""
    spec = describe(selector)
    module, _, qualname = spec["class"].partition(":")
    if module == "__main__" or getattr(sys.modules.get(module), qualname, None) is not type(selector):
        return  # defined at a prompt or inside a function
    host = ScriptedHost()
    here = host.play(host.session(selector, seed=5), _ROUNDS_ELSEWHERE)
    try:
        (there,) = play_elsewhere([selector])
    except ModuleNotFoundError:
        return  # defined in a file that only this process can import
    _require(here == there, f"another process picks other cohorts: {_first_difference(here, there)}")


def play_elsewhere(selectors: Sequence[AnySelector]) -> list[Trace]:
    """Return the cohorts that each selector picks in another process with another hash seed.

    Raises
    ------
    ModuleNotFoundError
        If the other process cannot import a selector.
    """
    script = (
        "import importlib, json, sys\n"
        "from fedcohort.core.protocol import SELECTORS\n"
        "from fedcohort.testing import ScriptedHost\n"
        "host = ScriptedHost()\n"
        "traces = []\n"
        "for spec in json.load(sys.stdin):\n"
        "    if spec['reference']:\n"
        "        thing = SELECTORS.get(spec['reference'])\n"
        "    else:\n"
        "        module, _, name = spec['class'].partition(':')\n"
        "        thing = importlib.import_module(module)\n"
        "        for part in name.split('.'): thing = getattr(thing, part)\n"
        "    params = {k: tuple(v) if isinstance(v, list) else v for k, v in spec['params'].items()}\n"
        f"    traces.append(host.play(host.session(thing(**params), seed=5), {_ROUNDS_ELSEWHERE}))\n"
        "print(json.dumps(traces))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([describe(selector) for selector in selectors]),
        # Another hash seed changes the cohorts of a selector that depends on the order of a set.
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        raise ModuleNotFoundError(done.stderr.strip()[-300:])
    _require(done.returncode == 0, f"it cannot run in another process: {done.stderr.strip()[-300:]}")
    return [[tuple(cohort) for cohort in trace] for trace in json.loads(done.stdout)]


@_check("resume")
def check_resume(selector: AnySelector, rounds: int = 20) -> None:
    """Closing and opening the session again in every round changes nothing."""
    host = ScriptedHost()
    expected = host.play(host.session(selector, seed=2), rounds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        host.session(selector, seed=2, journal=path).close()
        trace: Trace = []
        for _ in range(len(expected)):
            request = RoundRequest(size=3)
            with Session.open(path, selector) as session:
                cohort = session.ask(request, host.answer(session.query(request), session.round))
            with Session.open(path, selector) as session:
                if cohort.size:
                    session.tell(host.report(session.pending[0]))
            trace.append(tuple(cohort.clients.tolist()))
    _require(trace == expected, f"a resumed session differs: {_first_difference(expected, trace)}")


def _first_difference(a: Trace, b: Trace) -> str:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"round {i}: {x} against {y}"
    return f"{len(a)} rounds against {len(b)}"


@_check("one-at-a-time")
def check_one_at_a_time(selector: AnySelector) -> None:
    """In an asynchronous session it chooses one client while others work, and can be resumed after any event.

    A selector without ``one_at_a_time`` must be refused there.
    """
    host = ScriptedHost()
    if not selector.one_at_a_time:
        try:
            Session(selector, host.table, signals=host.signals, asynchronous=True)
        except InputError:
            return
        raise ConformanceError("an asynchronous session accepts it, although it does not set 'one_at_a_time'")
    events = 32
    session = Session(selector, host.table, seed=2, signals=host.signals, asynchronous=True)
    expected = host.play_one_by_one(lambda: session, events)
    for before, client in expected:
        _require(client not in before, f"picked client {client} while it was at work")
    _require(session.round > 1, f"its clock stands at {session.round} after {events} events")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        Session(selector, host.table, seed=2, signals=host.signals, journal=path, asynchronous=True).close()
        resumed = host.play_one_by_one(lambda: Session.open(path, selector), events, reopen=True)
    _require(resumed == expected, "a session that is resumed after every event chooses other clients")


# -- state ------------------------------------------------------------------------------------------------------------


@_check("pure")
def _check_pure(selector: AnySelector) -> None:
    """Selectors never modify their arguments: state, slate, answer, outcome."""
    host = ScriptedHost()
    session = host.session(selector)
    for _ in range(6):
        before = session.state
        copies = {name: np.array(value) for name, value in state_fields(before)}
        host.play_round(session)
        for name, value in state_fields(before):
            now = np.asarray(value)
            same = np.array_equal(now, copies[name], equal_nan=now.dtype.kind == "f")
            _require(same, f"the state field {name!r} was changed in place")


@_check("bounded-state")
def _check_bounded_state(selector: AnySelector) -> None:
    """The state does not grow with the rounds, and per-client fields have one row per client."""
    host = ScriptedHost()
    session = host.session(selector)
    sizes = []
    for rounds in (30, 40):
        host.play(session, rounds)
        for f in dataclasses.fields(session.state):
            if is_per_client(f):
                rows = len(getattr(session.state, f.name))
                _require(rows == host.n, f"the per-client field {f.name!r} has {rows} rows for {host.n} clients")
        sizes.append(sum(np.asarray(value).nbytes for _, value in state_fields(session.state)))
    _require(sizes[1] <= sizes[0], f"the state grew from {sizes[0]} to {sizes[1]} bytes over 40 rounds")


@_check("finite-state")
def _check_finite_state(selector: AnySelector) -> None:
    """With losses of 0, of 1e30, or all equal, cohorts stay valid and the state stays finite."""
    scripts: dict[str, Callable[[int, Any], Any]] = {
        "losses of 0": lambda t, clients: np.zeros(len(clients)),
        "losses of 1e30": lambda t, clients: np.full(len(clients), 1e30),
        "losses from 1e-30 to 1e30": lambda t, clients: 10.0 ** (((clients * 7 + t * 3) % 61) - 30.0),
        "equal losses": lambda t, clients: np.full(len(clients), 1.5),
    }
    for what, script in scripts.items():
        host = ScriptedHost(loss=script)
        session = host.session(selector)
        fresh = {name: _not_finite(value) for name, value in state_fields(session.state)}
        host.play(session, 30)
        for name, value in state_fields(session.state):
            # NaN may mean "not known yet" in the initial state, so only more of it counts.
            _require(
                _not_finite(value) <= fresh[name], f"with {what} the state field {name!r} got NaN or infinite entries"
            )


def _not_finite(value: Any) -> int:
    array = np.asarray(value)
    return int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0


# -- reports --------------------------------------------------------------------------------------------------------


@_check("reports")
def _check_reports(selector: AnySelector) -> None:
    """Failed, late, missing, invalid, duplicate and unknown reports do no harm."""
    host = ScriptedHost()
    session = host.session(selector)
    for _ in range(12):
        host.play_round(session, size=6, status=mixed_statuses)
    request = RoundRequest(size=4)
    cohort = session.ask(request, host.answer(session.query(request), session.round))
    if cohort.stop:
        return
    session.tell(RoundReport(cohort.ticket, []))  # everybody missing
    for bad, error in (
        (RoundReport(cohort.ticket, []), DuplicateReportError),
        (RoundReport(10_000, []), TicketError),
    ):
        try:
            session.tell(bad)
        except error:
            continue
        raise ConformanceError(f"a report that should raise {error.__name__} was accepted")
    session.tell(RoundReport(cohort.ticket, cohort.clients[:1]))  # late: recorded, changes nothing
    request = RoundRequest(size=4)
    cohort = session.ask(request, host.answer(session.query(request), session.round))
    whole = host.report(cohort)
    nan = {signal: np.full(cohort.size, np.nan) for signal in whole.metrics}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=nan))
    host.play(session, 3)


@_check("signals")
def _check_signals_declared(selector: AnySelector) -> None:
    """The selector declares every signal it reads, and a host that lacks one is refused at the start."""
    host = ScriptedHost()
    try:
        host.play(host.session(selector), 25)
    except SignalError as error:
        raise ConformanceError(error.message) from error
    for signal in selector.requires - {Signal.STALENESS}:  # the session itself knows the staleness
        try:
            Session(selector, _table_without(host, signal), signals=host.signals - {signal})
        except SignalError as error:
            _require(signal.name in error.message, f"the refusal does not name the missing signal {signal!r}")
        else:
            raise ConformanceError(f"a host that cannot supply {signal!r} was not refused")


def _table_without(host: ScriptedHost, signal: Signal) -> ClientTable:
    counts = host.facts["counts"]
    if signal == Signal.SIZES:  # label counts would reveal the sizes; a factor of their products does not
        return ClientTable(n=host.n, labels=LabelFactor(counts, host.classes))
    return ClientTable(
        sizes=counts.sum(axis=1), labels=None if signal.name.startswith("label") else LabelCounts(counts)
    )


# -- fairness -------------------------------------------------------------------------------------------------------


@_check("relabelling")
def _check_relabelling(selector: AnySelector) -> None:
    """A client's number does not matter: clients of a relabelled federation are picked equally often."""
    n = 6
    order = np.array([3, 5, 1, 0, 4, 2])
    plain, shuffled = ScriptedHost(n=n), ScriptedHost(n=n, order=order)
    counts = np.zeros((2, n))
    for seed in range(_SEEDS):
        # The second federation has other seeds, because the test compares two independent samples.
        for row, host in enumerate((plain, shuffled)):
            trace = host.play(host.session(selector, seed=seed if row == 0 else seed + _SEEDS), 3, 2)
            for client, times in Counter(c for cohort in trace for c in cohort).items():
                counts[row, host.facts["order"][client]] += times
    p_value = _two_sample_p(counts)
    _require(
        p_value > _P_VALUE,
        f"relabelling the clients changes who is picked (p = {p_value:.1e}; picks {counts[0].astype(int).tolist()} "
        f"against {counts[1].astype(int).tolist()})",
    )


def _two_sample_p(counts: Any) -> float:
    from scipy.special import chdtrc

    total = counts.sum()
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True) / total
    used = expected.min(axis=0) > 0
    statistic = (((counts - expected) ** 2)[:, used] / expected[:, used]).sum()
    return float(chdtrc(max(int(used.sum()) - 1, 1), statistic))


@_check("everybody-eventually")
def _check_everybody_eventually(selector: AnySelector) -> None:
    """Every client is picked eventually, unless the selector says why not (``starves``)."""
    if selector.starves is not None:
        _require(len(selector.starves) > 10, "'starves' must be a written reason")
        return
    host = ScriptedHost(n=8)
    session = host.session(selector)
    seen: set[int] = set()
    for _ in range(400):
        cohort = host.play_round(session, 2)
        seen |= set(cohort.clients.tolist())
        if len(seen) == host.n or cohort.stop:
            return
    raise ConformanceError(f"in 400 rounds the clients {sorted(set(range(host.n)) - seen)} were never picked")


@_check("membership")
def _check_membership(selector: AnySelector) -> None:
    """Clients can join, leave and return."""
    host, bigger = ScriptedHost(n=9), ScriptedHost(n=12)
    table = host.table
    session = Session(selector, table, signals=host.signals)
    host.play(session, 5)
    counts = bigger.facts["counts"][9:]
    session.join(ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts)))
    bigger.play(session, 3)
    session.leave([0, 10])
    for _ in range(5):
        cohort = bigger.play_round(session, 12)
        _require(not {0, 10} & set(cohort.clients.tolist()), "a client that had left was picked")
    session.rejoin([0])
    bigger.play(session, 5)
    for f in dataclasses.fields(session.state):
        if is_per_client(f):
            _require(
                len(getattr(session.state, f.name)) == 12, f"the field {f.name!r} did not grow with the federation"
            )


# -- the class itself --------------------------------------------------------------------------------------------


@_check("parameters")
def _check_parameters(selector: AnySelector) -> None:
    """The constructor refuses values out of range, with the usual message."""
    cls = type(selector)
    for info in parameters(cls):
        for bad in info.constraint.bad_values():
            try:
                dataclasses.replace(selector, **{info.name: bad})  # type: ignore[type-var]
            except ParameterError as error:
                _require(
                    f"'{info.name}' parameter of {cls.__name__} must be" in error.message,
                    f"the message for {info.name}={bad!r} has another form: {error.message}",
                )
            else:
                raise ConformanceError(f"the parameter {info.name}={bad!r} was accepted")


@_check("documentation")
def _check_documentation(selector: AnySelector) -> None:
    """The module cites its source; the class has an equation, its symbols, the deviations and an example."""
    cls = type(selector)
    module = inspect.getmodule(cls)
    _require(
        re.search(r"\.\. \[\w+\]", (module.__doc__ if module else "") or "") is not None, "the module cites no source"
    )
    kinds = [kind for kind in cls.__mro__ if issubclass(kind, Selector) and kind is not Selector]
    text = "\n".join(kind.__doc__ or "" for kind in kinds)  # a variant need not repeat its base's docstring
    _require(re.search(r"\[\w+\]_", cls.__doc__ or "") is not None, "the docstring lacks a citation")
    for what, pattern in {
        "an equation": r":math:",
        "its symbols": r"Symbols",
        "its deviations": r"Deviations",
        "an example": r">>> ",
    }.items():
        _require(re.search(pattern, text) is not None, f"the docstring lacks {what}")

"""Automatic deadlines: the estimate against enumeration, proposals against fixed pairs, what a restart keeps."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.stats import CensoredData, ecdf, logrank
from typer.testing import CliRunner

from fedcohort.cli.app import app as cli
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.hosts.live import play
from fedcohort.hosts.pace import Pace, _expected_rounds, _Incidence, _incidence, _log_rank, first_deadline
from fedcohort.hosts.round import Policy, Round, closing
from fedcohort.journal.events import PROPOSED, TIMES
from fedcohort.report.account import read_account
from fedcohort.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare

from .scripted import TimedHost

OK, FAILED, MISSING = int(Status.OK), int(Status.FAILED), int(Status.MISSING)


# -- the estimate ------------------------------------------------------------------------------------------------------


def test_without_failures_the_incidence_is_kaplan_meier() -> None:
    draw = np.random.default_rng(1)
    seconds, waited = draw.exponential(1.0, 200).round(1), draw.uniform(0, 2, 200).round(1)
    answered = seconds <= waited
    observed = np.minimum(seconds, waited)
    found = _incidence(observed, answered, np.zeros(200, np.bool_))
    oracle = ecdf(CensoredData(observed[answered], right=observed[~answered])).cdf
    np.testing.assert_allclose(found.answered, oracle.evaluate(found.times))


def test_with_failures_it_counts_shares_where_nobody_is_censored() -> None:
    draw = np.random.default_rng(2)
    seconds, failed = draw.exponential(1.0, 100).round(1), draw.random(100) < 0.3
    found = _incidence(seconds, ~failed, failed)
    np.testing.assert_allclose(found.answered, [(seconds[~failed] <= t).sum() / 100 for t in found.times])
    np.testing.assert_allclose(found.failed, [(seconds[failed] <= t).sum() / 100 for t in found.times])


def test_two_groups_are_compared_by_the_log_rank_test() -> None:
    draw = np.random.default_rng(3)
    first, second = draw.exponential(1.0, 60).round(2), draw.exponential(1.4, 80).round(2)
    theirs = second < 1.0
    oracle = logrank(first, CensoredData(second[theirs], right=np.full(int((~theirs).sum()), 1.0)))
    found = _log_rank(first, np.ones(60, np.bool_), np.where(theirs, second, 1.0), theirs)
    assert abs(found) == pytest.approx(abs(oracle.statistic))


@pytest.mark.parametrize(
    ("n", "enough", "least", "needed"),
    [(3, 3, 1, 0), (3, 2, 1, 1), (4, 2, 2, 0), (3, 3, 3, 0), (3, 3, 2, 2), (4, 3, 3, 3)],
)
def test_the_expected_round_is_that_of_all_rounds_there_can_be(n: int, enough: int, least: int, needed: int) -> None:
    # One client answers after 1, 2 or 5 s, fails after 3 s, or is silent.
    what = [(1.0, OK, 0.3), (2.0, OK, 0.2), (5.0, OK, 0.1), (3.0, FAILED, 0.15), (np.inf, MISSING, 0.25)]
    found = _Incidence(np.array([1.0, 2.0, 3.0, 5.0]), np.array([0.3, 0.5, 0.5, 0.6]), np.array([0.0, 0.0, 0.15, 0.15]))
    seconds, models = _expected_rounds(found, n, enough, least, needed)
    for deadline, lasts, brings in zip(found.times, seconds, models, strict=True):
        mean = np.zeros(2)
        for clients in itertools.product(what, repeat=n):
            at, status, share = (np.array(column) for column in zip(*clients, strict=True))
            waits = np.append(np.sort(at[status == OK]), [5.0] * n)[needed - 1] if needed else 0.0
            end = closing(at, status, deadline=max(deadline, waits), enough=enough)
            # If several answers arrive at exactly the end of a round, one is enough.
            valid = min(int((end.status == OK).sum()), needed if waits > deadline else enough)
            mean += share.prod() * np.array([end.seconds, valid if valid >= least else 0])
        assert (lasts, brings) == pytest.approx(tuple(mean))


def test_the_proposal_is_the_best_pair_of_all_rounds_there_can_be() -> None:
    pace = Pace()
    pace.observe(0, np.arange(6), 0.0, 9.0, np.array([1.0, 1.0, 1.0, 2.0, 8.0, 9.0]), np.array([False] * 5 + [True]))
    found = pace.propose(100.0, 2, 2, 1, leave_out_slow=True)
    one = [(1.0, OK)] * 3 + [(2.0, OK), (8.0, OK), (9.0, FAILED)]

    def price(deadline: float, spares: int) -> float:
        lasts, models = 0.0, 0
        for clients in itertools.product(one, repeat=2 + spares):
            at, status = (np.array(column) for column in zip(*clients, strict=True))
            end = closing(at, status, deadline=deadline, enough=2)
            lasts, models = lasts + end.seconds, models + min(int((end.status == OK).sum()), 2)
        return lasts / models

    best = min(itertools.product([1.0, 2.0, 8.0, 9.0], range(3)), key=lambda pair: price(*pair))
    assert found.deadline == pytest.approx(best[0] * 1.02) and found.spares == best[1]


def test_a_client_at_work_is_not_taken_for_one_that_fails() -> None:
    pace = Pace()
    pace.observe(0, np.arange(4), 0.0, 1.2, np.array([1.0, 1.0, 1.5, 1.5]), np.zeros(4, np.bool_))
    assert pace.propose(1.2, 4, 0, 2, leave_out_slow=True).deadline == pytest.approx(1.02)
    # Late answers are added when they arrive.
    assert pace.propose(1.5, 4, 0, 2, leave_out_slow=True).deadline == pytest.approx(1.53)


def test_what_was_before_a_change_of_speed_is_forgotten() -> None:
    pace, draw = Pace(), np.random.default_rng(4)
    for ticket in range(60):
        speed = 1.0 if ticket < 50 else 10.0
        pace.observe(ticket, np.arange(10), 0.0, 0.0, speed * draw.uniform(1, 2, 10), np.zeros(10, np.bool_))
    deadline = pace.propose(1e6, 10, 0, 5).deadline
    assert deadline is not None and deadline > 10


def test_a_long_pause_ends_a_round_of_which_nothing_is_known() -> None:
    assert first_deadline(np.array([1.0, 1.9, 3.7, 60.0]), 1) == pytest.approx(7.4)
    assert first_deadline(np.array([1.0, 2.5, 3.7, 60.0]), 1) == 2.0
    assert first_deadline(np.array([1.0, 2.5, 3.7, 60.0]), 2) == pytest.approx(7.4)
    assert first_deadline(np.array([1.0]), 2) is None


# -- against fixed pairs -----------------------------------------------------------------------------------------------


@functools.cache
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "scripts" / "deadlines.py"
    spec = importlib.util.spec_from_file_location("bench_deadlines", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WORLDS = [
    "alike", "some-slow", "few-slow", "halves", "heavy", "pareto", "exponential", "sizes", "failures", "silent",
    "day-night", "drift", "jumps",
]  # fmt: skip


@pytest.mark.parametrize(("world", "least"), [("some-slow", None), ("failures", None), ("exponential", 1)])
def test_automatic_deadlines_are_as_fast_as_the_best_fixed_one(world: str, least: int | None) -> None:
    ratio, row = bench().compare(world, seeds=[20, 21], spares=5, rounds=100, least=least)
    assert ratio <= 1.05, row


@pytest.mark.parametrize("world", ["failures", "silent", "day-night", "jumps"])
@pytest.mark.parametrize("spares", [0, 7])
def test_fixed_deadlines_are_played_as_rounds_close(world: str, spares: int) -> None:
    module = bench()
    deadlines = np.array([15.0, 25.0] if world == "day-night" else [0.9, 1.5])
    for deadline in deadlines:
        clock, models, there = 0.0, 0, module.World(world, 3)
        for number in itertools.count():
            clock, online = there.wait(clock)
            order = module.chances(3, number)[2]
            cohort = order[np.isin(order, online)][: 10 + spares]
            enough = min(len(cohort), max(10, len(cohort) - spares))
            status, lasts = closing(*there.events(cohort, number, clock), deadline=deadline, enough=enough)
            valid = int((status == OK).sum())
            clock, models = clock + lasts, models + (min(valid, 10) if valid >= 4 else 0)
            if models >= 200 or number > 500:
                break
        found = module.play_fixed(module.World(world, 3), np.array([deadline]), spares, 20, 4, 1e6)
        assert found[0] == pytest.approx(clock * 200 / models)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # on a busy machine; all of them take 7 minutes of processor time
@pytest.mark.parametrize("least", [None, 1])
@pytest.mark.parametrize("spares", [0, 10])
@pytest.mark.parametrize("world", WORLDS)
def test_in_no_federation_is_the_best_fixed_deadline_5_percent_faster(
    world: str, spares: int, least: int | None
) -> None:
    assert set(WORLDS) == set(bench().WORLDS)
    ratio, row = bench().compare(world, seeds=list(range(10, 16)), spares=spares, rounds=200, least=least)
    print(f"least {least}, spares {spares} {row}")  # with pytest -s, the tables of docs/time.md
    assert ratio <= 1.05, row


# -- who is left out ---------------------------------------------------------------------------------------------------


def share_of_liars(liars: int, *, spares: int, least: int | None, leave_out_slow: bool, silent: int = 0) -> float:
    """Return the share of the fast clients in the models of the second half of 100 rounds of 10 among 40 clients."""
    policy = Policy(size=10, spares=spares, deadline="auto", min_replies=least, leave_out_slow=leave_out_slow)
    draw, clock, until = np.random.default_rng(1), 0.0, np.zeros(40)
    models: list[np.ndarray] = []
    with Session("uniform", clients=40, seed=2) as session:
        pace = Pace.of(session)
        for _ in range(100):
            while not (there := np.flatnonzero(until <= clock)).size:
                clock = until.min()
            round_ = Round(session, policy, len(there), pace, clock)
            round_.open(there)
            cohort = round_.choose()
            seconds = np.where(cohort.clients < liars, 0.01, 10.0) * draw.uniform(0.9, 1.1, cohort.size)
            seconds[cohort.clients >= 40 - silent] = np.inf
            status = np.where(seconds < np.inf, OK, MISSING).astype(np.int8)
            lasts = round_.settle(seconds, status)
            # A client that has not answered is busy until it does, and a silent one until its message expires.
            until[cohort.clients] = clock + np.where(seconds < np.inf, seconds, 60.0)
            clock += lasts
            round_.finish((round_.status == OK)[round_.answered])
            models.append(cohort.clients[round_.status == OK])
        said = [body for body in session.journal.events(PROPOSED) if "left_out" in body]
        assert all(body["left_out"] > 0.2 * body["asked"] for body in said)
        assert not leave_out_slow or len(said) > 50
    second = np.concatenate(models[50:])
    return float((second < liars).mean())


@pytest.mark.parametrize(
    ("liars", "spares", "least", "most"), [(10, 10, None, 0.3), (20, 0, None, 0.55), (10, 0, 1, 0.3), (20, 10, 1, 0.55)]
)
@pytest.mark.parametrize("silent", [0, 8])
def test_fast_clients_do_not_take_a_federation_over(
    liars: int, spares: int, least: int | None, most: float, silent: int
) -> None:
    found = share_of_liars(liars, spares=spares, least=least, leave_out_slow=False, silent=silent)
    taken_over = share_of_liars(liars, spares=spares, least=least, leave_out_slow=True, silent=silent)
    print(f"{liars} of 40 fast, {spares} spares, {silent} silent: {found:.2f}, with permission {taken_over:.2f}")
    assert found <= most + silent / 80 and taken_over == 1.0


def test_log_explain_and_dashboard_say_who_no_longer_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every second client takes a hundred times as long."""

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        return 1.0 + 99.0 * (int(name.removeprefix("client-")) % 2), Status.OK

    for permitted in (True, False):
        caplog.clear()
        path = tmp_path / f"{permitted}.sqlite"
        with Session("uniform", clients=12, seed=3, journal=path) as session:
            policy = Policy(size=6, deadline="auto", min_replies=1, leave_out_slow=permitted)
            play(TimedHost(session.table.names, script), session, policy, rounds=20)
        warned = [message for message in caplog.messages if "leaves out" in message]
        assert len(warned) <= 2 and bool(warned) == permitted  # when it begins, not in every round
        said = " ".join(CliRunner().invoke(cli, ["explain", str(path)]).output.split())
        assert ("leaves out 6 of the 12 clients asked so far" in said) == permitted
        assert read_account(path).left_out == ((6, 12) if permitted else None)  # the dashboard shows the same lines


# -- in rounds ---------------------------------------------------------------------------------------------------------


def test_arrivals_one_by_one_and_at_once_give_the_same_deadlines() -> None:
    policy = Policy(size=4, spares=3, deadline="auto")
    draw = np.random.default_rng(5)
    seconds, failed = draw.lognormal(0, 1, (40, 12)).round(3), draw.random((40, 12)) < 0.2

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        client = int(name.removeprefix("client-"))
        return seconds[cohort.ticket, client], Status.FAILED if failed[cohort.ticket, client] else Status.OK

    with Session("uniform", clients=12, seed=3) as live, Session("uniform", clients=12, seed=3) as twin:
        play(TimedHost(live.table.names, script), live, policy, rounds=30)
        pace, clock = Pace.of(twin), 0.0
        while twin.round < 30:
            round_ = Round(twin, policy, pace=pace, now=clock)
            round_.open()
            cohort = round_.choose()
            status = np.where(failed[cohort.ticket, cohort.clients], FAILED, OK).astype(np.int8)
            clock += round_.settle(seconds[cohort.ticket, cohort.clients], status)
            kept = round_.status == OK
            if kept.any():
                round_.finish(kept)
            else:
                round_.abandon("no model")
        expected, found = (s.journal.events(PROPOSED) for s in (twin, live))
        assert len({body["deadline"] for body in expected}) > 5
        for one, other in zip(expected, found, strict=True):
            assert one["spares"] == other["spares"]
            assert one["deadline"] == other["deadline"] or one["deadline"] == pytest.approx(other["deadline"])


def test_a_deadline_aims_at_the_models_without_which_a_round_counts_for_nothing() -> None:
    pace, draw = Pace(), np.random.default_rng(7)
    for ticket in range(50):
        pace.observe(
            ticket,
            np.arange(10),
            10.0 * ticket,
            10.0 * (ticket + 1),
            draw.lognormal(0, 1.5, 10),
            np.zeros(10, np.bool_),
        )
    with Session("uniform", clients=20) as session:
        every, half, simulated = (
            Round(
                session, Policy(size=10, deadline="auto", leave_out_slow=True, min_replies=least), 20, pace, 1e6
            ).proposal.deadline
            or 0.0
            for least in (1, None, 0)
        )
    assert 0 < every < 0.5 * half
    assert 0.5 * half < simulated < 2 * half


def test_a_round_waits_for_the_models_it_needs() -> None:
    slow: dict[int, float] = {}

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        slow[cohort.ticket] = 30.0 if cohort.ticket >= 10 else 1.0
        return slow[cohort.ticket] * (1 + int(name.removeprefix("client-")) / 100), Status.OK

    with Session("uniform", clients=12, seed=3) as session:
        host = TimedHost(session.table.names, script)
        play(host, session, Policy(size=4, deadline="auto", tries=1), rounds=20)
        assert session.round == 20 and len(slow) == 20
        models = [int((round_.status == OK).sum()) for round_ in host.rounds]
    assert models[:10] == [4] * 10 and models[10] == 1 and models[-1] == 4


def test_a_restarted_run_proposes_what_an_unbroken_one_does(tmp_path: Path) -> None:
    policy = Policy(size=3, spares=2, deadline="auto")
    draw = np.random.default_rng(6)
    seconds = draw.lognormal(0, 0.5, (40, 12)).round(3)

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        return seconds[cohort.ticket, int(name.removeprefix("client-"))], Status.OK

    def host(session: Session) -> TimedHost:
        return TimedHost(session.table.names, script)

    with Session("uniform", clients=12, seed=3, journal=tmp_path / "j") as session:
        play(host(session), session, policy, rounds=15)
        now = session.journal.events(TIMES)[-1].get("closed", 0.0)
        before = Pace.of(session, now).propose(now + 1.0, 3, 2, 2)
    with Session.open(tmp_path / "j", "uniform") as session:
        again = Pace.of(session, 500.0)  # on a clock that started again
        assert again.propose(again.time(501.0), 3, 2, 2) == pytest.approx(before)
        round_ = Round(session, policy, pace=again, now=again.time(501.0))
        round_.open()
        cohort = round_.choose()
    with Session.open(tmp_path / "j", "uniform") as session:  # interrupted after the choice
        resumed = Round(session, policy, pace=Pace.of(session, 0.0), now=1e6)
        resumed.resume(session.pending[0])
        assert resumed.cohort.names == cohort.names and resumed.proposal == round_.proposal
        assert resumed.proposal.deadline is not None
        play(host(session), session, policy, rounds=20)
        assert session.round == 20


TABLE: dict[str, Any] = {
    "seeds": [4],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "client-heterogeneity", "clients": 12, "alpha": 1.0},
        "latency": {"name": "shifted-exponential", "straggling": 20},
        "failure": 0.2,
    },
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 7, "epochs": 1, "lr": 0.1},
    "run": {"rounds": 14, "cohort": 4, "spares": 3, "deadline": "auto"},
}


def test_a_resumed_simulation_has_the_same_deadlines(tmp_path: Path) -> None:
    prepared = prepare(Experiment.from_dict(TABLE), "cpu")

    def group(folder: str) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        return prepared.group(0, journals=tmp_path / folder, device="cpu", workers=1)

    unbroken = group("a")
    unbroken.start()
    while not unbroken.done:
        unbroken.step()
    first = group("b")
    first.start()
    for _ in range(6):
        first.step()
    first.commit()
    saved = first.checkpoint()
    first.close()
    second = group("b")
    second.resume(saved)
    while not second.done:
        second.step()
    expected, found = (g.runs[0].session.journal.events(PROPOSED) for g in (unbroken, second))
    assert found == expected and len({body["deadline"] for body in expected}) > 3
    assert second.runs[0].clock == unbroken.runs[0].clock
    unbroken.close()
    second.close()


def test_two_deadlines_are_refused() -> None:
    table = {**TABLE, "scenario": {**TABLE["scenario"], "deadline": 3.0}}
    with pytest.raises(InputError, match="two deadlines"):
        prepare(Experiment.from_dict(table), "cpu")
    with Session("uniform", clients=4) as session, pytest.raises(ParameterError, match="pace"):
        Round(session, Policy(size=2, deadline="auto"))
    with pytest.raises(ParameterError, match=r"'deadline'.*'soon'"):
        Policy(deadline="soon")  # type: ignore[arg-type]

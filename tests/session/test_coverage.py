"""How many clients carry the training, and the warning when they are too few."""

import json
import logging

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Cohort, RoundReport, RoundRequest
from fedcohort.selectors import Uniform
from fedcohort.session import Session
from fedcohort.session.coverage import MIN_ROUNDS, Tally


def play(session, rounds, size, available=None):
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size=size, available=available))
        session.tell(RoundReport(cohort.ticket, cohort.clients))


@pytest.fixture
def circle(monkeypatch):
    """Return a function that restricts uniform selection to some clients."""

    def keep_to(few):
        def select(self, state, slate, answer, rng):
            who = np.intersect1d(slate.candidates, few)
            return Cohort(rng.choice(who, slate.size, replace=False)), state

        monkeypatch.setattr(Uniform, "select", select)

    return keep_to


def counted(clients, rounds, size, among, seed=0):
    rng = np.random.default_rng(seed)
    tally = Tally(clients)
    for round_ in range(rounds):
        tally.add(round_, rng.choice(among, size, replace=False))
    return tally.coverage()


def test_uniform_cohorts_reach_the_expected_number():
    found = [counted(200, 60, 10, 200, seed) for seed in range(20)]
    assert all(coverage.warning is None for coverage in found)
    assert np.mean([c.recent for c in found]) == pytest.approx(found[0].expected_recent, rel=0.02)
    assert np.mean([c.never for c in found]) == pytest.approx(found[0].expected_never, abs=2)


def test_the_last_rounds_give_every_client_two_turns():
    assert counted(200, 100, 10, 200).since == 60
    assert counted(10, 100, 5, 10).since == 100 - MIN_ROUNDS


def test_a_small_circle_is_named_with_its_numbers():
    found = counted(539, 148, 10, 12)
    assert (found.recent, found.never, found.since) == (12, 527, 40)
    assert found.warning.startswith("12 of 539 clients did all the training since round 40")


def test_a_wide_beginning_does_not_hide_a_narrow_end():
    tally = Tally(100)
    tally.add(0, np.arange(100))
    for round_ in range(1, 60):
        tally.add(round_, np.arange(10))
    found = tally.coverage()
    assert found.never == 0
    assert found.narrow and not found.starved
    assert "never" not in found.warning


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_are_never_available_cause_no_warning(seed):
    """30 of 100 clients are ever online: uniform selection cannot reach the others."""
    session = Session(Uniform(), ClientTable(n=100), seed=seed)
    play(session, 60, 10, available=np.arange(30))
    found = session.coverage()
    assert found.warning is None and found.recent == 30
    assert found.expected_recent == pytest.approx(30, abs=0.1) and found.expected_never == pytest.approx(70, abs=0.1)
    # The same cohorts give a warning if all clients were available.
    tally = Tally(100)
    rng = np.random.default_rng(seed)
    for round_ in range(60):
        tally.add(round_, rng.choice(30, 10, replace=False), 100)
    assert tally.coverage().warning is not None
    # Cohorts from only 10 clients give a warning if 30 were available.
    tally = Tally(100)
    for round_ in range(60):
        tally.add(round_, np.arange(10), 30)
    assert "uniform cohorts would have reached 30" in tally.coverage().warning


def test_the_expected_reach_is_a_lower_bound_that_nested_candidates_meet():
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 4, 30)
    candidates = rng.integers(4, 40, 30)
    tally = Tally(40)
    for round_, (size, n) in enumerate(zip(sizes, candidates, strict=True)):
        tally.add(round_, np.arange(size), int(n))
    bound = 40 - tally.coverage().expected_never

    def reach(who):
        found = []
        for _ in range(2000):
            seen = np.zeros(40, bool)
            for size, members in zip(sizes, who, strict=True):
                seen[rng.choice(members, size, replace=False)] = True
            found.append(seen.sum())
        return np.mean(found)

    assert reach([np.arange(n) for n in candidates]) == pytest.approx(bound, abs=0.2)
    assert reach([rng.permutation(40)[:n] for n in candidates]) > bound


def test_no_warning_about_few_rounds_or_if_everybody_trains():
    assert counted(1000, MIN_ROUNDS - 1, 2, 2).warning is None
    assert counted(1000, MIN_ROUNDS, 2, 2).warning is not None
    assert counted(5, 50, 5, 5).warning is None
    assert Tally(5).coverage().warning is None


def test_a_million_clients_are_judged_before_all_had_a_turn():
    assert counted(1_000_000, 40, 10, 1_000_000).warning is None
    assert counted(1_000_000, 40, 10, 30).recent == 30
    assert counted(1_000_000, 40, 10, 30).warning is not None


def test_flat_picks_count_like_cohorts():
    rng = np.random.default_rng(3)
    cohorts = [np.sort(rng.choice(40, size, replace=False)) for size in rng.integers(0, 5, 50)]
    available = rng.integers(12, 41, 50)
    one = Tally.of(40, zip(range(50), cohorts, available.tolist(), strict=True)).coverage()
    flat = np.repeat(np.arange(50), [len(c) for c in cohorts]), np.concatenate(cohorts)
    assert Tally.of_picks(40, np.arange(50), *flat, available.astype(float)).coverage() == one


def test_a_session_logs_a_warning_once_when_it_begins(caplog, circle):
    session = Session(Uniform(), ClientTable(n=60), seed=1)
    with caplog.at_level(logging.WARNING, logger="fedcohort"):
        play(session, 40, 3)
        assert not caplog.records
        circle([1, 2, 3, 4])
        play(session, 100, 3)
    (record,) = caplog.records
    assert record.getMessage().startswith("selector 'uniform': ")
    assert "of 60 clients did all the training since round" in record.getMessage()
    assert session.coverage().recent == 4


def test_only_current_members_count(circle):
    session = Session(Uniform(), ClientTable(n=40), seed=1)
    session.leave(list(range(4, 40)))
    play(session, 30, 2)
    assert session.coverage().warning is None
    session.join(ClientTable(n=60))
    circle([0, 1])
    play(session, 30, 2)
    assert (session.coverage().clients, session.coverage().never) == (64, 60)
    assert session.coverage().warning is not None


def test_a_resumed_session_knows_its_past(tmp_path, circle):
    circle([5, 6, 7])
    with Session(Uniform(), ClientTable(n=50), journal=tmp_path / "j.sqlite") as session:
        play(session, 35, 2, available=np.arange(40))
        before = session.coverage()
        assert session.explain(34).coverage == before.warning
        assert session.explain(10).coverage is None
    with Session.open(tmp_path / "j.sqlite") as session:
        assert session.coverage() == before
        assert before.warning is not None


def test_the_monitor_changes_no_choice(tmp_path):
    sessions = [Session(Uniform(), ClientTable(n=30), seed=4) for _ in range(2)]
    for _ in range(60):
        first, second = (s.ask(RoundRequest(size=2, available=[0, 1, 2, 3])) for s in sessions)
        sessions[0].coverage()
        assert first.clients.tolist() == second.clients.tolist()
        for session, cohort in zip(sessions, (first, second), strict=True):
            session.tell(RoundReport(cohort.ticket, cohort.clients))


def test_explain_report_and_dashboard_show_the_warning(tmp_path, circle):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from fedcohort.cli.app import app
    from fedcohort.report.dashboard.watcher import Watcher

    with Session(Uniform(), ClientTable(n=50), journal=tmp_path / "live.sqlite") as session:
        circle([5, 6, 7])
        play(session, 40, 2)
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "live.sqlite"), "--round", "39"])
    assert "3 of 50 clients did all the training since round 0" in " ".join(shown.output.split())
    as_json = CliRunner().invoke(app, ["explain", str(tmp_path / "live.sqlite"), "--round", "39", "--format", "json"])
    assert "3 of 50" in json.loads(as_json.stdout)["coverage"]
    watcher = Watcher(tmp_path)
    watcher.poll()
    (item,) = watcher.items.values()
    (warning,) = item.detail()["warnings"]
    assert warning.startswith("uniform: 3 of 50 clients did all the training")

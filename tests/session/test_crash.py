"""A process is killed at random instructions while it asks and tells; every restart continues as if it had not been."""

import os
import random
import signal
import time

import numpy as np
import pytest

from fedcohort import Session, create
from fedcohort.audit.verification import examine
from fedcohort.core.protocol import RoundRequest
from fedcohort.testing import ScriptedHost

ROUNDS = 60
KILLS = 200
HOST = ScriptedHost(n=20)


def start(path, commit="always"):
    shadows = {"afl": create("active-fl")}
    return Session.open_or_create(
        path, create("fedcm-ts"), HOST.table, seed=9, signals=HOST.signals, shadows=shadows, commit=commit
    )


def work(path, commit="always"):
    """Do what a host does: finish pending cohorts, then continue."""
    session = start(path, commit)
    while session.round < ROUNDS or session.pending:
        if session.round % 7 == 0:
            session.commit()
        if session.pending:
            cohort = session.pending[0]
        else:
            request = RoundRequest(size=5, available=np.flatnonzero(np.arange(20) % 7 != session.round % 7))
            cohort = session.ask(request, HOST.answer(session.query(request), session.round))
        session.tell(HOST.report(cohort), host={"round": cohort.round})
    session.commit()
    return session


def contents(session):
    cohorts = [(c.round, c.clients.tolist(), c.n_candidates) for c in session.journal.cohorts()]
    replies = [(r.ticket, r.client, r.status, r.kept, r.metrics) for r in session.journal.replies()]
    picks = [session.journal.scores(t)["afl"][0].tolist() for t in range(ROUNDS)]
    state = {name: np.asarray(value).tolist() for name, value in session.journal.state("").items()}
    shadow = {name: np.asarray(value).tolist() for name, value in session.journal.state("afl").items()}
    return {"cohorts": cohorts, "replies": replies, "picks": picks, "state": state, "shadow": str(shadow)}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a process many times quickly")
def test_two_hundred_kills(tmp_path, die_after):
    expected = contents(work(tmp_path / "whole.sqlite"))
    rng = random.Random(7)
    path = tmp_path / "killed.sqlite"
    kills = finished = 0
    while kills < KILLS:
        child = os.fork()
        if child == 0:
            try:
                die_after(rng.randint(1, 60_000) if kills % 10 else rng.randint(1, 8_000))
                work(path)
            finally:
                os._exit(0)
        rng.random()  # the child draws from a copy, so the parent's generator must advance too
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills += 1
        else:
            finished += 1
            done = Session.open(path)
            assert contents(done) == expected
            done.close()
            path = tmp_path / f"killed-{kills}.sqlite"  # continue with a new journal until all kills are done
    last = work(path)
    assert contents(last) == expected
    assert last.host_state == {"round": ROUNDS - 1}
    assert finished >= 3


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["always", "manual"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a process many times quickly")
def test_kills_by_the_clock(tmp_path, commit):
    """Kills from outside come at any place: inside SQLite, while waiting for the disk, while closing a journal."""
    expected = contents(work(tmp_path / "whole.sqlite"))
    rng = random.Random(3)
    path = tmp_path / "killed.sqlite"
    kills = finished = 0
    while kills < KILLS:
        child = os.fork()
        if child == 0:
            work(path, commit).close()
            os._exit(0)
        time.sleep(rng.expovariate(1 / 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            finished += 1
            assert examine(path).valid
            with Session.open(path) as done:
                assert contents(done) == expected
            path = tmp_path / f"killed-{kills}.sqlite"
    print(f"{commit}: {kills} kills, {finished} sessions finished")
    with work(path, commit) as last:
        assert contents(last) == expected
    assert examine(path).valid

"""Several runs of one federation: a client that works for one is not a candidate in another."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import Aggregation, Host, Online, play
from fedcohort.hosts.round import FederationTimeoutError, Policy, Reply, Round
from fedcohort.selectors import Uniform
from fedcohort.session import Session

from .scripted import TimedHost

NAMES = [f"c{i}" for i in range(6)]


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_a_lease_ends_with_its_time_and_a_run_knows_its_own(tmp_path: Path) -> None:
    clock = Clock()
    a, b = (Leases(tmp_path / "x" / "leases.sqlite", run, seconds=60.0, clock=clock) for run in "ab")
    assert a.take(["c1", "c2"]) == {} and b.elsewhere() == {"c1": "a", "c2": "a"} and a.elsewhere() == {}
    assert b.take(["c2", "c3"]) == {"c2": "a"}
    assert a.elsewhere() == {}, "all or none"
    assert Leases(tmp_path / "x" / "leases.sqlite", "a", clock=clock).take(["c2"]) == {}
    b.release(["c1"])
    assert "c1" in b.elsewhere(), "another run's lease cannot be released"
    clock.time += 61.0
    assert b.take(["c1"]) == {}


@pytest.mark.parametrize(("run", "seconds"), [("", 1.0), ("a", 0.0), ("a", 8 * 86400.0), ("a", math.nan)])
def test_what_is_no_lease(run: str, seconds: float, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Leases(tmp_path / "leases.sqlite", run, seconds=seconds)


def _other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE lease (client TEXT, run TEXT, until REAL)")
        db.execute("CREATE TABLE more (x)")


SPOILED = {
    "overwritten": lambda path: path.write_bytes(b"no database " * 999),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "another program's": _other_program,
    "a journal": lambda path: Session(Uniform(), ClientTable(n=2), seed=1, journal=path).close(),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(path.with_name("elsewhere")),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_that_is_none_of_leases_is_refused_and_left_as_it_is(what: str, tmp_path: Path) -> None:
    path = tmp_path / "leases.sqlite"
    mine = Leases(path, "mine")
    mine.take(["c0"])
    if what != "cut off":
        path.unlink()
    SPOILED[what](path)
    before = path.read_bytes() if path.is_file() else b""
    for use in (mine.elsewhere, lambda: mine.take(["c1"]), lambda: mine.release(["c0"]), lambda: Leases(path, "x")):
        with pytest.raises(InputError, match=r"The leases .*leases\.sqlite cannot be used: (.|\n)*move it away"):
            use()
    assert not path.with_name("elsewhere").exists()
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_folder_that_cannot_be_made_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be used"):
        Leases(tmp_path / "file" / "leases.sqlite", "mine")


def test_a_deleted_file_does_not_end_a_live_run(tmp_path: Path) -> None:
    path = tmp_path / "leases.sqlite"
    host = TimedHost(NAMES)
    host.on_closed = lambda *_: path.unlink()  # type: ignore[method-assign]
    with Session(Uniform(), ClientTable(names=NAMES), seed=1) as session:
        assert play(host, session, Policy(size=2, deadline=10.0), 4, Leases(path, "mine")) is None
        assert session.round == 4


@pytest.mark.parametrize(
    "until",
    [1e300, math.inf, time.time() + 8 * 86400, "for ever"],
    ids=["1e300", "infinite", "eight days", "text"],
)
def test_a_lease_for_ever_holds_nobody(until: Any, tmp_path: Path) -> None:
    mine = Leases(tmp_path / "leases.sqlite", "mine")
    with closing(sqlite3.connect(mine.path)) as db, db:
        db.execute("INSERT INTO lease VALUES ('c0', 'other', ?)", (until,))
    assert mine.elsewhere() == {} and mine.take(["c0"]) == {}


def test_a_run_that_waits_in_vain_names_the_run_that_has_its_clients(tmp_path: Path) -> None:
    Leases(tmp_path / "leases.sqlite", "other.sqlite").take(NAMES)
    host = TimedHost(NAMES)
    with (
        Session(Uniform(), ClientTable(names=NAMES), seed=1) as session,
        pytest.raises(FederationTimeoutError, match=r"c0, .*c5 leased to other\.sqlite in .*leases\.sqlite"),
    ):
        play(host, session, Policy(size=2, deadline=10.0, patience=5.0), 4, Leases(tmp_path / "leases.sqlite", "mine"))


def test_a_lease_ends_by_the_clock_of_who_reads_it(tmp_path: Path) -> None:
    """docs/operators.md says so: a clock 100 s ahead sees a lease end 100 s early, and no earlier."""
    behind, ahead = Clock(), Clock()
    mine = Leases(tmp_path / "leases.sqlite", "mine", seconds=120.0, clock=behind)
    other = Leases(tmp_path / "leases.sqlite", "other", seconds=120.0, clock=ahead)
    mine.take(["c0"])
    ahead.time += 100.0
    assert other.elsewhere() == {"c0": "mine"}
    ahead.time += 21.0
    assert other.elsewhere() == {} and mine.elsewhere() == {}


def test_leased_clients_are_no_candidates(tmp_path: Path) -> None:
    other = Leases(tmp_path / "leases.sqlite", "other")
    other.take(["c0", "c1", "c2"])
    host = TimedHost(NAMES)
    with Session(Uniform(), ClientTable(names=NAMES), seed=1) as session:
        play(host, session, Policy(size=2, deadline=10.0), 8, Leases(tmp_path / "leases.sqlite", "mine"))
    assert {name for cohort in host.cohorts() for name in cohort} == {"c3", "c4", "c5"}
    assert other.elsewhere() == {}, "who has answered is free"


def test_a_client_taken_while_the_choice_was_made_is_not_asked(tmp_path: Path) -> None:
    """The cohort is abandoned with a recorded reason, and another one is chosen."""
    other = Leases(tmp_path / "leases.sqlite", "other")

    class Slow(Uniform):
        def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> Any:
            cohort, state = super().select(state, slate, answer, rng)
            if not other_took:
                name = NAMES[int(cohort.clients[0])]
                other.take([name])
                other_took.append(name)
            return cohort, state

    other_took: list[str] = []
    host = TimedHost(NAMES)
    with Session(Slow(), ClientTable(names=NAMES), seed=1) as session:
        play(host, session, Policy(size=2, deadline=10.0), 3, Leases(tmp_path / "leases.sqlite", "mine"))
        reasons = [body["reason"] for body in session.journal.events("abandoned")]
    assert all(other_took[0] not in cohort for cohort in host.cohorts()) and len(host.cohorts()) == 3
    assert reasons == [f"{other_took[0]} works for other"]


def test_who_is_still_at_work_stays_leased_until_it_answers(tmp_path: Path) -> None:
    mine, other = (Leases(tmp_path / "leases.sqlite", run) for run in ("mine", "other"))

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        return (25.0 if name == "c0" and cohort.round == 0 else 1.0), Status.OK

    seen: list[bool] = []
    host = TimedHost(NAMES[:2], script)
    host.on_closed = lambda *_: seen.append("c0" in other.elsewhere())  # type: ignore[method-assign]
    with Session(Uniform(), ClientTable(names=NAMES[:2]), seed=1) as session:
        play(host, session, Policy(size=2, deadline=10.0), 1, mine)
        assert seen == [True]
        host.time = 30.0
        play(host, session, Policy(size=2, deadline=10.0), 2, mine)
    assert other.elsewhere() == {}


class Sharing(Host):
    """A run whose clients take a moment, in real time; two of them share the clients."""

    def __init__(self, at_work: dict[str, int], clashes: list[str]) -> None:
        self.at_work, self.clashes, self.ready = at_work, clashes, []

    def now(self) -> float:
        return time.monotonic()

    def online(self) -> Online:
        return Online(NAMES)

    def send(self, cohort: Cohort) -> dict[str, str]:
        for name in cohort.names:
            self.at_work[name] = self.at_work.get(name, 0) + 1
            if self.at_work[name] > 1:
                self.clashes.append(name)
        self.ready = [Reply(cohort.ticket, name) for name in cohort.names]
        return {}

    def receive(self, until: float) -> list[Reply]:
        if self.ready:
            time.sleep(0.01)
            for reply in self.ready:
                self.at_work[reply.client] -= 1
        found, self.ready = self.ready, []
        return found

    def combine(self, round_: Round) -> Aggregation:
        return Aggregation(np.ones(len(round_.in_order()), np.bool_))


def test_two_runs_at_once_never_ask_the_same_client(tmp_path: Path) -> None:
    at_work: dict[str, int] = {}
    clashes: list[str] = []
    failed: list[BaseException] = []

    def run(name: str, seed: int) -> None:
        try:
            with Session(Uniform(), ClientTable(names=NAMES), seed=seed) as session:
                policy = Policy(size=2, deadline=20.0)
                play(Sharing(at_work, clashes), session, policy, 15, Leases(tmp_path / "leases.sqlite", name))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(name, seed)) for seed, name in enumerate(("a", "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not clashes

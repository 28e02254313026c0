"""Several runs of one federation: a client that works for one is not a candidate in another."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import Aggregation, Host, Online, play
from fedcohort.hosts.round import Policy, Reply, Round
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


@pytest.mark.parametrize(("run", "seconds"), [("", 1.0), ("a", 0.0)])
def test_what_is_no_lease(run: str, seconds: float, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Leases(tmp_path / "leases.sqlite", run, seconds=seconds)


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

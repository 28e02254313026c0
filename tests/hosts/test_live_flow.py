"""The loop without rounds, with a host of a few lines and its own clock, without Flower and torch."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Status
from fedcohort.hosts.flow import FlowPolicy
from fedcohort.hosts.live import Aggregation, Online
from fedcohort.hosts.live_flow import FlowHost, play_flow
from fedcohort.hosts.round import FederationTimeoutError, Policy, Reply
from fedcohort.hosts.silence import Silence
from fedcohort.session import Session


class InProcess(FlowHost):
    """Client i adds i + 1 to a model that is one number, in i + 1 seconds, or never."""

    def __init__(self, names, silent=(), offline_after=np.inf, seconds=None):
        self.names, self.silent, self.offline_after, self.seconds = names, silent, offline_after, seconds
        self.clock, self.model, self.models, self.kept = 0.0, 0.0, [0.0], {}
        self.replies, self.dispatched = [], []

    def now(self):
        return self.clock

    def online(self):
        return Online(self.names if self.clock < self.offline_after else [])

    def send(self, cohort):
        (name,) = cohort.names
        self.dispatched.append((name, cohort.round))
        number = self.names.index(name) + 1
        if name not in self.silent:
            content = self.models[cohort.round] + number
            seconds = number if self.seconds is None else self.seconds(name, self.clock)
            self.replies.append((self.clock + seconds, Reply(cohort.ticket, name, content=content)))
        return {}

    def receive(self, until):
        self.replies.sort(key=lambda found: found[0])
        if not self.replies or self.replies[0][0] > until:
            self.clock = until
            return []
        self.clock = max(self.replies[0][0], self.clock)
        return [self.replies.pop(0)[1]]

    def resume(self, flow):
        self.flow = flow

    def take(self, cohort, reply):
        self.kept[cohort.ticket] = reply.content
        return {}, ()

    def make_model(self, answers):
        updates = [self.kept[one.ticket] - self.models[one.version] for one, _ in answers]
        self.model += float(np.mean(updates))
        return Aggregation(np.ones(len(answers), bool))

    def store_model(self):
        self.models.append(self.model)

    def state(self):
        return None


def start(host, models, *, journal=None, buffer=2, **policy):
    session = Session("uniform", ClientTable(names=host.names), seed=1, asynchronous=True, journal=journal)
    options = {"deadline": 30.0, "patience": 50.0, **policy}
    stop = play_flow(host, session, Policy(**options), FlowPolicy(busy=3, buffer=buffer), models)
    return session, stop


def test_models_are_made_of_every_second_answer():
    host = InProcess(["anna", "ben", "cem", "dora"])
    session, stop = start(host, 12)
    assert stop is None and session.round == 12 and len(host.models) == 13
    steps = np.diff(host.models)
    assert ((steps >= 1) & (steps <= 4)).all()
    assert {name for name, _ in host.dispatched} == set(host.names)
    assert [version for _, version in host.dispatched] == sorted(version for _, version in host.dispatched)


def test_a_silent_client_is_given_up_after_the_deadline():
    host = InProcess(["anna", "ben", "cem", "dora"], silent=["dora"])
    session, _ = start(host, 25, deadline=5.0)
    replies = [reply.status for reply in session.journal.replies() if reply.client == 3]
    assert replies and set(replies) == {Status.MISSING}
    assert session.round == 25


def test_nobody_is_waited_for_longer_than_patience():
    host = InProcess(["anna", "ben", "cem"], offline_after=10.0)
    with pytest.raises(FederationTimeoutError, match="obody has been available for 50 s"):
        start(host, 100)
    assert 60.0 < host.clock < 70.0


NAMES = [f"c{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("silent", "deadline", "most"),
    [(0, 300.0, 61), (4, 300.0, 400), (10, 300.0, 1000), (4, "auto", 150), (10, "auto", 270), (19, "auto", 1400)],
)
def test_silent_clients_do_not_starve_a_flow(silent, deadline, most):
    """Twenty clients, three at work, a second of work, 60 models: without waits, 386 s with 4 and 7,865 s with 10."""
    host = InProcess(NAMES, silent=NAMES[20 - silent :], seconds=lambda name, now: 1.0)
    session, _ = start(host, 60, deadline=deadline, buffer=3)
    print(f"{silent} of 20 clients silent, deadline {deadline}: {host.clock:.0f} s")
    assert session.round == 60 and host.clock < most
    valid = {int(reply.client) for reply in session.journal.replies() if reply.status == Status.OK}
    assert valid == set(range(20 - silent))


def test_every_new_question_to_a_silent_client_waits_longer_until_it_answers():
    back = 2_000.0
    host = InProcess(["anna", "ben", "cem"], seconds=lambda name, now: 1.0 if name != "cem" or now > back else np.inf)
    asked, send = [], host.send

    def watched(cohort):
        asked.extend([host.clock] if "cem" in cohort.names else [])
        return send(cohort)

    host.send = watched
    start(host, 12_000, deadline=10.0)
    while_away = [moment for moment in asked if moment <= back]
    waits = np.diff(while_away)
    assert len(while_away) < 8 and (waits[1:] > 1.5 * waits[:-1]).all()
    assert len(asked) > len(while_away) + 100  # back, it takes part like everybody


def test_one_silence_is_remembered_over_a_restart(tmp_path):
    host = InProcess(NAMES[:4], silent=NAMES[3:4], seconds=lambda name, now: 1.0)
    session, _ = start(host, 120, deadline="auto", journal=tmp_path / "j.sqlite")
    known = Silence.of(session, "auto")
    assert [known.deadline_for(client) for client in range(3)] == [3.0, 3.0, 3.0]
    assert known.deadline_for(3) > 5.0 and not known.resting(0.0, 4).any()
    session.close()
    with Session.open(tmp_path / "j.sqlite") as again:
        assert [Silence.of(again, "auto").deadline_for(client) for client in range(4)] == [
            known.deadline_for(client) for client in range(4)
        ]


def test_clients_that_answer_at_once_do_not_shorten_the_time_of_others():
    """Half of them answer in 0.01 s, the others need 10 s: each of these is late once at most."""
    host = InProcess(NAMES, seconds=lambda name, now: 0.01 if int(name[1:]) < 10 else 10.0 + int(name[1:]) / 10)
    session, _ = start(host, 100, deadline="auto")
    late = [reply.client for reply in session.journal.replies() if reply.status != Status.OK]
    assert all(late.count(client) <= 1 for client in late) and min(late, default=10) >= 10
    valid = [reply.client for reply in session.journal.replies() if reply.status == Status.OK]
    assert len(set(valid)) == 20


def test_when_everybody_is_left_alone_somebody_is_asked():
    host = InProcess(NAMES[:2], seconds=lambda name, now: 1.0 if now > 150.0 else np.inf)
    session, _ = start(host, 1, deadline=100.0, patience=20.0)
    assert session.round == 1

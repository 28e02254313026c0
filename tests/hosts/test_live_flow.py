"""The loop without rounds, with a host of a few lines and its own clock, without Flower and torch."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Status
from fedcohort.hosts.flow import FlowPolicy
from fedcohort.hosts.live import Aggregation, Online
from fedcohort.hosts.live_flow import FlowHost, play_flow
from fedcohort.hosts.round import FederationTimeoutError, Policy, Reply
from fedcohort.session import Session


class InProcess(FlowHost):
    """Client i adds i + 1 to a model that is one number, in i + 1 seconds, or never."""

    def __init__(self, names, silent=(), offline_after=np.inf):
        self.names, self.silent, self.offline_after = names, silent, offline_after
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
            self.replies.append((self.clock + number, Reply(cohort.ticket, name, content=content)))
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


def start(host, models, **policy):
    session = Session("uniform", ClientTable(names=host.names), seed=1, asynchronous=True)
    options = {"deadline": 30.0, "patience": 50.0, **policy}
    stop = play_flow(host, session, Policy(**options), FlowPolicy(busy=3, buffer=2), models)
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

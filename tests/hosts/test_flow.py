"""A flow fills free places, makes models after some answers or at fixed times, and loses nothing between two events."""

import heapq

import numpy as np
import pytest

from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import Status
from fedcohort.hosts.flow import Flow, FlowPolicy
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session


def simulate(open_flow, events, reopen=lambda flow: flow):
    """Fill free places, or else let the next client answer; return all events."""
    flow, clock, log = open_flow(), 0.0, []
    ends = []  # (when, ticket, whether it fails)
    draw = np.random.default_rng(5)
    for _ in range(events):
        if flow.is_due(clock):
            log.append(("model", flow.session.round, tuple(one.ticket for one in flow.advance(clock))))
        elif flow.free:
            cohort = flow.choose(available=np.ones(30, np.bool_))
            assert cohort.size == 1
            heapq.heappush(ends, (clock + draw.exponential(10), cohort.ticket, draw.random() < 0.2))
            log.append(("ask", int(cohort.clients[0]), cohort.round))
        else:
            if ends[0][0] > flow.due_at and flow.waiting:
                clock = flow.due_at
                continue
            clock, ticket, fails = heapq.heappop(ends)
            before = {one.ticket: one for one in flow.at_work}[ticket]
            counts = flow.receive(ticket, Status.FAILED if fails else Status.OK)
            assert counts != fails
            log.append(("answer", ticket, flow.session.round - before.round))
        flow = reopen(flow)
    return flow, log


def start(policy, **options):
    return lambda: Flow(Session("uniform", 30, seed=3, asynchronous=True, **options), policy)


def test_slots_are_filled_and_every_bth_answer_makes_a_model():
    flow, log = simulate(start(FlowPolicy(busy=6, buffer=4)), 800)
    models = [entry for entry in log if entry[0] == "model"]
    assert all(len(tickets) == 4 for _, _, tickets in models) and len(models) > 50
    used = [ticket for _, _, tickets in models for ticket in tickets]
    assert len(set(used)) == len(used)
    assert flow.session.round == len(models)
    stale = [entry[2] for entry in log if entry[0] == "answer"]
    assert max(stale) >= 3 and min(stale) == 0
    assert len(flow.at_work) + flow.free == 6 and flow.busy.sum() == len(flow.at_work)


def test_one_answer_one_model():
    _, log = simulate(start(FlowPolicy(busy=3)), 300)
    answers = [entry for entry in log if entry[0] == "answer"]
    models = [entry for entry in log if entry[0] == "model"]
    assert all(len(tickets) == 1 for _, _, tickets in models)
    assert 0.7 * len(answers) < len(models) < len(answers)  # one in five fails


def test_models_at_fixed_times():
    policy = FlowPolicy(busy=5, period=20.0)
    flow = Flow(Session("uniform", 30, seed=3, asynchronous=True), policy)
    assert flow.due_at == 20.0 and not flow.is_due(25.0)  # no answer has arrived
    first = [flow.choose() for _ in range(5)]
    flow.receive(first[0].ticket, Status.OK)
    assert not flow.is_due(19.9) and flow.is_due(20.0)
    flow.advance(20.0)
    assert flow.due_at == 40.0
    flow.receive(first[1].ticket, Status.OK)
    flow.advance(67.0)  # it had to wait for the first answer
    assert flow.due_at == 80.0


@pytest.mark.parametrize("policy", [FlowPolicy(busy=6, buffer=4), FlowPolicy(busy=4), FlowPolicy(busy=5, period=7.0)])
def test_a_kill_between_any_two_events_changes_nothing(tmp_path, policy):
    _, expected = simulate(start(policy), 80)
    path = tmp_path / "a.sqlite"

    def reopen(flow):
        flow.session.close()
        return Flow(Session.open(path), policy)

    flow, found = simulate(start(policy, journal=path), 80, reopen)
    assert found == expected
    flow.session.close()


def test_a_client_that_fails_three_times_is_passed_over_until_the_next_model(tmp_path):
    policy = FlowPolicy(busy=1, buffer=1)
    flow = Flow(Session("uniform", 2, asynchronous=True, journal=tmp_path / "a.sqlite"), policy)
    only_first, both = np.array([True, False]), np.ones(2, np.bool_)
    for _ in range(3):
        assert not flow.passed_over.any()
        flow.receive(flow.choose(available=only_first).ticket, Status.FAILED)
    flow.session.close()
    flow = Flow(Session.open(tmp_path / "a.sqlite"), policy)  # from its record
    assert flow.passed_over.tolist() == [True, False]
    for _ in range(8):
        cohort = flow.choose(available=both)
        assert cohort.clients.tolist() == [1]
        flow.abandon(cohort.ticket, "only asked")
    assert flow.choose(available=only_first).clients.tolist() == [0]  # better than nobody
    flow.receive(flow.at_work[0].ticket, Status.OK)
    assert not flow.passed_over.any()
    flow.receive(flow.choose(available=only_first).ticket, Status.FAILED)
    flow.advance(0.0)
    flow.session.close()


class Federation:
    """Clients of a flow, each with its seconds and the share of its work that fails."""

    def __init__(self, flow, seconds, failing=(), seed=0):
        self.flow, self.seconds, self.failing = flow, seconds, frozenset(failing)
        self.draw, self.clock, self.ends = np.random.default_rng(seed), 0.0, []
        self.answers = []  # the clients, in the order in which they answered

    def step(self, available=None):
        """Make a model, ask a client or let the next one answer."""
        flow = self.flow
        if flow.is_due(self.clock):
            flow.advance(self.clock)
            return
        asked = flow.choose(available=available) if flow.free else None
        if asked is not None and asked.size:
            work = self.seconds[int(asked.clients[0])] * self.draw.uniform(0.9, 1.1)
            heapq.heappush(self.ends, (self.clock + work, asked.ticket, int(asked.clients[0])))
            return
        assert self.ends, "a flow in which nobody is at work must not wait"
        self.clock, ticket, client = heapq.heappop(self.ends)
        fails = client in self.failing
        if flow.receive(ticket, Status.FAILED if fails else Status.OK):
            self.answers.append(client)


@pytest.mark.parametrize("buffer", [1, 5])
@pytest.mark.parametrize("selector", ["uniform", "balanced"])
def test_one_fast_client_gives_no_more_than_twice_an_even_share(selector, buffer):
    session = Session(selector, 10, seed=1, asynchronous=True)
    federation = Federation(Flow(session, FlowPolicy(busy=10, buffer=buffer)), [0.1] + [60.0] * 9)
    while len(federation.answers) < 100:
        federation.step()
    assert 15 <= federation.answers.count(0) <= 20
    waits = session.journal.events("wait")
    assert sum("0" in body["clients"] for body in waits) > 0.8 * len(waits)
    assert all(body["online"] == 10 and body["at_work"] >= 5 for body in waits)
    assert len({body["ticket"] for body in waits}) == len(waits)  # one entry for each place


def test_without_a_limit_it_gives_all_answers():
    session = Session("uniform", 10, seed=1, asynchronous=True)
    federation = Federation(Flow(session, FlowPolicy(busy=10, buffer=5, max_answers=10)), [0.1] + [60.0] * 9)
    while len(federation.answers) < 100:
        federation.step()
    assert federation.answers.count(0) == 100 and not session.journal.events("wait")


@pytest.mark.parametrize("seed", range(40))
def test_no_window_has_more_of_one_client_and_no_flow_stops(seed):
    """Federations of 1 to 12 clients, fast and slow, some of which always fail; `step` asserts that work goes on."""
    draw = np.random.default_rng(seed)
    n, most = int(draw.integers(1, 13)), int(draw.integers(1, 4))
    failing = draw.permutation(n)[: int(draw.integers(0, n))].tolist()
    policy = FlowPolicy(int(draw.integers(1, n + 3)), int(draw.integers(1, 6)), max_answers=most)
    rules = Rules(blocked=[str(draw.integers(n))]) if n > 1 and seed % 3 == 0 else None
    session = Session("uniform", n, seed=seed, asynchronous=True, rules=rules)
    federation = Federation(Flow(session, policy), 10.0 ** draw.uniform(-2, 2, n), failing, seed)
    blocked = set() if rules is None else {int(rules.blocked[0])}
    valid = n - len(blocked | set(failing))
    for _ in range(400):
        federation.step()
    assert bool(federation.answers) == bool(valid)
    if not failing:
        windows = [federation.answers[i : i + valid] for i in range(len(federation.answers) - valid + 1)]
        assert all(window.count(client) <= most for window in windows for client in window)


def test_clients_that_come_and_go_do_not_stop_a_flow():
    draw = np.random.default_rng(3)
    federation = Federation(
        Flow(Session("balanced", 9, asynchronous=True), FlowPolicy(4, 2)), 10.0 ** draw.uniform(-2, 2, 9)
    )
    for _ in range(800):
        online = draw.random(9) < 0.5
        online[draw.integers(9)] = True
        if (online & ~federation.flow.busy).any() or federation.flow.at_work:
            federation.step(online)
    assert len(federation.answers) > 200


def test_a_flow_that_waits_continues_waiting_after_a_kill(tmp_path):
    path, policy = tmp_path / "a.sqlite", FlowPolicy(busy=10, buffer=3)

    def play(cut, steps=120):
        session = Session("uniform", 10, seed=1, asynchronous=True, journal=path if cut else None)
        federation = Federation(Flow(session, policy), [0.1] + [60.0] * 9)
        for _ in range(steps):
            federation.step()
            if cut:
                federation.flow.session.close()
                federation.flow = Flow(Session.open(path), policy)
        journal = federation.flow.session.journal
        found = journal.events("wait"), [(row.ticket, row.clients.tolist()) for row in journal.cohorts()]
        federation.flow.session.close()
        return found

    whole = play(False)
    assert play(True) == whole and len(whole[0]) > 5


def test_what_a_host_stores_is_kept_beside_it(tmp_path):
    flow = Flow(Session("uniform", 9, asynchronous=True, journal=tmp_path / "a.sqlite"), FlowPolicy(busy=2, buffer=2))
    first = flow.choose()
    flow.receive(first.ticket, Status.OK, state={"checkpoint": "m0.npz"})
    flow.session.close()
    with Session.open(tmp_path / "a.sqlite") as session:
        assert session.host_state["checkpoint"] == "m0.npz"
        assert [one.ticket for one in Flow(session, flow.policy).waiting] == [first.ticket]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="needs an asynchronous session"):
        Flow(Session("uniform", 5), FlowPolicy(busy=2))
    for bad in ({"busy": 0}, {"busy": 2, "buffer": 0}, {"busy": 2, "period": 0.0}):
        with pytest.raises(ParameterError, match="FlowPolicy must be"):
            FlowPolicy(**bad)
    flow = Flow(Session("uniform", 5, asynchronous=True), FlowPolicy(busy=2))
    with pytest.raises(InputError, match="ticket 3"):
        flow.receive(3, Status.OK)


def test_a_model_of_too_few_clients_waits_for_others_and_asks_only_those():
    flow = Flow(Session("uniform", 4, asynchronous=True), FlowPolicy(busy=1, buffer=3, min_clients=3, max_answers=9))
    anna_and_ben = np.array([True, True, False, False])
    while len(flow.waiting) < 3:
        flow.receive(flow.choose(available=anna_and_ben).ticket, Status.OK)
    assert not flow.is_due(0.0)
    assert not flow.choose(available=anna_and_ben).size and "needs 3 clients" in flow.excluded[0]
    cohort = flow.choose(available=np.ones(4, np.bool_))
    assert cohort.clients[0] in (2, 3)
    flow.receive(cohort.ticket, Status.OK)
    assert flow.is_due(0.0) and len(flow.advance(0.0)) == 4

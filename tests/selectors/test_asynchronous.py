"""Pisces, asynchronous Oort and FedCompass against plain implementations."""

import math

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import SELECTORS, RoundReport, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import Flow, FlowPolicy
from fedcohort.selectors.baselines.asynchronous import AsyncOort, FedCompass, Pisces
from fedcohort.session import Session

N = 12
SIZES = [10 * (1 + i % 5) for i in range(N)]
GREEDY = {"exploration": 0.0, "least_exploration": 0.0}


def play(selector, events, seed=0, places=5, buffer=3, loss=None, seconds=None):
    """Play a flow; return everything that happened, each choice with what the selector knew and was offered."""
    draw = np.random.default_rng(seed)
    session = Session(selector, ClientTable(sizes=SIZES), seed=seed, asynchronous=True)
    flow = Flow(session, FlowPolicy(busy=places, buffer=buffer, max_answers=events))  # only the selector decides
    clock, ends, log = 0.0, [], []
    for _ in range(events):
        if flow.is_due(clock):
            flow.advance(clock)
        elif flow.free:
            state, busy = session.state, np.flatnonzero(flow.busy)
            cohort = flow.choose()
            log.append(("ask", clock, cohort, state, busy, session.round))
            client = int(cohort.clients[0])
            pace = (1.0 + client) if seconds is None else seconds[client]
            work = 1.0 if cohort.work is None else float(cohort.work[0])
            ends.append(
                (clock + pace * work * (1 if seconds else draw.uniform(0.8, 1.2)), cohort.ticket, client, clock)
            )
        else:
            ends.sort()
            clock, ticket, client, begun = ends.pop(0)
            stale = session.round - {c.ticket: c for c in flow.at_work}[ticket].round
            value = draw.exponential() if loss is None else loss[client]
            status = Status.FAILED if draw.random() < 0.1 and seconds is None else Status.OK
            metrics = {Signal.LOSS_RMS: [value], Signal.DURATION: [clock - begun]}
            flow.receive(ticket, status, metrics)
            log.append(("answer", clock, client, status, value, stale, session.round, clock - begun))
    return session, log


def asks(log):
    return [entry for entry in log if entry[0] == "ask"]


# -- Pisces -----------------------------------------------------------------------------------------------------------


def pisces_utilities(log, upto, beta):
    """U_k from the answers before an event, as the formula is written."""
    found, lags = {}, {}
    for entry in log[:upto]:
        if entry[0] == "answer" and entry[3] is Status.OK:
            _, _, client, _, loss, stale, *_ = entry
            lags.setdefault(client, []).append(stale)
            found[client] = SIZES[client] * loss, np.mean(lags[client][-5:])
    return {client: u / (lag + 1) ** beta for client, (u, lag) in found.items()}


def test_pisces_takes_the_largest_utility_among_those_that_are_free():
    _, log = play(Pisces(**GREEDY, credits=None, discount=0.7), 400)
    exploited = 0
    for i, entry in enumerate(log):
        if entry[0] != "ask":
            continue
        _, _, cohort, _, busy, _ = entry
        utility = {c: u for c, u in pisces_utilities(log, i, 0.7).items() if c not in busy}
        (client,) = cohort.clients.tolist()
        if utility:
            exploited += 1
            assert utility[client] == pytest.approx(max(utility.values()), rel=1e-12)
            for place, candidate in enumerate(cohort.candidates.tolist()):
                expected = utility.get(candidate, math.nan)
                np.testing.assert_allclose(cohort.score[place], expected, rtol=1e-12)
    assert exploited > 100


def test_pisces_explores_with_a_chance_that_falls_with_the_models():
    selector = Pisces(exploration=0.8, decay=0.5, least_exploration=0.1)
    state = selector.init(ClientTable(sizes=SIZES), np.random.default_rng(0))
    loss = np.where(np.arange(N) < 6, 1.0, np.nan)
    state = type(state)(5, loss, np.zeros(N), state.lags, state.credits)
    for model, chance in ((0, 0.8), (1, 0.4), (9, 0.1)):
        slate = Slate(model, 1, np.arange(N), ClientTable(sizes=SIZES), busy=np.empty(0, np.int64))
        draws = [selector.select(state, slate, None, np.random.default_rng(i))[0].clients[0] for i in range(1500)]
        assert np.mean(np.array(draws) >= 6) == pytest.approx(chance, abs=0.04)


def dbscan_noise(values, eps, least):
    """DBSCAN by its definition: a point is noise if no core point is within eps of it."""
    close = [[abs(a - b) <= eps for b in values] for a in values]
    core = [sum(row) >= least for row in close]
    return [not any(near and is_core for near, is_core in zip(row, core, strict=True)) for row in close]


@pytest.mark.parametrize("least", [1, 3, 6])
def test_outliers_are_those_of_dbscan(least):
    draw = np.random.default_rng(least)
    for eps in (0.05, 0.5, 2.0):
        for _ in range(50):
            values = draw.exponential(size=draw.integers(1, 25))
            assert Pisces(radius=eps)._outliers(values, least).tolist() == dbscan_noise(values, eps, least)
    sklearn = pytest.importorskip("sklearn.cluster")
    values = draw.normal(size=40)
    labels = sklearn.DBSCAN(eps=0.5, min_samples=least).fit(values[:, None]).labels_
    assert Pisces()._outliers(values, least).tolist() == (labels == -1).tolist()


def test_a_client_that_lies_about_its_loss_is_left_out_after_five_reports():
    losses = [1.0 + 0.01 * i for i in range(N)]
    losses[3] = 50.0
    session, log = play(Pisces(**GREEDY), 600, loss=losses)
    answers = [entry for entry in log if entry[0] == "answer" and entry[2] == 3 and entry[3] is Status.OK]
    assert session.state.credits[3] == 0 and (np.delete(session.state.credits, 3) == 5).all()
    assert 5 <= len(answers) <= 9  # those before enough losses are known cost nothing
    _, log = play(Pisces(**GREEDY, credits=None), 600, loss=losses)
    assert len([e for e in log if e[0] == "answer" and e[2] == 3]) > 3 * len(answers)


# -- Oort -------------------------------------------------------------------------------------------------------------


def oort_utilities(log, upto, models, selector, threshold):
    """Util(i) as it is written, from what was picked and answered before an event."""
    utility, last, seconds = {}, {}, {}
    for entry in log[:upto]:
        if entry[0] == "ask":
            last[int(entry[2].clients[0])] = entry[5] + 1
        elif entry[3] is Status.OK:
            utility[entry[2]], seconds[entry[2]] = SIZES[entry[2]] * entry[4], entry[7]
    if not utility:
        return {}, last
    ordered = sorted(seconds.values())
    preferred = math.inf if threshold >= 100 else ordered[min(int(len(ordered) * threshold / 100), len(ordered) - 1)]
    found = {}
    for client, value in utility.items():
        factor = 1.0 if seconds[client] <= preferred else (preferred / seconds[client]) ** selector.penalty
        found[client] = value, math.sqrt(0.1 * math.log(models + 1) / last[client]), factor
    return found, last


def test_async_oort_scores_and_draws_as_in_the_formula():
    selector = AsyncOort(**GREEDY, window=4, pace=20.0)
    _, log = play(selector, 600)
    exploited = 0
    for i, entry in enumerate(log):
        if entry[0] != "ask":
            continue
        _, _, cohort, state, busy, models = entry
        found, last = oort_utilities(log, i, models, selector, state.threshold)
        free = [c for c in range(N) if c not in busy]
        known = {c: found[c] for c in free if c in found}
        if not known:
            continue
        cap = np.quantile([u for u, _, _ in known.values()], 0.95)
        util = {c: (min(u, cap) + bonus) * factor for c, (u, bonus, factor) in known.items()}
        for place, client in enumerate(cohort.candidates.tolist()):
            np.testing.assert_allclose(cohort.score[place], util.get(client, math.nan), rtol=1e-9)
        fresh = [c for c in free if last.get(c) != models + 1] or free
        (client,) = cohort.clients.tolist()
        assert client in fresh
        if client in util:
            exploited += 1
            assert util[client] >= 0.95 * max(util[c] for c in fresh if c in util) * (1 - 1e-12)
    assert exploited > 50


def test_async_oorts_pacer_extends_when_utility_falls():
    selector = AsyncOort(**GREEDY, window=3, pace=7.0)
    session, log = play(selector, 900)
    gained = {}
    for entry in log:
        if entry[0] == "answer" and entry[3] is Status.OK:
            gained[entry[6]] = gained.get(entry[6], 0.0) + SIZES[entry[2]] * entry[4]
    newest = max(gained)
    expected = 30.0
    for model in range(6, newest + 1, 3):
        before = sum(gained.get(m, 0.0) for m in range(model - 6, model - 3))
        after = sum(gained.get(m, 0.0) for m in range(model - 3, model))
        expected = min(expected + 7.0 * (before > after), 100.0)
    assert session.state.threshold == pytest.approx(expected) and expected > 30.0


# -- FedCompass -------------------------------------------------------------------------------------------------------


class Compass:
    """The scheduler with a clock and a table of groups, one client at a time."""

    def __init__(self, least, most, slack):
        self.least, self.most, self.slack = least, most, slack
        self.groups = []  # [T_a, T_max, clients]

    def leave(self, client):
        for group in self.groups:
            group[2].discard(client)
        self.groups = [group for group in self.groups if group[2]]

    def assign(self, client, now, speed):
        if speed.get(client) is None:
            return self.most
        own = speed[client]
        best = None
        for group in self.groups:
            steps = (group[0] - now) / own
            if self.least <= steps <= self.most and (best is None or steps > best[0]):
                best = steps, group
        if best is not None:
            best[1][2].add(client)
            return best[0]
        steps = -1.0
        for _, latest, members in self.groups:
            if now < latest:
                following = (latest + min(speed[c] for c in members) * self.most - now) / own
                if following <= self.most:
                    steps = max(steps, following)
        steps = self.most if steps < 0 else max(steps, self.least)
        self.groups.append([now + steps * own, now + steps * own * self.slack, {client}])
        return steps


@pytest.mark.parametrize("options", [{}, {"least": 0.1, "most": 2.0, "slack": 1.5}])
def test_fedcompass_assigns_the_work_of_a_scheduler_with_a_clock(options):
    selector = FedCompass(**options)
    seconds = (1.3 ** np.arange(N) * np.random.default_rng(8).uniform(0.9, 1.1, N)).tolist()
    _, log = play(selector, 700, seconds=seconds)
    plain, speed, works = Compass(selector.least, selector.most, selector.slack), {}, []
    for entry in log:
        if entry[0] == "ask":
            (client,) = entry[2].clients.tolist()
            expected = plain.assign(client, entry[1], speed)
            np.testing.assert_allclose(entry[2].work, [expected], rtol=1e-6)
            works.append(expected)
        else:
            plain.leave(entry[2])
            speed[entry[2]] = seconds[entry[2]]  # they are steady, so that an average is any one
    assert len({round(work, 6) for work in works}) > 20


def test_fedcompass_makes_clients_answer_together():
    """Two clients, one twice as fast and asked first: once both are timed, they answer at the same moment."""
    session = Session(FedCompass(), ClientTable(n=2), asynchronous=True)
    flow = Flow(session, FlowPolicy(busy=2, buffer=2))
    pace, clock, ends, moments = [1.0, 2.0], 0.0, [], []
    for _ in range(60):
        if flow.is_due(clock):
            flow.advance(clock)
        elif flow.free and not any(abs(end - clock) < 1e-9 for end, *_ in ends):
            cohort = flow.choose(available=np.array([True, bool(flow.busy[0])]))
            client = int(cohort.clients[0])
            ends.append((clock + pace[client] * float(cohort.work[0]), cohort.ticket, clock))
        else:
            ends.sort()
            clock, ticket, begun = ends.pop(0)
            moments.append(clock)
            flow.receive(ticket, Status.OK, {Signal.DURATION: [clock - begun]})
    pairs = zip(moments[1::2], moments[2::2], strict=False)  # the first time, one of them is alone
    assert all(b - a < 1e-9 for a, b in pairs) and moments[:3] == [1.0, 2.0, 2.0] and len(moments) > 20


def test_fedcompass_refuses_most_below_least():
    with pytest.raises(ParameterError, match=r"'least'.*'most'"):
        FedCompass(least=0.8, most=0.5)


# -- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pisces", "oort-async", "fedcompass"])
def test_asynchronous_selectors_learn_nothing_from_failures(name):
    selector = SELECTORS.create(name)
    assert selector.one_at_a_time
    session = Session(selector, ClientTable(sizes=SIZES), asynchronous=True)
    cohort = session.ask(1)
    before = session.state
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=[int(Status.FAILED)]))
    for field in ("loss", "utility", "pace"):
        if hasattr(before, field):
            np.testing.assert_array_equal(getattr(session.state, field), getattr(before, field))

"""FLASH and flash-advantage: regression against the whole history, contexts, rewards, early stop, edges."""

import math
import statistics

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Answer, Losses, RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.ours.flash_advantage import _OUR_READINGS, FlashAdvantage
from fedcohort.selectors.papers.flash import ELEMENTS, LIMIT, READINGS, VALIDATION_LOSS_AFTER, Flash, FlashState
from fedcohort.selectors.papers.flash.regression import solution
from fedcohort.session import Session


def fitted_theta(state):
    return solution(state.gram, state.moment)


class World:
    """A federation whose numbers are drawn as it goes; keeps its own account of every context and reward."""

    def __init__(self, selector, n=8, seed=0):
        self.selector = selector
        self.session = Session(selector, ClientTable(n=n), seed=seed)
        self.rng = np.random.default_rng(seed)
        self.n = n
        self.first = {}
        self.context = {i: dict(zip(ELEMENTS, (1.0, 1.0, 1.0, None), strict=True)) for i in range(n)}
        self.history, self.rewards, self.level = [], [], {}
        self.asked, self.waiting = {}, []
        self.unit = None

    def losses(self, clients):
        """The losses of the global model: those that were asked for, if they were."""
        return {
            s: np.array([self.asked.get((s, i), self.rng.uniform(0.2, 3.0)) for i in clients.tolist()])
            for s in (Signal.ROBUST_LOSS, Signal.VALIDATION_LOSS)
        }

    def vector(self, i):
        """The context by Sec. 2.3, in the order of the selector's elements."""
        mean = np.mean(self.rewards) if self.rewards else 0.0
        values = dict(self.context[i])
        values["last-reward"] = mean if values["last-reward"] is None else values["last-reward"]
        return [values[name] for name in self.selector.context]

    def answer(self, query):
        """Fresh contexts: the losses of the current model, relative to their first values."""
        if query is None:
            return None
        values = {s: self.rng.uniform(0.2, 3.0, len(query.clients)) for s in sorted(query.signals)}
        self.asked = {(s, i): values[s][j] for s in values for j, i in enumerate(query.clients.tolist())}
        for i, vector, before, tau in self.waiting:  # their reward needed this model
            now = self.asked[self.selector.readings[self.selector.reward].before, i]
            self.earn(i, vector, (abs(before - now) if "change" in self.selector.reward else before - now) / tau)
        self.waiting = []
        self.know(query.clients.tolist(), values)
        return Answer(query, values)

    def earn(self, i, vector, reward):
        self.history.append(vector)
        self.rewards.append(reward)
        self.context[i]["last-reward"] = reward

    def know(self, clients, values):
        for name, s in (("robust-loss", Signal.ROBUST_LOSS), ("validation-loss", Signal.VALIDATION_LOSS)):
            for i, value in zip(clients, values.get(s, ()), strict=False):
                self.context[i][name] = value / self.first.setdefault((i, name), value)

    def round(self, size=3, status=None, seconds=60.0):
        request = RoundRequest(size=size)
        cohort = self.session.ask(request, self.answer(self.session.query(request)))
        if cohort.stop:
            return cohort
        k = cohort.size
        metrics = self.losses(cohort.clients)
        metrics[Signal.DURATION] = seconds * self.rng.uniform(0.5, 2.0, k)
        for name in ("ROBUST_LOSS_AFTER", "PSEUDO_LOSS", "PSEUDO_LOSS_AFTER"):
            metrics[getattr(Signal, name)] = self.rng.uniform(0.2, 3.0, k)
        status = np.zeros(k, int) if status is None else np.asarray(status)
        ok = status == Status.OK
        if self.unit is None and ok.any():
            self.unit = float(np.median(metrics[Signal.DURATION][ok]))
        pairs = []
        reading = self.selector.readings[self.selector.reward]
        self.level |= {i: metrics[reading.before][j] for j, i in enumerate(cohort.clients.tolist()) if ok[j]}
        usual = np.mean(list(self.level.values())) if self.level else math.nan
        for j, i in enumerate(cohort.clients.tolist()):
            if not ok[j]:
                self.context[i]["last-reward"] = 0.0
                continue
            tau = metrics[Signal.DURATION][j] / self.unit
            before = metrics[reading.before][j]
            if reading.after is None:
                self.waiting.append((i, self.vector(i), before, tau))
                pairs.append((i, None, None, tau, j))
                continue
            after = metrics[reading.after][j]
            gains = {"decrease": before - after, "change": abs(before - after), "advantage": 1 - after / usual}
            reward = gains[self.selector.reward.split("-")[1]] / tau
            pairs.append((i, self.vector(i), reward, tau, j))
        for i, vector, reward, tau, j in pairs:
            if vector is not None:
                self.earn(i, vector, reward)
            if self.selector.contexts == "last":
                self.know([i], {s: [values[j]] for s, values in metrics.items()})
            self.context[i]["duration"] = tau
        self.session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
        return cohort


@pytest.mark.parametrize("context", [ELEMENTS, ("duration", "robust-loss"), ("last-reward",), ELEMENTS[:3]])
@pytest.mark.parametrize(
    ("kind", "reward"),
    [(Flash, name) for name in READINGS]
    + [(FlashAdvantage, name) for name, reading in _OUR_READINGS.items() if reading.after is not None],
)
def test_theta_is_the_ridge_solution_on_the_whole_history(kind, reward, context):
    selector = kind(reward=reward, context=context, ridge=0.6, first_round="asked")
    world = World(selector)
    for t in range(25):
        world.round(size=1 + t % 4, status=[Status.FAILED if (t + j) % 5 == 0 else Status.OK for j in range(1 + t % 4)])
        x, r = np.array(world.history).reshape(-1, len(context)), np.array(world.rewards)
        expected = np.linalg.solve(x.T @ x + 0.6 * np.eye(len(context)), x.T @ r)
        np.testing.assert_allclose(fitted_theta(world.session.state), expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "selector", [Flash(), FlashAdvantage(exploration=0.5, pool="top", uniform_share=0.0)], ids=lambda one: one.name
)
def test_scores_are_the_parts_of_the_drawn_theta_and_the_top_is_taken(selector):
    world = World(selector, n=20)
    for t in range(12):
        cohort = world.round()
        theta = np.array([cohort.notes[f"drawn {name}"] for name in ELEMENTS])
        # Contexts have moved on for the cohort; all others still have those that the score was computed from.
        others = np.setdiff1d(np.arange(20), cohort.clients)
        for i in others if t else []:
            assert cohort.score[i] == pytest.approx(theta @ world.vector(i))
            assert [cohort.parts[name][i] for name in ELEMENTS] == pytest.approx(theta * world.vector(i))
        if t:
            assert cohort.size == 3
            assert cohort.score[cohort.clients].min() >= cohort.score[others].max()
            assert (np.diff(cohort.score[cohort.clients]) <= 0).all()


READINGS_OF_ALGORITHM_1 = [
    {},  # the plain name
    {"reward_of": "round"},
    {"tau": "round"},
    {"reward_of": "round", "tau": "round", "alpha": "constant", "exploration": 0.7},
    {"time_unit": "milliseconds"},
    {"observed": "trained"},
    {"observed": "trained", "reward_of": "round", "tau": "round", "time_unit": "milliseconds", "alpha": "constant"},
]


@pytest.mark.parametrize("reading", READINGS_OF_ALGORITHM_1, ids=str)
def test_every_reading_is_the_papers_algorithm_by_brute_force(reading):
    """Sec. 2.3, Algorithms 1, 2, client by client: r_t = |L^t - L^(t-1)| / tau_(t-1), with the L^t of the context."""
    n, rounds, size = 12, 15, 4
    rng = np.random.default_rng(4)
    # L^t and L_CE^t(V) of the global model, of each client's own model after training, and tau_t.
    robust, validation, own_robust, own_validation, seconds = (rng.uniform(0.2, 3.0, (rounds, n)) for _ in range(5))
    session = Session(Flash(**reading), ClientTable(n=n), seed=0)
    unit = 0.001 if reading.get("time_unit") == "milliseconds" else statistics.median(seconds[0])
    tau, reward = [1.0] * n, [0.0] * n
    gram, moment = np.eye(4), np.zeros(4)
    members, rewarded_context = [], {}
    for t in range(rounds):
        if members:  # line 13: the next global model is evaluated, and the round is rewarded
            moved = {i: abs(robust[t, i] - robust[t - 1, i]) for i in members}
            if reading.get("reward_of") == "round":
                one = abs(
                    statistics.mean(robust[t, i] for i in members) - statistics.mean(robust[t - 1, i] for i in members)
                )
                moved = dict.fromkeys(members, one)
            for i in members:
                reward[i] = moved[i] / tau[i]
                gram = gram + np.outer(rewarded_context[i], rewarded_context[i])
                moment = moment + reward[i] * np.array(rewarded_context[i])
        context = [
            [robust[t, i] / robust[0, i], validation[t, i] / validation[0, i], tau[i], reward[i]] for i in range(n)
        ]
        request = RoundRequest(size=size)
        query = session.query(request)
        answer = {Signal.ROBUST_LOSS: robust[t][query.clients], Signal.VALIDATION_LOSS: validation[t][query.clients]}
        cohort = session.ask(request, Answer(query, answer))
        theta_hat = np.linalg.inv(gram) @ moment
        assert [cohort.notes[f"theta {name}"] for name in ELEMENTS] == pytest.approx(theta_hat)
        growing = 1.0 + math.sqrt(4 * math.log((1 + t * n) / 0.1))
        factor = reading.get("exploration", 1.0)
        assert cohort.notes["alpha"] == pytest.approx(factor * (1.0 if reading.get("alpha") == "constant" else growing))
        drawn = [cohort.notes[f"drawn {name}"] for name in ELEMENTS]
        scores = [sum(a * b for a, b in zip(drawn, x, strict=True)) for x in context]
        assert cohort.score == pytest.approx(scores)
        members = sorted(range(n), key=lambda i: -scores[i])[: n if t == 0 else size]  # S_0 = [m], then the top M_t
        assert set(cohort.clients.tolist()) == set(members)
        longest = max(seconds[t, i] for i in members)
        for i in members:  # lines 7 to 9
            tau[i] = (longest if reading.get("tau") == "round" else seconds[t, i]) / unit
            after = [own_robust[t, i] / robust[0, i], own_validation[t, i] / validation[0, i], tau[i], reward[i]]
            rewarded_context[i] = after if reading.get("observed") == "trained" else context[i]
        chosen = cohort.clients
        report = {
            Signal.ROBUST_LOSS: robust[t, chosen],
            Signal.VALIDATION_LOSS: validation[t, chosen],
            Signal.DURATION: seconds[t, chosen],
            Signal.ROBUST_LOSS_AFTER: own_robust[t, chosen],
            VALIDATION_LOSS_AFTER: own_validation[t, chosen],
        }
        metrics = {signal: values for signal, values in report.items() if signal in session.requires}
        session.tell(RoundReport(cohort.ticket, chosen, metrics=metrics))


def test_the_plain_name_asks_for_what_the_paper_needs():
    assert Flash().requires == {
        Signal.LOSS_QUERY, Signal.ROBUST_LOSS, Signal.VALIDATION_LOSS, Signal.DURATION
    }  # fmt: skip


def test_drawn_theta_has_the_mean_and_covariance_of_equation_2():
    world = World(Flash(exploration=0.3, delta=0.2, ridge=2.0, reward="robust-change", contexts="last"))
    for _ in range(10):
        world.round()
    state, t, m, d = world.session.state, 10, 8, 4
    x, r = np.array(world.history), np.array(world.rewards)
    gram = x.T @ x + 2.0 * np.eye(4)
    alpha = 0.3 * (math.sqrt(2.0) + math.sqrt(d * math.log((1 + t * m) / 0.2)))
    slate = Slate(round=t, size=2, candidates=np.arange(8), clients=ClientTable(n=8))
    rng = np.random.default_rng(5)
    notes = [world.selector.select(state, slate, None, rng)[0].notes for _ in range(8000)]
    assert notes[0]["alpha"] == pytest.approx(alpha)
    draws = np.array([[note[f"drawn {name}"] for name in ELEMENTS] for note in notes])
    mean, covariance = np.linalg.solve(gram, x.T @ r), alpha**2 * np.linalg.inv(gram)
    assert [notes[0][f"theta {name}"] for name in ELEMENTS] == pytest.approx(mean)
    assert (np.abs(draws.mean(0) - mean) < 4 * np.sqrt(np.diag(covariance) / 8000)).all()
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.05 * np.abs(covariance).max())


def test_units_of_time_do_not_matter():
    slow, quick = World(Flash(), seed=3), World(Flash(), seed=3)
    for _ in range(15):
        assert slow.round(seconds=60_000.0).clients.tolist() == quick.round(seconds=60.0).clients.tolist()


def test_first_round_has_all_clients_up_to_a_limit():
    assert World(Flash(), n=30).round(size=4).size == 30
    assert World(Flash(first_round_limit=10), n=30).round(size=4).size == 10
    assert World(Flash(first_round_limit=3), n=30).round(size=4).size == 4
    assert World(Flash(first_round="asked"), n=30).round(size=4).size == 4
    world = World(Flash(), n=30)
    world.round(size=4)
    assert world.round(size=4).size == 4
    assert world.round(size=9).size == 9  # M_t may change from round to round


def early_stop_state(predicted, streak, patience):
    """Three clients, one context element, and predictions written in by hand."""
    selector = Flash(patience=patience, context=("last-reward",), first_round="asked", reward="robust-change")
    state = selector.init(ClientTable(n=3), np.random.default_rng(0))
    values = {f: getattr(state, f) for f in state.__dataclass_fields__}
    values |= {"predicted": np.array(predicted), "streak": np.array(streak)}
    return selector, FlashState(**values)


def test_early_stop_written_out():
    """N = 2. A client is retired when twice in a row theta-hat' x was smaller than the reward it then brought."""
    selector = FlashAdvantage(
        patience=2, context=("last-reward",), first_round="asked", exploration=0.0, reward="pseudo-decrease"
    )
    session = Session(selector, ClientTable(n=3), seed=0)

    def play(size, rewards):
        cohort = session.ask(RoundRequest(size=size))
        decrease = np.array([rewards[int(c)] for c in cohort.clients])
        metrics = {
            Signal.DURATION: np.full(cohort.size, 5.0),
            Signal.PSEUDO_LOSS: 2.0 + decrease,
            Signal.PSEUDO_LOSS_AFTER: np.full(cohort.size, 2.0),
        }
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        return cohort

    # Round 0: theta = 0, so every score is 0. Rewards 1, 0.5, -1: clients 0 and 1 brought more than predicted.
    play(3, {0: 1.0, 1: 0.5, 2: -1.0})
    assert session.state.streak.tolist() == [1, 1, 0]
    # The contexts of round 0 were 0 (no reward yet), so V = 1, b = 0 and theta is still 0: scores 0 again.
    cohort = play(3, {0: 2.0, 1: -0.5, 2: 1.0})
    assert cohort.score.tolist() == [0, 0, 0]
    assert session.state.streak.tolist() == [2, 0, 1]  # client 0 is retired; -0.5 is not larger than 0
    # Now x = (1, 0.5, -1) met r = (2, -0.5, 1): V = 1 + 1 + 0.25 + 1, b = 2 - 0.25 - 1, theta = 0.75 / 3.25.
    theta = 0.75 / 3.25
    assert fitted_theta(session.state) == pytest.approx(np.array([theta]))
    cohort = play(3, {1: 0.0, 2: 9.0})
    assert sorted(cohort.clients.tolist()) == [1, 2]
    assert cohort.notes["retired"] == 1
    assert cohort.score == pytest.approx([2 * theta, -0.5 * theta, theta])  # of all, the retired one too
    # Client 1: -0.5 theta < 0, a first time. Client 2: theta < 9, a second time: retired.
    assert session.state.streak.tolist() == [2, 1, 2]
    cohort = play(3, {1: 1.0})
    assert cohort.clients.tolist() == [1]
    assert session.state.streak.tolist() == [2, 2, 2]
    cohort = session.ask(RoundRequest(size=3))
    assert cohort.size == 0
    assert "retired" in cohort.stop


def test_early_stop_compares_with_the_fitted_theta_not_with_the_drawn_one():
    """theta-hat = 2: a context of 1 predicts 2. The draw is far off, which must not matter."""
    selector = Flash(patience=1, context=("duration",), first_round="asked", exploration=50.0)
    state = selector.init(ClientTable(n=4), np.random.default_rng(0))
    values = {f: getattr(state, f) for f in state.__dataclass_fields__}
    state = FlashState(**values | {"gram": np.array([[5.0]]), "moment": np.array([10.0]), "rounds": 3})
    slate = Slate(round=3, size=4, candidates=np.arange(4), clients=ClientTable(n=4))
    for seed in range(5):
        cohort, after = selector.select(state, slate, None, np.random.default_rng(seed))
        assert abs(cohort.notes["drawn duration"] - 2.0) > 0.1
        assert after.predicted == pytest.approx([2.0] * 4)


def pooled_state(selector, scores, rewards):
    """Scores written in by hand: theta = 1 on the duration, no exploration."""
    n = len(scores)
    state = selector.init(ClientTable(n=n), np.random.default_rng(0))
    values = {f: getattr(state, f) for f in state.__dataclass_fields__}
    values |= {"gram": np.array([[1e12]]), "moment": np.array([1e12]), "rounds": 9, "duration": np.array(scores)}
    return type(state)(**values | {"reward": np.array(rewards), "rewarded": np.ones(n, bool)})


def picks_of(selector, state, size=2, draws=1500, candidates=None):
    rng = np.random.default_rng(1)
    n = len(state.duration)
    who = np.arange(n) if candidates is None else np.array(candidates)
    slate = Slate(round=9, size=size, candidates=who, clients=ClientTable(n=n))
    counts = np.zeros(n)
    for _ in range(draws):
        cohort, _ = selector.select(state, slate, None, rng)
        assert cohort.size == size == len(set(cohort.clients.tolist()))
        counts[cohort.clients] += 1
    return counts / draws, cohort


SCORES, REWARDS = [3.0, 2.0, 1.0, -1.0, -2.0, -3.0, -4.0, -5.0], [0.0, -1.0, 1.0, 2.0, 0.0, 0.5, -1.0, 0.0]


def test_cohorts_are_drawn_evenly_from_those_that_promise_a_reward():
    """Positive scores 0, 1, 2 or positive last rewards 2, 3, 5: five of eight, each in two fifths of the cohorts."""
    selector = FlashAdvantage(context=("duration",), exploration=0.0, uniform_share=0.0, pool=0.5)
    shares, cohort = picks_of(selector, pooled_state(selector, SCORES, REWARDS))
    assert shares == pytest.approx([0.4, 0.4, 0.4, 0.4, 0, 0.4, 0, 0], abs=0.05)
    assert (cohort.notes["promising"], cohort.notes["pool"]) == (5, 5)


def test_too_few_promising_ones_are_filled_up_by_score():
    selector = FlashAdvantage(context=("duration",), exploration=0.0, uniform_share=0.0, pool=0.75)
    shares, cohort = picks_of(selector, pooled_state(selector, SCORES, REWARDS))
    assert shares == pytest.approx([1 / 3] * 6 + [0, 0], abs=0.05)  # the top six of eight
    assert (cohort.notes["promising"], cohort.notes["pool"]) == (5, 6)
    narrow = FlashAdvantage(context=("duration",), exploration=0.0, uniform_share=0.0, pool=0.0)
    shares, _ = picks_of(narrow, pooled_state(narrow, [-1.0, -2.0, -3.0, -4.0], [0.0] * 4))
    assert shares.tolist() == [1, 1, 0, 0]  # no client is promising: at least as many as asked for
    shares, _ = picks_of(selector, pooled_state(selector, SCORES, REWARDS), candidates=[5, 6, 7])
    assert shares == pytest.approx([0] * 5 + [2 / 3] * 3, abs=0.05)  # 0.75 of three candidates


@pytest.mark.parametrize("pool", ["top", 0.0])
def test_some_places_are_drawn_from_all_clients(pool):
    """Two of eight wanted, clients 0 and 1 in the pool alone; k ~ B(2, 0.3) places from all that are left."""
    selector = FlashAdvantage(context=("duration",), exploration=0.0, uniform_share=0.3, pool=pool)
    scores = [5.0, 4.0] + [-1.0] * 6
    shares, _ = picks_of(selector, pooled_state(selector, scores, [0.0] * 8), draws=4000)
    # k = 0: both. k = 1 (0.42): one stays, the place goes to one of the other seven. k = 2 (0.09): two of eight.
    outside = 0.42 / 7 + 0.09 * 2 / 8
    assert shares[2:] == pytest.approx([outside] * 6, abs=0.025)
    assert shares.sum() == pytest.approx(2.0)


def test_the_papers_choice_is_the_top():
    selector = Flash(context=("duration",), exploration=0.0)
    shares, cohort = picks_of(selector, pooled_state(selector, SCORES, REWARDS), draws=20)
    assert shares.tolist() == [1, 1] + [0] * 6
    assert "pool" not in cohort.notes


def test_advantage_by_hand():
    """Round 1: losses 1, 2, 3 received, mean 2. Round 2: client 0 now reports 4, so the mean is 3."""
    session = Session(FlashAdvantage(first_round="asked", context=("duration",)), ClientTable(n=3), seed=0)
    cohort = session.ask(RoundRequest(size=3))
    order = cohort.clients
    metrics = {
        Signal.DURATION: np.full(3, 7.0),
        Signal.ROBUST_LOSS: order + 1.0,
        Signal.ROBUST_LOSS_AFTER: np.array([1.0, 2.0, 4.0])[order],
    }
    session.tell(RoundReport(cohort.ticket, order, metrics=metrics))
    assert session.state.reward.tolist() == [0.5, 0.0, -1.0]
    cohort = session.ask(RoundRequest(size=1, available=[0]))
    metrics = {Signal.DURATION: [14.0], Signal.ROBUST_LOSS: [4.0], Signal.ROBUST_LOSS_AFTER: [1.5]}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    assert session.state.reward.tolist() == [0.25, 0.0, -1.0]  # (1 - 1.5 / 3) / 2


def test_retired_clients_are_asked_if_no_others_are_available():
    selector, state = early_stop_state([np.nan] * 3, [2, 2, 0], patience=2)
    slate = Slate(round=4, size=2, candidates=np.array([0, 1]), clients=ClientTable(n=3))
    cohort, _ = selector.select(state, slate, None, np.random.default_rng(0))
    assert sorted(cohort.clients.tolist()) == [0, 1]
    assert cohort.stop is None
    assert cohort.notes["reason"] == "only retired clients are available"


def test_without_patience_no_client_is_retired():
    world = World(Flash(), n=4)
    for _ in range(40):
        assert world.round(size=2).stop is None
    assert not world.session.state.streak.any()


def fresh_session(reward, n=6):
    return Session(Flash(reward=reward, first_round="asked"), ClientTable(n=n), seed=0)


def fresh_round(session, robust, validation, size=2, available=None):
    request = RoundRequest(size=size, available=available)
    query = session.query(request)
    assert isinstance(query, Losses)
    assert query.signals == {Signal.ROBUST_LOSS, Signal.VALIDATION_LOSS}
    values = {Signal.ROBUST_LOSS: robust[query.clients], Signal.VALIDATION_LOSS: validation[query.clients]}
    return session.ask(request, Answer(query, values))


def test_fresh_contexts_are_asked_of_all_candidates():
    session = fresh_session("pseudo-change")
    robust, validation = np.arange(1.0, 7.0), np.arange(2.0, 8.0)
    assert Signal.LOSS_QUERY in session.selector.requires
    assert Signal.VALIDATION_LOSS in session.selector.requires  # a host without held-out data is refused
    cohort = fresh_round(session, robust, validation)
    assert session.state.robust.tolist() == [1.0] * 6
    metrics = {s: [1.0, 1.0] for s in session.selector.requires - {Signal.LOSS_QUERY}}
    metrics[Signal.DURATION] = [3.0, 3.0]
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    later = robust * np.linspace(0.1, 0.6, 6)
    later[5] = np.nan  # did not answer: what was known stays
    fresh_round(session, later, validation / 2)
    np.testing.assert_allclose(session.state.robust, [0.1, 0.2, 0.3, 0.4, 0.5, 1.0])
    np.testing.assert_allclose(session.state.validation, 0.5)


def test_rewards_of_the_next_global_model_wait_for_it():
    session = fresh_session("validation-decrease")
    ones = np.ones(6)
    cohort = fresh_round(session, ones, 2 * ones)
    first, second = cohort.clients.tolist()
    metrics = {s: [2.0, 2.0] for s in session.selector.requires - {Signal.LOSS_QUERY}}
    metrics[Signal.DURATION] = [4.0, 8.0]
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    assert session.state.waiting.tolist() == [first, second]
    assert session.state.reward_count == 0
    now = np.full(6, 1.4)
    now[second] = 2.3
    # The time unit is 6; the second client is away, so nothing is learnt about it.
    fresh_round(session, ones, now, available=[i for i in range(6) if i != second])
    state = session.state
    assert state.waiting.size == 0
    assert state.reward_count == 1
    assert state.reward[first] == pytest.approx(0.6 / (4 / 6))
    x = np.array([1.0, 1.0, 1.0, 0.0])  # the context it was picked by
    np.testing.assert_allclose(state.gram, np.eye(4) + np.outer(x, x))
    np.testing.assert_allclose(state.moment, x * 0.9)


def test_no_question_when_the_context_needs_no_losses():
    selector = Flash(context=("duration", "last-reward"), first_round="asked", reward="robust-change")
    session = Session(selector, ClientTable(n=4), seed=0)
    assert session.query(RoundRequest(size=2)) is None
    assert Signal.LOSS_QUERY not in selector.requires


def test_the_ablation_reads_only_what_it_uses():
    assert Flash(context=("duration",)).requires == {Signal.DURATION, Signal.ROBUST_LOSS, Signal.LOSS_QUERY}
    assert Flash().requires == {Signal.DURATION, Signal.ROBUST_LOSS, Signal.LOSS_QUERY, Signal.VALIDATION_LOSS}
    base = {Signal.DURATION, Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER}
    assert Flash(context=("duration",), reward="robust-change").requires == base
    assert FlashAdvantage(context=["duration"]).requires == base
    assert FlashAdvantage().requires == base | {Signal.VALIDATION_LOSS}
    pseudo = {Signal.DURATION, Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER}
    some = FlashAdvantage(context=("robust-loss", "duration"), reward="pseudo-decrease")
    assert some.requires == pseudo | {Signal.ROBUST_LOSS}


@pytest.mark.parametrize("losses", [np.zeros, lambda k: np.full(k, 1e300), lambda k: 10.0 ** np.linspace(-300, 300, k)])
def test_absurd_numbers_keep_the_regression_finite(losses):
    for reward in ("pseudo-decrease", "robust-change", "robust-advantage"):
        session = Session(FlashAdvantage(reward=reward, patience=50), ClientTable(n=6), seed=0)
        for t in range(20):
            cohort = session.ask(RoundRequest(size=3))
            metrics = {s: losses(cohort.size) for s in session.requires}
            metrics[Signal.DURATION] = [0.0, 1e-300, 1e300, 5.0, 0.0, 1.0][: cohort.size]
            if t % 2:
                metrics[Signal.PSEUDO_LOSS if reward[0] == "p" else Signal.ROBUST_LOSS_AFTER] = losses(cohort.size)[
                    ::-1
                ]
            session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
            state = session.state
            assert np.isfinite(state.gram).all() and np.isfinite(state.moment).all()
            assert np.abs(state.reward).max() <= LIMIT and state.duration.max() <= LIMIT
            assert np.isfinite(fitted_theta(state)).all()


def test_a_failed_client_loses_its_last_reward():
    world = World(Flash(first_round="asked", reward="robust-change", contexts="last"), n=3)
    world.round(size=3)
    before = world.session.state
    cohort = world.round(size=2, status=[Status.FAILED, Status.OK])
    failed = cohort.clients[0]
    after = world.session.state
    assert after.reward[failed] == 0
    assert after.robust[failed] == before.robust[failed]
    assert after.reward_count == before.reward_count + 1


@pytest.mark.parametrize(("pool", "share"), [(0.5, 0.7), (0.8, 0.9)])
def test_finds_clean_clients(pool, share):
    """Noisy clients keep a robust loss above the mean whatever they train; a wider pool leaves fewer of them out."""
    n, rng = 40, np.random.default_rng(0)
    noise = rng.beta(0.8, 1.2, n)
    session = Session(FlashAdvantage(pool=pool), ClientTable(n=n), seed=2)
    picked = []
    for t in range(80):
        cohort = session.ask(RoundRequest(size=5))
        level = noise[cohort.clients]
        progress = math.exp(-t / 30)
        metrics = {
            Signal.ROBUST_LOSS: 1.0 + progress + 6 * level + 0.1 * rng.normal(size=cohort.size),
            Signal.VALIDATION_LOSS: 0.4 + progress + 2 * level,
            Signal.DURATION: 500 * (1 + rng.exponential(size=cohort.size)),
            Signal.ROBUST_LOSS_AFTER: 0.8 + progress + 5.5 * level + 0.1 * rng.normal(size=cohort.size),
        }
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        if t >= 40:
            picked.append(level)
    assert np.mean(np.concatenate(picked)) < share * noise.mean()
    assert session.coverage().recent >= 20  # and not from a handful of them


def test_bad_parameters():
    for bad in (
        {"context": ()},
        {"context": ("duration", "duration")},
        {"context": ("speed",)},
        {"reward": "loss"},
        {"exploration": -0.1},
        {"ridge": 0.0},
        {"delta": 1.0},
        {"patience": 0},
        {"first_round": "some"},
        {"contexts": "last"},
        {"reward": "validation-decrease", "contexts": "last"},
        {"reward": "robust-advantage"},  # ours
    ):
        with pytest.raises(ParameterError, match="of Flash "):
            Flash(**bad)
    for bad in ({"pool": "best"}, {"pool": 1.5}, {"uniform_share": -0.1}, {"reward": "validation-decrease"}):
        with pytest.raises(ParameterError, match="of FlashAdvantage "):
            FlashAdvantage(**bad)

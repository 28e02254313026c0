"""FedACS: Algorithm 2 literally, the pool, both insights, and the stand-alone ranking."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.fedacs import FedAcs, FedAcsState, ranking
from fedcohort.session import Session


def tell(session, cohort, distance, status=None):
    metrics = {Signal.GRADIENT_DISTANCE: distance}
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))


def test_updates_are_algorithm_2():
    eta = 0.5
    session = Session(FedAcs(eta=eta, pool_share=1.0), ClientTable(n=12), seed=3)
    rng = np.random.default_rng(0)
    wins, losses = np.zeros(12), np.zeros(12)
    for _ in range(15):
        cohort = session.ask(RoundRequest(size=6))
        distance = rng.integers(0, 4, 6).astype(float)  # ties on purpose
        reward = dict(zip(cohort.clients.tolist(), -distance, strict=True))
        for i, r_i in reward.items():
            for j, r_j in reward.items():
                if r_i > r_j:
                    wins[i] += eta
                    losses[j] += eta
        tell(session, cohort, distance)
        assert session.state.wins.tolist() == wins.tolist()
        assert session.state.losses.tolist() == losses.tolist()


def test_all_equal_changes_nothing_but_the_round_count():
    session = Session(FedAcs(), ClientTable(n=4), seed=0)
    cohort = session.ask(RoundRequest(size=3))
    tell(session, cohort, np.full(3, 7.0))
    assert not session.state.wins.any() and not session.state.losses.any()
    assert session.state.rounds.sum() == 3


def test_failed_clients_do_not_duel():
    session = Session(FedAcs(), ClientTable(n=3), seed=0)
    cohort = session.ask(RoundRequest(size=3))
    tell(session, cohort, [1.0, 2.0, 3.0], status=[Status.OK, Status.LATE, Status.OK])
    first, late, last = cohort.clients
    assert session.state.wins[[first, late, last]].tolist() == [1, 0, 0]
    assert session.state.losses[[first, late, last]].tolist() == [0, 0, 1]
    assert session.state.rounds[late] == 0
    cohort = session.ask(RoundRequest(size=3))
    before = session.state
    tell(session, cohort, [1.0, 2.0, 3.0], status=[Status.OK, Status.FAILED, Status.FAILED])
    assert session.state is before  # no opponent


def slate(n, size, candidates=None):
    candidates = np.arange(n) if candidates is None else np.asarray(candidates)
    return Slate(round=5, size=size, candidates=candidates, clients=ClientTable(n=n))


def state_of(wins, losses):
    return FedAcsState(wins=np.array(wins, float), losses=np.array(losses, float), rounds=np.ones(len(wins)))


def test_cohort_is_drawn_uniformly_from_the_pool():
    state = state_of([1e4] * 4 + [0] * 6, [0] * 4 + [1e4] * 6)
    rng = np.random.default_rng(0)
    picks = np.zeros(10)
    for _ in range(2000):
        cohort, _ = FedAcs(pool_share=0.4).select(state, slate(10, 2), None, rng)
        assert cohort.score.tolist() == [1] * 4 + [0] * 6
        assert cohort.notes == {"pool": "exact", "pool size": 4}
        picks[cohort.clients] += 1
    assert picks[4:].sum() == 0
    assert np.abs(picks[:4] - 1000).max() < 110  # standard deviation 22


def test_the_pool_is_among_the_candidates_and_contains_the_cohort():
    state = state_of([1e4] * 5 + [0] * 5, [0] * 5 + [1e4] * 5)
    rng = np.random.default_rng(0)
    cohort, _ = FedAcs(pool_share=0.5).select(state, slate(10, 2, [3, 6, 7, 8]), None, rng)
    assert cohort.notes["pool size"] == 2
    assert cohort.score[0] == 1
    cohort, _ = FedAcs(pool_share=0.01).select(state, slate(10, 5), None, rng)
    assert sorted(cohort.clients.tolist()) == [0, 1, 2, 3, 4]
    cohort, _ = FedAcs(pool_share=1.0).select(state, slate(10, 3), None, rng)
    assert cohort.notes["pool"] == "everybody" and cohort.score.all()


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_large_federations_use_one_draw_and_say_so(monkeypatch, share):
    monkeypatch.setattr("fedcohort.selectors.papers.fedacs.selector._EXACT_UP_TO", 999)
    wins = np.repeat([1e4, 0.0], [200, 800])
    cohort, _ = FedAcs(pool_share=share).select(
        state_of(wins, 1e4 - wins), slate(1000, 5), None, np.random.default_rng(0)
    )
    assert cohort.notes["pool"] == "one draw per client"
    assert cohort.score.sum() == share * 1000
    pool = np.flatnonzero(cohort.score)
    assert cohort.parts["draw"][pool].min() > np.delete(cohort.parts["draw"], pool).max()
    assert set(cohort.clients) <= set(pool)


def test_insights_read_their_signal():
    assert FedAcs().requires == {Signal.GRADIENT_DISTANCE}
    assert FedAcs(insight="update").requires == {Signal.UPDATE_DISTANCE}
    for bad in ({"pool_share": 0.0}, {"pool_share": 1.1}, {"eta": 0.0}, {"insight": "loss"}):
        with pytest.raises(ParameterError):
            FedAcs(**bad)


def skewed_federation(seed, n=40, rounds=150, noise=0.4, **kwargs):
    rng = np.random.default_rng(seed)
    skew = rng.random(n)
    session = Session(FedAcs(**kwargs), ClientTable(n=n), seed=seed)
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size=8))
        tell(session, cohort, np.abs(skew[cohort.clients] + noise * rng.normal(size=8)))
    return skew, session


def test_the_pool_fills_with_clients_of_low_skew():
    skew, session = skewed_federation(0, noise=0.15, pool_share=0.25)
    cohort = session.ask(RoundRequest(size=8))
    assert skew[cohort.score > 0].mean() < 0.3  # 0.5 in the whole federation, 0.125 at best


def test_ranking_orders_by_skew_and_its_intervals_hold():
    covered, wide = [], []
    for seed in range(6):
        skew, session = skewed_federation(seed, pool_share=1.0)
        found = ranking(session.state)
        rank = np.empty(40)
        rank[found.order] = np.arange(40)
        assert np.corrcoef(rank, skew.argsort().argsort())[0, 1] > 0.8
        # The true probability to win against a random opponent, by simulation.
        rng = np.random.default_rng(99)
        rewards = -np.abs(skew + 0.4 * rng.normal(size=(4000, 40)))
        truth = np.array([(rewards[:, [i]] > np.delete(rewards, i, axis=1)).mean() for i in range(40)])
        covered.append((found.low <= truth) & (truth <= found.high))
        wide.append(found.high - found.low)
        assert ((found.best_rank <= rank + 1) & (rank + 1 <= found.worst_rank)).all()
    assert np.mean(covered) >= 0.95
    assert np.mean(wide) < 0.45


def test_ranking_of_unknown_clients_is_open():
    found = ranking(state_of([0, 30, 0], [0, 0, 30]), level=0.5)
    assert found.order.tolist() == [1, 0, 2]
    assert (found.low[0], found.high[0]) == (0.25, 0.75)
    fresh = ranking(FedAcs().init(ClientTable(n=3), np.random.default_rng(0)))
    assert fresh.best_rank.tolist() == [1, 1, 1] and fresh.worst_rank.tolist() == [3, 3, 3]
    assert fresh.low == pytest.approx([0.025] * 3) and fresh.win_rate.tolist() == [0.5] * 3
    for bad in ({"level": 0.0}, {"level": 1.0}):
        with pytest.raises(ParameterError):
            ranking(state_of([1], [1]), **bad)


def test_ranks_left_open_by_brute_force():
    rng = np.random.default_rng(0)
    found = ranking(
        FedAcsState(wins=rng.integers(0, 99, 30) * 1.0, losses=rng.integers(0, 99, 30) * 1.0, rounds=np.full(30, 20.0))
    )
    for i in range(30):
        assert found.best_rank[i] == 1 + sum(found.low[j] > found.high[i] for j in range(30))
        assert found.worst_rank[i] == 30 - sum(found.high[j] < found.low[i] for j in range(30))

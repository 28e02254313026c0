"""DivFL: the lazy greedy is the plain one, near the optimum, and members count for those they represent."""

from itertools import combinations

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import SKETCH_WIDTH, Signal
from fedcohort.selectors import Uniform
from fedcohort.selectors.baselines.divfl import DivFL, _lazy_greedy, _stochastic_greedy
from fedcohort.selectors.numerics.groups import distances
from fedcohort.selectors.numerics.recent import AskedVectors
from fedcohort.session import Session
from fedcohort.training.aggregators import FedAvg, Members


def total(apart, chosen):
    """G(S)."""
    return apart[:, list(chosen)].min(axis=1).sum()


def plain_greedy(apart, size):
    """Algorithm 1 as written: in every step compute the gain of every client that is left."""
    chosen = []
    for _ in range(size):
        left = [i for i in range(apart.shape[1]) if i not in chosen]
        chosen.append(min(left, key=lambda i: total(apart, [*chosen, i])))
    return chosen


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_lazy_is_plain(size):
    for seed in range(25):
        place = np.random.default_rng(seed).integers(0, 12, (30, 3)).astype(float)
        apart = np.abs(place[:, None] - place).sum(axis=2)[:, :20]  # whole numbers: ties, and no rounding
        assert _lazy_greedy(apart, size)[0].tolist() == plain_greedy(apart, size)


def test_greedy_is_within_its_bound_of_the_best():
    """The gain over a phantom at the largest distance is at least (1 - 1/e) of the best cohort's."""
    for seed in range(10):
        apart = distances(np.random.default_rng(seed).normal(size=(12, 2)))
        phantom = 12 * apart.max()
        best = phantom - min(total(apart, s) for s in combinations(range(12), 3))
        greedy = phantom - total(apart, _lazy_greedy(apart, 3)[0])
        assert (1 - 1 / np.e) * best <= greedy <= best + 1e-9


def test_gains_by_hand():
    """Places 0, 1, 2, 10: sums of distances 13, 11, 11, 27 below 4 x 10; then 10 saves its own 9."""
    place = np.array([0.0, 1, 2, 10])
    chosen, gain = _lazy_greedy(np.abs(place[:, None] - place), 2)
    assert chosen.tolist() == [1, 3]
    assert gain[[1, 3]] == pytest.approx([29.0, 9.0])


def test_distances_are_euclidean():
    vectors = np.random.default_rng(0).normal(size=(7, 5))
    expected = np.linalg.norm(vectors[:, None] - vectors, axis=2)
    assert distances(vectors) == pytest.approx(expected, abs=1e-7)


def state_of(kinds, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    n = len(kinds)
    vectors = np.eye(4, SKETCH_WIDTH)[kinds] + noise * rng.normal(size=(n, SKETCH_WIDTH))
    return AskedVectors(np.arange(n), np.zeros(n, np.int64), vectors, np.ones(n, np.bool_))


def test_weights_are_the_numbers_represented():
    kinds = np.array([0, 0, 0, 0, 1, 1, 2, 3])
    slate = Slate(round=3, size=4, candidates=np.arange(8), clients=ClientTable(sizes=np.full(8, 5)))
    cohort, _ = DivFL(by_data=True).select(state_of(kinds, 0.001), slate, None, np.random.default_rng(0))
    assert sorted(kinds[cohort.clients]) == [0, 1, 2, 3]
    assert dict(zip(kinds[cohort.clients].tolist(), cohort.weights.tolist(), strict=True)) == {0: 4, 1: 2, 2: 1, 3: 1}


@pytest.mark.parametrize("seed", range(20))
def test_members_count_by_the_data_of_those_they_represent(seed):
    """Under fedavg each member has the share of the data whose nearest member it is, by brute force."""
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(3.0, 2.0, 15).round() + 1
    vectors = rng.normal(size=(15, SKETCH_WIDTH))
    state = AskedVectors(np.arange(15), np.zeros(15, np.int64), vectors, np.ones(15, np.bool_))
    slate = Slate(round=3, size=4, candidates=np.sort(rng.choice(15, 12, False)), clients=ClientTable(sizes=sizes))
    cohort, _ = DivFL(by_data=True).select(state, slate, None, rng)
    data = dict.fromkeys(cohort.clients.tolist(), 0.0)
    for client in range(15):
        data[min(data, key=lambda member: np.linalg.norm(vectors[client] - vectors[member]))] += sizes[client]
    members = Members(cohort.clients, (sizes / sizes.sum())[cohort.clients], np.ones(4), 15, cohort.weights)
    assert FedAvg().mix(members).weights == pytest.approx(np.array(list(data.values())) / sizes.sum())


def test_equal_updates_and_members_without_data_lose_no_data():
    """Every client counts once, though all updates are the same; a client without data represents no client."""
    sizes = np.array([0.0, 10, 30, 60, 0, 100])
    slate = Slate(round=3, size=4, candidates=np.arange(6), clients=ClientTable(sizes=sizes))
    for seed in range(20):
        cohort, _ = DivFL(by_data=True).select(state_of(np.zeros(6, int)), slate, None, np.random.default_rng(seed))
        assert np.isfinite(cohort.weights).all()
        counted = cohort.weights * sizes[cohort.clients]
        assert counted.sum() == pytest.approx(200.0)
        assert (counted >= sizes[cohort.clients] - 1e-9).all()


def test_the_papers_numbers_need_no_sizes():
    kinds = np.array([0, 0, 0, 1])
    slate = Slate(round=3, size=2, candidates=np.arange(4), clients=ClientTable(n=4))
    cohort, _ = DivFL().select(state_of(kinds, 0.001), slate, None, np.random.default_rng(0))
    assert dict(zip(kinds[cohort.clients].tolist(), cohort.weights.tolist(), strict=True)) == {0: 3, 1: 1}


def test_equal_updates_are_chosen_at_random():
    slate = Slate(round=3, size=2, candidates=np.arange(6), clients=ClientTable(sizes=np.full(6, 5)))
    rng = np.random.default_rng(0)
    picked = set()
    for _ in range(60):
        cohort, _ = DivFL(by_data=True).select(state_of(np.zeros(6, int)), slate, None, rng)
        assert (cohort.weights >= 1).all()
        picked |= set(cohort.clients.tolist())
    assert picked == set(range(6))


def test_absent_clients_are_represented_too():
    """Kind 1 is absent; of the available clients, 3 is closest to it."""
    vectors = np.zeros((4, SKETCH_WIDTH))
    vectors[:, 0] = [0.0, 10.0, 1.0, 8.0]
    state = AskedVectors(np.arange(4), np.zeros(4, np.int64), vectors, np.ones(4, np.bool_))
    slate = Slate(round=3, size=2, candidates=np.array([0, 2, 3]), clients=ClientTable(sizes=np.ones(4)))
    cohort, _ = DivFL(by_data=True).select(state, slate, None, np.random.default_rng(0))
    assert 3 in cohort.clients
    assert cohort.weights[cohort.clients.tolist().index(3)] == 2


def test_every_client_is_asked_once_even_if_it_fails():
    session = Session(DivFL(by_data=True), ClientTable(sizes=np.ones(9)), seed=2)
    seen = []
    for _ in range(3):
        cohort = session.ask(RoundRequest(size=3))
        seen += cohort.clients.tolist()
        metrics = {Signal.UPDATE_SKETCH: np.ones((3, SKETCH_WIDTH))}
        status = [Status.FAILED, Status.OK, Status.OK]
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
    assert sorted(seen) == list(range(9))
    cohort = session.ask(RoundRequest(size=8))  # six are known; two that failed are taken to fill up
    assert cohort.size == 8


def test_stochastic_greedy_takes_the_best_it_considers():
    """With a sample of all it is the plain greedy; with a sample of 1 it is a random cohort."""
    place = np.random.default_rng(4).integers(0, 12, (15, 3)).astype(float)
    apart = np.abs(place[:, None] - place).sum(axis=2)
    rng = np.random.default_rng(0)
    assert _stochastic_greedy(apart, 6, 15, rng)[0].tolist() == plain_greedy(apart, 6)
    picked = np.array([_stochastic_greedy(apart, 3, 1, rng)[0] for _ in range(600)])
    assert np.bincount(picked.ravel(), minlength=15) == pytest.approx(np.full(15, 120), rel=0.4)
    some = [total(apart, _stochastic_greedy(apart, 3, 5, rng)[0]) for _ in range(50)]
    assert total(apart, plain_greedy(apart, 3)) <= np.mean(some) < np.mean([total(apart, p) for p in picked])


@pytest.mark.parametrize("seed", range(8))
def test_a_shadow_sees_clients_it_never_asked_for(seed):
    shadows = {"diverse": DivFL(by_data=True)}
    session = Session(
        Uniform(), ClientTable(sizes=np.ones(6)), shadows=shadows, seed=seed, signals={Signal.UPDATE_SKETCH}
    )
    for _ in range(4):
        cohort = session.ask(RoundRequest(4))
        sketches = np.eye(6, 64)[cohort.clients]
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.UPDATE_SKETCH: sketches}))
    assert list(session.shadows) == ["diverse"]  # it was not dropped for picking a client twice

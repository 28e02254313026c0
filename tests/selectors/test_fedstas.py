"""FedSTaS: Neyman's allocation against a search over all allocations, strata by hand, and an unbiased average."""

import itertools

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Slate
from fedcohort.core.signals import SKETCH_WIDTH
from fedcohort.selectors.baselines.fedstas import FedStas, allocation, spreads
from fedcohort.selectors.numerics.recent import RecentVectors


def every_allocation(sizes, m):
    for places in itertools.product(*(range(1, n + 1) for n in sizes)):
        if sum(places) == m:
            yield np.array(places)


@pytest.mark.parametrize("seed", range(20))
def test_the_allocation_is_as_close_to_neymans_as_whole_numbers_allow(seed):
    """Variance of the stratified mean with replacement is sum of N_h^2 S_h^2 / m_h; nothing is much better."""
    rng = np.random.default_rng(seed)
    sizes, spread = rng.integers(2, 7, 4), rng.lognormal(0, 0.7, 4)
    m = int(rng.integers(4, sizes.sum() + 1))
    ours = allocation(sizes, spread, m)
    variance = lambda places: float((sizes**2 * spread**2 / places).sum())  # noqa: E731
    best = min(every_allocation(sizes, m), key=variance)
    assert ours.sum() == m
    assert (ours >= 1).all() and (ours <= sizes).all()
    assert np.abs(ours - best).sum() <= 2
    assert variance(ours) <= 1.25 * variance(best)


def test_the_allocation_by_hand():
    np.testing.assert_array_equal(allocation(np.array([6, 6]), np.array([2.0, 1.0]), 6), [4, 2])
    np.testing.assert_array_equal(allocation(np.array([6, 6]), np.array([0.0, 1.0]), 6), [1, 5])
    np.testing.assert_array_equal(allocation(np.array([6, 6]), np.zeros(2), 6), [3, 3])
    np.testing.assert_array_equal(allocation(np.array([2, 3]), np.ones(2), 9), [2, 3])


def test_spreads_by_hand():
    vectors = np.array([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0], [9.0, 9.0], [4.0, 1.0]])
    found = spreads(vectors, np.array([0, 0, 1, 1, 2]), 4)
    np.testing.assert_allclose(found, [2**0.5, 0.0, 2**0.5 / 2, 2**0.5 / 2])


def known(sketches):
    return RecentVectors(np.arange(len(sketches)), np.zeros(len(sketches), np.int64), sketches)


def kinds(n=20, seed=5):
    rng = np.random.default_rng(seed)
    sketches = np.zeros((n, SKETCH_WIDTH))
    for i in range(n):
        sketches[i, i % 4] = 9.0
        sketches[i] += rng.normal(size=SKETCH_WIDTH) * 0.2 * (1 + i % 4)
    return sketches


def test_strata_are_the_kinds_and_places_follow_neyman():
    sketches = kinds()
    slate = Slate(round=3, size=8, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 5)))
    cohort, _ = FedStas(strata=4).select(known(sketches), slate, None, np.random.default_rng(0))
    stratum = cohort.parts["stratum"].astype(int)
    assert len({(i % 4, s) for i, s in enumerate(stratum)}) == 4
    want = allocation(np.full(4, 5), spreads(sketches, np.arange(20) % 4, 4), 8)
    np.testing.assert_array_equal(np.bincount(cohort.clients % 4, minlength=4), want)
    for kind in range(4):
        own = np.flatnonzero(np.arange(20) % 4 == kind)
        norm = np.linalg.norm(sketches[own], axis=1)
        np.testing.assert_allclose(cohort.score[own], np.minimum(1.0, want[kind] * norm / norm.sum()), rtol=1e-6)
        drawn = cohort.clients % 4 == kind
        assert cohort.weights[drawn].sum() == pytest.approx(5.0)  # of the 5 clients, who have 5 samples each
        inverse = 1 / cohort.score[cohort.clients[drawn]]
        np.testing.assert_allclose(cohort.weights[drawn], inverse / inverse.sum() * 5)
    np.testing.assert_array_equal(cohort.work, np.full(8, 0.5))


@pytest.mark.parametrize("unheard", [0, 7, 20])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_the_average_is_unbiased_if_norms_are_equal(unheard, size):
    rng = np.random.default_rng(1)
    update = rng.lognormal(size=20)
    sketches = kinds() / np.linalg.norm(kinds(), axis=1, keepdims=True)
    slate = Slate(round=3, size=size, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 5)))
    state, sums = known(sketches[: 20 - unheard]), []
    for _ in range(1000):
        cohort, _ = FedStas(strata=4).select(state, slate, None, rng)
        assert len(cohort.clients) == len(set(cohort.clients.tolist())) == size
        assert cohort.weights.sum() == pytest.approx(20.0)
        sums.append((cohort.weights * update[cohort.clients]).sum())
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - update.sum()) < 4 * error


def test_the_stratified_average_varies_less_than_a_plain_one():
    """What stratified sampling is for: kinds of clients with different updates."""
    rng = np.random.default_rng(2)
    update = np.array([1.0, 10.0, -5.0, 3.0])[np.arange(20) % 4] + 0.1 * rng.normal(size=20)
    slate = Slate(round=3, size=6, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 5)))
    state, ours, plain = known(kinds()), [], []
    for _ in range(300):
        cohort, _ = FedStas(strata=4).select(state, slate, None, rng)
        ours.append((cohort.weights * update[cohort.clients]).sum() / 20)
        plain.append(update[rng.choice(20, 6, replace=False)].mean())
    assert np.std(ours) < 0.1 * np.std(plain)

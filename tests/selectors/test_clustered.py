"""Clustered sampling against the paper's algorithms, step by step, and its two conditions."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate
from fedcohort.core.signals import SKETCH_WIDTH, Signal
from fedcohort.selectors.baselines.clustered import Clustered, _by_similarity, _by_size
from fedcohort.selectors.numerics.groups import angles, ward_groups
from fedcohort.selectors.numerics.recent import RecentVectors
from fedcohort.session import Session


def largest_first(sizes):
    return np.argsort(-np.asarray(sizes), kind="stable")


def matrix(allocation, m, n, capacity):
    """r_ki (m, n)."""
    r = np.zeros((m, n))
    np.add.at(r, (allocation.place, allocation.client), allocation.amount / capacity)
    return r


def paper_algorithm_1(sizes, m):
    """Pour m n_i samples of each client, largest first, into distributions of M samples, one after the other."""
    total = sum(sizes)
    r = np.zeros((m, len(sizes)))
    k, room = 0, total
    for i in largest_first(sizes):
        left = m * sizes[i]
        while left > 0 and k < m:
            part = min(left, room)
            r[k, i] += part / total
            left, room = left - part, room - part
            if room == 0:
                k, room = k + 1, total
    return r


@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_algorithm_1_is_the_papers(m):
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(0, 50, 9).astype(float)
        sizes[0] += 1
        got = matrix(_by_size(sizes, m, largest_first(sizes)), m, 9, sizes.sum())
        assert got == pytest.approx(paper_algorithm_1(sizes, m))


def test_algorithm_1_by_hand():
    """M = 10; clients bring 10, 6, 4 samples (m = 2): the first fills a distribution, the others share the second."""
    r = matrix(_by_size(np.array([5.0, 3.0, 2.0]), 2, np.arange(3)), 2, 3, 10)
    assert r == pytest.approx(np.array([[1, 0, 0], [0, 0.6, 0.4]]))


def test_algorithm_2_by_hand():
    """Two directions, six clients of 10, m = 2, M = 60: each direction is one distribution."""
    vectors = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1], [1, -0.1], [-0.1, 1]])
    sizes = np.full(6, 10.0)
    allocation, group = _by_similarity(sizes, 2, np.arange(6), np.arange(6), angles(vectors))
    assert group.tolist() == [0, 1, 0, 1, 0, 1]
    third = 1 / 3
    assert matrix(allocation, 2, 6, 60.0) == pytest.approx(
        np.array([[third, 0, third, 0, third, 0], [0, third, 0, third, 0, third]])
    )


def test_algorithm_2_fills_with_the_smaller_groups():
    """Groups bring 56, 40 and 24 of 2 x 60 samples; the last fits with no other: it goes where 4 and 20 are free."""
    vectors = np.array([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    sizes = np.array([14.0, 14.0, 20.0, 12.0])
    allocation, group = _by_similarity(sizes, 2, np.array([2, 0, 1, 3]), np.arange(4), angles(vectors))
    assert group.tolist() == [0, 0, 1, 2]
    assert matrix(allocation, 2, 4, 60.0) == pytest.approx(np.array([[28, 28, 0, 4], [0, 0, 40, 20]]) / 60)


def test_a_client_above_capacity_fills_whole_distributions():
    """n = 70, 10, 10, 10 and m = 3: 210 of 300 samples are two whole distributions and a tenth of the third."""
    sizes = np.array([70.0, 10, 10, 10])
    allocation, _ = _by_similarity(sizes, 3, np.arange(4), np.arange(4), angles(np.eye(4)))
    r = matrix(allocation, 3, 4, 100.0)
    assert sorted(r[:, 0].tolist()) == pytest.approx([0.1, 1.0, 1.0])


@pytest.mark.parametrize("heard", [0, 1, 5, 20])
def test_both_conditions_hold_with_any_known_clients(heard):
    """Every r_k sums to 1, and the r_.i to m p_i (Proposition 1): also with empty, giant and unknown clients."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(0, 20, 20).astype(float) ** rng.integers(1, 4)
        sizes[3] += 1
        m = int(rng.integers(1, 21))
        known = np.sort(rng.choice(20, heard, replace=False))
        angle = angles(rng.normal(size=(heard, 4)))
        allocation, group = _by_similarity(sizes, m, largest_first(sizes), known, angle)
        r = matrix(allocation, m, 20, sizes.sum())
        assert r.sum(axis=1) == pytest.approx(np.ones(m), abs=1e-6)
        assert r.sum(axis=0) == pytest.approx(m * sizes / sizes.sum(), abs=1e-6)
        assert len(group) == heard


@pytest.mark.parametrize("by", ["size", "similarity"])
@pytest.mark.parametrize("average", ["mean", "fedavg"])
def test_the_average_is_unbiased_and_varies_less_than_drawing_by_size(by, average):
    """A client's weight in the aggregator's average is p_i in expectation; its variance is no larger than by size."""
    sizes = np.array([5.0, 5, 5, 10, 10, 20, 20, 25])
    n, m, draws = len(sizes), 4, 1500
    p = sizes / sizes.sum()
    vectors = np.eye(4)[np.arange(8) % 4]
    state = RecentVectors(np.arange(8), np.zeros(8, np.int64), vectors)
    slate = Slate(round=5, size=m, candidates=np.arange(n), clients=ClientTable(sizes=sizes))
    rng = np.random.default_rng(1)
    weight = np.zeros((draws, n))
    for row in weight:
        cohort, _ = Clustered(by=by, average=average).select(state, slate, None, rng)
        raw = cohort.weights * (sizes[cohort.clients] if average == "fedavg" else 1.0)
        row[cohort.clients] = raw / raw.sum()
    assert weight.mean(axis=0) == pytest.approx(p, abs=0.012)
    by_size_alone = p * (1 - p) / m
    assert (weight.var(axis=0) <= by_size_alone * 1.15).all()
    assert weight.var(axis=0).sum() < 0.9 * by_size_alone.sum()


def test_every_cohort_has_one_client_of_each_kind():
    """Six clients of each of two kinds: once all have reported, every cohort of two has one of each kind."""
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(2, SKETCH_WIDTH))
    session = Session(Clustered(by="similarity"), ClientTable(sizes=np.full(12, 9)), seed=3)

    def play(size):
        cohort = session.ask(RoundRequest(size=size))
        noise = 0.1 * rng.normal(size=(cohort.size, SKETCH_WIDTH))
        metrics = {Signal.UPDATE_SKETCH: kinds[cohort.clients % 2] + noise}
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        return cohort

    for _ in range(30):
        play(12)
    assert len(session.state.known) == 12
    for _ in range(20):
        cohort = play(2)
        assert sorted(cohort.clients % 2) == [0, 1]
        assert cohort.notes["groups"] == 2


def test_clients_without_data_and_one_client():
    slate = Slate(round=0, size=3, candidates=np.arange(3), clients=ClientTable(sizes=[0, 0, 0]))
    for by in ("size", "similarity"):
        selector = Clustered(by=by)
        state = selector.init(slate.clients, np.random.default_rng(0))
        cohort, _ = selector.select(state, slate, None, np.random.default_rng(0))
        assert cohort.clients.tolist() == [0, 1, 2]
        alone = Slate(round=0, size=1, candidates=np.arange(1), clients=ClientTable(sizes=[4]))
        assert selector.select(state, alone, None, np.random.default_rng(0))[0].clients.tolist() == [0]


def test_angles_of_zero_and_huge_vectors():
    angle = angles(np.array([[0.0, 0.0], [0.0, 0.0], [1e100, 0.0], [-1e-100, 0.0]]))
    assert angle / np.pi == pytest.approx(
        np.array([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 1], [0.5, 0.5, 1, 0]])
    )


def test_groups_are_those_of_scipy():
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    angle = angles(np.random.default_rng(5).normal(size=(30, 3)))
    theirs = fcluster(linkage(squareform(angle), "ward"), 6, "maxclust")
    ours = ward_groups(angle, 6)
    assert len(set(zip(ours, theirs, strict=True))) == 6


def test_memory_replaces_in_place_and_drops_the_oldest():
    book = RecentVectors.empty()
    book = book.with_reports(np.array([4, 1]), np.array([[4.0], [1.0]]), 0, 3)
    book = book.with_reports(np.array([9, 1]), np.array([[9.0], [1.5]]), 1, 3)
    assert book.rows_of(np.array([0, 1, 4, 9])).tolist() == [-1, 0, 1, 2]
    book = book.with_reports(np.array([7, 8]), np.array([[7.0], [8.0]]), 2, 3)
    assert sorted(zip(book.known.tolist(), book.vectors[:, 0].tolist(), strict=True)) in (
        [(1, 1.5), (7, 7.0), (8, 8.0)],
        [(7, 7.0), (8, 8.0), (9, 9.0)],
    )
    assert 4 not in book.known
    other = book.with_reports(np.array([2]), np.array([[1.0, 2.0]]), 3, 3)  # vectors of another length: another model
    assert other.known.tolist() == [2]

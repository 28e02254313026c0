"""HiCS-FL against Algorithm 1 and Eqs. 6 to 10, computed by hand and by drawing as the paper does."""

import math

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.plots import SelectorRun
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.hics_fl import HicsFL, _hics_distance, _label_entropy, _sampling_chances
from fedcohort.selectors.numerics.recent import AskedVectors
from fedcohort.session import Session


def test_entropy_by_hand():
    """softmax(ln 1, ln 3) = 1/4, 3/4; at temperature 2 it is 1, sqrt 3 over their sum."""
    update = np.array([[0.0, math.log(3)]])
    assert _label_entropy(update, 1.0) == pytest.approx([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75))])
    p = 1 / (1 + math.sqrt(3))
    assert _label_entropy(update, 2.0) == pytest.approx([-(p * math.log(p) + (1 - p) * math.log(1 - p))])


def test_entropies_of_the_extremes_are_finite():
    updates = np.array([[0.0, 0, 0], [1e100, -1e100, 0], [5, 5, 5]])
    for temperature in (1e-300, 0.0025, 1.0, 1e300):
        entropy = _label_entropy(updates, temperature)
        assert np.isfinite(entropy).all()
        assert (entropy >= -1e-12).all()
        assert (entropy <= math.log(3) + 1e-12).all()


def test_entropy_orders_clients_by_how_balanced_they_are():
    """Eq. 6: the expected update is eta R (D_i sum E - E_i), here at temperatures that fit its scale."""
    rng = np.random.default_rng(0)
    labels = np.array([rng.dirichlet(np.full(10, a)) for a in (0.001, 0.01, 0.1, 0.5, 5, 500)])
    truth = -(labels * np.log(np.maximum(labels, 1e-300))).sum(axis=1)
    for scale in (1e-4, 0.1, 10):
        updates = scale * (labels - 0.1)
        estimate = _label_entropy(updates, 0.1 * scale)
        assert np.corrcoef(np.argsort(np.argsort(truth)), np.argsort(np.argsort(estimate)))[0, 1] > 0.9


def test_distance_by_hand():
    """A right angle, and entropies that differ by 0.2, weighted with 10."""
    distance = _hics_distance(np.array([[1.0, 0], [0, 1]]), np.array([0.3, 0.5]), 10.0)
    assert distance == pytest.approx(np.array([[0, math.pi / 2 + 2], [math.pi / 2 + 2, 0]]))


def test_chances_by_hand():
    """Clusters of mean entropy 2 and 1, gamma 1: e / (e + 1) and 1 / (e + 1), then by size."""
    chance = _sampling_chances(np.array([3, 3, 8]), np.array([2.5, 1.5, 1.0]), np.array([30.0, 10, 7]), 1.0)
    high = math.e / (math.e + 1)
    assert chance == pytest.approx([0.75 * high, 0.25 * high, 1 - high])
    assert _sampling_chances(np.zeros(2, int), np.zeros(2), np.zeros(2), 4.0) == pytest.approx([0.5, 0.5])


def test_one_pass_has_the_distribution_of_drawing_clusters_until_the_cohort_is_full():
    """Steps 8 to 12 of Algorithm 1, against one weighted sample: how often each client is in a cohort of 2."""
    from fedcohort.selectors.numerics.sampling import weighted_sample

    cluster, sizes = np.array([0, 0, 1, 2]), np.array([1.0, 3, 2, 5])
    entropy = np.array([1.0, 1.2, 0.4, 0.1])
    chance = _sampling_chances(cluster, entropy, sizes, 2.0)
    mean = np.array([1.1, 0.4, 0.1])
    pi = np.exp(2 * mean) / np.exp(2 * mean).sum()
    rng = np.random.default_rng(0)
    theirs, ours = np.zeros(4), np.zeros(4)
    draws = 4000
    for _ in range(draws):
        cohort = set()
        while len(cohort) < 2:
            members = np.flatnonzero(cluster == rng.choice(3, p=pi))
            cohort.add(int(rng.choice(members, p=sizes[members] / sizes[members].sum())))
        theirs[list(cohort)] += 1
        ours[weighted_sample(chance, 2, rng)] += 1
    assert ours / draws == pytest.approx(theirs / draws, abs=0.04)


def test_every_client_comes_once_before_any_comes_twice():
    session = Session(HicsFL(), ClientTable(sizes=np.full(10, 5)), seed=1)
    seen = []
    for t in range(4):
        cohort = session.ask(RoundRequest(size=3))
        seen += cohort.clients.tolist()
        metrics = {Signal.OUTPUT_BIAS_UPDATE: np.eye(10, 4)[cohort.clients]}
        status = [Status.FAILED if t == 0 else Status.OK] + [Status.OK] * 2
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
    assert sorted(seen[:10]) == list(range(10))
    assert cohort.size == 3  # one was new; two came of the clusters
    assert len(set(cohort.clients.tolist())) == 3


def balanced_first(n=20, balanced=4):
    updates = 0.1 * (np.eye(5)[np.arange(n) % 5] - 0.2)
    updates[:balanced] = 0.0005 * np.eye(5)[np.arange(balanced)]
    return AskedVectors(np.arange(n), np.zeros(n, np.int64), updates, np.ones(n, np.bool_))


@pytest.mark.parametrize(("round_", "least", "most"), [(0, 0.65, 1.0), (199, 0.05, 0.5)])
def test_the_preference_for_balanced_clients_is_annealed(round_, least, most):
    """With 4 of 20 clients balanced: nearly all picks at first, one cluster among equals at the end."""
    slate = Slate(round=round_, size=3, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 9)))
    rng = np.random.default_rng(0)
    picks = np.concatenate(
        [HicsFL(clusters=6, temperature=0.01).select(balanced_first(), slate, None, rng)[0].clients for _ in range(150)]
    )
    assert least <= (picks < 4).mean() <= most


def test_entropies_are_at_the_papers_temperature():
    """Eqs. 7, 9 and 10 at T = 0.0025."""
    state = balanced_first()
    slate = Slate(round=0, size=3, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 9)))
    cohort, _ = HicsFL().select(state, slate, None, np.random.default_rng(0))
    assert cohort.notes["temperature"] == 0.0025
    shares = np.exp(state.vectors / 0.0025)
    shares /= shares.sum(axis=1, keepdims=True)
    assert cohort.parts["entropy"] == pytest.approx(-(shares * np.log(shares)).sum(axis=1), abs=1e-12)
    with pytest.raises(ParameterError, match="'temperature'"):
        HicsFL(temperature=0.0)


def test_unknown_clients_have_the_mean_entropy():
    state = balanced_first()
    known = np.arange(2, 20)
    state = AskedVectors(known, np.zeros(18, np.int64), state.vectors[known], state.asked)
    slate = Slate(round=0, size=5, candidates=np.arange(20), clients=ClientTable(sizes=np.full(20, 9)))
    cohort, _ = HicsFL().select(state, slate, None, np.random.default_rng(0))
    assert cohort.parts["cluster"][:2].tolist() == [-1, -1]
    assert cohort.score[0] == cohort.score[1] > 0
    assert cohort.score.sum() == pytest.approx(1.0)


def test_the_picture_says_what_was_estimated():
    state = balanced_first()
    fields = {"known": state.known, "vectors": state.vectors, "asked": state.asked}
    record = SelectorRun("hics", 0, 5, fields, [(4, {"temperature": 0.01})])
    assert HicsFL.pictures[0].view(SelectorRun("hics", 0, 5, fields)) is None  # nothing was estimated yet
    view = HicsFL.pictures[0].view(record)
    assert view.middle[0] > view.middle[10]
    assert "1.61" in view.text  # ln 5
    assert (
        HicsFL.pictures[0].view(SelectorRun("hics", 0, 0, {"known": np.empty(0, int), "vectors": np.empty((0, 0))}))
        is None
    )

"""Fed-CBS through a session."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import ParameterError, SignalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.selectors.ours.fedcbs_chance import FedCBSChance
from fedcohort.selectors.papers.fedcbs import FedCBS


def dirichlet_labels(seed=0, clients=200, concentration=0.1):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(50, 400, clients)
    shares = rng.dirichlet(np.full(10, concentration), clients)
    return np.stack([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)]).astype(float)


def tables(counts):
    rotation = np.linalg.qr(np.random.default_rng(9).normal(size=(counts.shape[1],) * 2))[0]
    sizes = counts.sum(axis=1)
    return {
        "counts": ClientTable(labels=LabelCounts(counts)),
        "factor": ClientTable(labels=LabelFactor(counts @ rotation, counts.shape[1]), sizes=sizes),
        "gram": ClientTable(labels=LabelGram(counts @ counts.T, counts.shape[1]), sizes=sizes),
    }


def play(selector, table, rounds=30, *, size=10, available=60, seed=1):
    """Run rounds with some of the clients available, and return the cohorts."""
    session = Session(selector, table, seed=seed)
    rng = np.random.default_rng(seed)
    cohorts = []
    for _ in range(rounds):
        who = np.sort(rng.choice(table.n, available, replace=False))
        cohort = session.ask(RoundRequest(size=size, available=who))
        assert set(cohort.clients.tolist()) <= set(who.tolist())
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        cohorts.append(cohort)
    return cohorts, session


def test_three_forms_of_labels_give_the_same_choice():
    found = {name: play(FedCBS(), table, 12)[0] for name, table in tables(dirichlet_labels()).items()}
    for name in ("factor", "gram"):
        for ours, theirs in zip(found["counts"], found[name], strict=True):
            assert ours.clients.tolist() == theirs.clients.tolist()
            assert np.allclose(ours.score, theirs.score, rtol=1e-6, atol=1e-6)


def test_cohorts_are_far_more_balanced_than_uniform_ones():
    """On Dirichlet labels, 60 of 200 available and 10 picked; a coarse floor on QCID^beta would be near uniform."""
    counts = dirichlet_labels(3)
    table = ClientTable(labels=LabelCounts(counts))
    mean = {
        name: np.mean([qcid(LabelCounts(counts), cohort.clients) for cohort in play(selector, table)[0]])
        for name, selector in {
            "uniform": create("uniform"),
            "paper": FedCBS(),
            "swaps": FedCBSChance(swaps=20),
        }.items()
    }
    assert mean["paper"] < mean["uniform"] / 5
    assert mean["swaps"] < mean["paper"] / 1.5


def test_notes_hold_the_qcid_of_the_cohort():
    counts = dirichlet_labels(4)
    for cohort in play(FedCBS(), ClientTable(labels=LabelCounts(counts)), 5)[0]:
        assert cohort.notes["qcid"] == pytest.approx(qcid(LabelCounts(counts), cohort.clients), abs=1e-15)


def test_parts_add_up_to_the_logarithm_of_the_probability():
    for cohort in play(FedCBS(), ClientTable(labels=LabelCounts(dirichlet_labels(5))), 5)[0]:
        others = ~np.isin(cohort.candidates, cohort.clients)
        total = cohort.parts["balance"] + cohort.parts["exploration"]
        assert np.allclose(total[others], cohort.score[others])
        assert (cohort.score <= 1e-9).all()
        before_last = np.exp(cohort.score[others]).sum()  # the last draw chose among these and the one drawn
        last = np.searchsorted(cohort.candidates, cohort.clients[-1])
        assert before_last + math.exp(cohort.score[last]) == pytest.approx(1.0)


def test_first_pick_explores_by_round_and_pulls():
    """P(c_1) by hand in the third round: k = 3, T_n = 1 plus the rounds in which a client was selected."""
    counts = np.array([[8.0, 2.0], [3.0, 7.0], [9.0, 1.0]])
    session = Session(FedCBS(exploration=0.7), ClientTable(labels=LabelCounts(counts)), seed=4)
    pulls = np.ones(3)
    for _ in range(2):
        cohort = session.ask(RoundRequest(size=1))
        session.tell(RoundReport(cohort.ticket, []))  # selected, though nothing came back
        pulls[cohort.clients] += 1
    assert session.state.pulls.tolist() == pulls.tolist()
    cohort = session.ask(RoundRequest(size=1))
    shares = counts / counts.sum(axis=1, keepdims=True)
    weights = 1 / ((shares - 0.5) ** 2).sum(axis=1) + 0.7 * np.sqrt(3 * math.log(3) / (2 * pulls))
    assert np.allclose(np.exp(cohort.score), weights / weights.sum())


@pytest.mark.parametrize("name", ["fedcbs", "fedcbs-chance", "fedcbs-blind"])
def test_selections_count_when_the_cohort_is_made(name):
    """T_n already counts a cohort that has not reported yet."""
    counts = np.full((4, 2), 5.0)
    session = Session(create(name), ClientTable(labels=LabelCounts(counts)), seed=4)
    cohort = session.ask(RoundRequest(size=2))
    wanted = np.ones(4)
    wanted[cohort.clients] += 1
    assert session.state.pulls.tolist() == wanted.tolist()
    session.tell(RoundReport(cohort.ticket, []))
    assert session.state.pulls.tolist() == wanted.tolist()


@pytest.mark.parametrize("swaps", [0, 10])
def test_nearly_balanced_clients_do_not_starve(swaps):
    """200 clients balanced up to chance, 12 of them exactly; only these train with a floor of 1e-20."""
    rng = np.random.default_rng(2)
    counts = rng.multinomial(100, np.full(10, 0.1), 200).astype(float)
    counts[:12] = 10.0
    table = ClientTable(labels=LabelCounts(counts))
    distinct = {}
    for floor in (1e-20, "chance"):
        cohorts, _ = play(FedCBSChance(floor=floor, swaps=swaps), table, 100, available=200)
        distinct[floor] = len({int(c) for cohort in cohorts for c in cohort.clients})
    assert distinct[1e-20] <= 30
    assert distinct["chance"] >= 150  # uniform cohorts reach 199


def test_exploration_reaches_every_client():
    counts = dirichlet_labels(6, clients=40)
    cohorts, session = play(FedCBS(), ClientTable(labels=LabelCounts(counts)), 150, size=4, available=12)
    assert set(range(40)) == {int(c) for cohort in cohorts for c in cohort.clients}
    assert session.state.pulls.sum() == 40 + 150 * 4


def test_figure_3_finds_its_optimum():
    """{C1, C3, C4} is balanced; the paper's own draw finds it in 7 rounds of 100, with swaps in nearly all."""
    labels = LabelCounts([[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])
    found = {0: 0, 10: 0}
    for swaps in found:
        for seed in range(200):
            session = Session(FedCBSChance(swaps=swaps, floor=1e-20), ClientTable(labels=labels), seed=seed)
            found[swaps] += sorted(session.ask(RoundRequest(size=3)).clients.tolist()) == [0, 2, 3]
    assert 4 <= found[0] <= 28  # 0.074 of 200
    assert found[10] > 180
    assert FedCBSChance().swaps == 0


def test_sizes_are_needed_only_if_the_labels_do_not_contain_them():
    counts = dirichlet_labels(7, clients=6)
    assert Session(FedCBS(), ClientTable(labels=LabelCounts(counts))).ask(RoundRequest(size=2)).size == 2
    with pytest.raises(SignalError, match="sizes"):
        Session(FedCBS(), ClientTable(labels=LabelGram(counts @ counts.T, 10)))
    with pytest.raises(SignalError, match="label-products"):
        Session(FedCBS(), ClientTable(sizes=[1, 2, 3]))


@pytest.mark.parametrize("name", ["counts", "factor", "gram"])
@pytest.mark.parametrize("swaps", [0, 5])
def test_edges(name, swaps):
    counts = dirichlet_labels(8, clients=6)
    counts[2] = 0.0
    table = tables(counts)[name]
    assert sorted(Session(FedCBSChance(swaps=swaps), table).ask(RoundRequest(size=6)).clients.tolist()) == list(
        range(6)
    )
    assert Session(FedCBSChance(swaps=swaps), table).ask(RoundRequest(size=3, available=[2])).clients.tolist() == [2]
    assert Session(FedCBSChance(swaps=swaps), table).ask(RoundRequest(size=1)).size == 1


@pytest.mark.parametrize("counts", [np.full((5, 3), 4.0), np.zeros((5, 3)), np.ones((5, 1))])
def test_equal_clients_are_drawn_evenly(counts):
    table = ClientTable(labels=LabelCounts(counts))
    picked = np.zeros(5)
    for seed in range(300):
        picked[Session(FedCBS(), table, seed=seed).ask(RoundRequest(size=2)).clients] += 1
    assert picked.min() > 80  # 120 each on average, standard deviation below 9


def test_clients_without_samples_are_hardly_drawn():
    """The formula would draw them because they leave a balanced cohort unchanged; here they count as one class only."""
    counts = np.vstack([np.full((6, 4), 10.0) + np.eye(6, 4) * 3, np.zeros((6, 4))])
    table = ClientTable(labels=LabelCounts(counts))
    for seed in range(20):
        cohort = Session(FedCBS(), table, seed=seed).ask(RoundRequest(size=5))
        assert (cohort.clients < 6).all()


def test_large_exponents_stay_finite():
    table = ClientTable(labels=LabelCounts(dirichlet_labels(9)))
    for cohort in play(FedCBS(beta=50.0), table, 3, size=60, available=150)[0]:
        assert len(set(cohort.clients.tolist())) == 60
        assert not np.isnan(cohort.score).any()


def test_bad_parameters():
    for bad in ({"exploration": -1.0}, {"beta": 0.0}, {"floor": 0.0}, {"floor": "chance"}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            FedCBS(**bad)
    for bad in ({"floor": "low"}, {"swaps": -1}, {"swaps": 0.5}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            FedCBSChance(**bad)

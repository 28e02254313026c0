"""Bounded influence of one client: quantiles by brute force, liars' shares, journal, simulator."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort import ClientTable, LabelCounts, Losses, LossMeasure, LossOf, Session, Signal, create, register
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import InputError, ParameterError, SignalError
from fedcohort.core.protocol import Answer, Cohort, RoundReport, RoundRequest
from fedcohort.selectors import Bounded, PowerOfChoice
from fedcohort.selectors.numerics.accounts import exponents
from fedcohort.selectors.ours.bounded import SERVER_LOSS, tail_quantiles
from fedcohort.testing.host import ScriptedHost

ROOT = Path(__file__).parents[2]


def bench():
    spec = importlib.util.spec_from_file_location("lying_client", ROOT / "bench" / "scripts" / "lying_client.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lying_client"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_quantiles_are_reported_values():
    rng = np.random.default_rng(0)
    for n in range(1, 40):
        values = rng.normal(size=n)
        low, high = tail_quantiles(values, 0.2)
        assert low in values and high in values
        assert (values < low).sum() <= 0.2 * n and (values > high).sum() <= 0.2 * n
        if n >= 5:
            assert (values < low).sum() == (values > high).sum() == int(0.2 * n + 1e-9)


@pytest.mark.parametrize(
    ("selector", "lie", "most"),
    [
        ("power-of-choice", "size and loss 1e6 times", 4.0),
        ("size-weighted", "size 1e6 times", 2.5),
        ("active-fl", "loss 1e6 times", 4.0),
    ],
)
def test_a_lie_takes_far_fewer_places(selector, lie, most):
    liars = bench()
    taken = liars.share(lambda: create(selector), liars.LIES[lie], 40, 1)
    bounded = liars.share(lambda: create("bounded", of=selector), liars.LIES[lie], 40, 1)
    assert taken > 5.5 and bounded < most


@pytest.mark.parametrize("selector", ["fed-cucb", "fedcbs-blind", "hics-fl"])
@pytest.mark.parametrize("lie", ["flat updates", "updates 0"])
def test_a_direction_that_flatters_takes_few_places(selector, lie):
    liars = bench()
    taken = liars.share(lambda: create(selector), liars.LIES[lie], 50, 0)
    bounded = liars.share(lambda: create("bounded", of=selector), liars.LIES[lie], 50, 0)
    assert taken > 7 and bounded <= 2.8  # twice the five rounds that are fair, and four more


def shards(clients=100, classes=10):
    """Two classes each."""
    rng = np.random.default_rng(0)
    counts = np.zeros((clients, classes))
    for row in counts:
        row[rng.choice(classes, 2, replace=False)] = 50
    return counts


CLAIMS = {
    "a class nobody else has": lambda row: [*np.zeros(len(row)), row.sum()],
    "that class, 100 times": lambda row: [*np.zeros(len(row)), 100 * row.sum()],
    "all classes, 100 times": lambda row: [*np.full(len(row), 100 * row.mean()), 0],
    "all classes": lambda row: [*np.full(len(row), row.mean()), 0],
}


def rounds_of_the_first(selector, claim, rounds=80):
    counts = np.pad(shards(), [(0, 0), (0, 1)])
    counts[0] = CLAIMS[claim](counts[0, :-1])
    session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=0)
    taken = 0
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(10))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        taken += 0 in cohort.clients
    return taken


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("selector", ["balanced", "fedcbs"])
def test_a_claim_about_labels_brings_at_most_twice_the_even_share_and_a_few_rounds(selector, claim):
    assert rounds_of_the_first(create("bounded", of=selector), claim) <= 2 * 8 + excess(100, 2.0)


class Greedy(type(create("uniform"))):
    """Chooses the same clients whenever it can, the worst case of a manipulated selector."""

    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates[: slate.size], candidates=slate.candidates), state


def greedy(share, size=None):
    """Around a selector that takes the same clients whenever it can, only ``size`` of them if it is given."""
    selector = Bounded(of="uniform", share=share)
    vars(selector)["inner"] = Greedy() if size is None else Lazy()
    return selector


class Lazy(Greedy):
    """Takes one of its candidates, however many are asked for."""

    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates[:1], candidates=slate.candidates), state


def debt(n, share):
    return math.log(2 * n) / exponents(share)[0]


def excess(n, share):
    return math.log(2 * n) / exponents(share)[1]


@given(seed=st.integers(0, 10**6), share=st.sampled_from([1.25, 2.0, 4.0]), lazy=st.booleans())
@settings(max_examples=40, deadline=None)
def test_nobody_is_asked_beyond_its_share_whoever_is_there(seed, share, lazy):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    session = Session(greedy(share, 1 if lazy else None), ClientTable(n=n))
    even, asked = np.zeros(n), np.zeros(n)
    for _ in range(80):
        there = np.flatnonzero(rng.random(n) < rng.random())
        if not len(there):
            continue
        size = int(rng.integers(1, len(there) + 1))
        cohort = session.ask(RoundRequest(size, there))
        assert set(cohort.clients.tolist()) <= set(there.tolist())
        assert cohort.size == (1 if lazy else size)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        even[there] += cohort.size / len(there)
        asked[cohort.clients] += 1
        assert (asked <= share * even + excess(n, share) + 1e-6).all()
        assert (asked >= even / share - debt(n, share) - 1e-6).all()


def test_one_by_one_a_fast_client_waits_for_the_others():
    """Client 0 answers at once; the others never do, so that it is the only one that is free."""
    session = Session(create("bounded", of="uniform"), ClientTable(n=10), asynchronous=True, seed=1)
    tickets = {}
    for _ in range(10):
        cohort = session.ask(1)
        tickets[int(cohort.clients[0])] = cohort
    asked = 1
    while asked < 30:
        session.tell(RoundReport(tickets[0].ticket, [0]))
        tickets[0] = session.ask(1)
        if not tickets[0].size:
            break
        asked += 1
    assert 1 < asked < 10 and tickets[0].notes["reason"]
    session.tell(RoundReport(tickets[5].ticket, [5]))
    assert session.ask(1).clients.tolist() == [5]
    with pytest.raises(InputError, match="one client at a time"):
        Session(create("bounded", of="fedcm-ts"), ClientTable(n=10), asynchronous=True)


def test_clients_that_had_their_share_are_named():
    session = Session(greedy(2.0), ClientTable(n=10))
    notes = {}
    for _ in range(9):
        cohort = session.ask(RoundRequest(1))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        notes[int(cohort.clients[0])] = cohort.notes.get("had its share", "").split(", ")
    assert len(notes) > 1 and "0" in notes[max(notes)]


def test_a_liar_counts_as_the_largest_honest_client_does():
    table = ClientTable(sizes=[1.0] * 20)
    said = np.linspace(1.0, 2.0, 20)
    said[7] = 1e12
    picks = []
    for seed in range(200):
        session = Session(create("bounded", of="power-of-choice", params={"d": 20}), table, seed=seed)
        request = RoundRequest(1)
        query = session.query(request)
        cohort = session.ask(request, Answer(query, {Signal.LOSS: said[query.clients]}))
        assert cohort.notes["doubted"] == "7" and cohort.parts["doubted"].sum() == 1
        picks.append(int(cohort.clients[0]))
    best = {7, 16, 17, 18, 19}  # a fifth of the clients, which count alike
    assert set(picks) == best and 0.1 < picks.count(7) / 200 < 0.32


def test_vectors_keep_their_direction_but_not_their_length():
    outcomes = []

    class Spy(type(create("uniform"))):
        requires = frozenset({Signal.UPDATE_SKETCH, Signal.LOSS})

        def update(self, state, outcome):
            outcomes.append((outcome[Signal.UPDATE_SKETCH], outcome[Signal.LOSS]))
            return state

    selector = Bounded(of="uniform")
    vars(selector)["inner"] = Spy()
    session = Session(selector, ClientTable(n=12))
    cohort = session.ask(RoundRequest(12))
    rows = np.random.default_rng(0).normal(size=(12, 64))
    rows[0] *= 1e9
    loss = np.ones(12)
    loss[1] = np.nan
    session.tell(RoundReport(0, cohort.clients, metrics={Signal.UPDATE_SKETCH: rows, Signal.LOSS: loss}))
    shown, losses = outcomes[0]
    lengths = np.linalg.norm(shown[2:], axis=1)
    assert np.linalg.norm(shown[0]) == pytest.approx(lengths.max())
    assert np.allclose(shown[0] / np.linalg.norm(shown[0]), rows[0] / np.linalg.norm(rows[0]))
    assert np.isnan(losses[1]) and np.isnan(shown[1]).all()  # an invalid client stays one


@pytest.mark.parametrize("selector", ["divfl", "fedcbs-blind", "hics-fl", "fed-cucb"])
def test_a_round_without_any_update_is_accepted(selector):
    liars = bench()
    make = functools.partial(create, "bounded", of=selector)
    assert any(signal.width is not None for signal in make().requires)
    assert liars.share(make, liars.LIES["updates 0"], 3, 0, liars=liars.CLIENTS) == 1.0


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_labels_are_scaled_with_sizes(form):
    counts = np.full((10, 3), 10.0)
    counts[4] = [2e7, 1e7, 0]
    labels = {"counts": LabelCounts(counts), "factor": LabelFactor(counts, 3), "gram": LabelGram(counts @ counts.T, 3)}[
        form
    ]
    table, odd = Bounded(of="fedcbs").bounded_facts(ClientTable(sizes=counts.sum(axis=1), labels=labels))
    assert odd.tolist() == [i == 4 for i in range(10)]
    assert table.sizes.tolist() == [30.0] * 10
    expected = np.array(counts)
    expected[4] = [20.0, 10.0, 0.0]
    found = {"counts": "counts", "factor": "factor", "gram": "gram"}[form]
    wanted = expected @ expected.T if form == "gram" else expected
    assert np.allclose(getattr(table.labels, found), wanted)


def test_a_claim_of_perfect_balance_counts_as_the_most_balanced_fifth():
    rng = np.random.default_rng(0)
    counts = np.ceil(rng.dirichlet(np.full(5, 0.3), 20) * 100)
    counts[3] = 20.0
    counts[4] = 0.0  # nobody's labels
    table, _ = Bounded(of="fedcbs").bounded_facts(ClientTable(labels=LabelCounts(counts)))
    rows = [m[m.sum(axis=1) > 0] for m in (counts, table.labels.counts)]
    before, after = (np.square(m / m.sum(axis=1, keepdims=True) - 0.2).sum(axis=1) for m in rows)
    assert before.min() == 0.0 and after.min() == pytest.approx(np.sort(before)[int(0.2 * 19)])
    assert (after >= before - 1e-9).all() and (after > before + 1e-9).sum() <= 4


def test_losses_are_compared_with_the_servers_own():
    session = Session(create("bounded", of="active-fl", audit=2.0), ClientTable(sizes=[1.0] * 4))
    cohort = session.ask(RoundRequest(4))
    metrics = {Signal.LOSS: [0.1, 1.0, 1.5, 50.0], SERVER_LOSS: [1.0] * 4}
    session.tell(RoundReport(0, [0, 1, 2, 3], metrics=metrics))
    assert cohort.size == 4 and sorted(session.state.valuation.tolist()) == [0.5, 1.0, 1.5, 2.0]
    with pytest.raises(SignalError, match="'server-loss'"):
        Session(create("bounded", of="active-fl", audit=2.0), ClientTable(sizes=[1.0] * 4), signals={Signal.LOSS})


def test_it_is_recorded_and_continues_exactly(tmp_path):
    host = ScriptedHost(n=20)
    selector = create("bounded", of="oort", params={"window": 5}, tail=0.1)
    whole = host.play(host.session(selector, seed=3), 12)
    session = host.session(selector, seed=3, journal=tmp_path / "j.sqlite")
    first = host.play(session, 6)
    session.close()
    with Session.open(tmp_path / "j.sqlite") as again:
        assert again.selector == selector and again.selector.inner.window == 5
        assert first + host.play(again, 6) == whole
        raw = again.journal.replies(3)[0].metrics["loss-rms"]  # what was said, not what counted
        assert raw == pytest.approx(host.losses(3, np.sort(again.journal.cohorts()[3].clients)[:1])[0])
        again.join(ClientTable(sizes=[3.0, 4.0], labels=LabelCounts(np.ones((2, 4)))))
        assert len(again.state.bounded_words) == len(again.state.bounded_asked) == 22


def test_wrong_parameters_are_refused():
    with pytest.raises(ParameterError, match="must be another selector"):
        create("bounded", of="bounded")
    with pytest.raises(ParameterError, match="no parameter 'dd'"):
        create("bounded", of="power-of-choice", params={"dd": 3})
    for share in (1, 0.5, 0, "x"):
        with pytest.raises(ParameterError, match="share"):
            create("bounded", share=share)
    for tail in (0.0, 0.5, "x"):
        with pytest.raises(ParameterError, match="tail"):
            create("bounded", tail=tail)


def test_it_has_the_properties_of_the_wrapped_selector():
    around = create("bounded", of="fedcm-ts")
    inner = create("fedcm-ts")
    assert around.requires == inner.requires and around.default_filter == inner.default_filter
    told = frozenset({Signal.UPDATE_SKETCH, Signal.SIZES})
    assert create("bounded", of="balanced").adapt(told).inner.balance == "directions"


def test_the_simulator_runs_it_with_an_audit(tmp_path):
    pytest.importorskip("torch")
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.runner import Simulation

    table = {
        "name": "bounded", "seeds": [0], "data": {"name": "synthetic"}, "run": {"cohort": 3, "rounds": 3},
        "scenario": {"partition": {"name": "iid", "clients": 12}, "server_validation": 2},
        "selectors": {"safe": {"name": "bounded", "of": "oort", "params": {"window": 4}, "audit": 3.0}},
    }  # fmt: skip
    simulation = Simulation(Experiment.from_dict(table), tmp_path / "out", device="cpu")
    assert simulation.run() == "finished"
    with Session.open(tmp_path / "out" / "journal" / "safe-s0.sqlite") as session:
        assert np.isfinite(session.state.bounded_server) and session.selector.audit == 3.0


def test_a_wrapped_selector_may_ask_for_a_loss_of_its_own():
    squares = Signal("bounded-squares", meaning="a loss of its author", how=LossOf(LossMeasure(loss="pseudo")))

    @register("asks-squares")
    @dataclass(frozen=True, kw_only=True)
    class AsksSquares(PowerOfChoice):
        def query(self, state, slate, rng):
            return Losses(slate.candidates, frozenset({squares}))

        def select(self, state, slate, answer, rng):
            return Cohort(slate.candidates[np.argsort(-answer[squares])[: slate.size]]), state

    session = Session(create("bounded", of="asks-squares", tail=0.2), clients=10, seed=1)
    query = session.query(2)
    cohort = session.ask(2, bounded_squares={name: 1e6 if name == "3" else float(name) for name in query.names})
    assert len(cohort) == 2

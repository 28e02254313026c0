"""`balanced`: its objective by brute force, its draw by enumeration, and what it promises."""

import copy
import itertools
import math

import numpy as np
import pytest
from scipy.stats import chisquare

from fedcohort import ClientTable, LabelCounts, Session, Signal, Status
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import JournalError, SignalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.selectors import Balanced, Uniform
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.selectors.ours.balanced import selector
from fedcohort.simulate.label_sharing import NoisyCounts


def federation(seed=0, n=9, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, (n, classes)) * (rng.random((n, classes)) < 0.5)


def objective(counts, group, *, before=0.0):
    """J(M), written down from its definition; ``before`` (B,) are the counts of the rounds before."""
    total = counts[list(group)].sum(0) + before
    shares = total / total.sum() if total.sum() else np.eye(len(total))[0]
    by_chance = (1 - 1 / len(shares)) / max(total.sum(), 1)
    return math.log(max(((shares - 1 / len(shares)) ** 2).sum(), by_chance))


def play(session, rounds, size, metrics=None, available=None):
    """Return the cohorts of some rounds; ``metrics(clients)`` is what they report."""
    cohorts = []
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size=size, available=available))
        session.tell(
            RoundReport(cohort.ticket, cohort.clients, metrics={} if metrics is None else metrics(cohort.clients))
        )
        cohorts.append(cohort.clients)
    return cohorts


@pytest.mark.parametrize("seed", range(6))
def test_no_single_swap_improves_the_cohort_with_the_rounds_before_it(seed, monkeypatch):
    """Swaps end where no other swap helps. Two passes come close; enough of them get there."""
    monkeypatch.setitem(selector._PASSES, "labels", 20)
    counts = federation(seed)
    counts[counts.sum(1) == 0, 0] = 1
    session = Session(Balanced(coverage=0.0, slack=1e6), ClientTable(labels=LabelCounts(counts)), seed=seed)
    if session.state.natural:
        pytest.skip("a federation whose mix is left as it is has another objective")
    before = np.zeros(counts.shape[1])
    for _ in range(4):
        (clients,) = play(session, 1, 4)
        cohort = set(clients.tolist())
        best = objective(counts, cohort, before=before)
        for out, into in itertools.product(cohort, set(range(len(counts))) - cohort):
            assert objective(counts, cohort - {out} | {into}, before=before) >= best - 1e-9
        before = 0.5 * (before + counts[clients].sum(0))


def test_the_first_is_drawn_with_the_weights_of_the_definition():
    counts = np.array([[6, 2, 0], [1, 5, 4], [0, 3, 9], [4, 4, 3]])
    weights = np.exp([-objective(counts, [i]) for i in range(4)])
    draws = 1500
    seen = np.zeros(4)
    for seed in range(draws):
        session = Session(Balanced(coverage=0.0), ClientTable(labels=LabelCounts(counts)), seed=seed)
        seen[session.ask(RoundRequest(size=1)).clients] += 1
    assert chisquare(seen, weights / weights.sum() * draws).pvalue > 1e-3


def test_counts_factor_and_gram_give_the_same_cohorts():
    counts = federation(3, n=40, classes=5) + 1
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    sizes = counts.sum(1)
    tables = [
        ClientTable(labels=LabelCounts(counts)),
        ClientTable(labels=LabelFactor(counts @ rotation, classes=5), sizes=sizes),
        ClientTable(labels=LabelGram((counts @ counts.T).astype(float), classes=5), sizes=sizes),
    ]
    traces = [play(Session(Balanced(), table, seed=5), 20, 6) for table in tables]
    for trace in traces[1:]:
        assert [sorted(c) for c in trace] == [sorted(c) for c in traces[0]]


def plain_choice(rule, state, slate, counts, rng):
    """The rule of the class's docstring, one client at a time; ``counts`` (N, B), or None without labels."""
    candidates, size = slate.candidates.tolist(), slate.size
    rates = [state.rates[c] for c in candidates]
    mean = sum(r * state.turns[c] for r, c in zip(rates, candidates, strict=True)) / sum(rates)
    lead = [state.turns[c] - mean for c in candidates]
    last = sorted(lead)[size - 1]
    if size == len(candidates):
        first = eligible = [True] * size
    elif last <= -rule.slack:
        first, eligible = [e < last for e in lead], [e <= last for e in lead]
    else:
        first, eligible = [e <= -rule.slack for e in lead], [e < rule.slack or e <= last for e in lead]
    turn = [rule.coverage * (e + u) for e, u in zip(lead, rng.random(len(lead)).tolist(), strict=True)]
    before, past = 0, 0.0
    if counts is not None:
        aim = counts.sum(0) / counts.sum() if state.natural else np.full(counts.shape[1], 1 / counts.shape[1])
        past = (rule.past * state.recent) @ counts if slate.busy is None else counts[slate.busy].sum(0)
    if slate.busy is not None:
        before = len(slate.busy)

    def imbalance(members):
        if counts is None:
            return 0.0
        total = past + counts[[candidates[m] for m in members]].sum(0)
        value = ((total / total.sum() - aim) ** 2).sum()
        return math.log(max(value, (1 - 1 / len(total)) / max(total.sum(), 1)))

    members = [m for m, is_first in enumerate(first) if is_first]
    fixed = len(members)
    while len(members) < size:
        free = [m for m in range(len(candidates)) if eligible[m] and m not in members]
        values = [-(before + len(members) + 1) * (imbalance([*members, m]) + turn[m]) for m in free]
        weights = np.exp(np.array(values) - max(values))
        members.append(free[int(np.searchsorted(weights.cumsum(), rng.random() * weights.sum(), side="right"))])
    if 1 < size < len(candidates):
        for _ in range(1 if counts is None else 2):
            for member in rng.permutation(members[fixed:]).tolist():
                members.remove(member)
                free = [m for m in range(len(candidates)) if eligible[m] and m not in members]
                value = {m: imbalance([*members, m]) + turn[m] / size for m in free}
                best = min(value, key=value.__getitem__)
                members.append(best if value[best] < value[member] - 1e-12 else member)
    turns = state.turns.copy()
    absent = np.setdiff1d(np.arange(len(turns)), candidates)
    turns[absent] = np.maximum(turns[absent], mean - rule.slack)
    clients = slate.candidates[members]
    turns[clients] += 1 / state.rates[clients]
    return clients, turns


def one_class_each(n):
    return np.eye(4, dtype=int)[np.arange(n) % 4] * 8


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["random", "ties", "writers", "nothing"])
@pytest.mark.parametrize("slack", [1.0, 3.0])
def test_cohorts_are_those_of_the_rule_written_down_plainly(kind, asynchronous, slack, monkeypatch):
    known = {"random": federation(1, n=25) + 1, "ties": one_class_each(25), "writers": writers(25)}
    counts = known.get(kind)
    table = ClientTable(sizes=np.ones(25)) if counts is None else ClientTable(labels=LabelCounts(counts))
    compared = 0

    def select(self, state, slate, answer, rng, real=Balanced.select):
        nonlocal compared
        clients, turns = plain_choice(self, state, slate, counts, copy.deepcopy(rng))
        cohort, after = real(self, state, slate, answer, rng)
        assert cohort.clients.tolist() == clients.tolist()
        np.testing.assert_allclose(after.turns, turns)
        compared += 1
        return cohort, after

    monkeypatch.setattr(Balanced, "select", select)
    for seed in range(3):
        chance, work = np.random.default_rng(seed), []
        session = Session(Balanced(slack=slack), table, seed=seed, asynchronous=asynchronous)
        for _ in range(60 if asynchronous else 20):
            there = chance.random(25) < chance.choice([0.3, 0.7, 1.0])
            work.append(session.ask(RoundRequest(1 if asynchronous else 5, there)))
            if len(work) == (6 if asynchronous else 1):
                cohort = work.pop(int(chance.integers(len(work))))
                lost = np.where(chance.random(cohort.size) < 0.2, int(Status.FAILED), int(Status.OK))
                session.tell(RoundReport(cohort.ticket, cohort.clients, status=lost))
    assert compared == 3 * (60 if asynchronous else 20)


def writers(n=60, seed=0):
    """All clients have ten times as many of the first classes; a tenth of them have little data of each class."""
    rng = np.random.default_rng(seed)
    mix = np.repeat([10.0, 1.0], [5, 15])
    counts = np.array([rng.multinomial(200, mix / mix.sum()) for _ in range(n)])
    counts[: n // 10] = rng.multinomial(20, np.full(20, 1 / 20), n // 10)
    return counts


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_a_mix_that_rates_cannot_balance_is_the_aim(form):
    counts = writers()
    labels = {"counts": LabelCounts(counts), "gram": LabelGram((counts @ counts.T).astype(float), 20)}
    labels["factor"] = LabelFactor(counts @ np.linalg.qr(np.random.default_rng(1).normal(size=(20, 20)))[0], 20)
    session = Session(Balanced(), ClientTable(labels=labels[form], sizes=counts.sum(1)), seed=1)
    cohort = session.ask(RoundRequest(size=6))
    assert {"off_mix", "off_mix_with_past"} <= cohort.notes.keys()
    assert "qcid" not in cohort.notes
    session.tell(RoundReport(cohort.ticket, cohort.clients))
    cohorts = play(session, 100, 6)
    mix = counts.sum(0) / counts.sum()
    assert np.abs(trained(counts, cohorts) - mix).max() < 0.005
    picked = np.bincount(np.concatenate(cohorts), minlength=60)
    assert picked.max() <= 1.3 * picked.mean()  # the few balanced ones are not in every cohort


def test_similar_clients_meet_different_ones_every_time():
    """The same cohorts over and over train a minority in the same rounds, and the model swings with them."""
    counts = np.random.default_rng(1).multinomial(300, np.full(10, 0.1), size=60)
    together = np.zeros((60, 60))
    for clients in play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=3), 200, 6)[100:]:
        together[np.ix_(clients, clients)] += 1
    assert np.abs(together.diagonal() - 10).max() <= 1  # clients take turns
    assert (together - np.diag(together.diagonal())).max() <= 6


def test_new_clients_can_make_balance_possible():
    counts = writers(20)
    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=1)
    first = session.ask(RoundRequest(size=4))
    assert "off_mix" in first.notes
    session.tell(RoundReport(first.ticket, first.clients))
    letters = np.zeros((20, 20), int)
    letters[:, 5:] = 10
    session.join(ClientTable(labels=LabelCounts(letters), names=[f"new-{i}" for i in range(20)]))
    assert "qcid" in session.ask(RoundRequest(size=4)).notes


def trained(counts, cohorts):
    """(B,) share of each class in what was trained."""
    total = counts[np.concatenate(cohorts)].sum(0)
    return total / total.sum()


def test_the_next_cohort_has_what_the_last_one_lacked():
    counts = np.tile(np.eye(10, dtype=int) * 20, (6, 1))  # 60 clients of one class each
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2), 40, 5)
    for first, second in itertools.pairwise(cohorts):
        assert (counts[first].sum(0) + counts[second].sum(0) > 0).all()


def test_lost_models_do_not_count_as_trained():
    counts = np.tile(np.eye(4, dtype=int) * 20, (10, 1))  # classes 0 to 3 at ten clients each
    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2)
    for _ in range(10):
        cohort = session.ask(RoundRequest(size=2))
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.OK, Status.FAILED]))
        arrived = cohort.clients[0] % 4
        (again,) = play(session, 1, 2)
        assert arrived not in again % 4


def test_rare_classes_are_trained_as_much_as_others_in_the_long_run():
    kind = np.repeat(np.arange(8), [9, 9, 9, 9, 3, 3, 3, 3])
    counts = np.eye(8, dtype=int)[kind] * 20
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2), 300, 4)
    for part in (cohorts[:60], cohorts[-60:]):
        assert trained(counts, part)[4:].sum() > 0.38  # with turns alone it would be a quarter
    picked = np.bincount(np.concatenate(cohorts), minlength=48)
    assert picked[:36].min() > 0.8 * picked[:36].mean()
    assert picked[36:].min() > 0.8 * picked[36:].mean()


def test_a_rarely_available_class_is_trained_when_available():
    counts = np.repeat(np.eye(4, dtype=int) * 20, 6, axis=0)  # six clients for each class

    def share_of_the_last_class(selector):
        session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=5)
        cohorts = []
        for round_ in range(80):  # its clients come for one round in four
            there = np.arange(24) if round_ % 4 == 0 else np.arange(18)
            cohorts += play(session, 1, 3, available=there)
        return trained(counts, cohorts)[3]

    assert share_of_the_last_class(Uniform()) < 0.08
    assert share_of_the_last_class(Balanced(past=0.0, coverage=0.0, slack=1e6)) < 0.08
    assert share_of_the_last_class(Balanced()) > 0.1


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_noisy_counts_balance_the_true_ones(epsilon):
    rng = np.random.default_rng(3)
    counts = np.array([rng.multinomial(100, share) for share in rng.dirichlet(np.full(6, 0.2), size=60)])
    told = NoisyCounts(epsilon=epsilon).share(counts, rng).labels

    def imbalance(selector, labels):
        cohorts = play(Session(selector, ClientTable(labels=labels), seed=5), 40, 6)
        return np.mean([qcid(LabelCounts(counts), cohort) for cohort in cohorts])

    assert imbalance(Balanced(), told) < 0.4 * imbalance(Uniform(), told)


def test_a_few_exactly_balanced_clients_do_not_do_all_the_work():
    rng = np.random.default_rng(7)
    counts = rng.multinomial(100, np.full(10, 0.1), size=200)
    counts[:12] = 10
    picked = np.bincount(np.concatenate(play(Session(Balanced(), ClientTable(labels=LabelCounts(counts))), 100, 10)))
    assert len(np.flatnonzero(picked)) == 200
    assert picked[:12].mean() < 2 * picked.mean()


def test_without_labels_clients_take_turns():
    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(30)]), seed=4)
    picked = np.bincount(np.concatenate(play(session, 60, 5)), minlength=30)
    assert picked.min() >= 9
    assert picked.max() <= 11


def test_a_late_client_is_not_in_every_cohort():
    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(20)]), seed=4)
    play(session, 100, 5)
    session.join(ClientTable(names=["new"]))
    later = play(session, 20, 5)
    assert 1 <= sum(20 in cohort for cohort in later) <= 10


@pytest.mark.parametrize("slack", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_no_client_is_far_behind_or_ahead(seed, slack):
    """The promise of the selector's page, in federations of any sizes and labels, with all clients available."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(6, 50))
    k = int(rng.integers(1, n // 2))
    sizes = np.exp(rng.normal(4, rng.choice([0.0, 1.5]), n)).astype(int) + 1
    shares = rng.dirichlet(np.full(int(rng.integers(2, 8)), rng.choice([0.05, 0.3])), n)
    counts = np.array([rng.multinomial(size, share) for size, share in zip(sizes, shares, strict=True)])
    session = Session(Balanced(slack=slack), ClientTable(labels=LabelCounts(counts)), seed=seed)
    picked, absent, longest = np.zeros(n), np.zeros(n), np.zeros(n)
    rates = session.state.rates
    assert rates.min() >= 0.5
    assert rates.max() <= 2
    total = rates.sum()
    for round_ in range(1, 10 * n // k):
        (clients,) = play(session, 1, k)
        picked[clients] += 1
        absent += 1
        absent[clients] = 0
        longest = np.maximum(longest, absent)
        lead = picked / rates - round_ * k / total
        assert (lead < slack + 1 / rates).all()
        assert (lead >= -(2 * slack + n / total + k / total)).all()
        assert (lead >= -slack - 1).all()  # what is seen; the line above is what is proved
    assert (longest <= (3 * slack + n / total + k / total + 1 / rates) * total / k).all()


@pytest.mark.parametrize(
    "row", [[0] * 10 + [100], [1000] * 10 + [0], [200] + [0] * 10], ids=["a class of its own", "100 times all", "one"]
)
def test_no_claim_and_no_misfortune_takes_a_client_far_from_its_turn(row):
    """Such a client once took part in 298 of 300 rounds, or in none."""
    rng = np.random.default_rng(0)
    counts = np.zeros((100, 11))
    for others in counts:
        others[rng.choice(10, 2, replace=False)] = 50
    counts[0] = row
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=0), 300, 10)
    assert (30 - 4) / 2 <= sum(0 in cohort for cohort in cohorts) <= 2 * (30 + 4)


def test_a_hospital_with_one_sample_does_not_take_the_place_of_the_large_ones():
    rng = np.random.default_rng(1)
    sizes = np.concatenate([[1], np.exp(rng.normal(6, 1.5, 14)).astype(int) + 5])
    counts = np.array([rng.multinomial(size, rng.dirichlet(np.full(8, 0.5))) for size in sizes])
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=1), 100, 4)
    picked = np.bincount(np.concatenate(cohorts), minlength=15)
    fair = 100 * 4 / 15
    assert picked.min() >= fair / 2 - 4
    assert picked.max() <= fair * 2 + 4


def test_a_returning_client_is_due_but_not_in_every_cohort():
    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(20)]), seed=4)
    play(session, 200, 4, available=np.arange(19))
    later = play(session, 40, 4)
    assert 19 in later[0]
    assert sum(19 in cohort for cohort in later) <= 8 + 4  # its share of forty rounds, and what it was owed


def test_losses_change_nothing():
    """A client that is hard, or sees the world through another camera, is not taken for wrong."""
    counts = federation(5, n=40) + 1

    def loss(clients):
        return {Signal.LOSS: np.where(clients < 8, 5.0, 0.5)}

    table = ClientTable(labels=LabelCounts(counts))
    hard = play(Session(Balanced(), table, signals={Signal.LOSS}, seed=1), 40, 5, loss)
    plain = play(Session(Balanced(), table, seed=1), 40, 5)
    assert [c.tolist() for c in hard] == [c.tolist() for c in plain]


def test_time_brings_slow_clients_together_and_takes_no_turn_from_them():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))  # 40 clients, every class at 8 of them
    seconds = np.where(np.arange(40) < 20, 1.0, 16.0)  # every class at fast and at slow ones

    def duration(clients):
        return {Signal.DURATION: seconds[clients]}

    table = ClientTable(labels=LabelCounts(counts))
    hurried = play(Session(Balanced(time=2.0), table, signals={Signal.DURATION}, seed=1), 160, 5, duration)
    plain = play(Session(Balanced(), table, signals={Signal.DURATION}, seed=1), 160, 5, duration)
    length = [np.mean([seconds[c].max() for c in cohorts[20:]]) for cohorts in (hurried, plain)]
    assert length[0] < 0.8 * length[1]
    picked = np.bincount(np.concatenate(hurried), minlength=40)
    assert picked[20:].min() >= 160 * 5 / 40 - 4


def test_it_uses_what_the_host_supplies_and_the_journal_keeps_it(tmp_path):
    counts = federation(1) + 1
    told, untold = ClientTable(labels=LabelCounts(counts)), ClientTable(sizes=counts.sum(1))
    for table, reported, used in (
        (told, {Signal.UPDATE_SKETCH}, "labels"),
        (untold, {Signal.UPDATE_SKETCH}, "directions"),
        (untold, set(), "nothing"),
    ):
        session = Session(Balanced(), table, signals=reported)
        assert session.selector.balance == used
        assert (Signal.UPDATE_SKETCH in session.requires) == (used == "directions")
    path = tmp_path / "a.sqlite"
    with Session(Balanced(), untold, signals={Signal.UPDATE_SKETCH}, journal=path, seed=2) as session:
        first = session.ask(RoundRequest(size=3))
    with Session.open(path, Balanced()) as again:  # the same "auto", the same host
        assert Signal.UPDATE_SKETCH in again.requires
        assert again.pending[0].clients.tolist() == first.clients.tolist()
    with pytest.raises(JournalError, match="cannot be continued"):
        Session.open(path, Balanced(balance="nothing"))
    with pytest.raises(SignalError, match="duration"):
        Session(Balanced(time=0.5), told, signals=set())


def test_clients_without_any_samples_and_durations_of_zero():
    counts = np.array([[0, 0], [5, 0], [0, 5], [0, 0]])
    session = Session(Balanced(time=1.0), ClientTable(labels=LabelCounts(counts)), signals={Signal.DURATION})
    cohorts = play(session, 12, 2, lambda c: {Signal.DURATION: np.zeros(len(c))})
    assert all(len(c) == 2 for c in cohorts)
    assert set(np.concatenate(cohorts).tolist()) == {0, 1, 2, 3}


KINDS = np.random.default_rng(3).normal(size=(5, 64))


def sketches(clients, noise=np.random.default_rng(4)):  # noqa: B008  # one generator for all calls
    return {Signal.UPDATE_SKETCH: 0.3 + KINDS[clients % 5] + noise.normal(0, 0.3, (len(clients), 64))}


def without_labels(counts, **parameters):
    return Session(Balanced(**parameters), ClientTable(sizes=counts.sum(1)), signals={Signal.UPDATE_SKETCH}, seed=1)


def test_without_labels_directions_of_updates_are_balanced():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))

    def imbalance(cohorts):
        return np.mean([qcid(LabelCounts(counts), cohort) for cohort in cohorts])

    cohorts = play(without_labels(counts), 60, 5, sketches)
    blind = play(without_labels(counts, balance="nothing"), 60, 5, sketches)
    assert imbalance(cohorts[20:]) < 0.4 * imbalance(blind[20:])
    assert np.bincount(np.concatenate(cohorts), minlength=40).min() >= 4


def test_updates_with_nan_are_ignored():
    session = without_labels(federation(1) + 1)
    play(session, 3, 3, lambda clients: {Signal.UPDATE_SKETCH: np.full((len(clients), 64), np.nan)})
    assert session.state.seen.sum() == 0


def test_directions_survive_saving_and_new_clients():
    session = without_labels(federation(2, n=12) + 1)
    play(session, 4, 4, sketches)
    known = session.state.seen > 0
    session.join(ClientTable(names=["new"], sizes=[5.0]))
    assert session.state.directions.shape == (13, 64)
    np.testing.assert_array_equal(session.state.seen[:12] > 0, known)
    assert session.state.seen[12] == 0
    assert len(session.ask(RoundRequest(size=5)).clients) == 5

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
from fedcohort.selectors.numerics.accounts import exponents
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.selectors.ours import balanced
from fedcohort.selectors.ours.goals import balancing_rates
from fedcohort.session.explain import explain_round
from fedcohort.simulate.label_sharing import NoisyCounts


def federation(seed=0, n=9, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, (n, classes)) * (rng.random((n, classes)) < 0.5)


def objective(counts, group, rates, *, before=0.0):
    """J(M) without leads, written down from its definition; ``before`` (B,) are the counts of the rounds before."""
    total = counts[list(group)].sum(0) + before
    shares = total / total.sum() if total.sum() else np.eye(len(total))[0]
    aim = rates @ counts / (rates @ counts).sum()
    by_chance = (1 - 1 / len(shares)) / max(total.sum(), 1)
    return math.log(max(((shares - aim) ** 2).sum(), by_chance, 1e-3))


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
    monkeypatch.setitem(balanced._PASSES, "labels", 20)
    monkeypatch.setattr(balanced, "_LEAD", 0.0)
    counts = federation(seed)
    counts[counts.sum(1) == 0, 0] = 1
    session = Session(Balanced(share=1e6), ClientTable(labels=LabelCounts(counts)), seed=seed)
    before, rates = np.zeros(counts.shape[1]), session.state.rates
    for _ in range(2):  # later, those that were never asked come first
        (clients,) = play(session, 1, 4)
        cohort = set(clients.tolist())
        best = objective(counts, cohort, rates, before=before)
        for out, into in itertools.product(cohort, set(range(len(counts))) - cohort):
            assert objective(counts, cohort - {out} | {into}, rates, before=before) >= best - 1e-9
        before = 0.5 * (before + counts[clients].sum(0))


def test_the_first_is_drawn_with_the_weights_of_the_definition(monkeypatch):
    monkeypatch.setattr(balanced, "_LEAD", 0.0)
    counts = np.array([[6, 2, 0], [1, 5, 4], [0, 3, 9], [4, 4, 3]])
    rates = balancing_rates(LabelCounts(counts), counts.sum(1), 4.0)
    weights = np.exp([-objective(counts, [i], rates) for i in range(4)])
    draws = 1500
    seen = np.zeros(4)
    for seed in range(draws):
        session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=seed)
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


def plain_choice(rule, state, slate, counts, account, rng):
    """The rule of the class's docstring, one client at a time; ``counts`` (N, B), or None without labels.

    ``account`` has asked (N,), even (N,) and free (N,); it is kept up to date here.
    """
    candidates, size, n = slate.candidates.tolist(), slate.size, slate.n
    busy = [] if slate.busy is None else slate.busy.tolist()
    least, most = exponents(rule.share)
    even, free = account["even"].copy(), account["free"].copy()
    even[candidates + busy] += size / len(candidates + busy)
    free[candidates] += size / len(candidates + busy)

    def potential(cohort):
        asked = account["asked"].copy()
        asked[cohort] += 1
        return np.exp(least * (free / rule.share - asked)).sum() + np.exp(most * (asked - rule.share * even)).sum()

    nobody = potential([])
    price = [potential([c]) - nobody for c in candidates]

    def permitted(members):
        """Those with whom the members and the cheapest others stay within the budget; or the cheapest."""
        others = sorted((m for m in range(len(candidates)) if m not in members), key=price.__getitem__)

        def total(m):
            return nobody + sum(
                price[o] for o in [*members, m, *[o for o in others if o != m][: size - len(members) - 1]]
            )

        fits = [m for m in others if total(m) <= 2 * n * (1 + 1e-9)]
        return sorted(fits) if fits or busy else others[:1]

    turn = []
    for c, u in zip(candidates, rng.random(len(candidates)).tolist(), strict=True):
        turn.append(0.5 * math.log((account["asked"][c] + 0.5 + u) / (state.rates[c] * even[c] + 1)))
    past = 0.0 if counts is None else (0.5 * state.recent) @ counts if slate.busy is None else counts[busy].sum(0)

    aim = None if counts is None else state.rates @ counts / (state.rates @ counts).sum()

    def imbalance(members):
        if counts is None:
            return 0.0
        total = past + counts[[candidates[m] for m in members]].sum(0)
        value = ((total / total.sum() - aim) ** 2).sum()
        return math.log(max(value, (1 - 1 / len(total)) / max(total.sum(), 1), 1e-3))

    members = []
    while len(members) < size and (may := permitted(members)):
        values = [-(len(busy) + len(members) + 1) * (imbalance([*members, m]) + turn[m]) for m in may]
        weights = np.exp(np.array(values) - max(values))
        members.append(may[int(np.searchsorted(weights.cumsum(), rng.random() * weights.sum(), side="right"))])
    if 1 < size < len(candidates):
        for _ in range(1 if counts is None else 2):
            for member in rng.permutation(members).tolist():
                members.remove(member)
                value = {m: imbalance([*members, m]) + turn[m] / size for m in {*permitted(members), member}}
                best = min(sorted(value), key=value.__getitem__)
                members.append(best if value[best] < value[member] - 1e-12 else member)
    clients = slate.candidates[members]
    if len(clients):
        account["even"], account["free"] = even, free
        account["asked"][clients] += 1
    return clients


def one_class_each(n):
    return np.eye(4, dtype=int)[np.arange(n) % 4] * 8


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["random", "ties", "nothing"])
@pytest.mark.parametrize("share", [1.25, 4.0])
def test_cohorts_are_those_of_the_rule_written_down_plainly(kind, asynchronous, share, monkeypatch):
    known = {"random": federation(1, n=25) + 1, "ties": one_class_each(25)}
    counts = known.get(kind)
    table = ClientTable(sizes=np.ones(25)) if counts is None else ClientTable(labels=LabelCounts(counts))
    compared, waited, account = 0, 0, {}

    def select(self, state, slate, answer, rng, real=Balanced.select):
        nonlocal compared, waited
        clients = plain_choice(self, state, slate, counts, account, copy.deepcopy(rng))
        cohort, after = real(self, state, slate, answer, rng)
        assert cohort.clients.tolist() == clients.tolist()
        np.testing.assert_array_equal(after.asked, account["asked"])
        compared, waited = compared + 1, waited + (not cohort.size)
        return cohort, after

    monkeypatch.setattr(Balanced, "select", select)
    for seed in range(2):
        account.update(asked=np.zeros(25), even=np.zeros(25), free=np.zeros(25))
        chance, work = np.random.default_rng(seed), []
        session = Session(Balanced(share=share), table, seed=seed, asynchronous=asynchronous)
        for _ in range(50 if asynchronous else 20):
            there = chance.random(25) < chance.choice([0.3, 0.7, 1.0])
            cohort = session.ask(RoundRequest(1 if asynchronous else 5, there))
            if cohort.size:
                work.append(cohort)
            if len(work) == (6 if asynchronous else 1) or not cohort.size:
                cohort = work.pop(int(chance.integers(len(work))))
                lost = np.where(chance.random(cohort.size) < 0.2, int(Status.FAILED), int(Status.OK))
                session.tell(RoundReport(cohort.ticket, cohort.clients, status=lost))
    assert compared == 2 * (50 if asynchronous else 20)


def writers(n=60, seed=0):
    """All clients have ten times as many of the first classes; a tenth of them have little data of each class."""
    rng = np.random.default_rng(seed)
    mix = np.repeat([10.0, 1.0], [5, 15])
    counts = np.array([rng.multinomial(200, mix / mix.sum()) for _ in range(n)])
    counts[: n // 10] = rng.multinomial(20, np.full(20, 1 / 20), n // 10)
    return counts


def test_a_mix_that_nobody_can_balance_takes_nobody_beyond_its_share():
    counts = writers()
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=1), 100, 6)
    picked = np.bincount(np.concatenate(cohorts), minlength=60)
    assert picked.min() >= 10 / 4 - 2 and picked.max() <= 4 * 10 + 3  # although a tenth of them are better balanced


def test_similar_clients_meet_different_ones_every_time():
    """The same cohorts over and over train a minority in the same rounds, and the model swings with them."""
    counts = np.random.default_rng(1).multinomial(300, np.full(10, 0.1), size=60)
    together = np.zeros((60, 60))
    for clients in play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=3), 200, 6)[100:]:
        together[np.ix_(clients, clients)] += 1
    assert np.abs(together.diagonal() - 10).max() <= 1  # clients take turns
    assert (together - np.diag(together.diagonal())).max() <= 6


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
        cohorts = []
        for seed in range(4):
            session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=seed)
            for round_ in range(80):  # its clients come for one round in four
                there = np.arange(24) if round_ % 4 == 0 else np.arange(18)
                cohorts += play(session, 1, 3, available=there)
        return trained(counts, cohorts)[3]

    assert share_of_the_last_class(Balanced()) > 1.2 * share_of_the_last_class(Uniform())


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


def most(n, share):
    return math.log(2 * n) / exponents(share)[1]


def least(n, share):
    return math.log(2 * n) / exponents(share)[0]


def skewed(n, rng):
    sizes = np.exp(rng.normal(4, rng.choice([0.0, 1.5]), n)).astype(int) + 1
    shares = rng.dirichlet(np.full(int(rng.integers(2, 8)), rng.choice([0.05, 0.3])), n)
    return np.array([rng.multinomial(size, share) for size, share in zip(sizes, shares, strict=True)])


def one_class_of_its_own(n, rng):
    counts = np.zeros((n, 6), int)
    counts[:, :5] = rng.multinomial(100, np.full(5, 0.2), n)
    counts[0] = [0, 0, 0, 0, 0, 100]
    return counts


PRESENCE = {
    "all": lambda asked, rng: np.arange(len(asked)),
    "anyhow": lambda asked, rng: np.flatnonzero(rng.random(len(asked)) < rng.uniform(0.2, 1)),
    "those asked least": lambda asked, rng: np.flatnonzero(asked <= np.median(asked)),
    "those asked most": lambda asked, rng: np.flatnonzero(asked >= np.median(asked)),
    "one half, then the other": lambda asked, rng: (
        np.arange(len(asked) // 2) + len(asked) // 2 * int(asked.sum() % 200 > 100)
    ),
}


@pytest.mark.parametrize("presence", PRESENCE)
@pytest.mark.parametrize("share", [1.25, 2.0, 4.0, 16.0])
@pytest.mark.parametrize("world", [skewed, one_class_of_its_own])
def test_everybody_is_asked_within_its_bounds_whoever_is_there(world, share, presence):
    """The promise of the selector's page, with its own books: clients come, go, join and fail, and watch it."""
    rng = np.random.default_rng(int(10 * share))
    n, joined = 30, 20
    counts = world(n, rng) + 1
    session = Session(Balanced(share=share), ClientTable(labels=LabelCounts(counts[:joined])), seed=3)
    asked, even = np.zeros(n), np.zeros(n)
    for round_ in range(150):
        if round_ == 60:
            names = [str(i) for i in range(joined, n)]
            session.join(ClientTable(labels=LabelCounts(counts[joined:]), names=names))
            joined = n
        there = PRESENCE[presence](asked[:joined], rng)
        if not len(there):
            continue
        k = int(rng.integers(1, min(len(there), 6) + 1))
        cohort = session.ask(RoundRequest(k, there))
        lost = np.where(rng.random(cohort.size) < 0.3, int(Status.FAILED), int(Status.OK))
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=lost))
        even[there] += cohort.size / len(there)
        asked[cohort.clients] += 1
        assert cohort.size == k
        assert (asked <= share * even + most(joined, share) + 1e-6)[:joined].all()
        assert (asked >= even / share - least(joined, share) - 1e-6)[:joined].all()


@pytest.mark.parametrize("share", [2.0, 4.0])
def test_accounts_by_samples_give_a_giant_the_places_of_its_data(share):
    rng = np.random.default_rng(0)
    counts = rng.multinomial(40, np.full(5, 0.2), 60)
    counts[0] = rng.multinomial(1600, np.full(5, 0.2))  # 40% of all data
    table = ClientTable(labels=LabelCounts(counts))
    took = {}
    for accounts in ("clients", "samples"):
        session = Session(Balanced(share=share, accounts=accounts), table, seed=1)
        took[accounts] = sum(0 in cohort for cohort in play(session, 100, 2))
    chance = 2 * counts[0].sum() / counts.sum()
    assert took["clients"] <= share * 2 / 60 * 100 + most(60, share)
    assert took["samples"] >= 100 * chance / share - least(60, share)


def test_one_by_one_the_only_free_client_waits_for_the_others():
    session = Session(Balanced(), ClientTable(n=40), asynchronous=True, seed=1)
    tickets = {}
    for _ in range(40):
        cohort = session.ask(1)
        tickets[int(cohort.clients[0])] = cohort.ticket
    asked = 1
    while asked < 60:  # only client 0 ever answers
        session.tell(RoundReport(tickets[0], [0]))
        cohort = session.ask(1)
        if not cohort.size:
            break
        tickets[0], asked = cohort.ticket, asked + 1
    assert asked <= 4 * (40 + asked) / 40 + most(40, 4.0) and cohort.notes["reason"]
    session.tell(RoundReport(tickets[7], [7]))
    assert session.ask(1).clients.tolist() == [7]


def test_clients_that_had_their_share_are_named_and_explained(tmp_path):
    selector, table = Balanced(share=1.25), ClientTable(labels=LabelCounts([[0, 50]] + [[50, 0]] * 19))
    with Session(selector, table, seed=1, journal=tmp_path / "a.sqlite") as session:
        for _ in range(80):
            cohort = session.ask(RoundRequest(1))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            named = str(cohort.notes.get("had its share", "")).split(", ")
            if named != [""]:
                break
        barred = np.flatnonzero(cohort.parts["had its share"])
        assert [table.name(client) for client in barred[:20]] == named[: len(barred)]
        assert "had its share 1" in str(explain_round(session.journal, cohort.round, named[0]))


def test_of_many_candidates_a_sample_is_looked_at_and_the_promise_holds(monkeypatch):
    monkeypatch.setattr(balanced, "_LOOKED_AT", 20)
    n, share = 400, 1.25
    session = Session(
        Balanced(share=share), ClientTable(labels=LabelCounts(one_class_of_its_own(n, np.random.default_rng(1))))
    )
    asked, seen = np.zeros(n), set()
    for round_ in range(400):
        cohort = session.ask(RoundRequest(4))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        asked[cohort.clients] += 1
        seen.add(len(cohort.candidates))
        even = 4 * (round_ + 1) / n
        assert asked.max() <= share * even + most(n, share) and asked.min() >= even / share - least(n, share)
    assert min(seen) == 20


@pytest.mark.parametrize(
    "row", [[0] * 10 + [100], [1000] * 10 + [0], [200] + [0] * 10], ids=["a class of its own", "100 times all", "one"]
)
def test_no_claim_takes_a_client_far_from_its_share(row):
    rng = np.random.default_rng(0)
    counts = np.zeros((100, 11))
    for others in counts:
        others[rng.choice(10, 2, replace=False)] = 50
    counts[0] = row
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=0), 300, 10)
    assert 30 / 4 - least(100, 4.0) <= sum(0 in cohort for cohort in cohorts) <= 4 * 30 + most(100, 4.0)


def test_a_hospital_with_one_sample_does_not_take_the_place_of_the_large_ones():
    rng = np.random.default_rng(1)
    sizes = np.concatenate([[1], np.exp(rng.normal(6, 1.5, 14)).astype(int) + 5])
    counts = np.array([rng.multinomial(size, rng.dirichlet(np.full(8, 0.5))) for size in sizes])
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=1), 100, 4)
    picked = np.bincount(np.concatenate(cohorts), minlength=15)
    fair = 100 * 4 / 15
    assert picked.min() >= fair / 4 - least(15, 4.0)
    assert picked[0] <= fair  # it has next to nothing


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


def test_time_shortens_rounds_within_the_accounts():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))  # 40 clients, every class at 8 of them
    seconds = np.where(np.arange(40) < 20, 1.0, 16.0)  # every class at fast and at slow ones

    def duration(clients):
        return {Signal.DURATION: seconds[clients]}

    table = ClientTable(labels=LabelCounts(counts))
    hurried = play(Session(Balanced(fast=True), table, signals={Signal.DURATION}, seed=1), 160, 5, duration)
    plain = play(Session(Balanced(), table, signals={Signal.DURATION}, seed=1), 160, 5, duration)
    length = [np.mean([seconds[c].max() for c in cohorts[20:]]) for cohorts in (hurried, plain)]
    assert length[0] < 0.8 * length[1]
    picked = np.bincount(np.concatenate(hurried), minlength=40)
    assert picked[20:].min() >= 160 * 5 / 40 / 4 - least(40, 4.0)


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
        Session(Balanced(fast=True), told, signals=set())


def test_clients_without_any_samples_and_durations_of_zero():
    counts = np.array([[0, 0], [5, 0], [0, 5], [0, 0]])
    session = Session(Balanced(fast=True), ClientTable(labels=LabelCounts(counts)), signals={Signal.DURATION})
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

"""`balanced`: its objective by brute force, its draw by enumeration, and what it promises in hard federations."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import chisquare

from fedcohort import (
    ClientTable,
    LabelCounts,
    LabelFactor,
    LabelGram,
    RoundReport,
    RoundRequest,
    Session,
    Signal,
    Status,
)
from fedcohort.errors import JournalError, SignalError
from fedcohort.numerics.class_balance import qcid
from fedcohort.privacy.sharing import Noisy
from fedcohort.selectors import Balanced, Uniform


def federation(seed=0, n=9, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, (n, classes)) * (rng.random((n, classes)) < 0.5)


def objective(counts, group, *, floor="chance", before=0.0, gamma=0.0, excess=None, tau=0.0, seconds=None):
    """J(M), written down from its definition; ``before`` (B,) are the counts of the rounds before."""
    total = counts[list(group)].sum(0) + before
    shares = total / total.sum() if total.sum() else np.eye(len(total))[0]
    least = (1 - 1 / len(shares)) / max(total.sum(), 1) if floor == "chance" else floor
    value = math.log(max(((shares - 1 / len(shares)) ** 2).sum(), least))
    if excess is not None:
        value += gamma * np.mean([excess[i] for i in group])
    if seconds is not None:
        value += tau * math.log(max(seconds[i] for i in group))
    return value


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


@pytest.mark.parametrize("floor", ["chance", 1e-4])
@pytest.mark.parametrize("seed", range(6))
def test_no_single_swap_improves_the_cohort_with_the_rounds_before_it(seed, floor):
    counts = federation(seed)
    counts[counts.sum(1) == 0, 0] = 1
    session = Session(
        Balanced(passes=8, floor=floor, past=0.5, coverage=0.0), ClientTable(labels=LabelCounts(counts)), seed=seed
    )
    before = np.zeros(counts.shape[1])
    for _ in range(4):
        (clients,) = play(session, 1, 4)
        cohort = set(clients.tolist())
        best = objective(counts, cohort, floor=floor, before=before)
        for out, into in itertools.product(cohort, set(range(len(counts))) - cohort):
            assert objective(counts, cohort - {out} | {into}, floor=floor, before=before) >= best - 1e-9
        before = 0.5 * (before + counts[clients].sum(0))


def test_the_first_two_are_drawn_with_the_weights_of_the_definition():
    counts = np.array([[6, 2, 0], [1, 5, 4], [0, 3, 9], [4, 4, 3]])
    floor, draws = 1e-2, 1500
    selector = Balanced(passes=0, floor=floor, balance="yes")
    chance = {}
    first = np.exp([-objective(counts, [i], floor=floor) for i in range(4)])
    for i in range(4):
        others = [j for j in range(4) if j != i]
        second = np.exp([-2 * objective(counts, [i, j], floor=floor) for j in others])
        for j, weight in zip(others, second / second.sum(), strict=True):
            chance[i, j] = first[i] / first.sum() * weight
    seen = dict.fromkeys(chance, 0)
    for seed in range(draws):
        session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=seed)
        seen[tuple(session.ask(RoundRequest(size=2)).clients.tolist())] += 1
    expected = np.array([chance[pair] for pair in chance]) * draws
    assert chisquare(np.array([seen[pair] for pair in chance]), expected).pvalue > 1e-3


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


def writers(n=60, seed=0):
    """Everybody has ten times as many of the first classes; a tenth of them have very little, of all classes alike."""
    rng = np.random.default_rng(seed)
    mix = np.repeat([10.0, 1.0], [5, 15])
    counts = np.array([rng.multinomial(200, mix / mix.sum()) for _ in range(n)])
    counts[: n // 10] = rng.multinomial(20, np.full(20, 1 / 20), n // 10)
    return counts


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_a_mix_that_nobody_can_balance_is_left_as_it_is(form):
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


def test_where_the_mix_is_left_as_it_is_a_hard_client_is_not_doubted():
    counts = writers()
    table = ClientTable(labels=LabelCounts(counts))
    hard = np.arange(60) >= 50
    session = Session(Balanced(losses="yes"), table, seed=1)
    cohorts = play(session, 100, 6, lambda clients: {"loss": np.where(hard[clients], 2.0, 0.5)})
    picked = np.bincount(np.concatenate(cohorts), minlength=60)
    assert picked[hard].mean() > 0.9 * picked.mean()


def test_newcomers_can_make_a_federation_one_that_can_be_balanced():
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


def test_what_one_cohort_lacks_the_next_one_has():
    counts = np.tile(np.eye(10, dtype=int) * 20, (6, 1))  # 60 clients of one class each
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2), 40, 5)
    for first, second in itertools.pairwise(cohorts):
        assert (counts[first].sum(0) + counts[second].sum(0) > 0).all()


def test_whose_model_was_lost_does_not_count_as_trained():
    counts = np.tile(np.eye(4, dtype=int) * 20, (10, 1))  # classes 0 to 3 at ten clients each
    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2)
    for _ in range(10):
        cohort = session.ask(RoundRequest(size=2))
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.OK, Status.FAILED]))
        arrived = cohort.clients[0] % 4
        (again,) = play(session, 1, 2)
        assert arrived not in again % 4


def test_classes_of_few_clients_are_trained_as_much_as_others_also_in_the_long_run():
    kind = np.repeat(np.arange(8), [9, 9, 9, 9, 3, 3, 3, 3])
    counts = np.eye(8, dtype=int)[kind] * 20
    cohorts = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=2), 300, 4)
    for part in (cohorts[:60], cohorts[-60:]):
        assert trained(counts, part)[4:].sum() > 0.44  # with turns alone it would be a quarter
    picked = np.bincount(np.concatenate(cohorts), minlength=48)
    assert picked[:36].min() > 0.8 * picked[:36].mean()
    assert picked[36:].min() > 0.8 * picked[36:].mean()


def test_a_class_that_is_seldom_there_is_trained_while_it_is():
    counts = np.repeat(np.eye(4, dtype=int) * 20, 6, axis=0)  # six clients for each class

    def share_of_the_last_class(selector):
        session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=5)
        cohorts = []
        for round_ in range(80):  # its clients come for one round in four
            there = np.arange(24) if round_ % 4 == 0 else np.arange(18)
            cohorts += play(session, 1, 3, available=there)
        return trained(counts, cohorts)[3]

    assert share_of_the_last_class(Uniform()) < 0.08
    assert share_of_the_last_class(Balanced(past=0.0, coverage=0.0)) < 0.08
    assert share_of_the_last_class(Balanced()) > 0.1


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_noisy_counts_balance_the_true_ones(epsilon):
    rng = np.random.default_rng(3)
    counts = np.array([rng.multinomial(100, share) for share in rng.dirichlet(np.full(6, 0.2), size=60)])
    told = Noisy(epsilon=epsilon).tell(counts, rng).labels

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


def test_slow_clients_take_part_less_and_rounds_get_shorter():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))  # 40 clients, every class at 8 of them
    seconds = np.where(np.arange(40) < 20, 1.0, 16.0)  # every class at fast and at slow ones

    def metrics(clients):
        return {Signal.DURATION: seconds[clients]}

    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), signals={Signal.DURATION}, seed=1)
    cohorts = play(session, 120, 5, metrics)
    picked = np.bincount(np.concatenate(cohorts), minlength=40)
    blind = play(Session(Balanced(), ClientTable(labels=LabelCounts(counts)), seed=1), 120, 5)
    length = [np.mean([seconds[c].max() for c in trace[20:]]) for trace in (cohorts, blind)]
    assert length[0] < 0.75 * length[1]
    assert picked[20:].mean() < 0.7 * picked[:20].mean()
    assert picked.min() > 0  # less, never not at all


def test_clients_whose_labels_do_not_explain_their_losses_take_part_less():
    rng = np.random.default_rng(2)
    counts = np.array([rng.multinomial(60, share) for share in rng.dirichlet(np.full(4, 0.4), size=60)])
    by_class = np.array([0.1, 0.4, 0.8, 2.0])  # hard classes are no reason for doubt
    noisy = np.arange(60) % 4 == 0
    truth = counts / counts.sum(1, keepdims=True) @ by_class * np.where(noisy, 3.0, 1.0)

    def metrics(clients):
        return {Signal.LOSS: truth[clients] * rng.lognormal(0, 0.1, len(clients))}

    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), signals={Signal.LOSS}, seed=1)
    picked = np.bincount(np.concatenate(play(session, 300, 8, metrics)[60:]), minlength=60)
    assert picked[noisy].mean() < 0.6 * picked[~noisy].mean()
    assert picked.min() > 0
    hard = ~noisy & (counts[:, 3] > 40)
    assert picked[hard].mean() > 0.75 * picked[~noisy].mean()


def test_losses_that_come_and_go_are_no_reason_for_doubt():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))
    rng = np.random.default_rng(3)
    swings = rng.lognormal(0, 1, (200, 5))  # each class is forgotten and learnt again
    rounds = itertools.count()

    def metrics(clients):
        return {Signal.LOSS: swings[next(rounds)][clients % 5] * rng.lognormal(0, 0.1, len(clients))}

    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), signals={Signal.LOSS}, seed=1)
    play(session, 120, 5, metrics)
    assert session.selector.rates(session.state).min() > 0.5
    assert np.median(session.selector.rates(session.state)) > 0.95


def test_without_labels_cohorts_are_taken_in_turns():
    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(30)]), seed=4)
    picked = np.bincount(np.concatenate(play(session, 60, 5)), minlength=30)
    assert picked.min() >= 9
    assert picked.max() <= 11


def test_who_joins_late_is_not_in_every_cohort():
    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(20)]), seed=4)
    play(session, 100, 5)
    session.join(ClientTable(names=["new"]))
    later = play(session, 20, 5)
    assert 1 <= sum(20 in cohort for cohort in later) <= 10


def test_it_adapts_to_the_host_and_the_journal_keeps_what_it_became(tmp_path):
    table = ClientTable(labels=LabelCounts(federation(1) + 1))
    path = tmp_path / "a.sqlite"
    with Session(Balanced(), table, signals={Signal.LOSS}, journal=path, seed=2) as session:
        assert session.requires == {Signal.LOSS}
        first = session.ask(RoundRequest(size=3))
    with Session.open(path, Balanced()) as again:  # the same "auto", the same host
        assert again.requires == {Signal.LOSS}
        assert again.pending[0].clients.tolist() == first.clients.tolist()
    with pytest.raises(JournalError, match="cannot be continued"):
        Session.open(path, Balanced(losses="no"))
    with pytest.raises(SignalError, match="duration"):
        Session(Balanced(durations="yes"), table, signals=set())


def test_clients_without_any_samples_and_losses_of_zero():
    counts = np.array([[0, 0], [5, 0], [0, 5], [0, 0]])
    session = Session(Balanced(), ClientTable(labels=LabelCounts(counts)), signals={Signal.LOSS, Signal.DURATION})
    cohorts = play(session, 12, 2, lambda c: {Signal.LOSS: np.zeros(len(c)), Signal.DURATION: np.zeros(len(c))})
    assert all(len(c) == 2 for c in cohorts)
    assert {1, 2} <= set(np.concatenate(cohorts).tolist())


def without_labels(counts, reported=frozenset({Signal.OUTPUT_BIAS_UPDATE}), seed=1, **parameters):
    table = ClientTable(sizes=counts.sum(1))
    return Session(Balanced(**parameters), table, signals=reported, seed=seed)


def test_labels_that_nobody_tells_are_estimated_from_updates_of_the_output_bias():
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))
    shares = counts / counts.sum(1, keepdims=True)

    def metrics(clients):
        return {Signal.OUTPUT_BIAS_UPDATE: 0.1 * (shares[clients] - 0.2)}

    def imbalance(cohorts):
        return np.mean([((counts[c].sum(0) / counts[c].sum() - 0.2) ** 2).sum() for c in cohorts])

    session = without_labels(counts)
    assert session.selector.estimates == "yes"
    cohorts = play(session, 60, 5, metrics)
    blind = play(without_labels(counts, estimates="no"), 60, 5, metrics)
    assert imbalance(cohorts[20:]) < 0.3 * imbalance(blind[20:])
    picked = np.bincount(np.concatenate(cohorts), minlength=40)
    assert picked.min() >= 4  # balance does not starve anybody


def test_without_updates_of_the_output_bias_directions_of_updates_are_balanced():
    kinds = np.random.default_rng(3).normal(size=(5, 64))
    counts = np.tile(np.eye(5, dtype=int) * 20, (8, 1))
    noise = np.random.default_rng(4)

    def metrics(clients):
        return {Signal.UPDATE_SKETCH: 0.3 + kinds[clients % 5] + noise.normal(0, 0.3, (len(clients), 64))}

    def imbalance(cohorts):
        return np.mean([qcid(LabelCounts(counts), cohort) for cohort in cohorts])

    session = without_labels(counts, {Signal.UPDATE_SKETCH})
    assert (session.selector.estimates, session.selector.directions) == ("no", "yes")
    cohorts = play(session, 60, 5, metrics)
    blind = play(without_labels(counts, {Signal.UPDATE_SKETCH}, directions="no"), 60, 5, metrics)
    assert imbalance(cohorts[20:]) < 0.4 * imbalance(blind[20:])
    assert np.bincount(np.concatenate(cohorts), minlength=40).min() >= 4


@pytest.mark.parametrize(
    ("labels", "reported", "used"),
    [
        (True, {Signal.OUTPUT_BIAS_UPDATE, Signal.UPDATE_SKETCH}, ("yes", "no", "no")),
        (False, {Signal.OUTPUT_BIAS_UPDATE, Signal.UPDATE_SKETCH}, ("no", "yes", "no")),
        (False, {Signal.UPDATE_SKETCH}, ("no", "no", "yes")),
        (False, set(), ("no", "no", "no")),
    ],
)
def test_the_best_of_what_is_known_is_used_and_nothing_else(labels, reported, used):
    counts = federation() + 1
    table = ClientTable(labels=LabelCounts(counts)) if labels else ClientTable(sizes=counts.sum(1))
    selector = Session(Balanced(), table, signals=reported).selector
    assert (selector.balance, selector.estimates, selector.directions) == used
    assert (Signal.OUTPUT_BIAS_UPDATE in selector.requires) == (used[1] == "yes")
    assert (Signal.UPDATE_SKETCH in selector.requires) == (used[2] == "yes")


def test_updates_that_are_no_numbers_teach_nothing():
    counts = federation(1) + 1

    def metrics(clients):
        return {Signal.OUTPUT_BIAS_UPDATE: np.full((len(clients), 4), np.nan)}

    session = without_labels(counts)
    play(session, 3, 3, metrics)
    assert session.state.seen.sum() == 0


def test_without_labels_high_losses_are_no_reason_for_doubt():
    def metrics(clients):
        return {Signal.LOSS: np.where(clients < 10, 5.0, 0.5)}

    session = Session(Balanced(), ClientTable(names=[f"c{i}" for i in range(30)]), signals={Signal.LOSS}, seed=4)
    picked = np.bincount(np.concatenate(play(session, 60, 5, metrics)), minlength=30)
    assert picked.min() >= 9
    assert picked.max() <= 11


@pytest.mark.parametrize(("absent", "low", "high"), [(1.0, 0.9, 1.1), (0.0, 0.3, 0.37)])
def test_absent_says_what_a_round_away_counts(absent, low, high):
    session = Session(Balanced(absent=absent), ClientTable(names=[f"c{i}" for i in range(20)]), seed=4)
    picked = np.zeros(20)
    for round_ in range(160):  # ten clients are there in every second round: drawn uniformly they would have a third
        there = np.arange(20) if round_ % 2 else np.arange(10)
        (clients,) = play(session, 1, 4, available=there)
        picked[clients] += 1
    assert low < picked[10:].mean() / picked[:10].mean() < high


def test_estimates_survive_saving_and_newcomers():
    counts = federation(2, n=12) + 1
    session = without_labels(counts)
    play(session, 4, 4, lambda clients: {Signal.OUTPUT_BIAS_UPDATE: counts[clients] - counts[clients].mean()})
    known = session.state.seen > 0
    session.join(ClientTable(names=["new"], sizes=[5.0]))
    assert session.state.traits.shape == (13, 4)
    np.testing.assert_array_equal(session.state.seen[:12] > 0, known)
    assert session.state.seen[12] == 0
    assert len(session.ask(RoundRequest(size=5)).clients) == 5


def first_of_shards(selector, row, rounds=80):
    """In how many rounds is a client that claims ``row`` among 100 with two of ten classes each?"""
    rng = np.random.default_rng(0)
    counts = np.zeros((100, len(row)))
    for others in counts:
        others[rng.choice(10, 2, replace=False)] = 50
    counts[0] = row
    session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=0)
    taken = 0
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(10))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        taken += 0 in cohort.clients
    return taken


@pytest.mark.parametrize("row", [[0] * 10 + [100], [1000] * 10], ids=["a class of its own", "100 times all"])
def test_no_claim_brings_more_than_its_limit(row):
    assert first_of_shards(Balanced(most=None), row) > 70
    assert first_of_shards(Balanced(), row) <= 5 * 8 + 5
    assert first_of_shards(Balanced(most=2), row) <= 2 * 8 + 5


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_the_limit_is_none_to_the_honest(alpha):
    rng = np.random.default_rng(5)
    counts = np.ceil(rng.dirichlet(np.full(10, alpha), 60) * rng.lognormal(5, 0.5, 60)[:, None])

    def cohorts(selector):
        session = Session(selector, ClientTable(labels=LabelCounts(counts)), seed=2)
        for _ in range(60):
            cohort = session.ask(RoundRequest(6))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            yield cohort.names

    assert list(cohorts(Balanced())) == list(cohorts(Balanced(most=None)))


def test_a_cohort_is_full_though_all_have_had_their_share():
    session = Session(Balanced(most=1), ClientTable(labels=LabelCounts([[8, 0], [9, 0], [0, 8], [0, 9]])), seed=3)
    for available in [[0, 1, 2]] * 30 + [[2]] * 30 + [[2, 3]] * 30:
        cohort = session.ask(RoundRequest(min(2, len(available)), available))
        assert cohort.size == min(2, len(available))
        session.tell(RoundReport(cohort.ticket, cohort.clients))

"""Aggregators that compensate for absence, against the papers' algorithms written out client by client."""

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort.training.aggregators import FedAu, FedAwe, FedVarp, Members, Mifa

N, P, ROUNDS = 7, 4, 40


def made_up_rounds(seed=0):
    """Cohorts of 0 to 4 clients, each of which trains towards its own point with a decaying rate."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(N, P)) * 3
    presence = np.linspace(0.05, 0.8, N)
    shares = rng.dirichlet(np.ones(N))
    for t in range(ROUNDS):
        cohort = rng.permutation(np.flatnonzero(rng.random(N) < presence))[:4]
        eta = 0.3 * 0.97**t
        steps = rng.integers(1, 4, size=len(cohort)).astype(float)

        def train(start, client, steps=2.0, eta=eta):
            return start + (1 - (1 - eta) ** steps) * (points[client] - start)

        yield t, cohort, eta, steps, shares, train


def members(t, cohort, eta, steps, shares):
    return Members(cohort, shares[cohort], steps, N, np.ones(len(cohort)), rates=eta * steps, round=t)


@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("weighting", ["count", "size"])
def test_fedvarp_against_its_algorithm(rate, weighting):
    rule = FedVarp(global_rate=rate, weighting=weighting)
    w = expected = np.zeros(P)
    memory = rule.memory(N, w)
    y = np.zeros((N, P))  # everybody's, in units of gradients
    for t, cohort, eta, steps, shares, train in made_up_rounds():
        if not len(cohort):
            continue
        trained = np.array([train(w, i, s) for i, s in zip(cohort, steps, strict=True)])
        delta = (trained - w) / eta
        everybody = shares if weighting == "size" else np.full(N, 1 / N)
        chosen = everybody[cohort] / everybody[cohort].sum()
        v = everybody @ y + chosen @ (delta - y[cohort])
        expected = w + rate * eta * v
        y[cohort] = delta
        combined = rule.combine(w, trained, members(t, cohort, eta, steps, shares), memory)
        np.testing.assert_allclose(combined.model, expected, atol=1e-10)
        np.testing.assert_allclose(combined.weights, rate * chosen)
        w = combined.model
    np.testing.assert_allclose(memory.mean, everybody @ y, atol=1e-10)


def test_fedvarp_is_unbiased_over_all_cohorts_of_a_size():
    """The mean over all cohorts of two is the update of all clients, whatever is remembered."""
    rng = np.random.default_rng(1)
    rule, old = FedVarp(), np.zeros(P)
    updates = rng.normal(size=(N, P))
    before = rng.normal(size=(N, P))
    results = []
    for i in range(N):
        for j in range(i):
            memory = rule.memory(N, old)
            rule.combine(old, before, Members(np.arange(N), np.ones(N), np.ones(N), N, np.ones(N)), memory)
            pair = np.array([i, j])
            results.append(
                rule.combine(old, updates[pair], Members(pair, np.ones(2), np.ones(2), N, np.ones(2)), memory)
            )
    np.testing.assert_allclose(np.mean([combined.model for combined in results], axis=0), updates.mean(0), atol=1e-12)


def test_fedvarp_has_no_variance_if_updates_do_not_change():
    rng = np.random.default_rng(2)
    rule, old, updates = FedVarp(), np.zeros(P), rng.normal(size=(N, P))
    memory = rule.memory(N, old)
    rule.combine(old, updates, Members(np.arange(N), np.ones(N), np.ones(N), N, np.ones(N)), memory)
    for i in range(N):
        one = Members(np.array([i]), np.ones(1), np.ones(1), N, np.ones(1))
        np.testing.assert_allclose(rule.combine(old, updates[[i]], one, memory).model, updates.mean(0), atol=1e-12)


@pytest.mark.parametrize("weighting", ["count", "size"])
def test_mifa_against_its_algorithm(weighting):
    rule = Mifa(weighting=weighting)
    w = np.zeros(P)
    memory = rule.memory(N, w)
    g = np.zeros((N, P))
    for t, cohort, eta, steps, shares, train in made_up_rounds(3):
        if not len(cohort):
            continue
        trained = np.array([train(w, i, s) for i, s in zip(cohort, steps, strict=True)])
        g[cohort] = (w - trained) / eta
        everybody = shares if weighting == "size" else np.full(N, 1 / N)
        expected = w - eta * (everybody @ g)
        combined = rule.combine(w, trained, members(t, cohort, eta, steps, shares), memory)
        np.testing.assert_allclose(combined.model, expected, atol=1e-10)
        np.testing.assert_allclose(combined.weights, everybody[cohort])
        w = combined.model


@pytest.mark.parametrize("cutoff", [None, 1, 3, 50])
@pytest.mark.parametrize("weighting", ["count", "size"])
def test_fedau_against_its_algorithm(cutoff, weighting):
    """Algorithm 2 updates the intervals of every client in every round; ours only those of participants."""
    rule = FedAu(cutoff=cutoff, weighting=weighting, global_rate=0.7)
    w = np.zeros(P)
    memory = rule.memory(N, w)
    intervals = [[] for _ in range(N)]
    running = np.zeros(N, int)
    for t, cohort, eta, steps, shares, train in made_up_rounds(4):
        omega = np.array([np.mean(of) if of else 1.0 for of in intervals])
        for n in range(N):
            running[n] += 1
            if n in cohort or running[n] == cutoff:
                intervals[n].append(running[n])
                running[n] = 0
        if not len(cohort):
            continue
        trained = np.array([train(w, i, s) for i, s in zip(cohort, steps, strict=True)])
        everybody = shares if weighting == "size" else np.full(N, 1 / N)
        expected = w + 0.7 * sum(everybody[n] * omega[n] * (y - w) for n, y in zip(cohort, trained, strict=True))
        combined = rule.combine(w, trained, members(t, cohort, eta, steps, shares), memory)
        np.testing.assert_allclose(combined.model, expected, atol=1e-10)
        np.testing.assert_allclose(combined.weights, 0.7 * everybody[cohort] * omega[cohort])
        w = combined.model
    assert {len(of) for of in intervals} != {0}


def twice(updates, **more):
    """Client 2 answers twice in one buffer, client 0 once in between; four clients share the samples equally."""
    members = Members(np.array([2, 0, 2]), np.full(3, 0.25), np.ones(3), 4, np.ones(3), **more)
    return np.array(updates, np.float64)[:, None], members


@pytest.mark.parametrize("rule", [FedVarp(), Mifa()])
def test_the_newest_of_two_updates_of_a_client_is_remembered(rule):
    old = np.zeros(1)
    memory = rule.memory(4, old)
    for updates in ([1.0, 5.0, 3.0], [3.0, 5.0, 1.0], [7.0, 1.0, 2.0]):
        combined = rule.combine(old, *twice(updates), memory)
        np.testing.assert_allclose(memory.mean, (updates[2] + updates[1]) / 4, rtol=1e-12)
        if isinstance(rule, Mifa):
            np.testing.assert_allclose(combined.model, memory.mean)


def test_fedvarp_counts_both_updates_of_a_client_as_two_draws():
    rule, old = FedVarp(), np.zeros(1)
    memory = rule.memory(4, old)
    rule.combine(old, *twice([1.0, 5.0, 3.0]), memory)  # remembers 3 and 5
    model = rule.combine(old, *twice([4.0, 6.0, 2.0]), memory).model
    np.testing.assert_allclose(model, (3 + 5) / 4 + ((4 - 3) + (6 - 5) + (2 - 3)) / 3)


@pytest.mark.parametrize("rule", [FedVarp(), Mifa()])
def test_a_stale_update_is_divided_by_the_learning_rate_it_was_made_with(rule):
    """The client began two models ago, when the rate was 0.4; it is 0.1 now."""
    old = np.zeros(1)
    memory = rule.memory(2, old)
    stale = Members(
        np.array([1]), np.ones(1) / 2, np.full(1, 3.0), 2, np.ones(1),
        rates=np.full(1, 1.2), round=2, staleness=np.full(1, 2.0), decay=np.full(1, 0.25),
    )  # fmt: skip
    model = rule.combine(old, np.array([[0.8]]), stale, memory).model
    np.testing.assert_allclose(memory.mean, 0.8 / 0.4 / 2)
    np.testing.assert_allclose(model, 0.1 * 0.8 / 0.4 / (1 if isinstance(rule, FedVarp) else 2))


def test_fedau_counts_a_client_once_however_often_it_answers():
    rule, old = FedAu(cutoff=None), np.zeros(1)
    memory = rule.memory(4, old)
    combined = rule.combine(old, *twice([1.0, 5.0, 3.0]), memory)
    np.testing.assert_allclose(combined.model, (5 + (1 + 3) / 2) / 4)
    np.testing.assert_allclose(combined.weights, [0.125, 0.25, 0.125])


def test_fedau_weights_approach_the_inverse_participation_probability():
    rng = np.random.default_rng(5)
    probability = np.array([0.1, 0.2, 0.9])
    memory = FedAu().memory(3, np.zeros(1))
    for t in range(20_000):
        there = np.flatnonzero(rng.random(3) < probability)
        if len(there):
            memory.weights(there, t, None)
    np.testing.assert_allclose(memory.mean * memory.count, memory.start)  # intervals fill the rounds without a gap
    np.testing.assert_allclose(memory.mean, 1 / probability, rtol=0.08)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_fedawe_against_its_algorithm(rate):
    rule = FedAwe(global_rate=rate)
    x = np.linspace(-1, 1, P)
    memory = rule.memory(N, x)
    own = np.tile(x, (N, 1))
    tau = np.full(N, -1)
    for t, cohort, eta, steps, shares, train in made_up_rounds(6):
        if not len(cohort):
            continue
        np.testing.assert_allclose(memory.starts(np.arange(N)), own, rtol=1e-12)
        trained = np.array([train(own[i], i, s, eta / 20) for i, s in zip(cohort, steps, strict=True)])
        echoed = [own[i] - rate * (t - tau[i]) * (own[i] - y) for i, y in zip(cohort, trained, strict=True)]
        expected = np.mean(echoed, axis=0)
        own[cohort] = expected
        tau[cohort] = t
        combined = rule.combine(x, trained, members(t, cohort, eta, steps, shares), memory)
        np.testing.assert_allclose(combined.model, expected, rtol=1e-10)
        x = combined.model


def test_fedawe_gives_all_clients_equally_many_updates():
    """Proposition 1: the echoes of a client that has just taken part add up to the number of rounds."""
    rng = np.random.default_rng(7)
    memory = FedAwe().memory(N, np.zeros(P))
    total = np.zeros(N)
    for t in range(200):
        there = np.flatnonzero(rng.random(N) < np.linspace(0.1, 0.9, N))
        total[there] += memory.missed(there, t)
        memory.absorb(there, t, np.zeros(P))
        assert (total[there] == t + 1).all()


def test_fedawe_keeps_a_copy_of_the_first_model():
    first = np.zeros(2)
    memory = FedAwe().memory(3, first)
    first += 1.0
    np.testing.assert_array_equal(memory.starts(np.array([0])), [[0.0, 0.0]])


@pytest.mark.parametrize("rule", [FedVarp(), Mifa(), FedAu(), FedAwe()])
def test_the_memory_of_another_aggregator_is_an_error(rule):
    other = (FedAu() if not isinstance(rule, FedAu) else Mifa()).memory(3, np.zeros(P))
    one = Members(np.array([0]), np.ones(1), np.ones(1), 3, np.ones(1))
    with pytest.raises(InputError, match="memory"):
        rule.combine(np.zeros(P), np.ones((1, P)), one, other)

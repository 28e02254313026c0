"""Attacks that really run: what S reveals, which observers must collude, and what noise prevents."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from flint import fmpz_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.core.errors import InputError
from fedcohort.privacy.noise import GeometricNoise, fit_rows
from fedcohort_bench.privacy.attacks import (
    RecoveredCounts,
    exact,
    from_factor,
    from_products,
    from_sybils,
    guess_bound,
    name_classes,
    reduced_basis,
    share_error,
    shares_by_moments,
)


def dirichlet(n: int, classes: int, seed: int, alpha: float = 0.3) -> Any:
    rng = np.random.default_rng(seed)
    return np.array(
        [rng.multinomial(int(rng.integers(30, 200)), rng.dirichlet(np.full(classes, alpha))) for _ in range(n)]
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_reduced_basis_generates_the_same_lattice(dimension: int, vectors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = rng.integers(-6, 7, (vectors, dimension))
    coefficients, gram = reduced_basis(fmpz_mat((given_ @ given_.T).tolist()))
    basis = np.array(coefficients.tolist(), np.int64).reshape(-1, vectors) @ given_
    assert np.array_equal(basis @ basis.T, np.array(gram.tolist(), np.int64).reshape(len(basis), len(basis)))
    assert len(basis) == np.linalg.matrix_rank(given_)
    if len(basis):
        # Every given vector is an integer combination of the basis, so the lattices are the same.
        combination = np.linalg.lstsq(basis.T.astype(float), given_.T.astype(float), rcond=None)[0]
        assert np.allclose(combination, np.rint(combination), atol=1e-6)
        # LLL's promise: the first vector is at most 2^((r-1)/2) times the shortest. Brute force over small ones.
        box = itertools.product(range(-3, 4), repeat=len(basis))
        shortest = min(float(v @ v) for c in box if any(c) for v in [np.array(c) @ basis])
        assert basis[0] @ basis[0] <= 2 ** (len(basis) - 1) * shortest + 1e-9


def sized(sizes: Any, classes: int, seed: int, alpha: float = 0.3) -> Any:
    rng = np.random.default_rng(seed)
    return np.array([rng.multinomial(int(q), rng.dirichlet(np.full(classes, alpha))) for q in sizes])


def shards(counts: list[int]) -> Any:
    """Each of 50 clients has two of ten classes, with this many samples of each."""
    rng = np.random.default_rng(5)
    return np.array([np.array(counts) @ np.eye(10, dtype=int)[rng.permutation(10)[:2]] for _ in range(50)])


FEDERATIONS = {
    "dirichlet": dirichlet(40, 10, 0),
    "dense": np.random.default_rng(1).integers(0, 1000, (25, 10)),
    "one class, one size": np.eye(10, dtype=int)[np.arange(30) % 10] * 50,
    "one class, sizes": np.eye(5, dtype=int)[np.arange(12) % 5] * np.arange(1, 13)[:, None],
    # Sizes with a common factor: no class axis is in the lattice of the counts.
    "equal sizes": sized([100] * 40, 10, 0),
    "equal sizes, a prime": sized([97] * 40, 10, 1),
    "equal sizes, sparse": sized([600] * 40, 10, 2, alpha=0.1),
    "even sizes": sized(2 * np.random.default_rng(3).integers(15, 100, 40), 10, 3),
    "sizes by six": sized(6 * np.random.default_rng(4).integers(5, 40, 40), 10, 4),
    "equal sizes, two classes": sized([50] * 12, 2, 5),
    "equal sizes, twenty classes": sized([100] * 50, 20, 6),
    "equal sizes, few clients": sized([100] * 13, 10, 7),
    "equal sizes, a class nobody has": np.pad(sized([60] * 30, 6, 8), ((0, 0), (0, 2))),
    # Counts with a common factor, too.
    "counts by ten": 10 * sized([30] * 40, 10, 9),
    "shards": shards([20, 20]),
    "shards, uneven": shards([20, 30]),
    "one class": np.array([[5, 0], [7, 0]]),
}


@pytest.mark.parametrize("counts", FEDERATIONS.values(), ids=FEDERATIONS)
def test_products_alone_give_everybody_away(counts: Any) -> None:
    found = from_products(counts @ counts.T, counts.sum(axis=1), counts.shape[1])
    assert found is not None and not found.named
    assert exact(found, counts).all()
    assert share_error(found, counts).max() < 1e-9


def test_one_known_client_gives_the_names() -> None:
    counts = dirichlet(30, 6, 3)
    counts[4] = [1, 2, 3, 4, 5, 6]
    found = from_products(counts @ counts.T, counts.sum(axis=1), 6)
    assert found is not None
    named = name_classes(found, {4: counts[4]})
    assert named.named and np.array_equal(named.counts, counts)
    alike = name_classes(found, {4: [7, 7, 7, 7, 7, 7]})  # these counts do not tell classes apart
    assert not alike.named


def test_too_few_clients_do_not_tell() -> None:
    counts = np.array([[9, 4, 1], [2, 7, 7]])
    assert from_products(counts @ counts.T, counts.sum(axis=1), 3) is None
    with pytest.raises(InputError, match="N sizes"):
        from_products(np.eye(3), [1, 2], 3)


def test_sybils_solve_one_linear_system() -> None:
    counts = dirichlet(50, 10, 5)
    sybils = 60 * np.eye(10, dtype=int)
    everyone = np.vstack([counts, sybils])
    gram = everyone @ everyone.T
    found = from_sybils(gram[50:, :50], sybils)
    assert found.named and exact(found, counts).all()
    fewer = from_sybils(gram[50:59, :50], sybils[:9])  # nine of ten: the tenth class remains unknown
    assert exact(fewer, counts).mean() < 0.9
    assert np.allclose(fewer.counts[:, :9], counts[:, :9])


def test_noise_stops_the_lattice_and_the_sybils_within_its_bound() -> None:
    """Under epsilon-DP, nobody can tell two neighbours apart more often than the bound; without noise, always."""
    epsilon, trials = 1.0, 1500
    rng = np.random.default_rng(7)
    noise = GeometricNoise(epsilon=epsilon)
    a, b = np.array([20, 10, 5]), np.array([19, 11, 5])  # one sample has another label
    sybils = 30 * np.eye(3, dtype=int)
    right = plain = 0
    for trial in range(trials):
        truth = a if trial % 2 else b
        seen = noise.simulate(truth, rng)
        # The server computes S from the noisy counts, and the sybils solve for them.
        found = from_sybils(sybils @ seen, sybils).counts.reshape(-1)
        assert np.allclose(found, seen)
        # The best possible guess: the likelihood of both neighbours under two-sided geometric noise.
        right += (np.abs(found - a).sum() < np.abs(found - b).sum()) == bool(trial % 2)
        exactly = from_sybils(sybils @ truth, sybils).counts.reshape(-1)
        plain += np.allclose(exactly, a) == bool(trial % 2)
    assert plain == trials
    slack = 3 * np.sqrt(0.25 / trials)
    assert right / trials <= guess_bound(epsilon) + slack
    assert right / trials > 0.55  # the attack is not a straw man
    counts = dirichlet(40, 10, 8)
    seen = np.array([noise.simulate(c, rng) for c in counts])
    found = from_products(seen @ seen.T, counts.sum(axis=1), 10)
    assert found is None or not exact(found, counts).any()


def test_factor_attack_beats_ignorance_when_products_are_blurred() -> None:
    counts = dirichlet(60, 5, 9, alpha=0.2)
    rng = np.random.default_rng(1)
    gram = counts @ counts.T + rng.normal(size=(60, 60)) * 30
    found = from_factor(gram, counts.sum(axis=1), 5, rng, tries=4, steps=150)
    ignorance = RecoveredCounts(np.ones((60, 5)), named=True)
    assert share_error(found, counts).mean() < 0.3 * share_error(ignorance, counts).mean()


def test_errors_are_distances_of_shares() -> None:
    truth = np.array([[10, 0], [0, 10]])
    assert share_error(RecoveredCounts(np.array([[0.0, 5.0], [5.0, 0.0]]), named=True), truth).tolist() == [1.0, 1.0]
    assert share_error(RecoveredCounts(np.array([[0.0, 5.0], [5.0, 0.0]]), named=False), truth).tolist() == [0.0, 0.0]
    assert share_error(RecoveredCounts(np.zeros((2, 2)), named=True), truth).tolist() == [0.5, 0.5]


# -- what gradient descent really does to a bias -----------------------------------------------------------------------


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def one_step(rng, counts, classes, features=5, rate=0.1):
    """Bias update of one full-batch step of softmax regression, by finite differences of the loss, and predictions."""
    weights, bias = rng.normal(size=(features, classes)), rng.normal(size=classes)
    labels = np.repeat(np.arange(classes), counts)
    inputs = rng.normal(size=(len(labels), features)) + labels[:, None]

    def loss(b):
        p = softmax(inputs @ weights + b)
        return -np.log(p[np.arange(len(labels)), labels]).mean()

    h = 1e-5
    gradient = np.array([(loss(bias + h * e) - loss(bias - h * e)) / (2 * h) for e in np.eye(classes)])
    return -rate * gradient, softmax(inputs @ weights + bias)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_moments_are_exact_for_one_step(seed, classes):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, classes)
    update, predictions = one_step(rng, counts, classes)
    shares = counts / counts.sum()
    assert np.allclose(fit_rows(predictions.mean(axis=0) + update[None] / 0.1, np.ones(1))[0], shares, atol=1e-6)


def test_untrained_model_needs_no_predictions():
    # At zero weights every prediction is 1 / B.
    counts = np.array([7, 0, 3])
    update = 0.5 * (counts / counts.sum() - 1 / 3)
    assert np.allclose(shares_by_moments([update], 0.5)[0], [0.7, 0, 0.3])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(1e-3, 2))
def test_estimates_are_always_shares(update, scale):
    found = shares_by_moments([update], scale)
    assert found.shape == (1, len(update)) and (found >= 0).all()
    assert found.sum() == pytest.approx(1.0)

"""Partitions drawn from Dirichlet distributions, against their laws and the papers' numbers."""

import itertools

import numpy as np
import pytest

from fedcohort.core.errors import ScenarioError
from fedcohort.scenario import Scenario, preset
from fedcohort.scenario.dirichlet import (
    ClassHeterogeneity,
    ClientHeterogeneity,
    DirichletLabels,
    DirichletQp,
    MixedHeterogeneity,
    Skewness,
    _sequential_counts,
)
from fedcohort.scenario.partition import Pool

FMNIST = np.repeat(np.arange(10), 6000)
CIFAR = np.repeat(np.arange(10), 5000)


def build(partition, labels, seed=0):
    return Scenario(partition=partition).build(labels, seed=seed)


def shares_of(federation):
    counts = federation.label_counts(part="all").astype(float)
    return counts / counts.sum(axis=1, keepdims=True)


# --- FedCM


@pytest.mark.parametrize("alpha", [0.1, 5.0])
def test_client_heterogeneity_moments(alpha):
    """p_c ~ Dir_K(alpha): mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1) of a client's share of a class."""
    clients = 20
    shares = np.concatenate(
        [
            (
                build(ClientHeterogeneity(clients=clients, alpha=alpha, least=0), CIFAR, seed).label_counts() / 5000
            ).reshape(-1)
            for seed in range(60)
        ]
    )
    mean = 1 / clients
    assert shares.mean() == pytest.approx(mean, abs=1e-12)  # every sample has an owner
    assert shares.var() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.08)


def test_client_heterogeneity_redraws_then_fails():
    labels = np.repeat(np.arange(3), 40)
    federation = build(ClientHeterogeneity(clients=12, alpha=0.3, least=3), labels, seed=1)
    assert federation.sizes.min() >= 3 and federation.sizes.sum() == 120
    assert "repeated" in federation.remarks[0]
    with pytest.raises(ScenarioError, match=r"\d samples in 4 draws; 10 "):
        build(ClientHeterogeneity(clients=12, alpha=0.05, least=10, redraws=3), labels)
    with pytest.raises(ScenarioError, match=r"= 132\b.* 120"):
        build(ClientHeterogeneity(clients=12, least=11), labels)


def test_class_heterogeneity_law_when_nothing_runs_out():
    """q ~ Dir(alpha 1): E q^2 = (alpha + 1) / (B (B alpha + 1)), and n multinomial draws add (1 - sum q^2) / n."""
    alpha, samples = 0.1, 100
    squares = np.concatenate(
        [
            (shares_of(build(ClassHeterogeneity(clients=50, alpha=alpha, samples=samples), CIFAR, seed)) ** 2).sum(
                axis=1
            )
            for seed in range(30)
        ]
    )
    pure = (alpha + 1) / (10 * alpha + 1)
    assert squares.mean() == pytest.approx(pure + (1 - pure) / samples, rel=0.03)


def test_class_heterogeneity_uses_everything_at_full_size():
    federation = preset("fedcm-class-0.1").build(FMNIST, 10, 0)
    assert (federation.sizes == 2750).all()  # (60,000 - 5,000) / 20
    assert len(np.unique(federation.indices)) == 55_000


def one_by_one(pool, shares, size, rng):
    """Draw labels one by one; a class that is used up gets no weight."""
    left = pool.counts.copy()
    counts = np.zeros(shares.shape, dtype=int)
    for k, q in enumerate(shares):
        for _ in range(size):
            weights = np.where(left > 0, q, 0)
            weights = weights if weights.sum() > 0 else left
            c = rng.choice(len(q), p=weights / weights.sum())
            counts[k, c] += 1
            left[c] -= 1
    return counts


def test_batched_draws_have_the_distribution_of_single_draws():
    pool = Pool.of(np.repeat(np.arange(3), [6, 10, 8]))
    shares = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    repeats = 4000
    fast = np.zeros((3, 3))
    slow = np.zeros((3, 3))
    for seed in range(repeats):
        fast += _sequential_counts(pool, shares, 7, np.random.default_rng(seed))
    for seed in range(repeats // 4):
        slow += one_by_one(pool, shares, 7, np.random.default_rng(10_000 + seed))
    # standard error of a mean of counts below 2: about 0.05 for the slow side
    assert fast / repeats == pytest.approx(slow / (repeats // 4), abs=0.15)
    assert (fast.sum(axis=1) == 7 * repeats).all()


def test_a_client_without_remaining_classes_gets_other_samples():
    pool = Pool.of(np.repeat([0, 1], [5, 5]))
    counts = _sequential_counts(pool, np.array([[1.0, 0.0], [1.0, 0.0]]), 5, np.random.default_rng(0))
    assert counts.tolist() == [[5, 0], [0, 5]]


# --- Fed-CBS


def mean_qcid(name, cohort, seeds=8):
    """Mean squared distance of the joint class distribution of random cohorts to the uniform one."""
    rng = np.random.default_rng(0)
    values = []
    for seed in range(seeds):
        counts = preset(name).build(CIFAR, 10, seed).label_counts()
        joint = counts[np.stack([rng.permutation(200)[:cohort] for _ in range(300)])].sum(axis=1)
        values.append((((joint / joint.sum(axis=1, keepdims=True)) - 0.1) ** 2).sum(axis=1).mean())
    return np.mean(values)


@pytest.mark.parametrize(
    ("alpha", "rand", "everybody"), [(0.1, 0.0820, 0.0101), (0.2, 0.0754, 0.0093), (0.5, 0.0587, 0.0072)]
)
def test_random_cohorts_have_the_papers_qcid(alpha, rand, everybody):
    """Fed-CBS, Table 1 on CIFAR-10, columns "rand" (10 clients) and "all" (the 60 available)."""
    assert mean_qcid(f"fedcbs-dir-{alpha:g}-qp", 10) == pytest.approx(rand, abs=0.003)
    assert mean_qcid(f"fedcbs-dir-{alpha:g}-qp", 60) == pytest.approx(everybody, abs=0.0004)
    # equal sizes are less pure when classes run out; alpha per class would give 0.045, 0.030, 0.015
    assert mean_qcid(f"fedcbs-dir-{alpha:g}", 10) == pytest.approx(rand, abs=0.007)


def test_rounded_sizes_leave_no_client_empty():
    for seed in range(10):
        federation = build(DirichletQp(clients=20, alpha=5.0), np.repeat(np.arange(10), 60), seed)
        assert federation.sizes.min() >= 1
        assert federation.label_counts().sum(axis=0).tolist() == [60] * 10


def test_dirichlet_prior_follows_unequal_classes():
    labels = np.repeat(np.arange(2), [9000, 1000])
    mean = np.mean(
        [
            shares_of(build(DirichletLabels(clients=20, alpha=1.0, samples=20), labels, seed))[:, 1].mean()
            for seed in range(100)
        ]
    )
    assert mean == pytest.approx(0.1, abs=0.02)


# --- FedCor


def test_qp_sizes_solve_the_programme_on_both_datasets():
    for labels in (FMNIST, CIFAR):
        for seed in range(3):
            pool = Pool.of(labels)
            part = DirichletQp(clients=100, alpha=0.2).assign(pool, np.random.default_rng(seed))
            sizes = part.traits["exact_size"]
            federation = build(DirichletQp(clients=100, alpha=0.2), labels, seed)
            assert sizes.sum() == pytest.approx(len(labels), abs=1e-6)
            assert sizes.min() >= 1.0
            assert np.abs(np.diff(part.offsets) - sizes).max() < 10  # ten classes are rounded by less than one each
            assert federation.label_counts().sum(axis=0).tolist() == pool.counts.tolist()  # Qx = d, in whole samples
            assert len(np.unique(federation.indices)) == len(labels)
            assert len(np.unique(federation.sizes)) > 5  # unbalanced


def test_qp_distributions_are_dirichlet_of_total_concentration_alpha():
    """q ~ Dir(alpha p): E sum q^2 = (alpha / B + 1) / (alpha + 1); sizes hardly disturb it at 100 clients."""
    squares = np.concatenate(
        [(shares_of(build(DirichletQp(clients=100, alpha=0.2), FMNIST, seed)) ** 2).sum(axis=1) for seed in range(30)]
    )
    assert squares.mean() == pytest.approx((0.02 + 1) / 1.2, rel=0.02)


def test_infeasible_draws_are_redrawn_and_reported():
    labels = np.repeat(np.arange(10), 100)
    remarks = [build(DirichletQp(clients=25, alpha=0.2, redraws=500), labels, seed).remarks for seed in range(8)]
    assert any("no solution of the quadratic programme" in remark for r in remarks for remark in r)
    with pytest.raises(ScenarioError, match=r"6 draws for 5 clients, alpha 0\.2 and 10"):
        build(DirichletQp(clients=5, alpha=0.2, redraws=5), labels)
    with pytest.raises(ScenarioError, match=r"= 2,000\b.* 1,000"):
        build(DirichletQp(clients=10, least=200), labels)


# --- FedACS


@pytest.mark.parametrize(("name", "median", "maximum"), [("fedacs-low", 0.2, 3.0), ("fedacs-high", 0.1, 5.0)])
def test_skewness_environment_is_layered(name, median, maximum):
    federation = preset(name).build(CIFAR, 10, 0)
    beta = np.sort(federation.traits["beta"])
    assert len(federation) == 200 and (federation.sizes == 2000).all()
    assert (beta[:100] > 0).all() and beta[99] <= median < beta[100] and beta[-1] <= maximum
    # uniform in each layer: Kolmogorov distance of 100 draws is below 0.163 with probability 0.99
    grid = (np.arange(100) + 0.5) / 100
    assert np.abs(beta[:100] / median - grid).max() < 0.17
    assert np.abs((beta[100:] - median) / (maximum - median) - grid).max() < 0.17


def test_skewness_falls_with_beta_as_dirichlet_does():
    """Given beta, E sum q^2 = (beta + 1) / (10 beta + 1), plus sampling (1 - .) / 2000."""
    predicted, seen = [], []
    for seed in range(10):
        federation = preset("fedacs-low").build(CIFAR, 10, seed)
        beta = federation.traits["beta"]
        pure = (beta + 1) / (10 * beta + 1)
        predicted.append(pure + (1 - pure) / 2000)
        seen.append((shares_of(federation) ** 2).sum(axis=1))
    predicted, seen = np.concatenate(predicted), np.concatenate(seen)
    for half in (predicted > np.median(predicted), predicted <= np.median(predicted)):
        assert seen[half].mean() == pytest.approx(predicted[half].mean(), rel=0.04)
    assert np.corrcoef(predicted, seen)[0, 1] > 0.8


def test_skewness_draws_with_replacement():
    federation = preset("fedacs-low").build(CIFAR, 10, 0)
    assert len(np.unique(federation.indices)) < len(federation.indices) == 400_000
    one_class = federation.indices[federation.owner == federation.traits["beta"].argmin()]
    assert len(np.unique(one_class)) < 2000


def test_skewness_odd_number_and_bad_layers():
    federation = build(Skewness(clients=7, samples=5), np.repeat(np.arange(4), 10))
    assert (federation.traits["beta"] <= 0.2).sum() == 3
    with pytest.raises(ScenarioError, match=r"median < maximum\. Got 3 and 1"):
        Skewness(median=3.0, maximum=1.0)


def test_groups_of_mixed_heterogeneity_have_equal_sizes_and_their_skew():
    partition = MixedHeterogeneity(clients=50, alphas=(0.001, 100.0), samples=100)
    pool = Pool.of(CIFAR)
    part = partition.assign(pool, np.random.default_rng(0))
    alpha = part.traits["alpha"]
    assert (alpha == 0.001).sum() == (alpha == 100.0).sum() == 25
    largest = np.array(
        [
            np.bincount(pool.labels[part.places[a:b]], minlength=10).max() / 100
            for a, b in itertools.pairwise(part.offsets)
        ]
    )
    assert np.median(largest[alpha == 0.001]) > 0.99
    assert largest[alpha == 100.0].max() < 0.3

"""Noise against its stated distribution and promise, the ledger against its budget."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedcohort.errors import BudgetError, InputError, JournalError, ParameterError
from fedcohort.privacy.ledger import Ledger
from fedcohort.privacy.noise import (
    CountNoise,
    LossNoise,
    Release,
    composed,
    delta_of,
    discrete_gaussian,
    discrete_laplace,
    epsilon_of,
    plausible,
    rho_for,
)


def seeded(seed: int) -> object:
    rng = np.random.default_rng(seed)
    return lambda n: int(rng.integers(n))


def expected(weights: dict[int, float], draws: list[int]) -> float:
    """p-value of a chi-square test of draws against unnormalised weights."""
    total = sum(weights.values())
    keys = [k for k, w in weights.items() if w / total * len(draws) > 8]
    seen = [draws.count(k) for k in keys]
    want = [weights[k] / total * len(draws) for k in keys]
    rest = len(draws) - sum(seen), len(draws) - sum(want)
    seen, want = [*seen, rest[0]], [*want, rest[1]]
    return float(stats.chisquare(seen, np.array(want) * sum(seen) / sum(want)).pvalue)


@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(7, 3)])
def test_laplace_is_exactly_that(scale: Fraction) -> None:
    below = seeded(1)
    draws = [discrete_laplace(scale, below) for _ in range(4000)]
    assert expected({y: math.exp(-abs(y) / scale) for y in range(-80, 81)}, draws) > 1e-3


@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(5), Fraction(131, 10)])
def test_gaussian_is_exactly_that(variance: Fraction) -> None:
    below = seeded(2)
    draws = [discrete_gaussian(variance, below) for _ in range(3000)]
    assert expected({y: math.exp(-y * y / (2 * float(variance))) for y in range(-60, 61)}, draws) > 1e-3


def largest_ratio(noise: CountNoise, p: dict[int, float]) -> float:
    """The largest log-ratio of probabilities of one output over all neighbours: one sample moves to another class."""
    worst = 0.0
    for shift in itertools.product((-1, 0, 1), repeat=2):
        if sorted(shift) not in ([-1, 1], [0, 0]):
            continue
        for y in itertools.product(range(-20, 21), repeat=2):
            a = math.log(p[y[0]]) + math.log(p[y[1]])
            b = math.log(p[y[0] + shift[0]]) + math.log(p[y[1] + shift[1]])
            worst = max(worst, abs(a - b))
    return worst


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_geometric_keeps_its_promise(epsilon: float) -> None:
    """Brute force over all outputs near the counts: no neighbour changes a probability by more than exp(epsilon)."""
    noise = CountNoise(epsilon=epsilon)
    # The deviation of two-sided geometric noise of ratio q is sqrt(2 q) / (1 - q); solved for q.
    variance = noise.deviation**2
    q = (variance + 1 - math.sqrt(2 * variance + 1)) / variance
    p = {y: q ** abs(y) for y in range(-30, 31)}
    ratio = largest_ratio(noise, p)
    assert 0.99 * epsilon < ratio <= epsilon + 1e-12
    assert noise.release.epsilon == pytest.approx(ratio)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (4.0, 1e-6)])
def test_gaussian_keeps_its_promise(epsilon: float, delta: float) -> None:
    """Brute force: the exact delta of the discrete Gaussian at epsilon is below what is stated."""
    noise = CountNoise(epsilon=epsilon, mechanism="gaussian", delta=delta)
    variance = noise.deviation**2
    span = np.arange(-int(12 * noise.deviation) - 12, int(12 * noise.deviation) + 13)
    p = np.exp(-(span**2) / (2 * variance))
    p /= p.sum()
    q = np.exp(-((span - 1) ** 2) / (2 * variance))
    q /= q.sum()
    # Two counts change, by +1 and -1; the second is the first's mirror image.
    joint_p = np.multiply.outer(p, p[::-1])
    joint_q = np.multiply.outer(q, q[::-1])
    exact = float(np.maximum(joint_p - math.exp(epsilon) * joint_q, 0).sum())
    assert exact <= delta
    assert exact > delta / 30  # and not by waste


def test_conversions_agree() -> None:
    for epsilon, delta in itertools.product((0.1, 1.0, 5.0), (1e-3, 1e-8)):
        rho = rho_for(epsilon, delta)
        assert delta_of(rho, epsilon) == pytest.approx(delta, rel=1e-4)
        assert epsilon_of(rho, delta) == pytest.approx(epsilon, rel=1e-4)
        assert epsilon <= rho + 2 * math.sqrt(rho * math.log(1 / delta))


def test_composition_takes_the_better_bound() -> None:
    one = Release.pure("loss", 0.1)
    assert composed([one] * 3, 0.0) == pytest.approx(0.3)
    many = composed([one] * 1000, 1e-6)
    assert many < 100.0 and many == pytest.approx(epsilon_of(1000 * 0.005, 1e-6))
    gaussian = CountNoise(epsilon=1.0, mechanism="gaussian").release
    assert composed([gaussian], 0.0) == math.inf
    assert composed([gaussian], 1e-5) == pytest.approx(1.0, rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-50, 200), min_size=2, max_size=8), st.integers(0, 300))
def test_plausible_counts_are_the_nearest(noisy: list[int], size: int) -> None:
    found = plausible(noisy, size)
    assert (found >= 0).all() and found.sum() == pytest.approx(size)
    distance = float(((found - noisy) ** 2).sum())
    rng = np.random.default_rng(0)
    for _ in range(30):  # nothing else that is possible is nearer
        other = rng.dirichlet(np.ones(len(noisy))) * size
        assert ((other - noisy) ** 2).sum() >= distance - 1e-6


def test_loss_noise_is_clipped_and_stated() -> None:
    noise = LossNoise(epsilon=0.5, bound=2.0)
    losses = np.array([0.1, 0.2, 1e9, np.nan, -3.0])
    draws = [noise.noisy_mean(losses, seeded(i)) for i in range(2000)]
    assert np.median(draws) == pytest.approx((0.1 + 0.2 + 2 + 2 + 0) / 5, abs=0.15)
    assert np.mean(np.abs(np.array(draws) - np.median(draws))) == pytest.approx(2.0 / 5 / 0.5, rel=0.1)
    assert noise.release.epsilon == pytest.approx(0.5)
    assert math.isnan(noise.noisy_mean([]))


def test_ledger_counts_every_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(epsilon=2.0, path=path)
    noise = CountNoise(epsilon=1.0)
    first = ledger.counts([30, 10, 0], noise)
    assert first.sum() == pytest.approx(40) and (first >= 0).all()
    assert np.array_equal(ledger.counts([30, 10, 0], noise), first)  # said again: no news, no price
    assert len(ledger.releases) == 1
    again = Ledger(epsilon=2.0, path=path)  # a restart forgets nothing
    assert np.array_equal(again.counts([30, 10, 0], noise), first)
    again.loss([0.5, 0.5], LossNoise(epsilon=0.25))
    again.loss([0.5, 0.5], LossNoise(epsilon=0.25))  # an answer is a release, even of the same losses
    assert again.spent == pytest.approx(1.5, rel=1e-3)
    with pytest.raises(BudgetError, match="does not cover another release of 'labels'"):
        again.counts([31, 9, 0], noise)  # data that changed is new
    assert len(again.releases) == len(Ledger(epsilon=2.0, path=path).releases) == 3
    again.loss([0.5], LossNoise(epsilon=0.25))  # what is covered still goes
    again.loss([0.5], LossNoise(epsilon=0.25))
    with pytest.raises(BudgetError):
        again.loss([0.5], LossNoise(epsilon=0.25))


def test_ledger_refuses_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"kind": "loss", "eps')
    with pytest.raises(JournalError, match="treated as spent"):
        Ledger(epsilon=1.0, path=path)


def test_bad_input() -> None:
    with pytest.raises(InputError):
        Ledger(epsilon=0.0)
    with pytest.raises(InputError, match="whole counts"):
        CountNoise().noisy([1.5, 2])
    with pytest.raises(ParameterError):
        CountNoise(epsilon=-1.0)
    with pytest.raises(ParameterError):
        CountNoise(mechanism="laplace")

"""Noise has the stated distribution and keeps its promise; the ledger keeps to its budget."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedcohort.core.errors import BudgetError, InputError, JournalError, MissingExtraError, ParameterError
from fedcohort.privacy.ledger import Ledger
from fedcohort.privacy.noise import (
    CountNoise,
    GaussianNoise,
    GeometricNoise,
    LossNoise,
    Release,
    fit_counts,
    total_epsilon,
)


def expected(weights: dict[int, float], draws: list[int]) -> float:
    """p-value of a chi-square test of draws against unnormalised weights."""
    total = sum(weights.values())
    keys = [k for k, w in weights.items() if w / total * len(draws) > 8]
    seen = [draws.count(k) for k in keys]
    want = [weights[k] / total * len(draws) for k in keys]
    rest = len(draws) - sum(seen), len(draws) - sum(want)
    seen, want = [*seen, rest[0]], [*want, rest[1]]
    return float(stats.chisquare(seen, np.array(want) * sum(seen) / sum(want)).pvalue)


GEOMETRIC = {"loud": GeometricNoise(epsilon=4.0), "quiet": GeometricNoise(epsilon=6 / 7)}
GAUSSIAN = {
    "loud": GaussianNoise(epsilon=8.0, delta=1e-2),
    "quiet": GaussianNoise(epsilon=1.5, delta=1e-5),
}


def drawn(noise: CountNoise, by: str, size: int) -> list[int]:
    """Noise on counts of 100, as a client or a simulation draws it."""
    counts = np.full(size, 100)
    noisy = noise.noisy(counts) if by == "a client" else noise.simulate(counts, np.random.default_rng(1))
    return [int(y) for y in noisy - 100]


# A client's randomness cannot be repeated, so a correct distribution fails once in a million runs.
@pytest.mark.parametrize("by", ["a client", "a simulation"])
@pytest.mark.parametrize("loudness", GEOMETRIC)
def test_geometric_noise_has_its_distribution(loudness: str, by: str) -> None:
    noise = GEOMETRIC[loudness]
    draws = drawn(noise, by, 20_000)
    assert expected({y: math.exp(-abs(y) * noise.epsilon / 2) for y in range(-80, 81)}, draws) > 1e-6


@pytest.mark.parametrize("by", ["a client", "a simulation"])
@pytest.mark.parametrize("loudness", GAUSSIAN)
def test_gaussian_noise_has_its_distribution(loudness: str, by: str) -> None:
    noise = GAUSSIAN[loudness]
    draws = drawn(noise, by, 20_000)
    assert expected({y: math.exp(-y * y / (2 * noise.deviation**2)) for y in range(-60, 61)}, draws) > 1e-6


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 7.0])
def test_opendp_states_the_same_price_as_the_ledger(epsilon: float) -> None:
    """One sample with another label: two counts differ by 1 each, or a loss by the whole bound of 2^20 steps."""
    counts, loss = GeometricNoise(epsilon=epsilon), LossNoise(epsilon=epsilon)
    for noise, distance in ((counts, 2), (loss, 1 << 20)):
        price = total_epsilon([noise.release], 0.0)
        assert price <= epsilon
        assert noise.measurement.map(distance) == pytest.approx(price, rel=1e-12)


def test_a_missing_library_is_named_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    ledger = Ledger(epsilon=3.0, path=tmp_path / "ledger")
    with pytest.raises(MissingExtraError, match=r"fedcohort\[dp\]"):
        ledger.counts([3, 4], GeometricNoise())
    with pytest.raises(MissingExtraError, match=r"fedcohort\[dp\]"):
        ledger.loss([0.5], LossNoise())
    assert ledger.releases == ()


def test_a_simulation_draws_the_same_again() -> None:
    for noise in (*GEOMETRIC.values(), *GAUSSIAN.values()):
        first, again, other = (noise.simulate([5, 0, 7], np.random.default_rng(seed)) for seed in (3, 3, 4))
        assert np.array_equal(first, again) and not np.array_equal(first, other)


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
    noise = GeometricNoise(epsilon=epsilon)
    # The deviation of two-sided geometric noise of ratio q is sqrt(2 q) / (1 - q); solved for q.
    variance = noise.deviation**2
    q = (variance + 1 - math.sqrt(2 * variance + 1)) / variance
    p = {y: q ** abs(y) for y in range(-30, 31)}
    ratio = largest_ratio(noise, p)
    assert 0.99 * epsilon < ratio <= epsilon + 1e-12
    assert total_epsilon([noise.release], 0.0) == pytest.approx(ratio)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (4.0, 1e-6)])
def test_gaussian_keeps_its_promise(epsilon: float, delta: float) -> None:
    """Brute force: the exact delta of the discrete Gaussian at epsilon is below what is stated."""
    noise = GaussianNoise(epsilon=epsilon, delta=delta)
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
    assert exact > 0.98 * delta  # and there is no more noise than needed


def exact_delta(one: dict[float, float], times: int, epsilon: float) -> float:
    """The delta at ``epsilon`` of ``times`` independent releases, from the definition.

    ``one`` maps a privacy loss log(p / q) of one release to its probability p; losses of several add up. The smallest
    delta is the sum over all outcomes of max(0, p - exp(epsilon) q).
    """
    total = {0.0: 1.0}
    for _ in range(times):
        grown: dict[float, float] = {}
        for loss, p in total.items():
            for more, q in one.items():
                key = round(loss + more, 9)
                grown[key] = grown.get(key, 0.0) + p * q
        total = grown
    return math.fsum(p * max(0.0, -math.expm1(epsilon - loss)) for loss, p in total.items())


def loss_of(weight: Any, span: int) -> dict[float, float]:
    """The privacy loss of whole-number noise with these weights on a number that may differ by 1."""
    norm = math.fsum(weight(y) for y in range(-span, span + 1))
    found: dict[float, float] = {}
    for y in range(-span, span):
        key = round(math.log(weight(y) / weight(y - 1)), 9)
        found[key] = found.get(key, 0.0) + weight(y) / norm
    return found


@pytest.mark.parametrize(
    ("epsilon", "times", "delta", "stated"), [(0.25, 10, 1e-5, 2.08), (0.5, 20, 1e-5, 7.00), (1.0, 3, 1e-6, 3.0)]
)
def test_releases_of_geometric_counts_add_up_exactly(epsilon: float, times: int, delta: float, stated: float) -> None:
    """Ten of epsilon 0.25 are 2.08 at delta 1e-5; the sum and zCDP both give 2.50."""
    found = total_epsilon([GeometricNoise(epsilon=epsilon).release] * times, delta)
    assert found == pytest.approx(stated, abs=0.005)
    half = loss_of(lambda y: math.exp(-abs(y) * epsilon / 2), 400)  # two counts change in each release
    assert exact_delta(half, 2 * times, found) <= delta * (1 + 1e-3)
    assert exact_delta(half, 2 * times, found - 0.002) > delta


@pytest.mark.parametrize("times", [1, 2])
def test_releases_of_gaussian_counts_add_up_exactly(times: int) -> None:
    noise = GaussianNoise(epsilon=1.0, delta=1e-5)
    found = total_epsilon([noise.release] * times, 1e-5)
    variance = noise.deviation**2
    half = loss_of(lambda y: math.exp(-y * y / (2 * variance)), int(9 * noise.deviation))
    assert exact_delta(half, 2 * times, found) <= 1e-5 * (1 + 1e-3)
    assert exact_delta(half, 2 * times, found - 0.01) > 1e-5
    assert total_epsilon([noise.release] * times, 0.0) == math.inf


def test_different_releases_add_up_exactly() -> None:
    """Counts and losses together, against all outcomes of both."""
    counts, loss = GeometricNoise(epsilon=0.5).release, LossNoise(epsilon=0.25).release
    found = total_epsilon([counts] * 3 + [loss] * 4, 1e-3)
    parts = loss_of(lambda y: math.exp(-abs(y) * 0.25), 400)  # six halves of 0.5 and four of at most 0.25, all alike
    assert exact_delta(parts, 10, found) <= 1e-3 * (1 + 1e-3)
    assert exact_delta(parts, 10, found - 0.002) > 1e-3
    assert total_epsilon([counts] * 3 + [loss] * 4, 0.0) == pytest.approx(2.5)
    assert total_epsilon([], 1e-3) == 0.0


def test_huge_budgets_take_no_huge_tables() -> None:
    assert total_epsilon([Release("loss", 1e4)] * 3, 1e-6) == pytest.approx(3e4, rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-50, 200), min_size=2, max_size=8), st.integers(0, 300))
def test_plausible_counts_are_the_nearest(noisy: list[int], size: int) -> None:
    found = fit_counts(noisy, size)
    assert (found >= 0).all() and found.sum() == pytest.approx(size)
    distance = float(((found - noisy) ** 2).sum())
    rng = np.random.default_rng(0)
    for _ in range(30):  # no other possible counts are nearer
        other = rng.dirichlet(np.ones(len(noisy))) * size
        assert ((other - noisy) ** 2).sum() >= distance - 1e-6


def test_loss_noise_is_clipped_and_stated() -> None:
    noise = LossNoise(epsilon=0.5, bound=2.0)
    losses = np.array([0.1, 0.2, 1e9, np.nan, -3.0])
    draws = [noise.noisy_mean(losses) for _ in range(2000)]
    assert np.median(draws) == pytest.approx((0.1 + 0.2 + 2 + 2 + 0) / 5, abs=0.15)
    assert np.mean(np.abs(np.array(draws) - np.median(draws))) == pytest.approx(2.0 / 5 / 0.5, rel=0.1)
    assert noise.release.epsilon == pytest.approx(0.5)
    assert math.isnan(noise.noisy_mean([]))


def test_ledger_counts_every_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(epsilon=2.0, path=path)
    noise = GeometricNoise(epsilon=1.0)
    first = ledger.counts([30, 10, 0], noise)
    assert first.sum() == pytest.approx(40) and (first >= 0).all()
    assert np.array_equal(ledger.counts([30, 10, 0], noise), first)  # the same answer again, at no cost
    assert len(ledger.releases) == 1
    again = Ledger(epsilon=2.0, path=path)  # a restart forgets nothing
    assert np.array_equal(again.counts([30, 10, 0], noise), first)
    again.loss([0.5, 0.5], LossNoise(epsilon=0.25))
    again.loss([0.5, 0.5], LossNoise(epsilon=0.25))  # an answer is a release, even of the same losses
    assert again.spent == pytest.approx(1.5, rel=1e-3)
    with pytest.raises(BudgetError, match="'labels'"):
        again.counts([30, 10, 0], noise, refresh=True)
    assert len(again.releases) == len(Ledger(epsilon=2.0, path=path).releases) == 3
    again.loss([0.5], LossNoise(epsilon=0.25))  # a release that the budget covers is still possible
    again.loss([0.5], LossNoise(epsilon=0.25))
    with pytest.raises(BudgetError):
        again.loss([0.5], LossNoise(epsilon=0.25))


def test_an_answer_does_not_tell_whether_the_data_changed(tmp_path: Path) -> None:
    """The same question has the same answer and the same price, whether a label changed in between or not."""
    noise = GeometricNoise(epsilon=1.0)
    for now in ([30, 10, 0], [29, 11, 0], [0, 0, 40]):
        ledger = Ledger(epsilon=3.0, path=tmp_path / f"{now[0]}.jsonl")
        first = ledger.counts([30, 10, 0], noise)
        assert np.array_equal(ledger.counts(now, noise), first) and len(ledger.releases) == 1
        ledger.counts(now, noise, refresh=True)
        assert len(ledger.releases) == 2
    grown = ledger.counts([30, 10, 5], noise)  # the size is public, and the answer fits it
    assert grown.sum() == pytest.approx(45) and len(ledger.releases) == 2
    ledger.counts([30, 10, 5], GeometricNoise(epsilon=0.5))  # with other noise, it is another question
    assert len(ledger.releases) == 3


def test_two_objects_share_one_budget(tmp_path: Path) -> None:
    one, two = (Ledger(epsilon=1.0, path=tmp_path / "ledger") for _ in range(2))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "ledger")
    three = Ledger(epsilon=1.0, path=link)
    one.charge(Release("loss", 0.6))
    for other in (two, three):
        with pytest.raises(BudgetError):
            other.charge(Release("loss", 0.6))
        assert other.spent == pytest.approx(0.6)
    said = two.counts([3, 4], GeometricNoise(epsilon=0.4))
    assert np.array_equal(one.counts([3, 4], GeometricNoise(epsilon=0.4)), said)


_SPEND = """
import sys
from fedcohort.core.errors import BudgetError
from fedcohort.privacy.ledger import Ledger
from fedcohort.privacy.noise import Release
ledger = Ledger(epsilon=1.0, path=sys.argv[1])
input()
for _ in range(20):
    try:
        ledger.charge(Release("loss", 0.1))
        print("released")
    except BudgetError:
        pass
"""


def test_processes_share_one_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _SPEND, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = []
    for process in running:  # all have opened it before the first one writes
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        said += process.communicate(timeout=120)[0].split()
        assert process.returncode == 0
    assert len(said) == len(Ledger(epsilon=1.0, path=path).releases) == 10


def test_threads_share_one_budget(tmp_path: Path) -> None:
    for path in (None, tmp_path / "ledger"):
        ledger = Ledger(epsilon=1.0, path=path)
        released: list[int] = []

        def spend(ledger: Ledger = ledger, released: list[int] = released) -> None:
            for _ in range(10):
                with contextlib.suppress(BudgetError):
                    ledger.charge(Release("loss", 0.1))
                    released.append(1)

        threads = [threading.Thread(target=spend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(released) == len(ledger.releases) == 10


def test_a_ledger_is_its_users_alone_and_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    old = os.umask(0)
    try:
        ledger = Ledger(epsilon=3.0, path=path)
        ledger.counts([30, 10, 0], GeometricNoise())
    finally:
        os.umask(old)
    assert {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {"ledger": 0o600, "ledger.lock": 0o600}
    # The files of two clients with different data differ only in what was released.
    files = []
    for counts in ([30, 10, 0], [25, 15, 0]):
        other = tmp_path / f"other{counts[0]}"
        Ledger(epsilon=3.0, path=other).counts(counts, GeometricNoise())
        files.append(re.sub(r'"noisy": \[[^]]*\]', "", other.read_text()))
    assert files[0] == files[1]


def test_a_release_is_on_disk_before_it_leaves(tmp_path: Path) -> None:
    """A client that dies while drawing noise has either spent nothing, or the release is recorded."""
    path = tmp_path / "ledger"
    ledger = Ledger(epsilon=1.0, path=path)

    class DyingCounts(GeometricNoise):
        def noisy(self, counts: Any) -> Any:
            raise KeyboardInterrupt

    class DyingLosses(LossNoise):
        def noisy_mean(self, losses: Any) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.counts([30, 10], DyingCounts(epsilon=1.0))
    assert Ledger(epsilon=1.0, path=path).releases == ()
    with pytest.raises(KeyboardInterrupt):
        ledger.loss([0.5], DyingLosses(epsilon=0.5))
    assert len(Ledger(epsilon=1.0, path=path).releases) == 1


@pytest.mark.parametrize(
    "line", ['{"kind": "labels", "epsilon": 1.0, "rho": 0.5}', '{"of": "5feceb66", "said": [31.5, 8.5, 0.0]}']
)
def test_ledgers_of_version_0_2_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger"
    path.write_text(line)
    with pytest.raises(JournalError, match=r"(?s)0\.2.*spent"):
        Ledger(epsilon=3.0, path=path)
    assert path.read_text() == line


def test_a_ledger_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger(epsilon=1.0, path=path).charge(Release("loss", 0.1))
    path.chmod(0o644)
    assert len(Ledger(epsilon=1.0, path=path).releases) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_ledger_refuses_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"kind": "loss", "eps')
    with pytest.raises(JournalError):
        Ledger(epsilon=1.0, path=path)
    assert path.read_text() == '{"kind": "loss", "eps'
    path.write_text('{"kind": "loss"}')
    with pytest.raises(JournalError):
        Ledger(epsilon=1.0, path=path)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "loss", "epsilon": NaN}',
        '{"kind": "loss", "epsilon": -1.0}',
        '{"kind": "loss", "epsilon": 0}',
        '{"kind": "loss", "epsilon": "1"}',
        '{"kind": "loss", "epsilon": 1e400}',
        '{"kind": "loss", "variance": -4.0, "parts": 2}',
        '{"kind": "loss", "variance": 4.0, "parts": -2}',
        '{"rho": -1, "epsilon": null, "kind": "loss"}',
        "[" * 100_000,
        "5",
        "\udcff",
    ],
)
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_a_ledger_with_a_release_that_cannot_be_is_spent(line: str, delta: float, tmp_path: Path) -> None:
    """NaN would pass every comparison, and numbers below 0 would give budget back."""
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"kind": "loss", "epsilon": 0.1}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(JournalError, match=r"Line 2 .*\n.*spent"):
        Ledger(epsilon=1.0, delta=delta, path=path)


def test_no_release_gives_budget_back() -> None:
    ledger = Ledger(epsilon=1.0)
    for epsilon in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(InputError, match=f"Got {epsilon}"):
            ledger.charge(Release("loss", epsilon))
    with pytest.raises(InputError, match="parts=0"):
        Release("labels", 1.0, parts=0)
    assert ledger.spent == 0


def test_bad_input() -> None:
    with pytest.raises(InputError):
        Ledger(epsilon=0.0)
    with pytest.raises(InputError, match=r"\(2,\).*float64") as caught:
        GeometricNoise().noisy([1.5, 2])
    assert "1.5" not in str(caught.value)  # a client's errors are sent to the server
    with pytest.raises(ParameterError):
        GeometricNoise(epsilon=-1.0)
    with pytest.raises(ParameterError):
        GaussianNoise(delta=1.0)

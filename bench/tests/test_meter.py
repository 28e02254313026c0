"""The meter reports what the attacks found, and its verdicts follow from that."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort_bench.privacy.meter import attack_all


def federation(n: int = 40, classes: int = 5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([rng.multinomial(80, rng.dirichlet(np.full(classes, 0.4))) for _ in range(n)])


def test_every_option_has_findings_and_one_verdict() -> None:
    counts = federation()
    rng = np.random.default_rng(1)
    updates = 0.1 * (counts / counts.sum(axis=1, keepdims=True) - 0.2)
    found = attack_all(counts, epsilons=(0.1, 8.0), coalition=2, updates=updates, step=0.1, rng=rng)
    by = {e.option: e for e in found.exposures}
    assert list(by) == [
        "counts in the clear",
        "encrypted, S at the server",
        "secret rotation",
        "noisy counts, epsilon 0.1",
        "noisy counts, epsilon 8",
        "updates in the clear, labels never asked for",
    ]
    assert all(len(f.error) == 40 for e in found.exposures for f in e.findings)
    encrypted = {f.observer: f for f in by["encrypted, S at the server"].findings}
    assert encrypted["server"].exact_share == 1.0 and not encrypted["server"].named
    assert encrypted["key holder"].exact_share == 1.0
    assert encrypted["server and 2 clients"].exact_share == 1.0 and encrypted["server and 2 clients"].named
    assert encrypted["server and 5 sybils"].exact_share == 1.0 and encrypted["server and 5 sybils"].named
    assert encrypted["2 clients without the server"].exact_share < 0.2
    assert by["encrypted, S at the server"].verdict.startswith("Broken: S alone")
    loud, quiet = (by[f"noisy counts, epsilon {e}"].findings[0] for e in ("0.1", "8"))
    assert quiet.mean_error < loud.mean_error <= 1
    assert loud.exact_share < 0.1
    assert "52%" in by["noisy counts, epsilon 0.1"].verdict
    assert by["updates in the clear, labels never asked for"].findings[0].mean_error < 1e-9
    assert by["updates in the clear, labels never asked for"].verdict.startswith("Moot: shares of 100%")


@pytest.mark.parametrize("factor", [0, 2, 6])
def test_equal_sizes_and_sizes_with_a_common_factor_hide_nothing(factor: int) -> None:
    rng = np.random.default_rng(factor)
    sizes = factor * rng.integers(10, 40, 40) if factor else [100] * 40
    counts = [rng.multinomial(int(q), rng.dirichlet(np.full(10, 0.3))) for q in sizes]
    encrypted = attack_all(counts, rng=rng).exposures[1]
    server = encrypted.findings[0]
    assert (server.observer, server.exact_share, server.named) == ("server", 1.0, False)
    assert "exact counts of 100% of clients" in encrypted.verdict


def test_verdicts_follow_the_numbers() -> None:
    counts = federation(4, 12)  # fewer clients than classes: the lattice tells little
    rng = np.random.default_rng(1)
    noise = rng.normal(size=counts.shape)
    found = {e.option: e for e in attack_all(counts, updates=noise, step=1.0, rng=rng).exposures}
    assert found["encrypted, S at the server"].verdict.startswith("Broken by sybils")
    assert found["updates in the clear, labels never asked for"].verdict.startswith("Little")


def test_bad_input() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="whole"):
        attack_all([[0.5, 1.0]], rng=rng)
    with pytest.raises(InputError, match="1 to 2"):
        attack_all([[1, 2], [3, 4]], coalition=3, rng=rng)

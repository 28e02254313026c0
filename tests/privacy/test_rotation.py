"""A rotation keeps every inner product and hides everything else."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.clients import LabelFactor
from fedcohort.core.errors import CiphertextError, InputError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.privacy.rotation import SecretRotation, unpack_rotated_counts


@pytest.mark.parametrize("classes", [2, 10, 62])
def test_products_survive(classes: int) -> None:
    counts = np.random.default_rng(classes).integers(0, 100_000, (30, classes))
    rotation = SecretRotation.fresh(classes)
    assert np.allclose(rotation.matrix @ rotation.matrix.T, np.eye(classes), atol=1e-12)
    rows = np.array([rotation.rotate(c) for c in counts])
    assert np.allclose(rows @ rows.T, counts @ counts.T, rtol=1e-12)
    assert not np.allclose(np.sort(rows, axis=1), np.sort(counts, axis=1), rtol=1e-3)


def test_the_seed_is_the_secret() -> None:
    one, same, other = (SecretRotation(seed, 5) for seed in (b"a" * 16, b"a" * 16, b"b" * 16))
    assert np.array_equal(one.matrix, same.matrix)
    assert not np.allclose(one.matrix, other.matrix, atol=0.1)
    assert "aaaa" not in repr(one)
    with pytest.raises(InputError, match="16 bytes"):
        SecretRotation(b"short", 5)


def test_rotations_are_uniform() -> None:
    """Every entry of a uniform orthogonal matrix has mean 0 and variance 1 / B."""
    entries = np.array([SecretRotation(i.to_bytes(16, "big"), 4).matrix for i in range(800)])
    assert np.abs(entries.mean(axis=0)).max() < 0.08
    assert np.abs(entries.var(axis=0) - 0.25).max() < 0.05


def test_same_cohorts_as_counts() -> None:
    counts = np.random.default_rng(3).multinomial(60, np.random.default_rng(4).dirichlet(np.full(10, 0.3), 40)[0], 40)
    sizes = counts.sum(axis=1)
    rotation = SecretRotation.fresh(10)
    factor = LabelFactor([rotation.rotate(c) for c in counts], 10)
    cohorts = []
    for labels in (LabelCounts(counts), factor):
        session = Session(create("fedcbs"), ClientTable(sizes=sizes, labels=labels), seed=5)
        picked = []
        for _ in range(30):
            cohort = session.ask(RoundRequest(size=8))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            picked.append(cohort.clients.tolist())
        cohorts.append(picked)
    assert cohorts[0] == cohorts[1]


def test_what_travels_is_checked() -> None:
    rotation = SecretRotation.fresh(3)
    sealed = rotation.seal("anna", [3, 4, 0])
    assert np.allclose(unpack_rotated_counts("anna", sealed, 3, 7), rotation.rotate([3, 4, 0]))
    for size in (4, 100):
        with pytest.raises(CiphertextError, match=f" {size} samples"):
            unpack_rotated_counts("anna", sealed, 3, size)
    with pytest.raises(CiphertextError, match="for client 'anna'"):
        unpack_rotated_counts("ben", sealed, 3, 7)
    with pytest.raises(CiphertextError, match="3 classes"):
        unpack_rotated_counts("anna", sealed, 4, 7)
    with pytest.raises(CiphertextError):
        unpack_rotated_counts("anna", sealed[:-1], 3, 7)
    with pytest.raises(InputError):
        rotation.rotate([-1, 2, 3])
    with pytest.raises(InputError):
        rotation.rotate([np.nan, 2, 3])

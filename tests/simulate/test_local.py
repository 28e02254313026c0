"""Local training: lengths, learning rates and the batch plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.core import rng
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import parameters
from fedcohort.training.local import CROPS, LocalTraining, batch_plan, crop_plan


def brute_force(seed, round, client, n, batch_size, steps):
    """Batch after batch, as the documentation words it."""
    generator = rng.stream(seed, rng.TRAINING, round, client)
    batches = []
    while len(batches) < steps:
        order = generator.permutation(n)
        batches += [order[start : start + batch_size].tolist() for start in range(0, n, batch_size)]
    return batches[:steps]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 30), st.integers(0, 5))
def test_plan_is_what_the_loop_draws(n, batch_size, steps, seed):
    local = LocalTraining(steps=steps, batch_size=batch_size)
    plan = batch_plan(seed, 3, 11, n, local)
    assert plan.indices.shape == (steps, min(batch_size, n))
    got = [row[:count].tolist() for row, count in zip(*plan, strict=True)]
    assert got == brute_force(seed, 3, 11, n, batch_size, steps)
    assert plan.indices.min() >= 0
    assert plan.indices.max() < n


def test_every_epoch_sees_every_sample_once():
    plan = batch_plan(0, 0, 0, 23, LocalTraining(epochs=3, batch_size=10))
    assert plan.counts.tolist() == [10, 10, 3] * 3
    for epoch in range(3):
        rows = zip(plan.indices[3 * epoch : 3 * epoch + 3], plan.counts[:3], strict=True)
        assert sorted(int(i) for row, count in rows for i in row[:count]) == list(range(23))
    assert plan.indices[:3].tolist() != plan.indices[3:6].tolist()


def test_plan_depends_on_seed_round_and_client_and_on_nothing_else():
    local = LocalTraining(steps=4, batch_size=8)
    base = batch_plan(1, 2, 3, 50, local).indices
    assert np.array_equal(base, batch_plan(1, 2, 3, 50, local).indices)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(base, batch_plan(*other, 50, local).indices)
    # More steps go on from where fewer stop.
    assert np.array_equal(base, batch_plan(1, 2, 3, 50, local, steps=9).indices[:4])


def test_crops_have_a_stream_of_their_own():
    local = LocalTraining(steps=40, batch_size=50)
    base = crop_plan(1, 2, 3, batch_plan(1, 2, 3, 50, local).indices.shape)
    assert sorted(set(base.flat)) == list(range(CROPS))  # 2,000 draws of 162
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(base, crop_plan(*other, batch_plan(*other, 50, local).indices.shape))
    more = crop_plan(1, 2, 3, batch_plan(1, 2, 3, 50, local, steps=50).indices.shape)
    assert np.array_equal(base, more[:40])


def test_nothing_to_do():
    local = LocalTraining(epochs=2, batch_size=8)
    for plan in (batch_plan(0, 0, 0, 0, local), batch_plan(0, 0, 0, 9, local, steps=0)):
        assert len(plan.counts) == 0
        assert plan.indices.size == 0


def test_lengths():
    assert LocalTraining(steps=7).steps_for(1) == 7
    assert LocalTraining(epochs=2, batch_size=10).steps_for(21) == 6
    largest = LocalTraining(epochs_of_largest=2, batch_size=10)
    assert largest.steps_for(3, largest=95) == 20
    assert largest.steps_for(0, largest=95) == 0
    with pytest.raises(ParameterError, match="largest"):
        largest.steps_for(3)


def test_learning_rates():
    fedcor = LocalTraining(steps=20, lr=0.005, milestones=(150, 300), milestone_factor=0.5)
    assert [fedcor.lr_at(r) for r in (0, 149, 150, 299, 300)] == [0.005, 0.005, 0.0025, 0.0025, 0.00125]
    assert LocalTraining(steps=1, lr=0.1, lr_decay=0.9).lr_at(2) == pytest.approx(0.081)
    fedacs = LocalTraining(epochs=5, batch_size=400, lr=0.1, lr_decay_epoch=0.9993)
    assert fedacs.lr_at(3, 12, batches_per_epoch=5) == pytest.approx(0.1 * 0.9993 ** (3 * 5 + 2))
    schedule = fedacs.lr_schedule(3, 25, 5)
    assert schedule == pytest.approx([fedacs.lr_at(3, step, 5) for step in range(25)])
    assert fedcor.lr_schedule(160, 3) == pytest.approx([0.0025] * 3)


@pytest.mark.parametrize("given", [{}, {"steps": 3, "epochs": 1}, {"epochs": 1, "epochs_of_largest": 2}])
def test_exactly_one_length(given):
    with pytest.raises(ParameterError, match="exactly one"):
        LocalTraining(**given)


def test_decay_per_epoch_needs_epochs():
    with pytest.raises(ParameterError, match="lr_decay_epoch"):
        LocalTraining(steps=3, lr_decay_epoch=0.9)


@pytest.mark.parametrize("info", parameters(LocalTraining), ids=lambda info: info.name)
def test_bad_values_are_refused(info):
    for bad in info.constraint.bad_values():
        given = {"steps": 5, info.name: bad}
        if info.name in ("epochs", "epochs_of_largest"):
            del given["steps"]
        with pytest.raises(ParameterError, match=info.name):
            LocalTraining(**given)

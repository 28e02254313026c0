"""FedBuff, FedAsync and FedAvg with staleness against their papers' loops, and with server optimisers."""

import math

import numpy as np
import pytest

from fedcohort.training.aggregators import (
    AGGREGATORS,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedAvgStale,
    FedBuff,
    Members,
)

TAU = np.array([0.0, 2.0, 7.0])
SHARE = np.array([0.1, 0.3, 0.2])
OLD = np.array([1.0, -2.0])
MODELS = np.array([[2.0, 0.0], [0.0, 1.0], [5.0, -3.0]])


def members(staleness=TAU, **more):
    return Members(np.arange(3), SHARE, np.ones(3), 10, np.ones(3), staleness=staleness, **more)


def test_fedbuff_is_algorithm_1():
    rule = FedBuff(global_rate=0.7, exponent=0.5)
    buffer = np.zeros(2)
    for model, tau in zip(MODELS, TAU, strict=True):  # models are the updates on top of the newest model
        buffer += (model - OLD) / math.sqrt(1 + tau)
    result = rule.combine(OLD, MODELS, members()).model
    assert result == pytest.approx(OLD + 0.7 * buffer / 3)


@pytest.mark.parametrize("discount", ["constant", "polynomial", "hinge"])
def test_fedasync_mixes_in_one_model_after_another(discount):
    rule = FedAsync(alpha=0.6, discount=discount, exponent=0.5, slope=10.0, limit=4.0)
    model = OLD
    for theirs, tau in zip(MODELS, TAU, strict=True):
        s = {
            "constant": 1.0,
            "polynomial": (tau + 1) ** -0.5,
            "hinge": 1.0 if tau <= 4 else 1 / (10 * (tau - 4) + 1),
        }[discount]
        model = (1 - 0.6 * s) * model + 0.6 * s * theirs
    assert rule.combine(OLD, MODELS, members()).model == pytest.approx(model)
    assert rule.mixes_models and not FedBuff().mixes_models


def test_fedavg_by_size_and_staleness():
    raw = SHARE * (1 + TAU) ** -0.5
    assert FedAvgStale().combine(OLD, MODELS, members()).model == pytest.approx(raw @ MODELS / raw.sum())
    assert FedAvgStale(exponent=0.0).mix(members()).weights.tolist() == FedAvg().mix(members()).weights.tolist()


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])
def test_server_optimisers_discount_stale_updates(name):
    plain, discounting = AGGREGATORS.create(name), AGGREGATORS.create(name, exponent=0.5)
    raw = SHARE * (1 + TAU) ** -0.5
    result = discounting.combine(OLD, MODELS, members(), discounting.memory(3, OLD))
    assert result.weights == pytest.approx(raw / raw.sum())
    # One client with the discounted mean update has the same effect.
    mean = (raw / raw.sum()) @ MODELS
    alone = Members(np.arange(1), np.ones(1), np.ones(1), 10, np.ones(1))
    assert result.model == pytest.approx(plain.combine(OLD, mean[None], alone, plain.memory(3, OLD)).model)


def test_rounds_have_no_staleness():
    fresh = Members(np.arange(3), SHARE, np.ones(3), 10, np.ones(3))
    assert fresh.staleness.tolist() == [0, 0, 0]
    for rule in (FedAvgM(exponent=0.9), FedAdam(exponent=0.9)):
        bare = type(rule)()
        ours = rule.combine(OLD, MODELS, fresh, rule.memory(3, OLD)).model
        assert ours == pytest.approx(bare.combine(OLD, MODELS, fresh, bare.memory(3, OLD)).model, rel=1e-15)

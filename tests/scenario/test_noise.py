import numpy as np
import pytest

from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.params import parameters
from fedcohort.scenario import Scenario, preset
from fedcohort.scenario.classwise import Iid
from fedcohort.scenario.noise import LabelNoise

CIFAR = np.repeat(np.arange(10), 5000)


def noisy(level, *, clients=100, seed=0, **more):
    return Scenario(partition=Iid(clients=clients), noise=LabelNoise(level=level, **more)).build(CIFAR, seed=seed)


@pytest.mark.parametrize("level", [0.15, 0.4])
def test_the_mean_and_spread_of_the_rates_are_those_of_beta(level):
    federation = noisy(level, clients=5000, concentration=2.0)
    drawn = federation.traits["noise_drawn"]
    assert drawn.mean() == pytest.approx(level, abs=0.015)
    assert drawn.var() == pytest.approx(level * (1 - level) / 3.0, rel=0.07)  # a + b + 1 = 3
    assert federation.noise_rate.mean() == pytest.approx(drawn.mean(), abs=0.01)


def test_exact_rate_is_what_was_changed():
    federation = noisy(0.3)
    changed = federation.labels != federation.true_labels
    for k in range(len(federation)):
        own = changed[federation.offsets[k] : federation.offsets[k + 1]]
        assert own.mean() == pytest.approx(federation.noise_rate[k], abs=1e-12)
    assert np.abs(federation.noise_rate - federation.traits["noise_drawn"]).max() <= 1 / 500


def test_flips_are_symmetric():
    federation = noisy(0.4, clients=10, concentration=50.0)
    moved = np.zeros((10, 10))
    np.add.at(moved, (federation.true_labels, federation.labels), 1)
    off = moved[~np.eye(10, dtype=bool)]
    chi_square = ((off - off.mean()) ** 2 / off.mean()).sum()
    assert chi_square < 150  # 89 degrees of freedom; 99.99% quantile 146


def test_validation_samples_are_as_noisy_as_training_samples():
    federation = Scenario(partition=Iid(clients=50), noise=LabelNoise(level=0.4), validation=0.3).build(CIFAR, seed=1)
    wrong = federation.labels != federation.true_labels
    held_out = federation.is_validation()
    assert wrong[held_out].mean() == pytest.approx(wrong[~held_out].mean(), abs=0.02)


def test_two_readings_of_the_level():
    assert LabelNoise(level=0.25, reading="ratio").mean == pytest.approx(0.2)
    a, b = LabelNoise(level=0.25, reading="ratio").beta()
    assert a / b == pytest.approx(0.25)
    a, b = LabelNoise(level=0.25).beta()
    assert a / (a + b) == pytest.approx(0.25)


def test_no_noise_changes_nothing():
    federation = noisy(0.0)
    assert not federation.noise_rate.any() and "noise_drawn" not in federation.traits
    assert np.array_equal(federation.labels, federation.true_labels)


def test_noise_does_not_move_samples():
    assert np.array_equal(noisy(0.0).indices, noisy(0.4).indices)


def test_preset_level():
    rates = [preset("flash-noise").build(CIFAR, 10, seed).noise_rate.mean() for seed in range(40)]
    assert np.mean(rates) == pytest.approx(0.15, abs=0.012)


def test_bad_noise():
    for info in parameters(LabelNoise):
        for bad in info.constraint.bad_values():
            with pytest.raises(ParameterError, match=f"'{info.name}'"):
                LabelNoise(**{info.name: bad})
    with pytest.raises(ParameterError, match=r"\[0, 1\). Got 1.0"):
        LabelNoise(level=1.0)
    with pytest.raises(ScenarioError, match="class"):
        Scenario(partition=Iid(clients=1), noise=LabelNoise(level=0.1)).build(np.zeros(5, int))

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.params import parameters
from fedcohort.scenario import AVAILABILITIES, Federation, Scenario, preset
from fedcohort.scenario.availability import Bernoulli, ClassBiased, DayNight, UniformShare
from fedcohort.scenario.classwise import Iid

CIFAR = np.repeat(np.arange(10), 5000)


def federation_of(clients, classes=10):
    return Federation.of([[k] for k in range(clients)], labels=np.arange(clients) % classes, classes=classes)


@pytest.mark.parametrize("name", AVAILABILITIES.names())
def test_masks_are_functions_of_seed_and_round(name):
    federation, availability = federation_of(200), AVAILABILITIES.create(name)
    masks = {(s, t): availability.mask(federation, seed=s, round=t) for s in (0, 1) for t in range(30)}
    assert all(mask.shape == (200,) and mask.dtype == bool for mask in masks.values())
    again = availability.mask(federation, seed=1, round=3)
    assert np.array_equal(masks[1, 3], again)
    if name != "always":
        assert any(not np.array_equal(masks[0, 0], masks[0, t]) for t in range(1, 30))
        assert any(not np.array_equal(masks[0, t], masks[1, t]) for t in range(30))


@pytest.mark.parametrize(("name", "frequent", "rare"), [("fedcbs-case2-3", 9, 3), ("fedcbs-case2-5", 10, 2)])
def test_case_2_has_the_papers_numbers_in_every_round(name, frequent, rare):
    scenario = preset(name)
    federation = scenario.build(CIFAR, 10, 0)
    assert np.bincount(federation.main_class).tolist() == [20] * 10
    for t in range(25):
        mask = scenario.available(federation, seed=0, round=t)
        assert mask.sum() == 60
        assert np.bincount(federation.main_class[mask]).tolist() == [frequent] * 5 + [rare] * 5
    # Table 3, column "all": the QCID of the 60 available clients, exactly
    shares = federation.label_counts()[mask].sum(axis=0) / federation.label_counts()[mask].sum()
    assert ((shares - 0.1) ** 2).sum() == pytest.approx({3: 0.0250, 2: 0.0444}[rare], abs=5e-5)


def test_case_2_picks_every_client_of_a_class_equally_often():
    scenario = preset("fedcbs-case2-3")
    federation = scenario.build(CIFAR, 10, 0)
    often = sum(scenario.available(federation, seed=0, round=t).astype(int) for t in range(600))
    rate = np.where(federation.main_class < 5, 9 / 20, 3 / 20)
    z = (often - 600 * rate) / np.sqrt(600 * rate * (1 - rate))
    assert np.abs(z).max() < 4.5


def test_impossible_class_bias():
    with pytest.raises(ScenarioError, match="multiple of"):
        ClassBiased(share=0.31).mask(federation_of(200), seed=0, round=0)
    few = Federation.of([[k] for k in range(20)], labels=[0] * 19 + [1], classes=2)
    with pytest.raises(ScenarioError, match=r"4 clients of class 1\b.* 1\b"):
        ClassBiased(share=0.4, ratio=1).mask(few, seed=0, round=0)


def test_case_1_availability():
    scenario = preset("fedcbs-case1-3")
    federation = scenario.build(CIFAR, 10, 0)
    assert scenario.available(federation, seed=0, round=0).sum() == 36


def test_uniform_share_is_exact_and_uniform():
    federation = federation_of(50)
    often = np.zeros(50)
    for t in range(2000):
        mask = UniformShare(share=0.3).mask(federation, seed=4, round=t)
        assert mask.sum() == 15
        often += mask
    assert np.abs(often / 2000 - 0.3).max() < 4.5 * np.sqrt(0.3 * 0.7 / 2000)
    assert UniformShare(share=0.001).mask(federation, seed=0, round=0).sum() == 1


def test_bernoulli_with_equal_drawn_and_listed_rates():
    federation = federation_of(300)
    often = np.mean([Bernoulli(probability=0.4).mask(federation, seed=0, round=t) for t in range(300)], axis=0)
    assert often.mean() == pytest.approx(0.4, abs=0.01) and often.std() < 0.04
    spread = Bernoulli(probability=0.4, concentration=4.0)
    rates = spread.rates(300, seed=0)
    assert rates.mean() == pytest.approx(0.4, abs=0.05)
    assert rates.var() == pytest.approx(0.24 / 5, rel=0.25)
    often = np.mean([spread.mask(federation, seed=0, round=t) for t in range(400)], axis=0)
    assert np.corrcoef(often, rates)[0, 1] > 0.98
    with pytest.raises(ScenarioError, match=r"2 .*300 "):
        Bernoulli(probabilities=(0.1, 0.2)).mask(federation, seed=0, round=0)


def test_day_and_night_follow_each_clients_clock():
    federation = federation_of(400)
    day = DayNight(period=24, awake=0.25)
    masks = np.array([day.mask(federation, seed=0, round=t) for t in range(48)])
    assert np.array_equal(masks[:24], masks[24:])
    assert (masks[:24].sum(axis=0) == 6).all()  # a quarter of 24 rounds
    changes = (masks[:24] != np.roll(masks[:24], 1, axis=0)).sum(axis=0)
    assert (changes == 2).all()  # one morning and one evening
    assert masks.mean(axis=1).std() < 0.04
    together = np.array([DayNight(period=8, zones=1).mask(federation, seed=0, round=t) for t in range(8)])
    assert set(together.sum(axis=1)) == {0, 400}
    zones = DayNight(zones=3).mornings(400, seed=0)
    assert set(np.round(zones, 6)) == {0.0, 0.333333, 0.666667}


def test_bad_parameters():
    for name in AVAILABILITIES.names():
        for info in parameters(AVAILABILITIES.get(name)):
            for bad in info.constraint.bad_values():
                with pytest.raises(ParameterError, match=f"'{info.name}'"):
                    AVAILABILITIES.create(name, **{info.name: bad})


def test_availability_does_not_change_the_data():
    plain, biased = (
        Scenario(partition=Iid(clients=10)),
        Scenario(partition=Iid(clients=10), availability=UniformShare(share=0.5)),
    )
    assert np.array_equal(plain.build(CIFAR, seed=1).indices, biased.build(CIFAR, seed=1).indices)

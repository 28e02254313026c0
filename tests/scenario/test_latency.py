import time

import numpy as np
import pytest
from scipy import stats

from fedcohort.core.errors import ParameterError
from fedcohort.core.params import parameters
from fedcohort.scenario import LATENCIES
from fedcohort.scenario.counter_rng import uniforms
from fedcohort.scenario.latency import NoLatency, ShiftedExponential

SIZES = np.full(20_000, 600)
EVERYBODY = np.arange(20_000)


@pytest.mark.parametrize("straggling", [1.0, 10.0, 100.0])
def test_shifted_exponential_law(straggling):
    """T - alpha N ~ Exp with mean lambda N, in milliseconds (FLASH, Section 3.4)."""
    durations = ShiftedExponential(straggling=straggling).durations(SIZES, EVERYBODY, seed=0, round=3)
    excess = durations - 0.6
    assert excess.min() >= 0
    assert stats.kstest(excess, stats.expon(scale=0.6 * straggling).cdf).pvalue > 1e-3


def test_the_duration_of_a_client_does_not_depend_on_others():
    latency = ShiftedExponential(spread=0.5)
    everybody = latency.durations(SIZES, EVERYBODY, seed=5, round=9)
    cohort = np.array([17, 3, 19_999])
    assert np.array_equal(latency.durations(SIZES, cohort, seed=5, round=9), everybody[cohort])


def test_rounds_and_seeds_differ_and_work_scales():
    latency = ShiftedExponential()
    one = latency.durations(SIZES, EVERYBODY, seed=0, round=0)
    assert abs(np.corrcoef(one, latency.durations(SIZES, EVERYBODY, seed=0, round=1))[0, 1]) < 0.03
    assert abs(np.corrcoef(one, latency.durations(SIZES, EVERYBODY, seed=1, round=0))[0, 1]) < 0.03
    half = latency.durations(SIZES, EVERYBODY[:4], seed=0, round=0, work=np.array([0.5, 1.0, 2.0, 0.0]))
    assert half == pytest.approx(one[:4] * [0.5, 1.0, 2.0, 0.0])


def test_speeds_are_constant_and_have_mean_one():
    latency = ShiftedExponential(spread=0.5)
    slowness = latency.slowness(EVERYBODY, seed=2)
    assert slowness.mean() == pytest.approx(1.0, abs=0.02)
    assert np.log(slowness).std() == pytest.approx(0.5, abs=0.01)
    plain = ShiftedExponential()
    for t in (0, 8):
        ratio = latency.durations(SIZES, EVERYBODY, seed=2, round=t) / plain.durations(
            SIZES, EVERYBODY, seed=2, round=t
        )
        assert ratio == pytest.approx(slowness)


def test_more_samples_take_longer():
    sizes = np.array([100, 1000])
    durations = np.mean(
        [ShiftedExponential().durations(sizes, np.arange(2), seed=s, round=0) for s in range(400)], axis=0
    )
    assert durations == pytest.approx([0.2, 2.0], rel=0.1)


@pytest.mark.clock
def test_cost_does_not_grow_with_idle_clients():
    latency, cohort = ShiftedExponential(), np.arange(10)

    def seconds(clients):
        sizes = np.full(clients, 100)
        best = 1e9
        for _ in range(5):
            start = time.perf_counter()
            for t in range(50):
                latency.durations(sizes, cohort, seed=0, round=t)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(1_000_000) < 3 * seconds(100)


def test_uniforms_by_position_are_uniform_and_independent():
    draws = np.stack([uniforms(3, "latency", np.arange(2000), t) for t in range(50)])
    assert draws.min() >= 0 and draws.max() < 1
    assert stats.kstest(draws.reshape(-1), "uniform").pvalue > 1e-3
    assert stats.kstest(draws[:, 7], "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(draws) - np.eye(50)).max() < 0.12
    neighbours = np.corrcoef(draws[:, :-1].reshape(-1), draws[:, 1:].reshape(-1))[0, 1]
    assert abs(neighbours) < 0.02


def test_none_and_bad_parameters():
    assert NoLatency().durations(SIZES, np.array([1, 2]), seed=0, round=0).tolist() == [0.0, 0.0]
    assert LATENCIES.names() == ["none", "shifted-exponential"]
    for info in parameters(ShiftedExponential):
        for bad in info.constraint.bad_values():
            with pytest.raises(ParameterError, match=f"'{info.name}'"):
                ShiftedExponential(**{info.name: bad})

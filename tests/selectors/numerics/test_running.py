"""Running means, and expected durations of clients that have not reported."""

import numpy as np

from fedcohort.selectors.numerics.running import expected_seconds, update_means


def test_means_are_exact_until_the_memory_is_full_and_fade_afterwards():
    mean, count = np.zeros(2), np.zeros(2)
    values = [3.0, 5.0, 1.0, 9.0]
    for value in values:
        mean, count = update_means(mean, count, np.array([1]), np.array([value]), memory=3)
    assert mean[0] == count[0] == 0
    assert mean[1] == 3.0 + (9.0 - 3.0) / 3  # mean of the first three, then a third of the way
    assert count[1] == 4


def test_clients_never_asked_count_as_fast_and_failed_ones_as_slow():
    seconds, timed, asked = np.array([2.0, 7.0, 0.0, 0.0]), np.array([1.0, 2.0, 0.0, 0.0]), np.array([1.0, 2.0, 0.0, 4])
    assert expected_seconds(seconds, timed, asked).tolist() == [2.0, 7.0, 0.0, 7.0]
    nothing = expected_seconds(np.zeros(3), np.zeros(3), np.array([0.0, 2.0, 0.0]))
    assert nothing[1] > nothing[0] == nothing[2]

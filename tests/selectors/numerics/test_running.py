"""Running means."""

import numpy as np

from fedcohort.selectors.numerics.running import update_means


def test_means_are_exact_until_the_memory_is_full_and_fade_afterwards():
    mean, count = np.zeros(2), np.zeros(2)
    values = [3.0, 5.0, 1.0, 9.0]
    for value in values:
        mean, count = update_means(mean, count, np.array([1]), np.array([value]), memory=3)
    assert mean[0] == count[0] == 0
    assert mean[1] == 3.0 + (9.0 - 3.0) / 3  # mean of the first three, then a third of the way
    assert count[1] == 4

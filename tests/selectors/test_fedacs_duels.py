"""Duels by rank against the literal double loop of FedACS, Algorithm 2."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.selectors.papers.fedacs.selector import _duels


@given(st.lists(st.integers(-4, 4), max_size=25))
def test_duels_are_the_double_loop(values):
    rewards = np.array(values, float)
    wins, losses = np.zeros(len(rewards)), np.zeros(len(rewards))
    for i in range(len(rewards)):
        for j in range(len(rewards)):
            if rewards[i] > rewards[j]:
                wins[i] += 1
                losses[j] += 1
    ours = _duels(rewards)
    assert ours[0].tolist() == wins.tolist()
    assert ours[1].tolist() == losses.tolist()


def test_ties_change_nothing():
    wins, losses = _duels(np.full(9, -1.5))
    assert not wins.any() and not losses.any()

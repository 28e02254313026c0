"""AFL: the uniform share of small cohorts."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Slate
from fedcohort.selectors.baselines.active_fl import ActiveFL, _ActiveState


@pytest.mark.parametrize(("size", "alpha3"), [(5, 0.1), (3, 0.5), (10, 0.1), (1, 0.25)])
def test_uniform_places_are_alpha3_m_on_average(size, alpha3):
    """Valuations that make the softmax certain: a client that is not among the highest was drawn uniformly."""
    n = 40
    state = _ActiveState(np.arange(n, dtype=float))
    slate = Slate(round=3, size=size, candidates=np.arange(n), clients=ClientTable(sizes=np.ones(n)))
    rng = np.random.default_rng(0)
    low = np.zeros(n)
    draws = 3000
    for _ in range(draws):
        cohort, _ = ActiveFL(alpha1=0.75, alpha2=1e4, alpha3=alpha3).select(state, slate, None, rng)
        assert cohort.size == size
        low[cohort.clients] += 1
    dropped = low[:30].sum() / draws  # the softmax never takes these
    k = size * alpha3  # uniform places go to all clients that the softmax did not take: n - size + k on average
    assert dropped == pytest.approx(30 * k / (n - size + k), rel=0.15)
    assert (low[:30] > 0).all()  # three quarters of the federation can still be drawn

"""Oort: Util by hand, the cut-off draw against a brute-force form of Algorithm 1, pacer, blacklist, odd input."""

import math

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import SignalError
from fedcohort.core.plots import SelectorRun
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors import Oort
from fedcohort.session import Session

GREEDY = {"exploration": 0.0, "least_exploration": 0.0}


def state_of(selector, n, *, utility, last=None, seconds=None, picks=None, step=0.0, relaxed=0):
    start = selector.fresh(ClientTable(n=n))
    given = {
        "utility": utility,
        "last": last or [1.0] * n,
        "seconds": seconds or [0.0] * n,
        "picks": picks or [0.0] * n,
    }
    arrays = {name: np.array(values, float) for name, values in given.items()}
    return type(start)(start.achieved, start.reported, step, relaxed, **arrays)


def slate(n, size, round=0, candidates=None):
    who = np.arange(n) if candidates is None else np.array(candidates)
    return Slate(round, size, who, ClientTable(n=n))


def told(session, clients, losses, seconds, status=None):
    cohort = session.ask(RoundRequest(size=len(clients), available=list(clients)))
    order = [list(clients).index(c) for c in cohort.clients.tolist()]
    metrics = {Signal.LOSS_RMS: [losses[i] for i in order], Signal.DURATION: [seconds[i] for i in order]}
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
    return cohort


def test_util_by_hand():
    selector = Oort(**GREEDY, clip=1.0)
    state = state_of(selector, 3, utility=[20.0, 30.0, 40.0], last=[1, 4, 9], seconds=[1.0, 4.0, 8.0], step=4.0)
    choice = selector.choose(state, slate(3, 1, round=9), np.random.default_rng(0))
    ln = math.log(10)
    bonus = [math.sqrt(0.1 * ln / 1), math.sqrt(0.1 * ln / 4), math.sqrt(0.1 * ln / 9)]
    expected = [20 + bonus[0], 30 + bonus[1], (40 + bonus[2]) * 0.25]  # only client 2 is slower than T: (4 / 8)^2
    np.testing.assert_allclose(choice.score, expected, rtol=1e-12)
    parts = choice.parts
    np.testing.assert_allclose(parts["statistical"] + parts["staleness"] + parts["slowness"], expected, rtol=1e-12)
    assert choice.clients.tolist() == [1]


def test_utility_is_size_times_root_mean_square_and_is_kept_with_duration_and_round():
    session = Session(Oort(), ClientTable(sizes=[10, 40, 5]), seed=0)
    told(session, [0, 1], [0.5, 2.0], [3.0, 7.0])
    told(session, [0], [0.25], [4.0])
    state = session.state
    assert state.utility.tolist() == [2.5, 80.0, 0.0]
    assert state.last.tolist() == [2, 1, 0]
    assert state.seconds.tolist() == [4.0, 7.0, 0.0]
    assert state.picks.tolist() == [2, 1, 0]
    assert state.step == 5.0  # the median of the first durations


def test_clipping_caps_at_the_quantile():
    utility = [*range(1, 21), 1000.0]  # 0.95 of 20 steps: the 20th value
    selector = Oort(**GREEDY)
    choice = selector.choose(state_of(selector, 21, utility=utility), slate(21, 1), np.random.default_rng(0))
    assert choice.score.max() == 20.0
    assert choice.score[:20].tolist() == list(range(1, 21))


def brute_force(utility, k, c, rng):
    """Exploitation #2 as written: sort, admit above c times the k-th, draw one by one by utility."""
    bar = c * sorted(utility, reverse=True)[k - 1]
    pool = [i for i, u in enumerate(utility) if u >= bar]
    drawn = []
    for _ in range(k):
        weights = np.array([utility[i] for i in pool])
        drawn.append(pool.pop(rng.choice(len(pool), p=weights / weights.sum())))
    return tuple(sorted(drawn))


def test_cut_off_draw_has_the_distribution_of_algorithm_1():
    utility = [10.0, 9.7, 9.6, 9.3, 9.0, 1.0]  # the 2nd largest is 9.7: 9.215 and more is admitted
    selector = Oort(**GREEDY, clip=1.0)
    state, times = state_of(selector, 6, utility=utility), 1200
    ours, theirs = {}, {}
    rng, other = np.random.default_rng(1), np.random.default_rng(2)
    for _ in range(times):
        pair = tuple(sorted(selector.choose(state, slate(6, 2), rng).clients.tolist()))
        ours[pair] = ours.get(pair, 0) + 1
        pair = brute_force(utility, 2, 0.95, other)
        theirs[pair] = theirs.get(pair, 0) + 1
    assert set(ours) == set(theirs) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    for pair, count in ours.items():
        assert abs(count - theirs[pair]) < 6 * math.sqrt(2 * times / 6)


@pytest.mark.parametrize(("round_", "expected"), [(0, 9), (1, 0.98 * 9), (200, 2)])
def test_exploration_falls_from_09_to_02(round_, expected):
    selector = Oort()
    state = state_of(selector, 100, utility=[1.0] * 100, last=[1.0] * 50 + [0.0] * 50)
    rng = np.random.default_rng(0)
    new = [(selector.choose(state, slate(100, 10, round_), rng).clients >= 50).sum() for _ in range(300)]
    assert {math.floor(expected), math.ceil(expected)} >= set(map(int, new))
    assert np.mean(new) == pytest.approx(expected, abs=0.12)


def test_explored_and_unexplored_clients_fill_up_for_each_other():
    rng = np.random.default_rng(0)
    selector = Oort()
    one_new = state_of(selector, 5, utility=[1.0] * 5, last=[1, 1, 1, 1, 0])
    assert 4 in selector.choose(one_new, slate(5, 4), rng).clients
    all_new = state_of(selector, 5, utility=[0.0] * 5, last=[0, 0, 0, 0, 1e-9])
    assert len(set(selector.choose(all_new, slate(5, 5), rng).clients.tolist())) == 5


def test_pacer_extends_when_a_window_has_less_utility_than_the_one_before():
    session = Session(Oort(window=2, step=3.0, blacklist=None), ClientTable(sizes=[1.0]), seed=0)
    preferred = []
    for loss in (5.0, 5.0, 4.0, 5.0, 4.0, 6.0, 6.0):
        told(session, [0], [loss], [1.0])
        preferred.append(session.state.preferred)
    sums = [(5 + 5, 4 + 5), (5 + 4, 5 + 4), (4 + 5, 4 + 6), (5 + 4, 6 + 6)]
    relaxed = np.cumsum([before > after for before, after in sums])
    assert preferred == [3.0, 3.0, 3.0, *(3.0 * (1 + relaxed)).tolist()]
    assert relaxed.tolist() == [1, 1, 1, 1]


def test_the_picture_of_the_pacer_says_what_happened():
    (picture,) = Oort.pictures
    assert picture.view(SelectorRun("mine", 0, 2, {}, [(0, {"preferred seconds": 0.0})])) is None
    notes = [(t, {"preferred seconds": s}) for t, s in enumerate((0.0, 2.0, 2.0, 4.0, 6.0))]
    view = picture.view(SelectorRun("mine", 0, 5, {}, notes))
    assert view.lines["preferred"] == ((1, 2, 3, 4), (2.0, 2.0, 4.0, 6.0))
    assert "duration was 2 s at first. The pacer extended it 2 times, to 6 s" in view.text
    assert "never extended" in picture.view(SelectorRun("mine", 0, 3, {}, notes[:3])).text


def test_blacklisted_clients_come_back_if_too_few_remain():
    selector = Oort(**GREEDY, clip=1.0)
    state = state_of(selector, 4, utility=[100.0, 90.0, 1.0, 1.0], picks=[12, 10, 9, 0])
    rng = np.random.default_rng(0)
    assert sorted(selector.choose(state, slate(4, 2), rng).clients.tolist()) == [2, 3]
    three = selector.choose(state, slate(4, 3), rng)
    assert sorted(three.clients.tolist()) == [1, 2, 3]  # of the two blacklisted ones, the one with fewer picks
    assert three.notes["blacklisted"] == 1
    free = Oort(**GREEDY, clip=1.0, cut_off=1.0, blacklist=None)
    assert sorted(free.choose(state, slate(4, 2), rng).clients.tolist()) == [0, 1]


def test_equal_and_zero_utilities_and_zero_durations_draw_uniformly():
    for value in (0.0, 3.0):
        selector = Oort(**GREEDY)
        state = state_of(selector, 4, utility=[value] * 4)
        rng = np.random.default_rng(0)
        counts = np.bincount([selector.choose(state, slate(4, 1), rng).clients[0] for _ in range(2000)], minlength=4)
        assert counts.min() > 400
    session = Session(Oort(), ClientTable(sizes=[1, 1, 1]), seed=0)
    told(session, [0, 1, 2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert session.state.step == 0.0
    assert session.ask(RoundRequest(size=2)).size == 2


def test_a_failed_client_stays_unexplored_and_its_pick_counts():
    session = Session(Oort(), ClientTable(sizes=[1, 1]), seed=0)
    cohort = session.ask(RoundRequest(size=2))
    metrics = {Signal.LOSS_RMS: [1.0, np.nan], Signal.DURATION: [1.0, np.nan]}
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.OK, Status.FAILED], metrics=metrics))
    ok, failed = cohort.clients.tolist()
    assert session.state.last[ok] == 1
    assert session.state.last[failed] == 0
    assert session.state.picks.tolist() == [1, 1]


def test_durations_are_needed_only_with_a_penalty():
    with pytest.raises(SignalError, match="duration"):
        Session(Oort(), ClientTable(sizes=[1, 1]), signals={Signal.LOSS_RMS})
    session = Session(Oort(penalty=0.0), ClientTable(sizes=[1, 1]), signals={Signal.LOSS_RMS}, seed=0)
    cohort = session.ask(RoundRequest(size=1))
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.LOSS_RMS: [1.0]}))
    assert session.ask(RoundRequest(size=2)).size == 2

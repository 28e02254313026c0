r"""FedCS: the fastest clients, as many as meet a deadline.

.. [Nishio2019] T. Nishio, R. Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile
   Edge" (FedCS), ICC 2019, arXiv:1804.08333.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.running import update_means

_MEMORY = 10  # a client's expected duration is the mean of about this many


@dataclass(frozen=True)
class _DurationState:
    """What FedCS remembers about each client."""

    seconds: FloatArray = per_client()  # (N,) mean of its last durations
    timed: FloatArray = per_client()  # (N,) number of durations
    asked: FloatArray = per_client()  # (N,) number of cohorts it was in


@register("fedcs")
@dataclass(frozen=True, kw_only=True)
class FedCS(Selector[_DurationState]):
    r"""Keep adding the client that lengthens the round least, while the round meets its deadline ([Nishio2019]_).

    Clients from a random set are added greedily, as long as

    .. math:: \Theta \leftarrow \Theta + t^{UL}_k + \max(0, t^{UD}_k - \Theta) < T_{round},

    where clients compute at the same time and upload one after another.

    Symbols: :math:`T_{round}` = ``deadline``, :math:`t^{UL}_k` = ``upload`` times the client's expected duration and
    :math:`t^{UD}_k` = the rest of it, random set = ``asked`` times slate.size.

    Deviations: in the paper, clients report their resources in advance. Here the expected duration is the mean of a
    client's last ten Signal.DURATION. A client that was never asked is tried first, as if it took no time. One that
    did not answer counts as the slowest known. Reports do not say how much of a duration was the upload, so it is the
    same share for every client, and the fastest client left always adds the least time. By default, uploads do not
    wait for each other (``upload=0``), as in the simulator and in Flower; in the paper they share a channel. The
    cohort has at most slate.size clients; the paper takes all that fit, from a random set of as many as could be taken
    (``asked=1``). In the paper, the operator sets the deadline. Without one, the fastest of the random set are taken.
    When no client meets the deadline, the cohort is the fastest one.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedCS(deadline=6.0), ClientTable(n=4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> seconds = [1.0 + 2 * client for client in everybody.clients.tolist()]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.DURATION: seconds}))
    >>> session.ask(RoundRequest(size=4)).clients  # client 3 takes seven seconds
    array([0, 1, 2])
    """

    requires = frozenset({Signal.DURATION})

    picks_by: ClassVar[str] = (
        "Some clients are drawn at random, and the fastest of them that meet the deadline are picked. Clients that "
        "were not drawn have no score."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "expected seconds": "how long it is expected to take",
        "times reported": "how often it has been timed",
    }

    checked_params: ClassVar[ParamSets] = {
        "deadline": {"deadline": 5.0, "upload": 0.5},
        "nobody fits": {"deadline": 1e-09, "asked": 1.0},
        "shared channel": {"asked": 50.0, "upload": 1.0},
    }

    deadline: float | None = param(
        None, Optional(Interval(float, 0, None, "neither")), "most seconds of a round (T_round); None: no limit"
    )
    asked: float = param(2.0, Interval(float, 1, None), "size of the random set as a multiple of the cohort")
    upload: float = param(0.0, Interval(float, 0, 1), "part of a duration that is upload, one client after another")

    starves = "clients that are slow or miss the deadline are left out"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _DurationState:
        """Start without durations."""
        zeros = np.zeros(clients.n)
        return _DurationState(zeros, zeros, zeros)

    def select(
        self, state: _DurationState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _DurationState]:
        """Take the fastest of a random set, while they meet the deadline."""
        expected = _expected_seconds(state.seconds, state.timed, state.asked)
        count = min(ceil(self.asked * slate.size), len(slate.candidates))
        drawn = rng.choice(slate.candidates, count, replace=False)  # in random order, which decides ties
        order = drawn[np.argsort(expected[drawn], kind="stable")][: slate.size]
        ends = _round_ends(expected[order], self.upload)
        # The ends grow with every client, so those that fit come first. One is taken even if it does not fit, because a
        # cohort must not be empty.
        fit = len(order) if self.deadline is None else max(int((ends < self.deadline).sum()), 1)
        drawn = np.sort(drawn)
        cohort = Cohort(
            order[:fit],
            candidates=drawn,
            score=-expected[drawn],
            parts={"expected seconds": expected[drawn], "times reported": state.timed[drawn]},
            notes={"expected seconds": float(ends[fit - 1]), "did not fit": len(order) - fit},
        )
        return cohort, state

    def update(self, state: _DurationState, outcome: Outcome) -> _DurationState:
        """Learn durations."""
        asked, ok = state.asked.copy(), outcome.ok
        # Also those that failed: a client that never answers must not be tried first for ever.
        asked[outcome.clients] += 1
        seconds, timed = update_means(
            state.seconds, state.timed, outcome.clients[ok], outcome[Signal.DURATION][ok], _MEMORY
        )
        return _DurationState(seconds, timed, asked)


def _round_ends(seconds: FloatArray, upload: float) -> FloatArray:
    """(k,) the end of the round with the first, the first two, ... of clients that upload in this order.

    >>> _round_ends(np.array([2.0, 4.0, 4.0]), upload=0.5)  # two seconds of computing, two of upload
    array([2., 4., 6.])
    """
    ends, end = np.empty(len(seconds)), 0.0
    # One after another, because an upload waits for those before it.
    for i, duration in enumerate(seconds.tolist()):
        end = max(end, (1 - upload) * duration) + upload * duration
        ends[i] = end
    return ends


def _expected_seconds(seconds: FloatArray, timed: FloatArray, asked: FloatArray) -> FloatArray:
    """(n,) expected seconds of each client: its mean, 0 if never asked, the largest mean if it never answered.

    Parameters
    ----------
    seconds : (n,) float array
        Mean duration.
    timed : (n,) float array
        Number of durations in that mean.
    asked : (n,) float array
        Number of cohorts the client was in.

    >>> timed, asked = np.array([1.0, 3.0, 0.0, 0.0]), np.array([1.0, 3.0, 0.0, 1.0])
    >>> _expected_seconds(np.array([2.0, 5.0, 0.0, 0.0]), timed, asked)
    array([2., 5., 0., 5.])
    """
    known = timed > 0
    if known.all():
        return seconds
    slowest = float(seconds[known].max()) if known.any() else 1.0
    return np.where(known, seconds, np.where(asked > 0, slowest, 0.0))

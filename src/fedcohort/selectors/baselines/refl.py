r"""REFL: take clients first that will soon be unavailable.

.. [Abdelmoniem2023] A. M. Abdelmoniem, A. N. Sahu, M. Canini, S. A. Fahmy, "REFL: Resource-Efficient Federated
   Learning", EuroSys 2023, arXiv:2111.01108.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.top import top_k


@dataclass(frozen=True)
class _PresenceState:
    """What REFL remembers about each client's availability."""

    present: FloatArray = per_client()  # (N,) 1 if it was a candidate in the last round
    stayed: FloatArray = per_client()  # (N,) decaying count of rounds in which it stayed available
    left: FloatArray = per_client()  # (N,) decaying count of rounds in which it became unavailable
    free: FloatArray = per_client()  # (N,) the round from which it may be taken again


@register("refl")
@dataclass(frozen=True, kw_only=True)
class Refl(Selector[_PresenceState]):
    r"""Take the candidates that are least likely to be available in the next round ([Abdelmoniem2023]_).

    This is the paper's intelligent participant selection (IPS). Clients are taken in ascending order of the forecast
    :math:`p_n` that client n is available during the coming round, equal forecasts in random order. A client that was
    taken holds off for some rounds. Here

    .. math:: p_n = \frac{1 + \text{stayed}_n}{2 + \text{stayed}_n + \text{left}_n},

    where both counts are over the rounds that follow one in which n was available: it was still available or it was
    not. Older rounds count less.

    Symbols: p_n = forecast for the time slot :math:`[\mu_t, 2 \mu_t]`, which is the next round; available =
    slate.candidates; hold-off = ``hold_off``; ``memory`` = after how many rounds a count has lost two thirds.

    Deviations: in the paper, each client forecasts its own availability from its history, by hour and weekday, and
    reports it. Here the server sees only which clients are available, so it knows nothing about hours. A client that
    a rule excludes counts as unavailable. Stale updates are not aggregated: the paper's staleness-aware aggregation
    (SAA), and with it the target adapted to expected stragglers (APT), are not part of a selector. Clients that hold
    off are taken when there are too few others, those with the shortest wait first.

    Examples
    --------
    Client 2 is available only in every second round, the others always.

    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Refl(hold_off=0), ClientTable(n=3), seed=1)
    >>> for t in range(7):
    ...     cohort = session.ask(RoundRequest(size=1, available=[0, 1, 2] if t % 2 == 0 else [0, 1]))
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients))
    >>> cohort.clients, cohort.parts["forecast"].round(2)
    (array([2]), array([0.87, 0.87, 0.2 ]))
    """

    picks_by: ClassVar[str] = (
        "Clients that hold off come last. Of the others, those least likely to be available next are picked; ties are "
        "broken at random."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "forecast": "estimated probability that it is available in the next round",
        "rounds to wait": "rounds it still holds off",
    }

    checked_params: ClassVar[ParamSets] = {
        "no hold-off": {"hold_off": 0, "memory": 1},
        "long hold-off": {"hold_off": 1000},
    }

    hold_off: int = param(5, Interval(int, 0, None), "rounds that a client holds off after it was taken")
    memory: int = param(50, Interval(int, 1, None), "rounds that the counts of staying and leaving remember")

    starves = "clients that stay available come after all that leave sooner"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _PresenceState:
        """Start without observations."""
        zeros = np.zeros(clients.n)
        return _PresenceState(zeros, zeros, zeros, zeros)

    def select(
        self, state: _PresenceState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _PresenceState]:
        """Count which clients stayed, and take the lowest forecasts."""
        present = np.zeros(slate.n)
        present[slate.candidates] = 1.0
        # The counts of a client that was away last round do not fade: that round says nothing about staying.
        keep = 1.0 - state.present / self.memory
        stayed = state.stayed * keep + state.present * present
        left = state.left * keep + state.present * (1.0 - present)
        forecast = slate.of_candidates((1.0 + stayed) / (2.0 + stayed + left))
        wait = np.maximum(slate.of_candidates(state.free) - slate.round, 0.0)
        score = -forecast - 2.0 * wait  # forecasts are below 1, so a longer wait always comes later
        clients = slate.candidates[top_k(score, slate.size, rng)]
        free = state.free.copy()
        free[clients] = slate.round + 1 + self.hold_off
        cohort = Cohort(
            clients,
            candidates=slate.candidates,
            score=score,
            parts={"forecast": forecast, "rounds to wait": wait},
            notes={"available": len(slate.candidates), "holding off": int((wait > 0).sum())},
        )
        return cohort, _PresenceState(present, stayed, left, free)

    def update(self, state: _PresenceState, outcome: Outcome) -> _PresenceState:
        """Learn nothing, because availability is seen before the round."""
        return state

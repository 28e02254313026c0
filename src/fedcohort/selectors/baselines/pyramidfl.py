r"""PyramidFL: cohorts drawn as in Oort, in which fast clients work longer.

.. [Li2022] C. Li, X. Zeng, M. Zhang, Z. Cao, "PyramidFL: A Fine-grained Client Selection Framework for Efficient
   Federated Learning", MobiCom 2022.
.. [Lai2021] F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
   Selection", OSDI 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.oort import Guidance, OortState


@dataclass(frozen=True)
class _PyramidState(OortState):
    """What PyramidFL remembers: the state of Oort, with durations of the usual work, and the work assigned."""

    given: FloatArray = per_client()  # (N,) work of the client's last cohort, as a multiple of the usual


@register("pyramidfl")
@dataclass(frozen=True, kw_only=True)
class PyramidFL(Guidance, Selector[_PyramidState]):
    r"""Draw a cohort as Oort does, and give fast clients extra work until the slowest returns ([Li2022]_).

    .. math:: w_i = 1 + \min\Big(e,\; \frac{\max_{j \in S} t_j - t_i}{t_i}\Big)

    S is drawn by the ranking of ``oort`` ([Lai2021]_, Algorithm 1). Client i of S does :math:`w_i` times the usual
    local work (``Cohort.work``), so that all return at about the same time.

    Symbols: t_i = seconds for the usual work, Signal.DURATION divided by the work done; e = ``most_extra``; the others
    as in ``oort``. A client that never reported does the usual work and does not enter the maximum.

    Deviations: the paper also drops 10 to 60% of the values of an upload, fewer where the gradient's norm ranks high.
    Here nothing is dropped, and every upload costs a whole model. The paper knows the times for computing and sending
    separately and stretches only computing. Here a duration is one number, so the time for sending is stretched too,
    and clients with slow links return early rather than late. ``most_extra`` is the value in the authors' code.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(PyramidFL(), ClientTable(sizes=[10, 10]), seed=1)
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> seconds = [2.0 if client == 0 else 8.0 for client in cohort.clients.tolist()]
    >>> metrics = {Signal.LOSS_RMS: [1.0, 1.0], Signal.DURATION: seconds}
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> dict(zip(cohort.names, cohort.work.tolist()))["0"]
    4.0
    """

    requires = frozenset({Signal.SIZES, Signal.LOSS_RMS, Signal.DURATION})

    part_meanings: ClassVar[Mapping[str, str]] = {**Guidance.part_meanings, "seconds": "how long it took"}

    checked_params: ClassVar[ParamSets] = {
        **Guidance.checked_params,
        "no extra work": {"most_extra": 0.0},
        "most extra work": {"most_extra": 999.0},
    }

    most_extra: float = param(10.0, Interval(float, 0, 999), "most extra work, as a multiple of the usual work (e)")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _PyramidState:
        """Start with no client explored."""
        start = self.fresh(clients)
        fields = {f.name: getattr(start, f.name) for f in dataclasses.fields(start)}
        return _PyramidState(**fields, given=np.ones(clients.n))

    def select(
        self, state: _PyramidState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _PyramidState]:
        """Draw as Oort does, and assign work."""
        cohort = self.choose(state, slate, rng)
        # After the draw, because the slowest member of this cohort is what the others wait for.
        work = self._work(state, cohort.clients)
        # Remembered until the report: the duration divided by the work is the time for the usual work.
        given = state.given.copy()
        given[cohort.clients] = work
        cohort = dataclasses.replace(
            cohort,
            parts={**cohort.parts, "seconds": np.where(_has_duration(state), state.seconds, np.nan)[slate.candidates]},
            work=work,
            notes={**cohort.notes, "mean work": round(float(work.mean()), 4)},
        )
        return cohort, dataclasses.replace(state, given=given)

    def _work(self, state: _PyramidState, clients: IntArray) -> FloatArray:
        """(k,) work of each client as a multiple of the usual."""
        # A client without a duration does the usual work: with more, the others might wait for it.
        seconds, work = state.seconds[clients], np.ones(len(clients))
        timed = _has_duration(state)[clients]
        if timed.any():
            spare = seconds[timed].max() - seconds[timed]
            work[timed] += np.minimum(self.most_extra, spare / seconds[timed])
        return work

    def update(self, state: _PyramidState, outcome: Outcome) -> _PyramidState:
        """Learn utilities, and durations of the usual work."""
        return self.learn(state, outcome, outcome[Signal.DURATION] / state.given[outcome.clients])


def _has_duration(state: _PyramidState) -> BoolArray:
    """(N,) whether a client's duration is known; a duration of 0 does not count."""
    return np.asarray((state.last > 0) & (state.seconds > 0))

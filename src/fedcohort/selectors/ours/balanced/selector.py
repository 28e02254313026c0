r"""Our own selector, and the one to start with: balanced classes, and turns for every client.

A cohort is balanced together with the rounds before it. The draw is that of Fed-CBS [Zhang2023]_. Clients take part as
often as the balance of all data together demands, within bounds.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.params import Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.class_balance import ClassBalance, Past, chance, group_of
from fedcohort.selectors.numerics.running import update_means
from fedcohort.selectors.ours.balanced.directions import direction_group, update_directions
from fedcohort.selectors.ours.balanced.draw import Objective
from fedcohort.selectors.ours.balanced.mix import balancing_rates, group_off_mix, mix_qcid
from fedcohort.selectors.ours.balanced.turns import cap_debt, first_and_eligible

_STIFFNESS = 0.05  # resistance to rates other than 1, see balancing_rates
_MIN_RATE = 0.5  # rates are between a half and two
_MENDED = 0.5  # share of the federation's imbalance that rates must remove; otherwise its mix of classes is the aim
_FORGOTTEN = 1e-3  # a past cohort with a smaller weight no longer counts
_MEMORY_SECONDS = 20  # a client's expected duration is the mean of about this many reports
_PASSES = {"labels": 2, "directions": 1, "nothing": 1}  # of swaps; more would fit the errors of estimated directions
_FLOOR_DIRECTIONS = 1e-2  # distances of mean directions below this count as equal

_SIGNALS = {
    "labels": frozenset({Signal.LABEL_PRODUCTS, Signal.SIZES}),
    "directions": frozenset({Signal.UPDATE_SKETCH, Signal.SIZES}),
    "nothing": frozenset[Signal](),
}
"""What can be balanced, the best first, and the signals it needs."""


@dataclass(frozen=True)
class BalanceState:
    """What `balanced` remembers."""

    natural: bool  # whether the mix of all data is the aim, because rates cannot balance it
    rates: FloatArray = per_client()  # (N,) r_n
    turns: FloatArray = per_client()  # (N,) cohorts the client was in, each counting 1 / r_n
    recent: FloatArray = per_client()  # (N,) cohorts it recently delivered to, each weighted by powers of "past"
    seconds: FloatArray = per_client()  # (N,) mean of its last durations, 0 before the first
    timed: FloatArray = per_client()  # (N,) number of durations
    seen: FloatArray = per_client()  # (N,) number of updates in its direction
    directions: FloatArray = per_client()  # (N, V) direction of its updates; V is 0 until one is seen


@register("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(Selector[BalanceState]):
    r"""Draw a cohort that balances classes together with the last rounds, and give every client its turn.

    .. math::

        J(M) = \log \max(QCID(M + H), \epsilon) + \frac{\gamma}{|M|} \sum_{n \in M} e_n,
        \qquad H_t = \lambda (H_{t-1} + M_{t-1})

    1. Clients ``slack`` turns behind the mean come first. Clients that many turns ahead are left out.
    2. Client m = 1, 2, ... is drawn with log-weight :math:`-m J` of the group it would complete, with
       :math:`\gamma e_n` of the new client instead of the mean (these exponents are from [Zhang2023]_).
    3. Twice, every member that did not enter by rule 1 gives its place to the candidate that makes J smallest.

    Symbols: QCID = class imbalance (see ``fedcbs``) of the cohort's data together with the rounds before it. The last
    round counts :math:`\lambda` = ``past``, the one before that :math:`\lambda^2`, and so on; models that were lost do
    not count. So each cohort supplies what the last ones lacked. :math:`\epsilon` is the imbalance that balanced data
    shows by chance. e_n is the lead of client n: its turns minus the mean of the candidates, plus a random fraction of
    a turn, so that similar clients do not form the same cohorts again and again. gamma = ``coverage``. Each time it
    takes part, client n has :math:`1 / r_n` of a turn. The rate r_n is 1 on average, between 1/2 and 2, and higher for
    the few clients that hold a rare class, so that the data of all clients together are balanced (see
    ``balancing_rates``).

    If rates remove less than half of the imbalance of all data together (say, all clients write more digits than
    letters), the federation is taken as it is: rates are 1, and QCID is the distance from the mix of all data.

    In an asynchronous session, where clients are chosen one by one, the busy clients replace the rounds before, and m
    counts them too.

    Labels may be given as counts (also noisy ones), a factor or a Gram matrix. Without labels, the directions of
    updates are balanced instead. With nothing at all, clients simply take turns. ``time`` adds
    :math:`\tau \log \max_{n \in M} d_n`, with d_n the expected seconds of client n. Slow clients then come together,
    and as often as before.

    Deviations: there is no paper. The selector's page states what it guarantees, with proofs.

    Examples
    --------
    Four clients have one class each. The first cohort has two of different classes, the next one the other two.

    >>> from fedcohort import ClientTable, LabelCounts, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> labels = LabelCounts([[8, 0], [8, 0], [0, 8], [0, 8]])
    >>> session = Session(Balanced(), ClientTable(labels=labels), seed=3)
    >>> for _ in range(2):
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     session.tell(RoundReport(cohort.ticket, cohort.names))
    ...     print(sorted(cohort.names), cohort.notes["qcid"])
    ['1', '2'] 0.0
    ['0', '3'] 0.0
    """

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Clients whose turn it is come first. The others are drawn at random, with better odds if they balance the"
        " classes, and then swapped while that improves the balance. The score refers to the finished cohort."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "turn": "how far it is behind the others in turns",
        "balance": "how even the classes of the finished cohort would be with it (logarithm)",
        "speed": "how fast the finished cohort would be with it (logarithm)",
    }

    checked_params: ClassVar[ParamSets] = {
        "labels": {"balance": "labels", "past": 0.0},
        "directions": {"balance": "directions", "slack": 1.0},
        "nothing": {"balance": "nothing", "coverage": 0.0},
        "time": {"time": 10.0, "coverage": 100.0, "past": 0.99},
    }

    past: float = param(
        0.5, Interval(float, 0, 1, "left"), "how much a round counts in the balance of the next (lambda)"
    )
    coverage: float = param(0.2, Interval(float, 0, None), "weight of having had one more turn than the others (gamma)")
    slack: float = param(3.0, Interval(float, 1, None), "turns a client may be behind or ahead of the others (D)")
    time: float = param(0.0, Interval(float, 0, None), "weight of a round's duration (tau); 0: time does not count")
    balance: str = param("auto", OneOf(("auto", *_SIGNALS)), "what is balanced; auto: the best that is available")

    def adapt(self, supplied: frozenset[Signal]) -> Balanced:
        """Balance by the best signal that the host supplies."""
        if self.balance != "auto":
            return self
        return dataclasses.replace(self, balance=next(k for k, needed in _SIGNALS.items() if needed <= supplied))

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals of what is balanced, and durations if time counts."""
        needed = _SIGNALS.get(self.balance, frozenset())
        return needed | {Signal.DURATION} if self.time > 0 else needed

    def init(self, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Start with no turns taken."""
        zeros = np.zeros(clients.n)
        rates, natural = self._rates(clients)
        return BalanceState(
            natural=natural,
            rates=rates,
            turns=zeros,
            recent=zeros,
            seconds=zeros,
            timed=zeros,
            seen=zeros,
            directions=np.zeros((clients.n, 0)),
        )

    def grow(self, state: BalanceState, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Let new clients start with the mean number of turns, and compute the rates again."""
        old = len(state.turns)
        grown = super().grow(state, clients, rng)
        rates, natural = self._rates(clients)
        turns = grown.turns.copy()
        turns[old:] = state.rates @ state.turns / state.rates.sum() if old else 0.0
        return dataclasses.replace(grown, natural=natural, rates=rates, turns=turns)

    def _rates(self, clients: ClientTable) -> tuple[FloatArray, bool]:
        """(N,) r_n, and whether they remove too little imbalance to be used."""
        even = np.ones(clients.n)
        if self.balance != "labels" or clients.n == 0:
            return even, False
        labels, sizes = clients.labels, clients.sizes
        rates = np.clip(balancing_rates(labels, sizes, _STIFFNESS), _MIN_RATE, 1 / _MIN_RATE)
        left = mix_qcid(labels, sizes, rates)
        by_chance = float(chance(np.asarray(sizes.mean()), labels.classes))
        if left > by_chance and left > (1 - _MENDED) * mix_qcid(labels, sizes, even):
            return even, True
        return rates, False

    def select(
        self, state: BalanceState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, BalanceState]:
        """Take the clients that are behind, draw the others, and swap."""
        turns_taken = slate.of_candidates(state.turns)
        rates = slate.of_candidates(state.rates)
        mean = float((rates @ turns_taken) / rates.sum())
        lead = turns_taken - mean
        first, eligible = first_and_eligible(lead, slate.size, self.slack)
        group = self._group(state, slate)
        floor = _FLOOR_DIRECTIONS if self.balance == "directions" else None
        before = 0 if slate.busy is None else len(slate.busy)
        # If all clients are alike, the same cohorts would repeat with every turn. A random fraction of a turn mixes
        # them, and weighs less than balance.
        turn = self.coverage * (lead + rng.random(len(lead)))
        draw = Objective(group, turn, eligible, self._seconds(state, slate), floor, before)
        for position in np.flatnonzero(first).tolist():
            draw.add(position)
        fixed = len(draw.members)
        while len(draw.members) < slate.size:
            draw.draw(rng)
        if 1 < slate.size < len(slate.candidates):
            for _ in range(_PASSES[self.balance]):
                for position in rng.permutation(draw.members[fixed:]).tolist():
                    draw.swap(position)
        clients = slate.candidates[draw.members]
        turns, recent = cap_debt(state.turns, slate.candidates, mean, self.slack), state.recent
        turns[clients] += 1 / state.rates[clients]
        if slate.busy is None:
            recent = self.past * recent
            recent[recent < _FORGOTTEN] = 0.0
            recent[clients] += 1
        parts = draw.parts()
        cohort = Cohort(
            clients=clients,
            candidates=slate.candidates,
            score=np.sum(list(parts.values()), axis=0),
            parts=parts,
            notes=self._notes(state, group),
        )
        return cohort, dataclasses.replace(state, turns=turns, recent=recent)

    def _group(self, state: BalanceState, slate: Slate) -> ClassBalance | None:
        """Return an empty group over the candidates; None if there is nothing to balance."""
        if slate.busy is not None:
            past = Past(slate.busy, np.ones(len(slate.busy)))
        else:
            recent = np.flatnonzero(state.recent) if self.past > 0 else np.zeros(0, np.int64)
            past = Past(recent, self.past * state.recent[recent])
        if self.balance == "labels":
            labels = slate.clients.labels
            sizes = labels.sizes if isinstance(labels, LabelCounts) else slate.clients.sizes
            if state.natural:
                return group_off_mix(labels, sizes, slate.candidates, past)
            return group_of(labels, sizes, None if slate.everyone else slate.candidates, past)
        if self.balance == "nothing" or not (state.seen > 0).any():
            return None
        return direction_group(state.directions, state.seen, slate.clients.sizes, slate.candidates, past)

    def _seconds(self, state: BalanceState, slate: Slate) -> FloatArray | None:
        """(c,) tau log d_n, with the median d_n for clients never timed; None if time does not count."""
        if self.time == 0 or not state.seconds.any():
            return None
        known = state.timed > 0
        expected = np.where(known, state.seconds, np.median(state.seconds[known]))[slate.candidates]
        return np.asarray(self.time * np.log(np.maximum(expected, 1e-6 * state.seconds.max())))

    @staticmethod
    def _notes(state: BalanceState, group: ClassBalance | None) -> dict[str, float]:
        if group is None:
            return {}
        measure = "off_mix" if state.natural else "qcid"
        return {measure: group.qcid_of_members(), f"{measure}_with_past": group.qcid()}

    def update(self, state: BalanceState, outcome: Outcome) -> BalanceState:
        """Undo the count of models that did not arrive; learn directions and durations if they are used."""
        lost = outcome.clients[~outcome.ok]
        if len(lost):
            recent = state.recent.copy()
            recent[lost] = np.maximum(recent[lost] - 1, 0.0)
            state = dataclasses.replace(state, recent=recent)
        if self.balance == "directions":
            updates = np.asarray(outcome[Signal.UPDATE_SKETCH], np.float64)
            good = outcome.ok & np.isfinite(updates).all(axis=1)
            if good.any():
                directions, seen = update_directions(state.directions, state.seen, outcome.clients[good], updates[good])
                state = dataclasses.replace(state, directions=directions, seen=seen)
        if self.time > 0:
            seconds = outcome[Signal.DURATION]
            known: BoolArray = np.isfinite(seconds)
            mean, timed = update_means(
                state.seconds, state.timed, outcome.clients[known], seconds[known], _MEMORY_SECONDS
            )
            state = dataclasses.replace(state, seconds=mean, timed=timed)
        return state

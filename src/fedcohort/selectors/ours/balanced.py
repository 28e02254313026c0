r"""Our own selector, and the one to start with: balanced classes, and for every client a share between two bounds.

A cohort is balanced together with the rounds before it. The draw is that of Fed-CBS [Zhang2023]_. What it may draw is
limited by accounts with one number S (``numerics.accounts``), and by nothing else.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable, LabelCounts, LabelInfo
from fedcohort.core.params import Boolean, Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.accounts import (
    HAD_ITS_SHARE,
    WAITS,
    Accounts,
    Choice,
    extended,
    names_for_note,
    open_accounts,
)
from fedcohort.selectors.numerics.class_balance import ClassBalance, Past
from fedcohort.selectors.numerics.running import update_means
from fedcohort.selectors.numerics.sampling import log_choice
from fedcohort.selectors.ours.goals import (
    NEGLIGIBLE,
    aim_of,
    balancing_rates,
    direction_group,
    group_with_aim,
    update_directions,
)

_SPEED = 0.5  # weight of a round's duration (tau): a round twice as long must be 1.4 times as balanced
_PAST = 0.5  # how much a round counts in the balance of the next (lambda)
_LEAD = 0.5  # weight of having been asked often (gamma)
_FORGOTTEN = 1e-3  # a past cohort with a smaller weight no longer counts
_MEMORY_SECONDS = 20  # a client's expected duration is the mean of about this many reports
_PASSES = {"labels": 2, "directions": 1, "nothing": 1}  # of swaps; more would fit the errors of estimated directions
# Distances below this count as equal. If a cohort is as good as the federation allows, differences between others are
# no reason to ask the same few clients again and again.
_FLOOR = {"labels": NEGLIGIBLE, "directions": 1e-2, "nothing": 0.0}
_LOOKED_AT = 256  # with more candidates, a random sample of so many is looked at

_SIGNALS = {
    "labels": frozenset({Signal.LABEL_PRODUCTS, Signal.SIZES}),
    "directions": frozenset({Signal.UPDATE_SKETCH, Signal.SIZES}),
    "nothing": frozenset[Signal](),
}
"""What can be balanced, the best first, and the signals it needs."""


@dataclass(frozen=True)
class BalanceState(Accounts):
    """What `balanced` remembers besides its accounts."""

    rates: FloatArray = per_client()  # (N,) r_n
    recent: FloatArray = per_client()  # (N,) cohorts it recently delivered to, each weighted by powers of lambda
    seconds: FloatArray = per_client()  # (N,) mean of its last durations, 0 before the first
    timed: FloatArray = per_client()  # (N,) number of durations
    seen: FloatArray = per_client()  # (N,) number of updates in its direction
    directions: FloatArray = per_client()  # (N, V) direction of its updates; V is 0 until one is seen
    aim: FloatArray = dataclasses.field(default_factory=lambda: np.zeros(0))  # the mix of classes that is aimed at


@register("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(Selector[BalanceState]):
    r"""Draw a cohort that balances classes together with the last rounds, and keep everybody's share within bounds.

    .. math::

        J(M) = \log \max(QCID(M + H), \epsilon) + \frac{\gamma}{|M|} \sum_{n \in M} e_n,
        \qquad H_t = \lambda (H_{t-1} + M_{t-1})

    1. Client m = 1, 2, ... is drawn with log-weight :math:`-m J` of the group it would complete, with
       :math:`\gamma e_n` of the new client instead of the mean (these exponents are from [Zhang2023]_).
    2. Twice, every member gives its place to the candidate that makes J smallest.
    3. In both steps only clients are considered with whom the cohort can stay within the accounts: whatever happens,
       no client is asked more than S times its even share and a few times more, and none less than 1/S of it and a few
       times less.

    Symbols: S = ``share``. QCID = squared distance of the class shares of the cohort's data, together with the rounds
    before it, from the aim. The last round counts :math:`\lambda` = 0.5, the one before that 0.25, and so on; models
    that were lost do not count. So each cohort supplies what the last ones lacked. The aim is the mix of all data with
    client n counted :math:`r_n` times. These rates are about 1 on average, between 1/S and S, and higher for the few
    clients that hold a rare class, as far as this makes the mix more balanced (see ``balancing_rates``).
    :math:`\epsilon` is the imbalance that balanced data shows by chance, at least 0.001.
    :math:`e_n = \log ((p_n + 1/2 + u_n) / (r_n a_n + 1))` is the lead of client n, which was asked :math:`p_n` times,
    and would have been asked :math:`a_n` times by an even draw; :math:`\gamma` = 0.5. :math:`u_n` is a random number
    below 1, so that similar clients do not form the same cohorts again and again.

    With more than 256 candidates (or four times the most that S admits), a random sample of so many is looked at:
    even the most wanted client is in more of these samples than its share permits it to be asked.

    In an asynchronous session, where clients are chosen one by one, the busy clients replace the rounds before, and m
    counts them too. If every free client has had its share, the place waits for a busy one.

    Labels may be given as counts (also noisy ones), a factor or a Gram matrix. Without labels, the directions of
    updates are balanced instead; clients whose direction is not known yet get the places that an even draw gives them.
    With nothing at all, only leads count. ``fast`` adds :math:`\tau \log \max_{n \in M} d_n`, with d_n the expected
    seconds of client n and :math:`\tau` = 0.5.

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
    ...     print(sorted(cohort.names), cohort.notes["off_aim"])
    ['1', '2'] 0.0
    ['0', '3'] 0.0
    """

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Clients are drawn at random, with better odds if they balance the classes, and then swapped while that"
        " improves the balance. Clients that have had their share are left out. The score is about the finished cohort."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "lead": "how seldom it was asked, compared with how often it should be",
        "balance": "how even the classes of the finished cohort would be with it (logarithm)",
        "speed": "how fast the finished cohort would be with it (logarithm)",
        HAD_ITS_SHARE: "1 if it could not be asked: it has had its share, or others are owed theirs",
    }

    checked_params: ClassVar[ParamSets] = {
        "labels": {"balance": "labels", "share": 1.25},
        "directions": {"balance": "directions", "share": 2.0},
        "nothing": {"balance": "nothing", "share": 16.0},
        "fast": {"fast": True},
        "samples": {"accounts": "samples"},
    }

    share: float = param(
        4.0,
        Interval(float, 1, None, "neither"),
        "most a client is asked, as a multiple of its even share, and one over the least (S)",
    )
    accounts: str = param(
        "clients", OneOf(("clients", "samples")), "an even share is the same for all clients, or goes by their samples"
    )
    fast: bool = param(False, Boolean(), "prefer cohorts of clients that are alike in speed, where rounds wait for all")
    balance: str = param("auto", OneOf(("auto", *_SIGNALS)), "what is balanced; auto: the best that is available")

    def adapt(self, supplied: frozenset[Signal]) -> Balanced:
        """Balance by the best signal that the host supplies."""
        if self.balance != "auto":
            return self
        return dataclasses.replace(self, balance=next(k for k, needed in _SIGNALS.items() if needed <= supplied))

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals of what is balanced, sizes if the accounts go by them, and durations if speed counts."""
        needed = _SIGNALS.get(self.balance, frozenset())
        if self.accounts == "samples":
            needed |= {Signal.SIZES}
        return needed | {Signal.DURATION} if self.fast else needed

    def init(self, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Start with empty accounts."""
        accounts, zeros = open_accounts(clients.n), np.zeros(clients.n)
        rates, aim = self._goal(clients)
        return BalanceState(
            **{f.name: getattr(accounts, f.name) for f in dataclasses.fields(accounts)},
            rates=rates,
            aim=aim,
            recent=zeros,
            seconds=zeros,
            timed=zeros,
            seen=zeros,
            directions=np.zeros((clients.n, 0)),
        )

    def grow(self, state: BalanceState, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Open accounts for new clients, and compute the rates and the aim again."""
        grown = extended(super().grow(state, clients, rng), clients.n)
        rates, aim = self._goal(clients)
        return dataclasses.replace(grown, rates=rates, aim=aim)

    def _goal(self, clients: ClientTable) -> tuple[FloatArray, FloatArray]:
        if self.balance != "labels":
            return np.ones(clients.n), np.zeros(0)
        labels, sizes = _labels(clients)
        rates = balancing_rates(labels, sizes, self.share)
        return rates, aim_of(labels, sizes, rates)

    def select(
        self, state: BalanceState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, BalanceState]:
        """Draw a cohort within the accounts, and improve it by swaps."""
        choice = self._choice(state, slate, rng)
        candidates, barred = choice.candidates, ~choice.permitted()
        asked, even = choice.counts()
        # Similar clients must not form the same cohorts again and again: a random part of a turn mixes them.
        lead = np.log((asked + 0.5 + rng.random(len(candidates))) / (state.rates[candidates] * even + 1))
        group = self._group(state, slate, candidates)
        objective = _Objective(
            group,
            _LEAD * lead,
            self._seconds(state, candidates),
            _FLOOR[self.balance],
            choice,
        )
        if self.balance == "directions":
            even_draw = np.sort(rng.permutation(len(candidates))[: slate.size])
            for position in even_draw[state.seen[candidates[even_draw]] == 0].tolist():
                if choice.permitted()[position]:
                    objective.add(position)
        fixed, before = len(choice.members), 0 if slate.busy is None else len(slate.busy)
        while len(choice.members) < slate.size and (permitted := choice.permitted()).any():
            m = before + len(choice.members) + 1
            weights = np.where(permitted, -m * objective.with_each(m=1), -np.inf)
            objective.add(log_choice(weights, rng.random())[0])
        if 1 < slate.size < len(candidates):
            for _ in range(_PASSES[self.balance]):
                for position in rng.permutation(choice.members[fixed:]).tolist():
                    objective.swap(position)
        clients = candidates[choice.members]
        if not len(clients):
            return Cohort(clients, notes={"reason": WAITS}), state
        parts = objective.parts()
        score = np.sum(list(parts.values()), axis=0)
        notes: dict[str, str | float] = {}
        if group is not None:
            notes = {"off_aim": group.qcid_of_members(), "off_aim_with_past": group.qcid()}
        if barred.any():
            parts[HAD_ITS_SHARE] = barred.astype(np.float64)
            notes[HAD_ITS_SHARE] = names_for_note(slate, candidates[barred])
        state = choice.booked(clients, state)
        if slate.busy is None:
            recent = _PAST * state.recent
            recent[recent < _FORGOTTEN] = 0.0
            recent[clients] += 1
            state = dataclasses.replace(state, recent=recent)
        return Cohort(clients, candidates=candidates, score=score, parts=parts, notes=notes), state

    def _choice(self, state: BalanceState, slate: Slate, rng: np.random.Generator) -> Choice:
        """Return the accounts' choice among all candidates, or among a sample if that is enough."""
        # A client may be asked S times as often as an even draw asks it. It is in this many samples at least four times
        # as often, so that the sample hardly ever decides.
        count = max(_LOOKED_AT, math.ceil(4 * self.share * slate.size))
        some = None
        if count < len(slate.candidates):
            some = np.sort(rng.choice(slate.candidates, count, replace=False, shuffle=False))
        choice = Choice(state, self.share, slate, slate.clients.sizes if self.accounts == "samples" else None, some)
        if some is not None and not choice.is_possible:  # clients outside the sample are owed too much
            choice.look_at(slate.candidates)
        return choice

    def _group(self, state: BalanceState, slate: Slate, candidates: IntArray) -> ClassBalance | None:
        """Return an empty group over the candidates; None if there is nothing to balance."""
        if slate.busy is not None:
            past = Past(slate.busy, np.ones(len(slate.busy)))
        else:
            recent = np.flatnonzero(state.recent)
            past = Past(recent, _PAST * state.recent[recent])
        if self.balance == "labels":
            labels, sizes = _labels(slate.clients)
            return group_with_aim(labels, sizes, state.rates, state.aim, candidates, past)
        if self.balance == "nothing" or not (state.seen > 0).any():
            return None
        return direction_group(state.directions, state.seen, slate.clients.sizes, candidates, past)

    def _seconds(self, state: BalanceState, candidates: IntArray) -> FloatArray | None:
        """(c,) tau log d_n, with the median d_n for clients never timed; None if speed does not count."""
        if not self.fast or not state.seconds.any():
            return None
        known = state.timed > 0
        expected = np.where(known, state.seconds, np.median(state.seconds[known]))[candidates]
        return np.asarray(_SPEED * np.log(np.maximum(expected, 1e-6 * state.seconds.max())))

    def update(self, state: BalanceState, outcome: Outcome) -> BalanceState:
        """Undo the count of models that did not arrive; learn directions and durations if they are used.

        Accounts keep every client that was asked. If failures did not count, failing would bring more places.
        """
        lost = outcome.clients[~outcome.ok]
        changes: dict[str, Any] = {}
        if len(lost):
            changes["recent"] = state.recent.copy()
            changes["recent"][lost] = np.maximum(state.recent[lost] - 1, 0.0)
        if self.balance == "directions":
            updates = np.asarray(outcome[Signal.UPDATE_SKETCH], np.float64)
            good = outcome.ok & np.isfinite(updates).all(axis=1)
            if good.any():
                changes["directions"], changes["seen"] = update_directions(
                    state.directions, state.seen, outcome.clients[good], updates[good]
                )
        if self.fast:
            seconds = outcome[Signal.DURATION]
            known: BoolArray = np.isfinite(seconds)
            changes["seconds"], changes["timed"] = update_means(
                state.seconds, state.timed, outcome.clients[known], seconds[known], _MEMORY_SECONDS
            )
        return dataclasses.replace(state, **changes) if changes else state


def _labels(clients: ClientTable) -> tuple[LabelInfo, FloatArray]:
    """Return what is known about the labels, and how many there are of each client; noisy counts have other sums."""
    labels = clients.labels
    return labels, labels.sizes if isinstance(labels, LabelCounts) else clients.sizes


class _Objective:
    """J of the cohort that is being built, and of the cohort with each candidate added."""

    def __init__(
        self,
        group: ClassBalance | None,  # its class imbalance; None if nothing is balanced
        lead: FloatArray,  # (c,) gamma e_n
        seconds: FloatArray | None,  # (c,) tau log d_n; None if speed does not count
        floor: float,  # the least imbalance that counts; what chance leaves in the group does not count either
        choice: Choice,
    ) -> None:
        self.group, self.lead, self.seconds, self.floor, self.choice = group, lead, seconds, floor, choice
        self._work = np.empty(len(lead))

    def with_each(self, m: int) -> FloatArray:
        """(c,) J of the cohort with each candidate added, whose lead counts 1 / m."""
        return np.asarray(self._balance() + self.lead / m + self._slowest())

    def _balance(self) -> FloatArray | float:
        if self.group is None:
            return 0.0
        least = np.maximum(self.group.extended_by_chance(), self.floor)
        return np.asarray(np.log(np.maximum(self.group.qcid_with_each(self._work), least)))

    def _slowest(self) -> FloatArray | float:
        if self.seconds is None:
            return 0.0
        return np.asarray(np.maximum(self.seconds, self.seconds[self.choice.members].max(initial=-np.inf)))

    def add(self, position: int) -> None:
        self.choice.add(position)
        if self.group is not None:
            self.group.add(position)

    def swap(self, position: int) -> None:
        """Give a member's place to the permitted client that makes J smallest, which may be the member itself."""
        self.choice.remove(position)
        if self.group is not None:
            self.group.remove(position)
        value = self.with_each(m=len(self.choice.members) + 1)
        permitted = self.choice.permitted()
        best = int(np.where(permitted, value, np.inf).argmin())
        # A member stays if it is not permitted any more, which only rounding of its price can cause.
        self.add(best if permitted[best] and value[best] < value[position] - 1e-12 else position)

    def parts(self) -> dict[str, FloatArray]:
        """Return the terms of -J for the cohort with each candidate added; for members, those of the cohort itself."""
        parts = {"lead": -self.lead}
        if self.group is not None:
            members = self.choice.members
            balance = np.array(self._balance())
            balance[members] = np.log(max(self.group.qcid(), self.group.by_chance(), self.floor))
            parts["balance"] = -balance
        if self.seconds is not None:
            parts["speed"] = -np.asarray(self._slowest())
        return parts

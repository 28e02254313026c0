r"""Our own selector, to take when nothing speaks for another: balanced cohorts, everybody in turn, few surprises.

Ours. It joins what held in every setting of the five papers: class balance, as Fed-CBS draws it [Zhang2023]_, but of
the last rounds together; coverage, so that a few well-balanced clients do not do all the work; the time a round takes;
and doubt in clients whose losses their labels do not explain. Each part is used where its facts are known and left out
where they are not; where nobody tells about labels, they are estimated from updates of the output layer's bias
[Chen2024]_, and where there is none, cohorts are balanced by the directions of their updates.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning" (HiCS-FL), NeurIPS 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from fedcohort.arrays import BoolArray, FloatArray, IntArray, sealed
from fedcohort.clients import ClientTable, LabelCounts, LabelFactor, label_rows
from fedcohort.numerics.class_balance import ClassBalance, Past, balancing_rates, centred, chance, group_of, mix_qcid
from fedcohort.numerics.label_shares import by_relative_softmax
from fedcohort.numerics.running import moved
from fedcohort.numerics.sampling import log_choice
from fedcohort.params import Either, Interval, OneOf, Optional, param
from fedcohort.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.signals import Signal

_MEMORY_SECONDS = 20  # a client's expected duration is the mean of about so many reports
_MEMORY_DOUBT = 10
_MEMORY_DIRECTION = 10
_TEMPERATURE = 0.5  # of the softmax over updates of the bias, as in "fedcbs-blind"
_FORGET = 0.9  # of what is known of the classes' losses, a round
_RIDGE = 0.1  # pseudo-observations of the round's mean loss, for classes nobody has shown
_EARLY = 5.0  # rounds in which anybody may take part before its share of them is looked at
_MOST_EXCESS = 20.0  # rounds; who was away for long does not take part in every round afterwards
_STIFFNESS = 0.02  # how little clients with rare classes may come more often than others, see balancing_rates
_MENDED = 0.5  # part of a federation's imbalance that rates must mend, or its mix of classes is left as it is
_FORGOTTEN = 1e-3  # weight below which a cohort of the past counts no more
_PASSES_GUESSED = 1  # swaps look for the errors of estimates too
_LUCK_ESTIMATED = 3.0  # what estimates leave of imbalance, as a multiple of what chance does
_FLOOR_DIRECTION = 1e-2  # directions nearer to the mean than this are as good as at it
_USE = ("auto", "yes", "no")


@dataclass(frozen=True)
class BalanceState:
    """What `balanced` remembers."""

    moment: FloatArray  # (r, r) of the label features, forgetting
    product: FloatArray  # (r,) of label features and losses, forgetting
    natural: bool  # whether the mix of all data is aimed at, because no rates balance it
    fair: FloatArray = per_client()  # (N,) how often it should take part for all data together to be balanced
    pulls: FloatArray = per_client()  # (N,) cohorts the client was in; who joins starts with the others' mean
    chances: FloatArray = per_client()  # (N,) cohorts it would have been in if each were drawn among those available
    seconds: FloatArray = per_client()  # (N,) mean of its last durations, 0 before the first
    timed: FloatArray = per_client()  # (N,) how many durations
    doubt: FloatArray = per_client()  # (N,) mean of its last log(loss / what its labels explain)
    scatter: FloatArray = per_client()  # (N,) mean of its last squares of the same
    judged: FloatArray = per_client()  # (N,) how many losses
    recent: FloatArray = per_client()  # (N,) cohorts it was in lately and delivered, each round fading by "past"
    seen: FloatArray = per_client()  # (N,) updates the traits are a mean of
    traits: FloatArray = (
        per_client()
    )  # (N, W) estimated label shares, or directions of updates; W is 0 until one is seen


_NUMBERS = ("pulls", "chances", "seconds", "timed", "doubt", "scatter", "judged", "recent", "seen")


@register("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(Selector[BalanceState]):
    r"""Draw a cohort that balances the last rounds, then improve it by swaps.

    .. math::

        J(M) = \log \max(QCID(M + H), \epsilon) + \frac{\gamma}{|M|} \sum_{n \in M} e_n
               + \tau \log \max_{n \in M} d_n,
        \qquad H_t = \lambda (H_{t-1} + M_{t-1})

    1. Client m is drawn with log-weight :math:`-m J` of the group it would complete (for m = 1, 2, ..., the exponents
       of Fed-CBS, [Zhang2023]_), with :math:`\gamma e_n` of the new client in place of the mean.
    2. ``passes`` times, every member in random order gives its place to the candidate that makes J smallest.

    Symbols: QCID = class imbalance of the data (see ``fedcbs``) of the group and of the rounds before it, each of which
    counts :math:`\lambda` = ``past`` times as much as the one after it; who did not deliver does not count. So what one
    cohort lacks the next one has, though no cohort could hold all classes, and classes whose clients are few or seldom
    there are trained as much as others. :math:`\epsilon` = ``floor``, by default what balanced data shows by chance;
    gamma = ``coverage``, tau = ``time``, d_n = expected seconds of client n. The excess e_n says how many more rounds
    client n had than its share: pulls divided by its relative rate, less the candidates' mean, within 20 rounds. Rounds
    in which a client was not available count towards its share with the weight ``absent``: 1 wants as many rounds of
    everybody, 0 as many of every opportunity. The rate is that with which the data of all clients together are
    balanced, 1 on average, more for the few that hold a rare class (see ``numerics.class_balance.balancing_rates``);
    times :math:`(d / d_n)^{speed}` for a client slower than the median d and :math:`e^{-noise \cdot u_n}` for one whose
    losses are higher than its labels explain; never below ``least``.

    What labels explain: losses are regressed on label shares, client by client, forgetting. A client's mean of
    log(loss / explained), less the median of these means, is drawn towards 0 by
    :math:`u_n = \max(0, \bar s_n - s) \, V / (V + W / k_n)`, k_n its losses, W the variance within clients and V that
    between them beyond what W makes: where losses of one client differ as much as those of different clients (classes
    that come and go), nobody is doubted.

    Nobody takes part more than ``most`` times as often as if every cohort were drawn among those available, and five
    rounds: who has had so many is no candidate, as long as enough others are. So a claim to hold what nobody else has,
    or a hundred times as much of everything, brings a client that many rounds and no more.

    Some federations cannot be balanced by who comes how often: everybody writes more digits than letters. Where the
    rates mend less than half of the imbalance of all data together, and what is left is more than chance makes in one
    client's data, the federation is taken as it is: rates are 1, the uniform shares in QCID are replaced by those of
    all data together (the notes then say "off_mix" instead of "qcid"), and nobody is doubted, because there a loss that
    is high belongs to a client that is hard as often as to one that is wrong.

    Facts are used where they are known. Labels in any form (counts, also noisy ones, a factor, a Gram matrix) give
    balance. Without them they are estimated, as the mean of :math:`\mathrm{softmax}(\Delta b / T)` over a client's
    updates of the output bias ([Chen2024]_, Eq. 6). Where there are no such updates, a client is described by the mean
    direction of its updates (from sketches), and QCID is the squared distance of the group's mean direction to that of
    all clients. Who was never seen counts as the mean of those who were; there is one pass of swaps at most, because
    they look for the errors of estimates too, and :math:`\epsilon` is three times as high (0.01 for directions).
    Without these either, J has no first term and cohorts are taken in turns.
    Durations and losses are used where the host reports them ("auto"), always ("yes") or never ("no"); losses only
    beside label counts or a factor, because without them a hard class looks like a wrong label.

    Deviations: there is no paper. How the defaults were chosen is on the selector's page.

    Examples
    --------
    Four clients with one class each: two of different classes, and next the other two.

    >>> from fedcohort import ClientTable, LabelCounts, RoundReport, RoundRequest, Session
    >>> labels = LabelCounts([[8, 0], [9, 0], [0, 8], [0, 9]])
    >>> session = Session(Balanced(), ClientTable(labels=labels), seed=3)
    >>> for _ in range(2):
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     session.tell(RoundReport(cohort.ticket, cohort.names))
    ...     print(sorted(cohort.names), cohort.notes["qcid"])
    ['1', '3'] 0.0
    ['0', '2'] 0.0
    """

    coverage: float = param(0.2, Interval(float, 0, None), "weight of a round more than one's share (gamma)")
    past: float = param(
        0.5, Interval(float, 0, 1, "left"), "how much a round counts in the balance of the next; 0: nothing (lambda)"
    )
    floor: float | Literal["chance"] = param(
        "chance",
        Either(OneOf(("chance",)), Interval(float, 0, 1, "neither")),
        "QCID below this is as good as balanced; what balanced data shows by chance, or a number (epsilon)",
    )
    passes: int = param(2, Interval(int, 0, None), "how often every member may be swapped after the draw")
    time: float = param(0.5, Interval(float, 0, None), "weight of the logarithm of the round's duration (tau)")
    speed: float = param(0.5, Interval(float, 0, None), "how much less often slow clients take part; 0: as often")
    noise: float = param(3.0, Interval(float, 0, None), "how much less often doubtful clients take part; 0: as often")
    least: float = param(0.2, Interval(float, 0, 1, "right"), "least rate of a slow or doubtful client")
    most: float | None = param(
        5.0,
        Optional(Interval(float, 1, None)),
        "how many times its fair share of the rounds a client may take part in; None: any number",
    )
    absent: float = param(
        1.0, Interval(float, 0, 1), "how much a round away counts towards a client's turn; 0: nothing"
    )
    balance: str = param("auto", OneOf(_USE), "whether to balance labels")
    estimates: str = param("auto", OneOf(_USE), "whether to estimate labels where nobody tells them")
    directions: str = param("auto", OneOf(_USE), "whether to balance directions of updates where labels are unknown")
    durations: str = param("auto", OneOf(_USE), "whether to look at durations")
    losses: str = param("auto", OneOf(_USE), "whether to look at losses")

    added: ClassVar[Mapping[str, object]] = MappingProxyType({"most": None})

    def adapted(self, supplied: frozenset[Signal]) -> Balanced:
        """Use what the host supplies."""
        facts = {
            "balance": {Signal.LABEL_PRODUCTS, Signal.SIZES} <= supplied,
            "durations": Signal.DURATION in supplied,
            "losses": Signal.LOSS in supplied,
        }
        told = self.balance == "yes" or (self.balance == "auto" and facts["balance"])
        facts["estimates"] = not told and {Signal.OUTPUT_BIAS_UPDATE, Signal.SIZES} <= supplied
        told = told or self.estimates == "yes" or (self.estimates == "auto" and facts["estimates"])
        facts["directions"] = not told and {Signal.UPDATE_SKETCH, Signal.SIZES} <= supplied
        chosen = {name: "yes" if known else "no" for name, known in facts.items() if getattr(self, name) == "auto"}
        return dataclasses.replace(self, **chosen)  # type: ignore[arg-type]

    @property
    def requires(self) -> frozenset[Signal]:
        """What is to be used for certain."""
        wanted: set[Signal] = set()
        if self.balance == "yes":
            wanted |= {Signal.LABEL_PRODUCTS, Signal.SIZES}
        if self.estimates == "yes":
            wanted |= {Signal.OUTPUT_BIAS_UPDATE, Signal.SIZES}
        if self.directions == "yes":
            wanted |= {Signal.UPDATE_SKETCH, Signal.SIZES}
        if self.durations == "yes":
            wanted.add(Signal.DURATION)
        if self.losses == "yes":
            wanted.add(Signal.LOSS)
        return frozenset(wanted)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Nobody has taken part; the classes' losses are unknown."""
        features = self._features(clients, np.zeros(0, np.int64))
        width = 0 if features is None else features.shape[1]
        zeros = sealed(np.zeros(clients.n))
        fair, natural = self._fair(clients)
        return BalanceState(
            moment=sealed(np.zeros((width, width))),
            product=sealed(np.zeros(width)),
            natural=natural,
            fair=fair,
            **dict.fromkeys(_NUMBERS, zeros),
            traits=sealed(np.zeros((clients.n, 0))),
        )

    def grow(self, state: BalanceState, clients: ClientTable, rng: np.random.Generator) -> BalanceState:
        """Let new clients start with the mean number of rounds, or they would be in every cohort until they have it."""
        grown = super().grow(dataclasses.replace(state, traits=state.traits[:, :0]), clients, rng)
        old = len(state.pulls)
        turns = [grown.pulls.copy(), grown.chances.copy()]
        for now, before in zip(turns, (state.pulls, state.chances), strict=True):
            now[old:] = before.mean() if old else 0.0
        traits = np.concatenate([state.traits, np.zeros((clients.n - old, state.traits.shape[1]))])
        fair, natural = self._fair(clients)
        return dataclasses.replace(
            grown,
            natural=natural,
            fair=fair,
            pulls=sealed(turns[0]),
            chances=sealed(turns[1]),
            traits=sealed(traits),
        )

    def _fair(self, clients: ClientTable) -> tuple[FloatArray, bool]:
        """(N,) how often each client should take part, as far as labels tell, and whether that mends too little."""
        even = sealed(np.ones(clients.n))
        if self.balance != "yes":
            return even, False
        labels, sizes = clients.labels, clients.sizes
        rates = np.clip(balancing_rates(labels, sizes, _STIFFNESS), self.least, 1 / self.least)
        left = mix_qcid(labels, sizes, rates)
        by_chance = float(chance(np.asarray(sizes.mean()), labels.classes)) if clients.n else 0.0
        if left > by_chance and left > (1 - _MENDED) * mix_qcid(labels, sizes, even):
            return even, True
        return sealed(rates), False

    def select(
        self, state: BalanceState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, BalanceState]:
        """Draw the cohort, then swap."""
        chances = state.chances.copy()
        chances[slate.candidates] += slate.size / len(slate.candidates)
        slate = self._without_sated(state, slate, chances)
        objective = self._objective(state, slate)
        picks = [objective.draw(m, rng) for m in range(1, slate.size + 1)]
        if 1 < slate.size < len(slate.candidates):
            for _ in range(min(self.passes, _PASSES_GUESSED) if self._guesses else self.passes):
                for place in rng.permutation(slate.size).tolist():
                    picks[place] = objective.swap(picks[place])
        clients = slate.candidates[picks]
        pulls, recent = state.pulls.copy(), self.past * state.recent
        pulls[clients] += 1
        recent[recent < _FORGOTTEN] = 0.0
        recent[clients] += 1
        parts = objective.parts()
        cohort = Cohort(
            clients=clients,
            candidates=slate.candidates,
            score=np.sum(list(parts.values()), axis=0),
            parts=parts,
            notes=objective.notes(),
        )
        return cohort, dataclasses.replace(state, pulls=sealed(pulls), chances=sealed(chances), recent=sealed(recent))

    def _without_sated(self, state: BalanceState, slate: Slate, chances: FloatArray) -> Slate:
        """Return the slate without those who have had ``most`` times their share of the rounds."""
        if self.most is None:
            return slate
        hungry = slate.of_candidates(state.pulls) + 1 <= self.most * slate.of_candidates(chances) + _EARLY
        if hungry.all() or hungry.sum() < slate.size:
            return slate
        return dataclasses.replace(slate, candidates=slate.candidates[hungry])

    def update(self, state: BalanceState, outcome: Outcome) -> BalanceState:
        """Learn durations, labels and doubts; forget whose model did not come."""
        lost = outcome.clients[~outcome.ok]
        if len(lost):
            recent = state.recent.copy()
            recent[lost] = np.maximum(recent[lost] - 1, 0.0)
            state = dataclasses.replace(state, recent=sealed(recent))
        if self._guesses:
            state = self._described(state, outcome)
        if self.durations == "yes":
            seconds = outcome[Signal.DURATION]
            known = np.isfinite(seconds)
            who = outcome.clients[known]
            mean, timed = moved(state.seconds, state.timed, who, seconds[known], _MEMORY_SECONDS)
            state = dataclasses.replace(state, seconds=mean, timed=timed)
        if self._judges(state):
            state = self._judged(state, outcome)
        return state

    @property
    def _guesses(self) -> bool:
        """Whether what is balanced is taken from updates."""
        return self.estimates == "yes" or self.directions == "yes"

    def _described(self, state: BalanceState, outcome: Outcome) -> BalanceState:
        """Take label shares, or directions, from the updates that are sound."""
        signal = Signal.OUTPUT_BIAS_UPDATE if self.estimates == "yes" else Signal.UPDATE_SKETCH
        updates = np.asarray(outcome[signal], np.float64)
        good = outcome.ok & np.isfinite(updates).all(axis=1)
        if not good.any() or updates.shape[1] < 2:
            return state
        if self.estimates == "yes":
            new, memory = by_relative_softmax(updates[good], _TEMPERATURE), np.inf
        else:
            new, memory = _directions(updates[good]), _MEMORY_DIRECTION
        who = outcome.clients[good]
        seen = state.seen.copy()
        traits = state.traits.copy() if state.traits.shape[1] else np.zeros((len(seen), new.shape[1]))
        seen[who] += 1
        traits[who] += (new - traits[who]) / np.minimum(seen[who, None], memory)
        return dataclasses.replace(state, seen=sealed(seen), traits=sealed(traits))

    def _judges(self, state: BalanceState) -> bool:
        """Whether losses are looked at."""
        return self.losses == "yes" and self.noise > 0 and not state.natural

    def _judged(self, state: BalanceState, outcome: Outcome) -> BalanceState:
        """Compare losses with what labels explain, then learn what they explain."""
        loss = outcome[Signal.LOSS]
        known = np.isfinite(loss)
        loss, who = np.maximum(loss[known], 0.0), outcome.clients[known]
        if not len(who) or loss.mean() <= 0:
            return state
        features = self._features(outcome.table, who)
        if features is None:
            return state
        ridge = _RIDGE * np.eye(features.shape[1])
        by_class = np.linalg.solve(state.moment + ridge, state.product + _RIDGE * loss.mean())
        explained = np.maximum(features @ by_class, 0.1 * loss.mean())
        surprise = np.log(np.maximum(loss, 1e-6 * loss.mean()) / explained)
        doubt, judged = moved(state.doubt, state.judged, who, surprise, _MEMORY_DOUBT)
        scatter, _ = moved(state.scatter, state.judged, who, surprise**2, _MEMORY_DOUBT)
        trust = np.exp(-np.maximum(doubt[who] - np.median(doubt[who]), 0.0))
        weighted = features * trust[:, None]
        return dataclasses.replace(
            state,
            doubt=doubt,
            scatter=scatter,
            judged=judged,
            moment=sealed(_FORGET * state.moment + weighted.T @ features),
            product=sealed(_FORGET * state.product + weighted.T @ loss),
        )

    def rates(self, state: BalanceState) -> FloatArray:
        """(N,) how often each client should take part, 1 for most."""
        rate = state.fair.copy()
        if self.speed > 0 and self.durations == "yes":
            seconds = _or_median(state.seconds, state.timed > 0)
            middle = float(np.median(seconds))
            if middle > 0:
                rate *= np.minimum(1.0, middle / np.maximum(seconds, middle)) ** self.speed
        if self._judges(state):
            rate *= np.exp(-self.noise * _doubts(state))
        return np.maximum(rate, self.least)

    def _objective(self, state: BalanceState, slate: Slate) -> _Objective:
        share = slate.of_candidates(self.rates(state))
        turns = slate.of_candidates(state.pulls) / (share / share.mean())
        due = turns.mean() * self._due(slate.of_candidates(state.chances))
        excess = np.clip(turns - due, -_MOST_EXCESS, _MOST_EXCESS)
        group, floor, luck = None, 0.0, 1.0
        if self.floor != "chance":
            floor, luck = self.floor, 0.0
        if self.balance == "yes":
            labels = slate.clients.labels
            sizes = None if isinstance(labels, LabelCounts) else slate.clients.sizes
            if state.natural:
                sizes = label_rows(labels).sum(axis=1) if sizes is None else sizes
                labels = centred(labels, sizes)
            group = group_of(
                labels,
                sizes,
                None if slate.everyone else slate.candidates,
                self._before(state),
            )
        elif self._guesses and (state.seen > 0).any():
            group = self._believed(state, slate)
            if self.directions == "yes":
                floor, luck = _FLOOR_DIRECTION, 0.0
            else:
                luck *= _LUCK_ESTIMATED
        seconds = None
        if self.time > 0 and self.durations == "yes":
            expected = slate.of_candidates(_or_median(state.seconds, state.timed > 0))
            if (expected > 0).any():
                seconds = np.log(np.maximum(expected, 1e-6 * expected.max()))
        measure = "off_mix" if state.natural else "qcid"
        return _Objective(group, self.coverage * excess, seconds, self.time, floor, luck, measure)

    def _due(self, chances: FloatArray) -> FloatArray | float:
        """(c,) each candidate's share of the rounds, 1 on average: less for those who are seldom there."""
        middle = float(chances.mean())
        if self.absent >= 1 or middle <= 0:
            return 1.0
        return np.asarray(self.absent + (1 - self.absent) * chances / middle)

    def _before(self, state: BalanceState) -> Past:
        """Return who took part lately, and what that counts."""
        who = np.flatnonzero(state.recent) if self.past > 0 else np.zeros(0, np.int64)
        return Past(who, self.past * state.recent[who])

    def _believed(self, state: BalanceState, slate: Slate) -> ClassBalance:
        """Return an empty group over the candidates, by what their updates tell."""
        before = self._before(state)
        who = np.concatenate([slate.candidates, before.clients])
        count = len(slate.candidates)
        before = Past(np.arange(count, len(who)), before.weights)
        mean = state.traits[state.seen > 0].mean(axis=0)
        traits = np.where(state.seen[who, None] > 0, state.traits[who], mean)
        sizes = slate.clients.sizes[who]
        everybody = np.arange(count)
        if self.estimates == "yes":
            return group_of(LabelCounts(traits * sizes[:, None]), None, everybody, before)
        # The second part of each row makes QCID of these rows the squared distance of their mean direction to the mean.
        rows = np.column_stack([(traits - mean) * sizes[:, None], sizes / np.sqrt(2.0)])
        return group_of(LabelFactor(rows, 2), sizes, everybody, before)

    def _features(self, clients: ClientTable, who: IntArray) -> FloatArray | None:
        """(k, r) label shares, or the same turned by a rotation; None where only products are known, or nothing."""
        labels = clients.labels if self.balance == "yes" else None
        if isinstance(labels, LabelCounts | LabelFactor):
            rows = label_rows(labels)[who]
            sizes = clients.sizes[who]
            return np.asarray(rows / np.maximum(sizes, 1.0)[:, None], np.float64)
        return None


def _directions(updates: FloatArray) -> FloatArray:
    """(k, V) updates of length 1; one of length 0 stays."""
    length = np.linalg.norm(updates, axis=1, keepdims=True)
    return np.asarray(updates / np.where(length > 0, length, 1.0))


def _doubts(state: BalanceState) -> FloatArray:
    """(N,) u_n: how much higher than their labels explain losses are, as far as it is not chance."""
    losses = np.minimum(state.judged, _MEMORY_DOUBT)
    known = losses >= 2
    if known.sum() < 2:
        return np.zeros(len(losses))
    mean, k = state.doubt[known], losses[known]
    within = float((np.maximum(state.scatter[known] - mean**2, 0.0) * k).sum() / (k - 1).sum())
    between = float(mean.var(ddof=1)) - within * float((1 / k).mean())
    if between <= 0:
        return np.zeros(len(losses))
    above = np.maximum(state.doubt - np.median(mean), 0.0)
    return np.asarray(known * above * between / (between + within / np.maximum(losses, 1.0)))


class _Objective:
    """J of the group that is being built, and of the groups one client away from it."""

    def __init__(
        self,
        group: ClassBalance | None,
        coverage: FloatArray,
        seconds: FloatArray | None,
        time: float,
        floor: float,
        luck: float,
        measure: str,
    ) -> None:
        self.group = group
        self.coverage = coverage  # (c,) gamma e_n
        self.seconds = seconds  # (c,) log d_n
        self.time = time
        self.floor = floor  # least value of QCID
        self.luck = luck  # the same as a multiple of what chance leaves
        self.measure = measure  # what the group's imbalance is called
        self.members: list[int] = []
        self._values = np.empty(len(coverage))

    def balance(self) -> FloatArray | float:
        """(c,) log QCID of the group with each candidate added; infinite for members."""
        if self.group is None:
            return 0.0
        value = np.maximum(self.group.extended(self._values), self.floor)
        if self.luck > 0:
            np.maximum(value, self.luck * self.group.extended_by_chance(), out=value)
        return np.asarray(np.log(value))

    def slowest(self) -> FloatArray | float:
        """(c,) tau times the logarithm of the round's duration with each candidate added."""
        if self.seconds is None:
            return 0.0
        return np.asarray(self.time * np.maximum(self.seconds, self.seconds[self.members].max(initial=-np.inf)))

    def _add(self, position: int) -> int:
        self.members.append(position)
        if self.group is not None:
            self.group.add(position)
        return position

    def draw(self, m: int, rng: np.random.Generator) -> int:
        """Add the m-th client, at random by its weight."""
        weights = -m * (self.balance() + self.coverage + self.slowest())
        weights[self.members] = -np.inf
        return self._add(log_choice(weights, rng.random())[0])

    def swap(self, position: int) -> int:
        """Give a member's place to whoever makes J smallest, which may be itself."""
        self.members.remove(position)
        if self.group is not None:
            self.group.remove(position)
        value = self.balance() + self.coverage / (len(self.members) + 1) + self.slowest()
        value[self.members] = np.inf
        best = int(value.argmin())
        return self._add(best if value[best] < value[position] - 1e-12 else position)

    def parts(self) -> dict[str, FloatArray]:
        """What spoke for each candidate: joining the group as it is now, for members the group itself."""
        count = len(self.coverage)
        parts = {"turn": -self.coverage}
        if self.group is not None:
            balance = np.broadcast_to(self.balance(), count).copy()
            least = max(self.floor, self.luck * self.group.by_chance())
            balance[self.members] = np.log(max(self.group.qcid(), least))
            parts["balance"] = -balance
        if self.seconds is not None:
            parts["speed"] = -np.broadcast_to(self.slowest(), count)
        return parts

    def notes(self) -> dict[str, float]:
        """What is worth recording of the cohort."""
        notes = {}
        if self.group is not None:
            notes[self.measure] = self.group.alone()
            notes[f"{self.measure}_with_past"] = self.group.qcid()
        if self.seconds is not None:
            notes["expected_seconds"] = float(np.exp(self.seconds[self.members].max()))
        return notes


def _or_median(values: FloatArray, known: BoolArray) -> FloatArray:
    """Return ``values`` (N,) with the median of the known ones for the others; zeros while nothing is known."""
    if known.all() or not known.any():
        return values
    return np.where(known, values, np.median(values[known]))

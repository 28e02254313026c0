r"""FedCor: choose the cohort that should lower the global loss most, by a Gaussian process over losses.

.. [Tang2022] M. Tang, X. Ning, Y. Wang, J. Sun, Y. Wang, H. Li, Y. Chen, "FedCor: Correlation-Based Active Client
   Selection Strategy for Heterogeneous Federated Learning", CVPR 2022.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, Optional, ParamSets, param
from fedcohort.core.protocol import (
    Answer,
    Cohort,
    Losses,
    Outcome,
    Query,
    Selector,
    Slate,
    Trial,
    per_client,
    register,
)
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.fedcor.choice import Greedy, pick_by_expected_drop
from fedcohort.selectors.papers.fedcor.plots import CLIENT_MAP
from fedcohort.selectors.papers.fedcor.process import fit_embedding

_MAX_CHANGE = 1e30  # larger changes are clipped, so that their squares stay finite


@dataclass(frozen=True)
class _CorrelationState:
    """What FedCor remembers."""

    taken: IntArray  # (H,) round of each sample in ``changes``, -1 for none
    embedding: FloatArray = per_client()  # (N, d) x_k; the covariance of loss changes is X X'
    picks: FloatArray = per_client()  # (N,) tau_k, how often selected since the last fit
    losses: FloatArray = per_client()  # (N,) losses before the round that serves as a sample; NaN if unknown
    changes: FloatArray = per_client()  # (N, H) the last H samples of loss changes; NaN if the client did not answer
    samples: int = 0  # number of samples so far; the next one goes to column samples % H
    measured: int = -1  # the round before which ``losses`` were measured, -1 if none
    trained: bool = False  # whether that round produced a new global model


@register("fedcor")
@dataclass(frozen=True, kw_only=True)
class FedCor(Selector[_CorrelationState]):
    r"""Pick clients by the expected drop of the global loss under a Gaussian process ([Tang2022]_, Algorithms 1, 2).

    The loss changes of one round are modelled as :math:`\Delta l \sim N(0, X X^T + s^2 I)`. Until the cohort is full,
    the next client is

    .. math::

        k^* &= \arg\max_k \; \alpha_k \sum_i p_i \Sigma_{ik} \frac{\sigma_k}{\sigma_k^2 + s^2},
              \qquad \alpha_k = a \beta^{\tau_k} \\
        \Sigma &\leftarrow \Sigma - \frac{\Sigma_{\cdot k^*} \Sigma_{k^* \cdot}}{\sigma_{k^*}^2 + s^2}

    (Eqs. 9 to 11; with s = 0, Lemma 2), starting from :math:`\Sigma = X X^T`. The embedding X is fitted to samples of
    loss changes by maximum likelihood (Eqs. 16, 17). In the first ``warmup`` rounds, whose cohorts are uniform, each
    round is a sample. After that, there is one every ``interval`` rounds, and each fit resets all tau_k to 0.

    Symbols: t = round, Delta t = ``interval``, S = ``trials``, d = ``dimension``, a = ``scale``, beta = ``annealing``,
    theta = ``discount``, M = ``old_warmup`` and ``old``, s = ``noise``, p_i = clients.weights, X = ``state.embedding``
    (clients are rows). A sample taken r rounds before the newest weighs theta^r, which is the paper's gamma^m.

    **Samples.** In warm-up, samples come from the losses of all candidates, asked before every round and once after the
    last. After warm-up, with ``samples="trial"`` as in the paper, they come from ``trials`` uniform cohorts trained on
    trial. ``samples="round"`` is ours; neither the paper nor the authors' code has it. Samples then come from real
    rounds with a uniform cohort and losses asked before and after, as in warm-up: no training is wasted, but one round
    in ``interval`` is uniform.

    **Steps.** The paper does not give the number of Adam steps per fit. Few are better, because many steps forget the
    earlier embedding and end at the rank of the few samples in use. On Fashion-MNIST with one class per client (3
    seeds, 100 rounds), the mean QCID of the cohorts after warm-up is 0.002, 0.000, 0.006, 0.010, 0.021, 0.049 with 20,
    50, 100, 150, 300, 1000 steps (uniform cohorts: 0.085). On three seeds not used for this choice, it is 0.000 with 50
    and 0.015 with 150.

    Deviations from the paper: X X' alone has rank d and no likelihood, so s^2 is added (as in the authors' code), also
    in the score. Clients that did not answer are left out of a sample's likelihood. Before the first sample, cohorts
    are uniform. Only one question can be asked in a round, so if t % Delta t = 0 falls on the first round after
    warm-up, the trial is skipped; the fit has just been renewed. Clients that join later start with embeddings as large
    as those of the others. How models are averaged is the host's choice: Eq. (4) is the aggregator ``mean``, which the
    paper's tables here use.

    Examples
    --------
    The losses of clients 0 and 1 move together, and so do those of 2 and 3. After three uniform rounds, FedCor takes
    one of each pair.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import Answer, RoundReport, RoundRequest
    >>> session = Session(FedCor(warmup=3, interval=None, dimension=2), ClientTable(sizes=[10] * 4), seed=1)
    >>> kinds, losses = np.array([0, 0, 1, 1]), np.full(4, 2.0)
    >>> for _ in range(4):
    ...     request = RoundRequest(size=2)
    ...     query = session.query(request)
    ...     cohort = session.ask(request, Answer(query, {Signal.LOSS: losses}))
    ...     losses = losses - 0.2 * np.bincount(kinds[cohort.clients], minlength=2)[kinds] + 0.1
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients))
    >>> cohort.notes["phase"], sorted(kinds[cohort.clients].tolist())
    ('process', [0, 1])
    """

    picks_by: ClassVar[str] = (
        "Each place goes to the client with the largest expected drop of the loss, given those picked before. "
        "The score includes what they take away."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "own": "expected drop of its own loss",
        "others": "expected drop of the others' losses, by correlation",
        "redundancy": "what the clients picked before took away",
        "annealing": "discount for having been picked lately",
    }

    checked_params: ClassVar[ParamSets] = {
        "CIFAR-10": {"warmup": 20, "interval": 50, "discount": 0.99, "annealing": 0.9},
        "rounds as samples": {"warmup": 2, "interval": 2, "samples": "round", "steps": 5},
        "trials": {"warmup": 0, "interval": 1, "trials": 3, "dimension": 1, "steps": 1},
        "never again": {"warmup": 1, "interval": None, "old_warmup": 0, "old": 0, "noise": 1e-06},
    }

    starves: ClassVar[str | None] = (
        "after warm-up, a client whose losses move against those of the others may never be picked"
    )

    pictures = (CLIENT_MAP,)

    warmup: int = param(15, Interval(int, 0, None), "rounds with uniform cohorts at the start")
    interval: int | None = param(
        10, Optional(Interval(int, 1, None)), "rounds between samples after warm-up (Delta t); None: no samples"
    )
    samples: str = param(
        "trial",
        OneOf(("trial", "round")),
        "where samples come from after warm-up: uniform cohorts on trial (the paper), or real rounds (ours)",
    )
    trials: int = param(1, Interval(int, 1, None), "uniform cohorts on trial per sampling round (S)")
    dimension: int = param(15, Interval(int, 1, None), "length of an embedding (d)")
    scale: float = param(1.0, Interval(float, 0, None, "neither"), "scale of the predicted loss drop (a)")
    annealing: float = param(0.95, Interval(float, 0, 1, "right"), "factor per selection since the last fit (beta)")
    discount: float = param(0.9, Interval(float, 0, 1, "right"), "weight of a sample one round older (theta)")
    old_warmup: int = param(10, Interval(int, 0, None), "earlier samples used again in warm-up (M)")
    old: int = param(1, Interval(int, 0, None), "earlier sampling rounds used again after warm-up (M)")
    noise: float = param(
        1e-2, Interval(float, 0, None, "neither"), "standard deviation that the embedding does not explain (s)"
    )
    learning_rate: float = param(1e-2, Interval(float, 0, None, "neither"), "step size of Adam")
    steps: int = param(50, Interval(int, 0, None), "Adam steps per fit")

    @property
    def requires(self) -> frozenset[Signal]:
        """Data sizes, and the queries that the samples need."""
        needed = {Signal.SIZES}
        if self.warmup > 0 or (self.interval is not None and self.samples == "round"):
            needed.add(Signal.LOSS_QUERY)
        if self.interval is not None and self.samples == "trial":
            needed.add(Signal.TRIAL_QUERY)
        return frozenset(needed)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _CorrelationState:
        """Start with embeddings drawn from N(0, 1/d)."""
        kept = max(self.old_warmup + 1, (self.old + 1) * self.trials)
        return _CorrelationState(
            embedding=rng.normal(0.0, 1.0 / math.sqrt(self.dimension), (clients.n, self.dimension)),
            picks=np.zeros(clients.n),
            losses=np.full(clients.n, np.nan),
            changes=np.full((clients.n, kept), np.nan),
            taken=np.full(kept, -1, dtype=np.int64),
        )

    def grow(self, state: _CorrelationState, clients: ClientTable, rng: np.random.Generator) -> _CorrelationState:
        """Draw new embeddings as large as the current ones, so that no client is picked only for being new."""
        grown = super().grow(state, clients, rng)
        known = len(state.embedding)
        embedding = grown.embedding.copy()
        # ``init`` draws with variance 1/d. After fits, embeddings are smaller or larger.
        if known:
            embedding[known:] *= math.sqrt(float(np.mean(state.embedding**2)) * self.dimension)
        return dataclasses.replace(grown, embedding=embedding)

    def _due(self, t: int) -> bool:
        """Return whether a sample is due in round t, after warm-up."""
        return self.interval is not None and t >= self.warmup and t % self.interval == 0

    def _measures(self, t: int) -> bool:
        """Return whether round t itself is a sample, so that its cohort is uniform."""
        return t < self.warmup or (self.samples == "round" and self._due(t))

    def query(self, state: _CorrelationState, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask for losses before and after a round that is a sample, or for trials."""
        # The round after a sample asks as well, because a change needs the losses on both sides of it.
        if self._measures(slate.round) or state.measured >= 0:
            return Losses(slate.candidates)
        if self.samples == "trial" and self._due(slate.round):
            return Trial(tuple(_uniform(slate, rng) for _ in range(self.trials)))
        return None

    def select(
        self, state: _CorrelationState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _CorrelationState]:
        """Learn from the answer, then pick."""
        if answer is not None:
            state = self._learn(state, slate, answer)
        if self._measures(slate.round) or not state.samples:
            phase = "warm-up" if slate.round < self.warmup else "sample" if state.samples else "no sample yet"
            return Cohort(_uniform(slate, rng), notes={"phase": phase}), state
        weights = slate.clients.weights
        alpha = self.scale * self.annealing ** slate.of_candidates(state.picks)
        # The direction is over all clients and not only the candidates: the loss of all of them should fall.
        greedy = pick_by_expected_drop(
            slate.of_candidates(state.embedding), weights @ state.embedding, alpha, slate.size, self.noise
        )
        cohort = Cohort(
            clients=slate.candidates[greedy.picks],
            candidates=slate.candidates,
            score=greedy.drop,
            parts=self._parts(greedy, alpha, slate.of_candidates(weights)),
            notes={"phase": "process", "expected drop": float(greedy.drop[greedy.picks].sum())},
        )
        return cohort, state

    def _parts(self, greedy: Greedy, alpha: FloatArray, weights: FloatArray) -> dict[str, FloatArray]:
        """Split the expected drop into parts that add up to it.

        own: the drop of the client's own loss; others: the drop of the other losses by correlation; redundancy: what
        the clients picked before took away; annealing: the discount for recent picks.
        """
        # Before any pick the score is own plus others; what the picks changed is the rest.
        gain = np.sqrt(greedy.variance)
        gain /= greedy.variance + self.noise * self.noise
        gain *= self.scale
        variance_drop = weights * greedy.variance * gain
        before = greedy.covariance * gain
        unannealed = np.divide(self.scale * greedy.drop, alpha, out=np.zeros(len(alpha)), where=alpha > 0)
        return {
            "own": variance_drop,
            "others": before - variance_drop,
            "redundancy": unannealed - before,
            "annealing": greedy.drop - unannealed,
        }

    def _learn(self, state: _CorrelationState, slate: Slate, answer: Answer) -> _CorrelationState:
        """Fit to the samples in the answer, if there are any; remember the losses if a sample begins."""
        t = slate.round
        fresh: list[tuple[int, FloatArray]] = []  # round and (N,) loss changes
        measured, losses = -1, state.losses
        match answer.query:
            case Trial():
                fresh = [(t, change) for change in answer[Signal.LOSS_CHANGE]]
            case Losses(clients=asked):
                now = np.full(slate.n, np.nan)
                now[asked] = answer[Signal.LOSS]
                if state.measured >= 0 and state.trained:
                    fresh = [(state.measured, now - state.losses)]
                if self._measures(t):
                    measured, losses = t, now
        state = dataclasses.replace(state, losses=losses, measured=measured, trained=False)
        # A sample in which nobody answered says nothing, and its likelihood is not defined.
        fresh = [(at_round, change) for at_round, change in fresh if not np.isnan(change).all()]
        return self._fit(state, t, fresh) if fresh else state

    def _fit(self, state: _CorrelationState, t: int, fresh: list[tuple[int, FloatArray]]) -> _CorrelationState:
        """Store new samples in the ring of the last H, fit the embedding to those in use, and reset the annealing."""
        # A ring, because the likelihood uses only the last samples and the state must not grow.
        changes, taken, count = state.changes.copy(), state.taken.copy(), state.samples
        for when, change in fresh:
            column = count % len(taken)
            changes[:, column] = np.clip(change, -_MAX_CHANGE, _MAX_CHANGE)
            taken[column] = when
            count += 1
        # By sampling rounds and not by samples: the trials of one round are as old as each other.
        rounds = np.unique(taken[taken >= 0])  # ascending
        reused = self.old_warmup if t <= self.warmup else self.old
        used = taken >= rounds[max(len(rounds) - 1 - reused, 0)]
        # By the rounds between samples, since theta is the discount of a round.
        weights = np.where(used, self.discount ** (rounds[-1] - taken).astype(np.float64), 0.0)
        embedding = fit_embedding(
            state.embedding,
            changes[:, used],
            weights[used],
            noise=self.noise,
            learning_rate=self.learning_rate,
            steps=self.steps,
        )
        return dataclasses.replace(
            state,
            embedding=embedding,
            changes=changes,
            taken=taken,
            samples=count,
            picks=np.zeros(len(state.picks)),
        )

    def update(self, state: _CorrelationState, outcome: Outcome) -> _CorrelationState:
        """Count the picks for the annealing, and remember whether a sample's round produced a new model."""
        if outcome.round >= self.warmup:
            picks = state.picks.copy()
            picks[outcome.clients] += 1
            state = dataclasses.replace(state, picks=picks)
        # If nobody delivered, the model and so the losses did not change, and the round is no sample.
        if outcome.round == state.measured and bool(outcome.ok.any()):
            state = dataclasses.replace(state, trained=True)
        return state


def _uniform(slate: Slate, rng: np.random.Generator) -> IntArray:
    return rng.choice(slate.candidates, slate.size, replace=False)

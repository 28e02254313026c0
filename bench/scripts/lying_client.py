"""How many places can lying clients take under each selector, with and without bounds?

In a federation of 50 clients with skewed labels, 5 clients report whatever serves them best, one lie at a time: huge or
tiny losses, sizes, label counts, durations, norms. The others report the truth of a scripted federation. The measure is
the liars' share of all places over 50 rounds of 5 clients, as a multiple of their fair share of 10%: 1 is fair, 10 is
every place. The worst lie is the one that takes the most places.

With --claims: 100 clients hold two of ten classes each, and one of them claims other labels than it has. In how many of
300 rounds of 10 clients does it take part?

    python bench/scripts/lying_client.py [--rounds 50] [--seeds 1] [--liars 5] [--audit FACTOR] [--selectors NAMES]
        [--claims]
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.protocol import SELECTORS, Answer, Cohort, Losses, RoundReport, RoundRequest, Selector
from fedcohort.core.signals import LossOf, OnServer, Signal
from fedcohort.session import Session

CLIENTS, COHORT, CLASSES = 50, 5, 10
SIGNALS = Signal.all()  # what the host could supply
SURE = 1.5  # a lie helps if it takes this many times the places of honesty, which is more than chance


@dataclass(frozen=True)
class Lie:
    """What liars report: each function gets the liars' true values and returns false ones."""

    loss: Callable[[Any], Any] = lambda x: x
    size: Callable[[Any], Any] = lambda x: x
    labels: Callable[[Any], Any] = lambda x: x
    duration: Callable[[Any], Any] = lambda x: x
    vector: Callable[[Any], Any] = lambda x: x


LIES: Mapping[str, Lie] = {
    "loss 1e6 times": Lie(loss=lambda x: x * 1e6),
    "loss 3 times": Lie(loss=lambda x: x * 3),
    "loss 0": Lie(loss=lambda x: x * 0),
    "size 1e6 times": Lie(size=lambda x: x * 1e6, labels=lambda x: x * 1e6),
    "size and loss 1e6 times": Lie(loss=lambda x: x * 1e6, size=lambda x: x * 1e6, labels=lambda x: x * 1e6),
    "balanced labels": Lie(labels=lambda x: np.full_like(x, max(1.0, np.floor(x.sum(axis=1).mean() / CLASSES)))),
    "balanced labels 1e6 times": Lie(labels=lambda x: np.full_like(x, 1e6)),
    "balanced labels 100 times": Lie(
        size=lambda x: x * 100,
        labels=lambda x: np.repeat(np.ceil(x.sum(axis=1, keepdims=True) * 10), x.shape[1], axis=1),
    ),
    "size 100 times": Lie(size=lambda x: x * 100, labels=lambda x: x * 100),
    "a class of its own": Lie(labels=lambda x: np.column_stack([0 * x, x.sum(axis=1)])),
    "duration 1e-6 times": Lie(duration=lambda x: x * 1e-6),
    "fast and loss 1e6 times": Lie(loss=lambda x: x * 1e6, duration=lambda x: x * 1e-6),
    "updates 1e6 times": Lie(vector=lambda x: x * 1e6),
    "updates 0": Lie(vector=lambda x: x * 0),
    "flat updates": Lie(vector=lambda x: np.broadcast_to(np.linalg.norm(x, axis=-1, keepdims=True), x.shape)),
}


class Federation:
    """Scripted clients, of which the first few may lie."""

    def __init__(self, seed: int, lie: Lie | None, liars: int) -> None:
        rng = np.random.default_rng(seed)
        self.lie, self.liars = lie, liars
        shares = rng.dirichlet(np.full(CLASSES, 0.3), CLIENTS)
        sizes = rng.lognormal(5.0, 0.5, CLIENTS)
        self.counts = np.ceil(shares * sizes[:, None])
        self.base = rng.lognormal(0.0, 0.35, CLIENTS)
        self.seconds = rng.lognormal(2.0, 0.5, CLIENTS)
        self.directions = rng.normal(size=(CLIENTS, 64))

    def _said(self, values: np.ndarray, clients: np.ndarray, how: str) -> np.ndarray:
        values = np.array(values, float)
        liars = clients < self.liars
        if self.lie is not None and liars.any():
            values[liars] = getattr(self.lie, how)(values[liars])
        return values

    def table(self) -> ClientTable:
        everybody = np.arange(CLIENTS)
        counts = self.counts
        if self.lie is not None:
            said = self.lie.labels(counts[: self.liars])
            counts = np.pad(counts, [(0, 0), (0, said.shape[1] - CLASSES)])  # classes that only liars name
            counts[: self.liars] = said
        return ClientTable(sizes=self._said(self.counts.sum(axis=1), everybody, "size"), labels=LabelCounts(counts))

    def losses(self, round_: int, clients: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng([round_, 7]).lognormal(0.0, 0.1, CLIENTS)
        truth = self.base[clients] * noise[clients] * (0.3 + 2.0 * np.exp(-0.02 * round_))
        return self._said(truth, clients, "loss")

    def answer(self, query: Any, round_: int) -> Answer | None:
        if query is None:
            return None
        if isinstance(query, Losses):
            return Answer(query, {s: self.losses(round_, query.clients) for s in query.signals})
        everybody = np.arange(CLIENTS)
        trained = np.stack([np.isin(everybody, c) for c in query.cohorts])
        near = (self.counts @ self.counts.T) / np.outer(*(2 * [np.linalg.norm(self.counts, axis=1)]))
        change = -(trained @ near) / COHORT * self.base * 0.1
        return Answer(query, {query.answered_with: np.stack([self._said(row, everybody, "loss") for row in change])})

    def report(self, cohort: Cohort, wanted: Collection[Signal]) -> RoundReport:
        clients = cohort.clients
        loss = self.losses(cohort.round, clients)
        metrics: dict[Signal, Any] = {}
        for signal in [s for s in wanted if s.is_metric]:
            if isinstance(signal.how, LossOf):
                metrics[signal] = loss * (0.8 if signal.how.model == "own" else 1.0)
            elif isinstance(signal.how, OnServer):
                metrics[signal] = np.full(len(clients), 0.3 + 2.0 * np.exp(-0.02 * cohort.round))
            elif signal == Signal.DURATION:
                metrics[signal] = self._said(self.seconds[clients], clients, "duration")
            elif signal.width is None:
                metrics[signal] = self._said(self.base[clients], clients, "vector")
            else:
                width = signal.numbers(CLASSES)
                rows = self.counts[clients] / self.counts[clients].sum(axis=1, keepdims=True) - 1 / CLASSES
                metrics[signal] = self._said(rows if width == CLASSES else self.directions[clients], clients, "vector")
        kept = np.random.default_rng([cohort.round, 3]).random(CLIENTS)[clients] < 0.7
        return RoundReport(cohort.ticket, clients, metrics=metrics, kept=kept)


def share(make: Callable[[], Selector[Any]], lie: Lie | None, rounds: int, seed: int, liars: int = 5) -> float:
    """Return the liars' share of all places, as a multiple of their fair share."""
    federation = Federation(seed, lie, liars)
    session = Session(make(), federation.table(), seed=seed, signals=SIGNALS)
    taken = places = 0
    for _ in range(rounds):
        request = RoundRequest(COHORT)
        cohort = session.ask(request, federation.answer(session.query(request), session.round))
        if cohort.stop is not None or not cohort.size:
            break
        taken += int((cohort.clients < liars).sum())
        places += cohort.size
        session.tell(federation.report(cohort, session.selector.requires))
    return taken / places / (liars / CLIENTS)


def measured(name: str, rounds: int, seeds: int, liars: int, audit: float | None) -> str:
    """Return a line of the table: what the worst lie takes under one selector, with and without bounds."""
    cells = []
    for make in (lambda: SELECTORS.create(name), lambda: SELECTORS.create("bounded", of=name, audit=audit)):

        def mean(lie: Lie | None, make: Callable[[], Selector[Any]] = make) -> float:
            return float(np.mean([share(make, lie, rounds, seed, liars) for seed in range(seeds)]))

        shares = {lie: mean(said) for lie, said in LIES.items()}
        worst = max(shares, key=lambda lie: shares[lie])
        honest = mean(None)
        helped = shares[worst] > SURE * max(honest, 1.0)
        cells += [f"{honest:.1f}", f"{shares[worst]:.1f}, {worst}" if helped else f"{shares[worst]:.1f}"]
    return f"| `{name}` | {' | '.join(cells)} |"


CLAIMS: Mapping[str, Callable[[Any], Any]] = {
    "the truth": lambda row: row,
    "a class that nobody else has": lambda row: np.append(0 * row, row.sum()),
    "that class, 100 times the samples": lambda row: np.append(0 * row, 100 * row.sum()),
    "all classes alike": lambda row: np.full_like(row, row.mean()),
    "all classes alike, 100 times the samples": lambda row: np.full_like(row, 100 * row.mean()),
}


def rounds_won(make: Callable[[], Selector[Any]], claim: Callable[[Any], Any], rounds: int = 300) -> int:
    """Return the number of rounds with the client that makes a claim about its labels."""
    rng = np.random.default_rng(0)
    counts = np.zeros((100, CLASSES))
    for row in counts:
        row[rng.choice(CLASSES, 2, replace=False)] = 50.0
    said = claim(counts[0])
    counts = np.pad(counts, [(0, 0), (0, len(said) - CLASSES)])
    counts[0] = said
    session = Session(make(), ClientTable(labels=LabelCounts(counts)), seed=0)
    won = 0
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(10))
        won += int(0 in cohort.clients)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    return won


def print_claims(names: list[str]) -> None:
    """Print the number of rounds in which a client takes part, by what it claims about its labels."""
    print(f"| claim | {' | '.join(f'`{n}` | bounded' for n in names)} |")
    print("|---" * (1 + 2 * len(names)) + "|")
    for claim, said in CLAIMS.items():
        makers = [m for n in names for m in (partial(SELECTORS.create, n), partial(SELECTORS.create, "bounded", of=n))]
        print(f"| {claim} | {' | '.join(str(rounds_won(make, said)) for make in makers)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--liars", type=int, default=5)
    parser.add_argument("--audit", type=float, help="compare losses with the server's own, within this factor")
    parser.add_argument("--selectors", default="")
    parser.add_argument("--claims", action="store_true", help="what one client gains by false labels")
    options = parser.parse_args()
    names = [n for n in options.selectors.split(",") if n] or [
        name for name, cls in ((n, SELECTORS.get(n)) for n in SELECTORS) if cls.selects and not cls.is_wrapper
    ]
    logging.disable(logging.WARNING)  # sessions warn that few clients carry the training, which is what is measured
    if options.claims:
        claimed = ["balanced", "fedcbs", "fedcbs-chance", "astraea"]
        return print_claims([n for n in options.selectors.split(",") if n] or claimed)
    print("| selector | nobody lies | the worst lie takes | bounded, nobody lies | bounded, the worst lie takes |")
    print("|---|---|---|---|---|")
    for name in names:
        print(measured(name, options.rounds, options.seeds, options.liars, options.audit), flush=True)


if __name__ == "__main__":
    main()

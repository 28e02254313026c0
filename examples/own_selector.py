"""A selector of your own, checked by the conformance suite.

    python examples/own_selector.py

The same file can be checked from the command line: fedcohort check examples/own_selector.py:Alternating
"""

from dataclasses import dataclass

import numpy as np

import fedcohort as fc


@dataclass(frozen=True)
class Turns:
    """How often each client has trained."""

    count: np.ndarray = fc.per_client()  # (N,)


@dataclass(frozen=True, kw_only=True)
class Alternating(fc.Selector[Turns]):
    """Pick the clients that have trained least; draw lots among equals."""

    def init(self, clients, rng):
        """Start with no client having trained."""
        return Turns(np.zeros(clients.n))

    def select(self, state, slate, answer, rng):
        """Pick the smallest counts."""
        count = slate.of_candidates(state.count)
        order = np.lexsort((rng.random(len(count)), count))[: slate.size]
        picked = slate.candidates[order]
        return fc.Cohort(picked, candidates=slate.candidates, score=-count, parts={"trained": count}), state

    def update(self, state, outcome):
        """Count the clients that trained."""
        count = state.count.copy()
        count[outcome.clients[outcome.ok]] += 1
        return Turns(count)


if __name__ == "__main__":
    fc.check_selector(Alternating(), skip={"documentation": "an example cites no paper"})
    session = fc.Session(Alternating(), clients=["anna", "ben", "cem"], seed=1)
    for _ in range(3):
        cohort = session.ask(1)
        session.tell(cohort)
        print(session.explain(cohort.round, cohort.names[0]))

"""Uniform and full participation, the baselines of every table.

.. [McMahan2017] B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
   AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register


@dataclass(frozen=True)
class NoState:
    """Nothing to remember."""


class Stateless(Selector[NoState]):
    """A selector that learns nothing from reports."""

    def init(self, clients: ClientTable, rng: np.random.Generator) -> NoState:
        """Return the empty state."""
        return NoState()

    def update(self, state: NoState, outcome: Outcome) -> NoState:
        """Learn nothing."""
        return state


@register("uniform")
@dataclass(frozen=True, kw_only=True)
class Uniform(Stateless):
    r"""Draw a cohort uniformly: every cohort of the requested size is equally likely ([McMahan2017]_, Algorithm 1).

    :math:`P(S^t) = 1 / \binom{N}{m}`. Symbols: m = slate.size, drawn without replacement from the available
    clients. Deviations: none.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> session = Session(Uniform(), ClientTable(n=100), seed=7)
    >>> len(session.ask(RoundRequest(size=10)))
    10
    """

    one_at_a_time = True
    picks_by: ClassVar[str] = "Every client has the same chance."

    def select(
        self, state: NoState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, NoState]:
        """Draw without replacement."""
        picked = rng.choice(len(slate.candidates), slate.size, replace=False)
        return Cohort(slate.candidates[picked]), state


@register("all")
@dataclass(frozen=True, kw_only=True)
class All(Stateless):
    """Take every available client, whatever size was requested ([McMahan2017]_ with C = 1).

    :math:`S^t = S`. Symbols: S = slate.candidates. Deviations: none.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> session = Session(All(), ClientTable(n=5))
    >>> session.ask(RoundRequest(size=2)).clients
    array([0, 1, 2, 3, 4])
    """

    picks_by: ClassVar[str] = "Every available client is picked."

    selects = False

    def size(self, state: NoState, asked: int, candidates: int) -> int:
        """Return the number of candidates, whatever was asked for."""
        return candidates

    def select(
        self, state: NoState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, NoState]:
        """Return all candidates."""
        return Cohort(slate.candidates), state

"""For each check a deliberately broken selector that the check catches.

.. [Nobody2026] A source that every selector below but one cites.
"""

import dataclasses
import random
from dataclasses import dataclass

import numpy as np
import pytest

from fedcohort import Cohort, Losses, Selector, Signal, per_client
from fedcohort.core.params import Interval, param
from fedcohort.testing import CHECKS, ConformanceError, run_check


@dataclass(frozen=True)
class Counts:
    picked: np.ndarray = per_client()


@dataclass(frozen=True, kw_only=True)
class Sound(Selector[Counts]):
    r"""Least picked first, :math:`\arg\min T_k` ([Nobody2026]_). Symbols: T_k = picked. Deviations: none.

    >>> Sound().temperature
    1.0
    """

    temperature: float = param(1.0, Interval(float, 0, None), "unused")

    def init(self, clients, rng):
        return Counts(np.zeros(clients.n))

    def select(self, state, slate, answer, rng):
        ties = rng.random(len(slate.candidates))
        order = np.lexsort((ties, state.picked[slate.candidates]))[: slate.size]
        return Cohort(slate.candidates[order]), state

    def update(self, state, outcome):
        picked = state.picked.copy()
        picked[outcome.clients] += 1
        return Counts(picked)


class TooMany(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates), state


class Twice(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(np.repeat(slate.candidates[:1], min(2, slate.size))), state


class Outsider(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(np.arange(slate.n)[: slate.size]), state


class StopsAfterEmpty(Sound):
    def select(self, state, slate, answer, rng):
        # Assumes contiguous rounds and fails after an empty one.
        if slate.round == 3:
            return Cohort(np.empty(0, np.int64)), state
        return super().select(state, slate, answer, rng)


class GlobalRandom(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(np.random.choice(slate.candidates, slate.size, replace=False)), state  # noqa: NPY002


class PythonRandom(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(random.sample(slate.candidates.tolist(), slate.size)), state


class HashDependent(Sound):
    def select(self, state, slate, answer, rng):
        order = sorted(slate.candidates.tolist(), key=lambda c: hash(str(c)))
        return Cohort(order[: slate.size]), state


class HiddenState(Sound):
    # Its memory is outside the state, so a new object has forgotten.
    def select(self, state, slate, answer, rng):
        count = getattr(self, "_hidden", 0)
        object.__setattr__(self, "_hidden", count + 1)
        start = count % len(slate.candidates)
        return Cohort(np.roll(slate.candidates, -start)[: slate.size]), state


class ForgetsOnSave(Sound):
    def init(self, clients, rng):
        object.__setattr__(self, "_memory", 0)
        return Counts(np.zeros(clients.n))

    def select(self, state, slate, answer, rng):
        object.__setattr__(self, "_memory", self._memory + 1)
        return Cohort(np.roll(slate.candidates, -self._memory)[: slate.size]), state


class Mutates(Sound):
    def update(self, state, outcome):
        state.picked[outcome.clients] += 1
        return state


class MutatesUnsealed(Sound):
    def update(self, state, outcome):
        state.picked.flags.writeable = True
        state.picked[outcome.clients] += 1
        return state


@dataclass(frozen=True)
class History:
    cohorts: np.ndarray


class Grows(Sound):
    def init(self, clients, rng):
        return History(np.empty(0, np.int64))

    def select(self, state, slate, answer, rng):
        return Cohort(rng.choice(slate.candidates, slate.size, replace=False)), state

    def update(self, state, outcome):
        return History(np.concatenate([state.cohorts, outcome.clients]))


class Overflows(Sound):
    @property
    def requires(self):
        return frozenset({Signal.LOSS})

    def update(self, state, outcome):
        picked = state.picked.copy()
        with np.errstate(all="ignore"):
            picked[outcome.clients] = np.exp(outcome[Signal.LOSS])
        return Counts(picked)


class DividesByZero(Overflows):
    def update(self, state, outcome):
        picked = state.picked.copy()
        with np.errstate(all="ignore"):
            picked[outcome.clients] = 1.0 / outcome[Signal.LOSS]
        return Counts(picked)


class AssumesOk(Sound):
    def update(self, state, outcome):
        if not outcome.ok.all():
            raise RuntimeError("everybody must answer")
        return super().update(state, outcome)


class ReadsUndeclaredReport(Sound):
    def update(self, state, outcome):
        outcome[Signal.LOSS]
        return state


class ReadsUndeclaredTable(Sound):
    def select(self, state, slate, answer, rng):
        order = np.argsort(-slate.clients.sizes[slate.candidates])
        return Cohort(slate.candidates[order[: slate.size]]), state


class LowNumbersFirst(Sound):
    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates[: slate.size]), state


class Favourites(Sound):
    @property
    def requires(self):
        return frozenset({Signal.SIZES})

    def select(self, state, slate, answer, rng):
        order = np.argsort(-slate.clients.sizes[slate.candidates])
        return Cohort(slate.candidates[order[: slate.size]]), state


class CannotGrow(Sound):
    def grow(self, state, clients, rng):
        return state


@dataclass(frozen=True, kw_only=True)
class Unchecked(Sound):
    """Checks nothing."""

    def __post_init__(self):
        pass


class OwnMessage(Sound):
    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            from fedcohort.core.errors import ParameterError

            raise ParameterError("bad") from error


class Undocumented(Sound):
    """Picks clients."""


class AsksForNothing(Sound):
    """A query about clients that are not candidates is answered, but choosing then fails."""

    @property
    def requires(self):
        return frozenset({Signal.LOSS_QUERY})

    def query(self, state, slate, rng):
        return Losses(slate.candidates, frozenset())


class NeedsCohorts(Sound):
    one_at_a_time = True

    def update(self, state, outcome):
        if len(outcome.clients) < 2:
            raise RuntimeError("a mean needs two")
        return super().update(state, outcome)


BROKEN = {
    "cohort": [TooMany, Twice, Outsider, AsksForNothing],
    "nobody-available": [StopsAfterEmpty],
    "rules": [Outsider],
    "same-seed": [GlobalRandom, PythonRandom],
    "other-process": [HashDependent],
    "resume": [ForgetsOnSave],
    "one-at-a-time": [NeedsCohorts],
    "pure": [Mutates, MutatesUnsealed],
    "bounded-state": [Grows],
    "finite-state": [Overflows, DividesByZero],
    "reports": [AssumesOk],
    "signals": [ReadsUndeclaredReport, ReadsUndeclaredTable],
    "relabelling": [LowNumbersFirst],
    "everybody-eventually": [Favourites],
    "membership": [CannotGrow],
    "parameters": [Unchecked, OwnMessage],
    "documentation": [Undocumented],
}


def test_every_check_has_a_broken_selector():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize(("check", "cls"), [(check, cls) for check, classes in BROKEN.items() for cls in classes])
def test_check_catches(check, cls):
    with pytest.raises(ConformanceError, match=check):
        run_check(check, cls())


def test_hidden_state_is_caught_by_the_same_seed_check():
    with pytest.raises(ConformanceError):
        run_check("same-seed", HiddenState())


@pytest.mark.parametrize("check", [c for c in CHECKS if c != "other-process"])
def test_a_valid_selector_passes(check):
    run_check(check, Sound())


def test_replace_keeps_a_selector_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sound().temperature = 3.0

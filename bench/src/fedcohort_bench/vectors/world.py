"""A small world whose numbers follow from the round and the client alone, and a selector that can be asked about it.

A selector of ours is a pure function of state, slate, answer and generator. So the chance of a choice, after any
history, also one that other code has made, is found by asking it again and again from the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import SELECTORS, Cohort, Losses, Query, Selector, Status
from fedcohort.core.signals import Signal
from fedcohort.journal import ReplyBlock
from fedcohort.journal.codec import state_fields
from fedcohort.session.stateful import StatefulSelector
from fedcohort.testing import ScriptedHost

CLIENTS, COHORT = 16, 4


@dataclass(frozen=True)
class World(ScriptedHost):
    """Sixteen clients, some of which are away or fail in some rounds.

    Parameters
    ----------
    changed : str
        The quantity whose values are dealt to other clients, to see whether a choice depends on it: "loss", "duration",
        "size" or "test accuracy"; empty for none.
    everybody : bool
        Whether all clients are online in every round, and none fails.
    """

    n: int = CLIENTS
    seed: int = 1
    changed: str = ""
    everybody: bool = False
    speed: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng([self.seed, 7])
        object.__setattr__(self, "speed", np.round(rng.lognormal(2.0, 0.8, self.n), 3))
        self.facts["base"] = np.round(self.facts["base"], 3)
        if self.changed == "size":
            self.facts["counts"] = self.facts["counts"][self._dealt("size")]

    def _dealt(self, quantity: str) -> IntArray:
        everybody = np.arange(self.n)
        return np.roll(everybody, 5) if self.changed == quantity else everybody

    @property
    def sizes(self) -> IntArray:
        """(N,) samples of each client."""
        return np.asarray(self.facts["counts"].sum(axis=1))

    def losses(self, round_: int, clients: IntArray) -> FloatArray:
        """Return the mean losses of the global model."""
        return np.asarray(np.round(super().losses(round_, self._dealt("loss")[clients]), 4), np.float64)

    def durations(self, round_: int, clients: IntArray) -> FloatArray:
        """Return the seconds that clients take."""
        index = self._dealt("duration")[clients]
        return np.asarray(np.round(self.speed[index] * (1 + 0.1 * np.cos(round_ + index)), 3))

    def test_accuracy(self, round_: int, clients: IntArray) -> FloatArray:
        """Return accuracies on test data, which a selector must not use."""
        return np.asarray(np.round(0.5 + 0.4 * np.sin(1 + round_ + 2.0 * self._dealt("test accuracy")[clients]), 4))

    def available(self, round_: int) -> IntArray:
        """Return who is online: everybody in the first four rounds, then three quarters, others in each round."""
        everybody = np.arange(self.n)
        return everybody if round_ < 4 or self.everybody else everybody[(everybody + 3 * round_) % 4 != 0]

    def ok(self, round_: int, clients: IntArray) -> BoolArray:
        """Return who returns a model: in every third round, one in five does not."""
        return np.asarray(self.everybody | (round_ % 3 != 2) | ((np.asarray(clients) + round_) % 5 != 0))

    def replies(self, cohort: Cohort) -> ReplyBlock:
        """Return what a cohort reports, for a selector of ours."""
        ok = self.ok(cohort.round, cohort.clients)
        status = np.where(ok, Status.OK, Status.FAILED).astype(np.int8)
        report = self.report(cohort, status.tolist())
        # Six digits, so that a vector can hold what a selector was told.
        metrics = {s.name: np.asarray(np.round(values, 6), np.float64) for s, values in report.metrics.items()}
        metrics[Signal.DURATION.name] = self.durations(cohort.round, cohort.clients)
        return ReplyBlock(cohort.round, 0.0, False, cohort.clients, status, np.asarray(report.kept) & ok, metrics)

    def results(self, round_: int, clients: Sequence[int]) -> list[dict[str, Any]]:
        """Return what a cohort reports, in plain numbers for other people's code."""
        index = np.asarray(clients, np.int64)
        columns = {
            "client": index,
            "ok": self.ok(round_, index),
            "size": self.sizes[index],
            "loss": self.losses(round_, index),
            # The scripted losses have no spread over samples, so their root mean square is their mean.
            "loss_rms": self.losses(round_, index),
            "duration": self.durations(round_, index),
            "test_accuracy": self.test_accuracy(round_, index),
        }
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)
        ]


def created(name: str, **params: Any) -> Selector[Any]:
    """Return a registered selector that uses what this world supplies, which is everything."""
    return SELECTORS.create(name, **params).adapt(frozenset(Signal.all()))


def random_start(selector: Selector[Any], world: World) -> dict[str, list[float]]:
    """Return the parts of a selector's first state that it draws at random, from seed 0; empty if there are none."""
    first, other = (
        {
            name: np.asarray(value)
            for name, value in state_fields(StatefulSelector.initial(selector, world.table, s).state)
        }
        for s in (0, 1)
    )
    return {
        name: value.tolist()
        for name, value in first.items()
        if not np.array_equal(value, other[name], equal_nan=value.dtype.kind == "f")
    }


@dataclass(frozen=True)
class Draws:
    """What a selector does when it is asked many times from one state."""

    included: FloatArray  # (N,) share of the draws with the client
    score: dict[int, float] | None  # the same in every draw, else None
    query: Query | None  # of the first draw
    last: tuple[Cohort, StatefulSelector]  # the first draw's choice


class Ours:
    """A selector of ours in a world, with a history that may be somebody else's."""

    def __init__(self, selector: Selector[Any], world: World, size: int = COHORT) -> None:
        self.world, self.size = world, size
        self.now = StatefulSelector.initial(selector, world.table, seed=0)

    def draws(self, round_: int, count: int, query: Query | None = None, seed: int = 0) -> Draws:
        """Ask ``count`` times; with a ``query``, given its answer, else each draw asks its own question."""
        slate = self.now.slate(round_, self.size, self.world.available(round_))
        times = np.zeros(self.world.n)
        first: tuple[Query | None, Cohort, StatefulSelector] | None = None
        scores: dict[int, float] | None = None
        for draw in range(count):
            rng = np.random.default_rng([seed, round_, draw])
            asked = self.now.query(slate, rng) if query is None else query
            cohort, after = self.now.select(slate, self.world.answer(asked, round_), rng)
            times[cohort.clients] += 1
            mine = _scores(cohort)
            if first is None:
                first, scores = (asked, cohort, after), mine
            elif mine != scores:
                scores = None
        assert first is not None
        return Draws(times / count, scores, first[0], first[1:])

    def asked(self, round_: int, count: int) -> dict[str, int]:
        """Return how often each client is asked for its loss in ``count`` questions."""
        slate = self.now.slate(round_, self.size, self.world.available(round_))
        times = Counter[str]()
        for draw in range(count):
            query = self.now.query(slate, np.random.default_rng([0, round_, draw]))
            if isinstance(query, Losses):
                times.update(str(c) for c in query.clients.tolist())
        return dict(times)

    def learn(self, round_: int, clients: Sequence[int], after: StatefulSelector) -> None:
        """Learn what ``clients`` report, whoever chose them; ``after`` is the selector after a choice of its own."""
        cohort = Cohort(np.asarray(clients, np.int64), round=round_, ticket=round_)
        self.now = after.learn(round_, self.world.replies(cohort))


def _scores(cohort: Cohort) -> dict[int, float] | None:
    if cohort.score is None or cohort.candidates is None:
        return None
    # Nine digits: the order of additions in a matrix product differs between processors.
    return {int(c): float(f"{s:.9g}") for c, s in zip(cohort.candidates, cohort.score, strict=True) if np.isfinite(s)}

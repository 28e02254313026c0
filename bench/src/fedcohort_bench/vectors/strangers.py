"""Is somebody else's implementation the method it is named after? Play it, and compare it with ours.

Their code is played from start to end, many times. Before each of its choices, our selector is told the same history,
theirs, and is asked how likely each client is. The sums of what they chose minus these chances are zero on average if
both are the same method, whatever their constants and random numbers; a sum beyond chance is a difference, and the
round and the client say where.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Selector
from fedcohort.core.text import error_text
from fedcohort_bench.vectors.world import CLIENTS, COHORT, Ours, World, created, random_start

ROUNDS, LONG = 16, 60  # of a compared run, and of one that shows who is picked in the end
_RUNS, _DRAWS = 40, 120
_Z = 5.0  # some 400 sums are looked at, and chance exceeds this in one of 4,000 checks
QUANTITIES = ("loss", "duration", "size", "test accuracy")
_FEATURES = ("its last loss", "its last duration", "its size", "rounds since it last trained", "times it was picked")
Make = Callable[[int, list[int], int], Any]


@dataclass
class Report:
    """What was found.

    Attributes
    ----------
    crashes : by round, the error and in how many runs it was raised
    refused : by round, what was wrong with a choice and in how many runs
    impossible : by round, a client that the method never chooses there
    differs : rounds, clients, z of the differences beyond chance, the earliest round first
    scores : where its ``scores()`` differ; empty if they agree or there are none
    follows : by feature, z of how much more often it picks clients with a high value than the method does
    depends : by quantity, whether the choices change when its values are dealt to other clients: theirs, the method's
    distinct : different clients in the last third of long runs, on average: theirs, the method's
    """

    method: str
    crashes: dict[int, tuple[str, int]] = field(default_factory=dict)
    refused: dict[int, tuple[str, int]] = field(default_factory=dict)
    impossible: dict[int, tuple[int, int]] = field(default_factory=dict)
    differs: list[tuple[int, int, float]] = field(default_factory=list)
    scores: str = ""
    follows: dict[str, float] = field(default_factory=dict)
    depends: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    distinct: tuple[float, float] = (0.0, 0.0)

    @property
    def agrees(self) -> bool:
        """Whether nothing tells it from the method."""
        same = all(theirs == ours for theirs, ours in self.depends.values())
        return same and not (self.crashes or self.refused or self.differs or self.scores or self.locks_in)

    @property
    def locks_in(self) -> bool:
        """Whether it ends with much fewer clients than the method."""
        theirs, ours = self.distinct
        return theirs < 0.6 * ours

    def sentences(self) -> list[str]:
        """Return the findings in words."""
        lines = _first_of(self.crashes, "it raises ") + _first_of(self.refused, "")
        if self.scores:
            lines.append(self.scores)
        if self.differs:
            round_, client, z = self.differs[0]
            word = "more" if z > 0 else "less"
            lines.append(
                f"Round {round_} is the first in which its choices are not those of {self.method}: it picks client "
                f"{client} {word} often (z = {z:.1f}). "
                f"{len({r for r, _, _ in self.differs})} of {ROUNDS} rounds differ."
            )
            for r, (c, n) in list(self.impossible.items())[:1]:
                lines.append(
                    f"Round {r}: it picks clients such as {c} in {n} of {_RUNS} runs, and {self.method} never does."
                )
            for feature, z in sorted(self.follows.items(), key=lambda item: -abs(item[1])):
                if abs(z) > _Z:
                    more = "high" if z > 0 else "low"
                    lines.append(
                        f"Compared with {self.method}, it prefers clients for which {feature} is {more} (z = {z:.1f})."
                    )
        for quantity, (theirs, ours) in self.depends.items():
            if theirs != ours:
                name = "the accuracy on test data" if quantity == "test accuracy" else f"the {quantity} of clients"
                how = "change with" if theirs else "do not depend on"
                lines.append(f"Its choices {how} {name}; those of {self.method} do{' not' if theirs else ''}.")
        if self.locks_in:
            lines.append(
                f"It locks in: in the last {LONG // 3} of {LONG} rounds it picks {self.distinct[0]:.1f} different "
                f"clients of {CLIENTS}, {self.method} {self.distinct[1]:.1f}."
            )
        return lines or [f"Nothing tells it from {self.method} in {_RUNS} runs of {ROUNDS} rounds."]


def _first_of(found: dict[int, tuple[str, int]], verb: str) -> list[str]:
    if not found:
        return []
    round_, (what, runs) = min(found.items())
    more = f" The like happens in {len(found)} of {ROUNDS} rounds." if len(found) > 1 else ""
    return [f"Round {round_}: {verb}{what} in {runs} of {_RUNS} runs.{more}"]


def load_stranger(spec: str) -> Make:
    """Return the class or function in ``file.py:Name``; without a name, the only class that has ``ask``."""
    path, _, name = spec.partition(".py:") if ".py:" in spec else (spec.removesuffix(".py"), "", "")
    file = Path(f"{path}.py")
    if not file.is_file():
        raise InputError(f"There is no file {file}.", hint="name a file, or a class in it: theirs.py:Theirs")
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))
    found.loader.exec_module(module)
    own = {key: value for key, value in vars(module).items() if hasattr(value, "ask") and isinstance(value, type)}
    if name:
        if not hasattr(module, name):
            raise InputError(
                f"{file} has no {name!r}.", hint=f"it has {', '.join(own) or 'no class with a method ask'}"
            )
        return getattr(module, name)  # type: ignore[no-any-return]
    if len(own) != 1:
        raise InputError(
            f"{file} has {len(own)} classes with a method 'ask', and one is needed.", hint="name it: theirs.py:Theirs"
        )
    return next(iter(own.values()))


@dataclass
class _Run:
    """One run of a stranger in a world."""

    make: Make
    world: World
    seed: int
    report: Report | None = None

    def __post_init__(self) -> None:
        # Public code draws from global generators, which a check of it has to seed.
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002
        self.theirs = self.make(self.world.n, self.world.sizes.tolist(), self.seed)
        self.spare = np.random.default_rng(self.seed)

    def ask(self, round_: int) -> tuple[list[int], bool]:
        """Return its choice and whether it is one; after an error, a random cohort takes its place."""
        available = self.world.available(round_).tolist()

        def losses(clients: Sequence[int]) -> list[float]:
            return [float(x) for x in self.world.losses(round_, np.asarray(clients, np.int64))]

        try:
            chosen = [int(client) for client in self.theirs.ask(round_, available, COHORT, losses)]
        except Exception as error:
            self._count("crashes", round_, error_text(error))
        else:
            wrong = _what_is_wrong(chosen, available)
            if not wrong:
                return chosen, True
            self._count("refused", round_, wrong)
            if set(chosen) <= set(available) and len(set(chosen)) == len(chosen) and chosen:
                return chosen, False  # fewer or more than were asked for still train
        return sorted(self.spare.choice(available, COHORT, replace=False).tolist()), False

    def tell(self, round_: int, chosen: list[int]) -> None:
        try:
            self.theirs.tell(round_, self.world.results(round_, chosen))
        except Exception as error:
            self._count("crashes", round_, f"{error_text(error)} when told the results")

    def _count(self, kind: str, round_: int, what: str) -> None:
        if self.report is not None:
            known = getattr(self.report, kind)
            known[round_] = (what, known.get(round_, ("", 0))[1] + 1)

    def play(self, rounds: int) -> list[list[int]]:
        trace = []
        for round_ in range(rounds):
            chosen, _ = self.ask(round_)
            trace.append(sorted(chosen))
            self.tell(round_, chosen)
        return trace


def _what_is_wrong(chosen: list[int], available: list[int]) -> str:
    if len(set(chosen)) < len(chosen):
        return "it picks a client twice"
    if strange := sorted(set(chosen) - set(available)):
        return f"it picks {strange}, which are not available"
    return "" if len(chosen) == COHORT else f"it picks {len(chosen)} clients instead of {COHORT}"


def check_as(make: Make, method: str, on_run: Callable[[], None] = lambda: None) -> Report:
    """Play a stranger's selector as ``method``.

    Parameters
    ----------
    make : callable
        ``make(clients, sizes, seed)`` returns an object with ``ask(round, available, size, losses)``, which returns the
        chosen clients, and ``tell(round, results)``; ``losses(clients)`` asks clients for their losses. With a method
        ``scores()``, its scores of the last choice, {client: score}, are compared too. An attribute ``constants`` of
        ``make`` has the parameters with which ours is created, such as {"penalty": 1.0}; with ``everybody = True``,
        nobody is ever away or fails, for code that knows of neither.
    on_run : callable
        Called after each run.
    """
    ours = created(method, **getattr(make, "constants", {}))
    if random_start(ours, World()):
        raise InputError(
            f"{method!r} starts from random numbers that nobody outside can see, so its chances after a history are "
            "not known.",
            hint=f"compare scores with the test vector {method}.json, which names its start",
        )
    report = Report(method)
    everybody = bool(getattr(make, "everybody", False))
    shape = (ROUNDS, CLIENTS)
    excess, variance = np.zeros(shape), np.zeros(shape)
    pull, noise = np.zeros(len(_FEATURES)), np.zeros(len(_FEATURES))
    for seed in range(_RUNS):
        run = _Run(make, World(everybody=everybody), seed, report)
        _compare(run, ours, report, excess, variance, pull, noise)
        on_run()
    z = excess / np.sqrt(np.maximum(variance, 1e-12))
    found = np.argwhere((np.abs(z) > _Z) & (np.abs(excess) > 3))
    report.differs = sorted(((int(r), int(c), float(z[r, c])) for r, c in found), key=lambda f: (f[0], -abs(f[2])))
    pulls = (pull / np.sqrt(np.maximum(noise, 1e-12))).tolist()
    report.follows = dict(zip(_FEATURES, pulls, strict=True))
    report.depends = {
        quantity: (_depends(make, quantity, everybody), _ours_depends(ours, quantity, everybody))
        for quantity in QUANTITIES
    }
    report.distinct = (
        float(np.mean([_distinct(_Run(make, World(everybody=True), seed).play(LONG)) for seed in range(6)])),
        float(np.mean([_distinct(_ours(ours, World(everybody=True), seed, LONG)) for seed in range(6)])),
    )
    return report


def _compare(
    run: _Run,
    ours: Selector[Any],
    report: Report,
    excess: FloatArray,
    variance: FloatArray,
    pull: FloatArray,
    noise: FloatArray,
) -> None:
    """Play one run, and add what it chose minus the method's chances after the same history."""
    world = run.world
    played = Ours(ours, world)
    facts = np.zeros((len(_FEATURES), CLIENTS))  # of clients, by feature
    facts[2], facts[3] = world.sizes, ROUNDS
    for round_ in range(ROUNDS):
        drawn = played.draws(round_, _DRAWS, seed=run.seed + 1)
        chosen, valid = run.ask(round_)
        if valid:
            # Half a draw is added, so that a rare choice that no draw has shown is not taken for an impossible one.
            chance = np.where(drawn.included < 1, (drawn.included * _DRAWS + 0.5) / (_DRAWS + 1), _DRAWS / (_DRAWS + 1))
            chance[np.setdiff1d(np.arange(CLIENTS), world.available(round_))] = 0.0
            left = -chance
            left[chosen] += 1
            spread = chance * (1 - chance) * (1 + 1 / _DRAWS)
            excess[round_] += left
            variance[round_] += spread
            if never := [client for client in chosen if drawn.included[client] == 0]:
                report.impossible[round_] = (never[0], report.impossible.get(round_, (0, 0))[1] + 1)
            known = facts - facts[:, world.available(round_)].mean(axis=1, keepdims=True)
            scale = np.maximum(np.abs(known).max(axis=1, keepdims=True), 1e-12)
            pull += (known / scale) @ left
            noise += (known / scale) ** 2 @ spread
            if not report.scores and drawn.score is not None and hasattr(run.theirs, "scores"):
                report.scores = _different_scores(run.theirs.scores(), drawn.score, round_, report.method)
        run.tell(round_, chosen)
        results = world.results(round_, chosen)
        for row in results:
            if row["ok"]:
                facts[0, row["client"]], facts[1, row["client"]] = row["loss"], row["duration"]
        facts[3] += 1
        facts[3, chosen] = 0
        facts[4, chosen] += 1
        played.learn(round_, chosen, drawn.last[1])


def _different_scores(theirs: dict[int, float], ours: dict[int, float], round_: int, method: str) -> str:
    for client in sorted(ours):
        if client in theirs and not np.isclose(theirs[client], ours[client], rtol=1e-4, atol=1e-9):
            return (
                f"Round {round_}: the score of client {client} is {theirs[client]:.6g}; "
                f"{method} computes {ours[client]:.6g}."
            )
    return ""


def _depends(make: Make, quantity: str, everybody: bool) -> bool:
    """Whether any of a few runs with one seed changes when a quantity's values belong to other clients."""
    worlds = World(everybody=everybody), World(changed=quantity, everybody=everybody)
    return any(len({str(_Run(make, world, seed).play(ROUNDS)) for world in worlds}) > 1 for seed in range(4))


def _ours(ours: Selector[Any], world: World, seed: int, rounds: int) -> list[list[int]]:
    played = Ours(ours, world)
    trace: list[list[int]] = []
    for round_ in range(rounds):
        slate = played.now.slate(round_, COHORT, world.available(round_))
        rng = np.random.default_rng([seed, round_])
        query = played.now.query(slate, rng)
        cohort, after = played.now.select(slate, world.answer(query, round_), rng)
        trace.append(sorted(cohort.clients.tolist()))
        played.learn(round_, cohort.clients.tolist(), after)
    return trace


def _ours_depends(ours: Selector[Any], quantity: str, everybody: bool) -> bool:
    worlds = World(everybody=everybody), World(changed=quantity, everybody=everybody)
    return any(len({str(_ours(ours, world, seed, ROUNDS)) for world in worlds}) > 1 for seed in range(4))


def _distinct(trace: list[list[int]]) -> int:
    return len({client for cohort in trace[-(LONG // 3) :] for client in cohort})

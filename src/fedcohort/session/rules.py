"""Rules an operator sets: which clients may be picked, which must be, and how often.

A session applies its rules before a selector sees a slate: excluded clients are not candidates, demanded clients are in
the cohort, and quotas are filled afterwards. Every exclusion is recorded with its reason. An abandoned cohort does not
count as a participation, but a client that failed in it has failed once more. In detail, for a round r and a client's
participations P (the earlier rounds in which it was in the cohort):

- ``paused`` until u: not while r < u;
- ``min_separation`` b: no p in P with r - p < b;
- ``max_participations`` m: fewer than m rounds in P. A budget may allow fewer participations: for each kind, the
  client's own amount in ``budgets``, or else in ``budget``, divided by ``cost``;
- ``max_in_window`` x of ``window`` w: fewer than x of P among the w - 1 rounds before r;
- ``min_in_window`` x of ``window`` w: any w rounds in a row after it joined have x participations, as long as it is
  available and there is room;
- ``at_most`` q of an attribute: no cohort has more than q clients with the same value. A client beyond that loses its
  place to the next best client whose value has room;
- ``cool_off`` c after ``failures`` f: not in the c cohorts after the last of f failures in a row. Abandoned cohorts
  count here, so that no client cools off forever while a round is repeated.

``min_separation`` and ``max_participations`` are the participation rules of DP-FTRL. Its guarantee needs no sampling,
only that every client stays within these limits ([Xu2023]_). They work with any selector, and
:func:`fedcohort.audit.participation.prove_participation` proves from a journal that they held.

.. [Xu2023] Z. Xu et al., "Federated Learning of Gboard Language Models with Differential Privacy", arXiv 2305.18465.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Constraint, Interval, Optional, Parameterized, Text, param, parameters
from fedcohort.core.params import Sequence as ListOf
from fedcohort.session.expressions import Condition

_NO_BOUND = np.iinfo(np.int64).max
_COUNT = Interval(int, 1, _NO_BOUND)


@dataclass(frozen=True)
class _Table(Constraint):
    """A mapping from strings to values that ``inner`` admits."""

    inner: Constraint
    keys: str = "names"

    def admits(self, value: object) -> bool:
        """Whether ``value`` is such a mapping."""
        return isinstance(value, Mapping) and all(isinstance(k, str) and self.inner.admits(v) for k, v in value.items())

    def describe(self) -> str:
        """Name the keys and the values."""
        return f"a table of {self.keys}, each with {self.inner.describe()}"

    def bad_values(self) -> list[object]:
        """Return a number, a table with a bad key, and tables with bad values."""
        return [3, {3: 1}, *({"x": bad} for bad in self.inner.bad_values())]


EDGE = "edge"  # an attribute that is read from a client's name


def edge_of(name: str) -> str | None:
    """Return the edge server in front of a client, by its name; None for a name without a path.

    >>> edge_of("edge-3/client-17"), edge_of("eu/edge-3/client-17"), edge_of("client-17")
    ('edge-3', 'eu/edge-3', None)
    """
    return name.rpartition("/")[0] or None


_COUNTS = _Table(_COUNT)
_AMOUNTS = _Table(Interval(float, 0, None, "neither"))
ROUNDS = "rounds"  # the kind of budget for which a participation always costs 1


@dataclass(frozen=True, kw_only=True)
class Rules(Parameterized):
    """An operator's requirements for every cohort, whatever the selector.

    Examples
    --------
    >>> Rules(eligible="battery >= 30", blocked=("kiosk-7",), min_separation=10, max_participations=5)
    Rules(eligible='battery >= 30', blocked=('kiosk-7',), min_separation=10, max_participations=5)
    """

    eligible: str | None = param(None, Optional(Text()), "condition on attributes that every candidate must meet")
    blocked: tuple[str, ...] = param((), ListOf(Text()), "clients that are never picked")
    pinned: tuple[str, ...] = param((), ListOf(Text()), "clients that are always picked when they may be")
    paused: Mapping[str, int] | None = param(
        None, Optional(_Table(Interval(int, 0, 10**12))), "by client, the round from which it may be picked again"
    )
    failures: int = param(3, _COUNT, "failures in a row after which a client cools off")
    cool_off: int = param(0, Interval(int, 0, _NO_BOUND), "cohorts a client cools off after that; 0: never")
    min_separation: int = param(1, _COUNT, "minimum number of rounds from one participation to the next (b of DP-FTRL)")
    max_participations: int | None = param(None, Optional(_COUNT), "maximum number of participations in the whole run")
    window: int | None = param(None, Optional(_COUNT), "rounds in the window of min_in_window and max_in_window")
    max_in_window: int | None = param(None, Optional(_COUNT), "maximum number of participations in any window")
    min_in_window: int | None = param(None, Optional(_COUNT), "minimum number of participations in any window")
    quotas: Mapping[str, Mapping[str, int]] | None = param(
        None,
        Optional(_Table(_COUNTS, "attributes")),
        "by attribute and value, the minimum number of clients in a cohort; other values have no quota",
    )
    at_most: Mapping[str, int] | None = param(
        None, Optional(_COUNTS), "by attribute, how many clients of one value a cohort has at most"
    )
    budget: Mapping[str, float] | None = param(
        None, Optional(_AMOUNTS), "by kind (rounds, bytes, epsilon), what a client may spend"
    )
    budgets: Mapping[str, Mapping[str, float]] | None = param(
        None, Optional(_Table(_AMOUNTS, "clients")), "by client, budgets that differ; other kinds stay as in 'budget'"
    )
    cost: Mapping[str, float] | None = param(
        None, Optional(_AMOUNTS), "by kind, what one participation spends; 1 of rounds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eligible is not None:
            Condition.read(self.eligible)
        kinds = set(self.budget or {}).union(*(self.budgets or {}).values())
        if kinds - {ROUNDS} != set(self.cost or {}) - {ROUNDS}:
            raise ParameterError(
                "The 'cost' parameter of Rules must name the kinds of 'budget' and 'budgets' ('rounds', which costs 1, "
                f"may be left out). Got {sorted(self.cost or {})} for {sorted(kinds)}."
            )
        both = set(self.blocked) & set(self.pinned)
        if both:
            raise ParameterError(f"Rules cannot block and pin the same client. Got {sorted(both)}.")
        if self.window is None:
            if self.min_in_window or self.max_in_window:
                raise ParameterError("The 'min_in_window' and 'max_in_window' parameters of Rules need 'window'.")
            return
        low, high = self.min_in_window or 0, self.max_in_window or self.window
        if not low <= high <= self.window:
            raise ParameterError(
                f"The window of Rules must have min_in_window <= max_in_window <= window. "
                f"Got {self.min_in_window}, {self.max_in_window}, {self.window}."
            )
        fit = math.ceil(self.window / self.min_separation)
        if low > fit:
            raise ParameterError(
                f"Rules cannot demand {low} participations in {self.window} rounds that are {self.min_separation} "
                f"rounds apart: only {fit} fit.",
                hint="lower min_in_window or min_separation",
            )

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'{name}={value!r}' for name, value in self._set_values().items())})"

    def _set_values(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults."""
        values = ((info, getattr(self, info.name)) for info in parameters(type(self)))
        return {info.name: value for info, value in values if value != info.default}

    @property
    def most(self) -> int | None:
        """The maximum participations in the whole run of a client without its own budget; None: no limit."""
        return self._most(self.budget or {})

    def most_of(self, name: str) -> int | None:
        """Return the maximum participations of one client, by count and by its budget; None: no limit."""
        budget = (self.budgets or {}).get(name)
        return self.most if budget is None else self._most({**(self.budget or {}), **budget})

    def _most(self, budget: Mapping[str, float]) -> int | None:
        cost = {ROUNDS: 1.0, **(self.cost or {})}
        # 1e-9 is added because 0.3 / 0.1 is 2.999... in doubles and means three participations; 2**62 keeps an
        # enormous budget countable.
        bounds = [math.floor(min(limit / cost[kind] + 1e-9, 2.0**62)) for kind, limit in budget.items()]
        if self.max_participations is not None:
            bounds.append(self.max_participations)
        return min(bounds) if bounds else None

    def with_names(self, name: Callable[[str], str]) -> Rules:
        """Return the same rules with clients renamed by a function."""
        budgets = self.budgets and {name(client): budget for client, budget in self.budgets.items()}
        blocked, pinned = (tuple(map(name, names)) for names in (self.blocked, self.pinned))
        paused = self.paused and {name(client): until for client, until in self.paused.items()}
        changes = {"blocked": blocked, "pinned": pinned, "paused": paused, "budgets": budgets}
        return Rules(**{**self.to_dict(), **changes})

    @property
    def named(self) -> tuple[str, ...]:
        """The clients that the rules name, each once."""
        return tuple(dict.fromkeys((*self.blocked, *self.pinned, *(self.paused or ()), *(self.budgets or ()))))

    @property
    def by_name(self) -> bool:
        """Whether the rules depend on who a client is, and not only on the attributes it reports."""
        return bool(self.to_dict().keys() - {"eligible", "quotas", "failures"})

    def check_feasible(self, clients: Iterable[str], size: int, rounds: int) -> None:
        """Raise an error, with the arithmetic, if ``clients`` cannot fill ``rounds`` cohorts of ``size``."""
        if len(set(self.pinned)) > size:
            raise ParameterError(
                f"The rules pin {len(set(self.pinned))} clients, but a cohort has only {size}.",
                hint="pin fewer clients, or choose larger cohorts",
            )
        for name, claims in (self.quotas or {}).items():
            if sum(claims.values()) > size:
                raise ParameterError(
                    f"The quotas of {name!r} claim {sum(claims.values())} places, but a cohort has only {size}.",
                    hint="lower the quotas, or choose larger cohorts",
                )
        names = set(clients) - set(self.blocked)
        most = (self.at_most or {}).get(EDGE)
        if most is not None:
            edges = Counter(edge_of(name) for name in names)
            free = edges.pop(None, 0)
            places = free + sum(min(most, count) for count in edges.values())
            if places < size:
                available = f"{len(edges)} edges" + (f" and {free} clients without an edge" if free else "")
                raise ParameterError(
                    f"The rules cannot fill cohorts of {size}: with at most {most} clients of an edge, the {available} "
                    f"have {places} places.",
                    hint="raise at_most, or choose smaller cohorts",
                )
        n = len(names)
        available = f"{n} clients that are not blocked" if self.blocked else f"{n} clients"
        apart = min(self.min_separation, rounds)
        if apart > 1 and size * apart > n:
            raise ParameterError(
                f"The rules cannot fill cohorts of {size}: with min_separation={self.min_separation} any {apart} "
                f"rounds in a row need {size} x {apart} = {size * apart} different clients, but there are {available}.",
                hint=f"lower min_separation to {max(n // size, 1)}, choose smaller cohorts, or start when at least "
                f"{size * apart} clients have joined (wait_for)",
            )
        if self.window is not None and self.max_in_window is not None and self.window <= rounds:
            needed, admitted = size * self.window, n * self.max_in_window
            if needed > admitted:
                raise ParameterError(
                    f"The rules cannot fill cohorts of {size}: {self.window} rounds need {size} x {self.window} = "
                    f"{needed} participations, but with max_in_window={self.max_in_window} the {available} have {n} x "
                    f"{self.max_in_window} = {admitted}.",
                    hint="raise max_in_window, choose smaller cohorts, or start when more clients have joined "
                    "(wait_for)",
                )

    def shortages(self, spent: Mapping[str, int], size: int, rounds: int) -> list[str]:
        """Return, in words, why the rules cannot fill ``rounds`` more cohorts of ``size`` unless clients join.

        Parameters
        ----------
        spent : mapping of str to int
            The clients, each with its participations so far.
        """
        shortages = []
        admitted = {name: self.most_of(name) for name in spent if name not in self.blocked}
        bounds = [max(most - spent[name], 0) for name, most in admitted.items() if most is not None]
        if len(bounds) == len(admitted) and sum(bounds) < size * rounds:
            shortages.append(
                f"{rounds} rounds of {size} need {size * rounds} participations, but the rules allow the "
                f"{len(bounds)} clients only {sum(bounds)}"
            )
        if self.window is not None and self.min_in_window is not None:
            places, demanded = size * self.window, len(admitted) * self.min_in_window
            if self.window <= rounds and demanded > places:
                shortages.append(
                    f"{len(admitted)} clients must take part {self.min_in_window} times in {self.window} rounds, which "
                    f"takes {demanded} places; there are {size} x {self.window} = {places}"
                )
        return shortages

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults, as plain values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self._set_values().items()}


def difference(before: Rules | None, after: Rules) -> str:
    """Return in words how new rules differ from the old ones.

    >>> difference(Rules(max_participations=9), Rules(max_participations=2, blocked=("kiosk-7",)))
    "blocked is now ['kiosk-7'], max_participations was 9, is now 2"
    >>> difference(Rules(max_participations=9), Rules())
    'max_participations was 9, is now unset'
    """
    old, new = {} if before is None else before.to_dict(), after.to_dict()
    changes = []
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            was = f" was {old[key]}," if key in old else ""
            changes.append(f"{key}{was} is now {new.get(key, 'unset')}")
    return ", ".join(changes) or "nothing differs"

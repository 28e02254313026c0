"""Rules an operator sets: who may be picked at all, who must be, and how often.

A session holds its rules before any selector sees a slate: whom they exclude is no candidate, whom they demand is taken
first, and quotas are mended afterwards. Every exclusion is recorded with its reason. A cohort that was abandoned counts
for nothing, except that who answered it with a failure has failed once more. The words, for a round r and a client's
participations P (the earlier rounds whose cohorts it was in):

- ``paused`` until u: not while r < u;
- ``min_separation`` b: no p in P with r - p < b;
- ``max_participations`` m: fewer than m rounds in P; a budget that admits fewer participations counts alike: of each
  kind, the client's own from ``budgets`` or else ``budget``, divided by ``cost``;
- ``max_in_window`` x of ``window`` w: fewer than x of P among the w - 1 rounds before r;
- ``min_in_window`` x of ``window`` w: every w rounds in a row, from when it joined, hold x participations, as long as
  it is available and there is room;
- ``cool_off`` c after ``failures`` f: not in the c cohorts after the last of f failures in a row. Cohorts that were
  abandoned count here, so that a round that is tried again and again lets nobody cool off for ever.

``min_separation`` and ``max_participations`` are the participation rules of DP-FTRL: its guarantee needs no sampling,
only that nobody takes part more often or at shorter distance than these say ([Xu2023]_). Any selector can be used
under them, and :func:`fedcohort.session.participation.verify` proves from a journal that they held.

.. [Xu2023] Z. Xu et al., "Federated Learning of Gboard Language Models with Differential Privacy", arXiv 2305.18465.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Constraint, Interval, Optional, Parameterized, Text, param, parameters
from fedcohort.core.params import Sequence as ListOf
from fedcohort.core.protocol import Cohort, Status
from fedcohort.session.expressions import Attributes, Condition

_NEVER = np.iinfo(np.int64).min // 2
_NO_BOUND = np.iinfo(np.int64).max
_COUNT = Interval(int, 1, _NO_BOUND)


@dataclass(frozen=True)
class _Numbers(Constraint):
    """A table of names and numbers above 0."""

    number: Interval

    def admits(self, value: object) -> bool:
        """Whether ``value`` is such a table."""
        return isinstance(value, Mapping) and all(
            isinstance(k, str) and self.number.admits(v) for k, v in value.items()
        )

    def describe(self) -> str:
        """Name the allowed values."""
        return f"a table of names, each with {self.number.describe()}"

    def bad_values(self) -> list[object]:
        """Return things that are no such table."""
        return [3, {"x": -1}, {3: 1}]


@dataclass(frozen=True)
class _Tables(Constraint):
    """A table of names, each with such a table of numbers."""

    inner: _Numbers
    keys: str = "clients"

    def admits(self, value: object) -> bool:
        """Whether ``value`` is such a table of tables."""
        return isinstance(value, Mapping) and all(isinstance(k, str) and self.inner.admits(v) for k, v in value.items())

    def describe(self) -> str:
        """Name the allowed values."""
        return f"a table of {self.keys}, each with {self.inner.describe()}"

    def bad_values(self) -> list[object]:
        """Return things that are no such table."""
        return [3, {"anna": 3}, {"anna": {"epsilon": -1}}]


_AMOUNTS = _Numbers(Interval(float, 0, None, "neither"))
ROUNDS = "rounds"  # the kind of budget of which a participation always costs 1


@dataclass(frozen=True, kw_only=True)
class Rules(Parameterized):
    """What an operator demands of every cohort, whatever the selector.

    Examples
    --------
    >>> Rules(eligible="battery >= 30", blocked=("kiosk-7",), min_separation=10, max_participations=5)
    Rules(eligible='battery >= 30', blocked=('kiosk-7',), min_separation=10, max_participations=5)
    """

    eligible: str | None = param(None, Optional(Text()), "condition on attributes that every candidate meets")
    blocked: tuple[str, ...] = param((), ListOf(Text()), "clients that are never picked")
    pinned: tuple[str, ...] = param((), ListOf(Text()), "clients that are always picked when they may be")
    paused: Mapping[str, int] | None = param(
        None, Optional(_Numbers(Interval(int, 0, 10**12))), "by client, the round from which it may be picked again"
    )
    failures: int = param(3, _COUNT, "failures in a row after which a client cools off")
    cool_off: int = param(0, Interval(int, 0, _NO_BOUND), "cohorts a client cools off after that; 0: never")
    min_separation: int = param(1, _COUNT, "rounds at least from one participation to the next (b of DP-FTRL)")
    max_participations: int | None = param(None, Optional(_COUNT), "participations at most in the whole run")
    window: int | None = param(None, Optional(_COUNT), "rounds that min_in_window and max_in_window are about")
    max_in_window: int | None = param(None, Optional(_COUNT), "participations at most in any window")
    min_in_window: int | None = param(None, Optional(_COUNT), "participations at least in any window")
    quotas: Mapping[str, Mapping[str, int]] | None = param(
        None,
        Optional(_Tables(_Numbers(_COUNT), "attributes")),
        "by attribute, how many clients of a value a cohort has at least; other values have no claim",
    )
    budget: Mapping[str, float] | None = param(
        None, Optional(_AMOUNTS), "by kind (rounds, bytes, epsilon), what a client may spend"
    )
    budgets: Mapping[str, Mapping[str, float]] | None = param(
        None, Optional(_Tables(_AMOUNTS)), "by client, where its budget is another; kinds it does not name stay"
    )
    cost: Mapping[str, float] | None = param(
        None, Optional(_AMOUNTS), "by kind, what one participation spends; 1 of rounds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eligible is not None:
            Condition.read(self.eligible)
        if (self.min_in_window or self.max_in_window) and self.window is None:
            raise ParameterError("The 'min_in_window' and 'max_in_window' parameters of Rules need 'window'.")
        low, high = self.min_in_window or 0, self.max_in_window or self.window or 0
        if self.window is not None and not low <= high <= self.window:
            raise ParameterError(
                f"The window of Rules must have min_in_window <= max_in_window <= window. "
                f"Got {self.min_in_window}, {self.max_in_window}, {self.window}."
            )
        kinds = set(self.budget or {}).union(*(self.budgets or {}).values())
        if kinds - {ROUNDS} != set(self.cost or {}) - {ROUNDS}:
            raise ParameterError(
                "The 'cost' parameter of Rules must name the kinds of 'budget' and 'budgets' ('rounds', which costs 1, "
                f"may be left out). Got {sorted(self.cost or {})} for {sorted(kinds)}."
            )
        if self.min_in_window and self.window and self.min_in_window > math.ceil(self.window / self.min_separation):
            raise ParameterError(
                f"Rules cannot demand {self.min_in_window} participations in {self.window} rounds that are "
                f"{self.min_separation} rounds apart: only {math.ceil(self.window / self.min_separation)} fit.",
                hint="lower min_in_window or min_separation",
            )
        both = set(self.blocked) & set(self.pinned)
        if both:
            raise ParameterError(f"Rules cannot block and pin the same client. Got {sorted(both)}.")

    def __repr__(self) -> str:
        given = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return f"Rules({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def most(self) -> int | None:
        """Participations at most in the whole run of a client without a budget of its own; None: no bound."""
        return self._most(self.budget or {})

    def most_of(self, name: str) -> int | None:
        """Participations at most of one client, by count and by its budget; None: no bound."""
        own = (self.budgets or {}).get(name)
        return self.most if own is None else self._most({**(self.budget or {}), **own})

    def _most(self, budget: Mapping[str, float]) -> int | None:
        cost = {ROUNDS: 1.0, **(self.cost or {})}
        # A budget that never ends is one of as many rounds as can be counted.
        bounds = [math.floor(min(limit / cost[kind] + 1e-9, 2.0**62)) for kind, limit in budget.items()]
        if self.max_participations is not None:
            bounds.append(self.max_participations)
        return min(bounds) if bounds else None

    @classmethod
    def recorded(cls, values: Mapping[str, Any]) -> Rules:
        """Return rules as a journal holds them.

        Quotas of version 0.2 may name no values. Such rules can be proved and played again, but no session goes on
        with them: see :attr:`trusts_clients`.
        """
        quotas = values.get("quotas") or {}
        if all(isinstance(claims, Mapping) for claims in quotas.values()):
            return cls(**values)
        rules = cls(**{key: value for key, value in values.items() if key != "quotas"})
        object.__setattr__(rules, "quotas", quotas)
        return rules

    @property
    def trusts_clients(self) -> bool:
        """Whether these are rules of version 0.2 whose quotas hold for every value that a client invents."""
        return any(not isinstance(claims, Mapping) for claims in (self.quotas or {}).values())

    def renamed(self, name: Callable[[str], str]) -> Rules:
        """Return the same rules with the clients they name under other names."""
        budgets = self.budgets and {name(client): own for client, own in self.budgets.items()}
        blocked, pinned = (tuple(map(name, names)) for names in (self.blocked, self.pinned))
        paused = self.paused and {name(client): until for client, until in self.paused.items()}
        changes = {"blocked": blocked, "pinned": pinned, "paused": paused, "budgets": budgets}
        return Rules.recorded({**self.to_dict(), **changes})

    @property
    def by_name(self) -> bool:
        """Whether anything in them is about who somebody is, and not only about what it says of itself."""
        return bool(self.to_dict().keys() - {"eligible", "quotas", "failures"})

    def check_feasible(self, clients: Iterable[str], size: int, rounds: int) -> None:
        """Refuse rules under which ``clients`` cannot fill ``rounds`` cohorts of ``size``, with the arithmetic."""
        n = len(set(clients) - set(self.blocked))
        there = f"{n} clients that are not blocked" if self.blocked else f"{n} clients"
        if len(set(self.pinned)) > size:
            raise ParameterError(
                f"The rules pin {len(set(self.pinned))} clients, and a cohort has {size}.",
                hint="pin fewer clients, or choose larger cohorts",
            )
        for name, claims in (self.quotas or {}).items():
            claimed = sum(claims.values()) if isinstance(claims, Mapping) else 0
            if claimed > size:
                raise ParameterError(
                    f"The quotas of {name!r} claim {claimed} places, and a cohort has {size}.",
                    hint="lower the quotas, or choose larger cohorts",
                )
        apart = min(self.min_separation, rounds)
        if apart > 1 and size * apart > n:
            raise ParameterError(
                f"The rules cannot fill cohorts of {size}: with min_separation={self.min_separation} any {apart} "
                f"rounds in a row need {size} x {apart} = {size * apart} different clients, and there are {there}.",
                hint=f"lower min_separation to {max(n // size, 1)}, choose smaller cohorts, or start when at least "
                f"{size * apart} clients are there (wait_for)",
            )
        if self.window is not None and self.max_in_window is not None and self.window <= rounds:
            needed, admitted = size * self.window, n * self.max_in_window
            if needed > admitted:
                raise ParameterError(
                    f"The rules cannot fill cohorts of {size}: {self.window} rounds need {size} x {self.window} = "
                    f"{needed} participations, and with max_in_window={self.max_in_window} the {there} have {n} x "
                    f"{self.max_in_window} = {admitted}.",
                    hint="raise max_in_window, choose smaller cohorts, or start when more clients are there (wait_for)",
                )

    def shortages(self, spent: Mapping[str, int], size: int, rounds: int) -> list[str]:
        """Return what the rules cannot give in ``rounds`` more cohorts of ``size``, unless other clients join.

        Parameters
        ----------
        spent : mapping of str to int
            The clients, each with its participations so far.
        """
        found = []
        admitted = {name: self.most_of(name) for name in spent if name not in self.blocked}
        bounds = [max(most - spent[name], 0) for name, most in admitted.items() if most is not None]
        if len(bounds) == len(admitted) and sum(bounds) < size * rounds:
            found.append(
                f"{rounds} rounds of {size} need {size * rounds} participations, and the rules admit "
                f"{sum(bounds)} of the {len(bounds)} clients there are"
            )
        if self.window is not None and self.min_in_window is not None:
            places, demanded = size * self.window, len(admitted) * self.min_in_window
            if self.window <= rounds and demanded > places:
                found.append(
                    f"{len(admitted)} clients are to take part {self.min_in_window} times in {self.window} rounds, and "
                    f"these have {size} x {self.window} = {places} places for {demanded}"
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults, as plain values."""
        values = {info.name: getattr(self, info.name) for info in parameters(type(self))}
        changed = {f.name for f in dataclasses.fields(self) if values[f.name] != f.default}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k in changed}


@dataclass
class Ledger:
    """Who took part when, as rules count it.

    Parameters
    ----------
    n : int
        Clients.
    window : int
        How many rounds are remembered one by one.
    """

    n: int
    window: int = 1
    last: IntArray = field(init=False)
    count: IntArray = field(init=False)
    streak: IntArray = field(init=False)  # failures in a row
    failed: IntArray = field(init=False)  # the ticket of the last one
    joined: IntArray = field(init=False)
    recent: deque[tuple[int, int, IntArray]] = field(init=False)  # (ticket, round, clients)

    def __post_init__(self) -> None:
        self.last, self.failed = (np.full(self.n, _NEVER, np.int64) for _ in range(2))
        self.count, self.streak, self.joined = (np.zeros(self.n, np.int64) for _ in range(3))
        self.recent = deque()

    def grow(self, n: int, round_: int) -> None:
        """Make room for clients that joined before ``round_``."""
        more = n - self.n
        self.last = np.concatenate([self.last, np.full(more, _NEVER, np.int64)])
        self.failed = np.concatenate([self.failed, np.full(more, _NEVER, np.int64)])
        self.count = np.concatenate([self.count, np.zeros(more, np.int64)])
        self.streak = np.concatenate([self.streak, np.zeros(more, np.int64)])
        self.joined = np.concatenate([self.joined, np.full(more, round_, np.int64)])
        self.n = n

    def picked(self, ticket: int, round_: int, clients: IntArray) -> None:
        """Count a cohort."""
        self.last[clients] = round_
        self.count[clients] += 1
        self.recent.append((ticket, round_, clients))
        while self.recent and self.recent[0][1] <= round_ - self.window:
            self.recent.popleft()

    def told(self, ticket: int, clients: IntArray, status: AnyArray) -> None:
        """Count failures in a row."""
        ok = np.asarray(status) == Status.OK
        self.streak[clients[ok]] = 0
        self.streak[clients[~ok]] += 1
        self.failed[clients[~ok]] = np.maximum(self.failed[clients[~ok]], ticket)

    def in_last(self, round_: int, rounds: int) -> IntArray:
        """(N,) participations in the ``rounds`` rounds before ``round_``."""
        found = np.zeros(self.n, np.int64)
        for _, past, clients in self.recent:
            if round_ - rounds <= past < round_:
                found[clients] += 1
        return found


@dataclass(frozen=True)
class Verdict:
    """What the rules say about one request.

    Attributes
    ----------
    allowed : (a,) int array
        The candidates that remain.
    demanded : (d,) int array
        Those of them that must be in the cohort, most urgent first.
    codes : (N,) int16 array
        0, or one more than the place in ``reasons`` of why a client is excluded.
    reasons : tuple of str
    """

    allowed: IntArray
    demanded: IntArray
    codes: AnyArray
    reasons: tuple[str, ...]

    def free(self, size: int | None) -> tuple[IntArray, int | None]:
        """Return whom a selector chooses from, and how many, once those are taken that the rules demand."""
        demanded = self.demanded if size is None else self.demanded[:size]
        rest = self.allowed[~np.isin(self.allowed, demanded)]
        return rest, None if size is None else size - len(demanded)


class Referee:
    """Rules over one federation.

    Parameters
    ----------
    rules : Rules
    table : ClientTable
    """

    def __init__(self, rules: Rules, table: ClientTable) -> None:
        self.rules = rules
        self.ledger = Ledger(table.n, max(rules.window or 1, 1))
        self._condition = None if rules.eligible is None else Condition.read(rules.eligible)
        self._attributes: dict[str, dict[str, Any]] = {}
        self._set_table(table)

    def _set_table(self, table: ClientTable) -> None:
        self._table = table
        names = {name: i for i, name in enumerate(table.names)} if self.rules.blocked or self.rules.pinned else {}
        self._blocked = np.array([names[n] for n in self.rules.blocked if n in names], np.int64)
        self._pinned = np.array([names[n] for n in self.rules.pinned if n in names], np.int64)
        self._paused: IntArray | None = None  # (N,) the round from which each may be picked again
        if self.rules.paused:
            self._paused = np.zeros(table.n, np.int64)
            for name, until in self.rules.paused.items():
                if _knows(table, name):
                    self._paused[table.index(name)] = until
        self._most: IntArray | None = None  # (N,) participations at most
        if self.rules.most is not None or self.rules.budgets:
            self._most = np.full(table.n, _NO_BOUND if self.rules.most is None else self.rules.most, np.int64)
            for name in self.rules.budgets or {}:
                if _knows(table, name):
                    own = self.rules.most_of(name)
                    self._most[table.index(name)] = _NO_BOUND if own is None else own
        self._judge_attributes(range(table.n))

    def set_table(self, table: ClientTable, round_: int) -> None:
        """Take over a table that grew or whose facts changed."""
        if table.n > self.ledger.n:
            self.ledger.grow(table.n, round_)
        self._set_table(table)

    @property
    def attributes(self) -> Mapping[str, Attributes]:
        """What clients said about themselves, by name."""
        return self._attributes

    def set_attributes(self, attributes: Mapping[str, Attributes]) -> None:
        """Take over what clients say about themselves now."""
        self._attributes.update({name: dict(values) for name, values in attributes.items()})
        known = [self._table.index(name) for name in attributes if _knows(self._table, name)]
        self._judge_attributes(known)

    def _of(self, client: int) -> dict[str, Any]:
        own = self._attributes.get(self._table.name(client), {})
        sizes = {"size": float(self._table.sizes[client])} if "sizes" in self._table.signals else {}
        return {**own, **sizes}  # what the table says comes first: it is what everybody else goes by

    def _judge_attributes(self, clients: Iterable[int]) -> None:
        """Work out who meets the condition and who has which value of a quota's attribute."""
        n = self._table.n
        if len(getattr(self, "_unmet", ())) != n:
            self._unmet: list[str | None] = [None] * n
            self._values: dict[str, list[Any]] = {name: [None] * n for name in self.rules.quotas or {}}
            clients = range(n)
        if self._condition is None and not self._values:
            return
        for client in clients:
            attributes = self._of(client)
            if self._condition is not None:
                self._unmet[client] = self._condition.unmet(attributes)
            for name, values in self._values.items():
                values[client] = _claimed((self.rules.quotas or {})[name], attributes.get(name))

    # -- before the choice ------------------------------------------------------------------------------------------

    def judge(self, round_: int, ticket: int, candidates: IntArray) -> Verdict:
        """Say who of ``candidates`` may be picked for the cohort ``ticket`` of ``round_`` and who must be."""
        rules, ledger = self.rules, self.ledger
        codes = np.zeros(ledger.n, np.int16)
        reasons: list[str] = []

        def exclude(mask: BoolArray, reason: str) -> None:
            fresh = mask & (codes[candidates] == 0)
            if fresh.any():
                reasons.append(reason)
                codes[candidates[fresh]] = len(reasons)

        if len(self._blocked):
            exclude(np.isin(candidates, self._blocked), "it is blocked")
        if self._paused is not None:
            until = self._paused[candidates]
            for end in np.unique(until[until > round_]).tolist():
                exclude(until == end, f"it is paused until round {end}")
        if self._condition is not None:
            said = [self._unmet[c] for c in candidates.tolist()]
            for reason in dict.fromkeys(s for s in said if s is not None):
                exclude(np.array([s == reason for s in said], np.bool_), reason)
        since = round_ - ledger.last[candidates]
        if rules.min_separation > 1:
            exclude(since < rules.min_separation, f"fewer than {rules.min_separation} rounds since it last took part")
        if self._most is not None:
            spent = ledger.count[candidates] >= self._most[candidates]
            for bound in np.unique(self._most[candidates][spent]).tolist():
                exclude(spent & (self._most[candidates] == bound), f"it took part {bound} times, all it may")
        if rules.max_in_window is not None and rules.window is not None:
            often = ledger.in_last(round_, rules.window - 1)[candidates] >= rules.max_in_window
            exclude(often, f"it took part {rules.max_in_window} times in the last {rules.window - 1} rounds")
        if rules.cool_off:
            hot = (ledger.streak[candidates] >= rules.failures) & (ticket - ledger.failed[candidates] <= rules.cool_off)
            after = f"{rules.failures} failures in a row" if rules.failures > 1 else "a failure"
            exclude(hot, f"it cools off for {rules.cool_off} cohorts after {after}")
        allowed = candidates[codes[candidates] == 0]
        return Verdict(allowed, self._demanded(round_, allowed), codes, tuple(reasons))

    def _demanded(self, round_: int, allowed: IntArray) -> IntArray:
        rules, ledger = self.rules, self.ledger
        pinned = allowed[np.isin(allowed, self._pinned)]
        if rules.min_in_window is None or rules.window is None:
            return pinned
        due = np.zeros(ledger.n, np.bool_)
        for ahead in range(rules.min_in_window):
            # The window that ends `ahead` rounds later: without this round only so many are left in it.
            begin = round_ + ahead - rules.window + 1
            held = ledger.in_last(round_, round_ - begin) if round_ > begin else np.zeros(ledger.n, np.int64)
            due |= (held < rules.min_in_window - ahead) & (begin >= ledger.joined)
        urgent = allowed[due[allowed]]
        urgent = urgent[np.argsort(ledger.last[urgent], kind="stable")]
        return np.concatenate([pinned, urgent[~np.isin(urgent, pinned)]])

    # -- after the choice -------------------------------------------------------------------------------------------

    def mended(
        self, cohort: Cohort, demanded: IntArray, allowed: IntArray, size: int, rng: np.random.Generator
    ) -> Cohort:
        """Return a cohort with whom the rules demand, and with the quotas filled as far as that can be."""
        picked = [*demanded.tolist(), *cohort.clients.tolist()]
        notes: dict[str, str] = {}
        if len(demanded):
            notes["demanded by the rules"] = ", ".join(self._table.names_of(demanded[:20]))
        added: list[int] = []
        if self.rules.quotas:
            picked, added, unmet = self._with_quotas(picked, set(demanded.tolist()), allowed, size, cohort, rng)
            if added:
                notes["added for a quota"] = ", ".join(self._table.name(c) for c in added[:20])
            if unmet:
                notes["quota not met"] = "; ".join(unmet)
        if not notes:
            return cohort
        clients = np.array(picked, np.int64)
        return dataclasses.replace(
            cohort,
            clients=clients,
            notes={**cohort.notes, **notes},
            weights=_spread(cohort.weights, cohort.clients, clients),
            work=_spread(cohort.work, cohort.clients, clients),
        )

    def _with_quotas(
        self, picked: list[int], fixed: set[int], allowed: IntArray, size: int, cohort: Cohort, rng: np.random.Generator
    ) -> tuple[list[int], list[int], list[str]]:
        """Add clients of values that are short, best first, in place of the worst of values that have enough.

        Only values count that the operator named: a client that invents one has no claim to a place.
        """
        order = _ranking(allowed, cohort, rng)
        place = {client: i for i, client in enumerate(order)}
        added: list[int] = []
        unmet: list[str] = []
        for name, claims in (self.rules.quotas or {}).items():
            values = self._values[name]
            groups: dict[Any, list[int]] = {}
            for client in order:
                if values[client] is not None:
                    groups.setdefault(values[client], []).append(client)
            least = claims if isinstance(claims, Mapping) else dict.fromkeys(groups, int(claims))
            need = {value: min(least[value], len(members)) for value, members in groups.items()}
            for value, members in groups.items():
                for client in members:
                    have = sum(values[c] == value for c in picked)
                    if have >= need[value]:
                        break
                    if client in picked:
                        continue
                    if len(picked) >= size:
                        counts = {v: sum(values[c] == v for c in picked) for v in need}
                        spare = [c for c in picked if c not in fixed and c not in added and
                                 (values[c] is None or counts[values[c]] > need[values[c]])]  # fmt: skip
                        if not spare:
                            break
                        picked = [c for c in picked if c != max(spare, key=place.__getitem__)]
                    picked = [*picked, client]
                    added.append(client)
            for value, count in least.items():
                have = sum(values[c] == value for c in picked)
                if have < count:
                    unmet.append(f"{name} {value}: {have} of {count}")
        return picked, added, unmet


def _knows(table: ClientTable, name: str) -> bool:
    try:
        table.index(name)
    except KeyError:
        return False
    return True


def _claimed(claims: Mapping[str, int] | int, said: object) -> object:
    """Return the value of a quota that a client counts for, or None: values the operator does not name have no claim.

    Values are compared as TOML writes them, because a journal's keys are texts.
    """
    if not isinstance(claims, Mapping):
        return said  # of version 0.2, played again
    text = str(said).lower() if isinstance(said, bool) else str(said)
    return text if said is not None and text in claims else None


def _ranking(allowed: IntArray, cohort: Cohort, rng: np.random.Generator) -> list[int]:
    """Return candidates best first: by the selector's score, those without one by lot."""
    lot = rng.permutation(len(allowed))
    score = np.full(len(allowed), -np.inf)
    if cohort.score is not None and cohort.candidates is not None:
        at = np.searchsorted(allowed, cohort.candidates)
        inside = at < len(allowed)
        inside[inside] = allowed[at[inside]] == cohort.candidates[inside]
        score[at[inside]] = np.nan_to_num(cohort.score[inside], nan=-np.inf)
    return [int(c) for c in allowed[np.lexsort((lot, -score))]]


def _spread(values: AnyArray | None, before: IntArray, after: IntArray) -> AnyArray | None:
    """Return per-client values of a cohort for another one; who is new gets the mean."""
    if values is None:
        return None
    known = dict(zip(before.tolist(), values.tolist(), strict=True))
    usual = float(np.mean(values)) if len(values) else 1.0
    return np.array([known.get(client, usual) for client in after.tolist()])


def excluded(codes: AnyArray, reasons: Sequence[str], client: int) -> str | None:
    """Return why a client was excluded, or None."""
    code = int(codes[client]) if client < len(codes) else 0
    return reasons[code - 1] if code else None

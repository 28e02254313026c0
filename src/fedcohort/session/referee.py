"""Apply an operator's rules to one federation: which clients a cohort may contain, and which it must."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.session.expressions import Attributes, Condition
from fedcohort.session.rules import EDGE, Rules, edge_of

_NEVER = np.iinfo(np.int64).min // 2  # a round long ago; half of the smallest integer, so that differences fit
_NO_BOUND = np.iinfo(np.int64).max
_NAMED = 20  # at most this many clients are named in a cohort's note


class _ParticipationLedger:
    """How often each of ``n`` clients took part and failed, as the rules count it."""

    def __init__(self, n: int, window: int) -> None:
        self.n = n
        self.last = np.full(n, _NEVER, np.int64)  # the last round in which each client took part
        self.count = np.zeros(n, np.int64)
        self.streak = np.zeros(n, np.int64)  # failures in a row
        self.failed = np.full(n, _NEVER, np.int64)  # the ticket of the last failure
        self.joined = np.zeros(n, np.int64)  # the first round in which each client could take part
        self.window = window  # for so many rounds, single cohorts are remembered
        self.recent: deque[tuple[int, IntArray]] = deque()  # (round, clients)

    def grow(self, n: int, round_: int) -> None:
        """Make room for clients that joined before ``round_``."""
        fills = {"last": _NEVER, "failed": _NEVER, "count": 0, "streak": 0, "joined": round_}
        for name, fill in fills.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.full(n - self.n, fill, np.int64)]))
        self.n = n

    def count_cohort(self, round_: int, clients: IntArray) -> None:
        """Count a cohort."""
        self.last[clients] = round_
        self.count[clients] += 1
        self.recent.append((round_, clients))
        # A run of a million rounds must not remember a million cohorts.
        while self.recent and self.recent[0][0] <= round_ - self.window:
            self.recent.popleft()

    def count_replies(self, ticket: int, clients: IntArray, status: AnyArray) -> None:
        """Count a cohort's failures."""
        ok = np.asarray(status) == Status.OK
        self.streak[clients[ok]] = 0
        self.streak[clients[~ok]] += 1
        # Cohorts may be closed in another order than they were asked in.
        self.failed[clients[~ok]] = np.maximum(self.failed[clients[~ok]], ticket)

    def in_last(self, round_: int, rounds: int) -> IntArray:
        """(N,) participations in the ``rounds`` rounds before ``round_``."""
        # Cohorts and not a table of rounds and clients, which would take gigabytes for a million clients.
        counts = np.zeros(self.n, np.int64)
        for past, clients in self.recent:
            if round_ - rounds <= past < round_:
                counts[clients] += 1
        return counts


class Eligibility(NamedTuple):
    """Which candidates of one request the rules allow and demand.

    Attributes
    ----------
    allowed : (a,) int array
        The candidates that are not excluded.
    demanded : (d,) int array
        The allowed candidates that must be in the cohort, most urgent first.
    codes : (N,) int16 array
        For an excluded client, the position of its reason in ``reasons`` plus 1; 0 for the others.
    """

    allowed: IntArray
    demanded: IntArray
    codes: AnyArray
    reasons: tuple[str, ...]

    def remaining(self, size: int | None) -> tuple[IntArray, int | None]:
        """Return the clients that the selector may choose from, and how many, besides the demanded ones."""
        # There may be more demanded clients than places, so the most urgent come first.
        demanded = self.demanded if size is None else self.demanded[:size]
        rest = self.allowed[~np.isin(self.allowed, demanded)]
        return rest, None if size is None else size - len(demanded)


class Referee:
    """Apply rules to one federation, and count the participations that they limit."""

    def __init__(self, rules: Rules, table: ClientTable) -> None:
        self.rules = rules
        self.ledger = _ParticipationLedger(table.n, max(rules.window or 1, 1))
        self._condition = None if rules.eligible is None else Condition.read(rules.eligible)
        self._attributes: dict[str, dict[str, Any]] = {}
        self._unmet: list[str | None] = []  # by client, why it does not meet the condition
        self._values: dict[str, list[Any]] = {}  # by attribute with quotas and by client, the value it counts for
        self._groups: dict[str, list[Any]] = {}  # by attribute with a limit and by client, its value
        self._set_table(table)

    def _set_table(self, table: ClientTable) -> None:
        # The names in the rules are looked up once here, and not in every round.
        self._table = table
        self._blocked = _indices(table, self.rules.blocked)
        self._pinned = _indices(table, self.rules.pinned)
        # By client, the round from which it may be picked again, and how often it may take part in the whole run.
        self._paused: IntArray | None = None
        if self.rules.paused:
            self._paused = np.zeros(table.n, np.int64)
            for name, until in self.rules.paused.items():
                if name in table:
                    self._paused[table.index(name)] = until
        self._most: IntArray | None = None
        if self.rules.most is not None or self.rules.budgets:
            self._most = np.full(table.n, _NO_BOUND if self.rules.most is None else self.rules.most, np.int64)
            for name in self.rules.budgets or {}:
                if name in table:
                    limit = self.rules.most_of(name)
                    self._most[table.index(name)] = _NO_BOUND if limit is None else limit
        self._check_attributes(range(table.n))

    def set_table(self, table: ClientTable, round_: int) -> None:
        """Use a table that has grown, or whose facts have changed."""
        if table.n > self.ledger.n:
            self.ledger.grow(table.n, round_)
        self._set_table(table)

    @property
    def attributes(self) -> Mapping[str, Attributes]:
        """The clients' attributes by name."""
        return self._attributes

    def set_attributes(self, attributes: Mapping[str, Attributes]) -> None:
        """Store new attributes of some clients."""
        self._attributes.update({name: dict(values) for name, values in attributes.items()})
        self._check_attributes(_indices(self._table, attributes).tolist())

    def _check_attributes(self, clients: Iterable[int]) -> None:
        """Find out which clients meet the condition, and their values of attributes with a quota or limit."""
        quotas, at_most, n = self.rules.quotas or {}, self.rules.at_most or {}, self._table.n
        # Conditions are evaluated when attributes change and not in every round, which would take longer than all else.
        if len(self._unmet) != n:  # the federation has grown
            self._unmet = [None] * n
            self._values = {name: [None] * n for name in quotas}
            self._groups = {name: [None] * n for name in at_most}
            clients = range(n)
        for client in clients if self._condition is not None or quotas or at_most else ():
            name = self._table.name(client)
            attributes = dict(self._attributes.get(name, {}))
            # The table overrides what a client reports: selectors use its sizes, and a client cannot change its name.
            if Signal.SIZES in self._table.signals:
                attributes["size"] = float(self._table.sizes[client])
            if (edge := edge_of(name)) is not None:
                attributes[EDGE] = edge
            if self._condition is not None:
                self._unmet[client] = self._condition.unmet(attributes)
            for attribute, claims in quotas.items():
                value = attributes.get(attribute)
                # In TOML's spelling, because the keys of a journal are strings.
                text = str(value).lower() if isinstance(value, bool) else str(value)
                self._values[attribute][client] = text if value is not None and text in claims else None
            for attribute in at_most:
                self._groups[attribute][client] = attributes.get(attribute)

    # -- before the choice ------------------------------------------------------------------------------------------

    def eligibility(self, round_: int, ticket: int, candidates: IntArray) -> Eligibility:
        """Return which of ``candidates`` may be in the cohort ``ticket`` of ``round_``, and which must be."""
        codes = np.zeros(self.ledger.n, np.int16)
        reasons: list[str] = []
        # The first rule that excludes a client gives the reason. An operator's decisions about clients come before what
        # follows from their record.
        for mask, reason in self._exclusions(round_, ticket, candidates):
            excluded = mask & (codes[candidates] == 0)
            if excluded.any():
                reasons.append(reason)
                codes[candidates[excluded]] = len(reasons)
        allowed = candidates[codes[candidates] == 0]
        return Eligibility(allowed, self._required_clients(round_, allowed), codes, tuple(reasons))

    def _exclusions(self, round_: int, ticket: int, candidates: IntArray) -> Iterator[tuple[BoolArray, str]]:
        """Yield for each reason which candidates it excludes."""
        rules, ledger = self.rules, self.ledger
        if len(self._blocked):
            yield np.isin(candidates, self._blocked), "it is blocked"
        if self._paused is not None:
            until = self._paused[candidates]
            for end in np.unique(until[until > round_]).tolist():
                yield until == end, f"it is paused until round {end}"
        if self._condition is not None:
            unmet = [self._unmet[c] for c in candidates.tolist()]
            for reason in dict.fromkeys(u for u in unmet if u is not None):
                yield np.array([u == reason for u in unmet], np.bool_), reason
        if rules.min_separation > 1:
            recent = round_ - ledger.last[candidates] < rules.min_separation
            yield recent, f"fewer than {rules.min_separation} rounds since it last took part"
        if self._most is not None:
            limits = self._most[candidates]
            spent = ledger.count[candidates] >= limits
            for bound in np.unique(limits[spent]).tolist():
                yield spent & (limits == bound), f"it took part {bound} times, its maximum"
        if rules.max_in_window is not None and rules.window is not None:
            often = ledger.in_last(round_, rules.window - 1)[candidates] >= rules.max_in_window
            yield often, f"it took part {rules.max_in_window} times in the last {rules.window - 1} rounds"
        if rules.cool_off:
            # Counted in cohorts, because a round that is repeated keeps its number.
            soon = ticket - ledger.failed[candidates] <= rules.cool_off
            after = f"{rules.failures} failures in a row" if rules.failures > 1 else "a failure"
            yield (
                (ledger.streak[candidates] >= rules.failures) & soon,
                f"it is cooling off for {rules.cool_off} cohorts after {after}",
            )

    def _required_clients(self, round_: int, allowed: IntArray) -> IntArray:
        rules, ledger = self.rules, self.ledger
        pinned = allowed[np.isin(allowed, self._pinned)]
        if rules.min_in_window is None or rules.window is None:
            return pinned
        due = np.zeros(ledger.n, np.bool_)
        for ahead in range(rules.min_in_window):
            # After this round, only `ahead` rounds are left in the window that ends `ahead` rounds later.
            begin = round_ + ahead - rules.window + 1
            count = ledger.in_last(round_, round_ - begin) if round_ > begin else np.zeros(ledger.n, np.int64)
            due |= (count < rules.min_in_window - ahead) & (begin >= ledger.joined)
        # There may be more of them than places, so those that have waited longest come first.
        urgent = allowed[due[allowed]]
        urgent = urgent[np.argsort(ledger.last[urgent], kind="stable")]
        return np.concatenate([pinned, urgent[~np.isin(urgent, pinned)]])

    # -- after the choice -------------------------------------------------------------------------------------------

    def apply(self, cohort: Cohort, eligibility: Eligibility, size: int | None, rng: np.random.Generator) -> Cohort:
        """Return the cohort with the demanded clients added, limits kept, and quotas filled as far as possible."""
        allowed = eligibility.allowed
        if not len(allowed) or cohort.stop is not None:
            return cohort
        size = len(allowed) if size is None else int(size)
        demanded = eligibility.demanded[:size]
        picked = [*demanded.tolist(), *cohort.clients.tolist()]
        removed: list[int] = []
        added: list[int] = []
        unmet: list[str] = []
        # The selector's scores decide who fills a place, so that rules disturb its choice as little as possible.
        order = _ranking(allowed, cohort, rng) if self.rules.quotas or self.rules.at_most else []
        # Limits come first, because a client that is added for a quota must keep them.
        if self.rules.at_most:
            kept: list[int] = []
            for client in picked:
                (kept if self._fits(kept, client) else removed).append(client)
            for client in order:  # the best that fit take the free places
                if len(kept) < len(picked) and client not in kept and self._fits(kept, client):
                    kept.append(client)
            picked = kept
        if self.rules.quotas:
            picked, added, unmet = self._fill_quotas(picked, demanded.tolist(), order, size)
        notes = {
            "demanded by the rules": self._first_names(demanded.tolist()),
            "too many of one value": self._first_names(removed),
            "added for a quota": self._first_names(added),
            "quota not met": "; ".join(unmet),
        }
        notes = {title: text for title, text in notes.items() if text}
        if not notes:
            return cohort  # the rules changed nothing
        clients = np.array(picked, np.int64)
        return dataclasses.replace(
            cohort,
            clients=clients,
            notes={**cohort.notes, **notes},
            weights=_spread(cohort.weights, cohort.clients, clients),
            work=_spread(cohort.work, cohort.clients, clients),
        )

    def _first_names(self, clients: Sequence[int]) -> str:
        return ", ".join(self._table.name(client) for client in clients[:_NAMED])

    def _fits(self, picked: Sequence[int], client: int) -> bool:
        """Whether a client can be added to others without exceeding a limit."""
        return all(
            values[client] is None
            or sum(values[c] == values[client] for c in picked) < (self.rules.at_most or {})[name]
            for name, values in self._groups.items()
        )

    def _fill_quotas(
        self, picked: list[int], demanded: Sequence[int], order: Sequence[int], size: int
    ) -> tuple[list[int], list[int], list[str]]:
        """Fill quotas with the best clients, which replace the worst clients of values that have enough.

        Return the new picks, the added clients, and in words the quotas that are not met.
        """
        rank = {client: i for i, client in enumerate(order)}
        added: list[int] = []
        unmet: list[str] = []
        for name, claims in (self.rules.quotas or {}).items():
            values = self._values[name]
            groups: dict[Any, list[int]] = {}  # candidates by value, best first; None counts for no quota
            for client in order:
                if values[client] is not None:
                    groups.setdefault(values[client], []).append(client)
            need = {value: min(claims[value], len(group)) for value, group in groups.items()}
            for value, group in groups.items():
                for client in group:
                    counts = Counter(values[c] for c in picked)
                    if counts[value] >= need[value]:
                        break
                    if client in picked:
                        continue
                    others = picked
                    if len(picked) >= size:
                        # Demanded clients, and those added for another quota, keep their places.
                        spare = [
                            c for c in picked
                            if c not in demanded and c not in added
                            and (values[c] is None or counts[values[c]] > need[values[c]])
                        ]  # fmt: skip
                        if not spare:
                            break
                        worst = max(spare, key=rank.__getitem__)
                        others = [c for c in picked if c != worst]
                    if self._fits(others, client):
                        picked = [*others, client]
                        added.append(client)
            counts = Counter(values[c] for c in picked)
            unmet += [f"{name} {value}: {counts[value]} of {least}" for value, least in claims.items()
                      if counts[value] < least]  # fmt: skip
        return picked, added, unmet


def _indices(table: ClientTable, names: Iterable[str]) -> IntArray:
    """Return the indices of clients by name; names that have not joined yet are left out."""
    return np.array([table.index(name) for name in names if name in table], np.int64)


def _ranking(allowed: IntArray, cohort: Cohort, rng: np.random.Generator) -> list[int]:
    """Return candidates best first, by the selector's score; those without a score are in random order."""
    tie_breaker = rng.permutation(len(allowed))
    score = np.full(len(allowed), -np.inf)
    if cohort.score is not None and cohort.candidates is not None:
        at = np.searchsorted(allowed, cohort.candidates)
        inside = at < len(allowed)
        inside[inside] = allowed[at[inside]] == cohort.candidates[inside]
        score[at[inside]] = np.nan_to_num(cohort.score[inside], nan=-np.inf)
    return [int(c) for c in allowed[np.lexsort((tie_breaker, -score))]]


def _spread(values: AnyArray | None, before: IntArray, after: IntArray) -> AnyArray | None:
    """Return a cohort's per-client values for another cohort; new clients get the mean."""
    if values is None:
        return None
    known = dict(zip(before.tolist(), values.tolist(), strict=True))
    mean = float(np.mean(values)) if len(values) else 1.0
    return np.array([known.get(client, mean) for client in after.tolist()])

r"""Accounts with one number S: no client is asked more than S times, and none less than 1/S times, its even share.

An even draw would ask client n with probability :math:`\pi_n` in a choice; :math:`a_n` is the sum of :math:`\pi_n` over
all choices so far, and :math:`p_n` how often it was asked. With :math:`\lambda / S = 1 - e^{-\lambda}` and
:math:`e^\mu - 1 = S \mu`, a cohort is permitted if it keeps

.. math:: \Phi = \sum_n e^{\lambda (a_n / S - p_n)} + e^{\mu (p_n - S a_n)} \le 2 N.

After the :math:`a_n` grew, asking client n adds its *price* to :math:`\Phi`. An even draw costs nothing on average, so
the cheapest cohort is always permitted. Whatever a selector prefers among permitted cohorts,

.. math:: a_n / S - \ln(2N) / \lambda \;\le\; p_n \;\le\; S a_n + \ln(2N) / \mu.

Where clients are asked one by one, busy clients count in the even draw, but cannot be asked. Then :math:`a_n` of the
first sum grows only while the client can be asked, and there may be no permitted choice until a busy client is back.
The page of ``balanced`` has the proof.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import brentq

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Slate, is_per_client, per_client
from fedcohort.selectors.numerics.sampling import inclusion_probabilities

_MAX_VALUE = 600.0  # exponents are cut here; they are below ln(2N) unless a journal was changed
_ROUNDING = 1e-9  # of sums, relative to the budget
_NAMED = 20  # most clients that a note names
_SUMMED = 1.0  # growth of the clock after which sums are taken anew, because rounding errors of the first grow with it

HAD_ITS_SHARE = "had its share"
"""The note that names candidates that could not be asked."""
WAITS = "every free client has had its share"
"""Why a cohort is empty, where clients are asked one by one."""


@dataclass(frozen=True)
class Accounts:
    r"""What is remembered of all choices.

    If all clients are drawn alike, all :math:`a_n` that grow do so together. Then only ``clock`` changes, and rows
    change when clients come and go.
    """

    clock: float  # a_n of a client that was always online
    summed: float  # the clock when the sums were last taken anew
    sums: FloatArray  # (4,) first and second sum over the clients that grow, then over the others
    asked: FloatArray = per_client()  # (N,) p_n
    even: FloatArray = per_client()  # (N,) a_n, less the clock while it is online
    free: FloatArray = per_client()  # (N,) a_n of the times when it could be asked, less the clock while it can
    online: BoolArray = per_client()  # (N,) whether it was online at the last choice, busy or not
    able: BoolArray = per_client()  # (N,) whether it could be asked at the last choice


Kept = TypeVar("Kept", bound=Accounts)


def open_accounts(n: int) -> Accounts:
    """Return the accounts of ``n`` clients before the first choice."""
    nothing, nobody = np.zeros(n), np.zeros(n, np.bool_)
    return Accounts(0.0, -math.inf, np.zeros(4), nothing, nothing, nothing, nobody, nobody)


def extended(accounts: Kept, n: int) -> Kept:
    """Return the accounts of ``n`` clients, of whom the last ones are new."""
    fresh = open_accounts(n)
    rows: dict[str, Any] = {}
    for f in filter(is_per_client, dataclasses.fields(Accounts)):
        before = getattr(accounts, f.name)
        rows[f.name] = np.concatenate([before, getattr(fresh, f.name)[len(before) :]])
    return dataclasses.replace(accounts, summed=-math.inf, **rows)


@lru_cache
def exponents(share: float) -> tuple[float, float]:
    r"""Return :math:`\lambda` and :math:`\mu` of S = ``share``.

    >>> [round(x, 3) for x in exponents(4.0)]
    [3.921, 2.337]
    """
    log = math.log(share)
    least = brentq(lambda x: 1.0 - math.exp(-x) - x / share, log, share, xtol=1e-14)
    most = brentq(lambda x: math.expm1(x) - share * x, log, 2.0 * log, xtol=1e-14)
    return float(least), float(most)


class Choice:
    """What the accounts permit in one choice.

    Parameters
    ----------
    accounts : Accounts
        After the last choice.
    share : float
        S, above 1.
    slate : Slate
        The candidates, and the busy clients if they are asked one by one.
    sizes : (N,) float array, optional
        An even draw takes each client with a probability proportional to its size; default: all alike.
    among : (c,) int array, optional
        Choose among these candidates only; default: all. Others need not be looked at, because all that can be asked
        grow alike.

    Attributes
    ----------
    prices : (c,) float array
        What asking each candidate adds to the potential.
    room : float
        The most that a cohort may add.
    """

    def __init__(
        self,
        accounts: Accounts,
        share: float,
        slate: Slate,
        sizes: FloatArray | None = None,
        among: IntArray | None = None,
    ) -> None:
        self.share, self.size = share, slate.size
        self.waits = slate.busy is not None and len(slate.busy) > 0  # for busy clients, if nobody is permitted
        able = np.zeros(len(accounts.asked), np.bool_)
        able[slate.candidates] = True
        online = able
        if slate.busy is not None:
            online = able.copy()
            online[slate.busy] = True
        self.accounts = _grown(_moved(accounts, share, online, able), share, slate, sizes)
        least, most = exponents(share)
        self._falls, self._rises = -math.expm1(-least), math.expm1(most)
        budget = 2.0 * len(able)
        self.room = budget * (1.0 + _ROUNDING) - float(self.accounts.sums.sum())
        self.look_at(slate.candidates if among is None else among)

    def look_at(self, candidates: IntArray) -> None:
        """Choose among these candidates, and begin again."""
        low, high = terms(self.accounts, self.share, candidates)
        self.candidates = candidates
        self.prices = self._rises * high - self._falls * low
        self.members: list[int] = []
        self._spent = 0.0
        self._taken = np.zeros(len(candidates), np.bool_)
        if self.size == 1:  # many prices are equal, and partitioning equal numbers is slow
            self._cheapest = np.array([self.prices.argmin()])
        else:
            first = np.argpartition(self.prices, self.size - 1)[: self.size]
            self._cheapest = first[np.argsort(self.prices[first], kind="stable")]

    @property
    def is_possible(self) -> bool:
        """Whether the cheapest cohort is permitted."""
        return float(self.prices[self._cheapest].sum()) <= self.room

    def permitted(self) -> BoolArray:
        """(c,) whether each candidate and the cheapest others complete the members to a permitted cohort.

        Among them is always the cheapest candidate, except where it is better to wait for a busy client. Members are
        not among them.
        """
        others = self.prices[self._cheapest[~self._taken[self._cheapest]][: self.size - len(self.members)]]
        most = self.room - self._spent - float(others[:-1].sum())
        # Rounding may leave no cohort within the budget; the cheapest one is accepted all the same.
        return np.asarray((self.prices <= (most if self.waits else max(most, others[-1]))) & ~self._taken)

    def add(self, position: int) -> None:
        """Add a candidate to the cohort."""
        self.members.append(position)
        self._taken[position] = True
        self._spent += float(self.prices[position])

    def remove(self, position: int) -> None:
        """Remove a member from the cohort."""
        self.members.remove(position)
        self._taken[position] = False
        self._spent = float(self.prices[self.members].sum())  # again, so that no rounding error stays behind

    def all_permitted(self, turn: int = 0) -> BoolArray:
        """(c,) candidates of whom any cohort is permitted, as many as possible and at least a cohort.

        ``turn`` decides which of many equal candidates are left out.
        """
        order = np.roll(np.arange(len(self.prices)), -turn)
        order = order[np.argsort(self.prices[order], kind="stable")]
        before = np.concatenate([[0.0], self.prices[order].cumsum()])
        dearest = before[self.size :] - before[: -self.size]  # of the first `size`, `size` + 1, ... candidates
        count = int(np.searchsorted(dearest, self.room, side="right"))
        shown = np.zeros(len(order), np.bool_)
        if count or not self.waits:
            shown[order[: self.size - 1 + max(count, 1)]] = True
        return shown

    def fits(self, clients: IntArray) -> bool:
        """Whether these clients are a permitted cohort."""
        return float(self.prices[np.isin(self.candidates, clients)].sum()) <= self.room

    def counts(self) -> tuple[FloatArray, FloatArray]:
        """(c,) how often each candidate was asked (p_n), and how often an even draw would have (a_n)."""
        now, rows = self.accounts, self.candidates
        return now.asked[rows], now.even[rows] + now.clock * now.online[rows]

    def booked(self, clients: IntArray, state: Kept) -> Kept:
        """Return ``state`` with these accounts after the cohort ``clients``; without clients, nothing has happened."""
        if not len(clients):
            return state
        low, high = terms(self.accounts, self.share, clients)
        sums, asked = self.accounts.sums.copy(), self.accounts.asked.copy()
        sums[:2] += -self._falls * low.sum(), self._rises * high.sum()
        asked[clients] += 1
        now = {f.name: getattr(self.accounts, f.name) for f in dataclasses.fields(Accounts)}
        return dataclasses.replace(state, **(now | {"sums": sums, "asked": asked}))


def names_for_note(slate: Slate, clients: IntArray) -> str:
    """Return the names of clients as a note, not more than a person reads."""
    names = ", ".join(slate.clients.names_of(clients[:_NAMED]))
    return names + (f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else "")


def terms(accounts: Accounts, share: float, clients: IntArray | slice) -> tuple[FloatArray, FloatArray]:
    r"""Return :math:`e^{\lambda (a_n / S - p_n)}` and :math:`e^{\mu (p_n - S a_n)}` of some clients."""
    least, most = exponents(share)
    asked = accounts.asked[clients]
    even = accounts.even[clients] + accounts.clock * accounts.online[clients]
    free = accounts.free[clients] + accounts.clock * accounts.able[clients]
    low = np.exp(np.minimum(least * (free / share - asked), _MAX_VALUE))
    high = np.exp(np.minimum(most * (asked - share * even), _MAX_VALUE))
    return low, high


def _summed(accounts: Accounts, share: float) -> Accounts:
    low, high = terms(accounts, share, slice(None))
    able, online = accounts.able, accounts.online
    sums = np.array([low[able].sum(), high[online].sum(), low[~able].sum(), high[~online].sum()])
    return dataclasses.replace(accounts, sums=sums, summed=accounts.clock)


def _moved(accounts: Accounts, share: float, online: BoolArray, able: BoolArray) -> Accounts:
    """Return the accounts with other clients online, and others that can be asked."""
    moved = np.flatnonzero((online != accounts.online) | (able != accounts.able))
    if not len(moved):
        return accounts
    low, high = terms(accounts, share, moved)
    came = able[moved].astype(float) - accounts.able[moved]
    arrived = online[moved].astype(float) - accounts.online[moved]
    low_moved, high_moved = float(came @ low), float(arrived @ high)
    even, free = accounts.even.copy(), accounts.free.copy()
    even[moved] -= arrived * accounts.clock
    free[moved] -= came * accounts.clock
    sums = accounts.sums + np.array([low_moved, high_moved, -low_moved, -high_moved])
    return Accounts(accounts.clock, accounts.summed, sums, accounts.asked, even, free, online, able)


def _grown(accounts: Accounts, share: float, slate: Slate, sizes: FloatArray | None) -> Accounts:
    """Return the accounts with what an even draw of the cohort would give everybody."""
    online, able = accounts.online, accounts.able
    if sizes is not None:
        chance = np.zeros(len(online))
        chance[online] = inclusion_probabilities(sizes[online], slate.size)
        even, free = accounts.even + chance, accounts.free + np.where(able, chance, 0.0)
        return _summed(dataclasses.replace(accounts, even=even, free=free), share)
    step = slate.size / (len(slate.candidates) + (0 if slate.busy is None else len(slate.busy)))
    clock = accounts.clock + step
    if clock > accounts.summed + _SUMMED:
        return _summed(dataclasses.replace(accounts, clock=clock), share)
    least, most = exponents(share)
    sums = accounts.sums * np.exp([least * step / share, -most * share * step, 0.0, 0.0])
    return Accounts(clock, accounts.summed, sums, accounts.asked, accounts.even, accounts.free, online, able)

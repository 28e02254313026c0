"""Accounts with one number S: the potential by brute force, and adversaries that react to the accounts."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort import ClientTable
from fedcohort.core.protocol import Slate
from fedcohort.selectors.numerics.accounts import Accounts, Choice, exponents, extended, open_accounts, terms

SHARES = (1.25, 2.0, 4.0, 16.0)


class Plain:
    """The accounts written down plainly: a_n online, a_n while free, p_n, and the potential from them."""

    def __init__(self, n, share):
        self.even, self.free, self.asked, self.share = np.zeros(n), np.zeros(n), np.zeros(n), share

    def grow(self, candidates, busy, chance):
        self.even[np.concatenate([candidates, busy]).astype(int)] += chance
        self.free[candidates] += chance[: len(candidates)]

    def potential(self, more=()):
        least, most = exponents(self.share)
        asked = self.asked.copy()
        asked[list(more)] += 1
        low = np.exp(least * (self.free / self.share - asked))
        return float(low.sum() + np.exp(most * (asked - self.share * self.even)).sum())

    def check(self):
        least, most = exponents(self.share)
        log = math.log(2 * len(self.asked))
        assert (self.asked <= self.share * self.even + log / most + 1e-6).all()
        assert (self.asked >= self.free / self.share - log / least - 1e-6).all()


def slate_of(n, size, candidates, busy=None, round_=0):
    return Slate(
        round_, size, np.asarray(candidates), ClientTable(n=n), None if busy is None else np.asarray(busy, int)
    )


@pytest.mark.parametrize("share", SHARES)
def test_the_exponents_solve_their_equations(share):
    least, most = exponents(share)
    assert least > 0 and least / share == pytest.approx(1 - math.exp(-least), abs=1e-12)
    assert most > 0 and math.expm1(most) == pytest.approx(share * most, rel=1e-12)


@given(seed=st.integers(0, 10**6), share=st.sampled_from(SHARES), one_by_one=st.booleans(), by_size=st.booleans())
@settings(max_examples=60, deadline=None)
def test_permitted_are_those_that_some_cohort_within_the_budget_contains(seed, share, one_by_one, by_size):
    """All cohorts are enumerated; presence, size and choice are random, and the sums are never stale."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    accounts, plain = open_accounts(n), Plain(n, share)
    sizes = np.exp(rng.normal(0, 2, n)) if by_size else None
    for _ in range(25):
        there = np.flatnonzero(rng.random(n) < 0.8)
        busy = there[rng.random(len(there)) < 0.4] if one_by_one else np.zeros(0, int)
        candidates = np.setdiff1d(there, busy)
        if not len(candidates):
            continue
        size = 1 if one_by_one else int(rng.integers(1, len(candidates) + 1))
        choice = Choice(accounts, share, slate_of(n, size, candidates, busy if one_by_one else None), sizes)
        before = copied(plain)
        everybody = np.concatenate([candidates, busy])
        chance = np.full(len(everybody), size / len(everybody))
        if by_size:
            chance = size * sizes[everybody] / sizes[everybody].sum()
            while (chance > 1).any():
                full = chance >= 1
                chance[full] = 1
                rest = sizes[everybody][~full]
                chance[~full] = (size - full.sum()) * rest / rest.sum()
        plain.grow(candidates, busy, chance)
        assert choice.accounts.sums.sum() == pytest.approx(plain.potential(), rel=1e-9, abs=1e-9 * n)
        cohorts = list(itertools.combinations(range(len(candidates)), size))
        after = {c: plain.potential(candidates[list(c)]) for c in cohorts}
        assert choice.waits or min(after.values()) <= 2 * n * (1 + 1e-9)  # the theorem: some cohort fits
        while len(choice.members) < size:
            may = choice.permitted()
            for position in range(len(candidates)):
                if position in choice.members:
                    continue
                wanted = {*choice.members, position}
                best = min(after[c] for c in cohorts if wanted <= set(c))
                if abs(best / (2 * n) - 1) > 1e-6:
                    assert may[position] == (best <= 2 * n)
            free = [position for position in np.flatnonzero(may) if position not in choice.members]
            if not free:
                assert choice.waits
                break
            choice.add(int(rng.choice(free)))
        chosen = candidates[choice.members]
        accounts = choice.booked(chosen, accounts)
        if len(chosen):
            plain.asked[chosen] += 1
        else:
            plain = before  # nothing has happened
        plain.check()


def copied(plain):
    other = Plain(len(plain.asked), plain.share)
    other.even, other.free, other.asked = plain.even.copy(), plain.free.copy(), plain.asked.copy()
    return other


def plainly(accounts):
    return accounts.even + accounts.clock * accounts.online, accounts.free + accounts.clock * accounts.able


def check(accounts, share):
    plain = Plain(len(accounts.asked), share)
    plain.even, plain.free = plainly(accounts)
    plain.asked = accounts.asked
    plain.check()


def take(accounts, share, n, size, candidates, preference, busy=None, sizes=None):
    """Let a selector with this order of preference (n,) choose within the accounts."""
    choice = Choice(accounts, share, slate_of(n, size, candidates, busy), sizes)
    for _ in range(size):
        may = choice.permitted()
        may[choice.members] = False
        if not may.any():
            break
        position = int(np.where(may, preference[candidates], -np.inf).argmax())
        choice.add(position)
    clients = np.asarray(candidates)[choice.members]
    return clients, choice.booked(clients, accounts)


def halving(n, accounts, rng):
    """Present are always those that were asked least, until one is left: the debt of SHARE's lower bound."""
    asked = accounts.asked
    least = np.flatnonzero(asked == asked.min())
    return least if len(least) > 1 else np.arange(n)


def most_asked(n, accounts, rng):
    """Present are those that were asked most, and a few others."""
    top = np.argsort(-accounts.asked, kind="stable")[: max(2, n // 4)]
    return np.sort(top)


def most_overdrawn(n, accounts, rng):
    """Present are the clients nearest to their upper bound."""
    even, _ = plainly(accounts)
    return np.sort(np.argsort(even - accounts.asked)[: max(2, n // 3)])


def most_owed(n, accounts, rng):
    """The clients with the largest debt stay away until it is the largest possible, then all come at once."""
    even, _ = plainly(accounts)
    if rng.random() < 0.1:
        return np.arange(n)
    return np.sort(np.argsort(accounts.asked - even)[n // 4 :])


def anyhow(n, accounts, rng):
    there = np.flatnonzero(rng.random(n) < rng.random())
    return there if len(there) else np.arange(n)


ADVERSARIES = [halving, most_asked, most_overdrawn, most_owed, anyhow]


def attack(adversary, share, n, rounds, seed, by_size=False):
    rng = np.random.default_rng(seed)
    accounts = open_accounts(n)
    sizes = np.exp(rng.normal(0, 2, n)) if by_size else None
    for round_ in range(rounds):
        there = adversary(n, accounts, rng)
        size = int(rng.integers(1, len(there) + 1)) if rng.random() < 0.3 else max(1, len(there) // 10)
        # The selector loves the same few clients, or those that were asked most, or those that were asked least.
        loves = [-np.arange(n, dtype=float), accounts.asked, -accounts.asked][round_ % 3 if seed else 0]
        chosen, accounts = take(accounts, share, n, size, there, loves, sizes=sizes)
        assert len(set(chosen.tolist())) == size
        check(accounts, share)
    return accounts


@pytest.mark.parametrize("by_size", [False, True], ids=["by client", "by sample"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversary_takes_a_client_beyond_its_bounds(adversary, share, by_size):
    for n in (2, 7, 40):
        for seed in (0, 1):
            attack(adversary, share, n, 120, seed, by_size)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize(("n", "rounds"), [(1000, 300), (100_000, 40)])
def test_no_adversary_takes_one_of_many_clients_beyond_its_bounds(adversary, share, n, rounds):
    rng = np.random.default_rng(1)
    accounts = open_accounts(n)
    for _ in range(rounds):
        there = adversary(n, accounts, rng)
        _, accounts = take(accounts, share, n, max(1, min(10, len(there))), there, accounts.asked)
        check(accounts, share)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fast", [1, 3])
def test_one_by_one_the_fast_are_not_asked_without_end(share, fast):
    """Whoever answers at once is the only one that is free; the others answer one at a time, in turn."""
    n, waited = 12, 0
    accounts = open_accounts(n)
    busy = np.arange(fast, n)
    for _ in range(400):
        free = np.setdiff1d(np.arange(n), busy)
        chosen, after = take(accounts, share, n, 1, free, -np.arange(n, dtype=float), busy)
        if len(chosen):
            accounts = after
            check(accounts, share)
            if chosen[0] >= fast:
                busy = np.append(busy, chosen)
        else:
            assert after is accounts  # nothing has happened
            waited += 1
            busy = busy[1:]  # the first of the slow ones answers
    even, _ = plainly(accounts)
    assert (waited > 0) == (share * fast < n)
    assert accounts.asked[fast:].sum() > 0 or waited == 0
    assert accounts.asked[0] <= share * even[0] + math.log(2 * n) / exponents(share)[1]


def test_with_nobody_at_work_there_is_always_a_choice():
    rng = np.random.default_rng(0)
    accounts, n = open_accounts(6), 6
    for _ in range(300):
        busy = np.flatnonzero(rng.random(n) < 0.5) if rng.random() < 0.7 else np.zeros(0, int)
        free = np.setdiff1d(np.arange(n), busy)
        if not len(free):
            continue
        chosen, accounts = take(accounts, 1.25, n, 1, free, rng.random(n), busy)
        assert len(chosen) or len(busy)


@pytest.mark.parametrize("share", SHARES)
def test_any_cohort_of_the_candidates_that_are_shown_fits(share):
    rng = np.random.default_rng(2)
    n, accounts = 8, open_accounts(8)
    for round_ in range(60):
        there = np.flatnonzero(rng.random(n) < 0.8)
        if len(there) < 2:
            continue
        size = int(rng.integers(1, len(there)))
        choice = Choice(accounts, share, slate_of(n, size, there))
        shown = there[choice.all_permitted(round_)]
        assert len(shown) >= size
        for cohort in itertools.combinations(shown.tolist(), size):
            assert choice.fits(np.array(cohort))
        clients = shown[:size]
        accounts = choice.booked(clients, accounts)
        check(accounts, share)


def test_newcomers_bring_their_own_budget():
    accounts, share = open_accounts(5), 2.0
    for _ in range(40):
        _, accounts = take(accounts, share, 5, 2, np.arange(5), -np.arange(5.0))
    accounts = extended(accounts, 20)
    for _ in range(60):
        _, accounts = take(accounts, share, 20, 2, np.arange(20), -np.arange(20.0))
        check(accounts, share)
    assert accounts.asked[5:].min() >= 1


def test_rows_stay_as_they_are_while_nobody_comes_or_goes():
    """A journal writes rows that changed; with 100,000 clients those must not be all of them."""
    accounts = open_accounts(30)
    _, first = take(accounts, 4.0, 30, 3, np.arange(30), np.zeros(30))
    chosen, second = take(first, 4.0, 30, 3, np.arange(30), np.zeros(30))
    for f in dataclasses.fields(Accounts):
        if f.metadata and f.name != "asked":
            assert (getattr(first, f.name) == getattr(second, f.name)).all()
    assert np.flatnonzero(first.asked != second.asked).tolist() == sorted(chosen.tolist())


def test_lazy_sums_stay_those_of_the_terms():
    rng = np.random.default_rng(5)
    accounts = open_accounts(50)
    for _ in range(200):
        there = np.flatnonzero(rng.random(50) < 0.6)
        _, accounts = take(accounts, 4.0, 50, 4, there, rng.random(50))
        low, high = terms(accounts, 4.0, slice(None))
        assert accounts.sums.sum() == pytest.approx(low.sum() + high.sum(), abs=1e-9 * 100)

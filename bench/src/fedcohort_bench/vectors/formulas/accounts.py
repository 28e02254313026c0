"""Our own selectors: accounts with one number S, and what is chosen within them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedcohort_bench.vectors.formulas.draws import Entry, Expected, Floats, Values, Vector, largest, one_by_one


def _root(f: object, low: float, high: float) -> float:
    assert callable(f)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (f(middle) > 0) == (f(low) > 0) else (low, middle)
    return high


class Accounts:
    """Phi = sum exp(lambda (a / S - p)) + exp(mu (p - S a)) may be at most 2 N after every choice."""

    def __init__(self, share: float, n: int) -> None:
        self.share, self.n = share, n
        self.least = _root(lambda x: 1 - math.exp(-x) - x / share, math.log(share), share)
        self.most = _root(lambda x: math.expm1(x) - share * x, math.log(share), 2 * math.log(share))
        self.asked, self.even = np.zeros(n), np.zeros(n)

    def grown(self, entry: Entry) -> None:
        """Add what an even draw gives the available clients."""
        self.even[entry["available"]] += entry["size"] / len(entry["available"])

    def potential(self, cohort: list[int]) -> float:
        """Return Phi if these clients are asked."""
        asked = self.asked.copy()
        asked[cohort] += 1
        low, high = self.least * (self.even / self.share - asked), self.most * (asked - self.share * self.even)
        return float(np.exp(low).sum() + np.exp(high).sum())

    def prices(self, clients: list[int]) -> Values:
        """Return what asking each adds to Phi."""
        nobody = self.potential([])
        return {c: self.potential([c]) - nobody for c in clients}

    @property
    def room(self) -> float:
        """What a cohort may add to Phi."""
        return 2 * self.n * (1 + 1e-9) - self.potential([])


def bounded(v: Vector) -> Iterator[Expected]:
    """Power-of-Choice among clients of whom any cohort is within the accounts, with sizes and losses clipped."""
    of, m = v["parameters"], v["rounds"][0]["size"]
    accounts = Accounts(of["share"], v["clients"])
    low, high = _tails(v["sizes"], of["tail"])
    size = {c: min(max(n, low), high) for c, n in enumerate(v["sizes"])}
    last: Values = {}
    for entry in v["rounds"]:
        accounts.grown(entry)
        price = accounts.prices(entry["available"])
        here, turn = entry["available"], entry["round"] * m % len(entry["available"])
        # The cheapest, of equal ones those before the turn first.
        order = sorted(here[turn:] + here[:turn], key=lambda c: round(price[c], 9))
        shown = order[:m]
        for c in order[m:]:
            if sum(sorted(price[i] for i in [*shown, c])[-m:]) <= accounts.room:
                shown.append(c)
        question = entry["question"]
        last |= dict(zip(question["asked"], question["loss"], strict=True))
        low, high = _tails(list(last.values()), of["tail"])
        loss = {c: min(max(x, low), high) for c, x in zip(question["asked"], question["loss"], strict=True)}
        asked = one_by_one({c: size[c] for c in shown}, min(2 * m, len(shown)))
        yield Expected(largest(loss, m), loss, asked=asked)
        accounts.asked[entry["cohort"]] += 1


def _tails(values: list[float], tail: float) -> tuple[float, float]:
    """Return the values below and above which a share ``tail`` of them lies."""
    ordered = sorted(values)
    n = int(tail * len(ordered) + 1e-9)
    return ordered[n], ordered[-1 - n]


_DRAWS = 1000  # of a cohort of `balanced`


def balanced(v: Vector) -> Iterator[Expected]:
    """The rule of the class's docstring, one client after the other."""
    of, m, n = v["parameters"], v["rounds"][0]["size"], v["clients"]
    counts = np.array(v["label_counts"], np.float64)
    accounts, rates = Accounts(of["share"], n), _rates(counts, of["share"])
    aim = (rates @ counts / (rates @ counts).sum()).tolist()
    recent = np.zeros(n)
    for entry in v["rounds"]:
        here = entry["available"]
        accounts.grown(entry)
        even = accounts.asked.copy(), accounts.even.copy()
        price, room = accounts.prices(here), accounts.room
        past = (0.5 * recent @ counts).tolist()
        rng = np.random.default_rng(entry["round"])
        times = dict.fromkeys(here, 0)
        for _ in range(_DRAWS):
            u = rng.random(n)
            lead = 0.5 * np.log((even[0] + 0.5 + u) / (rates * even[1] + 1))
            for c in _cohort(here, m, price, room, counts.tolist(), past, aim, lead.tolist(), rng):
                times[c] += 1
        yield Expected({c: k / _DRAWS for c, k in times.items()}, draws=_DRAWS)
        accounts.asked[entry["cohort"]] += 1
        recent = np.where(0.5 * recent < 1e-3, 0.0, 0.5 * recent)
        for row in entry["reports"]:
            recent[row["client"]] += row["ok"]


def _rates(counts: Floats, share: float) -> Floats:
    """Return r that minimises the imbalance of as many samples plus mu times the mean of (r - 1)^2, where it helps."""
    n, classes = counts.shape
    sizes, total = counts.sum(axis=1), counts.sum()
    rows = (counts - sizes[:, None] / classes) / total
    mu = 5e-3 + 2 * (1 - 1 / classes) / total
    # The conditions of Lagrange, with the number of samples as the constraint.
    system = np.zeros((n + 1, n + 1))
    system[:n, :n] = n * rows @ rows.T + mu * np.eye(n)
    system[:n, n], system[n, :n] = -sizes / total, sizes / total
    r = np.linalg.solve(system, np.append(np.full(n, mu), 1.0))[:n]
    r = np.clip(r / r.mean(), 1 / share, share)
    before, after = (max(((x @ counts / (x @ sizes) - 1 / classes) ** 2).sum(), 1e-3) for x in (np.ones(n), r))
    return np.asarray(1 + (1 - min(after / before, 1.0) ** 3) * (r - 1))


def _cohort(
    here: list[int],
    m: int,
    price: Values,
    room: float,
    counts: list[list[float]],
    past: list[float],
    aim: list[float],
    lead: list[float],
    rng: np.random.Generator,
) -> list[int]:
    """Draw a cohort with log-weights -m J, and give each member's place twice to whoever makes J smallest."""
    members: list[int] = []

    def permitted() -> list[int]:
        """Return with whom the members and the cheapest others stay within the accounts; or the cheapest."""
        others = sorted((c for c in here if c not in members), key=price.__getitem__)
        spent, places = sum(price[c] for c in members), m - len(members) - 1
        fits = []
        for c in others:
            rest = [o for o in others[: places + 1] if o != c][:places]
            if spent + price[c] + sum(price[o] for o in rest) <= room:
                fits.append(c)
        return fits or others[:1]

    def imbalance(c: int) -> float:
        mix = [h + sum(counts[i][b] for i in [*members, c]) for b, h in enumerate(past)]
        total = sum(mix)
        distance = sum((x / total - a) ** 2 for x, a in zip(mix, aim, strict=True))
        return math.log(max(distance, (1 - 1 / len(mix)) / total, 1e-3))

    while len(members) < m:
        may = permitted()
        values = np.array([-(len(members) + 1) * (imbalance(c) + lead[c]) for c in may])
        weights = np.exp(values - values.max())
        members.append(int(rng.choice(may, p=weights / weights.sum())))
    for _ in range(2):
        for member in rng.permutation(members).tolist():
            members.remove(member)
            value = {c: imbalance(c) + lead[c] / m for c in {*permitted(), member}}
            other = min(value, key=value.__getitem__)
            members.append(other if value[other] < value[member] - 1e-12 else member)
    return members

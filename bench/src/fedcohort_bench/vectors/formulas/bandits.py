"""Bandits over the clients, and over their contexts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from scipy.special import betainc
from scipy.stats import beta as beta_distribution

from fedcohort_bench.vectors.formulas.draws import (
    Entry,
    Expected,
    Floats,
    Values,
    Vector,
    delivered,
    inclusion,
    largest,
    step_by_step,
)

_DRAWS = 20_000  # of a linear model
_LIMIT = 100.0  # contexts and rewards are clipped at it


def fedcm_ucb(v: Vector) -> Iterator[Expected]:
    """Kim 2020, Algorithm 2: the largest mean + sqrt(3 ln t / 2 a)."""
    mean, pulls = list(v["start"]["mean"]), [1] * v["clients"]
    for entry in v["rounds"]:
        t = entry["round"] + 1
        scores = {c: mean[c] + math.sqrt(3 * math.log(t) / (2 * pulls[c])) for c in entry["available"]}
        yield Expected(largest(scores, entry["size"]), scores)
        for row in entry["reports"]:
            c = row["client"]
            mean[c] = (pulls[c] * mean[c] + row["kept"]) / (pulls[c] + 1)
            pulls[c] += 1


# Nodes and weights of an integral over [0, 1]; products of Beta distributions with whole numbers are polynomials.
_X, _W = ((x + 1) / 2 if i == 0 else x / 2 for i, x in enumerate(np.polynomial.legendre.leggauss(80)))


def fedcm_ts(v: Vector) -> Iterator[Expected]:
    """Kim 2020, Algorithm 3: the largest draws of Beta(kept + 1, dropped + 1)."""
    kept, dropped = [1] * v["clients"], [1] * v["clients"]
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        above = {c: 1 - betainc(kept[c], dropped[c], _X) for c in here}
        chance = {}
        for c in here:
            beating = np.zeros((m, len(_X)))  # (n, x) the chance that n others are above x; m or more are not needed
            beating[0] = 1.0
            for other in here:
                if other != c:
                    shifted = np.vstack([np.zeros(len(_X)), beating[:-1]])
                    beating = beating * (1 - above[other]) + shifted * above[other]
            chance[c] = float((_W * beta_distribution.pdf(_X, kept[c], dropped[c]) * beating.sum(axis=0)).sum())
        yield Expected(chance)
        for row in entry["reports"]:
            kept[row["client"]] += row["kept"]
            dropped[row["client"]] += not row["kept"]


def fedacs(v: Vector) -> Iterator[Expected]:
    """Wang 2021, Algorithms 1 and 2: the pool is drawn by repeated Thompson sampling, the cohort from the pool."""
    of = v["parameters"]
    won, lost = [0.0] * v["clients"], [0.0] * v["clients"]
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        pool = min(max(m, round(of["pool_share"] * len(here))), len(here))
        below = {c: betainc(won[c] + 1, lost[c] + 1, _X) for c in here}
        # P(i is the largest) is the integral of its density times the product of the others' distribution functions.
        ratio = {c: _W * beta_distribution.pdf(_X, won[c] + 1, lost[c] + 1) / below[c] for c in here}

        def largest_draw(
            chosen: frozenset[int],
            here: list[int] = here,
            below: Mapping[int, Floats] = below,
            ratio: Mapping[int, Floats] = ratio,
        ) -> Values:
            left = [c for c in here if c not in chosen]
            everybody = np.prod([below[c] for c in left], axis=0)
            return {c: float(ratio[c] @ everybody) for c in left}

        yield Expected({c: p * m / pool for c, p in inclusion(step_by_step(pool, largest_draw)).items()})
        rows = delivered(entry)
        for one in rows:
            for other in rows:
                if one["gradient-distance"] < other["gradient-distance"]:
                    won[one["client"]] += of["eta"]
                    lost[other["client"]] += of["eta"]


class _Contexts:
    """Chang 2024, Sec. 2.3: losses relative to their first values, duration and last reward; Algorithm 1's rewards."""

    def __init__(self, v: Vector, learn: Callable[[Floats, Floats], None]) -> None:
        self.of, self.learn_rewards = v["parameters"], learn
        self.first, self.loss, self.tau, self.reward = (dict[int, float]() for _ in range(4))
        self.asked: set[int] = set()
        self.all_rewards: list[float] = []
        self.unit = 0.0
        self.waiting: list[tuple[int, list[float], float]] = []  # client, context, loss before

    def of_client(self, c: int) -> list[float]:
        """Both losses are the same number in a vector."""
        loss = self.loss[c] / self.first[c] if c in self.first else 1.0
        usual = statistics.fmean(self.all_rewards) if self.all_rewards else 0.0
        return [loss, loss, self.tau.get(c, 1.0), self.reward.get(c, usual if c not in self.asked else 0.0)]

    def answer(self, entry: Entry) -> None:
        """Take the losses of the new model, on which the rewards of the last round depend."""
        if self.of["contexts"] != "fresh":
            return
        now = dict(zip(entry["question"]["asked"], entry["question"]["loss"], strict=True))
        known = [(c, x, abs(before - now[c]) / self.tau[c]) for c, x, before in self.waiting if c in now]
        self._earned([c for c, _, _ in known], [x for _, x, _ in known], [r for _, _, r in known])
        self.waiting = []
        for c, loss in now.items():
            self._new_loss(c, loss)

    def _new_loss(self, c: int, loss: float) -> None:
        self.first.setdefault(c, loss)
        self.loss[c] = loss

    def _earned(self, clients: list[int], contexts: list[list[float]], rewards: list[float]) -> None:
        rewards = [min(max(r, -_LIMIT), _LIMIT) for r in rewards]
        self.reward |= dict(zip(clients, rewards, strict=True))
        self.all_rewards += rewards
        self.learn_rewards(np.array(contexts).reshape(len(rewards), 4), np.array(rewards))

    def report(self, entry: Entry, gain: Values | None = None) -> None:
        """Learn durations; without a ``gain`` by client, rewards wait for the next model."""
        rows = delivered(entry)
        contexts = {row["client"]: self.of_client(row["client"]) for row in rows}
        self.unit = self.unit or statistics.median(row["duration"] for row in rows)
        for row in rows:
            self.tau[row["client"]] = min(max(row["duration"] / self.unit, 1 / _LIMIT), _LIMIT)
            if self.of["contexts"] == "last":
                self._new_loss(row["client"], row["robust-loss"])
        self.asked |= {row["client"] for row in entry["reports"]}
        self.reward |= {row["client"]: 0.0 for row in entry["reports"] if not row["ok"]}
        if gain is None:
            self.waiting += [(row["client"], contexts[row["client"]], row["robust-loss"]) for row in rows]
        else:
            earned = [gain[row["client"]] / self.tau[row["client"]] for row in rows]
            self._earned([row["client"] for row in rows], [contexts[row["client"]] for row in rows], earned)


class _Ridge:
    """V = lambda I + sum x x', b = sum r x."""

    def __init__(self, ridge: float, d: int) -> None:
        self.v, self.b = ridge * np.eye(d), np.zeros(d)

    def add(self, x: Floats, r: Floats) -> None:
        self.v, self.b = self.v + x.T @ x, self.b + x.T @ r

    @property
    def theta(self) -> Floats:
        return np.asarray(np.linalg.solve(self.v, self.b))


def _drawn_models(v: Vector, entry: Entry, model: _Ridge) -> Floats:
    """(draws, d) of N(theta-hat, (c alpha_t)^2 V^-1)."""
    of = v["parameters"]
    alpha = math.sqrt(of["ridge"]) + math.sqrt(4 * math.log((1 + entry["round"] * v["clients"]) / of["delta"]))
    covariance = (of["exploration"] * alpha) ** 2 * np.linalg.inv(model.v)
    rng = np.random.default_rng(entry["round"])
    return np.asarray(rng.multivariate_normal(model.theta, covariance, _DRAWS, method="eigh"))


def flash(v: Vector) -> Iterator[Expected]:
    """Chang 2024, Algorithms 1 and 2: everybody in the first round, then the top scores of a drawn linear model."""
    model = _Ridge(v["parameters"]["ridge"], 4)
    known = _Contexts(v, model.add)
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        known.answer(entry)
        if entry["round"] == 0:
            yield Expected(dict.fromkeys(here, 1.0))
        else:
            x = np.array([known.of_client(c) for c in here])
            top = np.argsort(-_drawn_models(v, entry, model) @ x.T, axis=1)[:, :m]
            counts = np.bincount(top.ravel(), minlength=len(here)) / _DRAWS
            yield Expected(dict(zip(here, counts.tolist(), strict=True)), draws=_DRAWS)
        known.report(entry)


def flash_advantage(v: Vector) -> Iterator[Expected]:
    """FLASH with rewards (1 - L_i / mean L) / tau, and a uniform draw from all that promise one."""
    of, model = v["parameters"], _Ridge(v["parameters"]["ridge"], 4)
    known, level = _Contexts(v, model.add), dict[int, float]()
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        if entry["round"] == 0:
            yield Expected(dict.fromkeys(here, 1.0))
        else:
            x = np.array([known.of_client(c) for c in here])
            scores = _drawn_models(v, entry, model) @ x.T
            promising = (scores > 0) | np.array([known.reward.get(c, 0.0) > 0 for c in here])
            least = max(m, math.ceil(of["pool"] * len(here)))
            rank = np.argsort(np.argsort(-scores, axis=1), axis=1)
            pool = np.where(promising.sum(axis=1, keepdims=True) >= least, promising, rank < least)
            chance = (pool * m / pool.sum(axis=1, keepdims=True)).mean(axis=0)
            # Each of the m places goes to anybody with the probability uniform_share.
            mixed, u = np.zeros(len(here)), of["uniform_share"]
            for n in range(m + 1):
                kept = chance * (m - n) / m
                part = kept + (1 - kept) * n / (len(here) - m + n)
                mixed += math.comb(m, n) * u**n * (1 - u) ** (m - n) * part
            yield Expected(dict(zip(here, mixed.tolist(), strict=True)), draws=_DRAWS)
        level |= {row["client"]: row["robust-loss"] for row in delivered(entry)}
        mean = statistics.fmean(level.values())
        known.report(entry, {row["client"]: 1 - row["robust-loss-after"] / mean for row in delivered(entry)})


def restless_bandit(v: Vector) -> Iterator[Expected]:
    """Yemini 2021 with FLASH's contexts: a hidden Markov state, a ridge regression for each, and exploring rounds."""
    of, states = v["parameters"], v["parameters"]["states"]
    models = [_Ridge(of["ridge"], 4) for _ in range(states)]
    moves = np.zeros((states, states))
    at, explored = -1, 0
    paid: list[float] = []

    def learn(x: Floats, r: Floats) -> None:
        nonlocal at
        if not len(r):
            return
        now = states // 2
        if paid:
            # Running mean and variance, in which a past round loses a tenth of its weight.
            mean = variance = 0.0
            for i, pay in enumerate(paid):
                share = max(0.1, 1 / (i + 1))
                variance = (1 - share) * (variance + share * (pay - mean) ** 2)
                mean += share * (pay - mean)
            normal = statistics.NormalDist(0, 1)
            bounds = [mean + math.sqrt(variance) * normal.inv_cdf(s / states) for s in range(1, states)]
            now = sum(bound <= float(r.mean()) for bound in bounds)
        if at >= 0:
            moves[at, now] += 1
        at = now
        paid.append(float(r.mean()))
        models[now].add(x, r)

    known = _Contexts(v, learn)
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        known.answer(entry)
        row = 1 + (moves[at] if at >= 0 else np.zeros(states))
        theta = row / row.sum() @ np.array([model.theta for model in models])
        scores = {c: float(theta @ known.of_client(c)) for c in here}
        if explored < of["exploration"] * math.log(entry["round"] + 1):
            explored += 1
            scores = dict.fromkeys(here, 0.0)
        yield Expected(largest(scores, len(here) if entry["round"] == 0 else m), scores)
        known.report(entry)


def neural_bandit(v: Vector) -> Iterator[Expected]:
    """Xu 2020, Algorithm 1, with FLASH's contexts: a linear bandit over the features of a small network."""
    of = v["parameters"]
    first, second = np.array(v["start"]["first"]), np.array(v["start"]["second"])
    model, seen, rounds = _Ridge(of["ridge"], of["width"]), list[tuple[Floats, float]](), 0

    def inputs(x: Floats) -> Floats:
        x = np.append(x, 1.0)
        return np.asarray(x / math.sqrt(float(x @ x)))

    def features(x: Floats) -> Floats:
        return np.asarray(np.maximum(second @ np.maximum(first @ x, 0.0), 0.0))

    def learn(contexts: Floats, rewards: Floats) -> None:
        nonlocal first, second
        for context, r in zip(contexts, rewards.tolist(), strict=True):
            model.add(features(inputs(context))[None], np.array([r]))
            seen.append((inputs(context), r))
        del seen[: -of["memory"]]
        if rounds % of["interval"] or not seen:
            return
        theta = model.theta
        for _ in range(of["steps"]):
            down_first, down_second = np.zeros_like(first), np.zeros_like(second)
            for x, r in seen:  # the gradient of the mean of (theta' phi - r)^2 / 2
                hidden = np.maximum(first @ x, 0.0)
                output = second @ hidden
                error = float(theta @ np.maximum(output, 0.0)) - r
                top = error * theta * (output > 0)
                down_second += np.outer(top, hidden) / len(seen)
                down_first += np.outer((second.T @ top) * (hidden > 0), x) / len(seen)
            length = math.sqrt(float((down_first**2).sum() + (down_second**2).sum()))
            step = of["rate"] * min(1.0, 1 / length)
            first, second = first - step * down_first, second - step * down_second

    known = _Contexts(v, learn)
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        known.answer(entry)
        inverse, scores = np.linalg.inv(model.v), dict[int, float]()
        for c in here:
            phi = features(inputs(np.array(known.of_client(c))))
            scores[c] = float(model.theta @ phi) + of["exploration"] * math.sqrt(float(phi @ inverse @ phi))
        yield Expected(largest(scores, len(here) if entry["round"] == 0 else m), scores)
        known.report(entry)
        rounds += 1

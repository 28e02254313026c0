"""Automatic deadlines beside the best fixed one, in federations of every kind.

    python bench/deadlines.py [--worlds alike,halves] [--seeds 10 11] [--spares 10] [--least 5] [--rounds 200]

300 clients, rounds of 10 models, uniform selection. Counted is the simulated time until 200 x 10 models have come. A
round that misses 10 models counts with those it has; one with fewer than ``--least`` counts for nothing, and its time
is lost. With ``--least 1`` every model counts, as in a run with ``min_replies=1``; automatic deadlines aim at half.
``deadline="auto"`` is played with the product's own Round and Session. The best fixed pair of deadline and spares is
searched for on the very seeds that are shown, which favours it.
"""

from __future__ import annotations

import argparse
import functools
import itertools

import numpy as np
from scipy.special import ndtri

from fedcohort import Session
from fedcohort.core.protocol import Status
from fedcohort.hosts.pace import Pace
from fedcohort.hosts.round import Policy, Round, closing
from fedcohort.scenario import Scenario

CLIENTS, SIZE = 300, 10
OK, FAILED, MISSING = (int(status) for status in (Status.OK, Status.FAILED, Status.MISSING))
PHONES = {"session": 900, "gap": 3600, "spread": 0.8, "variety": 0.5, "daily": 0.9, "peak": 21}
DEVICES = {"speed": 80.0, "speed_spread": 0.6, "bandwidth": 5e5, "bandwidth_spread": 1.0, "states": {"online": PHONES}}

WORLDS = {
    "alike": "all clients alike, always on",
    "some-slow": "one in five takes ten times as long",
    "few-slow": "one in twenty takes fifty times as long",
    "halves": "every second one takes five times as long",
    "heavy": "log-normal times, standard deviation 1.5 of the log",
    "pareto": "Pareto times with exponent 1.1",
    "exponential": "shifted exponential, clients of different speeds",
    "sizes": "time in proportion to data, sizes log-normal",
    "failures": "one in five fails in mid-round",
    "silent": "one in five never answers",
    "day-night": "devices with sessions and a daily rhythm",
    "drift": "all become eight times slower in 500 s, and fast again",
    "jumps": "all are four times slower for 100 s in every 200 s",
}


@functools.lru_cache(maxsize=20_000)
def chances(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 11, number])
    return rng.standard_normal(CLIENTS), rng.random((3, CLIENTS))


class World:
    """How long clients take, and which of them are there. Nothing in it depends on who was asked before."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        rank = np.random.default_rng([seed, 7]).permutation((np.arange(CLIENTS) + 0.5) / CLIENTS)
        self.slowness = {
            "some-slow": np.where(rank < 0.2, 10.0, 1.0),
            "few-slow": np.where(rank < 0.05, 50.0, 1.0),
            "halves": np.where(rank < 0.5, 5.0, 1.0),
            "sizes": np.exp(ndtri(rank)),
            **dict.fromkeys(["exponential", "failures", "drift"], np.exp(0.5 * ndtri(rank))),
        }.get(name, np.ones(CLIENTS))
        self.spread = {"alike": 0.1, "sizes": 0.1, "heavy": 1.5}.get(name, 0.3)
        self.samples = 600 * np.exp(0.5 * ndtri(rank))
        devices = Scenario.from_dict({"devices": DEVICES}).devices
        assert devices is not None
        self.devices = devices

    def wait(self, time: float) -> tuple[float, np.ndarray]:
        """When somebody is there, and who."""
        everybody = np.arange(CLIENTS)
        if self.name != "day-night":
            return time, everybody
        while True:
            on = np.flatnonzero(self.devices.presence(everybody, seed=self.seed, time=time)[0])
            if len(on):
                return time, on
            time += 10.0

    def events(self, clients: np.ndarray, number: int, time: float) -> tuple[np.ndarray, np.ndarray]:
        """When clients answer or fail, in seconds from ``time``, and what they answer."""
        if self.name == "day-night":
            seconds = self.devices.durations(clients, self.samples[clients], 2e6, seed=self.seed)
            return self.devices.work(clients, seconds, seed=self.seed, time=time)
        normal, (first, second, third) = chances(self.seed, number)
        status = np.zeros(len(clients), np.int8)
        seconds = self.slowness * np.exp(self.spread * normal)
        if self.name == "pareto":
            seconds = (1 - first) ** (-1 / 1.1)
        elif self.name == "exponential":
            seconds = self.slowness * (0.2 - np.log(1 - first))
        elif self.name == "drift":
            seconds = seconds * 8.0 ** np.sin(np.pi * time / 1000) ** 2
        elif self.name == "jumps":
            seconds = seconds * (4.0 if time % 200 >= 100 else 1.0)
        seconds, fails = seconds[clients], second[clients] < 0.2
        if self.name == "failures":
            seconds, status[fails] = np.where(fails, seconds * third[clients], seconds), FAILED
        elif self.name == "silent":
            seconds, status[fails] = np.where(fails, np.inf, seconds), MISSING
        return seconds, status


def play_auto(world: World, spares: int, rounds: int, least: int = 5) -> tuple[float, float, int]:
    """Seconds until the models are there, clients asked for each, rounds."""
    policy = Policy(size=SIZE, spares=spares, deadline="auto")
    clock, models, asked = 0.0, 0, 0
    with Session("uniform", clients=CLIENTS, seed=world.seed) as session:
        pace = Pace.of(session)
        for number in itertools.count():
            clock, there = world.wait(clock)
            round_ = Round(session, policy, len(there), pace, clock)
            round_.open(there)
            cohort = round_.choose()
            clock += round_.settle(*world.events(cohort.clients, number, clock))
            assert np.isfinite(clock)
            sound = round_.status == OK
            asked += cohort.size
            models += min(int(sound.sum()), SIZE) if sound.sum() >= least else 0
            if sound.any():
                round_.finish(sound[round_.answered])
            else:
                round_.abandon("too few models")
            if models >= rounds * SIZE:
                return clock * rounds * SIZE / models, asked / models, number + 1
    raise AssertionError


def play_fixed(world: World, deadline: float, spares: int, rounds: int, least: int, limit: float) -> float:
    """Seconds until the models are there; infinity when it takes longer than ``limit``."""
    clock, models = 0.0, 0
    for number in itertools.count():
        clock, there = world.wait(clock)
        n = min(SIZE + spares, len(there))
        cohort = np.random.default_rng([world.seed, 13, number]).choice(there, n, replace=False)
        enough = min(n, max(SIZE, n - spares)) if spares else n
        status, lasts = closing(*world.events(cohort, number, clock), deadline=deadline, enough=enough)
        clock += lasts
        sound = int((status == OK).sum())
        models += min(sound, SIZE) if sound >= least else 0
        if models >= rounds * SIZE:
            return clock * rounds * SIZE / models
        if clock > limit:
            return np.inf
    raise AssertionError


def best_fixed(
    name: str, seeds: list[int], spares: int, rounds: int, least: int, limit: float
) -> tuple[float, float, int]:
    """The mean time of the best pair, its deadline, its spares; a pair that takes longer than ``limit`` is left."""
    sample = World(name, seeds[0])
    found = [sample.events(sample.wait(0.0)[1], number, 0.0)[0] for number in range(0, rounds, max(rounds // 10, 1))]
    seconds = np.concatenate(found)
    seconds = seconds[(seconds > 0) & np.isfinite(seconds)]
    quantiles = np.quantile(seconds, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0])
    deadlines = np.unique(np.concatenate([quantiles, np.geomspace(quantiles[1], np.quantile(seconds, 0.999), 12)]))
    best = (np.inf, 0.0, 0)
    for more in sorted({spares, 2 * spares // 3, spares // 3, 0}, reverse=True):
        for deadline in deadlines:
            total = 0.0
            for seed in seeds:
                worst = min(best[0], limit) * len(seeds) - total
                total += play_fixed(World(name, seed), float(deadline), more, rounds, least, worst)
                if total >= min(best[0], limit) * len(seeds):
                    break
            else:
                best = min(best, (total / len(seeds), float(deadline), more))
    return best


def compare(name: str, seeds: list[int], spares: int, rounds: int, least: int = 5) -> tuple[float, str]:
    """The time with automatic deadlines over that of the best fixed pair, and a row of the table."""
    autos = [play_auto(World(name, seed), spares, rounds, least) for seed in seeds]
    seconds, asked, count = (float(np.mean(column)) for column in zip(*autos, strict=True))
    # A fixed pair that is far worse need not be played to its end.
    best, deadline, more = best_fixed(name, seeds, spares, rounds, least, 1.25 * seconds)
    fixed = f"{best:,.0f} s ({deadline:.3g} s, {more})"
    if best == np.inf:
        best = 1.25 * seconds
        fixed = f"more than {best:,.0f} s"
    row = f"| {WORLDS[name]} | {fixed} | {seconds:,.0f} s | {seconds / best:.3f} | {asked:.2f} | {count:.0f} |"
    return seconds / best, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 16)))
    parser.add_argument("--spares", type=int, default=SIZE)
    parser.add_argument("--least", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print("| federation | best fixed (deadline, spares) | auto | ratio | asked per model | rounds |")
    print("|---|---|---|---|---|---|")
    for name in options.worlds.split(","):
        print(compare(name, options.seeds, options.spares, options.rounds, options.least)[1], flush=True)


if __name__ == "__main__":
    main()

"""Automatic deadlines compared with the best fixed one, in many kinds of federations.

    python bench/scripts/deadlines.py [--worlds alike,halves] [--seeds 10 11] [--spares 10] [--least 1] [--rounds 200]

Each row has the automatic deadline with ``leave_out_slow=True`` and, behind it, without.

300 clients, rounds of 10 models, uniform selection. The measure is the simulated time until 200 x 10 models have
arrived. A round with fewer than 10 models counts with those it has; one with fewer than ``--least`` counts for nothing,
and its time is lost. ``--least`` sets ``min_replies``; by default that is not set, and half of the models are required.
``deadline="auto"`` uses fedcohort's Round and Session. The best fixed pair of deadline and spares is searched on the
same seeds that are shown, which favours it: 30 deadlines (15 for "day-night") and 4 numbers of spares.
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
from fedcohort.hosts.round import Policy, Round
from fedcohort.scenario import Scenario
from fedcohort.scenario.devices import OnlineDevices

CLIENTS, SIZE, HALF = 300, 10, 5
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


@functools.lru_cache(maxsize=6_000)
def chances(seed: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 11, number])
    return rng.standard_normal(CLIENTS), rng.random((3, CLIENTS)), rng.permutation(CLIENTS)


class World:
    """How long clients take, and which are online. Nothing depends on who was asked before."""

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
        devices = Scenario.from_dict({"devices": DEVICES}).devices
        assert devices is not None
        self.devices, everybody = devices, np.arange(CLIENTS)
        self.roster = OnlineDevices(devices, CLIENTS, seed=seed)
        self.works = devices.durations(everybody, 600 * np.exp(0.5 * ndtri(rank)), 2e6, seed=seed)

    def wait(self, time: float) -> tuple[float, np.ndarray]:
        """Return when somebody is online, and who; times must not decrease."""
        if self.name != "day-night":
            return time, np.arange(CLIENTS)
        time = self.roster.wait(time)
        return time, np.flatnonzero(self.roster.on)

    def events(self, clients: np.ndarray, number: int, time: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when clients answer or fail, in seconds from ``time`` (one time or (m, 1)), and their statuses."""
        if self.name == "day-night":
            return self.devices.work(clients, self.works[clients], seed=self.seed, time=float(np.max(time)))
        normal, (first, second, third), _ = chances(self.seed, number)
        status = np.zeros(len(clients), np.int8)
        seconds, slower = self.slowness * np.exp(self.spread * normal), 1.0
        if self.name == "pareto":
            seconds = (1 - first) ** (-1 / 1.1)
        elif self.name == "exponential":
            seconds = self.slowness * (0.2 - np.log(1 - first))
        elif self.name == "drift":
            slower = 8.0 ** np.sin(np.pi * time / 1000) ** 2
        elif self.name == "jumps":
            slower = np.where(time % 200 >= 100, 4.0, 1.0)
        seconds, fails = slower * seconds[clients], second[clients] < 0.2
        if self.name == "failures":
            seconds, status[fails] = np.where(fails, seconds * third[clients], seconds), FAILED
        elif self.name == "silent":
            seconds, status[fails] = np.where(fails, np.inf, seconds), MISSING
        return seconds, status


def play_auto(
    world: World, spares: int, rounds: int, least: int | None = None, *, leave_out_slow: bool = True
) -> tuple[float, float, int]:
    """Return the seconds until all models have arrived, the clients asked per model, and the rounds."""
    policy = Policy(size=SIZE, spares=spares, deadline="auto", leave_out_slow=leave_out_slow, min_replies=least)
    least = HALF if least is None else least
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
            valid = round_.status == OK
            asked += cohort.size
            models += min(int(valid.sum()), SIZE) if valid.sum() >= least else 0
            if valid.any():
                round_.finish(valid[round_.answered])
            else:
                round_.abandon("too few models")
            if models >= rounds * SIZE:
                return clock * rounds * SIZE / models, asked / models, number + 1
    raise AssertionError


def play_fixed(world: World, deadlines: np.ndarray, spares: int, rounds: int, least: int, limit: float) -> np.ndarray:
    """Return (m,) seconds until all models have arrived with each deadline; infinity if longer than ``limit``."""
    totals = np.full(len(deadlines), np.inf)
    clock, models, left = np.zeros(len(deadlines)), np.zeros(len(deadlines)), np.arange(len(deadlines))
    for number in itertools.count():
        cohort = chances(world.seed, number)[2]
        if world.name == "day-night":  # who is online depends on the time, so deadlines are played one after another
            clock[left] = world.wait(float(clock[left][0]))[0]
            cohort = cohort[world.roster.on[cohort]]
        cohort = cohort[: SIZE + spares]
        seconds, status = world.events(cohort, number, clock[left, None])
        seconds, status = np.atleast_2d(seconds), np.atleast_2d(status)
        valid = np.sort(np.where(status == OK, seconds, np.inf), axis=1)
        ends = np.minimum(seconds.max(1), deadlines[left])
        if spares:
            ends = np.minimum(ends, valid[:, min(max(SIZE, len(cohort) - spares), len(cohort)) - 1])
        count = (valid <= ends[:, None]).sum(1)
        clock[left] += ends
        models[left] += np.where(count >= least, np.minimum(count, SIZE), 0)
        done = models[left] >= rounds * SIZE
        totals[left[done]] = clock[left[done]] * rounds * SIZE / models[left[done]]
        left = left[~done & (clock[left] <= limit)]
        if not len(left):
            return totals
    raise AssertionError


def best_fixed(
    name: str, seeds: list[int], spares: int, rounds: int, least: int, limits: list[float]
) -> tuple[float, float, int]:
    """Return the mean time, deadline and spares of the best pair; pairs that take longer than a limit are left out."""
    sample = World(name, seeds[0])
    everybody = sample.wait(0.0)[1]
    seconds = np.concatenate([sample.events(everybody, number, 0.0)[0] for number in range(10)])
    seconds = seconds[(seconds > 0) & np.isfinite(seconds)]
    quantiles = np.quantile(seconds, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0])
    deadlines = np.unique(np.concatenate([quantiles, np.geomspace(quantiles[0], np.quantile(seconds, 0.999), 16)]))
    choices = sorted({0, spares // 3, 2 * spares // 3, spares})
    if name == "day-night":
        deadlines = deadlines[::2]
    parts = deadlines[:, None] if name == "day-night" else deadlines[None]
    times = [
        [np.concatenate([play_fixed(World(name, seed), part, more, rounds, least, limit) for part in parts])
         for more in choices]
        for seed, limit in zip(seeds, limits, strict=True)
    ]  # fmt: skip
    means = np.mean(times, axis=0)
    more, at = np.unravel_index(np.argmin(means), means.shape)
    return float(means[more, at]), float(deadlines[at]), choices[more]


def compare(name: str, seeds: list[int], spares: int, rounds: int, least: int | None = None) -> tuple[float, str]:
    """Return the time with automatic deadlines divided by that of the best fixed pair, and a row of the table."""
    autos = [play_auto(World(name, seed), spares, rounds, least) for seed in seeds]
    seconds, asked, count = (float(np.mean(column)) for column in zip(*autos, strict=True))
    # Fixed pairs that are far worse are not played to the end.
    limits = [2 * auto[0] for auto in autos]
    best, deadline, more = best_fixed(name, seeds, spares, rounds, HALF if least is None else least, limits)
    fixed = f"{best:,.0f} s ({deadline:.3g} s, {more})"
    if best == np.inf:
        best = 2 * seconds
        fixed = f"more than {best:,.0f} s"
    row = f"| {WORLDS[name]} | {fixed} | {seconds:,.0f} s | {seconds / best:.3f} | {asked:.2f} | {count:.0f} |"
    everybody = [play_auto(World(name, seed), spares, rounds, least, leave_out_slow=False) for seed in seeds]
    seconds_all, asked_all, _ = (float(np.mean(column)) for column in zip(*everybody, strict=True))
    row += f" {seconds_all:,.0f} s | {seconds_all / best:.3f} | {asked_all:.2f} |"
    return seconds / best, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 16)))
    parser.add_argument("--spares", type=int, default=SIZE)
    parser.add_argument("--least", type=int)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print("| federation | best fixed (deadline, spares) | auto | ratio | asked per model | rounds ", end="")
    print("| with the slow | ratio | asked per model |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.worlds.split(","):
        print(compare(name, options.seeds, options.spares, options.rounds, options.least)[1], flush=True)


if __name__ == "__main__":
    main()

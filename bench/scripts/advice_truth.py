"""Check advice against the truth: record federations, ask for advice, then run every way truly.

Federations come from a generator of this script, which shares no code with the fit: its clients have intervals from
gamma, Pareto or two-point distributions, its data are lists of samples. The natural federations have the same kinds of
clients, with the data of real owners, if the data are found (FEDCOHORT_DATA). Their twins train on digits, as those of
an operator who names no data; two small ones are asked about again with --data. Each federation is recorded for 50
rounds under uniform selection. `fedcohort advise` sees only the journal. Then every way runs on the true federation
with other seeds.

    python bench/scripts/advice_truth.py runs/truth            # 20 federations and the natural ones, one process
    python bench/scripts/advice_truth.py runs/truth --table    # print the tables of what is there
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

from fedcohort.advice import trial
from fedcohort.advice.drift import changes
from fedcohort.advice.fit import Fit
from fedcohort.advice.record import read_record
from fedcohort.advice.twin import Stand, calibrate, played
from fedcohort.core.errors import DataError
from fedcohort.scenario.traces import Trace, write_trace
from fedcohort.simulate.config.toml import merge_tables
from fedcohort.simulate.data import load_dataset
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort_bench.benchmark.suite import size_of
from fedcohort_bench.natural import NATURAL

ROUNDS, SEEDS = 50, [101, 102, 103, 104]
DAYS = 20
CLOSE = math.log(1.1)  # as good as the best


def federation(number: int, folder: Path) -> tuple[dict, str]:
    """Return the configuration of a true federation, and a few words about it."""
    rng = np.random.default_rng([20, number])
    labels = np.asarray(load_dataset("digits").y_train)
    clients, cohort = int(rng.integers(20, 51)), int(rng.choice([4, 6, 8]))
    data = str(rng.choice(["skewed", "two classes", "even", "unequal"]))
    devices, words = _devices(clients, folder, rng)
    failure = float(rng.choice([0.0, 0.1, 0.25]))
    shares = bool(rng.random() < 0.7)
    lr = float(np.exp(rng.uniform(np.log(0.02), np.log(0.3))))
    table = {
        "name": f"truth-{number}",
        "data": {"name": "digits"},
        "local": {"epochs": 1, "batch_size": 16, "lr": lr},
        "run": {"cohort": cohort},
        "labels": {"name": "counts" if shares else "none"},
        "scenario": {
            "partition": {"name": "custom", "parts": _parts(data, labels, clients, rng)},
            "devices": devices,
            "failure": failure,
        },
    }
    words = f"{clients} clients, {cohort} a round, {data}, {words}, {failure:.0%} fail"
    return table, words + ("" if shares else ", labels hidden")


OWN_DATA = ("watch --data watch", "birdstrikes --data birdstrikes")
NATURALS = (*NATURAL, *OWN_DATA)


def natural(name: str, folder: Path) -> tuple[dict, str]:
    """Return the configuration of a federation of real owners, whose devices are drawn, and a few words about it."""
    rng = np.random.default_rng([30, NATURAL.index(name)])
    clients, size = len(np.unique(load_dataset(name).writers)), size_of(name)
    devices, words = _devices(clients, folder, rng)
    failure = float(rng.choice([0.0, 0.1, 0.25]))
    table = {
        "name": f"truth-{name}",
        "data": {"name": name},
        "local": {"steps": 10, "batch_size": 20, "lr": size.local["lr"]},
        "run": {"cohort": size.cohort},
        "labels": {"name": "counts"},
        "scenario": {"partition": {"name": "natural"}, "devices": devices, "failure": failure},
    }
    return table, f"{name}: {clients} owners, {size.cohort} a round, {words}, {failure:.0%} fail"


def _devices(clients: int, folder: Path, rng: np.random.Generator) -> tuple[dict, str]:
    speed = str(rng.choice(["gamma", "pareto", "two kinds", "alike"]))
    presence = str(rng.choice(["always", "evenings", "short", "shifts"], p=[0.4, 0.25, 0.2, 0.15]))
    rows = [(str(c), a, b, "on") for c in range(clients) for a, b in _intervals(presence, rng)]
    rates = {
        "gamma": lambda: rng.gamma(2.0, 0.4, clients) + 0.05,
        "pareto": lambda: 1 / (1 + rng.pareto(1.5, clients)),
        "two kinds": lambda: np.where(rng.random(clients) < 0.25, 0.12, 1.0) * rng.uniform(0.9, 1.1, clients),
        "alike": lambda: rng.uniform(0.9, 1.1, clients),
    }[speed]() * float(rng.choice([0.1, 0.3]))
    files = folder / "on.csv", folder / "speeds.csv"
    write_trace(Trace.of(rows, [(str(c), float(rates[c]), 1e12) for c in range(clients)]), *files)
    devices = {"name": "trace", "path": str(files[0]), "speeds_path": str(files[1]), "shuffle": False}
    return devices, f"{speed}, {presence}"


def _parts(kind: str, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[list[int]]:
    order = rng.permutation(len(labels))
    if kind == "even":
        return [part.tolist() for part in np.array_split(order, clients)]
    if kind == "two classes":
        order = order[np.argsort(labels[order], kind="stable")]
        pieces = np.array_split(order, 2 * clients)
        deal = rng.permutation(2 * clients)
        return [[*pieces[deal[2 * c]].tolist(), *pieces[deal[2 * c + 1]].tolist()] for c in range(clients)]
    weights = rng.gamma(0.6, 1.0, (clients, 10)) + 1e-3
    if kind == "unequal":
        weights *= rng.lognormal(0.0, 1.0, (clients, 1))
    owner = np.array([rng.choice(clients, p=weights[:, y] / weights[:, y].sum()) for y in labels])
    parts = [np.flatnonzero(owner == c).tolist() for c in range(clients)]
    return [part or [int(rng.integers(len(labels)))] for part in parts]


def _intervals(kind: str, rng: np.random.Generator) -> list[tuple[float, float]]:
    end = DAYS * 86400.0
    if kind == "always":
        return [(0.0, end)]
    if kind == "shifts":  # the same eight hours every day
        begin = float(rng.choice([6, 14, 22])) * 3600
        return [(day * 86400 + begin, min(day * 86400 + begin + 28800, end)) for day in range(DAYS)]
    found, at = [], float(rng.uniform(0, 7200))
    mean, gap = (1800.0, 3600.0) if kind == "short" else (7200.0, 10800.0)
    gap *= float(rng.uniform(0.5, 2.0))
    while at < end - 60:
        length = float(rng.gamma(2.0, mean / 2)) + 60
        evening = 0.5 - 0.5 * math.cos(2 * math.pi * (at / 3600 - 8) / 24)
        if kind == "short" or rng.random() < 0.15 + 0.85 * evening:
            found.append((at, min(at + length, end)))
        at += length + float(rng.gamma(1.5, gap / 1.5))
    return found or [(0.0, end)]


def truth(table: dict, ways: list[trial.Way], folder: Path) -> dict[str, list[float]]:
    """Return for each way the log of how many times as fast it truly is, seed by seed."""
    found, goal = {}, None
    for number, way in enumerate(ways):
        changed = merge_tables({**table, "seeds": SEEDS}, {k: v for k, v in way.change.items() if k != "selectors"})
        changed["selectors"] = way.change.get("selectors", {"uniform": {}})
        if goal is not None:
            changed["run"] = {**changed["run"], "rounds": 4 * ROUNDS, "seconds": goal.limit}
        results = played(changed, folder / str(number))
        runs = sorted(results.runs, key=lambda info: info.seed)
        goal = goal or trial.Goal.of(results, runs, 0.0)
        times = [trial.arrivals(results, info, 0.0, goal.levels) for info in runs]
        found[way.name] = [float(goal.times_as_fast(t, seed).mean()) for seed, t in enumerate(times)]
    return found


def check(which: str, out: Path, twins: int) -> dict:
    """Record one federation, advise, and run it truly; continue if that was interrupted."""
    folder = out / which
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    if which.isdecimal():
        seed, data = int(which), "digits"
        table, words = federation(seed, folder)
    else:
        name, _, data = which.partition(" --data ")
        seed, (table, words) = NATURAL.index(name), natural(name, folder)
        words += f", asked with --data {data}" if data else ""
    table["model"] = {"name": "mlp"}
    table["run"] |= {"rounds": ROUNDS, "processes": 1, "workers": 1}
    recorded = played({**table, "seeds": [seed], "selectors": {"uniform": {}}}, folder / "record")
    record = read_record(recorded.journal(recorded.runs[0]))
    fit = Fit(record)
    stand = Stand.of(data or None)
    learning = calibrate(fit, stand, None, folder)
    outcomes = trial.play(fit, stand, learning, None, folder, twins, lambda text: None)
    found = [str(change) for change in changes(record) if change.found]
    verdict = trial.judge(fit, learning, outcomes, found)
    advised = time.process_time() - began
    true = truth(table, [outcome.way for outcome in outcomes], folder / "true")
    result = {
        "words": words, "headline": verdict.headline, "drift": found, "fits": learning.fits,
        "advised": verdict.best.way.name if verdict.best else (trial.RECORDED if learning.fits and not found else None),
        "sure": verdict.best is not None, "promising": verdict.promising.way.name if verdict.promising else None,
        "intervals": {o.way.name: o.interval() for o in outcomes[1:]},
        "true": true, "seconds": [advised, time.process_time() - began],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    return result


def summary(results: list[dict]) -> str:
    """Return the table in Markdown, and how often advice was right."""
    head = ["federation", "advice", "predicted", "true", "truly best", "true", "as good", "inside"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    inside = total = wrong = 0
    good, told = [0, 0], [0, 0]  # of sure advice, and of all
    for r in results:
        true = {name: float(np.mean(logs)) for name, logs in r["true"].items()}
        best = max(true, key=true.__getitem__)
        hits = [low <= math.exp(true[name]) <= high for name, (_, low, high) in r["intervals"].items()]
        inside, total = inside + sum(hits), total + len(hits)
        name = r["advised"] if r["sure"] else r["promising"] or r["advised"]
        cells = ["cannot tell", "–", "–", best, f"{math.exp(true[best]):.2f}", "–"]
        if name is not None:
            lost = np.array(r["true"][best]) - np.array(r["true"][name])
            as_good = bool(lost.mean() <= max(CLOSE, half_interval(lost) if best != name else 0.0))
            for k in (0, 1) if r["sure"] else (1,):
                told[k] += 1
                good[k] += as_good
            wrong += bool(r["sure"] and true[name] < 0)
            mean, low, high = r["intervals"].get(name, (1.0, 1.0, 1.0))
            word = name if r["sure"] or name == trial.RECORDED else f"perhaps {name}"
            cells[:3] = [word, f"{mean:.2f} ({low:.2f} to {high:.2f})", f"{math.exp(true[name]):.2f}"]
            cells[5] = "yes" if as_good else "no"
        lines.append("| " + " | ".join([r["words"], *cells, f"{sum(hits)}/{len(hits)}"]) + " |")
    share = inside / max(total, 1)
    lines.append(f"\nas good as the truly best way: {good[0]} of {told[0]} sure advices, {good[1]} of {told[1]} in all")
    lines.append(f"no advice: {len(results) - told[1]} of {len(results)}; surely faster but truly slower: {wrong}")
    lines.append(f"true ratios inside their 95% intervals: {inside} of {total} ({share:.0%})")
    return "\n".join(lines)


def show(out: Path) -> None:
    """Print the tables of what is there."""
    done = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("*/result.json"))}
    for results in (
        [r for name, r in done.items() if name.isdecimal()],
        [done[n] for n in NATURALS if n in done],
    ):
        if results:
            print(f"{summary(results)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--federations", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--natural", default=",".join(NATURALS), help="names, with commas between them")
    parser.add_argument("--twins", type=int, default=8)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    drawn = [f"{number:02d}" for number in range(options.first, options.first + options.federations)]
    for which in () if options.table else [*drawn, *filter(None, options.natural.split(","))]:
        try:
            found = check(which, options.out, options.twins)
        except DataError as error:  # the data of real owners come with packages that not everybody has
            print(which, error, file=sys.stderr)
            continue
        print(which, found["words"], found["headline"], [round(s) for s in found["seconds"]], file=sys.stderr)
    show(options.out)

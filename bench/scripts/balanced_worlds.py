"""`balanced` in worlds it was not made for: a minority with other sensors, unequal sizes, wrong and permuted labels.

Run: python bench/scripts/balanced_worlds.py OUT worlds|suite|femnist SEEDS [--data FOLDER] [--only NAMES]

``suite`` and ``femnist`` are the benchmark's settings. ``worlds`` builds federations of Fashion-MNIST, each as an npz
archive whose samples name their clients. Half of a test set is seen through the minority's sensor. Prints the mean gain
over uniform selection in points, and the worst seed's gain in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort_bench.benchmark.suite import table

SELECTORS: dict[str, dict[str, Any]] = {
    "balanced": {},
    "directions": {"name": "balanced", "balance": "directions"},
    "time": {"name": "balanced", "time": 0.5},
    "fedcbs-chance": {},
    "astraea": {},
    "size-weighted": {},
}
SLOW = {"name": "shifted-exponential", "straggling": 1.0, "spread": 1.0}
Images = Callable[[Any], Any]


def turned(quarters: int) -> Images:
    """Return a function that rotates images by a number of quarter turns."""
    return lambda x: np.ascontiguousarray(np.rot90(x, quarters, axes=(1, 2)))


def inverted(x: Any) -> Any:
    """Invert images."""
    return 255 - x


def faint(x: Any) -> Any:
    """Reduce the contrast to a quarter."""
    return (x // 4 + 96).astype(np.uint8)


def blurred(x: Any) -> Any:
    """Average over five by five pixels."""
    soft = x.astype(np.float32)
    for axis in (1, 2):
        soft = sum(np.roll(soft, step, axis) for step in range(-2, 3)) / 5
    return soft.astype(np.uint8)


class Worlds:
    """Federations of Fashion-MNIST under one seed; each is clients, samples, labels, test samples and test labels."""

    def __init__(self, folder: Path, seed: int) -> None:
        data = np.load(folder / "fashion_mnist.npz")
        self.x, self.y = data["x_train"].reshape(-1, 28, 28), data["y_train"].astype(np.int64)
        self.x_test, self.y_test = data["x_test"].reshape(-1, 28, 28), data["y_test"].astype(np.int64)
        self.rng = np.random.default_rng(seed + 1000)

    def deal(self, sizes: Any, alpha: float | None) -> tuple[Any, Any]:
        """Return clients and samples: client k gets ``sizes[k]`` samples, of all classes alike or from a Dirichlet."""
        stacks = [self.rng.permutation(np.flatnonzero(self.y == c)) for c in range(10)]
        at = np.zeros(10, int)
        who, which = [], []
        for client, size in enumerate(sizes):
            shares = np.full(10, 0.1) if alpha is None else self.rng.dirichlet(np.full(10, alpha))
            for c, count in enumerate(self.rng.multinomial(size, shares)):
                which.append(stacks[c][(at[c] + np.arange(count)) % len(stacks[c])])
                who.append(np.full(count, client))
                at[c] += count
        return np.concatenate(who), np.concatenate(which)

    def minority(self, share: float, seen: Images, alpha: float | None) -> tuple[Any, ...]:
        """A share of 100 clients and half of the test set have another view."""
        who, which = self.deal([300] * 100, alpha)
        chosen = self.rng.permutation(100)[: max(1, round(share * 100))]
        x = self.x[which].copy()
        theirs = np.isin(who, chosen)
        x[theirs] = seen(x[theirs])
        half = len(self.x_test) // 2
        test = np.concatenate([self.x_test[:half], seen(self.x_test[half:])])
        return who, x, self.y[which], test, self.y_test

    def sizes(self, sizes: Any, alpha: float | None) -> tuple[Any, ...]:
        """Clients of very different sizes."""
        who, which = self.deal(sizes, alpha)
        return who, self.x[which], self.y[which], self.x_test, self.y_test

    def rare(self, every: int, wrong: float) -> tuple[Any, ...]:
        """Two classes only at every fifth or tenth client, with some of their labels wrong."""
        who, which = self.deal([300] * 100, 0.3)
        keep = (self.y[which] < 8) | (who % every == 0)
        who, which = who[keep], which[keep]
        y = self.y[which].copy()
        flipped = (y >= 8) & (self.rng.random(len(y)) < wrong)
        y[flipped] = self.rng.integers(0, 10, flipped.sum())
        return who, self.x[which], y, self.x_test, self.y_test

    def permuted(self) -> tuple[Any, ...]:
        """Three in ten clients permute their labels."""
        who, which = self.deal([300] * 100, 0.3)
        y = self.y[which].copy()
        theirs = np.isin(who, self.rng.permutation(100)[:30])
        y[theirs] = self.rng.permutation(10)[y[theirs]]
        return who, self.x[which], y, self.x_test, self.y_test

    def five_domains(self) -> tuple[Any, ...]:
        """Five kinds of sensors, each at a fifth of the clients."""
        kinds = (turned(1), turned(2), inverted, blurred, lambda x: x)
        who, which = self.deal([300] * 100, 0.3)
        x, test = self.x[which].copy(), self.x_test.copy()
        for kind, seen in enumerate(kinds):
            x[who % 5 == kind] = seen(x[who % 5 == kind])
            test[2000 * kind : 2000 * (kind + 1)] = seen(test[2000 * kind : 2000 * (kind + 1)])
        return who, x, self.y[which], test, self.y_test

    def one_class(self) -> tuple[Any, ...]:
        """Twenty clients of one class each."""
        which = np.concatenate(
            [self.rng.choice(np.flatnonzero(self.y == c), 300, replace=False) for c in np.repeat(range(10), 2)]
        )
        return np.repeat(np.arange(20), 300), self.x[which], self.y[which], self.x_test, self.y_test

    def all(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield every world with its name; they share a generator, so the order must not change."""

        def lognormal(mean: float, spread: float, count: int, least: int, most: int) -> Any:
            return np.clip(np.exp(self.rng.normal(mean, spread, count)), least, most).astype(int)

        yield "rotated-20%", self.minority(0.2, turned(1), None)
        yield "rotated-5%", self.minority(0.05, turned(1), None)
        yield "inverted-10%", self.minority(0.1, inverted, None)
        yield "rotated-20%-skew", self.minority(0.2, turned(1), 0.3)
        yield "upside-down-20%-skew", self.minority(0.2, turned(2), 0.1)
        yield "sizes-skew", self.sizes(lognormal(4.5, 1.6, 100, 2, 3000), 0.3)
        yield "sizes-iid", self.sizes(lognormal(4.5, 1.6, 100, 2, 3000), None)
        yield "hospitals", self.sizes(np.concatenate([[1], lognormal(5, 1.5, 14, 5, 4000)]), 0.3)
        yield "permuted-30%", self.permuted()
        yield "contrast-10%-skew", self.minority(0.1, faint, 0.3)
        yield "blurred-10%", self.minority(0.1, blurred, None)
        yield "five-domains", self.five_domains()
        yield "one-class-20", self.one_class()
        yield "rare-wrong", self.rare(5, 0.4)
        yield "rare-classes-10%", self.rare(10, 0.0)


def terminal(experiment: dict[str, Any], folder: Path) -> dict[tuple[str, str], list[float]]:
    """Run an experiment; return the mean accuracy of the last tenth of its evaluations, by setting and selector."""
    Simulation(Experiment.from_dict(experiment), folder, processes=None).run()
    results = load(folder)
    accuracies: dict[tuple[str, str], list[float]] = {}
    for run in results.runs:
        scores = np.asarray(results.score(run), float)
        scores = scores[np.isfinite(scores)]
        last = scores[-max(1, len(scores) // 10) :].mean() if len(scores) else 0.0
        accuracies.setdefault((run.setting.get("name", ""), run.label), []).append(float(last))
    return accuracies


def world(name: str, arrays: tuple[Any, ...], seed: int, out: Path) -> dict[str, Any]:
    """Write a world's archive; return its experiment."""
    who, x, y, x_test, y_test = arrays
    names, clients = np.unique(who, return_inverse=True)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{seed}.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test, clients=clients)
    settings: list[dict[str, Any]] = [{"name": name}]
    if name == "rotated-20%-skew":
        settings += [{"name": f"{name}-{k}", "run": {"cohort": k}} for k in (2, 50)]
    return {
        "name": name,
        "seeds": [seed],
        "data": {"name": "file", "path": str(path)},
        "model": {"name": "mlp"},
        "local": {"batch_size": 50, "steps": 20, "lr": 0.03},
        "scenario": {"partition": {"name": "natural"}, "latency": SLOW},
        "run": {"rounds": 200, "cohort": 10 if len(names) > 20 else 4, "eval_every": 2, "baseline": "uniform"},
        "selectors": {"uniform": {}, **SELECTORS},
        "settings": settings,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("worlds", "suite", "femnist"))
    parser.add_argument("seeds", help="such as 0,1,2")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--only", default="", help="settings or worlds, separated by commas")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    only = [name for name in options.only.split(",") if name]
    accuracies: dict[tuple[str, str], list[float]] = {}
    if options.what == "worlds":
        for seed in seeds:
            for name, arrays in Worlds(options.data, seed).all():
                if not only or name in only:
                    made = terminal(world(name, arrays, seed, options.out), options.out / f"{name}-{seed}")
                    for key, values in made.items():
                        accuracies.setdefault(key, []).extend(values)
    else:
        experiment = table("fashion-mnist" if options.what == "suite" else "femnist", SELECTORS, seeds, settings=only)
        experiment["data"]["folder"] = str(options.data)
        accuracies = terminal(experiment, options.out / options.what)
    labels = list(dict.fromkeys(label for _, label in accuracies))
    print("setting".ljust(24), *(label.rjust(14) for label in labels))
    for setting in dict.fromkeys(setting for setting, _ in accuracies):
        base = np.array(accuracies[setting, "uniform"])
        cells = [f"{100 * base.mean():.1f}"]
        for label in labels[1:]:
            gain = 100 * (np.array(accuracies[setting, label]) - base)
            cells.append(f"{gain.mean():+.1f} ({gain.min():+.1f})")
        print(setting.ljust(24), *(cell.rjust(14) for cell in cells), flush=True)


if __name__ == "__main__":
    main()

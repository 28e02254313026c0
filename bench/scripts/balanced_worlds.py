"""`balanced` in eighteen worlds of Fashion-MNIST, where presence may depend on anything and clients may join.

Run: python bench/scripts/balanced_worlds.py FILE SEEDS [--selectors balanced,fedcbs] [--worlds few-5,join]

FILE is fashion_mnist.npz with x_train, y_train, x_test and y_test; SEEDS such as 700,701. A name may have parameters:
balanced:share=2.0. Images are halved, the network has one hidden layer, and a run of 120 rounds takes half a second of
one core. Prints points of accuracy over uniform selection with the same seed, as the mean of the last rounds, with the
worst seed and Jain's index of participation in brackets.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort import ClientTable, LabelCounts, Session, Signal, create
from fedcohort.core.protocol import RoundReport, RoundRequest

HIDDEN, STEPS, BATCH, RATE, ROUNDS = 48, 10, 20, 0.1, 120
Presence = Callable[[int, np.random.Generator], Any]


@dataclass(frozen=True)
class World:
    """A federation: each client's samples, the images and labels they see, and who is there in a round."""

    parts: list[Any]
    x: Any
    y: Any
    present: Presence | None = None
    first: int | None = None  # with this many clients, the others join in the middle
    cohort: int = 10


class Worlds:
    """The worlds under one seed."""

    def __init__(self, data: Any, seed: int) -> None:
        self.x, self.y, self.rng = data["x"], data["y"], np.random.default_rng([seed, 3])

    def deal(self, mixes: Any, sizes: Any = None, **more: Any) -> World:
        """Give every client samples of a mix of classes (N, 10)."""
        stacks = [self.rng.permutation(np.flatnonzero(self.y == c)) for c in range(10)]
        at, parts = np.zeros(10, int), []
        for mix, size in zip(mixes, np.full(len(mixes), 300) if sizes is None else sizes, strict=True):
            counts = self.rng.multinomial(size, mix / mix.sum())
            parts.append(
                np.concatenate([stacks[c][(at[c] + np.arange(k)) % len(stacks[c])] for c, k in enumerate(counts)])
            )
            at += counts
        return World(parts, self.x, self.y, **more)

    def mixes(self, n: int = 100, alpha: float = 0.3, base: Any = None) -> Any:
        """Return mixes (n, 10) from a Dirichlet distribution around ``base``."""
        return self.rng.dirichlet(np.maximum(10 * alpha * (np.full(10, 0.1) if base is None else base), 1e-3), n)

    def few(self, holders: int, rare: int, wrong: float = 0.0) -> World:
        """Only some clients hold the last classes, which are half of their data; some of these labels are wrong."""
        common = np.arange(10) < 10 - rare
        mixes = self.mixes(base=common / common.sum()) * common
        mixes /= mixes.sum(axis=1, keepdims=True)
        mixes[:holders] = 0.5 * mixes[:holders] + 0.5 * ~common / rare
        world = self.deal(mixes)
        y = self.y.copy()
        held = np.unique(np.concatenate(world.parts))
        held = held[(y[held] >= 10 - rare) & (self.rng.random(len(held)) < wrong)]
        y[held] = self.rng.integers(0, 10, len(held))
        return replace(world, y=y)

    def halves(self, little: float = 0.02) -> Any:
        """Return mixes: one half of the clients has little of the last five classes, the other little of the first."""
        mixes = self.mixes()
        mixes[:50, 5:] *= little
        mixes[50:, :5] *= little
        return mixes + 1e-6

    def seasons(self, period: int) -> World:
        """One half of the clients is there for some rounds, then the other."""
        return self.deal(self.halves(), present=lambda t, _: np.arange(50) + 50 * (t // period % 2))

    def away(self) -> World:
        """One half of the clients is there four times as often."""
        return self.deal(
            self.halves(0.05), present=lambda _, rng: np.flatnonzero(rng.random(100) < np.repeat([0.6, 0.15], 50))
        )

    def tail_by_clients(self) -> World:
        """One class each, with ever fewer clients for each class."""
        share = 0.02 ** (np.arange(10) / 9)
        return self.deal(
            np.eye(10)[np.repeat(np.arange(10), np.maximum(1, np.round(100 * share / share.sum())).astype(int))]
        )

    def sketch(self) -> World:
        """A tenth of the clients sees inverted images; all have the same classes."""
        world, x = self.deal(np.ones((100, 10))), self.x.copy()
        for part in world.parts[:10]:
            x[part] = 1 - x[part]
        return replace(world, x=x)

    def permuted(self) -> World:
        """Three in ten clients permute all labels."""
        world, y, order = self.deal(self.mixes()), self.y.copy(), self.rng.permutation(10)
        for part in world.parts[:30]:
            y[part] = order[self.y[part]]
        return replace(world, y=y)

    def noise(self) -> World:
        """Three in ten labels are wrong."""
        world, y = self.deal(self.mixes()), self.y.copy()
        wrong = np.flatnonzero(self.rng.random(len(y)) < 0.3)
        y[wrong] = self.rng.integers(0, 10, len(wrong))
        return replace(world, y=y)

    def all(self) -> dict[str, Callable[[], World]]:
        """Return every world by name."""
        tail = 0.01 ** (np.arange(10) / 9)
        third: Presence = lambda _, rng: np.sort(rng.permutation(100)[:30])  # noqa: E731
        two = [np.eye(10)[self.rng.permutation(10)[:2]].sum(axis=0) for _ in range(100)]
        return {
            "iid": lambda: self.deal(np.ones((100, 10))),
            "two-classes": lambda: self.deal(two),
            "dirichlet-30%": lambda: self.deal(self.mixes(alpha=0.1), present=third),
            "few-10": lambda: self.few(10, 2),
            "few-5": lambda: self.few(5, 3),
            "few-20": lambda: self.few(20, 4),
            "few-wrong": lambda: self.few(10, 2, wrong=0.4),
            "tail": lambda: self.deal(self.mixes(base=tail / tail.sum())),
            "tail-by-clients": self.tail_by_clients,
            "seasons-20": lambda: self.seasons(20),
            "seasons-5": lambda: self.seasons(5),
            "away": self.away,
            "join": lambda: self.deal(self.halves(), first=50),
            "giant": lambda: self.deal(self.mixes(60, 0.2), [12_000] + [300] * 59, cohort=6),
            "sizes": lambda: self.deal(self.mixes(), np.rint(3 * 10 ** np.linspace(0, 3, 100)).astype(int)),
            "sketch": self.sketch,
            "permuted": self.permuted,
            "noise": self.noise,
        }


def trained(world: World, model: list[Any], clients: Any, rng: np.random.Generator) -> list[Any]:
    """Return the models of clients after their local steps, all at once; each array is (k, ...)."""
    count = len(clients)
    w1, b1, w2, b2 = (np.repeat(p[None], count, 0) for p in model)
    drawn = [world.parts[c][rng.integers(0, len(world.parts[c]), STEPS * BATCH)] for c in clients]
    for batch in np.stack(drawn).reshape(count, STEPS, BATCH).transpose(1, 0, 2):
        x, y = world.x[batch], world.y[batch]
        inner = np.maximum(x @ w1 + b1[:, None], 0)
        z = inner @ w2 + b2[:, None]
        error = np.exp(z - z.max(axis=2, keepdims=True))
        error /= error.sum(axis=2, keepdims=True)
        error[np.arange(count)[:, None], np.arange(BATCH), y] -= 1
        error /= BATCH
        back = (error @ w2.transpose(0, 2, 1)) * (inner > 0)
        w2 -= RATE * (inner.transpose(0, 2, 1) @ error)
        b2 -= RATE * error.sum(axis=1)
        w1 -= RATE * (x.transpose(0, 2, 1) @ back)
        b1 -= RATE * back.sum(axis=1)
    return [w1, b1, w2, b2]


def run(world: World, selector: Any, seed: int, test: Any) -> tuple[float, float]:
    """Train; return the accuracy in percent and Jain's index of how often clients were asked."""
    rng, n = np.random.default_rng(seed), len(world.parts)
    size = world.x.shape[1]
    model = [rng.normal(0, s, shape).astype(np.float32) for s, shape in ((0.1, (size, HIDDEN)), (0, HIDDEN))]
    model += [rng.normal(0, s, shape).astype(np.float32) for s, shape in ((0.2, (HIDDEN, 10)), (0, 10))]
    sketch = np.random.default_rng(9).normal(0, 0.02, (sum(p.size for p in model), 64)).astype(np.float32)
    counts = np.array([np.bincount(world.y[part], minlength=10) for part in world.parts])

    def table(start: int, end: int) -> ClientTable:
        return ClientTable(names=[str(i) for i in range(start, end)], labels=LabelCounts(counts[start:end]))

    there = world.first or n
    session = Session(selector, table(0, there), signals={Signal.UPDATE_SKETCH}, seed=seed)
    asked, accuracy = np.zeros(n), []
    for t in range(ROUNDS):
        if world.first and t == ROUNDS // 2:
            session.join(table(there, n))
            there = n
        present = np.arange(there)
        if world.present is not None:
            found = world.present(t, np.random.default_rng([seed, t]))
            present = found if len(found) >= world.cohort else present
        clients = session.ask(RoundRequest(world.cohort, present)).clients
        asked[clients] += 1
        models = trained(world, model, clients, np.random.default_rng([seed, t, 5]))
        metrics: dict[Signal, Any] = {}
        if Signal.UPDATE_SKETCH in session.requires:
            change = [(a - b).reshape(len(clients), -1) for a, b in zip(models, model, strict=True)]
            metrics = {Signal.UPDATE_SKETCH: np.concatenate(change, axis=1) @ sketch}
        session.tell(RoundReport(t, clients, metrics=metrics))
        weights = np.array([len(world.parts[c]) for c in clients], float)
        model = [np.tensordot(weights / weights.sum(), p, (0, 0)).astype(np.float32) for p in models]
        if t >= 0.88 * ROUNDS and t % 2 == 0:
            w1, b1, w2, b2 = model
            scores = np.maximum(test["x"] @ w1 + b1, 0) @ w2 + b2
            accuracy.append(float((scores.argmax(axis=1) == test["y"]).mean()))
    return 100 * float(np.mean(accuracy)), float(asked.sum() ** 2 / (n * (asked**2).sum()))


def named(text: str) -> Any:
    """Return a selector from its name and parameters, such as balanced:share=2.0."""
    name, *parameters = text.split(":")
    return create(name, **{key: _value(value) for key, value in (p.split("=") for p in parameters)})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def halved(images: Any) -> Any:
    """Return images of 14 by 14 pixels between 0 and 1, as rows."""
    return (images.reshape(len(images), 14, 2, 14, 2).mean((2, 4)) / 255).astype(np.float32).reshape(len(images), -1)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("seeds")
    parser.add_argument("--selectors", default="balanced,fedcbs")
    parser.add_argument("--worlds", default="")
    options = parser.parse_args()
    data = np.load(options.file)
    train = {"x": halved(data["x_train"]), "y": data["y_train"].astype(int)}
    test = {"x": halved(data["x_test"][:3000]), "y": data["y_test"][:3000].astype(int)}
    seeds, labels = [int(seed) for seed in options.seeds.split(",")], options.selectors.split(",")
    means: dict[str, list[float]] = {label: [] for label in labels}
    print("world".ljust(18) + "uniform " + "".join(label.rjust(30) for label in labels))
    for name in options.worlds.split(",") if options.worlds else list(Worlds(train, 0).all()):
        gains: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
        base = []
        for seed in seeds:
            world = Worlds(train, seed).all()[name]()
            base.append(run(world, create("uniform"), seed, test)[0])
            for label in labels:
                accuracy, even = run(world, named(label), seed, test)
                gains[label].append((accuracy - base[-1], even))
        line = f"{name:18}{np.mean(base):7.1f} "
        for label in labels:
            gain, even = np.mean(gains[label], axis=0)
            means[label].append(float(gain))
            line += f"{gain:+.1f} ({min(g for g, _ in gains[label]):+.1f}; {even:.2f})".rjust(30)
        print(line, flush=True)
    print("mean".ljust(26) + "".join(f"{np.mean(means[label]):+.2f}".rjust(30) for label in labels))


if __name__ == "__main__":
    main()

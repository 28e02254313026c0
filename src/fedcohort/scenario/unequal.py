"""Partitions in which few clients hold most of the samples, or all samples of some classes, or sizes are listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Interval, Optional, Sequence, param
from fedcohort.scenario.partition import PARTITIONS, Assignment, Partition, Pool, dirichlet, nearest

_CLIENTS = Interval(int, 1, None)
_ALPHA = Optional(Interval(float, 0, None, "neither"))


@PARTITIONS.register("quantity")
@dataclass(frozen=True, kw_only=True)
class Quantity(Partition):
    """Sizes over several orders of magnitude, evenly spaced on a logarithmic scale and assigned at random.

    >>> pool, rng = Pool.of([0, 1] * 600), np.random.default_rng(0)
    >>> part = Quantity(clients=4, smallest=1, orders=3, alpha=None).assign(pool, rng)
    >>> sorted(np.diff(part.offsets).tolist())
    [1, 10, 100, 1000]
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    smallest: int = param(3, Interval(int, 1, None), "samples of the smallest client")
    orders: float = param(3.0, Interval(float, 0, 6), "the largest client has 10 to the power of this times as many")
    alpha: float | None = param(0.3, _ALPHA, "Dirichlet concentration of each client's classes; None: as in the pool")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw sizes, then classes; if a class has too few samples, draw with replacement."""
        # Spaced and not drawn, so that every seed has the smallest and the largest client.
        exponent = np.linspace(0, self.orders, self.clients) if self.clients > 1 else np.zeros(1)
        sizes = rng.permutation(np.rint(self.smallest * 10.0**exponent).astype(np.int64))
        counts = _draw(sizes, _mixes(pool, np.ones(pool.classes, bool), self.clients, self.alpha, rng), rng)
        return _deal(self, pool, counts, rng)


@PARTITIONS.register("listed")
@dataclass(frozen=True, kw_only=True)
class Listed(Partition):
    """Clients of listed sizes. Their classes are listed as shares, or drawn from a Dirichlet distribution.

    >>> listed = Listed(sizes=(3, 5), mixes=((1.0, 0.0), (0.0, 1.0)))
    >>> listed.assign(Pool.of([0, 1] * 9), np.random.default_rng(0)).offsets
    array([0, 3, 8])
    """

    sizes: tuple[int, ...] = param(
        dataclasses.MISSING, Sequence(Interval(int, 1, None), least=1), "every client's number of samples"
    )
    alpha: float | None = param(0.3, _ALPHA, "Dirichlet concentration of each client's classes; None: as in the pool")
    mixes: tuple[tuple[float, ...], ...] | None = param(
        None, Optional(Sequence(Sequence(Interval(float, 0, None)))), "every client's shares of the classes"
    )

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw samples; if a class has too few, with replacement."""
        if self.mixes is None:
            mixes = _mixes(pool, np.ones(pool.classes, bool), self.clients, self.alpha, rng)
        else:
            rows = {len(row) for row in self.mixes}
            if len(self.mixes) != self.clients or rows != {pool.classes}:
                raise ScenarioError(
                    f"The partition 'listed' needs shares of {pool.classes} classes for each of {self.clients:,} "
                    f"clients. Got {len(self.mixes):,} rows of {', '.join(map(str, sorted(rows)))}."
                )
            mixes = np.asarray(self.mixes, np.float64) * (pool.counts > 0)
            if not (mixes.sum(axis=1) > 0).all():
                raise ScenarioError("In the partition 'listed', every client needs a share of a class with samples.")
        return _deal(self, pool, _draw(np.asarray(self.sizes), mixes, rng), rng)


@PARTITIONS.register("rare-holders")
@dataclass(frozen=True, kw_only=True)
class RareHolders(Partition):
    """Only a few clients hold the rare classes, which are half of their samples. All clients have equal sizes.

    >>> part = RareHolders(clients=10, rare=1, share=0.2).assign(Pool.of([0, 1, 2] * 100), np.random.default_rng(0))
    >>> int(part.traits["rare"].sum())
    2
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    rare: int = param(2, Interval(int, 1, None), "how many classes are rare: the last ones")
    share: float = param(0.1, Interval(float, 0, 1, "neither"), "share of the clients that hold them; at least one")
    alpha: float | None = param(0.3, _ALPHA, "Dirichlet concentration of the other classes; None: as in the pool")
    samples: int | None = param(
        None, Optional(Interval(int, 2, None)), "samples per client; None: half of all in total"
    )

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Choose the holders, then deal."""
        if self.rare >= pool.classes:
            raise ScenarioError(
                "The partition 'rare-holders' needs a class that is not rare. "
                f"Got {self.rare} rare classes of {pool.classes}.",
                hint=f"rare must be below {pool.classes}",
            )
        size = self.samples or max(2, len(pool) // (2 * self.clients))
        common = np.arange(pool.classes) < pool.classes - self.rare
        mixes = _mixes(pool, common, self.clients, self.alpha, rng)
        holders = max(1, nearest(self.share * self.clients))
        holds = np.zeros(self.clients, bool)
        holds[rng.permutation(self.clients)[:holders]] = True
        rare_samples = holds * (size // 2)  # (N,)
        counts = _draw(size - rare_samples, mixes, rng)
        counts += _draw(rare_samples, np.tile(~common / self.rare, (self.clients, 1)), rng)
        return _deal(self, pool, counts, rng, traits={"rare": holds})


def _mixes(pool: Pool, classes: BoolArray, clients: int, alpha: float | None, rng: np.random.Generator) -> FloatArray:
    """Return class shares (N, classes) over some of the classes: from a Dirichlet distribution, or as in the pool."""
    # alpha is per class: equally frequent classes all have this concentration.
    prior = np.where(classes & (pool.counts > 0), pool.counts, 0) / max(int(pool.counts[classes].sum()), 1)
    if alpha is None:
        return np.tile(prior, (clients, 1))
    return dirichlet(rng, np.tile(alpha * pool.classes * prior, (clients, 1)))


def _draw(sizes: IntArray, mixes: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw how many samples of each class clients of these sizes (N,) and class shares (N, classes) have."""
    # multinomial refuses shares whose sum is above 1 by rounding.
    exact = mixes / mixes.sum(axis=1, keepdims=True)
    return np.array([rng.multinomial(size, mix) for size, mix in zip(sizes, exact, strict=True)], dtype=np.int64)


def _deal(
    partition: Partition,
    pool: Pool,
    counts: IntArray,
    rng: np.random.Generator,
    traits: Mapping[str, AnyArray] | None = None,
) -> Assignment:
    short = bool((counts.sum(axis=0) > pool.counts).any())
    remarks = ("a class has too few samples, so samples are drawn with replacement",) if short else ()
    return partition.deal(pool, counts, rng, replacement=short, traits=traits, remarks=remarks)

"""Partitions by class: IID, shards, one or two classes per client, class-imbalanced, dominant class.

.. [McMahan2017] B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data".
.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022, Section 5.1.
.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023, Section 5.2, Appendices C.1 and C.3.
.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", Section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Boolean, Interval, Optional, param
from fedcohort.scenario.counter_rng import log_normals
from fedcohort.scenario.partition import PARTITIONS, Assignment, Partition, Pool

_CLIENTS = Interval(int, 1, None)
_SAMPLES = Optional(Interval(int, 1, None))


@PARTITIONS.register("iid")
@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Every client holds a uniformly random part of the training set.

    Without ``samples``, the whole set is assigned and sizes differ by at most one.

    >>> Iid(clients=4).assign(Pool.of([0] * 6 + [1] * 4), np.random.default_rng(0)).offsets
    array([ 0,  3,  6,  8, 10])
    """

    by_class = False

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    samples: int | None = param(None, _SAMPLES, "samples per client; None assigns all")
    replacement: bool = param(False, Boolean(), "draw every sample independently from the whole set")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Cut a random permutation, or draw independently."""
        if self.replacement:
            size = self.samples or max(1, len(pool) // self.clients)
            places = rng.integers(0, len(pool), self.clients * size)
            return Assignment(places, np.arange(self.clients + 1, dtype=np.int64) * size)
        size = self.equal_size(pool, self.clients, self.samples)
        sizes = np.full(self.clients, size, dtype=np.int64)
        if self.samples is None:  # the remainder, one sample each
            sizes[: len(pool) - size * self.clients] += 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Assignment(rng.permutation(len(pool))[: offsets[-1]], offsets)


@PARTITIONS.register("shards")
@dataclass(frozen=True, kw_only=True)
class Shards(Partition):
    """Equal shards of one label each, ``per_client`` of them dealt to every client at random ([Tang2022]_, 1SPC, 2SPC).

    The data are sorted by label and divided "so that all the data in one shard share the same label". If all classes
    have the same size, that is McMahan's cut [McMahan2017]_. If not, the two differ: ``pure`` cuts within the classes,
    with the largest shard size that gives enough shards, and leaves the rest out; ``pure=False`` cuts the sorted set as
    McMahan does, so a shard may have two labels.

    >>> part = Shards(clients=4, per_client=1).assign(Pool.of([0, 0, 1, 1, 0, 0, 1, 1]), np.random.default_rng(0))
    >>> part.offsets
    array([0, 2, 4, 6, 8])
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    per_client: int = param(2, Interval(int, 1, None), "shards per client: 1 is 1SPC, 2 is 2SPC")
    pure: bool = param(True, Boolean(), "cut within the classes, so that every shard has one label")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Sort by label, cut, assign the shards."""
        shards = self.clients * self.per_client
        if shards > len(pool):
            raise ScenarioError(
                f"The partition 'shards' needs {self.clients:,} clients x {self.per_client} = {shards:,} shards, but "
                f"the training set has {len(pool):,} samples.",
                hint=f"at most {len(pool) // self.per_client:,} clients fit",
            )
        # In random order within a class, so that the seed decides which samples share a shard.
        ordered = rng.permutation(len(pool))
        ordered = ordered[np.argsort(pool.labels[ordered], kind="stable")]
        if self.pure:
            size = _largest(1, len(pool) // shards, lambda size: int((pool.counts // size).sum()) >= shards)
            starts = np.concatenate([[0], np.cumsum(pool.counts)])[:-1]
            cuts = np.concatenate(
                [start + size * np.arange(n // size) for start, n in zip(starts, pool.counts, strict=True)]
            )
            cuts = cuts[rng.permutation(len(cuts))[:shards]]
        else:
            size = len(pool) // shards
            cuts = size * rng.permutation(shards)
        places = ordered[(cuts[:, None] + np.arange(size)).reshape(-1)]
        left = len(pool) - len(places)
        remarks = (f"{left:,} samples are left out, so that all shards have {size:,}",) if left else ()
        each = size * self.per_client
        return Assignment(places, np.arange(self.clients + 1, dtype=np.int64) * each, remarks=remarks)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``high`` that fits, by bisection; ``low`` if no larger one does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


@PARTITIONS.register("classes-per-client")
@dataclass(frozen=True, kw_only=True)
class ClassesPerClient(Partition):
    """Every client has the same amount of data from ``per_client`` different classes ([Zhang2023]_, C.1 and Case 2).

    Every class goes to the same number of clients, to within one. Unlike two shards, the classes always differ.

    >>> ClassesPerClient(clients=2, per_client=1).assign(Pool.of([0, 0, 1, 1]), np.random.default_rng(0)).offsets
    array([0, 2, 4])
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    per_client: int = param(1, Interval(int, 1, None), "different classes per client")
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Assign classes to clients evenly, then samples."""
        present = np.flatnonzero(pool.counts)
        if self.per_client > len(present):
            raise ScenarioError(
                f"The partition 'classes-per-client' needs {self.per_client} classes per client, but the training set "
                f"has samples of {len(present)}."
            )
        own_classes = present[_deal_classes(self.clients, self.per_client, len(present), rng)]
        member = np.zeros((self.clients, pool.classes), dtype=bool)
        np.put_along_axis(member, own_classes, True, axis=1)
        holders = member.sum(axis=0)
        # Quantities are equal, so the scarcest class decides for all.
        most = int((pool.counts[holders > 0] // holders[holders > 0]).min())
        counts = _equal_quantity(self, member, self.per_client, self.samples, most)
        traits = {"first_class": member.argmax(axis=1)}
        return self.deal(pool, counts, rng, traits=traits)


def _deal_classes(clients: int, each: int, classes: int, rng: np.random.Generator) -> IntArray:
    """Give each client ``each`` different classes, and each class to equally many clients: (clients, each).

    Each client takes the classes with the most slots left, so that the slots never run out of different classes.
    """
    slots = np.full(classes, clients * each // classes, dtype=np.int64)
    slots[rng.permutation(classes)[: clients * each % classes]] += 1
    if each == 1:  # any order of the slots gives each client one class
        return rng.permutation(np.repeat(np.arange(classes), slots))[:, None]
    ties = rng.random((clients, classes))  # below 1, so they only decide between equal numbers of slots
    dealt = np.empty((clients, each), dtype=np.int64)
    for k in range(clients):
        dealt[k] = np.argpartition(ties[k] - slots, each - 1)[:each]
        slots[dealt[k]] -= 1
    # Those that were dealt last got what was left, so the order of clients must not tell.
    return rng.permutation(dealt)


def _equal_quantity(partition: Partition, member: BoolArray, each: int, samples: int | None, most: int) -> IntArray:
    """Return counts (N, classes): the same quantity of each of a client's classes."""
    quantity = most
    if samples is not None:
        if samples % each:
            raise ScenarioError(
                f"The partition {partition.name!r} cannot divide {samples} samples per client evenly among {each} "
                "classes.",
                hint=f"use a multiple of {each}",
            )
        quantity = samples // each
    if quantity > most or quantity == 0:
        raise ScenarioError(
            f"The partition {partition.name!r} needs {quantity or 1:,} samples of each class for each of its holders, "
            f"but the scarcest class has only {most:,} for each.",
            hint=f"at most {most * each:,} samples per client fit" if most else "use fewer clients",
        )
    counts: IntArray = member.astype(np.int64) * quantity
    return counts


@PARTITIONS.register("imbalanced")
@dataclass(frozen=True, kw_only=True)
class Imbalanced(Partition):
    """One class per client, equal quantities, ``ratio`` times as many clients for frequent classes ([Zhang2023]_, C.3).

    Case 1: 120 clients, 18 for each of the first five classes and 6 for each of the others (3 : 1), or 20 and 4
    (5 : 1). In Case 2 the set is balanced, but the available clients are not: use "classes-per-client" with the
    availability "class-biased".

    ``out_of=200`` follows Appendix C.1: the whole training set is allocated to 200 clients with one class each, and
    ``clients`` of them are kept. So each client has n / 200 samples.

    >>> pool = Pool.of(np.repeat(np.arange(10), 40))
    >>> part = Imbalanced(clients=120, ratio=3).assign(pool, np.random.default_rng(0))
    >>> np.bincount(part.traits["first_class"])
    array([18, 18, 18, 18, 18,  6,  6,  6,  6,  6])
    """

    clients: int = param(120, _CLIENTS, "number of clients (N)")
    ratio: int = param(3, Interval(int, 1, None), "n_1 : n_2, clients of a frequent class to those of a rare one (r)")
    frequent: int | None = param(None, Optional(Interval(int, 1, None)), "how many classes are frequent; None is half")
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")
    out_of: int | None = param(
        None, Optional(Interval(int, 1, None)), "number of clients that the whole set is allocated to first"
    )

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Assign clients to classes, then samples to clients."""
        holders = imbalanced_holders(self.name, self.clients, pool.classes, self.ratio, self.frequent)
        most = int((pool.counts // holders).min())
        if self.out_of is not None and self.samples is None:
            # The paper divides the whole set among more clients than it keeps, which determines their size.
            each = self.out_of // pool.classes
            if each < int(holders.max()):
                raise ScenarioError(
                    f"The partition 'imbalanced' keeps {int(holders.max())} clients of a frequent class, but an "
                    f"allocation to {self.out_of} clients has {each} of each class.",
                    hint=f"out_of must be at least {int(holders.max()) * pool.classes}",
                )
            most = int((pool.counts // each).min())
        # In random order: the number of a client must not tell its class.
        first = rng.permutation(np.repeat(np.arange(pool.classes), holders))
        member = np.zeros((self.clients, pool.classes), dtype=bool)
        member[np.arange(self.clients), first] = True
        counts = _equal_quantity(self, member, 1, self.samples, most)
        return self.deal(pool, counts, rng, traits={"first_class": first})


def imbalanced_holders(partition: str, clients: int, classes: int, ratio: int, frequent: int | None) -> IntArray:
    """Return how many of ``clients`` each class gets (classes,), frequent to rare exactly as ``ratio`` : 1.

    >>> imbalanced_holders("imbalanced", 60, 10, 5, None)
    array([10, 10, 10, 10, 10,  2,  2,  2,  2,  2])
    """
    many = classes // 2 if frequent is None else frequent
    if not 0 < many < classes:
        raise ScenarioError(
            f"{partition!r} needs at least one frequent and one rare class; {many} of {classes} classes are frequent."
        )
    parts = many * ratio + (classes - many)
    if clients % parts:
        lower = clients // parts * parts
        raise ScenarioError(
            f"{partition!r} cannot divide {clients} clients {ratio} : 1 among {many} frequent and {classes - many} "
            f"rare classes: the number must be a multiple of {many} x {ratio} + {classes - many} = {parts}.",
            hint=f"the nearest are {lower} and {lower + parts}" if lower else f"the smallest is {parts}",
        )
    unit = clients // parts
    return np.concatenate([np.full(many, unit * ratio), np.full(classes - many, unit)])


@PARTITIONS.register("dominant-class")
@dataclass(frozen=True, kw_only=True)
class DominantClass(Partition):
    """A share of the clients has 80% of its data from one class; the others are uniform ([Chang2024]_, Section 3.1).

    ``share`` is the paper's "non-IIDness". A heterogeneous client's other 20% are spread evenly over the other classes,
    a homogeneous client's samples over all classes. The remainder comes from the classes with the most samples left.
    All clients have equal sizes, unless ``spread`` makes them log-normal: the paper's durations grow with the size.

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> part = DominantClass(clients=10, samples=50, share=0.5).assign(pool, np.random.default_rng(0))
    >>> int((part.traits["dominant_class"] >= 0).sum())
    5
    >>> k = int(part.traits["dominant_class"].argmax())
    >>> int(np.bincount(pool.labels[part.places[50 * k : 50 * (k + 1)]]).max())
    40
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")
    share: float = param(0.3, Interval(float, 0, 1), "share of clients with a dominant class (non-IIDness)")
    dominance: float = param(0.8, Interval(float, 0, 1, "right"), "share of such a client's data in that class")
    replacement: bool = param(False, Boolean(), "draw samples independently, so that rare classes have enough")
    spread: float = param(0.0, Interval(float, 0, 3), "standard deviation of the logarithm of the sizes; 0: all equal")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Choose the heterogeneous clients and their classes, then assign samples."""
        if (pool.counts == 0).any():
            empty = int(np.argmin(pool.counts))
            raise ScenarioError(f"The partition 'dominant-class' needs data of all classes; class {empty} has none.")
        skewed = round(self.share * self.clients)
        dominant = np.full(self.clients, -1, dtype=np.int64)  # -1: no class dominates
        chosen = rng.permutation(self.clients)[:skewed]
        # Cycle through the classes in random order, so that each one dominates in equally many clients, to within one.
        dominant[chosen] = rng.permutation(pool.classes)[np.arange(skewed) % pool.classes]
        shares = log_normals(self.spread, rng.random(self.clients)) if self.spread else np.ones(self.clients)
        return self.deal(
            pool,
            self._fit(pool, dominant, shares),
            rng,
            replacement=self.replacement,
            traits={"dominant_class": dominant},
            hint="fewer clients or fewer samples per client fit, or replacement = true",
        )

    def _fit(self, pool: Pool, dominant: IntArray, shares: FloatArray) -> IntArray:
        """Return counts (N, classes) for ``samples`` per client on average, or for as many as the classes allow."""
        if self.samples is not None or self.replacement:
            return self._counts(self.samples or max(1, len(pool) // self.clients), dominant, shares, pool.counts)

        def fits(size: int) -> bool:
            return bool((self._counts(size, dominant, shares, pool.counts).sum(axis=0) <= pool.counts).all())

        # By bisection, because whether a size fits is seen only when remainders are dealt as well.
        size = _largest(0, self.equal_size(pool, self.clients, None), fits)
        if size == 0:
            raise ScenarioError(
                f"The partition 'dominant-class' cannot give {self.clients:,} clients one sample each: class "
                f"{int(pool.counts.argmin())} has only {int(pool.counts.min()):,}.",
                hint="use fewer clients, or replacement = true",
            )
        return self._counts(size, dominant, shares, pool.counts)

    def _counts(self, mean: int, dominant: IntArray, shares: FloatArray, have: IntArray) -> IntArray:
        """Return counts (N, classes) for clients with ``shares`` of the ``mean`` size."""
        classes = len(have)
        sizes = np.maximum(1, np.rint(mean * shares)).astype(np.int64)
        if classes == 1:
            return sizes[:, None]
        skewed = dominant >= 0
        main = np.rint(self.dominance * sizes).astype(np.int64)
        counts = np.repeat((sizes // classes)[:, None], classes, axis=1)
        counts[skewed] = ((sizes - main) // (classes - 1))[skewed, None]
        counts[skewed, dominant[skewed]] = main[skewed]
        # Take the remainder from the classes with the most samples left, so that no class runs out early.
        left = have - counts.sum(axis=0)
        for k in np.flatnonzero(sizes - counts.sum(axis=1)):
            order = np.argsort(-left, kind="stable")
            extra = order[order != dominant[k]][: sizes[k] - int(counts[k].sum())]
            counts[k, extra] += 1
            left[extra] -= 1
        return counts

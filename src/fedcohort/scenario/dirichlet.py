"""Partitions drawn from Dirichlet distributions: FedCM's two, FedCor's, Fed-CBS's, FedACS's and HiCS-FL's.

.. [Kim2020] T. Kim et al., "Accurate and Fast Federated Learning via Combinatorial Multi-Armed Bandits", Section 3.
.. [Hsu2019] T.-M. H. Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
   Classification".
.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022, Appendix C.2.
.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023, Section 5.1.
.. [Wang2021] Z. Wang et al., "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments",
   Definitions 1 and 2.
.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning", NeurIPS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Interval, Optional, Sequence, param
from fedcohort.scenario.partition import (
    PARTITIONS,
    Assignment,
    Partition,
    Pool,
    dirichlet,
    round_to_total,
)
from fedcohort.scenario.quadratic import quadratic_sizes

_CLIENTS = Interval(int, 1, None)
_SAMPLES = Optional(Interval(int, 1, None))
_POSITIVE = Interval(float, 0, None, "neither")
_REDRAWS = Interval(int, 0, None)


@PARTITIONS.register("client-heterogeneity")
@dataclass(frozen=True, kw_only=True)
class ClientHeterogeneity(Partition):
    r"""Per class, shares over the clients :math:`p_c \sim Dir_K(\alpha \cdot 1)` ([Kim2020]_, "client heterogeneity").

    The whole training set is used; clients differ in size. A draw that leaves a client with fewer than ``least``
    samples is drawn again, at most ``redraws`` times.

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> int(ClientHeterogeneity(clients=5).assign(pool, np.random.default_rng(0)).offsets[-1])
    1000
    """

    clients: int = param(20, _CLIENTS, "number of clients (K)")
    alpha: float = param(0.1, _POSITIVE, "concentration (alpha)")
    least: int = param(1, Interval(int, 0, None), "smallest number of samples of a client")
    redraws: int = param(100, _REDRAWS, "how often to repeat a draw in which a client is too small")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw the shares of each class and round them to whole samples."""
        # No draw could be enough.
        if self.least * self.clients > len(pool):
            raise ScenarioError(
                f"The partition 'client-heterogeneity' needs {self.clients:,} clients x at least {self.least:,} "
                f"samples = {self.clients * self.least:,}, but the training set has {len(pool):,}."
            )
        # With a small alpha, some client often gets almost nothing. The paper does not say what it does then.
        smallest = 0
        for attempt in range(self.redraws + 1):
            shares = dirichlet(rng, np.full((pool.classes, self.clients), self.alpha))
            # Rounded class by class, so that every sample of the training set has one owner.
            counts = np.stack([round_to_total(shares[c], int(pool.counts[c])) for c in range(pool.classes)], axis=1)
            # For the error: how close the best draw came.
            smallest = max(smallest, int(counts.sum(axis=1).min()))
            if smallest >= self.least:
                return self.deal(pool, counts, rng, remarks=_redraw_remark(attempt, "left a client too small"))
        raise ScenarioError(
            f"The partition 'client-heterogeneity' with alpha {self.alpha:g} left the smallest of {self.clients:,} "
            f"clients with at most {smallest:,} samples in {self.redraws + 1:,} draws; {self.least:,} are needed.",
            hint="use a larger alpha, fewer clients or a smaller 'least'",
        )


def _redraw_remark(times: int, why: str) -> tuple[str, ...]:
    if not times:
        return ()
    return (f"{times:,} draw{'s' if times > 1 else ''} {why} and {'were' if times > 1 else 'was'} repeated",)


def _sequential_counts(pool: Pool, shares: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Draw ``size`` labels per client from its ``shares`` (N, B) without replacement, client after client.

    A label whose class is used up is drawn again from the remaining classes. Drawing all labels at once and discarding
    the excess over the remaining samples has the same distribution as drawing them one by one.
    """
    left = pool.counts.copy()
    counts = np.zeros(shares.shape, dtype=np.int64)
    for k in range(len(shares)):
        weights = np.where(left > 0, shares[k], 0.0)
        need = size
        while need:
            mass = float(weights.sum())
            if mass <= 0.0:  # none of its classes is left, so it gets samples of the others
                weights = left / left.sum()
                mass = 1.0
            drawn = np.minimum(rng.multinomial(need, weights / mass), left)
            counts[k] += drawn
            left -= drawn
            need -= int(drawn.sum())
            weights = np.where(left > 0, weights, 0.0)
    return counts


@PARTITIONS.register("class-heterogeneity")
@dataclass(frozen=True, kw_only=True)
class ClassHeterogeneity(Partition):
    r"""Per client, classes :math:`q \sim Dir(\alpha \cdot 1)`, equal sizes ([Kim2020]_, "class heterogeneity").

    Samples are drawn without replacement, client after client. When a class is used up, the client's distribution is
    renormalised over the others.

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> ClassHeterogeneity(clients=4).assign(pool, np.random.default_rng(0)).offsets
    array([   0,  250,  500,  750, 1000])
    """

    clients: int = param(20, _CLIENTS, "number of clients (K)")
    alpha: float = param(0.1, _POSITIVE, "concentration of every class (alpha)")
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw a class distribution per client, then its samples."""
        size = self.equal_size(pool, self.clients, self.samples)
        shares = dirichlet(rng, np.full((self.clients, pool.classes), self.alpha))
        return self.deal(pool, _sequential_counts(pool, shares, size, rng), rng)


@PARTITIONS.register("mixed-heterogeneity")
@dataclass(frozen=True, kw_only=True)
class MixedHeterogeneity(Partition):
    r"""Groups of different skew: per client, classes :math:`q \sim Dir(\alpha_g \cdot 1)`, equal sizes ([Chen2024]_).

    Each concentration has the same number of clients, to within one, in random order. So the last clients, which
    get the remaining samples, are not all of one group. Samples are drawn as in "class-heterogeneity".

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> part = MixedHeterogeneity(clients=4, alphas=(0.01, 100.0)).assign(pool, np.random.default_rng(0))
    >>> part.offsets
    array([   0,  250,  500,  750, 1000])
    >>> np.sort(part.traits["alpha"])
    array([1.e-02, 1.e-02, 1.e+02, 1.e+02])
    """

    clients: int = param(50, _CLIENTS, "number of clients (K)")
    alphas: tuple[float, ...] = param(
        (0.001, 0.002, 0.005, 0.01, 0.5), Sequence(_POSITIVE, least=1), "concentration of each group (alpha)"
    )
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw each client's group and class distribution, then the samples."""
        size = self.equal_size(pool, self.clients, self.samples)
        # np.resize repeats the list, so each concentration goes to equally many clients, to within one.
        alpha = rng.permutation(np.resize(np.asarray(self.alphas, np.float64), self.clients))
        shares = dirichlet(rng, np.repeat(alpha[:, None], pool.classes, axis=1))
        counts = _sequential_counts(pool, shares, size, rng)
        return self.deal(pool, counts, rng, traits={"alpha": alpha})


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class DirichletLabels(Partition):
    r"""Per client, classes :math:`q \sim Dir(\alpha p)`, clients of equal size ([Hsu2019]_, as in [Zhang2023]_).

    p is the class distribution of the training set and sums to 1. With ten equal classes and alpha = 0.1, every class
    has the concentration 0.01. Samples are drawn without replacement as in "class-heterogeneity".

    Fed-CBS's Table 1 shows that this is its reading of alpha. Random cohorts of 10 clients have a QCID of 0.082, 0.075
    and 0.059 there for alpha 0.1, 0.2 and 0.5, and of 0.078, 0.072 and 0.059 here. With alpha per class it would be
    0.045, 0.030 and 0.015. Sizes from the quadratic programme ("dirichlet-qp") come even closer, with 0.081, 0.076 and
    0.059, and Fed-CBS mentions "the client with the largest local dataset". But it cites Hsu et al., whose clients have
    equal sizes.

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> DirichletLabels(clients=4, samples=30).assign(pool, np.random.default_rng(0)).offsets
    array([  0,  30,  60,  90, 120])
    """

    clients: int = param(200, _CLIENTS, "number of clients (N)")
    alpha: float = param(0.1, _POSITIVE, "total concentration (alpha), divided among the classes by their sizes")
    samples: int | None = param(None, _SAMPLES, "samples per client; None is the largest size that all can have")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw a class distribution per client, then its samples."""
        size = self.equal_size(pool, self.clients, self.samples)
        # Hsu's alpha is the sum over classes, Dirichlet's own parameter is for each of them.
        prior = pool.counts / len(pool)
        shares = dirichlet(rng, np.tile(self.alpha * prior, (self.clients, 1)))
        return self.deal(pool, _sequential_counts(pool, shares, size, rng), rng)


@PARTITIONS.register("dirichlet-qp")
@dataclass(frozen=True, kw_only=True)
class DirichletQp(Partition):
    r"""Per client, classes :math:`q_k \sim Dir(\alpha p)`; sizes from a quadratic programme ([Tang2022]_, C.2).

    p is the class distribution of the training set and sums to 1. The sizes minimise x'x subject to Qx = d and
    x >= ``least`` (in the paper, x > 0), where d is the number of samples of each class. So the whole training set is
    used exactly once. A draw for which no sizes exist is repeated, at most ``redraws`` times, and a remark says so.
    Counts are rounded to whole samples class by class.

    >>> pool = Pool.of(np.repeat(np.arange(4), 100))
    >>> part = DirichletQp(clients=40, alpha=0.5).assign(pool, np.random.default_rng(0))
    >>> int(part.offsets[-1]), float(part.traits["exact_size"].sum().round(6))
    (400, 400.0)
    """

    clients: int = param(100, _CLIENTS, "number of clients (N)")
    alpha: float = param(0.2, _POSITIVE, "total concentration (alpha), divided among the classes by their sizes")
    least: float = param(1.0, _POSITIVE, "smallest size x_k that the programme allows")
    redraws: int = param(100, _REDRAWS, "how often to repeat an infeasible draw of the class distributions")

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw the distributions until the programme has a solution."""
        if self.least * self.clients > len(pool):
            raise ScenarioError(
                f"The partition 'dirichlet-qp' needs {self.clients:,} clients x at least {self.least:g} samples = "
                f"{self.clients * self.least:,.0f}, but the training set has {len(pool):,}."
            )
        prior = pool.counts / len(pool)
        for attempt in range(self.redraws + 1):
            shares = dirichlet(rng, np.tile(self.alpha * prior, (self.clients, 1)))
            sizes = quadratic_sizes(shares.T, pool.counts.astype(np.float64), self.least)
            if sizes is None:  # these mixtures cannot add up to the pool's classes, whatever the sizes
                continue
            return self.deal(
                pool,
                _whole_samples(shares * sizes[:, None], pool.counts),
                rng,
                traits={"exact_size": sizes},
                remarks=_redraw_remark(attempt, "had no solution of the quadratic programme"),
            )
        raise ScenarioError(
            f"The partition 'dirichlet-qp' found no sizes x >= {self.least:g} with Qx = d in {self.redraws + 1:,} "
            f"draws for {self.clients:,} clients, alpha {self.alpha:g} and {pool.classes} classes.",
            hint="use many more clients than classes, a larger alpha, or more redraws",
        )


def _whole_samples(exact: FloatArray, have: IntArray) -> IntArray:
    """Round ``exact`` (N, B) to integers with the column sums ``have``, and at least one sample per client."""
    columns = [round_to_total(exact[:, c], int(n)) if n else np.zeros(len(exact), np.int64) for c, n in enumerate(have)]
    counts = np.stack(columns, axis=1)
    for k in np.flatnonzero(counts.sum(axis=1) == 0):
        # Give it a sample of its likeliest class, from the client that rounding favoured most, but never its last one.
        for c in np.argsort(-exact[k], kind="stable"):
            surplus = np.where((counts[:, c] > 0) & (counts.sum(axis=1) > 1), counts[:, c] - exact[:, c], -np.inf)
            donor = int(surplus.argmax())
            if surplus[donor] > -np.inf:
                counts[donor, c] -= 1
                counts[k, c] += 1
                break
    return counts


@PARTITIONS.register("skewness")
@dataclass(frozen=True, kw_only=True)
class Skewness(Partition):
    r"""The Dirichlet skewness environment ([Wang2021]_, Definition 2).

    Half of the clients have :math:`\beta` uniform in (0, x_med], the rest in (x_med, x_max]; client k's classes follow
    :math:`Dir(\beta_k \cdot 1)`. Low heterogeneity is x_med = 0.2, x_max = 3, high is 0.1 and 5. Each client holds 2000
    samples. For 200 clients that is eight times the size of CIFAR-10, so samples are drawn with replacement.

    >>> pool = Pool.of(np.repeat(np.arange(10), 100))
    >>> part = Skewness(clients=6, samples=50).assign(pool, np.random.default_rng(0))
    >>> int((part.traits["beta"] <= 0.2).sum())
    3
    """

    clients: int = param(200, _CLIENTS, "number of clients (N)")
    samples: int = param(2000, Interval(int, 1, None), "samples per client (M)")
    median: float = param(0.2, _POSITIVE, "x_med, the median of beta")
    maximum: float = param(3.0, _POSITIVE, "x_max, the largest beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.median >= self.maximum:
            raise ScenarioError(
                f"The partition 'skewness' needs median < maximum. Got {self.median:g} and {self.maximum:g}."
            )

    def assign(self, pool: Pool, rng: np.random.Generator) -> Assignment:
        """Draw beta, then class distributions, then samples with replacement."""
        position = 1.0 - rng.random(self.clients)  # in (0, 1]
        low = self.clients // 2
        # Exactly half of the clients on each side of the median, in random order.
        beta = self.median + position * (self.maximum - self.median)
        beta[:low] = position[:low] * self.median
        beta = rng.permutation(beta)
        present = pool.counts > 0
        shares = dirichlet(rng, beta[:, None] * present[None, :])
        counts = rng.multinomial(self.samples, shares)
        return self.deal(pool, counts, rng, replacement=True, traits={"beta": beta})

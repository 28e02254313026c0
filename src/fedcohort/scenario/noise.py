"""Label noise: a random share of each client's labels is wrong, or some clients permute all their classes.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", Section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.params import Interval, OneOf, Parameterized, param
from fedcohort.scenario.partition import nearest


@dataclass(frozen=True, kw_only=True)
class LabelNoise(Parameterized):
    r"""Client k's share of wrong labels is drawn from :math:`Beta(a, b)`; all other classes are equally likely.

    The paper calls the ratio a / b the "noise level" and plots levels as shares of wrong labels, which is the mean
    a / (a + b). By default the level is the mean; with ``reading="ratio"`` it is the ratio. The paper does not say how
    much clients differ: ``concentration`` is a + b.

    >>> LabelNoise(level=0.15).beta()
    (0.3, 1.7)
    >>> LabelNoise(level=0.25, reading="ratio", concentration=5).beta()
    (1.0, 4.0)
    """

    level: float = param(0.0, Interval(float, 0, None), "noise level; 0 is no noise")
    concentration: float = param(2.0, Interval(float, 0, None, "neither"), "a + b; large makes all clients alike")
    reading: str = param("mean", OneOf(("mean", "ratio")), "what the level is: a / (a + b), or a / b")
    rare: int = param(0, Interval(int, 0, None), "only labels of this many classes, the rarest, are wrong; 0: of all")
    permuted: float = param(0.0, Interval(float, 0, 1), "share of the clients that call all classes by other names")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reading == "mean" and self.level >= 1:
            raise ParameterError(
                f"The 'level' parameter of LabelNoise is a mean share and must be in [0, 1). Got {self.level!r}."
            )

    @property
    def mean(self) -> float:
        """Expected share of wrong labels."""
        return self.level / (1.0 + self.level) if self.reading == "ratio" else self.level

    def beta(self) -> tuple[float, float]:
        """Return a and b."""
        # Rounded, because 0.15 * 2 is not 0.3 in binary and the description shows these numbers.
        return round(self.mean * self.concentration, 12), round((1.0 - self.mean) * self.concentration, 12)

    @property
    def changes(self) -> bool:
        """Whether it changes any label."""
        return self.level > 0 or self.permuted > 0

    def describe(self) -> str:
        """Return one line."""
        parts = []
        if self.level:
            a, b = self.beta()
            of = f" of the {self.rare} rarest classes" if self.rare else ""
            parts.append(f"share of wrong labels{of} ~ Beta({a:g}, {b:g}), mean {self.mean:.3g}")
        if self.permuted:
            parts.append(f"{self.permuted:.0%} of the clients call all classes by other names")
        return "; ".join(parts) or "none"

    def rates(self, clients: int, rng: np.random.Generator) -> FloatArray:
        """Draw the share of wrong labels of every client (N,)."""
        if self.level == 0:
            return np.zeros(clients)
        return rng.beta(*self.beta(), size=clients)

    def apply(
        self,
        labels: npt.NDArray[np.int32],
        offsets: IntArray,
        classes: int,
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[np.int32], FloatArray, FloatArray]:
        """Replace labels.

        Parameters
        ----------
        labels : (total,) int32
            True labels, client-major.
        offsets : (N + 1,) int64
            Where each client begins.
        classes : int
            How many classes there are.
        rng : Generator
            The source of all random numbers.

        Returns
        -------
        labels : (total,) int32
            With noise; the input itself if there is none.
        exact : (N,) float64
            The share of labels that were changed.
        drawn : (N,) float64
            The share drawn from the Beta distribution, before rounding to whole labels.
        """
        sizes = np.diff(offsets)
        drawn = self.rates(len(sizes), rng)
        if not self.changes:
            return labels, np.zeros(len(sizes)), drawn
        if classes < 2:
            raise ScenarioError(f"Label noise needs another class to change a label to; there is {classes}.")
        noisy = labels.copy()  # the caller keeps the true labels
        owner = np.repeat(np.arange(len(sizes)), sizes)
        if self.level:
            candidates = self._candidates(labels, classes)  # (total,)
            each = np.bincount(owner[candidates], minlength=len(sizes))
            # Rounding up or down at random keeps the mean, which matters for clients with few samples.
            wrong = np.floor(drawn * each + rng.random(len(sizes))).astype(np.int64)
            # Sort by client, candidates first, in random order. The first ``wrong`` of each client are flipped.
            order = np.lexsort((rng.random(len(labels)), ~candidates, owner))
            rank = np.arange(len(labels)) - np.repeat(offsets[:-1], sizes)
            flipped = order[rank < np.repeat(wrong, sizes)]
            # A shift of 1 .. classes - 1 makes every other class equally likely.
            shift = rng.integers(1, classes, len(flipped), dtype=np.int32)
            noisy[flipped] = (noisy[flipped] + shift) % classes
        if self.permuted:
            count = nearest(self.permuted * len(sizes))
            # They share one permutation, so these clients agree with each other.
            permuted = np.isin(owner, rng.permutation(len(sizes))[:count])
            noisy[permuted] = rng.permutation(classes)[noisy[permuted]]
        # A label that is changed by both kinds of noise may be right again.
        exact = np.bincount(owner[noisy != labels], minlength=len(sizes)) / np.maximum(sizes, 1)
        return noisy, exact, drawn

    def _candidates(self, labels: npt.NDArray[np.int32], classes: int) -> BoolArray:
        """Return which labels may be changed (total,): all, or those of the rarest classes that occur."""
        if not self.rare:
            return np.ones(len(labels), bool)
        counts = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(counts)
        rarest = present[np.argsort(counts[present], kind="stable")][: self.rare]
        return np.isin(labels, rarest)

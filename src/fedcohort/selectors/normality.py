"""Whether losses change as a Gaussian process supposes: a check that selectors built on one can make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedcohort.core.arrays import FloatArray


@dataclass(frozen=True)
class Normality:
    """How Gaussian each principal component of the loss changes is.

    Attributes
    ----------
    components : (T, k) float array
        Coordinates of the T samples along the k first principal components, each of mean 0.
    explained : (k,) float array
        Share of the total variance in each component.
    skewness, excess_kurtosis : (k,) float arrays
        Both are 0 for a Gaussian.
    distance : (k,) float array
        Kolmogorov's distance to the Gaussian with the component's mean and variance, zero for a Gaussian.
    p_value : (k,) float array
        Of the omnibus test of D'Agostino and Pearson; small values speak against a Gaussian.
    """

    components: FloatArray
    explained: FloatArray
    skewness: FloatArray
    excess_kurtosis: FloatArray
    distance: FloatArray
    p_value: FloatArray


class GaussianLosses(ABC):
    """What a selector adds to its bases when it supposes Gaussian losses and can say how far they are from that.

    Loss changes are (T, N): of N clients, for each of T cohorts drawn uniformly and tried out from the same model.
    """

    @classmethod
    @abstractmethod
    def normality(cls, changes: FloatArray, components: int) -> Normality:
        """Check the loss changes of one look, along their first principal components."""

    @classmethod
    @abstractmethod
    def stationarity(cls, changes: Sequence[FloatArray]) -> FloatArray:
        """Return how alike the covariances of each look and the next are, in [0, 1]."""

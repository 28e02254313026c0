r"""Does a Gaussian process suit this federation? The two checks of FedCor's Appendix D.

1. **Normality** (D.2): the loss changes under uniformly drawn cohorts, projected on their principal components, should
   each look Gaussian. A multivariate test is unstable, because the covariance is nearly singular.
2. **Stationarity** (D.3): the covariance of the loss changes should change slowly over the rounds, measured by the
   cosine between the covariance matrices of neighbouring samples.

The cost is linear in the number of clients, because covariance matrices are compared by inner products of samples.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022, Appendix D.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError

_MIN_SAMPLES = 8  # with fewer samples, the test of a component is not defined


@dataclass(frozen=True)
class Normality:
    """How Gaussian each principal component of the loss changes is.

    Attributes
    ----------
    components : (T, k) float array
        Coordinates of the T samples along the first k principal components, each with mean 0.
    explained : (k,) float array
        Share of the total variance in each component.
    skewness, excess_kurtosis : (k,) float arrays
        0 for a Gaussian.
    distance : (k,) float array
        Kolmogorov's distance from the Gaussian with the component's mean and variance; 0 for a Gaussian.
    p_value : (k,) float array
        Of the omnibus test of D'Agostino and Pearson; small values are evidence against a Gaussian.
    """

    components: FloatArray
    explained: FloatArray
    skewness: FloatArray
    excess_kurtosis: FloatArray
    distance: FloatArray
    p_value: FloatArray


def _samples(changes: FloatArray, min_samples: int) -> FloatArray:
    """Check (T, N) samples and return them centred, without the clients that failed to answer in some."""
    if changes.ndim != 2:
        raise InputError(f"Loss changes must be a matrix, one row per sampled cohort. Got shape {changes.shape}.")
    complete = changes[:, ~np.isnan(changes).any(axis=0)]
    if len(complete) < min_samples or complete.shape[1] == 0:
        raise InputError(
            f"At least {min_samples} sampled cohorts are needed, in which at least one client always answered. "
            f"Got {len(complete)} with {complete.shape[1]} such clients.",
            hint="sample more cohorts; the paper uses 1000",
        )
    return np.asarray(complete - complete.mean(axis=0))


def normality(changes: FloatArray, components: int = 5) -> Normality:
    """Check the normality of loss changes component by component ([Tang2022]_ D.2).

    Parameters
    ----------
    changes : (T, N) float array
        Loss change of every client for each of T uniformly sampled cohorts of one round. Clients with a NaN are left
        out.
    components : int
        Number of principal components; fewer are returned if the samples have fewer.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> gaussian = rng.normal(size=(1000, 3)) @ rng.normal(size=(3, 50))
    >>> bool((normality(gaussian).p_value > 0.01).all())
    True
    >>> bool((normality(gaussian**3).p_value < 1e-6).all())
    True
    """
    from scipy import stats

    centred = _samples(changes, _MIN_SAMPLES)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    variances = values**2
    rank = int((values > values.max(initial=0.0) * max(centred.shape) * np.finfo(np.float64).eps).sum())
    k = min(components, rank)
    coordinates = left[:, :k] * values[:k]
    spread = coordinates.std(axis=0, ddof=1)
    distance = [stats.kstest(coordinates[:, j] / spread[j], "norm").statistic for j in range(k)]
    return Normality(
        components=coordinates,
        explained=variances[:k] / variances.sum() if k else np.empty(0),
        skewness=np.asarray(stats.skew(coordinates, axis=0)),
        excess_kurtosis=np.asarray(stats.kurtosis(coordinates, axis=0)),
        distance=np.asarray(distance, dtype=np.float64),
        p_value=np.asarray(stats.normaltest(coordinates, axis=0).pvalue) if k else np.empty(0),
    )


def covariance_similarity(first: FloatArray, second: FloatArray) -> float:
    r"""Return the cosine between the covariance matrices of two sets of loss changes ([Tang2022]_ Eq. 151).

    .. math:: \frac{tr(\Sigma_1^T \Sigma_2)}{\sqrt{tr(\Sigma_1^T \Sigma_1)\, tr(\Sigma_2^T \Sigma_2)}}

    Eq. 151 is printed without the root, but then it would not be a cosine and could exceed 1. The traces are squared
    norms of products of samples, so no covariance matrix is formed.

    Parameters
    ----------
    first, second : (T1, N) and (T2, N) float arrays
        Loss changes of the same N clients; clients with a NaN in either are left out.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise InputError(f"Both sets must cover the same clients. Got shapes {first.shape} and {second.shape}.")
    known = ~(np.isnan(first).any(axis=0) | np.isnan(second).any(axis=0))
    a, b = _samples(first[:, known], 2), _samples(second[:, known], 2)
    # The inner product of A'A and B'B is the squared norm of A B'.
    scale = float(np.linalg.norm(a @ a.T) * np.linalg.norm(b @ b.T))
    return float(np.linalg.norm(a @ b.T) ** 2) / scale if scale > 0 else 0.0


def stationarity(changes: Sequence[FloatArray]) -> FloatArray:
    """Return the similarity of each covariance to the next ([Tang2022]_ D.3, Fig. 9).

    Parameters
    ----------
    changes : sequence of (T, N) float arrays
        Loss changes under uniformly sampled cohorts, one set per sampled round, in order.

    Returns
    -------
    (len(changes) - 1,) float array in [0, 1]
    """
    return np.array([covariance_similarity(a, b) for a, b in itertools.pairwise(changes)])

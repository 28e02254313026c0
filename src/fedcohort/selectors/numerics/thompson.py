"""Thompson sampling over Beta posteriors: one draw per arm."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray


def beta_draws(alpha: FloatArray, beta: FloatArray, rng: np.random.Generator) -> FloatArray:
    r"""Return one draw :math:`\theta_i \sim Beta(\alpha_i, \beta_i)` per arm.

    Beta(1, 1) is the uniform distribution, which costs a tenth of a Beta draw: in a large federation nearly every
    client is still untouched.

    Parameters
    ----------
    alpha, beta : (n,) float array
        Positive.
    rng : Generator

    Returns
    -------
    (n,) float array
    """
    theta = rng.random(len(alpha))
    touched = np.flatnonzero((alpha != 1) | (beta != 1))
    if len(touched):
        theta[touched] = rng.beta(alpha[touched], beta[touched])
    return theta

"""The quadratic programme that gives FedCor's clients their sizes.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022, Appendix C.2.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray

_NEWTON_STEPS = 200
_TOLERANCE = 1e-12  # of the largest class count; the published requirement is 1e-6 absolute


def quadratic_sizes(fractions: FloatArray, counts: FloatArray, least: float = 1.0) -> FloatArray | None:
    r"""Solve :math:`\min_x x^\top x` subject to :math:`Qx = d` and :math:`x \ge l` ([Tang2022]_, Eqs. 147 to 149).

    The paper requires x > 0, an open set on which the minimum need not exist. Here it is x >= ``least``.

    The dual has only one variable per class: :math:`x_k = \max(l, q_k^\top \mu)` with :math:`\mu` the root of
    :math:`Q \max(l, Q^\top \mu) = d`, the gradient of a convex function of :math:`\mu`. Newton's method finds it in
    O(N B^2) per step. A dense solver with O(N^3) would not manage 100,000 clients.

    Parameters
    ----------
    fractions : (B, N) array
        Q: column k is the share of every class at client k.
    counts : (B,) array
        d: how many samples each class has.
    least : float
        l: the smallest size of a client, positive.

    Returns
    -------
    (N,) array or None
        The sizes x, with ``|Qx - d|`` within 1e-6; None if no sizes satisfy the constraints.

    Examples
    --------
    >>> quadratic_sizes(np.array([[1.0, 0.5], [0.0, 0.5]]), np.array([30.0, 10.0]))
    array([20., 20.])
    >>> quadratic_sizes(np.array([[1.0, 0.5], [0.0, 0.5]]), np.array([10.0, 30.0])) is None
    True
    """
    scale = float(counts.max(initial=0.0))  # everything below is relative to it, so one tolerance fits all datasets
    if scale <= 0.0:
        return None
    target, floor = counts / scale, least / scale
    classes = len(target)
    gram = fractions @ fractions.T
    # A small ridge, because Q Q' is singular if two classes always occur in the same proportion.
    ridge = 1e-14 * np.trace(gram) * np.eye(classes)
    multipliers = np.linalg.solve(gram + ridge, target)
    value, gradient, free = _dual(fractions, target, floor, multipliers)
    for _ in range(_NEWTON_STEPS):
        if np.abs(gradient).max() <= _TOLERANCE:
            break
        active = fractions[:, free]  # clients at the floor do not move with the multipliers
        step = -np.linalg.solve(active @ active.T + ridge, gradient)
        slope = float(gradient @ step)
        length = 1.0
        while length > 1e-12:
            trial = multipliers + length * step
            new_value, new_gradient, new_free = _dual(fractions, target, floor, trial)
            # Armijo's rule. The gradient test accepts the last steps, whose decrease is lost in rounding.
            if new_value <= value + 1e-4 * length * slope or np.abs(new_gradient).max() < 0.5 * np.abs(gradient).max():
                break
            length *= 0.5
        else:
            break
        multipliers, value, gradient, free = trial, new_value, new_gradient, new_free
    sizes: FloatArray = scale * np.maximum(floor, fractions.T @ multipliers)
    residual = float(np.abs(fractions @ sizes - counts).max())
    return sizes if residual < 1e-6 else None


def _dual(
    fractions: FloatArray, target: FloatArray, floor: float, multipliers: FloatArray
) -> tuple[float, FloatArray, BoolArray]:
    """Return the dual function, its gradient (B,) and which clients are above the floor (N,)."""
    projected = fractions.T @ multipliers
    free = projected > floor
    sizes = np.where(free, projected, floor)
    integral = np.where(free, 0.5 * (projected**2 + floor**2), floor * projected)
    return float(integral.sum() - target @ multipliers), fractions @ sizes - target, free

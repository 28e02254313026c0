"""The features that FedRank sees, and the network that turns them into a score."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

from fedcohort.core.arrays import FloatArray

FEATURES = ("size", "loss", "duration", "age", "picks", "unheard", "begin")
_BEGIN = 50.0  # rounds after which "begin" has fallen by a factor of e


@dataclass(frozen=True, eq=False)
class Network:
    r"""One hidden layer, :math:`Q(x) = v \cdot \tanh(W x + b)`.

    Attributes
    ----------
    weight : (F, H) float array
        W, transposed.
    bias : (H,) float array
        b.
    output : (H,) float array
        v.
    """

    weight: FloatArray
    bias: FloatArray
    output: FloatArray

    def hidden(self, features: FloatArray) -> FloatArray:
        """(c, H) the hidden layer of features (c, F)."""
        return np.asarray(np.tanh(features @ self.weight + self.bias))

    def score(self, features: FloatArray) -> FloatArray:
        """(c,) scores of features (c, F), rounded so that a client's score does not depend on its position."""
        return np.asarray(np.round(self.hidden(features) @ self.output, 9))


def ranks(values: FloatArray) -> FloatArray:
    """Return the rank of each value from 0 to 1; equal values share a rank, and NaN has rank 0.5.

    >>> ranks(np.array([7.0, 1.0, 7.0, np.nan]))
    array([0.66666667, 0.16666667, 0.66666667, 0.5       ])
    """
    known = ~np.isnan(values)
    order = np.sort(values[known])
    rank = np.full(len(values), 0.5)
    if len(order):
        left = np.searchsorted(order, values[known], "left")
        right = np.searchsorted(order, values[known], "right")
        rank[known] = (left + right) / (2 * len(order))
    return rank


def features(
    size: FloatArray, loss: FloatArray, seconds: FloatArray, last: FloatArray, picks: FloatArray, round_: int
) -> FloatArray:
    """Return the features (c, F) of candidates, relative to the other candidates, in the order of FEATURES.

    Parameters
    ----------
    size : (c,) float array
        Training samples.
    loss, seconds : (c,) float array
        At the client's last report; NaN before.
    last : (c,) float array
        Round of the last report; NaN before.
    picks : (c,) float array
        Number of cohorts it was in.
    round_ : int
    """
    columns = {
        "size": ranks(size),
        "loss": ranks(loss),
        "duration": ranks(seconds),
        "age": ranks(round_ - last),
        "picks": ranks(picks),
        "unheard": np.isnan(last).astype(np.float64),
        "begin": np.full(len(size), np.exp(-round_ / _BEGIN)),
    }
    return np.stack([columns[name] for name in FEATURES], axis=1)


@lru_cache(maxsize=1)
def shipped_network() -> Network:
    """Return the network that comes with the library, trained by ``bench/scripts/fedrank_pretrain.py``."""
    text = resources.files(__package__).joinpath("weights.json").read_text(encoding="utf-8")
    return Network(**{name: np.array(values) for name, values in json.loads(text)["network"].items()})

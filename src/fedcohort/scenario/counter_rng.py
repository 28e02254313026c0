"""Draw random numbers by position, such as client i in round t, without drawing for any other client.

A client's latency must not depend on which others were selected, and must not cost a draw for each of a million idle
clients. A sequential generator reaches its k-th number only after k - 1 others. Here each number is a hash of (seed,
stream, round, client).
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from fedcohort.core.arrays import FloatArray, IntArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seed: int, name: str, clients: IntArray, *position: int) -> FloatArray:
    """Return one uniform number in [0, 1) per client, which depends only on seed, stream, position and client.

    It is two rounds of the splitmix64 finaliser (Steele, Lea and Flood 2014), keyed by NumPy's SeedSequence.

    Parameters
    ----------
    seed : int
        The experiment's seed, non-negative.
    name : str
        Name of the stream.
    clients : (k,) int array
        The clients to draw for.
    *position : int
        Non-negative integers that identify the draw, for example the round.

    Examples
    --------
    >>> all_of_them = uniforms(1, "latency", np.arange(5), 7)
    >>> bool(uniforms(1, "latency", np.array([3]), 7)[0] == all_of_them[3])
    True
    """
    first, second = _key(seed, name, position)
    return _unit(_mix(_mix(clients.astype(np.uint64) * _GOLDEN + first) ^ second))


def uniforms_each(seed: int, name: str, clients: IntArray, counts: IntArray, *position: int) -> FloatArray:
    """Return one uniform number in [0, 1) per client, which also depends on the client's own count.

    Parameters
    ----------
    seed, name, clients, position
        As in :func:`uniforms`.
    counts : (k,) int array
        Non-negative; for example, how many sessions a client has had before.

    Examples
    --------
    >>> twice = uniforms_each(1, "devices", np.array([3, 3]), np.array([0, 1]))
    >>> bool(twice[0] == twice[1])
    False
    """
    first, second = _key(seed, name, position)
    client_keys = _mix(clients.astype(np.uint64) * _GOLDEN + first)
    return _unit(_mix(_mix(client_keys + counts.astype(np.uint64) * _GOLDEN) ^ second))


def normals(uniform: FloatArray) -> FloatArray:
    """Turn uniform into standard normal numbers."""
    normal: FloatArray = ndtri(uniform + 2.0**-54)  # half a step more, because the quantile of 0 is infinite
    return normal


def log_normals(spread: float, uniform: FloatArray) -> FloatArray:
    """Turn uniform into log-normal numbers of mean 1, whose logarithm has the standard deviation ``spread``."""
    factor: FloatArray = np.exp(spread * normals(uniform) - 0.5 * spread**2)
    return factor


@lru_cache(maxsize=256)
def _key(seed: int, name: str, position: tuple[int, ...]) -> tuple[np.uint64, np.uint64]:
    # The name's checksum and not Python's hash, which differs from process to process.
    sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()), *position))
    first, second = sequence.generate_state(2, np.uint64)
    return first, second


def _unit(bits: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> FloatArray:
    # 53 bits are what a float64 holds; with 64, the largest would round up to 1.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))

"""Things that nobody asked for."""

import dataclasses
import datetime
from random import Random

import numpy as np

from fedcohort import Signal


def odd(r: Random):
    """Return some Python object."""
    things = [
        None, True, False, -1, 0, 3, 10**9, 10**30, -(2**63), 0.5, float("nan"), float("inf"), "", "0", "x", "client 1",
        "\x00", "a" * 300, "\ud800", b"x", [], [0], [0, 0], [-1], [99], ["0", 1], [0.5], [None], [[0]], (), {},
        {"x": 1}, {1: 2}, {"x": object()}, object(), {0, 1}, np.float64(1.5), np.int64(2), np.array(1),
        np.array([1.5]), np.array([[0, 1]]), np.array(["x"]), np.array([None]), np.zeros(3, np.bool_),
        np.array([2**63], np.uint64), np.array(["2020"], "M8[Y]"), 1j, np.array([1j]), range(2), iter([0]),
        Signal.LOSS, dataclasses, len,
    ]  # fmt: skip
    return r.choice(things)


def odd_key(r: Random):
    """Return something for a key."""
    return r.choice(["x", "loss ", 3, None, (1,), Signal.LOSS, Signal.SIZES, Signal.KEPT, True])


def odd_toml(r: Random, depth: int = 0):
    """Return a value that TOML can hold."""
    plain = [
        True, False, -1, 0, 1, 2, 10**9, 2**63 - 1, -(2**63), 0.0, -0.5, 1.5, 1e308, float("nan"), float("inf"), "",
        "x", "uniform", "all", "auto", "fedcbs", "no/such:Thing", "../x.py:Y", "\x00", "\n", "[/x]", "a" * 500,
        datetime.date(2020, 1, 1), datetime.time(1, 2), datetime.datetime(2020, 1, 1, 1, 1), [], {},
    ]  # fmt: skip
    if depth < 2 and r.random() < 0.2:
        return [odd_toml(r, depth + 1) for _ in range(r.randrange(4))]
    if depth < 2 and r.random() < 0.2:
        return {r.choice(["name", "x", "", "rounds", "a b"]): odd_toml(r, depth + 1) for _ in range(r.randrange(3))}
    return r.choice(plain)


def damaged(r: Random, data: bytes) -> bytes:
    """Return a file as a bad disk, a cut copy or a careless hand leaves it."""
    if not data:
        return r.randbytes(r.randrange(100))
    body = bytearray(data)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        at = r.randrange(len(body)) if body else 0
        match r.randrange(7):
            case 0 | 1 if body:
                body[at] ^= 1 << r.randrange(8)
            case 2:
                body = body[:at]
            case 3:
                body[at : at + r.randrange(1, 600)] = r.randbytes(r.randrange(600))
            case 4:
                body[at : at + 512] = bytes(min(512, len(body) - at))
            case 5:
                body += r.randbytes(r.randrange(1, 5000))
            case _:
                to = r.randrange(len(body) + 1)
                body[to : to + 256] = body[at : at + 256]
    return bytes(body)

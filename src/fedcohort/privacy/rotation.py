"""Secret rotation, for large federations: clients share an orthogonal matrix and send rotated counts.

A rotation does not change inner products. So the rotated rows are a factor of S (N x B), and nobody needs an N x N
matrix. The server learns exactly S, as with encryption. It must never learn the seed, which every client knows.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, freeze
from fedcohort.core.errors import CiphertextError, InputError
from fedcohort.core.validate import integer, text
from fedcohort.privacy.noise import private_numbers
from fedcohort.privacy.scheme import unwrap_row, wrap_row

_KIND = "rotated labels"
_MIN_SEED = 16  # bytes: 128 bits cannot be guessed


@dataclass(frozen=True)
class SecretRotation:
    """A rotation that all clients derive from the same secret seed.

    Parameters
    ----------
    seed : bytes
        At least 16 random bytes that only the clients know.

    Examples
    --------
    >>> rotation = SecretRotation(b"sixteen bytes ..", 3)
    >>> rows = np.array([rotation.rotate(c) for c in ([8, 0, 1], [0, 5, 2])])
    >>> np.round(rows @ rows.T, 9).tolist()
    [[65.0, 2.0], [2.0, 29.0]]
    """

    seed: bytes
    classes: int

    def __post_init__(self) -> None:
        if not isinstance(self.seed, bytes) or len(self.seed) < _MIN_SEED:  # a message must not show the secret
            got = f"{len(self.seed)} bytes" if isinstance(self.seed, bytes) else f"a {type(self.seed).__name__}"
            raise InputError(f"The secret seed must be at least {_MIN_SEED} bytes. Got {got}.")
        integer(self.classes, "The number of classes of a rotation", least=2)

    def __repr__(self) -> str:
        return f"SecretRotation(classes={self.classes})"

    @classmethod
    def fresh(cls, classes: int) -> SecretRotation:
        """Return a rotation from a new random seed."""
        return cls(secrets.token_bytes(32), classes)

    @functools.cached_property
    def matrix(self) -> FloatArray:
        """The (B, B) orthogonal matrix, uniform over rotations and reflections; the seed determines every bit."""
        b = self.classes
        stream = hashlib.shake_256(b"fedcohort rotation %d:" % b + self.seed).digest(16 * b * b)
        # Plus 0.5, because the logarithm of 0 is infinite.
        uniform = (np.frombuffer(stream, ">u8").astype(np.float64) + 0.5) / 2.0**64
        # Box-Muller, because NumPy's generators may change between versions and all clients need the same matrix.
        normal = np.sqrt(-2 * np.log(uniform[: b * b])) * np.cos(2 * np.pi * uniform[b * b :])
        q, r = np.linalg.qr(normal.reshape(b, b))
        return freeze(q * np.sign(np.diag(r)))  # the signs make it uniform (Mezzadri 2007)

    def rotate(self, counts: ArrayLike) -> FloatArray:
        """Return (B,) counts rotated."""
        values = private_numbers(counts)
        if values is None or values.shape != (self.classes,) or not np.isfinite(values).all() or (values < 0).any():
            # The message must not contain the counts: a client's errors are sent to the server.
            raise InputError(f"A rotation takes {self.classes} counts, not negative. Got something else.")
        return values.astype(np.float64) @ self.matrix

    def seal(self, client: str, counts: ArrayLike) -> bytes:
        """Return a client's rotated counts as bytes for the server."""
        return wrap_row(_KIND, text(client, "'client'"), self.rotate(counts))


def unpack_rotated_counts(client: str, data: bytes, classes: int, size: int | None) -> FloatArray:
    """Return the (B,) row that a client sent; CiphertextError if it does not fit the client's size."""
    what = f"The rotated label counts of client {client!r}"
    row = unwrap_row(_KIND, client, data, classes, what)
    # The squared norm of n samples is between n^2 / B (evenly spread) and n^2 (all in one class).
    norm = float(row @ row)
    slack = 1.0 + 1e-9
    if not np.isfinite(row).all() or (
        size is not None and not size * size / classes <= norm * slack + 1e-9 <= size * size * slack**2 + 1e-6
    ):
        raise CiphertextError(f"{what} cannot be {size} samples: the product with itself is {norm!r}.")
    return row

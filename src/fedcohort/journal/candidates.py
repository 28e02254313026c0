"""Who could be picked for a cohort, as bytes: one bit for each client, or where that differs from an earlier cohort.

Where clients are asked one by one, the candidates of two cohorts differ by the few that came, went or began to work in
between, and packing all bits would take longer than everything else. A difference always refers to a cohort whose bits
are stored whole, so that two rows are enough to read it. A chained journal has no differences: there, what one link is
over must not depend on a row that may be pruned.
"""

from __future__ import annotations

import struct

import numpy as np

from fedcohort.core.arrays import BoolArray, IntArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import compress, decompress

_HEAD = struct.Struct("<cq")  # the mark, and the ticket of the cohort that is stored whole
_MARK = b"\0"  # nothing that is compressed begins with it
_SHARE = 64  # a difference of more than this part of all clients takes more than half of the bytes


class CandidateEncoder:
    """Writes the candidates of one cohort after the other.

    >>> encoder = CandidateEncoder()
    >>> whole = encoder.encode(0, np.arange(0, 512, 2), 512)
    >>> base_of(whole), base_of(encoder.encode(1, np.arange(2, 512, 2), 512))
    (None, 0)
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Store the next candidates whole; for when the rows before may no longer be there."""
        self._ticket, self._bits = -1, np.zeros(0, np.bool_)

    def encode(self, ticket: int, candidates: IntArray, n: int) -> bytes:
        """Return the candidates of a cohort, of ``n`` clients, as they are stored."""
        bits = np.zeros(n, np.bool_)
        bits[candidates] = True
        if len(self._bits) == n:
            flipped = np.flatnonzero(bits != self._bits)
            if len(flipped) * _SHARE <= n:
                return _HEAD.pack(_MARK, self._ticket) + flipped.astype("<i4").tobytes()
        self._ticket, self._bits = ticket, bits
        return whole(bits)


def whole(bits: BoolArray) -> bytes:
    """Return the bits of all clients, compressed."""
    return compress(np.packbits(bits).tobytes())


def base_of(data: bytes) -> int | None:
    """Return the ticket that a difference refers to; None for candidates that are stored whole."""
    return _HEAD.unpack_from(data)[1] if data.startswith(_MARK) and len(data) >= _HEAD.size else None


def decode(data: bytes, base: bytes | None, clients: int, what: str) -> BoolArray:
    """Return the bits of at least ``clients`` clients.

    Parameters
    ----------
    data : bytes
        Of :meth:`CandidateEncoder.encode`.
    base : bytes or None
        What is stored for the ticket :func:`base_of`; None where nothing is.
    clients : int
        How many there are now; there were never more.
    what : str
        For errors.
    """
    if not data.startswith(_MARK):
        packed = decompress(data, (clients + 7) // 8, what)
        return np.unpackbits(np.frombuffer(packed, np.uint8)).astype(np.bool_)
    if not base or base.startswith(_MARK):
        raise JournalError(f"{what} refers to a list that is not on record.")
    bits = decode(base, None, clients, what)
    if (len(data) - _HEAD.size) % 4 or len(data) < _HEAD.size:
        raise JournalError(f"{what} cannot be unpacked: it is cut off.")
    flipped = np.frombuffer(data, "<i4", offset=_HEAD.size)
    if len(flipped) and not 0 <= flipped.min() <= flipped.max() < len(bits):
        raise JournalError(f"{what} names a client that there is not.")
    bits[flipped] ^= True  # who came or went since the base
    return bits

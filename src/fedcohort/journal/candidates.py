"""The candidates for a cohort as bytes: one bit for each client, or the difference from an earlier cohort.

If clients are asked one by one, the candidates of two cohorts differ only by the few clients that came, went or started
to train in between. Packing all bits would then take longer than everything else. A difference always refers to a
cohort whose bits are stored whole, so reading it takes two rows.
"""

from __future__ import annotations

import struct

import numpy as np

from fedcohort.core.arrays import BoolArray, IntArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import compress, decompress

_HEAD = struct.Struct("<cq")  # the mark, and the ticket of the cohort that is stored whole
_MARK = b"\0"  # zlib's output never begins with it
_SHARE = 64  # store a difference only if at most one client in 64 changed; then it takes at most half of the bytes


class CandidateEncoder:
    """Encodes the candidates of one cohort after another.

    >>> encoder = CandidateEncoder()
    >>> whole = encoder.encode(0, np.arange(0, 512, 2), 512)
    >>> base_of(whole), base_of(encoder.encode(1, np.arange(2, 512, 2), 512))
    (None, 0)
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Encode the next candidates whole, because earlier rows may be gone."""
        self._ticket, self._bits = -1, np.zeros(0, np.bool_)

    def encode(self, ticket: int, candidates: IntArray, n: int) -> bytes:
        """Return the candidates of a cohort, out of ``n`` clients, as bytes."""
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
    """Return the ticket that a difference refers to, or None for candidates that are stored whole."""
    return _HEAD.unpack_from(data)[1] if data.startswith(_MARK) and len(data) >= _HEAD.size else None


def decode(data: bytes, base: bytes | None, clients: int, what: str) -> BoolArray:
    """Return one bit for each client; there may be a few more, to fill the last byte.

    Parameters
    ----------
    data : bytes
        What :meth:`CandidateEncoder.encode` returned.
    base : bytes or None
        What is stored for the ticket :func:`base_of`, if anything.
    clients : int
        The number of clients now, which was never higher.
    what : str
        The name of the data in errors.
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
        raise JournalError(f"{what} names a client that does not exist.")
    bits[flipped] ^= True
    return bits

"""The host's side of private labels: turns what clients send into labels that a selector can use."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelGramRows, LabelInfo
from fedcohort.core.errors import CiphertextError, FedcohortError, KeyHolderError, UnknownNameError
from fedcohort.core.validate import integer
from fedcohort.privacy.rotation import unpack_rotated_counts
from fedcohort.privacy.scheme import PublicKey, check_statement, unwrap_row, wrap_row

if TYPE_CHECKING:
    from fedcohort.privacy.keyholder import KeyHolder
    from fedcohort.privacy.service import RemoteKeyHolder

log = logging.getLogger("flwr.fedcohort")
_NOISY = "noisy labels"
_PAUSE = 300.0  # seconds to wait before asking again, after a key holder did not answer
_MAX_SAMPLES = 1 << 53  # of one client; larger whole numbers are not exact


class ClientRefusedError(CiphertextError):
    """What some clients sent about their labels cannot be used. Leave them out; the others are not affected.

    Parameters
    ----------
    refused : mapping of str to str
        The clients to leave out, each with the reason.
    """

    def __init__(self, refused: Mapping[str, str]) -> None:
        first, why = next(iter(refused.items()))
        others = f" So were {len(refused) - 1} others." if len(refused) > 1 else ""
        super().__init__(f"Client {first!r} is refused: {why}{others}", hint="leave them out; the others can continue")
        self.refused = dict(refused)


class LabelDecoder(Protocol):
    """Turns what clients send about their labels into labels that a selector can use."""

    def check(self, client: str, sealed: bytes) -> None:
        """Raise :class:`~fedcohort.core.errors.CiphertextError` if what a client sent cannot be used."""

    def open(
        self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]
    ) -> LabelInfo | LabelGramRows:
        """Return the labels of new clients, in the order of ``sealed``.

        Parameters
        ----------
        sealed : mapping of name to bytes
            What the new clients sent.
        sizes : mapping of name to int
            The numbers of samples that clients, old and new, state.
        before : sequence of str
            The clients of the federation so far, in their order.

        Raises
        ------
        ClientRefusedError
            Names the clients to leave out. It is safe to call this again without them.
        """

    def confirmations(self, clients: Sequence[str]) -> Mapping[str, bytes]:
        """Return confirmations with which clients can check how their labels are used, for some of them or none."""


class EncryptedLabels:
    """Class balance from sealed label counts. The server passes them on, and the key holder returns S.

    Parameters
    ----------
    public : PublicKey or path
        The key holder's ``public.key``, the one the clients have.
    holder : KeyHolder or RemoteKeyHolder
    """

    def __init__(self, public: PublicKey | str | Path, holder: KeyHolder | RemoteKeyHolder) -> None:
        self._public = PublicKey.read(public)
        self._holder = holder
        self._confirmed: dict[str, bytes] = {}
        self._ask_again = 0.0  # when to ask for confirmations again, after the key holder did not answer

    @property
    def classes(self) -> int:
        """Number of classes B."""
        return self._public.classes

    def check(self, client: str, sealed: bytes) -> None:
        """Raise CiphertextError if a statement cannot be used, after all checks that need no secret key."""
        check_statement(self._public, client, sealed)

    def open(
        self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]
    ) -> LabelGram | LabelGramRows:
        """Return S of the first clients, or the rows of clients that join; see :class:`LabelDecoder`."""
        # One error for the whole federation, instead of refusing one client after another.
        holder_key = self._holder.public.name
        if holder_key != self._public.name:
            raise KeyHolderError(
                f"The key holder has the key {holder_key}; this server's public.key is {self._public.name}.",
                hint="after new keys, server and clients need the new public.key, and the run a new journal",
            )
        refused = {}
        for name, data in sealed.items():
            try:
                size = check_statement(self._public, name, data)
            except CiphertextError as error:
                refused[name] = error.message
                continue
            # Weights follow the size that the server knows, so a client must not tell it another one.
            if sizes.get(name, size) != size:
                refused[name] = f"It states {sizes[name]} samples to the server and {size} to the key holder."
        # A refused client must not keep the others from being admitted.
        refused.update(self._holder.admit({name: data for name, data in sealed.items() if name not in refused}))
        if refused:
            raise ClientRefusedError(refused)
        try:
            values = self._holder.products(list(sealed), [*before, *sealed]).astype(np.float64)
        except UnknownNameError as error:  # an earlier client, because the new ones were just admitted
            raise KeyHolderError(
                f"The key holder does not know all clients of this federation. {error.message}",
                hint="keep the key holder's folder as long as the journal; new keys need a new journal",
            ) from error
        self._confirmed, self._ask_again = {}, 0.0  # the set of clients has changed
        return LabelGramRows(values, self.classes) if before else LabelGram(values, self.classes)

    def confirmations(self, clients: Sequence[str]) -> Mapping[str, bytes]:
        """Return the key holder's confirmations; none if it does not answer."""
        unknown = [name for name in clients if name not in self._confirmed]
        if unknown and time.monotonic() >= self._ask_again:
            try:
                self._confirmed.update(self._holder.confirm(unknown))
            except FedcohortError as error:
                # Training does not need the key holder. If it is gone, rounds must not wait for it.
                self._ask_again = time.monotonic() + _PAUSE
                log.warning("clients get no confirmation from the key holder: %s", error.message)
        return {name: self._confirmed[name] for name in clients if name in self._confirmed}


class _VisibleRows:
    """Rows that the server reads itself, without a key holder."""

    def __init__(self, classes: int) -> None:
        self.classes = integer(classes, "The number of classes", least=1)

    def _unpack(self, client: str, data: bytes, size: int | None) -> FloatArray:
        raise NotImplementedError(type(self).__name__)

    def check(self, client: str, sealed: bytes) -> None:
        """Raise CiphertextError if a row cannot be used."""
        self._unpack(client, sealed, None)

    def _rows(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int]) -> list[FloatArray]:
        rows, refused = [], {}
        for name, data in sealed.items():
            try:
                rows.append(self._unpack(name, data, sizes.get(name)))
            except CiphertextError as error:
                refused[name] = error.message
        if refused:
            raise ClientRefusedError(refused)
        return rows

    def confirmations(self, clients: Sequence[str]) -> Mapping[str, bytes]:
        """Return nothing: there is no key holder."""
        return {}


class RotatedLabels(_VisibleRows):
    """Class balance from counts that clients rotated with a secret they share."""

    def _unpack(self, client: str, data: bytes, size: int | None) -> FloatArray:
        return unpack_rotated_counts(client, data, self.classes, size)

    def open(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]) -> LabelFactor:
        """Return the factor; see :class:`LabelDecoder`."""
        return LabelFactor(self._rows(sealed, sizes), self.classes)


class NoisyLabels(_VisibleRows):
    """Class balance from noisy counts, which clients released under differential privacy."""

    def _unpack(self, client: str, data: bytes, size: int | None) -> FloatArray:
        what = f"The noisy label counts of client {client!r}"
        row = unwrap_row(_NOISY, client, data, self.classes, what)
        if not np.isfinite(row).all() or (row < 0).any():
            raise CiphertextError(f"{what} must be finite and not negative.")
        most = _MAX_SAMPLES if size is None else size
        with np.errstate(over="ignore"):
            total = float(row.sum())
        # Clients fit noisy counts to their size, so noise adds nothing to the sum.
        if total > most * (1 + 1e-9) + 1e-6:
            raise CiphertextError(f"{what} sum to {total:g} samples; it may have at most {most:g}.")
        return row

    def open(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]) -> LabelCounts:
        """Return the counts; see :class:`LabelDecoder`."""
        return LabelCounts(self._rows(sealed, sizes))


def pack_noisy_counts(client: str, counts: Iterable[float]) -> bytes:
    """Return noisy counts as bytes for the server, which may see them."""
    return wrap_row(_NOISY, client, list(counts))

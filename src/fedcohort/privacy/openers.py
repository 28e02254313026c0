"""The host's side of private labels: what clients send becomes what a selector can use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fedcohort.arrays import FloatArray
from fedcohort.clients import LabelCounts, LabelFactor, LabelGram, LabelGramRows, LabelInfo
from fedcohort.errors import CiphertextError, InputError
from fedcohort.guard import guarded
from fedcohort.privacy.keyholder import ClientRefusedError
from fedcohort.privacy.products import Row, SealedLabels
from fedcohort.privacy.rotation import rotated_row
from fedcohort.privacy.scheme import EvaluationKey, unsealed_form, unwrapped, wrapped


class LabelOpener(Protocol):
    """Turns what clients send about their labels into something a selector can use."""

    def check(self, client: str, sealed: bytes) -> None:
        """Raise :class:`~fedcohort.errors.CiphertextError` when what a client sent cannot be used."""

    def open(
        self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]
    ) -> LabelInfo | LabelGramRows:
        """Return the labels of new clients, in the order of ``sealed``.

        Parameters
        ----------
        sealed : mapping of name to bytes
            What the new clients sent.
        sizes : mapping of name to int
            Samples that clients, old and new, state to have.
        before : sequence of str
            The clients of the federation so far, in their order.

        Raises
        ------
        ClientRefusedError
            Names one client to leave out; nothing was changed.
        """


class Holder(Protocol):
    """The key holder as the server sees it: in the same process, or behind a wire."""

    def open(self, rows: Sequence[Row], sizes: Mapping[str, int]) -> list[list[int]]:
        """Return the inner products in rows."""

    def known(self, rows: Sequence[str], columns: Sequence[str]) -> FloatArray:
        """Return what was opened before, NaN elsewhere."""

    def readable(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each row whether the key fits."""


@guarded(methods=True, plugins=True)
class EncryptedLabels:
    """Class balance from ciphertexts: the server multiplies, the key holder opens S.

    Parameters
    ----------
    key : EvaluationKey or path
        The key holder's ``evaluation.key``.
    holder : KeyHolder or RemoteKeyHolder
    store : path, optional
        A folder to keep the clients' ciphertexts in, so that clients can still join after the server was started
        again. Default: they are kept in memory.
    """

    def __init__(self, key: EvaluationKey | str | Path, holder: Holder, store: str | Path | None = None) -> None:
        self._key = key if isinstance(key, EvaluationKey) else EvaluationKey.from_bytes(Path(key).read_bytes())
        self._holder = holder
        self._labels = SealedLabels(self._key)
        self._store = None if store is None else Path(store)
        if self._store is not None:
            self._store.mkdir(parents=True, exist_ok=True)
            kept = {path: path.read_bytes() for path in sorted(self._store.glob("*.sealed"))}
            if kept:
                self._labels.admit({_client_of(path, data): data for path, data in kept.items()})

    @property
    def classes(self) -> int:
        """Number of classes B."""
        return self._labels.classes

    def check(self, client: str, sealed: bytes) -> None:
        """Raise CiphertextError when a ciphertext cannot be used, for every reason that needs no secret key."""
        unsealed_form(self._key.public, client, sealed)

    def open(
        self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]
    ) -> LabelGram | LabelGramRows:
        """Return S of the first clients, or the rows of those who join; see :class:`LabelOpener`."""
        names = list(sealed)
        columns = [*before, *names]
        values = self._holder.known(names, columns)
        if np.isnan(values).any():
            values = self._opened(sealed, sizes, before)
        if before:
            return LabelGramRows(values, self.classes)
        return LabelGram(values, self.classes)

    def _opened(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]) -> FloatArray:
        lacking = set(before) - set(self._labels.names)
        if lacking:
            raise InputError(
                f"The ciphertexts of {len(lacking)} clients of the federation are not here ({sorted(lacking)[0]!r} is "
                "one), so the products of new clients with them cannot be computed.",
                hint="keep ciphertexts over restarts: EncryptedLabels(..., store='sealed')",
            )
        names = list(sealed)
        rows = self._labels.rows(sealed)
        try:
            self._holder.open(rows, sizes)
        except CiphertextError as error:
            self._labels.forget(names)
            if not isinstance(error, ClientRefusedError):
                self._name_unreadable(sealed)
            raise
        except BaseException:
            self._labels.forget(names)
            raise
        if self._store is not None:
            for name, data in sealed.items():
                path = self._store / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.sealed"
                path.write_bytes(data)
        return self._holder.known(names, [*before, *names])

    def _name_unreadable(self, sealed: Mapping[str, bytes]) -> None:
        """Find whose ciphertext spoils a block: it is of another key, whatever its header says."""
        for name, data in sealed.items():
            alone = SealedLabels(self._key).rows({name: data})
            if not all(self._holder.readable(alone)):
                raise ClientRefusedError(name, f"The sealed label counts of client {name!r} are of another key.")


def _client_of(path: Path, data: bytes) -> str:
    return str(unwrapped("sealed labels", data, f"The file {path}")[0]["client"])


@guarded(methods=True)
class RotatedLabels:
    """Class balance from counts that clients rotated with a secret they share.

    Parameters
    ----------
    classes : int
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def check(self, client: str, sealed: bytes) -> None:
        """Raise CiphertextError when a row cannot be used."""
        rotated_row(client, sealed, self.classes, None)

    def open(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]) -> LabelFactor:
        """Return the factor; see :class:`LabelOpener`."""
        rows = []
        for name, data in sealed.items():
            try:
                rows.append(rotated_row(name, data, self.classes, sizes.get(name)))
            except CiphertextError as error:
                raise ClientRefusedError(name, error.message) from error
        return LabelFactor(rows, self.classes)


@guarded(methods=True)
class NoisyLabels:
    """Class balance from counts with noise, which clients released under differential privacy.

    Parameters
    ----------
    classes : int
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def check(self, client: str, sealed: bytes) -> None:
        """Raise CiphertextError when the counts cannot be used."""
        noisy_row(client, sealed, self.classes)

    def open(self, sealed: Mapping[str, bytes], sizes: Mapping[str, int], before: Sequence[str]) -> LabelCounts:
        """Return the counts; see :class:`LabelOpener`."""
        return LabelCounts([noisy_row(name, data, self.classes) for name, data in sealed.items()])


def noisy_labels(client: str, counts: Iterable[float]) -> bytes:
    """Return counts that may be seen, because noise is on them, as they travel."""
    values = np.asarray(list(counts), "<f8")
    return wrapped("noisy labels", {"classes": len(values), "client": client}, values.tobytes())


def noisy_row(client: str, data: bytes, classes: int) -> FloatArray:
    """Return the (B,) counts :func:`noisy_labels` packed."""
    what = f"The noisy label counts of client {client!r}"
    header, body = unwrapped("noisy labels", data, what)
    if header.get("classes") != classes or len(body) != 8 * classes:
        raise CiphertextError(f"{what} are of {header.get('classes')} classes; the federation has {classes}.")
    if header.get("client") != client:
        raise CiphertextError(f"{what} were made for client {header.get('client')!r}.")
    row = np.frombuffer(body, "<f8").astype(np.float64)
    if not np.isfinite(row).all() or (row < 0).any():
        raise CiphertextError(f"{what} must be finite and not negative.")
    return row

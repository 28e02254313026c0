"""The client table: what is known about the clients of a federation before the first round.

Inside fedcohort a client is a dense index 0..N-1; outside it has the name its host gives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray, read_only
from fedcohort.core.errors import InputError, SignalError, UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.core.signals import Signal
from fedcohort.core.validate import array, input_error, instance, integer, listing, numbers

_MAX_INDEX = 2**31 - 1  # clients or classes; compiled code and journals store indices as 32-bit integers
_MAX_SAMPLES = 2.0**53  # larger whole numbers are not exact, and selectors may square and add sizes without overflow
_MATRIX = "a matrix with one row per client, all rows of one length"
_MAX_FACTOR = 2.0**60  # of an entry of a label factor, which may be noisy or centred


def _sizes(what: str, values: ArrayLike, allowed: str, dimensions: int) -> FloatArray:
    """Return numbers of samples, a row for each client, as a read-only array."""
    sizes = numbers(values, what, allowed)
    if sizes.ndim != dimensions:
        raise InputError(f"{what} must be {allowed}. Got an array of shape {sizes.shape}.")
    bad = ~((sizes >= 0) & (sizes <= _MAX_SAMPLES))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        more = f" (and {int(bad.sum()) - 1} more)" if bad.sum() > 1 else ""
        raise InputError(f"{what} must be from 0 to 2^53. Got {sizes[first]!r} for client {first[0]}{more}.")
    return read_only(np.ascontiguousarray(sizes))  # so that sums round alike, as in a journal


def _products(what: str, values: ArrayLike, most: float) -> FloatArray:
    """Return a matrix of products of label counts, or a factor of it."""
    matrix = numbers(values, what, _MATRIX)
    if matrix.ndim != 2:
        raise InputError(f"{what} must be {_MATRIX}. Got an array of shape {matrix.shape}.")
    if not (np.abs(matrix) <= most).all():
        raise InputError(f"{what} must be between -{most:.0e} and {most:.0e}. Got NaN, infinite or larger entries.")
    return read_only(np.ascontiguousarray(matrix))


@dataclass(frozen=True)
class LabelCounts:
    """Samples per class of each client, (N, B)."""

    counts: FloatArray

    def __init__(self, counts: ArrayLike) -> None:
        object.__setattr__(self, "counts", _sizes("label counts", counts, _MATRIX, 2))

    @property
    def classes(self) -> int:
        """Number of classes B."""
        return int(self.counts.shape[1])

    @cached_property
    def sizes(self) -> FloatArray:
        """(N,) samples of each client."""
        return read_only(self.counts.sum(axis=1))

    @cached_property
    def totals(self) -> FloatArray:
        """(B,) samples of each class."""
        return read_only(self.counts.sum(axis=0))

    @cached_property
    def squares(self) -> FloatArray:
        """(N,) sums of the squared counts of each client."""
        return read_only(np.einsum("nb,nb->n", self.counts, self.counts))


@dataclass(frozen=True)
class LabelFactor:
    """A factor F, (N, r), of the matrix of label inner products: S = F F'. Rows are label counts up to a rotation."""

    factor: FloatArray
    classes: int

    def __init__(self, factor: ArrayLike, classes: int) -> None:
        object.__setattr__(self, "factor", _products("label factor", factor, _MAX_FACTOR))
        object.__setattr__(self, "classes", integer(classes, "The number of classes", 1, _MAX_INDEX))


@dataclass(frozen=True)
class LabelGram:
    """The matrix S, (N, N), of inner products of the clients' label counts, and the number of classes."""

    gram: FloatArray
    classes: int

    def __init__(self, gram: ArrayLike, classes: int) -> None:
        array = _products("label inner products", gram, _MAX_FACTOR**2)
        if array.shape[0] != array.shape[1]:
            raise InputError(f"label inner products must be a square matrix. Got shape {array.shape}.")
        object.__setattr__(self, "gram", array)
        object.__setattr__(self, "classes", integer(classes, "The number of classes", 1, _MAX_INDEX))


@dataclass(frozen=True)
class LabelGramRows:
    """Rows of S for clients that join a federation described by a :class:`LabelGram`, (m, N + m).

    The first N columns are the products with the earlier clients, the last m those among the new clients.
    """

    rows: FloatArray
    classes: int

    def __init__(self, rows: ArrayLike, classes: int) -> None:
        array = _products("label inner products", rows, _MAX_FACTOR**2)
        new = array.shape[0]
        if array.shape[1] < new:
            raise InputError(f"The rows of {new} new clients must have at least {new} columns. Got {array.shape}.")
        object.__setattr__(self, "rows", array)
        object.__setattr__(self, "classes", integer(classes, "The number of classes", 1, _MAX_INDEX))


LabelInfo = LabelCounts | LabelFactor | LabelGram


def label_rows(labels: LabelInfo | LabelGramRows) -> FloatArray:
    """Return the matrix of any form of labels, one row per client."""
    match labels:
        case LabelCounts(rows) | LabelFactor(rows) | LabelGram(rows) | LabelGramRows(rows):
            return rows


@dataclass(frozen=True, eq=False)
class ClientTable:
    """What is known about the N clients of a federation, as read-only arrays.

    Parameters
    ----------
    names : sequence of str, optional
        The host's names, unique. Default: "0" to "N-1".
    sizes : (N,) array, optional
        Training samples per client. Default: the sums of the label counts, if there are any.
    labels : LabelCounts, LabelFactor or LabelGram, optional
        What is known about the clients' labels. Clients that join a table with a LabelGram have LabelGramRows.
    n : int, optional
        Number of clients, if no other argument determines it.

    Examples
    --------
    >>> table = ClientTable(names=["anna", "ben"], sizes=[10, 30])
    >>> table.n, table.index("ben"), table.name(0)
    (2, 1, 'anna')
    >>> table.weights
    array([0.25, 0.75])
    >>> table.index("bem")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.UnknownNameError: There is no client 'bem' among the 2 of this federation.
      hint: did you mean 'ben'?
    """

    n: int
    _names: tuple[str, ...] | None
    _sizes: FloatArray | None
    _labels: LabelInfo | LabelGramRows | None
    _granted: frozenset[Signal] | None

    def __init__(
        self,
        names: Sequence[str] | None = None,
        sizes: ArrayLike | None = None,
        labels: LabelInfo | LabelGramRows | None = None,
        n: int | None = None,
    ) -> None:
        counts: dict[str, int] = {}  # the number of clients by each argument
        if n is not None:
            counts["n"] = integer(n, "The number of clients", 0, _MAX_INDEX)
        name_tuple = None if names is None else _names(names)
        if name_tuple is not None:
            counts["names"] = len(name_tuple)
        size_array = None if sizes is None else _sizes("sizes", sizes, "one number per client", 1)
        if size_array is not None:
            counts["sizes"] = len(size_array)
        if labels is not None:
            if not isinstance(labels, LabelCounts | LabelFactor | LabelGram | LabelGramRows):
                raise input_error("labels", "LabelCounts, LabelFactor, LabelGram or LabelGramRows", labels)
            counts["labels"] = len(label_rows(labels))
        # Whoever tells its label counts has told its size.
        if size_array is None and isinstance(labels, LabelCounts):
            size_array = labels.sizes
        if not counts:
            raise InputError("A client table needs names, sizes, labels or n to know how many clients there are.")
        # Named by argument, because the caller does not know which of them is wrong.
        if len(set(counts.values())) > 1:
            got = ", ".join(f"{count} from {part}" for part, count in counts.items())
            raise InputError(f"The parts of a client table must agree on the number of clients. Got {got}.")
        object.__setattr__(self, "n", next(iter(counts.values())))
        object.__setattr__(self, "_names", name_tuple)
        object.__setattr__(self, "_sizes", size_array)
        object.__setattr__(self, "_labels", labels)
        object.__setattr__(self, "_granted", None)

    def _read(self, signal: Signal, supplied: bool) -> None:
        if self._granted is not None and signal not in self._granted:
            raise undeclared(signal)
        if not supplied:
            raise SignalError(f"The client table has no '{signal}' ({signal.meaning}).", hint=signal.supplied_by)

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals this table supplies."""
        signals = set()
        if self._sizes is not None:
            signals.add(Signal.SIZES)
        if self._labels is not None:
            signals.add(Signal.LABEL_PRODUCTS)
            if isinstance(self._labels, LabelCounts):
                signals.add(Signal.LABEL_COUNTS)
        return frozenset(signals)

    @property
    def sizes(self) -> FloatArray:
        """(N,) training samples per client."""
        self._read(Signal.SIZES, self._sizes is not None)
        assert self._sizes is not None
        return self._sizes

    @property
    def weights(self) -> FloatArray:
        """(N,) p_k, each client's share of all training samples; equal shares if all sizes are 0."""
        total = float(self.sizes.sum())
        return self.sizes / total if total > 0 else np.full(self.n, 1.0 / max(self.n, 1))

    @property
    def labels(self) -> LabelInfo:
        """The labels as they were passed: counts, a factor or the Gram matrix."""
        self._read(Signal.LABEL_PRODUCTS, self._labels is not None)
        assert self._labels is not None
        if isinstance(self._labels, LabelGramRows):
            raise InputError(
                "Rows of label inner products only describe clients that join; a session cannot start with them.",
                hint="pass the table to session.join, or start a session with a LabelGram",
            )
        return self._labels

    @property
    def label_counts(self) -> FloatArray:
        """(N, B) samples per class of each client."""
        self._read(Signal.LABEL_COUNTS, isinstance(self._labels, LabelCounts))
        assert isinstance(self._labels, LabelCounts)
        return self._labels.counts

    def granting(self, signals: frozenset[Signal]) -> ClientTable:
        """Return a view of this table in which only ``signals`` can be read."""
        # The constructor would check everything again.
        view = object.__new__(ClientTable)
        for field in dataclasses.fields(self):
            object.__setattr__(view, field.name, getattr(self, field.name))
        object.__setattr__(view, "_granted", signals)
        return view

    @property
    def names(self) -> tuple[str, ...]:
        """The N names."""
        return self._names if self._names is not None else tuple(map(str, range(self.n)))

    @property
    def has_names(self) -> bool:
        """Whether the host named its clients."""
        return self._names is not None

    def name(self, client: int) -> str:
        """Return the name of the client with a dense index."""
        client = integer(client, "A client's index")
        if not 0 <= client < self.n:
            raise UnknownNameError(f"There is no client {client}; the federation has clients 0 to {self.n - 1}.")
        return self._names[client] if self._names is not None else str(client)

    def names_of(self, clients: IntArray) -> tuple[str, ...]:
        """Return the names of clients whose dense indices are known to be in range."""
        names = self._names
        return tuple(map(str, clients.tolist()) if names is None else [names[client] for client in clients.tolist()])

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        """Return the dense index of a name."""
        instance(name, str, "A client's name", "a string")
        if name not in self:
            raise UnknownNameError(
                f"There is no client {name!r} among the {self.n} of this federation.",
                hint=suggest(name, self.names) if self.n <= 10_000 else None,  # a million names take seconds
            )
        return int(name) if self._names is None else self._index[name]

    def __contains__(self, name: object) -> bool:
        """Whether a client has this name."""
        if self._names is not None:
            return name in self._index
        # Python refuses to convert strings of many thousand digits.
        # "007" is not the name of client 7, so that every client has one name.
        if not isinstance(name, str) or not name.isdecimal() or len(name) > len(str(self.n)):
            return False
        return str(int(name)) == name and int(name) < self.n

    def indices(self, clients: Sequence[str] | Sequence[int] | AnyArray) -> IntArray:
        """Check names or indices of clients and return their dense indices."""
        allowed = "names or whole-number indices"
        if not isinstance(clients, np.ndarray):
            clients = listing(clients, "Clients", allowed)
            if any(isinstance(item, str) for item in clients):
                names: Sequence[Any] = clients
                if self._names is not None:
                    with contextlib.suppress(KeyError, TypeError):  # the slower way below names the unknown client
                        return read_only([self._index[name] for name in names], np.int64)
                return read_only([self.index(name) for name in names], np.int64)
        values = array(clients, "Clients", f"a list of {allowed}")
        if values.size and values.dtype.kind not in "iu":
            raise input_error("Clients", f"a list of {allowed}", clients)
        indices = values.astype(np.int64).reshape(-1)
        if indices.size and (indices.min() < 0 or indices.max() >= self.n):
            wrong = int(indices[(indices < 0) | (indices >= self.n)][0])
            raise UnknownNameError(f"There is no client {wrong}; the federation has clients 0 to {self.n - 1}.")
        return read_only(indices)

    def differing(self, other: ClientTable) -> IntArray:
        """Return the clients for which two tables of one federation hold different facts."""
        differ = np.full(self.n, self.signals != other.signals)
        if self._sizes is not None and other._sizes is not None:
            differ |= self._sizes != other._sizes
        if self._labels is not None and other._labels is not None:
            ours, theirs = label_rows(self._labels), label_rows(other._labels)
            differ |= (ours != theirs).any(axis=1) if ours.shape == theirs.shape else True
        return np.flatnonzero(differ)

    def with_clients(self, other: ClientTable) -> ClientTable:
        """Return this table followed by the clients of ``other``, which must have the same kinds of facts."""
        if self.signals != other.signals:
            has, given = (", ".join(map(str, sorted(table.signals))) or "none" for table in (self, other))
            raise InputError(f"New clients must have the same facts as the others ({has}). Got {given}.")
        if self._names is not None and other._names is None:
            raise InputError("New clients need names, because the others have names.")
        names = None if other._names is None else self.names + other._names
        sizes = None if self._sizes is None or other._sizes is None else np.concatenate([self._sizes, other._sizes])
        labels: LabelInfo | None = None
        match self._labels, other._labels:
            case None, _:
                pass
            case LabelCounts(ours), LabelCounts(theirs):
                labels = LabelCounts(_stack_rows("label counts", ours, theirs))
            case LabelFactor(ours, classes), LabelFactor(theirs):
                labels = LabelFactor(_stack_rows("label factor", ours, theirs), classes)
            case LabelGram(ours, classes), LabelGramRows(rows):
                if rows.shape[1] != self.n + other.n:
                    raise InputError(
                        f"The rows of {other.n} clients that join {self.n} must have {self.n + other.n} columns. "
                        f"Got {rows.shape[1]}."
                    )
                labels = LabelGram(np.block([[ours, rows[:, : self.n].T], [rows]]), classes)
            case _:
                raise InputError(
                    "In a federation with a matrix of label inner products, new clients need rows of that matrix.",
                    hint="give the new clients labels=LabelGramRows(...)",
                )
        return ClientTable(names=names, sizes=sizes, labels=labels, n=self.n + other.n)

    def __repr__(self) -> str:
        return f"ClientTable(n={self.n}, signals={{{', '.join(map(str, sorted(self.signals)))}}})"


def undeclared(signal: Signal) -> SignalError:
    """Return the error for a selector that reads a signal it did not declare."""
    if not isinstance(signal, Signal):
        return SignalError(f"A selector reads a signal by the object. Got {signal!r}.", hint="for example Signal.LOSS")
    return SignalError(
        f"The selector read the signal '{signal}' ({signal.meaning}) without declaring it.",
        hint=f"add {signal!r} to the selector's 'requires'",
    )


def _names(values: Sequence[str]) -> tuple[str, ...]:
    """Return unique client names as strings; numbers are allowed."""
    items = listing(values, "names", "names")
    for name in items:
        if not isinstance(name, str | int | np.integer) or isinstance(name, bool):
            raise input_error("names", "a list of names, which are strings", values)
    names = tuple(map(str, items))
    if len(set(names)) != len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"Client names must be unique. Got {repeated!r} more than once.")
    return names


def _stack_rows(name: str, ours: FloatArray, theirs: FloatArray) -> FloatArray:
    if ours.shape[1] != theirs.shape[1]:
        raise InputError(f"{name} of new clients must have {ours.shape[1]} columns. Got {theirs.shape[1]}.")
    return np.concatenate([ours, theirs])

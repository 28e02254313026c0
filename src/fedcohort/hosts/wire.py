"""What server and client exchange in addition to the model, on any host: plain tables with plain values.

A host puts them where its framework leaves them alone: in one ConfigRecord with Flower, in a model's ``meta`` with
FLARE.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.signals import TABLE_SIGNALS, Signal, unaided_signals

VERSION = 1  # a client of another version is refused before it trains
RECORD = "fedcohort"  # the name of our record next to the model
# For the client's local training:
WORK = "fedcohort.work"  # a multiple of the default amount; absent if the cohort does not set it
SEED = "fedcohort.seed"  # the run's seed, or another one in a trial
COMMITMENT = "commitment"  # the newest link of the server's chained journal
CONFIRMATION = "labels-confirmed"  # the key holder's signed statement of what it opened of this client's labels
_GRADIENT = "gradient"
_SECONDS = "train-seconds"
_MAX_NAME_LENGTH, _MAX_CLASSES, _MAX_COUNT = 200, 10_000, 1 << 53  # beyond 2**53, doubles skip whole numbers
_ATTRIBUTE, _MAX_ATTRIBUTES = "attribute:", 100  # a prefix, because Flower's records cannot hold tables
_COUNT = f"a whole number from 0 to {_MAX_COUNT}"
_TEXT = f"printable text of at most {_MAX_NAME_LENGTH} characters"
_FEW = 0.2  # the largest share of clients that may be wrong about the number of classes
LABELS = frozenset({Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS})
Attribute = str | float | int | bool
_MAX_VALUE = 1e30  # every selector is tested to keep its state finite up to here

Value = float | FloatArray  # a number, or (V,) if the signal is a vector


def normal_form(name: str) -> str:
    """Return a name in Unicode's composed form, so that equal names compare equal."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class Description:
    """A client's answer to DESCRIBE.

    Parameters
    ----------
    name : str
        The same after a restart; empty if the client has none. At most 200 printable characters, in composed form.
    size : int or None
        Number of training samples.
    label_counts : tuple of int or None
        Samples per class.
    sealed_labels : bytes or None
        Encrypted label counts, which only the key holder can open.
    signals : frozenset of Signal
        What the client can report or answer.
    attributes : mapping of str to str, float, int or bool
        Anything else that an operator's rules use: battery, network, region.
    """

    name: str
    size: int | None = None
    label_counts: tuple[int, ...] | None = None
    sealed_labels: bytes | None = None
    signals: frozenset[Signal] = frozenset()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The names that a host gives its clients in a table may be any text.
        name = normal_form(self.name)
        if len(name) > _MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
            raise ValueError(
                f"'name' must be printable, without a space at either end, and have at most {_MAX_NAME_LENGTH} "
                f"characters. Got {self.name[: _MAX_NAME_LENGTH + 1]!r}"
            )
        object.__setattr__(self, "name", name)

    def known_signals(self, sealed: bool = False) -> frozenset[Signal]:
        """Return what is known about the client.

        With ``sealed``, only sealed label counts count, because plain ones cannot be compared with them.
        """
        known = set(unaided_signals() | self.signals)
        if self.size is not None:
            known.add(Signal.SIZES)
        if sealed and self.sealed_labels is not None:
            known.add(Signal.LABEL_PRODUCTS)
        if not sealed and self.label_counts is not None:
            known |= {Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS}
        return frozenset(known)

    def label_rejection_reason(self, classes: int | None = None) -> str:
        """Return why the label counts cannot be right if there are ``classes`` classes, or an empty string."""
        counts = self.label_counts
        if counts is None:
            return ""
        if classes is not None and len(counts) > classes:
            return f"it names {len(counts)} classes; there are {classes} ('classes' sets how many)"
        if self.size is not None and sum(counts) > self.size:
            return f"it counts {sum(counts)} samples in classes, but {self.size} in all"
        return ""

    def padded_counts(self, classes: int) -> list[int]:
        """Return the label counts for ``classes`` classes; a client that names fewer has no samples of the others."""
        counts = self.label_counts or ()
        return [*counts, *[0] * (classes - len(counts))]

    def to_record(self) -> dict[str, Any]:
        """Return the description as a record to send."""
        signals = sorted(s.name for s in self.signals)
        record: dict[str, Any] = {"version": VERSION, "name": self.name, "signals": signals}
        if self.size is not None:
            record["size"] = self.size
        if self.label_counts is not None:
            record["label-counts"] = list(self.label_counts)
        if self.sealed_labels is not None:
            record["sealed-labels"] = self.sealed_labels
        for name, value in self.attributes.items():
            record[f"{_ATTRIBUTE}{name}"] = value
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Description:
        """Read a record written by :meth:`to_record`; a malformed one raises ValueError."""
        if record.get("version") != VERSION:
            version = _brief(record.get("version"))
            raise ValueError(f"the client speaks version {version} of the protocol, not {VERSION}")
        name, size = record.get("name"), record.get("size")
        signals, sealed = record.get("signals"), record.get("sealed-labels")
        if not isinstance(name, str) or not isinstance(signals, list):
            raise ValueError("the description lacks 'name' or 'signals'")
        if size is not None and not _is_count(size):
            raise ValueError(f"'size' must be {_COUNT}. Got {_brief(size)}")
        if sealed is not None and not isinstance(sealed, bytes):
            raise ValueError("'sealed-labels' must be bytes")
        return cls(
            name=name,
            size=size,
            label_counts=_label_counts(record.get("label-counts")),
            sealed_labels=sealed,
            # Facts for the table count only if they were sent, not if a client claims to have them.
            signals=_signals_named(signals) - TABLE_SIGNALS,
            attributes=_attributes(record),
        )


def most_classes(counts: Iterable[int]) -> int | None:
    """Return the number of classes in the federation, given how many each client names; None if no client names any.

    It is the largest number that at least two clients, and more than a fifth of all, reach, so no single client decides
    it. A client that names fewer classes has no samples of the others.

    >>> most_classes([10, 10, 10, 10_000])
    10
    """
    ordered = sorted(counts, reverse=True)
    return ordered[min(max(1, int(_FEW * len(ordered))), len(ordered) - 1)] if ordered else None


def _signals_named(names: Iterable[object]) -> frozenset[Signal]:
    """Return the signals with these names; names that nobody has declared here are skipped."""
    return frozenset(signal for name in names if (signal := Signal.get(name)) is not None)


def _label_counts(counts: object) -> tuple[int, ...] | None:
    """Return the samples per class of a description; their number is limited, because it takes memory."""
    if counts is None:
        return None
    if not isinstance(counts, list) or len(counts) > _MAX_CLASSES:
        value = f"{len(counts)} classes" if isinstance(counts, list) else _brief(counts)
        raise ValueError(f"'label-counts' must be a list of at most {_MAX_CLASSES} classes. Got {value}")
    wrong = next((count for count in counts if not _is_count(count)), None)
    if wrong is not None:
        raise ValueError(f"'label-counts' must be {_COUNT} each. Got {_brief(wrong)}")
    return tuple(counts)


def _attributes(record: Mapping[str, object]) -> dict[str, Attribute]:
    """Return the attributes of a description; NaN counts as not given."""
    names = [key for key in record if isinstance(key, str) and key.startswith(_ATTRIBUTE)]
    if len(names) > _MAX_ATTRIBUTES:
        raise ValueError(f"there may be at most {_MAX_ATTRIBUTES} attributes. Got {len(names)} attributes")
    attributes: dict[str, Attribute] = {}
    for key in names:
        name, value = key[len(_ATTRIBUTE) :], record[key]
        if not name or not _is_text(name):
            raise ValueError(f"the name of an attribute must be {_TEXT}. Got {_brief(name)}")
        if isinstance(value, float) and math.isnan(value):
            continue
        if not (_is_text(value) if isinstance(value, str) else _is_number(value)):
            raise ValueError(
                f"the attribute {name!r} must be {_TEXT}, or a number from {-_MAX_VALUE:g} to {_MAX_VALUE:g}. "
                f"Got {_brief(value)}"
            )
        attributes[name] = cast(Attribute, value)
    return attributes


def _is_text(value: str) -> bool:
    return len(value) <= _MAX_NAME_LENGTH and value.isprintable()


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _brief(value: object) -> str:
    """Return a value for an error message; for a long one, only its length."""
    if isinstance(value, (str, bytes, list)) and len(value) > 40:
        return f"{'entries' if isinstance(value, list) else 'a string'} of {len(value)} characters"
    return repr(value)[:60]


def plain(values: Any) -> AnyArray:
    """Return numbers or a torch tensor as a NumPy array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def question(signals: Iterable[Signal], commitment: str | None = None) -> dict[str, Any]:
    """Return the record that asks a client for ``signals`` and tells it the server's commitment."""
    record: dict[str, Any] = {"version": VERSION, "signals": sorted(s.name for s in signals)}
    if commitment is not None:
        record[COMMITMENT] = commitment
    return record


def asked_signals(record: Mapping[str, object]) -> frozenset[Signal]:
    """Return the signals that a record asks for; names that nobody has declared here are skipped."""
    names = record.get("signals")
    return _signals_named(names) if isinstance(names, list) else frozenset()


def report(
    name: str,
    values: Mapping[Signal, Value],
    seconds: float | None = None,
    gradient: FloatArray | None = None,
) -> dict[str, Any]:
    """Return a client's numbers as a record to send, with vectors as lists and the gradient as float32 bytes."""
    record: dict[str, Any] = {"version": VERSION, "name": name}
    for signal in sorted(values):
        value = values[signal]
        record[signal.name] = float(value) if signal.width is None else np.asarray(value, np.float64).tolist()
    if seconds is not None:
        record[_SECONDS] = float(seconds)
    if gradient is not None:
        # Half the bytes of doubles, and precise enough for a direction and a length.
        record[_GRADIENT] = np.ascontiguousarray(gradient, np.float32).tobytes()
    return record


def read_report(record: Mapping[str, object] | None) -> dict[Signal, Value]:
    """Return the usable numbers of a client's report, by signal; a vector is a (V,) array.

    NaN, and numbers larger than selectors are tested with, count as not reported. What clients do not measure is
    ignored.
    """
    values: dict[Signal, Value] = {}
    if record is None:
        return values
    for key, value in record.items():
        signal = Signal.get(key)
        if signal is None or not signal.sent_by_clients:
            continue
        if signal.width is None:
            if _is_number(value):
                values[signal] = value if type(value) is float else float(value)
        # Whether all clients have the same number of classes is checked later, for all reports together.
        elif isinstance(value, list) and signal.width in ("classes", len(value)) and all(map(_is_number, value)):
            values[signal] = np.array(value, np.float64)
    return values


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and -_MAX_VALUE <= value <= _MAX_VALUE


def read_gradient(record: Mapping[str, object] | None) -> FloatArray | None:
    """Return the (d,) gradient of a client's report, or None."""
    data = (record or {}).get(_GRADIENT)
    if not isinstance(data, bytes) or len(data) % 4:
        return None
    return np.frombuffer(data, np.float32).astype(np.float64)

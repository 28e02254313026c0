"""What travels between server and client beside the model, whatever carries it: plain tables with plain values.

A host puts them where its own machinery leaves them alone: Flower's in one ConfigRecord, FLARE's in a model's ``meta``.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.protocol import Losses, Trial
from fedcohort.core.signals import (
    REPORT_SIGNALS,
    SIGNALS,
    TABLE_SIGNALS,
    Party,
    Signal,
    VectorOf,
    losses_of,
    same_of_received,
    vectors_of,
)

VERSION = 1  # a client of another version is refused before it trains
RECORD = "fedcohort"  # the name of our record beside the model
# For the client's own training:
WORK = "fedcohort.work"  # local work as a multiple of the default; absent where the cohort says nothing
SEED = "fedcohort.seed"  # of local training: the run's seed, another one in a trial that is thrown away
COMMITMENT = "commitment"  # the newest link of the server's chained journal
CONFIRMATION = "labels-confirmed"  # a key holder's signed word for what it opened of this client's labels
_GRADIENT = "gradient"
_SECONDS = "train-seconds"
_LONGEST_NAME, _MOST_CLASSES, _LARGEST_COUNT = 200, 10_000, 1 << 53  # beyond 2**53 doubles skip whole numbers
_ATTRIBUTE, _MOST_ATTRIBUTES = "attribute:", 100  # each in an entry of its own: Flower's records hold no tables
_COUNT = f"a whole number from 0 to {_LARGEST_COUNT}"
_TEXT = f"printable text of at most {_LONGEST_NAME} characters"
_FEW = 0.2  # a share of clients that does not decide how many classes there are
Attribute = str | float | int | bool
_LARGEST = 1e30  # up to here every selector is tested to keep its state finite

# What clients measure and send as numbers; whatever else one claims to know is not looked at.
REPORTABLE = {s.value: s for s in REPORT_SIGNALS if s.by is Party.CLIENT and not isinstance(s.how, VectorOf)}
GRADIENT_SIGNALS = frozenset(vectors_of(REPORT_SIGNALS, "gradient"))
"""What the server takes from gradients, which clients send for it."""
Value = float | FloatArray  # of a signal that is a number; of one that is a vector, (V,)


def normal_form(name: str) -> str:
    """Return a name in Unicode's composed form: what reads the same is the same client."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def usable_name(name: str) -> str:
    """Return the name a client chose for itself, composed; an empty one stands for none.

    It has at most 200 printable characters and no space at either end. The names a host gives its clients in a
    :class:`~fedcohort.core.clients.ClientTable` may be any text.
    """
    found = normal_form(name)
    if len(found) > _LONGEST_NAME or not found.isprintable() or found != found.strip():
        raise ValueError(
            f"'name' must be printable, without a space at either end, and have at most {_LONGEST_NAME} characters. "
            f"Got {name[: _LONGEST_NAME + 1]!r}"
        )
    return found


@dataclass(frozen=True)
class Description:
    """A client's answer to DESCRIBE.

    Parameters
    ----------
    name : str
        Stable over restarts; empty when the client has none. See :func:`usable_name`.
    size : int or None
        Training samples.
    label_counts : tuple of int or None
        Samples per class.
    sealed_labels : bytes or None
        Label counts in an encrypted form, which only the key holder can open.
    signals : frozenset of Signal
        What the client can report or answer.
    attributes : mapping of str to str, float, int or bool
        What it says about itself besides, for an operator's rules: battery, network, region.
    """

    name: str
    size: int | None = None
    label_counts: tuple[int, ...] | None = None
    sealed_labels: bytes | None = None
    signals: frozenset[Signal] = frozenset()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", usable_name(self.name))

    def to_record(self) -> dict[str, Any]:
        """Return the description as the record that travels."""
        signals = sorted(s.value for s in self.signals)
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
            # Facts of the table are known by what was sent of them, not by a claim to have them.
            signals=_known_signals(signals) - TABLE_SIGNALS,
            attributes=_attributes(record),
        )


def most_classes(named: Iterable[int]) -> int | None:
    """Return how many classes there are, by how many each client names: no single client decides it.

    As many as at least two clients, and more than a fifth of all, name; a client that names fewer holds none of the
    others. None where nobody names any.

    >>> most_classes([10, 10, 10, 10_000])
    10
    """
    ordered = sorted(named, reverse=True)
    return ordered[min(max(1, int(_FEW * len(ordered))), len(ordered) - 1)] if ordered else None


def _known_signals(names: Iterable[object]) -> frozenset[Signal]:
    """Return the library's signals among names; those of a later version are skipped."""
    known = {s.value: s for s in SIGNALS}
    return frozenset(known[name] for name in names if isinstance(name, str) and name in known)


def _label_counts(counts: object) -> tuple[int, ...] | None:
    """Return the samples per class of a description; a client that sends a million classes would fill the memory."""
    if counts is None:
        return None
    if not isinstance(counts, list) or len(counts) > _MOST_CLASSES:
        given = f"{len(counts)} classes" if isinstance(counts, list) else _brief(counts)
        raise ValueError(f"'label-counts' must be a list of at most {_MOST_CLASSES} classes. Got {given}")
    wrong = next((count for count in counts if not _is_count(count)), None)
    if wrong is not None:
        raise ValueError(f"'label-counts' must be {_COUNT} each. Got {_brief(wrong)}")
    return tuple(counts)


def _attributes(record: Mapping[str, object]) -> dict[str, Attribute]:
    """Return the attributes of a description; a number that is NaN is not known."""
    names = [key for key in record if isinstance(key, str) and key.startswith(_ATTRIBUTE)]
    if len(names) > _MOST_ATTRIBUTES:
        raise ValueError(f"there may be at most {_MOST_ATTRIBUTES} attributes. Got {len(names)} attributes")
    found: dict[str, Attribute] = {}
    for key in names:
        name, value = key[len(_ATTRIBUTE) :], record[key]
        if not name or not _is_text(name):
            raise ValueError(f"the name of an attribute must be {_TEXT}. Got {_brief(name)}")
        if isinstance(value, float) and math.isnan(value):
            continue
        if not (_is_text(value) if isinstance(value, str) else _is_number(value)):
            raise ValueError(
                f"the attribute {name!r} must be {_TEXT}, or a number from {-_LARGEST:g} to {_LARGEST:g}. "
                f"Got {_brief(value)}"
            )
        found[name] = cast(Attribute, value)
    return found


def _is_text(value: str) -> bool:
    return len(value) <= _LONGEST_NAME and value.isprintable()


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT


def _brief(value: object) -> str:
    """Return a value as a message shows it: its length in the place of a long text."""
    if isinstance(value, (str, bytes, list)) and len(value) > 40:
        return f"{'entries' if isinstance(value, list) else 'a string'} of {len(value)} characters"
    return repr(value)[:60]


def plain(values: Any) -> AnyArray:
    """Return numbers as a NumPy array: a tensor leaves its graph and its GPU."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def question(signals: Iterable[Signal], commitment: str | None = None) -> dict[str, Any]:
    """Return the record that asks a client for ``signals`` and tells it what the server is committed to."""
    record: dict[str, Any] = {"version": VERSION, "signals": sorted(s.value for s in signals)}
    if commitment is not None:
        record[COMMITMENT] = commitment
    return record


def asked_signals(record: Mapping[str, object]) -> frozenset[Signal]:
    """Return the signals a record asks for; names of a later version are skipped."""
    names = record.get("signals")
    return _known_signals(names) if isinstance(names, list) else frozenset()


def report(
    name: str,
    values: Mapping[Signal, Value],
    seconds: float | None = None,
    gradient: FloatArray | None = None,
) -> dict[str, Any]:
    """Return a client's numbers as the record that travels, a vector as a list; the gradient goes as float32 bytes."""
    record: dict[str, Any] = {"version": VERSION, "name": name}
    for signal in sorted(values):
        value = values[signal]
        record[signal.value] = float(value) if signal.width is None else np.asarray(value, np.float64).tolist()
    if seconds is not None:
        record[_SECONDS] = float(seconds)
    if gradient is not None:
        # Half the bytes of doubles; a direction and a length are all that is taken from it.
        record[_GRADIENT] = np.ascontiguousarray(gradient, np.float32).tobytes()
    return record


def read_report(record: Mapping[str, object] | None) -> dict[Signal, Value]:
    """Return the usable numbers of a client's report, by signal: (V,) arrays of signals that are vectors.

    NaN and what is beyond all that selectors are tested with counts as not reported.
    """
    found: dict[Signal, Value] = {}
    if record is None:
        return found
    for key, value in record.items():
        signal = REPORTABLE.get(key)
        if signal is None:
            continue
        if signal.width is None:
            if _is_number(value):
                found[signal] = value if type(value) is float else float(value)
        # Whether all clients have as many classes is seen when their reports are put together.
        elif isinstance(value, list) and signal.width in ("classes", len(value)) and all(map(_is_number, value)):
            found[signal] = np.array(value, np.float64)
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and -_LARGEST <= value <= _LARGEST


def read_gradient(record: Mapping[str, object] | None) -> FloatArray | None:
    """Return the (d,) gradient of a client's report, or None."""
    data = (record or {}).get(_GRADIENT)
    if not isinstance(data, bytes) or len(data) % 4:
        return None
    return np.frombuffer(data, np.float32).astype(np.float64)


def supplied_signals(losses: frozenset[Signal] | None, gradient: bool) -> frozenset[Signal]:
    """Return every signal a client can report or be asked for that computes these losses (None: none) and gradients."""
    found: set[Signal] = set()
    if losses is not None:
        found |= {*losses, Losses.needs}
        found |= {s for s in losses_of(REPORT_SIGNALS, "own") if same_of_received(s) in losses}
        if Trial.measured in losses:
            found.add(Trial.needs)
    if gradient:
        found |= GRADIENT_SIGNALS
    return frozenset(found)

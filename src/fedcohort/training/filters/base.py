"""The base class of filters, which decide which of a round's models enter the average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, read_only
from fedcohort.core.errors import InputError
from fedcohort.core.params import Parameterized
from fedcohort.core.registry import Registry
from fedcohort.journal.codec import as_json


class Need(StrEnum):
    """Something about a round's replies that is expensive for the host to compute."""

    UPDATES = "updates"  # each client's model minus the one it received
    LOGITS = "logits"  # each client's model on the server's validation set, and that set's labels


class Replies:
    """A round's replies as a filter sees them. Values passed as functions are computed when first read.

    Arrays may be NumPy arrays or torch tensors on any device.

    Parameters
    ----------
    ok : (m,) bool
        Which clients' models arrived in time and are valid.
    updates : (m, P) or function, optional
        Each client's model minus the global model it received.
    logits : (m, V, C) or function, optional
        Outputs of each client's model on the server's validation set.
    labels : (V,) or function, optional
        The validation set's classes, 0 to C - 1.

    Examples
    --------
    >>> replies = Replies([True, False], updates=lambda: np.ones((2, 3)))
    >>> replies.updates.shape
    (2, 3)
    >>> replies.logits
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: The filter reads 'logits', which the host does not supply.
    """

    def __init__(
        self,
        ok: Sequence[bool] | BoolArray,
        *,
        updates: Any | Callable[[], Any] | None = None,
        logits: Any | Callable[[], Any] | None = None,
        labels: Any | Callable[[], Any] | None = None,
    ) -> None:
        self.ok: BoolArray = read_only(ok, np.bool_)
        self._sources = {"updates": updates, "logits": logits, "labels": labels}

    def __len__(self) -> int:
        return len(self.ok)

    def _read(self, name: str) -> Any:
        value = self._sources[name]
        if value is None:
            raise InputError(
                f"The filter reads '{name}', which the host does not supply.",
                hint="the host must compute everything in the filter's 'needs' and pass it to Replies",
            )
        if callable(value):
            value = self._sources[name] = value()
        return value

    @property
    def updates(self) -> Any:
        """(m, P) each client's model minus the global model it received, without running statistics."""
        return self._read("updates")

    @property
    def logits(self) -> Any:
        """(m, V, C) outputs of each client's model on the server's validation set."""
        return self._read("logits")

    @property
    def labels(self) -> Any:
        """(V,) classes of the server's validation set."""
        return self._read("labels")


@dataclass(frozen=True)
class FilterDecision:
    """A filter's decision on one round.

    Attributes
    ----------
    kept : (m,) bool array
        Which clients' models enter the average.
    notes : mapping of str to str or number
        What to record about the decision.
    """

    kept: BoolArray
    notes: Mapping[str, str | float | int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", read_only(self.kept, np.bool_))
        object.__setattr__(self, "notes", MappingProxyType(dict(self.notes)))


class Filter(Parameterized, ABC):
    """Decides which returned models enter the average. Derive a frozen dataclass and implement :meth:`judge`."""

    name: ClassVar[str]

    @property
    def needs(self) -> frozenset[Need]:
        """What a host must be able to supply in :class:`Replies`."""
        return frozenset()

    @abstractmethod
    def judge(self, replies: Replies) -> FilterDecision:
        """Decide which models to keep. Never keep a reply that is not OK; keep none if no reply is usable."""


def checked_decision(filter_: Filter, replies: Replies) -> FilterDecision:
    """Return a filter's decision after checking its type and shape; for hosts, which run other people's code."""
    decision = filter_.judge(replies)
    if not isinstance(decision, FilterDecision):
        raise InputError(f"A filter must return a FilterDecision. {filter_.name!r} returned {type(decision).__name__}.")
    if decision.kept.shape != replies.ok.shape:
        raise InputError(
            f"A filter must decide on every reply, with an array of shape {replies.ok.shape}. "
            f"{filter_.name!r} returned shape {decision.kept.shape}."
        )
    # Notes go into the journal, which would fail only after the round.
    if decision.notes:
        as_json(dict(decision.notes), f"The notes of the filter {filter_.name!r}")
    return decision


FILTERS: Registry[Filter] = Registry("filter", package="fedcohort.training.filters", base=Filter)


@FILTERS.register("keep-all")
@dataclass(frozen=True, kw_only=True)
class KeepAll(Filter):
    """Keep every valid model that arrived in time. This is the default."""

    def judge(self, replies: Replies) -> FilterDecision:
        """Keep every reply that is OK."""
        return FilterDecision(replies.ok)

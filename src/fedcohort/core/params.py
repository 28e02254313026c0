"""Declare the default, constraint and meaning of a parameter in one place.

Everything configurable (selectors, filters, aggregators, scenarios, ...) is a frozen dataclass that derives from
:class:`Parameterized` and declares its fields with :func:`param`. Values are checked at construction, the conformance
tests generate bad values from the same constraints, and the command line prints them.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Greedy(Parameterized):
...     epsilon: float = param(0.1, Interval(float, 0, 1, "left"), "share of random picks (epsilon)")
>>> Greedy(epsilon=0.2)
Greedy(epsilon=0.2)
>>> Greedy(epsilon=1.5)
Traceback (most recent call last):
    ...
fedcohort.core.errors.ParameterError: The 'epsilon' parameter of Greedy must be a number in [0, 1). Got 1.5.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcohort.core.errors import ParameterError
from fedcohort.core.text import short_repr

Closed = Literal["both", "left", "right", "neither"]

ParamSets = Mapping[str, Mapping[str, object]]
"""Values of parameters, by the name of the set."""


class Constraint:
    """The set of values a parameter may have."""

    def admits(self, value: object) -> bool:
        """Whether ``value`` is allowed."""
        raise NotImplementedError(type(self).__name__)

    def describe(self) -> str:
        """Name the allowed values, to follow "must be"."""
        raise NotImplementedError(type(self).__name__)

    def edges(self) -> list[object]:
        """Return values that show where the set ends, admitted or not."""
        return []

    def bad_values(self) -> list[object]:
        """Return values this constraint refuses, for the conformance tests."""
        odd = ["nonsense", "", " ", "true", 1, -12345, 0.5, math.nan, math.inf, None, *self.edges()]
        return [value for value in odd if not self.admits(value)]


@dataclass(frozen=True)
class Interval(Constraint):
    """A finite number of ``kind`` (int or float) between ``low`` and ``high``; None means no bound."""

    kind: type
    low: float | None
    high: float | None
    closed: Closed = "both"

    def admits(self, value: object) -> bool:
        """Whether ``value`` is a number of this kind in the interval."""
        kind = numbers.Integral if self.kind is int else numbers.Real
        # To NumPy a time span is an integer, and to Python a bool is.
        if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, kind):
            return False
        number: Any = value  # not made a float: large integers are compared exactly
        try:
            finite = math.isfinite(number)
        except OverflowError:  # an integer of more than 300 digits
            return False
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        above = number > low or (number == low and self.closed in ("left", "both"))
        return finite and above and (number < high or (number == high and self.closed in ("right", "both")))

    def describe(self) -> str:
        """Name the kind and the interval."""
        noun = "an integer" if self.kind is int else "a number"
        if self.low is None and self.high is None:
            return f"{noun}, finite"
        left = "(" if self.low is None or self.closed in ("right", "neither") else "["
        right = ")" if self.high is None or self.closed in ("left", "neither") else "]"
        low = "-inf" if self.low is None else f"{self.low:g}"
        high = "inf" if self.high is None else f"{self.high:g}"
        return f"{noun} in {left}{low}, {high}{right}"

    def edges(self) -> list[object]:
        """Return each bound, and a number beyond it."""
        low = [] if self.low is None else [self.low - 1, self.low]
        return [self.kind(number) for number in (*low, *([] if self.high is None else [self.high, self.high + 1]))]


@dataclass(frozen=True)
class OneOf(Constraint):
    """One of a few named values."""

    values: tuple[object, ...]

    def admits(self, value: object) -> bool:
        """Whether ``value`` is one of the values, of the same type."""
        return any(value == v and type(value) is type(v) for v in self.values)  # True is not 1

    def describe(self) -> str:
        """List the values."""
        return "one of " + ", ".join(repr(v) for v in self.values)


@dataclass(frozen=True)
class Boolean(Constraint):
    """True or False, not 0 or 1."""

    def admits(self, value: object) -> bool:
        """Whether ``value`` is a bool."""
        return isinstance(value, bool)

    def describe(self) -> str:
        """Name both values."""
        return "True or False"


@dataclass(frozen=True)
class Text(Constraint):
    """A non-empty string."""

    def admits(self, value: object) -> bool:
        """Whether ``value`` is a string with more than spaces."""
        return isinstance(value, str) and bool(value.strip())

    def describe(self) -> str:
        """Name the allowed values."""
        return "a non-empty string"


@dataclass(frozen=True)
class Optional(Constraint):
    """None, or a value that ``inner`` admits."""

    inner: Constraint

    def admits(self, value: object) -> bool:
        """Whether ``value`` is None or admitted by the inner constraint."""
        return value is None or self.inner.admits(value)

    def describe(self) -> str:
        """Name None and the inner values."""
        return f"None or {self.inner.describe()}"

    def edges(self) -> list[object]:
        """Return those of the inner constraint."""
        return self.inner.edges()


@dataclass(frozen=True)
class Either(Constraint):
    """A value that one of two constraints admits, such as a few names or a number."""

    first: Constraint
    second: Constraint

    def admits(self, value: object) -> bool:
        """Whether one of the two admits ``value``."""
        return self.first.admits(value) or self.second.admits(value)

    def describe(self) -> str:
        """Name the values of both."""
        return f"{self.first.describe()}, or {self.second.describe()}"

    def edges(self) -> list[object]:
        """Return those of both."""
        return [*self.first.edges(), *self.second.edges()]


@dataclass(frozen=True)
class Sequence(Constraint):
    """A tuple whose items ``inner`` admits, at least ``least`` of them."""

    inner: Constraint
    least: int = 0

    def admits(self, value: object) -> bool:
        """Whether ``value`` is a tuple or list of admitted items."""
        return isinstance(value, (tuple, list)) and len(value) >= self.least and all(map(self.inner.admits, value))

    def describe(self) -> str:
        """Name the items."""
        length = f" of at least {self.least}" if self.least else ""
        return f"a list{length}, each {self.inner.describe()}"

    def edges(self) -> list[object]:
        """Return lists with one bad item."""
        return [[value] for value in self.inner.bad_values()[:2]]


class ParameterInfo(NamedTuple):
    """One declared parameter, for tests, docs and the command line."""

    name: str
    default: object
    constraint: Constraint
    meaning: str


def param(default: Any, constraint: Constraint, meaning: str) -> Any:
    """Declare a parameter of a :class:`Parameterized` dataclass.

    Parameters
    ----------
    default : object
        The default value; ``dataclasses.MISSING`` makes the parameter required.
    constraint : Constraint
        The allowed values.
    meaning : str
        One line, with the paper's symbol.
    """
    metadata = {"constraint": constraint, "meaning": meaning}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_values(owner: object, constraints: Mapping[str, Constraint]) -> None:
    """Raise a ParameterError if a constraint does not admit the attribute of its name."""
    for name, constraint in constraints.items():
        value = getattr(owner, name)
        try:
            admitted = constraint.admits(value)
        except Exception:  # a comparison or length of a foreign object may raise
            admitted = False
        if not admitted:
            raise ParameterError(
                f"The '{name}' parameter of {type(owner).__name__} must be {constraint.describe()}. "
                f"Got {short_repr(value)}."
            )


class Parameterized:
    """Base of frozen dataclasses whose :func:`param` fields are checked at construction."""

    def __post_init__(self) -> None:
        infos = parameters(type(self))
        check_values(self, {info.name: info.constraint for info in infos})
        for info in infos:
            value = getattr(self, info.name)
            # Frozen parameters are hashed and compared, which lists cannot be.
            if isinstance(value, list):  # from TOML or JSON; a frozen object must not hold a mutable list
                object.__setattr__(self, info.name, tuple(value))


def parameters(cls: type) -> list[ParameterInfo]:
    """Return the declared parameters of ``cls`` in order."""
    if not dataclasses.is_dataclass(cls):
        return []
    return [
        ParameterInfo(f.name, f.default, f.metadata["constraint"], f.metadata["meaning"])
        for f in dataclasses.fields(cls)
        if "constraint" in f.metadata
    ]

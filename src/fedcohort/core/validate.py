"""Check arguments of public calls: each function returns the value or raises an error that names it.

A public call checks its arguments before it does anything else. Any exception after that is a bug and is not converted.
Only what a selector's own code raises becomes a :class:`~fedcohort.core.errors.SelectorError`, with its error as cause.

>>> integer(3, "'size'", least=1)
3
>>> integer(0, "'size'", least=1)
Traceback (most recent call last):
    ...
fedcohort.core.errors.InputError: 'size' must be an integer in [1, inf). Got 0.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.params import Constraint, Interval, OneOf
from fedcohort.core.text import short_repr

T = TypeVar("T")


def input_error(what: str, allowed: str, value: object, hint: str | None = None) -> InputError:
    """Return the error for an argument: its name, what is allowed, and its value."""
    return InputError(f"{what} must be {allowed}. Got {short_repr(value)}.", hint=hint)


def instance(value: object, kind: type[T], what: str, allowed: str | None = None) -> T:
    """Return ``value`` if it is a ``kind``.

    >>> instance("a", str, "'name'")
    'a'
    """
    if not isinstance(value, kind):
        raise input_error(what, allowed or f"a {kind.__name__}", value)
    return value


def _admitted(value: object, constraint: Constraint, what: str) -> Any:
    if not constraint.admits(value):
        raise input_error(what, constraint.describe(), value)
    return value


def integer(value: object, what: str, least: int | None = None, most: int | None = None) -> int:
    """Return an integer within bounds; True and 1.0 are refused."""
    return int(_admitted(value, Interval(int, least, most), what))


def number(value: object, what: str, least: float | None = None) -> float:
    """Return a finite number within bounds; True is refused."""
    return float(_admitted(value, Interval(float, least, None), what))


def text(value: object, what: str) -> str:
    """Return a string; one that no file can hold, with half of a surrogate pair, is refused."""
    string = instance(value, str, what, "a string")
    try:
        string.encode()
    except UnicodeEncodeError:
        raise input_error(what, "valid Unicode", value) from None
    return string


def boolean(value: object, what: str) -> bool:
    """Return True or False."""
    return bool(instance(value, (bool, np.bool_), what, "True or False"))  # type: ignore[arg-type]


def path(value: object, what: str) -> Path:
    """Return a path; a string that cannot name a file is refused."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise input_error(what, "a path", value)
    try:
        Path(name).exists()
    except OSError as error:  # the name is too long, for example
        raise InputError(f"{what} cannot name a file: {error.strerror}. Got {short_repr(value)}.") from None
    return Path(name)


def one_of(value: T, options: Collection[T], what: str) -> T:
    """Return ``value`` if it is one of the options."""
    _admitted(value, OneOf(tuple(options)), what)
    return value


def mapping(value: object, what: str) -> Mapping[Any, Any]:
    """Return a mapping whose keys are strings."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise input_error(what, "a mapping whose keys are strings", value)
    return value


def listing(value: object, what: str, of: str = "items") -> Sequence[Any]:
    """Return a list, tuple, set, range, one-dimensional array or column of a frame as a sequence.

    A string is refused, and so is an iterator, which could be read only once.
    """
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        raise input_error(what, f"a list of {of}", value)
    if isinstance(value, (Sequence, Set)):
        return list(value)
    column = array(value, what, f"a list of {of}") if hasattr(value, "__array__") else None
    if column is None or column.ndim != 1:
        raise input_error(what, f"a list of {of}", value)
    return column.tolist()  # type: ignore[no-any-return]


def texts(value: object, what: str, of: str = "names") -> tuple[str, ...]:
    """Return a tuple of strings."""
    items = listing(value, what, of)
    if not all(isinstance(item, str) for item in items):
        raise input_error(what, f"a list of {of}, which are strings", value)
    return tuple(items)


def array(value: object, what: str, allowed: str = "an array") -> AnyArray:
    """Return ``value`` as an array of any type."""
    try:
        return np.asarray(value)
    except Exception:  # a foreign object may raise anything
        raise input_error(what, allowed, value) from None


def numbers(value: object, what: str, allowed: str = "numbers") -> FloatArray:
    """Return ``value`` as an array of floats; strings, dates and complex numbers are refused."""
    result = array(value, what, allowed)
    if result.dtype.kind not in "biuf" and result.size:
        raise input_error(what, allowed, value)
    return result.astype(np.float64)

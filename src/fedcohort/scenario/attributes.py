"""What simulated clients report about themselves, for an operator's rules: region, device class, battery.

An attribute is a list with one value per client, a random choice from some values, or a random number from an interval.
Numbers may change from round to round, like a battery. A CSV file can hold the values of all clients.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.files import read_file
from fedcohort.core.params import Constraint, Interval
from fedcohort.scenario.counter_rng import uniforms

Value = str | float | int | bool
_FILE = "file"
_CLIENT = "client"  # the column that names the client; without it, rows are in the clients' order
_NUMBER = Interval(float, None, None)


class AttributeTable(Constraint):
    """A table of attributes.

    >>> AttributeTable().admits({"region": {"values": ["north", "south"], "shares": [0.8, 0.2]}, "size": [1, 2]})
    True
    >>> AttributeTable().admits({"battery": {"low": 80, "high": 20}})
    False
    """

    def admits(self, value: object) -> bool:
        """Whether ``value`` is such a table."""
        return isinstance(value, Mapping) and all(isinstance(k, str) and _is_attribute(v) for k, v in value.items())

    def describe(self) -> str:
        """Name the allowed values."""
        return (
            "a table of attributes, each a list of one value per client, {values, shares} or {low, high, changes}; "
            "or {file} with a CSV file"
        )

    def bad_values(self) -> list[object]:
        """Return values that are not such a table."""
        return [3, {"region": "north"}, {"battery": {"low": 3, "high": 1}}, {"region": {"values": []}}]


def _is_attribute(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(v, (str, int, float, bool)) for v in value)
    match value:
        case {"values": [*values], **rest} if set(rest) <= {"shares"}:
            shares: Any = rest.get("shares", [1] * len(values))
            if not isinstance(shares, (list, tuple)) or not all(_NUMBER.admits(s) and s >= 0 for s in shares):
                return False
            return _is_attribute(values) and len(shares) == len(values) and sum(shares) > 0
        case {"low": low, "high": high, **rest} if set(rest) <= {"changes"}:
            numbers = _NUMBER.admits(low) and _NUMBER.admits(high)
            return numbers and low <= high and isinstance(rest.get("changes", False), bool)
    return False


def read_attributes(table: Any) -> Any:
    """Return a table of attributes in which the entry ``file`` is replaced by the columns of that CSV file.

    Each row is one client, named in a column ``client`` or, without one, in the clients' order.
    """
    if not isinstance(table, Mapping) or _FILE not in table:
        return table
    path = Path(str(table[_FILE]))
    try:
        rows = list(csv.DictReader(io.StringIO(read_file(path).decode(), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(f"The attributes in {path} cannot be read: {error}.") from error
    if not rows or any(None in row or None in row.values() for row in rows):
        raise ScenarioError(
            f"The attributes in {path} must be a CSV table: a line of names, then a line of values for each client."
        )
    columns = {str(name): [_parse_value(str(row[name])) for row in rows] for name in rows[0]}
    return {**columns, **{key: value for key, value in table.items() if key != _FILE}}


def _parse_value(text: str) -> Value:
    """Return a cell as the bool, number or text that it looks like.

    >>> [_parse_value(cell) for cell in ("3", "0.5", "true", "north")]
    [3, 0.5, True, 'north']
    """
    # Rules compare values: a battery of 80 must be a number, and true must be no text.
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def draw_attributes(
    table: Mapping[str, Any], names: Sequence[str], *, seed: int, round: int, changing: bool = False
) -> dict[str, dict[str, Value]]:
    """Return what each client reports about itself in a round, by name.

    Parameters
    ----------
    table : mapping
        A table that :class:`AttributeTable` admits.
    names : sequence of str
        The clients.
    seed, round : int
        Which experiment, which round. Only attributes that change depend on the round.
    changing : bool
        Return nothing if no attribute changes from round to round.

    Examples
    --------
    >>> draw_attributes({"region": ["north", "south"]}, ["0", "1"], seed=0, round=0)
    {'0': {'region': 'north'}, '1': {'region': 'south'}}
    """
    if changing and not any(isinstance(entry, Mapping) and entry.get("changes") for entry in table.values()):
        return {}
    # A file may name the clients, in any order.
    order = list(map(str, table.get(_CLIENT, names)))
    row_of = {name: row for row, name in enumerate(order)}
    missing = sorted(set(names) - set(row_of))
    if len(row_of) != len(order) or missing:
        raise ScenarioError(
            f"The attributes name {len(order)} clients in their column 'client'; "
            + (f"{missing[0]!r} of the federation is not among them." if missing else "one of them twice.")
        )
    rows = [row_of[name] for name in names]
    attributes: dict[str, dict[str, Value]] = {name: {} for name in names}
    for attribute, entry in table.items():
        if attribute == _CLIENT:
            continue
        for name, value in zip(names, _column(attribute, entry, rows, len(order), seed, round), strict=True):
            attributes[name][attribute] = value
    return attributes


def _column(attribute: str, entry: Any, rows: list[int], count: int, seed: int, round: int) -> list[Value]:
    """Return the values of one attribute; ``rows`` are the clients' rows in lists of ``count`` values."""
    if not isinstance(entry, Mapping):
        if len(entry) != count:
            raise ParameterError(
                f"The attribute {attribute!r} of the scenario has {len(entry)} values for {count} clients."
            )
        return [entry[row] for row in rows]
    # Each attribute has its own random numbers, keyed by its name, so adding one does not change the others.
    position = (zlib.crc32(attribute.encode()), 1 + round if entry.get("changes") else 0)
    draws: FloatArray = uniforms(seed, rng.ATTRIBUTES, np.arange(len(rows)), *position)
    if "values" in entry:
        # Divided by their sum, so that a user may write numbers of clients as well.
        shares = np.asarray(entry.get("shares") or [1.0] * len(entry["values"]), np.float64)
        edges = np.cumsum(shares / shares.sum())[:-1]
        return [entry["values"][i] for i in np.searchsorted(edges, draws, side="right").tolist()]
    low, high = entry["low"], entry["high"]
    # Whole numbers with both ends included, as whoever writes low = 1, high = 5 expects.
    if isinstance(low, int) and isinstance(high, int):
        return [int(v) for v in np.floor(low + draws * (high - low + 1)).tolist()]
    return [float(v) for v in (low + draws * (high - low)).tolist()]

"""Numbers as text, the same in tables, sentences and terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence

_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def percent(value: float, digits: int = 1) -> str:
    """Return a share as text.

    >>> percent(0.6234)
    '62.3%'
    """
    return "unknown" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def number(value: float) -> str:
    """Return a number with three significant digits (one if it is very small), never in exponent form.

    >>> number(0.081234), number(1234567.0), number(2.0), number(999.6), number(0.0000081)
    ('0.0812', '1,234,567', '2', '1,000', '0.000008')
    """
    if math.isnan(value):
        return "unknown"
    size = abs(value)
    if 0 < size < 1e-4:
        return f"{value:.{min(12, math.ceil(-math.log10(size)))}f}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def quantity(value: float, one: str, many: str | None = None) -> str:
    """Return a number with the word for what is counted.

    >>> quantity(1, "round"), quantity(2.4, "round"), quantity(2.5, "class", "classes")
    ('1 round', '2.4 rounds', '2.5 classes')
    """
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Return a duration in readable units.

    >>> duration(42.0), duration(600.0), duration(7300.0), duration(400000.0)
    ('42.0 s', '10.0 min', '2.0 h', '4.6 d')
    """
    if math.isnan(seconds):
        return "unknown"
    unit = "s" if seconds < 180 else "min" if seconds < 7200 else "h" if seconds < 172800 else "d"
    return f"{seconds / _UNIT_SECONDS[unit]:.1f} {unit}"


def names(items: Sequence[str], limit: int = 12) -> str:
    """Return a readable list of names.

    >>> names(["a", "b", "c"]), names(["a", "b", "c"], limit=2)
    ('a, b and c', 'a, b and 1 more')
    """
    if len(items) > limit:
        return f"{', '.join(items[:limit])} and {len(items) - limit} more"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "nobody"

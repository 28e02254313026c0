r"""Escape untrusted text before it reaches a terminal, a page, a log or a label.

Clients choose their names, plug-ins write notes, and errors quote replies. Code that shows such text passes it through
:func:`printable`, or through one of the functions here that call it.

>>> printable("site\x1b[2J"), printable("ward\n7"), printable("tidy")
('site\\x1b[2J', 'ward\\x0a7', 'tidy')
"""

from __future__ import annotations

import html
import logging
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from unicodedata import category

_MAX_NAMES = 8


def printable(text: object, *, lines: bool = False) -> str:
    r"""Escape every character in ``text`` that could control the program that shows it.

    These are control characters (including escape codes), marks that change the writing direction, line endings and
    lone surrogates: everything for which :meth:`str.isprintable` is false, except spaces.

    Parameters
    ----------
    lines : bool
        Whether to keep line breaks and tabs; by default the result is one line.

    >>> printable("a\nb", lines=True), printable("a\u202eb")
    ('a\nb', 'a\\u202eb')
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    allowed = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in allowed or category(c) == "Zs" else _escape(ord(c)) for c in plain)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def short_repr(value: object, most: int = 300) -> str:
    """Return ``repr(value)``, shortened for a message, or the type's name if ``repr`` fails.

    >>> short_repr([1, "a"])
    "[1, 'a']"
    """
    try:
        text = repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def error_text(error: BaseException) -> str:
    """Return the type and message of an error, or only the type if ``str(error)`` fails.

    >>> error_text(ValueError("no")), error_text(ValueError())
    ('ValueError: no', 'ValueError')
    """
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:
        return kind
    return f"{kind}: {message}" if message else kind


def error_place(error: BaseException) -> str:
    """Return the last place in the user's code that an error passed, as " (mine.py, line 3)", or an empty string."""
    ours = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    # A library that the user's code called is where the error arose, but not where to mend it.
    frames = [f for f in frames if "site-packages" not in f.filename] or frames
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def escape_html(text: object) -> str:
    """Escape ``text`` for HTML, between tags or inside a quoted attribute.

    >>> escape_html("<b>'a'")
    '&lt;b&gt;&#x27;a&#x27;'
    """
    return html.escape(printable(text, lines=True))


def escape_label(text: object) -> str:
    r"""Escape ``text`` for the quotes of a Prometheus label.

    >>> print(escape_label('a"b'))
    a\"b
    """
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


class OneLine(logging.Filter):
    """Escape every message of a logger or handler and keep it on one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Format and escape the message; always return True."""
        record.msg, record.args = "\t".join(map(printable, record.getMessage().split("\t"))), ()
        return True


def shorten(text: str, limit: int = 300) -> str:
    r"""Return untrusted text on one line, escaped and cut to ``limit`` characters.

    >>> shorten("a\n  b"), shorten("abcdef", 5)
    ('a b', 'ab...')
    """
    text = printable(" ".join(text[: 10 * limit].split()))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a unique sort key for a text that puts client-10 after client-9.

    >>> sorted(["client-10", "client-9", "anna"], key=natural)
    ['anna', 'client-9', 'client-10']
    """
    # Numbers of any length compare by their length, then by their digits, without conversion.
    parts = [(part, part.lstrip("0")) for part in re.split("([0-9]+)", name) if part]
    return [(0, len(digits), digits) if part[0] in "0123456789" else (1, 0, part) for part, digits in parts], name


def join_names(names: Sequence[str]) -> str:
    """Return names in one line, only the first eight if there are more.

    >>> join_names([f"c{i}" for i in range(10)])
    'c0, c1, c2, c3, c4, c5, c6, c7 and 2 more'
    """
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more

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
from unicodedata import category


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return ``text`` with every character escaped that could control the program that shows it.

    These are control characters (including escape codes), marks that change the writing direction, line endings and
    lone surrogates: everything for which :meth:`str.isprintable` is false, except spaces.

    Parameters
    ----------
    lines : bool
        Whether to keep line breaks and tabs; by default the result is one line.

    >>> printable("a\nb", lines=True), printable("a\u202eb")
    ('a\nb', 'a\\u202eb')
    """
    found = str(text)
    if found.isprintable():
        return found
    allowed = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in allowed or category(c) == "Zs" else _escape(ord(c)) for c in found)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def short_repr(value: object, most: int = 300) -> str:
    """Return ``repr(value)``, shortened for a message; if ``repr`` fails, name the type instead.

    >>> short_repr([1, "a"])
    "[1, 'a']"
    """
    try:
        text = repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def error_text(error: BaseException) -> str:
    """Return the type of an error and its message; a foreign error may fail even at producing one.

    >>> error_text(ValueError("no")), error_text(ValueError())
    ('ValueError: no', 'ValueError')
    """
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:
        return kind
    return f"{kind}: {message}" if message else kind


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
    """Lets every message of a logger, or of a handler, through on one line and with nothing in it to obey."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Write the message out; always True."""
        record.msg, record.args = "\t".join(map(printable, record.getMessage().split("\t"))), ()
        return True


def shorten(text: str, limit: int = 300) -> str:
    r"""Return what somebody else wrote on one line and not longer than ``limit``.

    >>> shorten("a\n  b"), shorten("abcdef", 5)
    ('a b', 'ab...')
    """
    text = printable(" ".join(text[: 10 * limit].split()))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key for any text that puts client-10 after client-9; no two texts have the same.

    >>> sorted(["client-10", "client-9", "anna"], key=natural)
    ['anna', 'client-9', 'client-10']
    """
    # A number goes by its length and then its digits, which holds for any length and needs no conversion.
    parts = [(part, part.lstrip("0")) for part in re.split("([0-9]+)", name) if part]
    return [(0, len(digits), digits) if part[0] in "0123456789" else (1, 0, part) for part, digits in parts], name

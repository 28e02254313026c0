r"""Text of somebody else on its way to a terminal, a page, a log or a label: shown, never obeyed.

Clients choose their names, plug-ins write notes, errors quote replies. Whatever shows such text passes it through
:func:`printable` first, or through one of the others here, which do.

>>> printable("site\x1b[2J"), printable("ward\n7"), printable("tidy")
('site\\x1b[2J', 'ward\\x0a7', 'tidy')
"""

from __future__ import annotations

import html
import logging
from unicodedata import category


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return ``text`` with every character written out that would steer whatever shows it.

    These are control characters (escape codes among them), marks that turn the direction of writing, ends of lines,
    lone surrogates: all that :meth:`str.isprintable` denies, except spaces.

    Parameters
    ----------
    text : object
    lines : bool
        Whether it may have several lines and tabs; otherwise it stays on one line.

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
    """Return what ``repr`` says, shortened, for a message; of something whose ``repr`` fails, its type.

    >>> short_repr([1, "a"])
    "[1, 'a']"
    """
    try:
        text = repr(value)
    except Exception:
        return f"something of the type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def error_text(error: BaseException) -> str:
    """Return the type of an error and what it says; somebody's own may not even be able to say it.

    >>> error_text(ValueError("no")), error_text(ValueError())
    ('ValueError: no', 'ValueError')
    """
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:
        return kind
    return f"{kind}: {said}" if said else kind


def escape_html(text: object) -> str:
    """Return ``text`` as it stands in HTML, between tags or in a quoted attribute.

    >>> escape_html("<b>'a'")
    '&lt;b&gt;&#x27;a&#x27;'
    """
    return html.escape(printable(text, lines=True))


def escape_label(text: object) -> str:
    r"""Return ``text`` as it stands between the quotes of a Prometheus label.

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

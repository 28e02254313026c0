"""Colours and dashes: each selector gets its own, by its place among the selectors compared.

The slots are CSS custom properties ``--s0`` to ``--s11`` with a light and a dark value in ``templates/colours.css``,
used by charts, tables and legends. They come in three blocks of four: the first is drawn solid, the second dashed, the
third dotted. Nobody has to tell apart more than four colours: within a block, any two differ by a CIEDE2000 of 18 or
more, also to readers with deuteranopia or protanopia. Every colour has a contrast of 4.5 or more to both backgrounds of
its theme, enough for text.
"""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = 12
_SOLID = 4  # lines that differ only in colour; the next ones are dashed, then dotted
_DASHES = 3  # solid, dashed, dotted


def assign(labels: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Give each label a colour slot and a dash pattern by its place; the first 36 all differ.

    >>> assign(["uniform", "fedcor", "a", "b", "c"])
    {'uniform': (0, 0), 'fedcor': (1, 0), 'a': (2, 0), 'b': (3, 0), 'c': (4, 1)}
    """
    unique = dict.fromkeys(labels)
    return {label: (i % COLOURS, (i // _SOLID + i // COLOURS) % _DASHES) for i, label in enumerate(unique)}

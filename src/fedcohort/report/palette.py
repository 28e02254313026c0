"""Colours and dashes: each selector gets its own, by its place among the selectors compared.

The slots are CSS custom properties ``--s0`` to ``--s11`` with a light and a dark value, used by charts, tables and
legends. They come in three blocks of four: the first is drawn solid, the second dashed, the third dotted. Nobody has to
tell apart more than four colours: within a block, any two differ by a CIEDE2000 of 18 or more, also to readers with
deuteranopia or protanopia. Every colour has a contrast of 4.5 or more to both backgrounds of its theme,
enough for text.
"""

from __future__ import annotations

from collections.abc import Iterable

LIGHT = (
    "#666b75", "#3759de", "#b25702", "#164837", "#b2496e", "#6e0ffe",
    "#7b6a02", "#05346d", "#a25b57", "#156f8a", "#384700", "#2233c4",
)  # fmt: skip
DARK = (
    "#9aa1ad", "#5096ff", "#ea8625", "#cbfee4", "#ff198f", "#a99bfd",
    "#f4de69", "#4e929a", "#f36969", "#5fd1e8", "#e7fa97", "#a26be8",
)  # fmt: skip
SOLID = 4  # lines that differ only in colour; the next ones are dashed, then dotted
DASHES = 3  # solid, dashed, dotted


def assign(labels: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Give each label a colour slot and a dash pattern by its place; the first 36 all differ.

    >>> assign(["uniform", "fedcor", "a", "b", "c"])
    {'uniform': (0, 0), 'fedcor': (1, 0), 'a': (2, 0), 'b': (3, 0), 'c': (4, 1)}
    """
    unique = dict.fromkeys(labels)
    return {label: (i % len(LIGHT), (i // SOLID + i // len(LIGHT)) % DASHES) for i, label in enumerate(unique)}


def _variables(series: tuple[str, ...], base: dict[str, str]) -> str:
    names = {f"s{i}": colour for i, colour in enumerate(series)} | base
    return "".join(f"--{name}:{colour};" for name, colour in names.items())


def css() -> str:
    """Return the colours of both themes; the reader's system decides unless the page's button was used."""
    light = _variables(LIGHT, {
        "ink": "#1c2026", "muted": "#5d6570", "grid": "#e6e8ec", "surface": "#ffffff", "page": "#f6f7f9",
        "accent": "#2563c9", "good": "#11734f", "bad": "#b02a2a", "warn": "#8a5a00", "warn-soft": "#fdf3dd",
        "heat0": "#f1f4f8", "heat1": "#6fa3dd", "heat2": "#103a7a",
    })  # fmt: skip
    dark = _variables(DARK, {
        "ink": "#e8eaee", "muted": "#a3abb8", "grid": "#2d333d", "surface": "#1a1e25", "page": "#12151a",
        "accent": "#6aa3ff", "good": "#5fd3a3", "bad": "#ff9090", "warn": "#e3bd45", "warn-soft": "#2e2714",
        "heat0": "#222831", "heat1": "#2f6fc4", "heat2": "#cfe3ff",
    })  # fmt: skip
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}"
    )

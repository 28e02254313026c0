"""Colours: one slot per label, by position, the same in every figure of a report.

The slots are CSS custom properties ``--s0`` to ``--s11`` with a light and a dark value; charts, tables and legends
all use them. Slot 0 is grey and belongs to the baseline everybody compares with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fedcohort.selectors import Uniform

LIGHT = (
    "#767c86", "#2563c9", "#c7620a", "#128a5f", "#b3347f", "#6d4bc4",
    "#b58900", "#c93636", "#0e87a3", "#7d8f1a", "#8c5a3c", "#4b5bd6",
)  # fmt: skip
DARK = (
    "#9aa1ad", "#6aa3ff", "#f0954a", "#4cc796", "#ec7fbd", "#a78bfa",
    "#e3bd45", "#f47c7c", "#4fc3dc", "#bccb57", "#c99a7b", "#8e9bff",
)  # fmt: skip
DASHES = 3  # solid, dashed, dotted


def assign(labels: Iterable[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Give each (label, selector) a colour slot and a dash pattern, by position; uniform selection has slot 0.

    >>> assign([("fedcor", "fedcor"), ("uniform", "uniform"), ("mine", "mine")])
    {'fedcor': (1, 0), 'uniform': (0, 0), 'mine': (2, 0)}
    >>> assign([("fedcor d=5", "fedcor"), ("fedcor d=15", "fedcor")])
    {'fedcor d=5': (1, 0), 'fedcor d=15': (2, 0)}
    """
    wanted = dict(labels)
    baseline = next((label for label, selector in wanted.items() if selector == Uniform.name), None)
    free = itertools.cycle((slot, dash) for dash in range(DASHES) for slot in range(1, len(LIGHT)))
    return {label: (0, 0) if label == baseline else next(free) for label in wanted}


def _variables(series: tuple[str, ...], base: dict[str, str]) -> str:
    names = {f"s{i}": colour for i, colour in enumerate(series)} | base
    return "".join(f"--{name}:{colour};" for name, colour in names.items())


def css() -> str:
    """Return the colour definitions of both themes; the reader's system decides unless the page was switched."""
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

"""A terminal to which untrusted names can be printed safely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedcohort.core.text import printable


class Terminal(Console):
    """A console that prints text literally: markup and control codes in a client's name have no effect."""

    def __init__(self, **options: Any) -> None:
        # Otherwise rich would interpret [red] and :fire: in a name.
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments that contain no control codes except rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)


def err(quiet: bool = False) -> Terminal:
    """Return the console for messages and progress, which writes to stderr unless ``quiet``."""
    return Terminal(stderr=True, quiet=quiet)


def say(console: Console, text: str, style: str = "", *, lead: str = "", lead_style: str = "bold") -> None:
    """Print one line of untrusted text, after an optional ``lead`` in its own style."""
    console.print(Text.assemble((printable(lead), lead_style), (printable(text), style)))

"""A terminal that is safe to write other people's names to, and one way to send it messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedcohort.core.text import printable


class Terminal(Console):
    """A console that prints text literally: a client's name can hold neither markup nor control codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            markup=False, emoji=False, highlight=False, **options
        )  # rich would read [red] and :fire: in a name

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments whose only control codes are those of rich."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)


def err(quiet: bool = False) -> Terminal:
    """Return the console for messages and progress: stderr, or nothing."""
    return Terminal(stderr=True, quiet=quiet)


def say(console: Console, text: str, style: str = "", *, lead: str = "", lead_style: str = "bold") -> None:
    """Print one line of untrusted text, after an optional ``lead`` in its own style."""
    console.print(Text.assemble((printable(lead), lead_style), (printable(text), style)))

"""Output of all commands: data on stdout, messages on stderr, JSON for machines, errors with a hint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcohort.core.errors import FedcohortError
from fedcohort.core.terminal import Terminal, err
from fedcohort.core.text import printable
from fedcohort.simulate.leaderboard.formats import Table as ResultTable
from fedcohort.simulate.leaderboard.formats import to_text


class Format(StrEnum):
    """How to print data."""

    TABLE = "table"
    JSON = "json"


def out() -> Terminal:
    """Return the console for data; it wraps lines on a terminal, but not in a file or a pipe.

    Each call returns a new console, so that a redirected stdout is respected.
    """
    return Terminal(soft_wrap=not sys.stdout.isatty())  # a line of a table in a pipe is one line for grep


def print_json(data: Any) -> None:
    """Print data as JSON on stdout; NaN becomes null, because JSON has no NaN."""
    # NumPy's arrays and numbers both have tolist; anything else is a mistake of ours.
    sys.stdout.write(json.dumps(_without_nan(data), indent=2, default=lambda value: value.tolist()) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    """Return a rich table; columns whose name starts with '#' are numbers, aligned to the right."""
    result = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        number = column.startswith("#")
        result.add_column(column.removeprefix("#"), justify="right" if number else "left", overflow="fold")
    for row in rows:
        result.add_row(*("" if cell is None else printable(cell) for cell in row))
    return result


@contextmanager
def rounds_bar(console: Console, word: str) -> Iterator[tuple[Callable[[int], None], Callable[[Any, Any], None]]]:
    """Show a progress bar; yield a function that sets the number of rounds, and one to call after each round."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(word), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(word, total=None)
        yield lambda total: bar.update(task, total=total), lambda run, row: bar.advance(task)


def print_tables(tables: Sequence[ResultTable], console: Console) -> None:
    """Print tables of results at the console's width; a note that consecutive tables share is printed once."""
    for i, result in enumerate(tables):
        repeated = i + 1 < len(tables) and tables[i + 1].note == result.note
        # soft_wrap: the table has been fitted to the width, and rich would break its lines again.
        text = to_text(replace(result, note="") if repeated else result, console.width)
        console.print(Text(text + "\n" * (i + 1 < len(tables))), soft_wrap=True)


def print_error(error: FedcohortError) -> None:
    """Print an error and its hint on stderr."""
    console = err()
    console.print(Text.assemble(("error:", "bold red"), " ", printable(error.message, lines=True)))
    if error.hint:
        console.print(Text.assemble(("hint:", "bold"), " ", printable(error.hint, lines=True)))

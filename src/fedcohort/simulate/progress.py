"""Progress of an experiment: drawn again and again in a notebook or a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedcohort.core.terminal import err, say
from fedcohort.core.text import escape_html, printable
from fedcohort.simulate.metrics import Metric
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo

_DRAW_SECONDS = 0.5  # between two drawings in a notebook
_LINE_SECONDS = 10.0  # between two lines where nothing can be drawn again
_MAX_ROWS = 12  # selectors in the live table of a terminal


class Progress(Listener):
    """Shows how far an experiment is: rounds, rounds per second, time left, and where each selector stands.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw outside a notebook; stderr by default. A quiet console shows nothing, in a notebook too.
    metric : Metric, optional
        What the models are judged by; accuracy by default.
    """

    def __init__(self, console: Console | None = None, metric: Metric | None = None) -> None:
        self._console = console or err()
        self._metric = metric or Metric()
        self._latest: dict[str, tuple[RunInfo, float | None]] = {}
        self._done = self._first = self._planned = self._rounds_per_run = 0
        self._began = self._due = 0.0
        self._state = "running"
        self._live: Live | None = None
        self._notebook: Any = None

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Draw for the first time."""
        self._latest = {run.id: (run, None) for run in runs}
        self._done = self._first = rounds_done
        self._planned, self._rounds_per_run = rounds_total, rounds_total // max(len(runs), 1)
        self._began = time.monotonic()
        self._state = "running"
        self._due = self._began + _LINE_SECONDS
        if self._console.quiet:
            return
        self._notebook = _notebook_display()
        if self._notebook is not None:
            self._notebook.display(self)
            self._due = self._began + _DRAW_SECONDS
        elif self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Count the round; draw when it is time."""
        self._done += 1
        value = row["accuracy" if self._metric.is_accuracy else "metric"]
        # A round that was not evaluated keeps the last score.
        self._latest[run.id] = (run, self._latest[run.id][1] if value is None else value)
        if self._live is None and time.monotonic() >= self._due:  # a terminal draws by itself
            if self._notebook is not None:
                self._notebook.update(self)
            else:
                say(self._console, str(self))
            self._due = time.monotonic() + (_LINE_SECONDS if self._notebook is None else _DRAW_SECONDS)

    @property
    def _total(self) -> int:
        """Rounds that will be played: without those of runs that ended early, or the bar would never fill."""
        ended = (run for run, _ in self._latest.values() if run.state in ("stopped", "diverged", "failed"))
        return self._planned - sum(max(self._rounds_per_run - run.rounds_done, 0) for run in ended)

    def on_end(self, state: str) -> None:
        """Draw for the last time in a notebook; clear the drawing in a terminal."""
        self._state = state
        if self._notebook is not None:
            self._notebook.update(self)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _rows(self) -> list[tuple[str, int, str, str]]:
        """Return name, round of the slowest run, mean score and special states of each selector and setting."""
        groups: dict[str, list[tuple[RunInfo, float | None]]] = {}
        # Runs that differ only in their seed share a row.
        for run, value in self._latest.values():
            groups.setdefault(f"{run.label} {run.setting.get('name', '')}".strip(), []).append((run, value))
        rows = []
        for name, members in groups.items():
            known = [value for _, value in members if value is not None]
            mean = self._metric.value(self._metric.score(sum(known) / len(known))) if known else ""
            # Running is what everybody expects, so it is not said.
            states = ", ".join(sorted({run.state for run, _ in members} - {"running"}))
            rows.append((name, min(run.rounds_done for run, _ in members), mean, states))
        return rows

    def __str__(self) -> str:
        """Say in one line how far it is."""
        # Only rounds of this call count: a resumed experiment had its first rounds in another time.
        pace = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
        left = f", about {(self._total - self._done) / pace:.0f} s left" if self._state == "running" and pace else ""
        return f"{self._state}: {self._done:,} of {self._total:,} rounds, {pace:.3g} rounds/s{left}"

    def __rich__(self) -> Group:
        """Draw the table and the bar for a terminal."""
        table = Table(header_style="bold")
        for heading, justify in (("selector", "left"), ("round", "right"), (self._metric.name, "right"), ("", "left")):
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        rows = self._rows()
        for name, at, score, states in rows[:_MAX_ROWS]:
            table.add_row(printable(name), str(at), score, states)
        if len(rows) > _MAX_ROWS:
            table.add_row(f"and {len(rows) - _MAX_ROWS} more")
        return Group(table, ProgressBar(total=max(self._total, 1), completed=self._done), Text(str(self)))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape_html(name)}</td>"
            f"<td>{at}</td><td>{score}</td><td>{states}</td></tr>"
            for name, at, score, states in self._rows()
        )
        return (
            f"<div><progress value='{self._done}' max='{max(self._total, 1)}' style='width:24em' "
            f"aria-label='finished rounds'></progress> {escape_html(str(self))}<table><thead><tr>"
            f"<th style='text-align:left'>selector</th><th>round</th><th>{escape_html(self._metric.name)}</th><th></th>"
            f"</tr></thead><tbody>{rows}</tbody></table></div>"
        )


def _notebook_display() -> Any:
    """Return a place in the notebook to draw on repeatedly, or None outside a notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import DisplayHandle
    except ImportError:
        return None
    shell = get_ipython()
    return DisplayHandle() if shell is not None and hasattr(shell, "kernel") else None  # type: ignore[no-untyped-call]

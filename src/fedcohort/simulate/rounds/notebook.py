"""Progress in a notebook: a bar, the pace, and where each selector stands, in one output that is drawn again.

>>> from fedcohort.simulate.rounds.notebook import NotebookProgress
>>> from fedcohort.simulate.rounds.runner import run_experiment
>>> run_experiment("experiment.toml", "runs/mine", listeners=[NotebookProgress()])  # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedcohort.core.text import escape_html
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo

_SECONDS = 0.5  # between two drawings
_LINE_SECONDS = 10.0  # between two lines where there is no notebook


class NotebookProgress(Listener):
    """Shows an experiment while it goes on, in Jupyter and whatever else understands IPython's display.

    Outside a notebook it prints a line every ten seconds. It needs nothing that a notebook does not bring.
    """

    def __init__(self) -> None:
        self._display: Any = None
        self._latest: dict[str, tuple[RunInfo, float | None]] = {}
        self._done = self._first = self._total = self._per_run = 0
        self._began = self._due = 0.0
        self._state = "running"

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Draw for the first time."""
        self._latest = {run.id: (run, None) for run in runs}
        self._done = self._first = rounds_done
        self._total, self._per_run = rounds_total, rounds_total // max(len(runs), 1)
        self._began = time.monotonic()
        self._state = "running"
        self._display = _handle()
        self._due = self._began + (_LINE_SECONDS if self._display is None else _SECONDS)
        if self._display is not None:
            self._display.display(self)

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take note; draw where it is time."""
        self._done += 1
        accuracy = row["accuracy"]
        self._latest[run.id] = (run, self._latest[run.id][1] if accuracy is None else accuracy)
        if run.state in ("stopped", "diverged", "failed"):
            self._total -= max(self._per_run - run.rounds_done, 0)  # so that the bar still ends at its end
        now = time.monotonic()
        if now >= self._due:
            self._show()
            self._due = time.monotonic() + (_LINE_SECONDS if self._display is None else _SECONDS)

    def on_end(self, state: str) -> None:
        """Draw for the last time."""
        self._state = state
        self._show()

    def _show(self) -> None:
        if self._display is None:
            print(self, flush=True)
        else:
            self._display.update(self)

    def _rows(self) -> list[tuple[str, int, str]]:
        """Return label and setting, the round of the slowest run, and the mean accuracy known last."""
        groups: dict[str, list[tuple[RunInfo, float | None]]] = {}
        for run, accuracy in self._latest.values():
            groups.setdefault(f"{run.label} {run.setting.get('name', '')}".strip(), []).append((run, accuracy))
        rows = []
        for name, members in groups.items():
            known = [accuracy for _, accuracy in members if accuracy is not None]
            mean = f"{sum(known) / len(known):.1%}" if known else ""
            rows.append((name, min(run.rounds_done for run, _ in members), mean))
        return rows

    def __str__(self) -> str:
        """Say where it stands in one line."""
        pace = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
        left = (self._total - self._done) / pace if pace else 0.0
        rest = f", about {left:.0f} s left" if self._state == "running" and pace else ""
        return f"{self._state}: {self._done:,} of {self._total:,} rounds, {pace:.3g} rounds/s{rest}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape_html(name)}</td><td>{at}</td><td>{accuracy}</td></tr>"
            for name, at, accuracy in self._rows()
        )
        return (
            f"<div><progress value='{self._done}' max='{max(self._total, 1)}' style='width:24em' "
            f"aria-label='rounds made'></progress> {escape_html(str(self))}"
            "<table><thead><tr><th style='text-align:left'>selector</th><th>round</th><th>accuracy</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )


def _handle() -> Any:
    """Return something to draw on again and again, or None where there is no notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import DisplayHandle
    except ImportError:
        return None
    shell = get_ipython()
    return DisplayHandle() if shell is not None and hasattr(shell, "kernel") else None  # type: ignore[no-untyped-call]

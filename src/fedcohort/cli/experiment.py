"""What ``run`` and ``compare`` share: live progress, Ctrl-C, the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedcohort.cli.output import Format, err, out, print_json, print_tables, say, table
from fedcohort.core.errors import FedcohortError, MissingExtraError
from fedcohort.session.coverage import sentences
from fedcohort.simulate.leaderboard import leaderboard_table, leaderboards
from fedcohort.simulate.metrics import Metric
from fedcohort.simulate.processes.interrupts import graceful
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo, load

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.rounds.runner import Simulation

DIVERGED = 3
INTERRUPTED = 130
_SHOWN = 12  # rows of the live table
_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


class LiveProgress(Listener):
    """Shows an experiment while it goes on: a bar, rounds per second, time left, and a table of its selectors."""

    def __init__(self, console: Console, metric: Metric | None = None) -> None:
        self._console = console
        self._metric = metric or Metric()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]} rounds/s"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._bar.add_task("rounds", total=None, pace="-")
        self._done = self._first = 0
        self._total = self._per_run = 0
        self._began = time.monotonic()
        self._line_due = self._began + _LINE_SECONDS
        self._latest: dict[str, tuple[RunInfo, float | None]] = {}
        self._live: Live | None = None

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Begin to draw."""
        self._latest = {run.id: (run, None) for run in runs}
        self._done = self._first = rounds_done
        self._total = rounds_total
        self._per_run = rounds_total // max(len(runs), 1)
        self._began = time.monotonic()
        self._bar.update(self._task, total=rounds_total, completed=rounds_done)
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take note; drawing happens a few times a second."""
        self._done += 1
        value = row["accuracy" if self._metric.is_accuracy else "metric"]
        if value is None:
            value = self._latest[run.id][1]
        self._latest[run.id] = (run, value)
        if run.state in ("stopped", "diverged", "failed"):
            self._total -= max(self._per_run - run.rounds_done, 0)  # so that the bar still ends at its end
        if self._live is None and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + _LINE_SECONDS
            say(self._console, f"{self._done} of {self._total} rounds, {self._pace():.3g} rounds/s")

    def on_end(self, state: str) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _pace(self) -> float:
        return (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)

    def __rich__(self) -> Group:
        """Draw the table and the bar as they are now."""
        self._bar.update(self._task, completed=self._done, total=self._total, pace=f"{self._pace():.3g}")
        return Group(self._table(), self._bar)

    def _table(self) -> Table:
        rows: dict[tuple[str, str], list[tuple[RunInfo, float | None]]] = {}
        for run, value in self._latest.values():
            rows.setdefault((run.label, str(run.setting.get("name", ""))), []).append((run, value))
        shown: list[tuple[Any, ...]] = []
        for (label, setting), members in list(rows.items())[:_SHOWN]:
            known = [value for _, value in members if value is not None]
            states = {run.state for run, _ in members}
            shown.append(
                (
                    f"{label} {setting}".strip(),
                    min(run.rounds_done for run, _ in members),
                    self._metric.value(self._metric.score(sum(known) / len(known))) if known else "",
                    ", ".join(sorted(states - {"running"})),
                )
            )
        if len(rows) > _SHOWN:
            shown.append((f"and {len(rows) - _SHOWN} more", "", "", ""))
        return table(["selector", "#round", f"#{self._metric.name}", ""], shown)


def launch(
    experiment: Experiment | None,
    *,
    resume: Path | None = None,
    out_dir: Path | None,
    device: str | None,
    processes: int | None = None,
    engine: str | None,
    address: str | None,
    allow_other_engine: bool = False,
    track: Sequence[str] | None,
    quiet: bool,
    format: Format,
) -> None:
    """Run a new experiment, or continue the one in ``resume``, as the options of the command line say.

    Everything is checked before the first round.
    """
    simulate = runner()
    if resume is not None:
        simulation: Simulation = simulate.Simulation.open(
            resume,
            device=device,
            processes=processes,
            engine=engine,
            address=address,
            allow_other_engine=allow_other_engine,
        )
    else:
        assert experiment is not None
        for text in experiment.notes:
            say(err(quiet), f"note: {text}")
        simulation = simulate.Simulation(
            experiment,
            out_dir or simulate.default_out(experiment.name),
            device=device,
            processes=processes,
            address=address,
            command=typed(),
        )
    execute(simulation, quiet=quiet, format=format, track=track or ())


def runner() -> Any:
    """Return the simulator's module, or say which extra brings what it needs."""
    try:
        from fedcohort.simulate.rounds import runner
    except ImportError as error:
        if isinstance(error, FedcohortError) or (error.name or "").startswith("fedcohort"):
            raise
        raise MissingExtraError(
            f"The simulator needs {error.name}, which is not installed.", hint="pip install 'fedcohort[sim]'"
        ) from error
    return runner


def typed() -> str:
    """Return the command line, for the record."""
    return " ".join(["fedcohort", *sys.argv[1:]])


def execute(simulation: Simulation, *, quiet: bool, format: Format, track: Sequence[str]) -> None:
    """Run an experiment to its end, print the table, leave with the right exit code."""
    console = err(quiet)
    if track:
        from fedcohort.report.trackers import tracker

        simulation.listeners += [tracker(name, simulation.out) for name in track]
    simulation.listeners.append(LiveProgress(console, Metric.of(simulation.experiment.table.get("task"))))
    for dataset in simulation.prepared.datasets.values():
        for text in dataset.remarks:
            say(console, f"note: {text}")
    runs, groups = len(simulation.experiment.plans), len(simulation.prepared.groups)
    say(
        console,
        f"{runs} run{'s' * (runs != 1)} in {groups} lock-step group{'s' * (groups != 1)}, {simulation.total} rounds in "
        f"all; results in {simulation.out}",
    )
    began = time.monotonic()
    with graceful(simulation, partial(say, console)):
        try:
            state = simulation.run()
        except KeyboardInterrupt:
            state = "interrupted"
    if state == "interrupted":
        say(console, f"interrupted; continue with: fedcohort run --resume {simulation.out}")
        raise typer.Exit(INTERRUPTED)
    results = load(simulation.out)
    boards = leaderboards(results)
    if format is Format.JSON:
        shown = [board.to_dict() for board in boards]
        print_json({"out": str(simulation.out), "state": state, "leaderboards": shown})
    else:
        tables = [leaderboard_table(board) for board in boards]
        print_tables(tables, out())
    say(console, f"done in {time.monotonic() - began:.1f} s; results in {simulation.out}")
    for text in sentences((_titled(run), results.coverage(run)) for run in results.runs):
        say(console, f"warning: {text}", style="yellow")
    lost = [run for run in results.runs if run.state in ("diverged", "failed")]
    if lost:
        for run in lost[:5]:
            say(console, f"{run.id} {run.state}: {run.reason}", style="red")
        if len(lost) > 5:
            say(console, f"and {len(lost) - 5} more", style="red")
        raise typer.Exit(DIVERGED)


def _titled(run: RunInfo) -> str:
    """Return a run's selector, and its setting where there is one."""
    setting = run.setting.get("name")
    return f"{run.label or run.selector} in {setting}" if setting else run.label or run.selector

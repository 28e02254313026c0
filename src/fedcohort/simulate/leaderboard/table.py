"""The leaderboard as a table, the same everywhere, and as plain values for programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.simulate.leaderboard.conclusion import conclusion, interval, points
from fedcohort.simulate.leaderboard.formats import Cell, Table, notebook, to_text
from fedcohort.simulate.leaderboard.rows import FAIRNESS, Arrivals, LeaderRow, PairedComparison
from fedcohort.simulate.leaderboard.words import duration, number
from fedcohort.simulate.metrics import Metric, Spread

FEW = ("terminal", "gain", "p", "time", "worst-group")
"""The columns that are shown unless others are named; without simulated time, rounds take its place."""
COLUMNS = (
    "terminal", "gain", "p", "wins", "time", "rounds", "speed-up", "best", "stopped", "recovered", "worst-group",
    "worst-tenth", "macro-f1", "worst-recall", "spread", "jain", "absence", "qcid", "mb", "query-bytes", "questions",
    "selection",
)  # fmt: skip
"""All columns, in the order in which they are shown."""
_NONE = Cell("–")
_MAX_PAIRS = 190  # of 20 selectors; with more, name a baseline
_GROUP_COLUMNS = (
    ("worst_group", "Worst group", "the lowest accuracy of any group"),
    ("worst_tenth", "Worst tenth", "mean accuracy of the worst tenth of clients"),
    ("macro_f1", "Macro-F1", "mean F1 score of the classes"),
    ("worst_recall", "Worst class", "the lowest recall of any class"),
)
_TURN_COLUMNS = (
    ("spread", "client_spread", "Spread", "{:.3f}", "Spread: standard deviation over clients."),
    ("jain", "jain", "Jain", "{:.2f}", "Jain: how evenly clients took part, 1 is even."),
    ("absence", "longest_absence", "Longest absence", "{:.0f}", "Longest absence: in rounds."),
)


@dataclass(frozen=True)
class Leaderboard:
    """The results of one setting, best terminal accuracy first; selectors that lost a run come after all others.

    Attributes
    ----------
    targets : tuple of float
        Ascending; speed-ups refer to the highest.
    target_source : str
        Where the highest target comes from.
    window : int
        Number of last rounds that terminal accuracy averages in the longest run.
    window_source : str
        Why it is this number.
    so_far : str
        The beginning of every sentence about runs that have not ended, such as "So far (round 62 of 2,000): "; empty
        once all have.
    metric : Metric
        "best" and "terminal" are its scores.
    """

    setting: str
    targets: tuple[float, ...]
    target_source: str
    window: int
    window_source: str
    baseline: str
    reference: str | None
    rows: tuple[LeaderRow, ...]
    so_far: str
    metric: Metric = Metric()

    @property
    def target(self) -> float:
        """The accuracy that speed-ups refer to; NaN if the baseline was never evaluated."""
        return self.targets[-1]

    @property
    def base(self) -> LeaderRow:
        """The baseline's row."""
        return next(row for row in self.rows if row.baseline)

    @property
    def finished(self) -> bool:
        """Whether every run has ended."""
        return not self.so_far

    @property
    def timed(self) -> bool:
        """Whether time was simulated; it then matters more than rounds."""
        return any(row.clock.mean > 0 for row in self.rows)

    @property
    def conclusion(self) -> str:
        """Which differences to the baseline are established, and what would settle the closest other one."""
        return conclusion(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values; unknown ones are None."""

        def number_or_none(value: float) -> float | None:
            return value if math.isfinite(value) else None

        def arrivals(value: Arrivals) -> dict[str, Any]:
            return {"median": number_or_none(value.median), "seeds": value.count}

        def spread(value: Spread) -> dict[str, Any]:
            return {"mean": number_or_none(value.mean), "std": number_or_none(value.std), "seeds": value.count}

        def natural(score: float) -> float | None:
            return number_or_none(self.metric.natural(score))

        def scores(value: Spread) -> dict[str, Any]:
            return {**spread(value), "mean": natural(value.mean)}

        def paired(test: PairedComparison) -> dict[str, Any]:
            return {
                "seeds": test.seeds,
                "difference": natural(test.difference),
                "half_interval": number_or_none(test.half),
                "spread": number_or_none(test.spread),
                "wins": test.wins,
                "p": number_or_none(test.p),
            }

        return {
            "setting": self.setting,
            "baseline": self.baseline,
            "reference": self.reference,
            "metric": {"name": self.metric.name, "higher_is_better": self.metric.higher},
            "targets": [natural(target) for target in self.targets],
            "target_source": self.target_source,
            "terminal_rounds": self.window,
            "terminal_source": self.window_source,
            "finished": self.finished,
            "conclusion": self.conclusion,
            "rows": [
                {
                    "label": row.label,
                    "selector": row.selector,
                    "runs": row.runs,
                    "diverged": row.diverged,
                    "failed": row.failed,
                    "targets": [
                        {
                            "target": natural(item.target),
                            "rounds": arrivals(item.rounds),
                            "simulated_seconds": arrivals(item.seconds),
                            "speed_up": item.speed
                            and {
                                "of": "time" if self.timed else "rounds",
                                "at_least": number_or_none(item.speed.least),
                                "at_most": number_or_none(item.speed.greatest),
                                "interval": [number_or_none(item.speed.low), number_or_none(item.speed.high)],
                            },
                        }
                        for item in row.to_target
                    ],
                    "best": scores(row.best),
                    "early_stop": scores(row.early_stop),
                    "terminal": scores(row.terminal),
                    "made_good": number_or_none(row.improvement),
                    "qcid": spread(row.qcid),
                    "megabytes": spread(row.megabytes),
                    "query_share_of_bytes": number_or_none(row.query_share),
                    "simulated_seconds": spread(row.clock),
                    "fairness": {name: spread(row.fair(name)) for name in FAIRNESS},
                    "paired": row.paired and paired(row.paired),
                    "paired_worst_group": row.paired_group and row.paired_group.seeds and paired(row.paired_group),
                    "seeds": [
                        {
                            "seed": seed.seed,
                            "state": seed.state,
                            "rounds": seed.rounds,
                            "rounds_to": list(seed.rounds_to),
                            "best": natural(seed.best),
                            "terminal": natural(seed.terminal),
                        }
                        for seed in row.seeds
                    ],
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        return to_text(leaderboard_table(self))

    def _repr_html_(self) -> str:
        return notebook([leaderboard_table(self)])


def leaderboard_table(
    board: Leaderboard, line_styles: Mapping[str, tuple[int, int]] | None = None, *, columns: Sequence[str] = FEW
) -> Table:
    """Return the leaderboard as a table, with the conclusion above it.

    Parameters
    ----------
    line_styles : mapping of label to (colour, dash), optional
        How each selector's line is drawn; shown next to its name.
    columns : sequence of str
        Out of :data:`COLUMNS`; those that nothing is known about are left out.
    """
    check_columns(columns)
    most = max(row.runs for row in board.rows)
    labels = []
    for row in board.rows:
        notes = ["baseline"] if row.baseline else []
        # A row with fewer seeds than others says so: its mean is over other federations.
        notes += [f"{row.runs} seed{'s' if row.runs != 1 else ''}"] if row.runs != most else []
        notes += [f"{row.diverged} diverged"] if row.diverged else []
        notes += [f"{row.failed} failed"] if row.failed else []
        color, dash = (line_styles or {}).get(row.label, (None, 0))
        labels.append(Cell(row.label, ", ".join(notes), color=color, dash=dash))
    # Without simulated time a column of seconds would be empty, and rounds are the only answer to "how soon?".
    if "time" in columns and not board.timed and "rounds" not in columns:
        columns = ["rounds" if name == "time" else name for name in columns]
    shown = [column for column in _columns(board) if column.name in columns]
    return Table(
        name="leaderboard",
        title="Leaderboard" if board.setting == "all runs" else f"Leaderboard: {board.setting}",
        columns=("Selector", *(column.heading for column in shown)),
        rows=tuple(zip(labels, *(column.cells for column in shown), strict=True)),
        note=" ".join([*_general_notes(board), *dict.fromkeys(c.about for c in shown if c.about)]),
        lead=board.conclusion,
    )


def pairs_table(board: Leaderboard) -> Table | None:
    """Return every pair of selectors compared seed by seed; None if the leaderboard has all or nothing is known."""
    # By seed, because only the same seed means the same federation.
    ends = {row.label: {seed.seed: seed.terminal for seed in row.seeds} for row in board.rows}
    pairs = list(itertools.combinations(ends, 2))
    # With two selectors the leaderboard is this table; with very many, the correction leaves nothing to see.
    if not 1 < len(pairs) <= _MAX_PAIRS:
        return None
    tests = PairedComparison.corrected(
        [PairedComparison.of([end - ends[b].get(seed, math.nan) for seed, end in ends[a].items()]) for a, b in pairs]
    )
    if all(test.seeds < 2 for test in tests):
        return None
    unit = ", points" if board.metric.share else ""
    return Table(
        name="pairs",
        title="Any two selectors",
        columns=("First", "Second", f"First minus second{unit}", "p"),
        rows=tuple((Cell(a), Cell(b), _change(board, t), _p(t)) for (a, b), t in zip(pairs, tests, strict=True)),
        note=f"Terminal {board.metric.name}. [ ]: 95% interval for one comparison. p: paired t-test, Holm-corrected "
        f"over all {len(pairs)} pairs, and so larger than in the leaderboard, which only compares with "
        f"{board.baseline}.",
        wrap=frozenset({1}),
    )


def check_columns(columns: Sequence[str]) -> Sequence[str]:
    """Return names of columns, or raise :class:`UnknownNameError`."""
    for name in columns:
        if name not in COLUMNS:
            raise UnknownNameError(
                f"There is no column {name!r}. Known: {', '.join(COLUMNS)}.", hint=suggest(name, COLUMNS)
            )
    return columns


class _Column(NamedTuple):
    """A column: its name for the command line, its heading, a cell for each selector, and how it is computed."""

    name: str
    heading: str
    cells: Sequence[Cell]
    about: str = ""


def _columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield every column that something is known about, in the order in which they are shown."""
    rows, metric = board.rows, board.metric

    def scores(name: str, heading: str, values: Sequence[Spread], about: str = "") -> _Column:
        cells = [
            Cell(metric.value(value.mean), metric.spread(value.std) if value.count > 1 else "")
            if value.count
            else _NONE
            for value in values
        ]
        return _Column(name, heading, _mark_best(rows, cells, [value.mean for value in values], max), about)

    def plain(name: str, heading: str, values: Sequence[float], form: str, about: str = "") -> _Column:
        return _Column(name, heading, [_NONE if math.isnan(v) else Cell(form.format(v)) for v in values], about)

    window = "the last round" if board.window == 1 else f"the last {board.window} rounds"
    about = f"Terminal: mean {metric.name} of {window} ({board.window_source})."
    if len({seed.window for row in rows for seed in row.seeds}) > 1:
        about += " For shorter runs it is the last fifth."
    yield scores("terminal", "Terminal", [row.terminal for row in rows], about)
    yield from _gain_columns(board)
    yield from _target_columns(board)
    yield scores("best", "Best", [row.best for row in rows])
    if any(row.early_stop != row.best for row in rows):
        yield scores("stopped", "Where it stopped", [row.early_stop for row in rows])
    if board.reference is not None:
        heading = f"Recovered of the gap to {board.reference}"
        yield plain("recovered", heading, [row.improvement for row in rows], "{:.0%}")
    for name, heading, meaning in _GROUP_COLUMNS:
        found = [row.fair(name) for row in rows]
        if any(value.count for value in found):
            yield scores(name.replace("_", "-"), heading, found, f"{heading}: {meaning}.")
    for key, name, heading, form, meaning in _TURN_COLUMNS:
        found = [row.fair(name) for row in rows]
        if any(value.count for value in found):
            yield plain(key, heading, [value.mean for value in found], form, meaning)
    if any(row.qcid.count for row in rows):
        cells = [Cell(number(row.qcid.mean)) if row.qcid.count else _NONE for row in rows]
        best = _mark_best(rows, cells, [row.qcid.mean for row in rows], min)
        yield _Column("qcid", "Mean QCID", best, "QCID: class imbalance of the cohorts, 0 is balanced.")
    if any(row.megabytes.count for row in rows):
        yield _Column("mb", "MB", [Cell(megabytes(row.megabytes.mean)) for row in rows])
    spent = [row.fair("selection_seconds") for row in rows]
    if any(value.count for value in spent):
        about = "Selection: real time of a round's question, choice and learning, with their record."
        yield plain("selection", "Selection, ms", [1000 * value.mean for value in spent], "{:.2f}", about)
    if any(row.query_share > 0 for row in rows):
        yield plain("query-bytes", "Query bytes", [row.query_share for row in rows], "{:.0%}")
        yield plain("questions", "Questions", [row.fair("asked").mean for row in rows], "{:,.0f}")


def _gain_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield how the models compare with the baseline's, and how certain that is."""
    tests = [row.paired for row in board.rows]
    most = max((test.seeds for test in tests if test is not None), default=-1)
    if most < 0:
        return
    word = "Gain over" if board.metric.higher else "Difference to"
    heading = f"{word} {board.baseline}{', points' if board.metric.share else ''}"
    about = "[ ]: 95% interval over the seeds that both ran, for one comparison." if most > 1 else ""
    cells = []
    for test in tests:
        few = "" if test is None or test.seeds == most else f"{test.seeds} seed{'s' * (test.seeds > 1)}"
        cells.append(_NONE if test is None or not test.seeds else _change(board, test, few))
    yield _Column("gain", heading, cells, about)
    if most > 1:
        yield _Column("p", "p", [_p(test) for test in tests], "p: paired t-test, Holm-corrected over the rows.")
    yield _Column("wins", "Wins", [_NONE if t is None else Cell(f"{t.wins} of {t.seeds}") for t in tests])


def _change(board: Leaderboard, test: PairedComparison, note: str = "") -> Cell:
    return Cell(
        points(board, board.metric.natural(test.difference), "+") if test.seeds else "–",
        f"{interval(board, test)} {note}".strip(),
    )


def _p(test: PairedComparison | None) -> Cell:
    if test is None or math.isnan(test.p):
        return _NONE
    return Cell("<0.001" if test.p < 0.001 else f"{test.p:.3f}")


def _target_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield how soon each target was reached, the highest first, and how many times as fast as by the baseline."""
    rows = board.rows
    about = f"Target {board.metric.level(board.target)} ({board.target_source}); only evaluated rounds count"
    if max(row.runs for row in rows) > 1:
        about += "; median over seeds, those that never arrive counted as never"
    if any(0 < row.main.rounds.count < row.runs for row in rows):
        about += "; 1/3: one seed of three arrives"
    about += "."
    # The highest target first: it is the one that the speed-up and the conclusion are about.
    for i in reversed(range(len(board.targets))):
        level = board.metric.level(board.targets[i])
        if board.timed:
            times = [row.to_target[i].seconds for row in rows]
            yield _Column("time", f"Time to {level}", _arrivals(rows, times, duration), about)
        rounds = [row.to_target[i].rounds for row in rows]
        yield _Column("rounds", f"Rounds to {level}", _arrivals(rows, rounds, number), about)
    speeds = [row.main.speed for row in rows]
    cells = [_NONE if speed is None else Cell(str(speed), speed.interval) for speed in speeds]
    unit = "simulated time" if board.timed else "rounds"
    yield _Column(
        "speed-up", f"Speed-up, {'time' if board.timed else 'rounds'}", cells,
        f"Speed-up: {board.baseline}'s {unit} to the target divided by this one's, paired by seed; ≤ and ≥ where a run "
        "never arrived, – where neither did.",
    )  # fmt: skip


def _arrivals(rows: Sequence[LeaderRow], values: Sequence[Arrivals], words: Callable[[float], str]) -> list[Cell]:
    """Return medians, with the best one marked; "1/3" says how many seeds arrived, if some did not."""
    cells, known = [], []
    for row, value in zip(rows, values, strict=True):
        arrives = math.isfinite(value.median)
        waiting = any(seed.state == "running" for seed in row.seeds)
        text = words(value.median) if arrives else "not yet" if waiting else "never"
        cells.append(Cell(text, f"{value.count}/{row.runs}" if 0 < value.count < row.runs else ""))
        known.append(value.median if arrives else math.nan)
    return _mark_best(rows, cells, known, min)


def _general_notes(board: Leaderboard) -> Iterator[str]:
    """Yield what a reader must know about all columns."""
    if not board.metric.higher:
        yield f"Lower {board.metric.name} is better."
    if max(row.runs for row in board.rows) > 1:
        yield "±: standard deviation over seeds."
    if any(row.diverged for row in board.rows):
        yield (
            f"A run that diverged has no terminal {board.metric.name}: means are over the other runs, and its selector "
            "is never marked as best."
        )
    if any(row.failed for row in board.rows):
        yield f"A run that failed has no terminal {board.metric.name}; runs.json says why."


def megabytes(value: float) -> str:
    """Return megabytes with three digits or more, never in exponent form.

    >>> megabytes(0.01234), megabytes(12.34), megabytes(1234567.8)
    ('0.0123', '12.3', '1,234,568')
    """
    if math.isnan(value):
        return "–"
    if value >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if value >= 9.995 else 2 if value >= 0.9995 else 3 if value >= 0.09995 else 4
    return f"{value:.{digits}f}"


def _mark_best(
    rows: Sequence[LeaderRow], cells: Sequence[Cell], values: Sequence[float], choose: Callable[..., Any]
) -> list[Cell]:
    """Return the cells with the best one marked, and all that show the same text.

    NaN is never the best, nor is a selector that lost a run.
    """
    known = {i: v for i, (row, v) in enumerate(zip(rows, values, strict=True)) if not (row.lost or math.isnan(v))}
    if len(known) < 2:
        return list(cells)
    # Compared as shown: of two cells that read 92.0%, marking one would claim a difference that nobody sees.
    best = cells[int(choose(known, key=lambda i: known[i]))].text
    return [replace(cell, best=i in known and cell.text == best) for i, cell in enumerate(cells)]

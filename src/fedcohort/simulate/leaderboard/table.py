"""The leaderboard as a table, the same everywhere, and as plain values for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedcohort.simulate.leaderboard.formats import Cell, Table, notebook, to_text
from fedcohort.simulate.leaderboard.rows import FAIRNESS, LeaderRow, RunProgress
from fedcohort.simulate.leaderboard.words import deviation, duration, number
from fedcohort.simulate.metrics import Metric, Spread

# Name, heading and rank of a column; see _Column.
_GROUP_COLUMNS = (("worst_group", "Worst group", 3), ("worst_tenth", "Worst tenth", 6))
_TURN_COLUMNS = (
    ("client_spread", "Spread", 14, "{:.3f}"),
    ("jain", "Jain", 12, "{:.2f}"),
    ("longest_absence", "Longest absence", 15, "{:.0f}"),
)
FEW_SEEDS = 5  # with fewer seeds a p-value says little, and the table says so
CLEAR = 0.005  # a worst group that loses more accuracy than this gets a sentence
_ABOUT_FAIRNESS = {
    "Worst group": "the lowest accuracy of any group.",
    "Worst tenth": "mean accuracy of the worst tenth of clients.",
    "Spread": "standard deviation over clients.",
    "Jain": "how evenly clients took part, 1 is even.",
    "Longest absence": "in rounds.",
}
_ABOUT_P = "; p of a two-sided paired t-test, Holm-corrected over the rows of this table"
_ABOUT_P_IN_BRIEF = "; p: paired t-test, Holm-corrected"


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
    progress: RunProgress
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
        return self.progress.running == 0

    @property
    def at_a_cost(self) -> tuple[tuple[LeaderRow, float], ...]:
        """Selectors that gain on average but lose in the worst group, each with that difference (negative)."""
        base = {seed.seed: seed.fair.get("worst_group", math.nan) for seed in self.base.seeds}
        pairs = []
        for row in self.rows:
            change = Spread.of([s.fair.get("worst_group", math.nan) - base.get(s.seed, math.nan) for s in row.seeds])
            if row.paired is not None and row.paired.difference > 0 and change.mean < -CLEAR:
                pairs.append((row, change.mean))
        return tuple(pairs)

    @property
    def note(self) -> str:
        """What a reader must know about target, window, spread and p-values."""
        return note(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values; unknown ones are None."""

        def number_or_none(value: float) -> float | None:
            return value if math.isfinite(value) else None

        def spread(value: Spread) -> dict[str, Any]:
            return {"mean": number_or_none(value.mean), "std": number_or_none(value.std), "seeds": value.count}

        def natural(score: float) -> float | None:
            return number_or_none(self.metric.natural(score))

        def scores(value: Spread) -> dict[str, Any]:
            return {**spread(value), "mean": natural(value.mean)}

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
            "note": self.note,
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
                            "rounds": spread(item.rounds),
                            "simulated_seconds": spread(item.seconds),
                            "speed_up": number_or_none(item.speed_up),
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
                    "paired": None
                    if row.paired is None
                    else {
                        "seeds": row.paired.seeds,
                        "difference": natural(row.paired.difference),
                        "wins": row.paired.wins,
                        "p": number_or_none(row.paired.p),
                    },
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
    board: Leaderboard, line_styles: Mapping[str, tuple[int, int]] | None = None, *, explain: bool = True
) -> Table:
    """Return the leaderboard as a table.

    Parameters
    ----------
    line_styles : mapping of label to (colour, dash), optional
        How each selector's line is drawn; shown next to its name.
    explain : bool
        Whether the note says how everything is computed, or only what to be careful about.
    """
    most = max(row.runs for row in board.rows)
    labels = [_label(row, most, (line_styles or {}).get(row.label)) for row in board.rows]
    columns = [
        ("Selector", 0, labels),
        *_target_columns(board),
        *_score_columns(board),
        *_cost_columns(board),
        *_turn_columns(board),
    ]
    order = sorted(range(len(columns)), key=lambda i: columns[i][1])
    return Table(
        name="leaderboard",
        title="Leaderboard" if board.setting == "all runs" else f"Leaderboard: {board.setting}",
        columns=tuple(heading for heading, _, _ in columns),
        rows=tuple(zip(*(cells for _, _, cells in columns), strict=True)),
        note=note(board) if explain else brief_note(board),
        keep=tuple(order),
        explained=(
            (("Rounds to", "Speed-up", "Time to"), _about_target(board)),
            (("p",), _ABOUT_P),
            (("p",), _ABOUT_P_IN_BRIEF),
            *(((heading,), f"{heading}: {meaning}") for heading, meaning in _ABOUT_FAIRNESS.items()),
        ),
    )


_Column = tuple[str, int, list[Cell]]
"""Heading, rank (a narrow screen drops the columns with the highest ranks first), and a cell for each selector."""


def _target_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield how soon each target was reached."""
    rows, last = board.rows, len(board.targets) - 1
    for i, target in enumerate(board.targets):
        cells = [_rounds(row, row.to_target[i].rounds) for row in rows]
        means = [_complete(row, row.to_target[i].rounds) for row in rows]
        yield f"Rounds to {board.metric.level(target)}", 3 if i == last else 11, _mark_best(cells, means, min)
    yield "Speed-up", 4, [Cell(_number_or_dash(row.main.speed_up, "{:.2f}×")) for row in rows]


def _score_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield how good the models are, and how they compare with the baseline's."""
    rows, metric = board.rows, board.metric

    def scores(of: Callable[[LeaderRow], Spread]) -> list[Cell]:
        return _scores(rows, [of(row) for row in rows], metric)

    yield "Best", 6, scores(lambda row: row.best)
    if any(row.early_stop != row.best for row in rows):
        yield "Where it stopped", 10, scores(lambda row: row.early_stop)
    yield "Terminal", 1, scores(lambda row: row.terminal)
    gain = "Gain over" if metric.higher else "Difference to"
    yield f"{gain} {board.baseline}", 2, [_difference(row, metric) for row in rows]
    for name, heading, rank in _GROUP_COLUMNS:
        if any(row.fair(name).count for row in rows):
            yield heading, rank, _scores(rows, [row.fair(name) for row in rows], metric)
    if board.reference is not None:
        recovered = [Cell(_number_or_dash(row.improvement, "{:.0%}")) for row in rows]
        yield f"Recovered of the gap to {board.reference}", 9, recovered
    yield "p", 5, [_p_value(row) for row in rows]


def _cost_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield what the runs cost: time, balance and bytes, each only if it is known for some run."""
    rows = board.rows
    if any(row.main.seconds.mean > 0 for row in rows):  # without latencies, all times are 0
        times = _mark_best([_time(row) for row in rows], [_complete(row, row.main.seconds) for row in rows], min)
        yield f"Time to {board.metric.level(board.target)}", 12, times
    if any(row.qcid.count for row in rows):
        yield "Mean QCID", 7, _imbalances(rows)
    if any(row.megabytes.count for row in rows):
        yield "MB", 8, [Cell(megabytes(row.megabytes.mean)) for row in rows]
    if any(row.query_share > 0 for row in rows):
        yield "Query bytes", 13, [Cell(_number_or_dash(row.query_share, "{:.0%}")) for row in rows]
        yield "Questions", 16, [Cell(_number_or_dash(row.fair("asked").mean, "{:,.0f}")) for row in rows]


def _imbalances(rows: Sequence[LeaderRow]) -> list[Cell]:
    cells = [Cell(number(row.qcid.mean) if row.qcid.count else "–") for row in rows]
    return _mark_best(cells, [math.nan if row.lost else row.qcid.mean for row in rows], min)


def _turn_columns(board: Leaderboard) -> Iterator[_Column]:
    """Yield how evenly the clients took part."""
    for name, heading, rank, form in _TURN_COLUMNS:
        if any(row.fair(name).count for row in board.rows):
            yield heading, rank, [Cell(_number_or_dash(row.fair(name).mean, form)) for row in board.rows]


def note(board: Leaderboard) -> str:
    """Return how the columns are computed, and what to be careful about."""
    sentences = [_about_target(board)]
    sentences.append(f"Terminal: mean {board.metric.name} of {_window(board)} ({board.window_source}).")
    if not board.metric.higher:
        sentences.append(f"Lower {board.metric.name} is better.")
    if len({seed.window for row in board.rows for seed in row.seeds}) > 1:
        sentences.append("For shorter runs it is the last fifth.")
    if any(row.fair("worst_tenth").count for row in board.rows):
        sentences += [f"{heading}: {meaning}" for heading, meaning in _ABOUT_FAIRNESS.items()]
    sentences += _at_a_cost(board)
    if max(row.runs for row in board.rows) > 1:
        sentences.append("± is the standard deviation over seeds.")
    return " ".join([*_unfinished(board), *sentences, *_lost(board), _about_p(board)])


def _about_target(board: Leaderboard) -> str:
    return f"Target {board.metric.level(board.target)} ({board.target_source}); only evaluated rounds count."


def brief_note(board: Leaderboard) -> str:
    """Return what to be careful about, in a line or two."""
    facts = [f"Target {board.metric.level(board.target)} ({board.target_source})", f"terminal: {_window(board)}"]
    if max(row.runs for row in board.rows) > 1:
        facts.append("±: over seeds")
    about_p = any(row.paired is not None and not math.isnan(row.paired.p) for row in board.rows)
    sentences = [f"{'; '.join(facts)}{_ABOUT_P_IN_BRIEF if about_p else ''}."]
    if not board.metric.higher:
        sentences.append(f"Lower {board.metric.name} is better.")
    if few := _few_seeds(board):
        sentences.append(few)
    return " ".join([*_unfinished(board), *sentences, *_at_a_cost(board), *_lost(board)])


def _at_a_cost(board: Leaderboard) -> list[str]:
    return [
        f"{row.label} gains on average but loses {-100 * change:.1f} points in the worst group."
        for row, change in board.at_a_cost
    ]


def _window(board: Leaderboard) -> str:
    return "the last round" if board.window == 1 else f"the last {board.window} rounds"


def _unfinished(board: Leaderboard) -> list[str]:
    return [] if board.finished else [f"Not finished, {board.progress.words}: every number may change."]


def _lost(board: Leaderboard) -> list[str]:
    sentences = []
    if any(row.diverged for row in board.rows):
        sentences.append(
            f"A run that diverged has no terminal {board.metric.name}: means are over the other runs, and its selector "
            "is never marked as best."
        )
    if any(row.failed for row in board.rows):
        sentences.append(f"A run that failed has no terminal {board.metric.name}; runs.json says why.")
    return sentences


def _few_seeds(board: Leaderboard) -> str:
    """Return a warning if there are too few common seeds for a test; empty otherwise."""
    seeds = [row.paired.seeds for row in board.rows if row.paired is not None]
    if not seeds or min(seeds) >= FEW_SEEDS:
        return ""
    if min(seeds) < 2:
        return "With fewer than two common seeds there is no test; a difference may be chance."
    return (
        f"With only {min(seeds)} common seeds the test has little power; run at least {FEW_SEEDS} before you claim "
        "a difference."
    )


def _about_p(board: Leaderboard) -> str:
    seeds = [row.paired.seeds for row in board.rows if row.paired is not None]
    if not seeds:
        return "There is no baseline to compare with."
    common = (
        f"{'Gain' if board.metric.higher else 'Difference'}: mean difference of terminal {board.metric.name} to "
        f"{board.baseline}{' in percentage points' if board.metric.share else ''} over the seeds that both ran, and "
        f"how many of these it wins{_ABOUT_P}."
    )
    return f"{common} {_few_seeds(board)}".strip()


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


def _number_or_dash(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


def _mark_best(cells: Sequence[Cell], values: Sequence[float], choose: Callable[..., Any]) -> list[Cell]:
    """Return the cells with the best one marked, and all that show the same text; NaN is never the best."""
    known = {i: v for i, v in enumerate(values) if not math.isnan(v)}
    if len(known) < 2:
        return list(cells)
    best = cells[int(choose(known, key=lambda i: known[i]))].text
    return [replace(cell, best=i in known and cell.text == best) for i, cell in enumerate(cells)]


def _complete(row: LeaderRow, value: Spread) -> float:
    """Return the mean if every run has a value and none was lost, else NaN, so that it is not marked as best."""
    return value.mean if value.count == row.runs and not row.lost else math.nan


def _label(row: LeaderRow, most: int, style: tuple[int, int] | None) -> Cell:
    notes = ["baseline"] if row.baseline else []
    if row.runs != most:
        notes.append(f"{row.runs} seed{'s' if row.runs != 1 else ''}")
    if row.diverged:
        notes.append(f"{row.diverged} diverged")
    if row.failed:
        notes.append(f"{row.failed} failed")
    color, dash = style or (None, 0)
    return Cell(row.label, ", ".join(notes), color=color, dash=dash)


def _scores(rows: Sequence[LeaderRow], values: Sequence[Spread], metric: Metric) -> list[Cell]:
    """Return cells with the best one marked, among selectors that lost no run."""
    cells = [
        Cell("–")
        if value.count == 0
        else Cell(metric.value(value.mean), metric.spread(value.std) if value.count > 1 else "")
        for value in values
    ]
    return _mark_best(cells, [math.nan if row.lost else v.mean for row, v in zip(rows, values, strict=True)], max)


def _rounds(row: LeaderRow, value: Spread) -> Cell:
    return _reached_cell(row, value, f"{value.mean:.0f}", f"±{value.std:.0f}")


def _time(row: LeaderRow) -> Cell:
    value = row.main.seconds
    return _reached_cell(row, value, duration(value.mean), deviation(value.std, value.mean) if value.count else "")


def _reached_cell(row: LeaderRow, value: Spread, mean: str, std: str) -> Cell:
    if value.count == 0:
        return Cell("never" if all(seed.state != "running" for seed in row.seeds) else "not yet")
    if value.count < row.runs:
        return Cell(mean, f"in {value.count} of {row.runs}")
    return Cell(mean, std if value.count > 1 else "")


def _difference(row: LeaderRow, metric: Metric) -> Cell:
    test = row.paired
    if test is None or test.seeds == 0:
        return Cell("–")
    return Cell(metric.difference(test.difference), f"wins {test.wins} of {test.seeds}")


def _p_value(row: LeaderRow) -> Cell:
    if row.paired is None or math.isnan(row.paired.p):
        return Cell("–")
    return Cell("<0.001" if row.paired.p < 0.001 else f"{row.paired.p:.3f}")

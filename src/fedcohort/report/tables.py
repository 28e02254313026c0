"""Tables of a report, for HTML, LaTeX, Markdown, CSV and JSON alike."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.errors import ParameterError
from fedcohort.report.data import Setting
from fedcohort.report.figures import names, number, percent
from fedcohort.report.stats import Leaderboard, LeaderRow, gini
from fedcohort.simulate.metrics import Spread


@dataclass(frozen=True)
class Cell:
    """One entry: what it says, a quieter addition, and whether it is the best of its column."""

    text: str
    note: str = ""
    best: bool = False
    color: int | None = None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes
    ----------
    name : short name, for file names
    title : heading
    columns : heading of each column; the first is left-aligned, the others to the right
    rows : one tuple of cells per row
    note : what a reader must know
    wrap : columns of running text, left-aligned and wrapped
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    wrap: frozenset[int] = frozenset()


def leaderboard_table(board: Leaderboard) -> Table:
    """Return the leaderboard as a table."""
    target = percent(board.target, 0)
    base = board.baseline
    # Without latencies in the scenario every time is 0 and says nothing.
    timed = any(row.seconds_to_target.mean > 0 for row in board.rows)
    columns = (
        "Selector",
        *(f"Rounds to {percent(t, 0)}" for t in board.lower_targets),
        f"Rounds to {target}",
        "Speed-up",
        "Best",
        "Terminal",
        f"Terminal vs {base}",
        "p",
        *([f"Time to {target}"] if timed else []),
        "Mean QCID",
    )
    fastest = _best(
        [r.rounds_to_target.mean if r.rounds_to_target.count == r.runs else math.nan for r in board.rows], min
    )
    best = _best([r.best.mean for r in board.rows], max)
    terminal = _best([r.terminal.mean for r in board.rows], max)
    quickest = _best(
        [r.seconds_to_target.mean if r.seconds_to_target.count == r.runs else math.nan for r in board.rows], min
    )
    qcid = _best([r.qcid.mean for r in board.rows], min)
    most = max(row.runs for row in board.rows)
    rows = []
    for i, row in enumerate(board.rows):
        rows.append(
            (
                Cell(row.label, _runs_note(row, most), color=row.color),
                *(Cell(*_rounds(value, row.runs)) for value in row.rounds_to_lower),
                Cell(*_rounds(row.rounds_to_target, row.runs), best=i == fastest),
                Cell("–" if math.isnan(row.speed_up) else f"{row.speed_up:.2f}×"),
                Cell(*_spread(row.best), best=i == best),
                Cell(*_spread(row.terminal), best=i == terminal),
                _difference(row),
                Cell(_p_value(row)),
                *([Cell(*_time(row.seconds_to_target, row.runs), best=i == quickest)] if timed else []),
                Cell(number(row.qcid.mean) if not math.isnan(row.qcid.mean) else "–", best=i == qcid),
            )
        )
    note = (
        f"Target {target} ({board.target_source}); a round counts when it was evaluated. Terminal: mean of the last "
        f"{board.terminal_rounds} rounds. "
        + (f"± is the standard deviation over {most} seeds. " if most > 1 else "")
        + board.note
    )
    return Table("leaderboard", "Leaderboard", columns, tuple(rows), note)


def _best(values: Sequence[float], choose: Callable[..., float]) -> int:
    known = {i: v for i, v in enumerate(values) if not math.isnan(v)}
    return -1 if len(known) < 2 else int(choose(known, key=lambda i: known[i]))


def _runs_note(row: LeaderRow, most: int) -> str:
    notes = ["baseline"] if row.baseline else []
    if row.runs != most:
        notes.append(f"{row.runs} seed{'s' if row.runs != 1 else ''}")
    if row.diverged:
        notes.append(f"{row.diverged} diverged")
    return ", ".join(notes)


def _spread(value: Spread) -> tuple[str, str]:
    if value.count == 0:
        return "–", ""
    return percent(value.mean), f"±{100 * value.std:.1f}" if value.count > 1 else ""


def _rounds(value: Spread, runs: int) -> tuple[str, str]:
    return _reached(value, runs, f"{value.mean:.0f}", f"±{value.std:.0f}")


def _time(value: Spread, runs: int) -> tuple[str, str]:
    shown = duration(value.mean)
    factor = _UNIT_SECONDS[shown.split()[-1]] if value.count else 1
    return _reached(value, runs, shown, f"±{value.std / factor:.1f}")


def _reached(value: Spread, runs: int, mean: str, std: str) -> tuple[str, str]:
    if value.count == 0:
        return "never", ""
    return mean, f"in {value.count} of {runs}" if value.count < runs else std if value.count > 1 else ""


def _difference(row: LeaderRow) -> Cell:
    test = row.paired
    if test is None or test.seeds == 0:
        return Cell("–")
    return Cell(f"{100 * test.difference:+.1f} pts".replace("-", "−"), f"wins {test.wins} of {test.seeds}")


def _p_value(row: LeaderRow) -> str:
    if row.paired is None or math.isnan(row.paired.p):
        return "–"
    return "<0.001" if row.paired.p < 0.001 else f"{row.paired.p:.3f}"


_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def duration(seconds: float) -> str:
    """Return a duration in readable units.

    >>> duration(42.0), duration(600.0), duration(7300.0), duration(400000.0)
    ('42.0 s', '10.0 min', '2.0 h', '4.6 d')
    """
    if math.isnan(seconds):
        return "unknown"
    unit = "s" if seconds < 180 else "min" if seconds < 7200 else "h" if seconds < 172800 else "d"
    return f"{seconds / _UNIT_SECONDS[unit]:.1f} {unit}"


def participation_table(setting: Setting) -> Table:
    """Return how evenly clients took part, and who never did."""
    n = setting.n_clients
    rows = []
    for group in setting.groups:
        counts = np.array([np.bincount(run.pick_client, minlength=n)[:n] for run in group.runs])
        evenness = Spread.of([gini(c.astype(float)) for c in counts])
        never = Spread.of([float((c == 0).sum()) for c in counts])
        left_out = np.flatnonzero(counts[0] == 0)
        rows.append(
            (
                Cell(group.label, color=group.color),
                Cell(f"{evenness.mean:.2f}", f"±{evenness.std:.2f}" if evenness.count > 1 else ""),
                Cell(f"{never.mean:.3g}", f"of {n}"),
                Cell(f"{counts.max(axis=1).mean():.3g}"),
                Cell(names([str(int(c)) for c in left_out], 30)),
            )
        )
    return Table(
        "participation",
        "Who is left out",
        (
            "Selector",
            "Gini",
            "Never picked",
            "Most picks of one client",
            f"Who was never picked (seed {setting.groups[0].runs[0].seed})",
        ),
        tuple(rows),
        "Gini of participation: 0 when everybody is picked equally often, near 1 when one client does all the work.",
        frozenset({4}),
    )


# -- formats --------------------------------------------------------------------------------------------------------


def to_html(table: Table) -> str:
    """Return the table as HTML; on a narrow screen it scrolls inside its own box."""
    head = "".join(
        f'<th scope="col"{_wrap_class(table, i)}>{html.escape(column).replace("-", "&#8209;")}</th>'
        for i, column in enumerate(table.columns)
    )
    body = []
    for row in table.rows:
        cells = []
        for i, cell in enumerate(row):
            swatch = (
                "" if cell.color is None else f'<span class="swatch" style="background:var(--s{cell.color})"></span>'
            )
            text = f"<b>{html.escape(cell.text)}</b>" if cell.best else html.escape(cell.text)
            note = f' <span class="note">{html.escape(cell.note)}</span>' if cell.note else ""
            tag = "th" if i == 0 else "td"
            scope = ' scope="row"' if i == 0 else ""
            cells.append(f"<{tag}{scope}{_wrap_class(table, i)}>{swatch}{text}{note}</{tag}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>' + (
        f'<p class="small">{html.escape(table.note)}</p>' if table.note else ""
    )


def _wrap_class(table: Table, column: int) -> str:
    return ' class="wrap"' if column in table.wrap else ""


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def to_latex(table: Table) -> str:
    r"""Return the table for a paper, with ``booktabs`` rules; needs ``\usepackage{booktabs}``."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\toprule",
        " & ".join(_latex(c) for c in table.columns) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = [rf"\textbf{{{_latex(c.text)}}}" if c.best else _latex(c.text) for c in row]
        cells = [
            f"{t} {_latex(c.note)}" if c.note and i else t for i, (t, c) in enumerate(zip(cells, row, strict=True))
        ]
        lines.append(" & ".join(cells) + r" \\")
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{_latex(f'{table.title}. {table.note}'.strip())}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown."""

    def escape(text: str) -> str:
        return text.replace("|", r"\|")

    lines = [
        "| " + " | ".join(escape(c) for c in table.columns) + " |",
        "|" + "|".join(":--" if i == 0 or i in table.wrap else "--:" for i in range(len(table.columns))) + "|",
    ]
    for row in table.rows:
        cells = [f"**{escape(c.text)}**" if c.best else escape(c.text) for c in row]
        cells = [
            f"{t} {escape(c.note)}" if c.note and i else t for i, (t, c) in enumerate(zip(cells, row, strict=True))
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + ("\n\n" + table.note if table.note else "") + "\n"


def to_csv(table: Table) -> str:
    """Return the table as CSV, text as shown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow([f"{c.text} {c.note}".strip() if i else c.text for i, c in enumerate(row)])
    return out.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "latex": ("tex", to_latex),
    "markdown": ("md", to_markdown),
    "csv": ("csv", to_csv),
}


def render(table: Table, form: str) -> str:
    """Return the table in one of :data:`FORMATS`."""
    if form not in FORMATS:
        raise ParameterError(f"Tables can be written as {', '.join(FORMATS)}. Got {form!r}.")
    return FORMATS[form][1](table)


def board_json(board: Leaderboard) -> dict[str, Any]:
    """Return the leaderboard's numbers for machines; None where a number is not known."""

    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    def spread(value: Spread) -> dict[str, Any]:
        return {"mean": known(value.mean), "std": known(value.std), "seeds": value.count}

    return {
        "setting": board.setting,
        "target": known(board.target),
        "lower_targets": list(board.lower_targets),
        "target_source": board.target_source,
        "terminal_rounds": board.terminal_rounds,
        "baseline": board.baseline,
        "note": board.note,
        "rows": [
            {
                "label": row.label,
                "selector": row.selector,
                "runs": row.runs,
                "diverged": row.diverged,
                "rounds_to_target": spread(row.rounds_to_target),
                "rounds_to_lower_targets": [spread(value) for value in row.rounds_to_lower],
                "seconds_to_target": spread(row.seconds_to_target),
                "best": spread(row.best),
                "terminal": spread(row.terminal),
                "qcid": spread(row.qcid),
                "speed_up": known(row.speed_up),
                "paired": None
                if row.paired is None
                else {
                    "seeds": row.paired.seeds,
                    "difference": known(row.paired.difference),
                    "wins": row.paired.wins,
                    "p": known(row.paired.p),
                },
            }
            for row in board.rows
        ],
    }

"""The benchmark's page: a heat map of gains, the ranking, and one sentence per selector. One file, no scripts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import fedcohort
from fedcohort.core.text import escape_html
from fedcohort.simulate.leaderboard import Ranking, Table
from fedcohort.simulate.leaderboard.formats import Cell, to_markdown
from fedcohort.studies.benchmark.scores import Line, Scores
from fedcohort.studies.benchmark.suite import VERSION, suite

UNTIMED = (
    "How much sooner uniform's accuracy is reached is not shown: these scores are of an earlier version, which counted "
    "a run that never arrives with its own end, and keep no times by setting."
)
_SCALE = 5.0  # points at which a cell has its full colour

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6776; --paper: #fff; --line: #d8dee6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf3; --soft: #a3b0bf; --paper: #12181f; --line: #344150; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 120rem; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, li { max-width: 60rem; } .soft { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .4rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { vertical-align: bottom; font-weight: 600; white-space: normal; }
td.cell { color: #10161d; }
"""


def matrix(scores: Scores) -> Table:
    """Return gains by selector and setting, in points."""
    best = {
        setting: max((float(line.gain[setting].mean()) for line in scores.lines), default=math.nan)
        for setting in scores.settings
    }
    rows = []
    for line in scores.lines:
        gains = [float(line.gain[setting].mean()) for setting in scores.settings]
        rows.append(
            [
                Cell(line.label),
                Cell(f"{line.mean:+.1f}"),
                Cell(f"{line.worst[1]:+.1f}"),
                *(
                    Cell(f"{gain:+.1f}", best=gain == best[name])
                    for gain, name in zip(gains, scores.settings, strict=True)
                ),
            ]
        )
    return Table(
        name="benchmark",
        title="Gain over uniform, points of terminal accuracy",
        columns=("selector", "mean", "worst", *scores.settings),
        rows=tuple(tuple(row) for row in rows),
    )


def robustness(scores: Scores) -> Table:
    """Return what each selector is worth besides accuracy: rank, speed, bytes, and what it may cost."""
    rows = []
    for line in scores.lines:
        rank, around = scores.ranks[line.label]
        cells = [Cell(f"{line.mean:+.2f}", "" if math.isnan(line.interval) else f"± {line.interval:.2f}")]
        cells.append(Cell(f"{rank:.1f}", "" if math.isnan(around) else f"± {around:.1f}"))
        cells += [Cell(f"{line.shortfall:.1f}"), Cell(f"{line.worst_run:+.1f}")]
        cells.append(Cell("–" if math.isnan(line.arrived) else f"{line.arrived:.0%}"))
        cells += [_speed(line, name, len(scores.settings)) for name in ("rounds", "seconds", "bytes")]
        rows.append((Cell(line.label), *cells))
    most = "never worse by more than"
    head = ("selector", "mean gain", "rank", most, "worst run", "reached", "rounds", "seconds", "bytes")
    title = "Ranks, robustness, and how many times less uniform's accuracy costs"
    return Table("robustness", title, head, tuple(rows), note="" if _timed(scores) else UNTIMED)


def _speed(line: Line, measure: str, settings: int) -> Cell:
    speed, covers = line.speed(measure), line.covers(measure)
    if math.isnan(speed):
        return Cell("–")
    return Cell(f"{speed:.2f}×", f"in {covers}" if covers < settings else "")


def _timed(scores: Scores) -> bool:
    return not scores.lines or any(line.faster for line in scores.lines)


def markdown(scores: Scores) -> str:
    """Return the matrix and the table of robustness, for a page of documentation."""
    return f"{to_markdown(matrix(scores))}\n\n{to_markdown(robustness(scores))}\n\n{sentences(scores.to_dict())}\n"


def sentences(submission: Mapping[str, Any]) -> str:
    """Return one sentence for each selector of a submission, as a list in Markdown."""
    return "\n".join(f"- `{entry['label']}`: {entry['use']}" for entry in submission["selectors"])


def page(scores: Scores) -> str:
    """Return the page as HTML."""
    seeds = ", ".join(map(str, scores.seeds))
    used = {
        "report": "the seeds reserved for reports",
        "tuning": "the seeds for tuning: not a result to show",
        "own": "own seeds",
        "trial": "a trial of a part of the suite or of fewer rounds: not a result to show",
    }[scores.purpose]
    state = "" if scores.complete else "<p><strong>Not all runs have ended: figures so far.</strong></p>"
    lines = "".join(
        f"<li><strong>{escape_html(line.label)}</strong>: {escape_html(line.sentence)}</li>" for line in scores.lines
    )
    known = {setting.name: setting for setting in suite(scores.data)}
    settings = "".join(
        f"<li><strong>{escape_html(name)}</strong>: {escape_html(known[name].meaning)} "
        f"<span class=soft>({escape_html(known[name].source)})</span></li>"
        for name in scores.settings
        if name in known
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>fedcohort benchmark: {escape_html(scores.data)}</title><style>{_STYLE}</style><main>"
        f"<h1>Benchmark of client selection: {escape_html(scores.data)}</h1>"
        f"<p class=soft>Version {VERSION}, {len(scores.settings)} settings, {len(scores.lines) + 1} selectors, "
        f"{scores.rounds} rounds, seeds {seeds} ({used}); fedcohort {fedcohort.__version__}, "
        f"{time.strftime('%Y-%m-%d')}.</p>{state}"
        f"<h2>Gain over uniform selection</h2><p>Points of terminal accuracy, mean over seeds; ± is the 95% interval "
        f"of the mean over seeds. Settings that differ in time alone count once for mean gain and rank. Reached: share "
        f"of the runs that get to uniform's own accuracy. Faster: how many times sooner they do, in rounds, simulated "
        f"seconds and bytes (questions to clients included); a run that does not get there takes the time that all "
        f"runs of its setting were watched; geometric mean over the settings in which somebody gets there, as many as "
        f"are named. {'' if _timed(scores) else UNTIMED} Rank: mean over settings, "
        f"uniform included, with its 95% interval over seeds. Never worse than uniform by more than: the most that any "
        f"setting loses, in the mean over seeds.</p><div class=wide tabindex=0>{_heat(scores)}</div>"
        f"{_ranks(scores.ranking)}"
        f"<h2>When to use which</h2><ul>{lines}</ul><h2>The settings</h2><ul>{settings}</ul></main></html>"
    )


def _heat(scores: Scores) -> str:
    head = "".join(f"<th scope=col>{escape_html(name)}</th>" for name in scores.settings)
    body = "".join(_heat_row(line, scores) for line in scores.lines)
    return (
        f"<table><thead><tr><th scope=col>selector</th><th scope=col>mean</th><th scope=col>worst</th>"
        f"<th scope=col>never worse by<br>more than</th><th scope=col>rank</th>"
        f"<th scope=col>reached</th><th scope=col>faster,<br>rounds</th>"
        f"<th scope=col>faster,<br>seconds</th><th scope=col>faster,<br>bytes</th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _heat_row(line: Line, scores: Scores) -> str:
    cells = ""
    for name in scores.settings:
        gain = float(line.gain[name].mean())
        cells += f"<td class=cell style='background:{_colour(gain)}'>{gain:+.1f}</td>"
    width = "" if math.isnan(line.interval) else f" ± {line.interval:.1f}"
    speeds = [_speed(line, name, len(scores.settings)) for name in ("rounds", "seconds", "bytes")]
    faster = f"<td>{'–' if math.isnan(line.arrived) else f'{line.arrived:.0%}'}</td>"
    faster += "".join(f"<td>{escape_html(f'{cell.text} {cell.note}'.strip())}</td>" for cell in speeds)
    rank, around = scores.ranks[line.label]
    ranked = f"{rank:.1f}" if math.isnan(around) else f"{rank:.1f} ± {around:.1f}"
    return (
        f"<tr><th scope=row>{escape_html(line.label)}</th><td>{line.mean:+.2f}{width}</td>"
        f"<td>{line.worst[1]:+.1f}</td><td>{line.shortfall:.1f}</td><td>{ranked}</td>{faster}{cells}</tr>"
    )


def _colour(gain: float) -> str:
    """Blue for a gain, orange for a loss, both told apart by colour-blind readers; white for nothing."""
    share = min(abs(gain) / _SCALE, 1.0)
    strong = (120, 176, 232) if gain > 0 else (240, 160, 90)
    return "#" + "".join(f"{round(255 + share * (c - 255)):02x}" for c in strong)


def _ranks(ranking: Ranking | None) -> str:
    """Mean ranks on a line, with bars over those that cannot be told apart (Nemenyi)."""
    if ranking is None:
        return ""
    most, left, width = len(ranking.labels), 170, 560
    place = {
        label: left + width * (rank - 1) / max(most - 1, 1)
        for label, rank in zip(ranking.labels, ranking.ranks, strict=True)
    }
    step = 20
    parts = []
    for i, (label, rank) in enumerate(zip(ranking.labels, ranking.ranks, strict=True)):
        y, x = 60 + 8 * len(ranking.alike) + step * i, place[label]
        parts.append(
            f"<line x1={x:.1f} y1=30 x2={x:.1f} y2={y} stroke='currentColor' stroke-opacity=.25 />"
            f"<circle cx={x:.1f} cy={y} r=4 fill='currentColor' />"
            f"<text x={x + 10:.1f} y={y + 5}>{escape_html(label)} {rank:.1f}</text>"
        )
    for i, group in enumerate(ranking.alike):
        y = 40 + 8 * i
        parts.append(
            f"<line x1={place[group[0]]:.1f} y1={y} x2={place[group[-1]]:.1f} y2={y} stroke='#c8641e' stroke-width=4 />"
        )
    height = 80 + 8 * len(ranking.alike) + step * most
    return (
        f"<h2>All against all</h2><p>Mean rank over {ranking.blocks} kinds of settings, each with the mean over "
        f"its seeds, 1 is best: a verdict about settings like these. Two "
        f"selectors differ at the 5% level when their ranks are {ranking.difference:.2f} apart (Friedman p "
        f"{ranking.friedman:.2g}, then Nemenyi); a bar joins those that cannot be told apart.</p>"
        f"<div class=wide tabindex=0>"
        f"<svg role=img aria-label='Mean ranks of the selectors' width={left + width + 170} height={height} "
        f"font-size=14 fill='currentColor'><line x1={left} y1=30 x2={left + width} y2=30 stroke='currentColor' />"
        f"<text x={left - 30} y=34>1</text><text x={left + width + 10} y=34>{most}</text>{''.join(parts)}</svg></div>"
    )

"""The benchmark's page: a heat map of gains, the ranking, and a sentence for each selector. One file, no scripts."""

from __future__ import annotations

import math
import time

import numpy as np

import fedcohort
from fedcohort.core.arrays import FloatArray
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard import Table
from fedcohort.simulate.leaderboard.formats import Cell
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort_bench.benchmark.scores import Scores, SelectorScore
from fedcohort_bench.benchmark.suite import settings_by_name

DEFAULT = "balanced"  # the selector we recommend, and whose claims are stated
_SCALE = 5.0  # points at which a cell has full colour


def matrix(scores: Scores) -> Table:
    """Return gains by selector and setting, in points."""
    gains = np.array([[line.gain[setting].mean() for setting in scores.settings] for line in scores.lines])
    best = gains == gains.max(axis=0, initial=-math.inf)
    rows = tuple(
        (
            Cell(line.label),
            Cell(f"{line.mean:+.1f}"),
            _worst(line),
            *(Cell(f"{gain:+.1f}", best=bool(first)) for gain, first in zip(gains[i], best[i], strict=True)),
        )
        for i, line in enumerate(scores.lines)
    )
    return Table(
        name="benchmark",
        title=f"Gain over {scores.baseline}, points of terminal accuracy",
        columns=("selector", "mean", "worst", *scores.settings),
        rows=rows,
        note=f"In brackets: what the worst setting would be on average if no setting differed from {scores.baseline}.",
    )


def _worst(line: SelectorScore) -> Cell:
    """Return the smallest gain, beside what chance alone would make of it."""
    chance = line.worst_by_chance
    return Cell(f"{line.worst[1]:+.1f}", "" if math.isnan(chance) else f"({chance:+.1f})")


def robustness(scores: Scores) -> Table:
    """Return the rank, the worst cases, the speed and the traffic of each selector."""
    rows = []
    for line in scores.lines:
        rank, around = scores.ranks[line.label]
        cells = [Cell(f"{line.mean:+.2f}", "" if math.isnan(line.interval) else f"± {line.interval:.2f}")]
        cells.append(Cell(f"{rank:.1f}", "" if math.isnan(around) else f"± {around:.1f}"))
        cells += [Cell(f"{line.worst_run:+.1f}"), Cell(f"{sum(line.lost.values())}")]
        cells.append(Cell("–" if math.isnan(line.reach_share) else f"{line.reach_share:.0%}"))
        for measure in ("rounds", "seconds", "bytes"):
            covers = line.covers(measure)
            cells.append(Cell(str(line.speed(measure)), f"in {covers}" if 0 < covers < len(scores.settings) else ""))
        rows.append((Cell(line.label), *cells))
    head = ("selector", "mean gain", "rank", "worst run", "lost", "reached", "rounds", "seconds", "bytes")
    title = f"Ranks, robustness, and savings in reaching {scores.baseline}'s accuracy"
    note = (
        f"Lost: pairs of runs of which one diverged or failed. Rounds, seconds and bytes: {scores.baseline}'s to the "
        "target divided by this one's, over the settings that tell; ≤ and ≥ where runs never arrived."
    )
    return Table("robustness", title, head, tuple(rows), note=note)


def minorities(scores: Scores) -> Table:
    """Return what the worst group gains over the baseline's worst group, in points, by selector and setting."""
    measured = [name for name in scores.settings if any(name in line.minority for line in scores.lines)]
    rows = []
    for line in scores.lines:
        cells = [Cell("–"), Cell("–")]
        if line.minority:
            cells = [Cell(f"{line.mean_minority:+.1f}"), Cell(f"{line.worst_minority[1]:+.1f}")]
        for name in measured:
            values = line.minority.get(name, np.zeros(0))
            # Over how many seeds, if the worst group is not known in all of them.
            seeds = "" if len(values) in (0, len(scores.seeds)) else f"{len(values)} of {len(scores.seeds)} seeds"
            cells.append(Cell(f"{values.mean():+.1f}" if len(values) else "–", seeds))
        rows.append((Cell(line.label), *cells))
    note = (
        "A group is the clients with the same view, the clients with the same main class, or one owner. With more than "
        "50 owners, the worst tenth of clients takes the place of the worst group."
    )
    title = f"Gain of the worst group over {scores.baseline}'s worst group, points of accuracy"
    return Table("minorities", title, ("selector", "mean", "worst", *measured), tuple(rows), note=note)


def claims(scores: Scores, label: str) -> Table:
    """Return for each setting whether a selector is worse than the baseline by more than half a point."""
    line = next(line for line in scores.lines if line.label == label)
    rows, verdicts = [], 0
    for claim in line.claims:
        cells = [Cell(claim.setting)]
        for values, verdict in ((claim.gain, claim.verdict), (claim.minority, claim.minority_verdict)):
            verdicts += values is not None
            cells += [Cell("–"), Cell("–")] if values is None else [with_interval(values, "{:+.1f}"), Cell(verdict)]
        rows.append(tuple(cells))
    return Table(
        "claims",
        f"Is {label} worse than {scores.baseline} by more than half a point?",
        ("setting", "mean", "verdict", "worst group", "verdict "),
        tuple(rows),
        note="Points; ±: 95% interval over seeds, for one setting alone. Worse, or no worse: the mean differs from "
        f"−0.5 in a paired t-test, Holm-corrected over all {verdicts} verdicts. Lost: seeds in which a run diverged or "
        "failed.",
    )


def with_interval(values: FloatArray, form: str) -> Cell:
    """Return a mean with its 95% interval over seeds."""
    half = half_interval(values)
    return Cell(form.format(values.mean()), "" if math.isnan(half) else "± " + form.format(half).lstrip("+"))


PURPOSES = {
    "report": "the seeds reserved for reports",
    "tuning": "the seeds for tuning: not a result to publish",
    "own": "own seeds",
    "trial": "a trial with part of the suite or fewer rounds: not a result to publish",
}


def page(scores: Scores, origin: str = "") -> str:
    """Return the page as HTML; ``origin`` names the version and the date, by default this version and today."""
    known = settings_by_name(scores.data)
    rows, minority_rows = [], []
    for line, cells in zip(scores.lines, robustness(scores).rows, strict=True):
        mean = Cell(f"{line.mean:+.2f}", "" if math.isnan(line.interval) else f"± {line.interval:.1f}")
        shown = (mean, _worst(line), cells[2], cells[5], *cells[6:])
        gains = [_heat(line.gain.get(name)) for name in scores.settings]
        rows.append({"label": line.label, "texts": [f"{c.text} {c.note}".strip() for c in shown], "gains": gains})
        if line.minority:
            gains = [_heat(line.minority.get(name)) for name in scores.settings]
            texts = [f"{line.mean_minority:+.2f}", f"{line.worst_minority[1]:+.1f}"]
            texts.append(", ".join(line.at_a_cost) or "nowhere")
            minority_rows.append({"label": line.label, "texts": texts, "gains": gains})
    return render(
        "benchmark.html",
        package="fedcohort_bench",
        scores=scores,
        suite_version=scores.frozen.suite,
        purpose=PURPOSES[scores.purpose],
        origin=origin or f"fedcohort {fedcohort.__version__}, {time.strftime('%Y-%m-%d')}",
        rows=rows,
        minorities=minority_rows,
        claims=[claims(scores, line.label) for line in scores.lines if line.label == DEFAULT and line.minority],
        ranking=scores.ranking,
        settings=[known[name] for name in scores.settings if name in known],
    )


def _heat(values: FloatArray | None) -> tuple[str, str]:
    """Return a mean gain and its colour: blue for a gain, orange for a loss, which the colour-blind can tell apart."""
    if values is None:
        return "–", "#ffffff"
    gain = float(values.mean())
    share = min(abs(gain) / _SCALE, 1.0)
    strong = (120, 176, 232) if gain > 0 else (240, 160, 90)
    return f"{gain:+.1f}", "#" + "".join(f"{round(255 + share * (c - 255)):02x}" for c in strong)

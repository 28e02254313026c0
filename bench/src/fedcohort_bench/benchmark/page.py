"""The benchmark's page: a heat map of gains, the ranking, and a sentence for each selector. One file, no scripts."""

from __future__ import annotations

import math
import time
from typing import Any

import fedcohort
from fedcohort.core.arrays import FloatArray
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard import SelectorRanking, Table
from fedcohort.simulate.leaderboard.formats import Cell
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort_bench.benchmark.scores import Scores, SelectorScore
from fedcohort_bench.benchmark.suite import settings_by_name

DEFAULT = "balanced"  # the selector we recommend, and whose claims are stated
_SCALE = 5.0  # points at which a cell has full colour


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
            (
                Cell(line.label),
                Cell(f"{line.mean:+.1f}"),
                _worst(line),
                *(
                    Cell(f"{gain:+.1f}", best=gain == best[name])
                    for gain, name in zip(gains, scores.settings, strict=True)
                ),
            )
        )
    return Table(
        name="benchmark",
        title=f"Gain over {scores.baseline}, points of terminal accuracy",
        columns=("selector", "mean", "worst", *scores.settings),
        rows=tuple(rows),
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
        cells += [_speed(line, name, len(scores.settings)) for name in ("rounds", "seconds", "bytes")]
        rows.append((Cell(line.label), *cells))
    head = ("selector", "mean gain", "rank", "worst run", "lost", "reached", "rounds", "seconds", "bytes")
    title = f"Ranks, robustness, and savings in reaching {scores.baseline}'s accuracy"
    note = (
        f"Lost: pairs of runs of which one diverged or failed. Rounds, seconds and bytes: {scores.baseline}'s to the "
        "target divided by this one's, over the settings that tell; ≤ and ≥ where runs never arrived."
    )
    return Table("robustness", title, head, tuple(rows), note=note)


def _speed(line: SelectorScore, measure: str, settings: int) -> Cell:
    covers = line.covers(measure)
    return Cell(str(line.speed(measure)), f"in {covers}" if 0 < covers < settings else "")


def minorities(scores: Scores) -> Table:
    """Return what the worst group gains over the baseline's worst group, in points, by selector and setting."""
    measured = [name for name in scores.settings if any(name in line.minority for line in scores.lines)]
    rows = []
    for line in scores.lines:
        cells = [f"{line.mean_minority:+.1f}", f"{line.worst_minority[1]:+.1f}"] if line.minority else ["–", "–"]
        rows.append(
            (Cell(line.label), *map(Cell, cells), *(_group(line, name, len(scores.seeds)) for name in measured))
        )
    note = (
        "A group is the clients with the same view, the clients with the same main class, or one owner. With more than "
        "50 owners, the worst tenth of clients takes the place of the worst group."
    )
    title = f"Gain of the worst group over {scores.baseline}'s worst group, points of accuracy"
    return Table("minorities", title, ("selector", "mean", "worst", *measured), tuple(rows), note=note)


def _group(line: SelectorScore, setting: str, seeds: int) -> Cell:
    """Return what the worst group gains in a setting, and over how many seeds if not all are known."""
    values = line.minority.get(setting)
    if values is None:
        return Cell("–")
    return Cell(f"{float(values.mean()):+.1f}", "" if len(values) == seeds else f"{len(values)} of {seeds} seeds")


def claims(scores: Scores, label: str) -> Table:
    """Return for each setting whether a selector is worse than the baseline by more than half a point."""
    line = next(line for line in scores.lines if line.label == label)
    rows = []
    for claim in line.claims:
        other = (Cell("–"), Cell("–")) if claim.minority is None else (
            _with_interval(claim.minority), Cell(claim.minority_verdict)
        )  # fmt: skip
        rows.append((Cell(claim.setting), _with_interval(claim.gain), Cell(claim.verdict), *other))
    return Table(
        "claims",
        f"Is {label} worse than {scores.baseline} by more than half a point?",
        ("setting", "mean", "verdict", "worst group", "verdict "),
        tuple(rows),
        note="Points; ±: 95% interval over seeds, for one setting alone. Worse, or no worse: the mean differs from "
        f"−0.5 in a paired t-test, Holm-corrected over all {sum(row[3].text != '–' for row in rows) + len(rows)} "
        "verdicts. Lost: seeds in which a run diverged or failed.",
    )


def _with_interval(values: FloatArray) -> Cell:
    half = half_interval(values)
    return Cell(f"{values.mean():+.1f}", "" if math.isnan(half) else f"± {half:.1f}")


PURPOSES = {
    "report": "the seeds reserved for reports",
    "tuning": "the seeds for tuning: not a result to publish",
    "own": "own seeds",
    "trial": "a trial with part of the suite or fewer rounds: not a result to publish",
}


def page(scores: Scores, origin: str = "") -> str:
    """Return the page as HTML; ``origin`` names the version and the date, by default this version and today."""
    known = settings_by_name(scores.data)
    return render(
        "benchmark.html",
        package="fedcohort_bench",
        scores=scores,
        suite_version=scores.frozen.suite,
        purpose=PURPOSES[scores.purpose],
        origin=origin or f"fedcohort {fedcohort.__version__}, {time.strftime('%Y-%m-%d')}",
        rows=[_heat_row(line, scores) for line in scores.lines],
        minorities=[_minority_row(line, scores) for line in scores.lines if line.minority],
        claims=[claims(scores, line.label) for line in scores.lines if line.label == DEFAULT and line.minority],
        ranking=scores.ranking,
        **_rank_axis(scores.ranking),
        settings=[known[name] for name in scores.settings if name in known],
    )


def _heat_row(line: SelectorScore, scores: Scores) -> dict[str, Any]:
    width = "" if math.isnan(line.interval) else f" ± {line.interval:.1f}"
    rank, around = scores.ranks[line.label]
    speeds = [_speed(line, name, len(scores.settings)) for name in ("rounds", "seconds", "bytes")]
    gains = [float(line.gain[name].mean()) for name in scores.settings]
    return {
        "label": line.label,
        "texts": [
            f"{line.mean:+.2f}{width}",
            f"{_worst(line).text} {_worst(line).note}".strip(),
            f"{rank:.1f}" if math.isnan(around) else f"{rank:.1f} ± {around:.1f}",
            "–" if math.isnan(line.reach_share) else f"{line.reach_share:.0%}",
            *(f"{cell.text} {cell.note}".strip() for cell in speeds),
        ],
        "gains": [(f"{gain:+.1f}", _colour(gain)) for gain in gains],
    }


def _minority_row(line: SelectorScore, scores: Scores) -> dict[str, Any]:
    gains = [float(line.minority[name].mean()) if name in line.minority else math.nan for name in scores.settings]
    return {
        "label": line.label,
        "texts": [
            f"{line.mean_minority:+.2f}",
            f"{line.worst_minority[1]:+.1f}",
            ", ".join(line.at_a_cost) or "nowhere",
        ],
        "gains": [("–", "#ffffff") if math.isnan(gain) else (f"{gain:+.1f}", _colour(gain)) for gain in gains],
    }


def _colour(gain: float) -> str:
    """Blue for a gain, orange for a loss (colour-blind readers can tell them apart), white for neither."""
    share = min(abs(gain) / _SCALE, 1.0)
    strong = (120, 176, 232) if gain > 0 else (240, 160, 90)
    return "#" + "".join(f"{round(255 + share * (c - 255)):02x}" for c in strong)


def _rank_axis(ranking: SelectorRanking | None) -> dict[str, Any]:
    """Return the points and bars of the axis of mean ranks; a bar joins selectors that do not differ."""
    if ranking is None:
        return {"points": [], "bars": []}
    most, left, width = len(ranking.labels), 170, 560  # pixels of the drawing in benchmark.html
    ranks = dict(zip(ranking.labels, ranking.ranks, strict=True))
    place = {label: round(left + width * (rank - 1) / max(most - 1, 1), 1) for label, rank in ranks.items()}
    return {
        "points": [(label, f"{rank:.1f}", place[label]) for label, rank in ranks.items()],
        "bars": [(place[group[0]], place[group[-1]]) for group in ranking.alike],
    }

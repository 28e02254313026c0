"""The table at the end: each selector's metrics over its seeds, against the baseline. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.simulate.metrics import TERMINAL_ROUNDS, Spread, relative_improvement, speed_up
from fedcohort.simulate.results import Results, RunInfo


@dataclass(frozen=True)
class ToTarget:
    """How long a selector took to reach a target accuracy.

    Attributes
    ----------
    target : float
    rounds : Spread
        Over the seeds that reached it; ``rounds.count`` says how many.
    seconds : Spread
        Simulated seconds until then.
    speed_up : float
        The baseline's mean rounds divided by these; NaN unless all seeds of both reached it.
    """

    target: float
    rounds: Spread
    seconds: Spread
    speed_up: float


@dataclass(frozen=True)
class SummaryRow:
    """One selector under one setting, over its seeds."""

    label: str
    setting: str
    seeds: int
    diverged: int
    best: Spread
    early_stop: Spread
    terminal: Spread
    improvement: float  # of the mean terminal accuracy; see Summary.improvement_of
    to_target: tuple[ToTarget, ...]
    qcid: Spread  # mean over rounds
    megabytes: Spread  # both ways, queries included
    query_share: float  # of all bytes
    clock: Spread  # simulated seconds


@dataclass(frozen=True)
class Summary:
    """All rows, and what they were compared with.

    Attributes
    ----------
    rows : tuple of SummaryRow
    baseline : str
        Label of the selector the others are compared with, under the same setting.
    reference : str or None
        Setting that stands for IID data.
    targets_given : bool
        False when the only target is the baseline's own mean terminal accuracy.
    """

    rows: tuple[SummaryRow, ...]
    baseline: str
    reference: str | None
    targets_given: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""

        def spread(value: Spread) -> dict[str, float | int]:
            return {"mean": value.mean, "std": value.std, "count": value.count}

        return {
            "baseline": self.baseline,
            "reference": self.reference,
            "selectors": [
                {
                    "label": row.label,
                    "setting": row.setting or None,
                    "seeds": row.seeds,
                    "diverged": row.diverged,
                    "best_accuracy": spread(row.best),
                    "early_stop_accuracy": spread(row.early_stop),
                    "terminal_accuracy": spread(row.terminal),
                    "relative_improvement": row.improvement,
                    "targets": [
                        {
                            "target": item.target,
                            "rounds": spread(item.rounds),
                            "simulated_seconds": spread(item.seconds),
                            "speed_up": item.speed_up,
                        }
                        for item in row.to_target
                    ],
                    "mean_qcid": spread(row.qcid),
                    "megabytes": spread(row.megabytes),
                    "query_share_of_bytes": row.query_share,
                    "simulated_seconds": spread(row.clock),
                }
                for row in self.rows
            ],
        }


def summarise(
    results: Results,
    *,
    targets: Sequence[float] | None = None,
    terminal: int | None = None,
    baseline: str | None = None,
    reference: str | None = None,
) -> Summary:
    """Work out the metrics of an experiment.

    Parameters
    ----------
    results : Results
    targets : sequence of float, optional
        Default: the configuration's; without any, the baseline's mean terminal accuracy under each setting.
    terminal : int, optional
        Last rounds for terminal accuracy; default: the configuration's.
    baseline, reference : str, optional
        Label and setting to compare with; default: the configuration's, else ``uniform`` or the first.
    """
    options = results.config.get("run", {})
    targets = list(options.get("targets", []) if targets is None else targets)
    terminal = terminal or int(options.get("terminal", TERMINAL_ROUNDS))
    labels = list(dict.fromkeys(run.label for run in results.runs))
    uniform = [run.label for run in results.runs if run.selector == "uniform"]
    base = baseline or options.get("baseline") or (uniform or labels or [""])[0]
    reference = reference or options.get("reference")
    groups: dict[tuple[str, str], list[RunInfo]] = {}
    for run in results.runs:
        groups.setdefault((str(run.setting.get("name", "")), run.label), []).append(run)
    last = {key: Spread.of([_terminal(results, run, terminal) for run in runs]) for key, runs in groups.items()}
    ideal = last[reference, base].mean if reference is not None and (reference, base) in last else None
    rows = []
    for (setting, label), runs in groups.items():
        own = last.get((setting, base))
        wanted = targets or ([] if own is None or np.isnan(own.mean) else [own.mean])
        against = groups.get((setting, base), [])
        rows.append(
            SummaryRow(
                label=label,
                setting=setting,
                seeds=len(runs),
                diverged=sum(run.state == "diverged" for run in runs),
                best=Spread.of([results.curves[run.id].best for run in runs if run.id in results.curves]),
                early_stop=Spread.of([_early_stop(results, run) for run in runs]),
                terminal=last[setting, label],
                improvement=float("nan")
                if own is None or label == base
                else relative_improvement(last[setting, label].mean, own.mean, ideal),
                to_target=tuple(_to_target(results, runs, against, target) for target in wanted),
                qcid=Spread.of([_mean(results.column(run, "qcid")) for run in runs]),
                megabytes=Spread.of([_bytes(results, run)[0] / 1e6 for run in runs]),
                query_share=_mean(np.array([_bytes(results, run)[1] for run in runs])),
                clock=Spread.of([_last(results.column(run, "clock")) for run in runs]),
            )
        )
    return Summary(tuple(rows), base, reference, bool(targets))


def _terminal(results: Results, run: RunInfo, last: int) -> float | None:
    curve = results.curves.get(run.id)
    return None if curve is None or run.state == "diverged" else curve.terminal(last)


def _early_stop(results: Results, run: RunInfo) -> float | None:
    curve = results.curves.get(run.id)
    return None if curve is None else curve.early_stop(run.rounds_done if run.state == "stopped" else None)


def _to_target(results: Results, runs: Sequence[RunInfo], against: Sequence[RunInfo], target: float) -> ToTarget:
    rounds, theirs = _rounds_to(results, runs, target), _rounds_to(results, against, target)
    ours, base = Spread.of(rounds), Spread.of(theirs)
    all_reached = ours.count == len(runs) and base.count == len(against) > 0
    seconds = [
        None if count is None else float(results.column(run, "clock")[count - 1])
        for run, count in zip(runs, rounds, strict=True)
    ]
    return ToTarget(target, ours, Spread.of(seconds), speed_up(ours.mean, base.mean) if all_reached else float("nan"))


def _rounds_to(results: Results, runs: Sequence[RunInfo], target: float) -> list[int | None]:
    return [results.curves[run.id].rounds_to(target) if run.id in results.curves else None for run in runs]


def _mean(values: Any) -> float:
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def _last(values: Any) -> float | None:
    return float(values[-1]) if len(values) else None


def _bytes(results: Results, run: RunInfo) -> tuple[float, float]:
    """All bytes of a run, and the share of them that queries cost."""
    training = sum(float(results.column(run, name).sum()) for name in ("bytes_down", "bytes_up"))
    queries = sum(float(results.column(run, name).sum()) for name in ("query_bytes_down", "query_bytes_up"))
    total = training + queries
    return total, queries / total if total else 0.0

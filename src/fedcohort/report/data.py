"""The runs of one or several experiments as NumPy arrays, grouped by setting and by selector.

The report and the dashboard draw them. Everything is read through
:class:`~fedcohort.simulate.store.results.Results`, so the figures know neither Parquet nor SQLite.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.journal.lock import is_locked
from fedcohort.report import palette
from fedcohort.session.coverage import Coverage, Tally, sentences
from fedcohort.simulate.leaderboard import (
    Leaderboard,
    Options,
    RunNumbers,
    leaderboards_of,
    setting_name,
)
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import Results, load

if TYPE_CHECKING:
    from fedcohort.simulate.store.facts import FederationFacts

_NUMBERS = (
    "accuracy", "metric", "loss", "qcid", "clock", "seconds", "query_seconds", "client_seconds", "query_client_seconds",
    "bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up", "available",
    "worst_group", "worst_tenth", "client_spread", "macro_f1", "worst_recall", "jain", "longest_absence", "asked",
    "selection_seconds",
)  # fmt: skip
_WHAT_IS_RUN = ("name", "seeds", "selectors", "sweep")  # may differ between experiments whose runs can be compared
_HOW_IT_IS_RUN = {
    f"run.{key}" for key in ("device", "processes", "engine", "lockstep", "checkpoint_seconds", "targets", "terminal",
    "baseline", "shadows")
}  # fmt: skip


@dataclass(frozen=True)
class RunCurve(RunNumbers):
    """One run as arrays.

    Attributes
    ----------
    pick_round, pick_client : (P,) int arrays
        Round and client of every pick.
    journal : path of the run's journal, if there is one
    """

    id: str
    federation: str
    params: Mapping[str, Any]
    pick_round: IntArray
    pick_client: IntArray
    journal: Path | None

    def coverage(self, clients: int) -> Coverage:
        """Return how many of the federation's clients carried the run."""
        rounds = self.round if len(self.pick_round) else self.round[:0]  # without a journal, nothing is known
        available = self.values["available"][: len(rounds)]
        return Tally.of_picks(clients, rounds, self.pick_round, self.pick_client, available).coverage()

    @property
    def total_bytes(self) -> FloatArray:
        """(T,) cumulative bytes in both directions, queries included."""
        names = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")
        return np.asarray(np.cumsum(sum(np.nan_to_num(self.values[name]) for name in names)))

    def evaluations(self, name: str) -> tuple[FloatArray, FloatArray]:
        """Return the rounds in which a column was recorded, and its values."""
        values = self.values[name]
        known = np.isfinite(values)
        return self.round[known].astype(np.float64), values[known]


@dataclass(frozen=True)
class SelectorRuns:
    """The runs of one selector (with one set of hyper-parameters) in one setting, one per seed."""

    label: str
    selector: str
    runs: tuple[RunCurve, ...]
    color: int
    dash: int


@dataclass(frozen=True)
class Setting:
    """Runs that may be compared: same data, same heterogeneity, same training.

    ``rounds`` is the length of the longest run so far, ``options`` say how it is compared, and
    ``names`` are the clients' names, if they have any.
    """

    name: str
    groups: tuple[SelectorRuns, ...]
    n_clients: int
    federations: Mapping[str, FederationFacts]
    rounds: int
    options: Options = Options()
    names: tuple[str, ...] | None = None

    def client_name(self, client: int) -> str:
        """Return a client's name, or its number if it has none."""
        return str(client) if self.names is None or client >= len(self.names) else self.names[client]

    @property
    def running(self) -> bool:
        """Whether some run has not ended."""
        return any(run.state == "running" for run in self.runs)

    @property
    def line_styles(self) -> dict[str, tuple[int, int]]:
        """Colour and dash of each selector's line, by label."""
        return {group.label: (group.color, group.dash) for group in self.groups}

    @property
    def runs(self) -> list[RunCurve]:
        """All runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    def warnings(self) -> list[str]:
        """Return a sentence for each selector under which too few clients carried the training."""
        return sentences((run.label, run.coverage(self.n_clients)) for run in self.runs)

    def federation(self) -> FederationFacts | None:
        """Return the federation of the first seed, for pictures of the scenario."""
        return next(iter(self.federations.values()), None)


@dataclass(frozen=True)
class Bundle:
    """Everything a report needs."""

    paths: tuple[Path, ...]
    settings: tuple[Setting, ...]
    configs: tuple[Mapping[str, Any], ...]
    metas: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]

    @property
    def n_runs(self) -> int:
        """How many runs there are in all settings."""
        return sum(len(group.runs) for setting in self.settings for group in setting.groups)


def boards(
    settings: Sequence[Setting], targets: Sequence[float] = (), baseline: str | None = None
) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of every setting."""
    options = {s.name: s.options.override(targets, baseline) for s in settings}
    return leaderboards_of({s.name: s.runs for s in settings}, options)


def load_bundle(paths: Sequence[str | Path]) -> Bundle:
    """Read one or several result directories into one bundle.

    If several have the same run, the newer one counts. Experiments that are set up differently from the newest are left
    out if they share a selector with it.
    """
    if not paths:
        raise InputError("A report needs at least one result directory.", hint="fedcohort report runs/NAME")
    results = [load(path) for path in paths]
    warnings: list[str] = []
    entries: list[_Entry] = []
    for path, result in zip(paths, results, strict=True):
        warnings += _warnings(Path(path), result)
        entries += [(result, setting, run, Path(path).name) for setting, run in runs_of(result, warnings)]
    if not entries:
        lost = [text for result in results for text in _run_warnings(result)]
        raise InputError(
            f"No round has been recorded in {', '.join(map(str, paths))} yet.",
            hint=lost[0] if lost else "wait for the first checkpoint, or follow the run with: fedcohort dashboard",
        )
    entries = _merged(entries, warnings)
    colors = palette.assign(run.label for _, _, run, _ in entries)
    settings = []
    for name in dict.fromkeys(setting for _, setting, _, _ in entries):
        members = [(result, run) for result, setting, run, _ in entries if setting == name]
        federations: dict[str, FederationFacts] = {}
        for result, run in members:
            try:
                if run.federation not in federations:
                    federations[run.federation] = result.federation(run.id)
            except ResultsError as error:
                warnings.append(f"{error.message} Figures of the scenario are left out.")
        settings.append(setting_of(name, members, colors, federations))
    # An experiment whose runs are all shown from a newer one is not named on the page.
    shown = [result for result in results if any(member is result for member, *_ in entries)]
    return Bundle(
        paths=tuple(result.path for result in shown),
        settings=tuple(settings),
        configs=tuple(result.config for result in shown),
        metas=tuple(result.meta for result in shown),
        warnings=tuple(dict.fromkeys(warnings)),
    )


_Entry = tuple[Results, str, "RunCurve", str]  # results, name of the setting, run, name of the experiment


def is_orphaned(folder: Path, status: Mapping[str, Any]) -> bool:
    """Whether a process of this machine left an experiment behind that is still marked as running."""
    if status.get("host") not in (None, platform.node()):
        return False
    # Without a lock file, the experiment may have been copied from elsewhere while it ran.
    lock = folder / ".lock"
    return lock.exists() and is_locked(lock) is False


def _warnings(path: Path, result: Results) -> list[str]:
    """Return sentences about what a reader must know before trusting the figures."""
    status, again = result.status, "it can be continued with --resume"
    state, done, total = status.get("state"), status.get("rounds_done"), status.get("rounds_total")
    progress = f" ({done} of {total} rounds)" if done is not None and total else ""
    if state == "running" and is_orphaned(path, status):
        state = "orphaned"
    texts = {
        "orphaned": f"is marked as running{progress}, but the process that wrote it is gone; {again}.",
        "running": f"is still running{progress}: every figure may change.",
        "interrupted": f"was interrupted{progress}; {again}.",
        "failed": f"failed{progress}: {status.get('message') or 'no reason was recorded'}.",
    }
    known = [f"{path.name} {texts[state]}"] if state in texts else []
    return known + _run_warnings(result)


def _run_warnings(result: Results) -> list[str]:
    """Return sentences about runs that were lost, or that ran on two kinds of engine."""
    warnings = []
    for run in result.runs:
        if run.state in ("diverged", "failed"):
            why = run.reason or ("not a number" if run.state == "diverged" else "no reason was recorded")
            warnings.append(f"Run {run.id} {run.state} after {run.rounds_done} rounds: {why}.")
        if len(run.engines) > 1:
            by = ", ".join(f"from round {since} by {kind}" if since else f"by {kind}" for since, kind in run.engines)
            warnings.append(f"Run {run.id} was trained {by}: engines round differently, so the run cannot be repeated.")
    return warnings


def runs_of(result: Results, warnings: list[str]) -> Iterator[tuple[str, RunCurve]]:
    """Yield each run that has a round, with the name of its setting.

    A run whose journal cannot be read has no picks; ``warnings`` then says why.
    """
    for info in result.runs:
        rounds = np.asarray(result.column(info, "round"), np.int64)
        if not len(rounds):  # it has just begun, or failed before its first round
            continue
        values = {name: np.asarray(result.column(info, name), np.float64) for name in _NUMBERS}
        try:
            cohorts = result.cohorts(info)
        except FedcohortError as error:
            warnings.append(f"The cohorts of {info.id} cannot be read: {error.message}")
            cohorts = [np.zeros(0, np.int64)] * len(rounds)
        journal = result.journal(info)
        yield (
            setting_name(info.setting),
            RunCurve(
                id=info.id,
                label=info.label or info.selector,
                selector=info.selector,
                seed=int(info.seed),
                state=info.state,
                federation=f"{result.path}:{info.federation}",
                params=info.params,
                round=rounds,
                values=values | {"accuracy": result.score(info)},
                # Rounds without a recorded cohort repeat zero times.
                pick_round=np.repeat(rounds, [len(cohort) for cohort in cohorts]),
                pick_client=np.concatenate(cohorts),
                journal=journal if journal.is_file() else None,
            ),
        )


def _merged(entries: list[_Entry], warnings: list[str]) -> list[_Entry]:
    """Return each selector, setting and seed once.

    Of experiments that are set up alike, the newer run counts. Of others that share a selector's label, only the newest
    experiment is left, with those like it; ``warnings`` says so.
    """

    def created(result: Results) -> str:
        return str(result.meta.get("created", ""))

    results = {experiment: result for result, _, _, experiment in entries}
    # What was run last is what its user wants to see; mixing setups would blame selectors for other data.
    newest = max(results, key=lambda name: created(results[name]))
    unlike = {name: keys for name in results if (keys := _differences(results[name].config, results[newest].config))}
    shared = {e[2].label for e in entries if e[3] in unlike} & {e[2].label for e in entries if e[3] not in unlike}
    if unlike:
        keys = list(dict.fromkeys(key for keys in unlike.values() for key in keys))
        end = "left out" if shared else "part of this report, but differences may not be due to the selectors"
        warnings.append(f"Set up differently from {newest} ({names(keys, 3)}) and so {end}: {names(list(unlike))}.")
    found: dict[tuple[str, str, int], list[_Entry]] = {}
    for entry in entries:
        if not (shared and entry[3] in unlike):
            found.setdefault((entry[1], entry[2].label, entry[2].seed), []).append(entry)
    twice = dict.fromkeys(label for (_, label, _), same in found.items() if len(same) > 1)
    if twice:
        warnings.append(f"In several of these experiments, so the newer runs are shown: {names(list(twice))}.")
    # More rounds are better than a later start.
    return [max(same, key=lambda entry: (len(entry[2].round), created(entry[0]))) for same in found.values()]


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two experiments differ, except for what runs in them, and on which machine."""
    labels = [config.get("selectors", {}) for config in (one, other)]
    flat = [
        {k: v for k, v in _flat(config) if k not in _HOW_IT_IS_RUN and k.partition(".")[0] not in _WHAT_IS_RUN}
        | {f"selectors.{label}": entry for label, entry in entries.items() if label in labels[0] and label in labels[1]}
        for config, entries in zip((one, other), labels, strict=True)
    ]
    return [key for key in {**flat[0], **flat[1]} if flat[0].get(key) != flat[1].get(key)]


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def setting_of(
    name: str,
    members: Sequence[tuple[Results, RunCurve]],
    colors: Mapping[str, tuple[int, int]],
    federations: Mapping[str, FederationFacts],
    clients: int = 0,
) -> Setting:
    """Return the runs of one setting by selector; there are at least ``clients`` clients."""
    # The first experiment that sets an option decides.
    options = [Options.of(result.config, result.run(run.id).setting) for result, run in members]
    metrics = dict.fromkeys(option.metric.name for option in options)
    if len(metrics) > 1:
        raise InputError(
            f"Experiments that are judged by {' and by '.join(metrics)} cannot be compared.",
            hint="make a separate report for each",
        )
    # Without facts about the federation, the highest client that was picked is the best guess.
    n = max(clients, *(len(f.sizes) for f in federations.values()), 0)
    n = max(n, *(int(run.pick_client.max(initial=-1)) + 1 for _, run in members))
    groups = []
    for label in dict.fromkeys(run.label for _, run in members):
        runs = tuple(sorted((run for _, run in members if run.label == label), key=lambda r: r.seed))
        groups.append(SelectorRuns(label, runs[0].selector, runs, *colors[label]))
    all_names = {facts.names for facts in federations.values()}  # they may differ between seeds
    return Setting(
        name,
        tuple(groups),
        n,
        federations,
        rounds=max(int(run.round.max(initial=0)) + 1 for _, run in members),
        options=Options(
            metric=options[0].metric,
            targets=next((o.targets for o in options if o.targets), ()),
            terminal=next((o.terminal for o in options if o.terminal), None),
            baseline=next((o.baseline for o in options if o.baseline), None),
            reference=next((o.reference for o in options if o.reference), None),
            planned=max((o.planned for o in options if o.planned), default=None),
        ),
        names=all_names.pop() if len(all_names) == 1 else None,
    )

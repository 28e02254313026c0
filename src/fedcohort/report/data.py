"""What a report draws: runs of one or several experiments, grouped by setting and by selector.

Everything is read through :func:`fedcohort.simulate.store.results.load` and turned into plain NumPy arrays here, so
that the figures need to know neither Parquet nor SQLite.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.journal.lock import is_locked
from fedcohort.report import palette
from fedcohort.session.coverage import Coverage, Tally, sentences
from fedcohort.simulate.leaderboard import Leaderboard, Options, SettingOptions, leaderboards_of, setting_name

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.store.facts import FederationFacts
    from fedcohort.simulate.store.results import Results

_NUMBERS = (
    "accuracy", "metric", "loss", "qcid", "clock", "seconds", "query_seconds", "client_seconds", "query_client_seconds",
    "bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up", "available",
)  # fmt: skip


@dataclass(frozen=True)
class RunCurve:
    """One run as arrays.

    Attributes
    ----------
    values : mapping of column name to (T,) float array
        NaN where nothing was recorded.
    pick_round, pick_client : (P,) int arrays
        Every membership of a client in a cohort.
    journal : path of the run's journal, when there is one
    """

    id: str
    label: str
    selector: str
    seed: int
    state: str
    reason: str
    federation: str
    params: Mapping[str, Any]
    round: IntArray
    values: Mapping[str, FloatArray]
    pick_round: IntArray
    pick_client: IntArray
    journal: Path | None

    def coverage(self, clients: int) -> Coverage:
        """Return how many of the federation's clients carried the run."""
        return Tally.of_picks(clients, self.round, self.pick_round, self.pick_client).coverage()

    @property
    def total_bytes(self) -> FloatArray:
        """(T,) cumulative bytes in both directions, queries included."""
        names = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")
        return np.asarray(np.cumsum(sum(np.nan_to_num(self.values[name]) for name in names)))

    def evaluated(self, name: str) -> tuple[IntArray, FloatArray]:
        """Return rounds and values of a column where it was recorded."""
        values = self.values[name]
        seen = np.isfinite(values)
        return self.round[seen], values[seen]


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

    ``rounds`` is how many the longest run has made, ``own`` what the setting says of them: how many each is to make;
    ``names`` are the clients' own, where they have some.
    """

    name: str
    groups: tuple[SelectorRuns, ...]
    n_clients: int
    federations: Mapping[str, FederationFacts]
    rounds: int
    own: SettingOptions = SettingOptions()
    names: tuple[str, ...] | None = None

    def called(self, client: int) -> str:
        """Return how a client is called: by its name, else by its number."""
        return str(client) if self.names is None or client >= len(self.names) else self.names[client]

    @property
    def running(self) -> bool:
        """Whether a run is not at its end, so that nothing may be said about ends."""
        return any(run.state == "running" for run in self.runs)

    @property
    def drawn(self) -> dict[str, tuple[int, int]]:
        """How each selector's line is drawn: colour and dash by label."""
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
    running: bool
    options: Options

    @property
    def n_runs(self) -> int:
        """How many runs there are in all settings."""
        return sum(len(group.runs) for setting in self.settings for group in setting.groups)


def boards(settings: Sequence[Setting], options: Options) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of every setting."""
    return leaderboards_of({s.name: s.runs for s in settings}, options, {s.name: s.own for s in settings})


def load_bundle(paths: Sequence[str | Path]) -> Bundle:
    """Read one or several result directories into one bundle.

    Runs of several experiments are put together; where two experiments use the same label for the same setting and
    seed, the label is followed by the experiment's name.
    """
    from fedcohort.simulate.store.results import load

    if not paths:
        raise InputError("A report needs at least one result directory.", hint="fedcohort report runs/NAME")
    results = [load(path) for path in paths]
    warnings: list[str] = []
    entries: list[tuple[Results, str, RunCurve, str]] = []  # results, setting name, run, experiment name
    for path, result in zip(paths, results, strict=True):
        warnings += _warnings(Path(path), result)
        entries += [(result, setting, run, Path(path).name) for setting, run in _runs(Path(path), result)]
    if not entries:
        raise InputError(
            f"No round has been recorded in {', '.join(map(str, paths))} yet.",
            hint="wait for the first checkpoint, or follow the run with: fedcohort dashboard",
        )
    entries = _unique_labels(entries)
    colors = palette.assign(run.label for _, _, run, _ in entries)
    names = list(dict.fromkeys(setting for _, setting, _, _ in entries))
    settings = tuple(
        _setting(name, [(result, run) for result, setting, run, _ in entries if setting == name], colors, warnings)
        for name in names
    )
    return Bundle(
        paths=tuple(Path(p) for p in paths),
        settings=settings,
        configs=tuple(r.config for r in results),
        metas=tuple(r.meta for r in results),
        warnings=tuple(dict.fromkeys(warnings)),
        running=any(r.status.get("state") == "running" for r in results),
        options=_options([r.config for r in results]),
    )


def _options(configs: Sequence[Mapping[str, Any]]) -> Options:
    """Return what the configurations say about the comparison; of several experiments the first that says it."""
    found = [Options.of(config) for config in configs]
    judged = {options.metric.name: options.metric for options in found}
    if len(judged) > 1:
        raise InputError(
            f"Experiments that are judged by {' and by '.join(judged)} cannot be compared.",
            hint="make a report of each",
        )
    return Options(
        metric=found[0].metric if found else Options().metric,
        targets=next((o.targets for o in found if o.targets), ()),
        terminal=next((o.terminal for o in found if o.terminal), None),
        baseline=next((o.baseline for o in found if o.baseline), None),
        reference=next((o.reference for o in found if o.reference), None),
    )


def abandoned(folder: Path, status: Mapping[str, Any]) -> bool:
    """Whether an experiment that says it is running was left behind by a process of this machine that is gone."""
    if status.get("host") not in (None, platform.node()):
        return False
    lock = folder / ".lock"
    return lock.exists() and is_locked(lock) is False


def _warnings(path: Path, result: Results) -> list[str]:
    """Return sentences about what a reader must know before believing the figures."""
    found = []
    state = result.status.get("state")
    done, total = result.status.get("rounds_done"), result.status.get("rounds_total")
    how_far = f" ({done} of {total} rounds)" if done is not None and total else ""
    if state == "running" and abandoned(path, result.status):
        found.append(
            f"{path.name} says that it is running{how_far}, but the process that wrote it is gone; "
            "it can be continued with --resume."
        )
    elif state == "running":
        found.append(f"{path.name} is still being written{how_far}: every figure may change.")
    elif state == "interrupted":
        found.append(f"{path.name} was interrupted{how_far}; it can be continued with --resume.")
    elif state == "failed":
        found.append(f"{path.name} failed{how_far}: {result.status.get('message') or 'no reason was recorded'}.")
    for run in result.runs:
        if run.state in ("diverged", "failed"):
            why = run.reason or ("not a number" if run.state == "diverged" else "no reason was recorded")
            found.append(f"Run {run.id} {run.state} after {run.rounds_done} rounds: {why}.")
        if len(run.engines) > 1:
            made = ", ".join(f"from round {since} by {kind}" if since else f"by {kind}" for since, kind in run.engines)
            found.append(f"Run {run.id} was trained {made}: engines round differently, so that nobody can repeat it.")
    return found


def _runs(path: Path, result: Results) -> Iterable[tuple[str, RunCurve]]:
    table = result.rounds
    if table.num_rows == 0:
        return
    slices = _by_run(table)
    for info in result.runs:
        if info.id not in slices:
            continue
        rows = table.take(slices[info.id])
        round_ = np.asarray(rows["round"].to_numpy(), np.int64)
        values = {name: _column(rows, name) for name in _NUMBERS} | {"accuracy": result.score(info)}
        cohorts = rows["cohort"].combine_chunks()
        lengths = np.asarray(cohorts.value_lengths().to_numpy(zero_copy_only=False), np.int64)
        journal = result.journal(info)
        yield (
            setting_name(info.setting),
            RunCurve(
                id=info.id,
                label=info.label or info.selector,
                selector=info.selector,
                seed=int(info.seed),
                state=info.state,
                reason=info.reason or "",
                federation=f"{path}:{info.federation}",
                params=info.params,
                round=round_,
                values=values,
                pick_round=np.repeat(round_, lengths),
                pick_client=np.asarray(cohorts.flatten().to_numpy(), np.int64),
                journal=journal if journal.is_file() else None,
            ),
        )


def _by_run(table: pa.Table) -> dict[str, IntArray]:
    """Return for each run the row numbers of its rounds, in order of rounds, each round once."""
    column = table["run"].combine_chunks().dictionary_encode()
    names = column.dictionary.to_pylist()
    codes = np.asarray(column.indices.to_numpy(zero_copy_only=False), np.int64)
    rounds = np.asarray(table["round"].to_numpy(), np.int64)
    order = np.lexsort((rounds, codes))
    found: dict[str, IntArray] = {}
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    for i, name in enumerate(names):
        rows = order[starts[i] : starts[i + 1]]
        last = np.append(rounds[rows][1:] != rounds[rows][:-1], True)  # a resumed run may have written a round twice
        found[str(name)] = rows[last]
    return found


def _column(table: pa.Table, name: str) -> FloatArray:
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    values = table[name].to_numpy()
    return np.asarray(values, np.float64)


def _unique_labels(
    entries: list[tuple[Results, str, RunCurve, str]],
) -> list[tuple[Results, str, RunCurve, str]]:
    seen: dict[tuple[str, str, int], str] = {}
    clash = set()
    for _, setting, run, experiment in entries:
        if seen.setdefault((setting, run.label, run.seed), experiment) != experiment:
            clash.add((setting, run.label))
    return [
        (result, setting, dataclasses.replace(run, label=f"{run.label} ({experiment})"), experiment)
        if (setting, run.label) in clash
        else (result, setting, run, experiment)
        for result, setting, run, experiment in entries
    ]


def _setting(
    name: str, members: list[tuple[Results, RunCurve]], colors: Mapping[str, tuple[int, int]], warnings: list[str]
) -> Setting:
    from fedcohort.simulate.store.results import ResultsError

    federations: dict[str, FederationFacts] = {}
    for result, run in members:
        if run.federation in federations:
            continue
        try:
            federations[run.federation] = result.federation(run.id)
        except ResultsError as error:
            warnings.append(f"{error.message} Pictures of the scenario are left out.")
    n = max((len(f.sizes) for f in federations.values()), default=0)
    n = max(n, *(int(run.pick_client.max(initial=-1)) + 1 for _, run in members))
    labels = list(dict.fromkeys(run.label for _, run in members))
    groups = []
    for label in labels:
        runs = tuple(sorted((run for _, run in members if run.label == label), key=lambda r: r.seed))
        groups.append(SelectorRuns(label, runs[0].selector, runs, *colors[label]))
    rounds = max(int(run.round.max(initial=0)) + 1 for _, run in members)
    said = [SettingOptions.of(result.config, result.run(run.id).setting) for result, run in members]
    own = dataclasses.replace(said[0], planned=max((mine.planned for mine in said if mine.planned), default=None))
    called = {facts.names for facts in federations.values()}  # names of several seeds' federations may differ
    names = called.pop() if len(called) == 1 else None
    return Setting(name, tuple(groups), n, federations, rounds, own, names)

"""Add seeds, rounds or selectors to the configuration of an existing experiment.

Nothing is written here. Runs on disk keep their federations, their lock-step groups and all their rows; see
:meth:`fedcohort.simulate.runner.Simulation.extend`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.config.experiment import MAX_RUNS, Experiment
from fedcohort.simulate.config.toml import ConfigError, read_table
from fedcohort.simulate.store import checkpoint as checkpoints
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import check_continuable


def larger_experiment(
    out: Path, *, seeds: Sequence[int] | int | None, rounds: int | None, selectors: Mapping[str, Any]
) -> Experiment:
    """Return the experiment in ``out`` with more seeds, rounds or selectors.

    Parameters
    ----------
    seeds : sequence of int or int or None
        Seeds to add, or the new total number of seeds.
    rounds : int or None
        New total number of rounds.
    selectors : mapping of label to table
        Entries to add to ``[selectors]``.
    """
    results = load(out)
    check_continuable(out, results.meta)
    before = Experiment.from_dict(read_table(out / "config.toml"))
    table = copy.deepcopy(before.table)
    if seeds is not None:
        table["seeds"] = _more_seeds(table["seeds"], seeds)
    if rounds is not None:
        table["run"]["rounds"] = rounds
    for label, entry in selectors.items():
        if label in table["selectors"]:
            raise ConfigError(
                f"The experiment in {out} already has a selector labelled {label!r}.",
                hint="to try other parameters, use another label or run another experiment",
            )
        table["selectors"][label] = entry
        if table.get("filter", {}).get("name") == "keep-all":  # then it needs the parts that it would bring itself
            table["selectors"][label] = Experiment.from_dict({"selectors": {label: entry}}).table["selectors"][label]
    experiment = Experiment.from_dict(table)
    planned = {plan.id: plan.options.rounds for plan in before.plans}
    for plan in experiment.plans:
        if plan.options.rounds < planned.get(plan.id, 0):
            raise ConfigError(
                f"The run {plan.id!r} has {planned[plan.id]} rounds, which cannot become {plan.options.rounds}.",
                hint="rounds can be added, not removed",
            )
    if not any(plan.options.rounds > planned.get(plan.id, 0) for plan in experiment.plans):
        raise ConfigError(
            f"There is nothing to add to {out}: it already has {len(before.plans)} runs of "
            f"{' or '.join(str(n) for n in sorted(set(planned.values())))} rounds.",
            hint="add seeds, rounds or selectors; an interrupted experiment continues with 'fedcohort run --resume'",
        )
    # A run that has not finished may start over, but a finished one without its model cannot be continued.
    saved = {name for group in checkpoints.all_newest(out / "checkpoint").values() for name in group["runs"]}
    lost = [info.id for info in results.runs if info.rounds_done and info.id not in saved]
    if lost and results.status.get("state") == "finished":
        raise ResultsError(
            f"The run {lost[0]!r} has no checkpoint in {out / 'checkpoint'}, so it cannot be continued.",
            hint="run the larger experiment from the start in another directory",
        )
    return experiment


def _more_seeds(present: Sequence[int], seeds: Sequence[int] | int) -> list[int]:
    """Return the present seeds followed by the new ones."""
    if isinstance(seeds, int):
        if seeds > MAX_RUNS:
            raise ConfigError(f"An experiment has at most {MAX_RUNS:,} runs. Got {seeds:,} seeds.")
        if seeds < len(present):
            raise ConfigError(
                f"The experiment has {len(present)} seeds, which cannot become {seeds}.",
                hint="seeds can be added, not removed; a list such as 7,8 adds these two seeds",
            )
        # The smallest numbers that are free, as a new experiment with so many seeds has them.
        existing = set(present)
        fresh = (seed for seed in itertools.count() if seed not in existing)
        return [*present, *itertools.islice(fresh, seeds - len(present))]
    # A seed that is already there is not an error: the command can be given twice.
    return list(dict.fromkeys([*present, *seeds]))


def smaller_experiment(experiment: Experiment, folder: Path) -> Path | None:
    """Return the newest finished experiment in ``folder`` that only lacks seeds or selectors of ``experiment``.

    One with files of the user is never returned, because they may have changed since.
    """
    table = experiment.table
    # The newest first: an older one may have been made by other code under the same name.
    for path in sorted(folder.glob("*/meta.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            before, state = (
                Experiment.from_dict(read_table(path.with_name("config.toml"))).table,
                load(path.parent).status.get("state"),
            )
        except FedcohortError:
            continue
        fewer = [table["seeds"][: len(before["seeds"])] == before["seeds"]]
        fewer += [table["selectors"].get(label) == entry for label, entry in before["selectors"].items()]
        same = all(table.get(key) == before.get(key) for key in {*table, *before} - {"seeds", "selectors"})
        if state == "finished" and same and all(fewer) and before != table and not _reads_files(table):
            return path.parent
    return None


def _reads_files(value: Any) -> bool:
    """Whether a configuration names code, data or traces of the user."""
    if isinstance(value, Mapping):
        return any(key in ("path", "folder", "dataset", "file") or _reads_files(item) for key, item in value.items())
    if isinstance(value, list):
        return any(map(_reads_files, value))
    return isinstance(value, str) and (":" in value or "/" in value)

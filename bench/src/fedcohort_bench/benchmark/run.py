"""Plan, run and score a benchmark; ``fedcohort bench`` uses this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from fedcohort.core.errors import InputError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import suggest
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import to_toml
from fedcohort.simulate.data import Dataset
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import write_atomically
from fedcohort_bench.benchmark import page, timed, timed_page
from fedcohort_bench.benchmark.frozen import Frozen, check_same
from fedcohort_bench.benchmark.own import own_table
from fedcohort_bench.benchmark.scores import Scores, score
from fedcohort_bench.benchmark.suite import DATASETS, table
from fedcohort_bench.benchmark.timed_scores import TimeScores, score_time
from fedcohort_bench.launch import Launcher

QUICK_ROUNDS = 20
TIME = "time"  # the suite in simulated time
T = TypeVar("T")


def every_selector() -> list[str]:
    """Return the names of all selectors, except wrappers and those that always choose everybody."""
    classes = {name: cast(type[Selector[Any]], SELECTORS.get(name)) for name in SELECTORS.names()}
    return [name for name, cls in classes.items() if cls.selects and not cls.is_wrapper]


def plan(
    data: str | Dataset,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    quick: bool = False,
    folder: str | None = None,
    columns: Mapping[str, str] | None = None,
    baseline: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a benchmark as an experiment's configuration, and notes on what was decided for the user.

    Parameters
    ----------
    data : str or Dataset
        A dataset of the benchmark (:func:`~fedcohort_bench.benchmark.suite.table`), or the user's own data
        (:func:`~fedcohort_bench.benchmark.own.own_table`).
    selectors : mapping of str to table
        Entries of ``[selectors]`` by label.
    settings : sequence of str
        Only these.
    quick : bool
        One seed and few rounds, to check that everything runs.
    folder : str, optional
        Where the datasets are.
    columns : mapping, optional
        The columns ``label`` and ``client`` of the user's own table.
    baseline : str, optional
        One of the selectors to compare with, instead of uniform; such a result is no submission.
    """
    chosen, rounds = (list(seeds)[:1], QUICK_ROUNDS) if quick else (list(seeds), 0)
    notes: list[str] = []
    if not isinstance(data, str) or data not in DATASETS:
        config, notes = own_table(
            data, selectors, chosen, columns=columns, folder=folder, settings=settings, rounds=rounds
        )
    elif columns:
        raise InputError(
            f"{' and '.join(columns)} name columns of a table of your own, but {data!r} is a dataset of the benchmark.",
            hint="name the file: --data people.csv",
        )
    else:
        config = table(data, selectors, chosen, settings=settings, rounds=rounds)
        config["data"] |= {} if folder is None else {"folder": folder}
    if baseline is not None:
        known = config["selectors"]
        if baseline not in known:
            raise InputError(
                f"The baseline {baseline!r} is not among the selectors: {', '.join(known)}.",
                hint=suggest(baseline, known) or "add it to --selectors",
            )
        config["run"] |= {"baseline": baseline}
    return config, notes


def plan_time(
    data: str,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    regimes: Sequence[str] = (),
    quick: bool = False,
    folder: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the experiments of the suite "time", each under the name of its folder.

    Parameters are those of :func:`plan`; ``regimes`` are kinds of availability.
    """
    chosen, rounds = (list(seeds)[:1], QUICK_ROUNDS) if quick else (list(seeds), 0)
    pieces = timed.tables(data, selectors, chosen, regimes=regimes, rounds=rounds)
    for config in pieces.values():
        config["data"] |= {} if folder is None else {"folder": folder}
    return pieces


def begin(config: Mapping[str, Any], out: Path, launcher: Launcher) -> Simulation:
    """Prepare a planned benchmark in a new folder, and freeze what it is going to run."""
    simulation = launcher.begin(config, out)
    Frozen.of(simulation.experiment).write(out)
    return simulation


def _resume(out: Path, launcher: Launcher) -> Simulation:
    """Open a benchmark to continue it, unless its selectors have changed since it began."""
    simulation = launcher.resume(out)
    check_same(Frozen.read(out), Frozen.of(simulation.experiment), out)
    return simulation


def run_dataset(config: Mapping[str, Any], out: Path, launcher: Launcher) -> Scores | None:
    """Run a planned benchmark, or continue it in its folder; return its scores, or None if it was stopped."""
    return write_scores(out) if _play(config, out, launcher) else None


def resume_dataset(out: Path, launcher: Launcher) -> Scores | None:
    """Continue the benchmark in a folder; return its scores, or None if it was stopped."""
    return write_scores(out) if launcher.run(_resume(out, launcher)) else None


def run_time(pieces: Mapping[str, Mapping[str, Any]], out: Path, launcher: Launcher) -> TimeScores | None:
    """Run the planned pieces of the suite "time", or continue them; return the scores, or None if they were stopped."""
    if not all(_play(config, out / name, launcher) for name, config in pieces.items()):
        return None
    scores = score_time(*(load(out / piece) for piece in timed.PIECES))
    _write(out, scores.to_dict(), timed_page.page(scores))
    return scores


def _play(config: Mapping[str, Any], out: Path, launcher: Launcher) -> bool:
    """Continue the benchmark in a folder, or begin it there; return whether it finished."""
    if not (out / "meta.json").is_file():
        return launcher.run(begin(config, out, launcher))
    simulation = _resume(out, launcher)
    # As text: what was read back from a file has lists where a plan has tuples.
    if to_toml(simulation.experiment.table) != to_toml(Experiment.from_dict(dict(config)).table):
        raise InputError(
            f"{out} holds a benchmark with other options, which cannot become this one.",
            hint="name another folder with --out, or repeat the command that the benchmark was begun with",
        )
    return launcher.run(simulation)


def write_scores(*folders: Path, baseline: str | None = None) -> Scores:
    """Score a benchmark, or its pieces with different settings; write bench.json and bench.html to the first folder."""
    scores = score(*(load(folder) for folder in folders), baseline=baseline)
    _write(folders[0], scores.to_dict(), page.page(scores))
    return scores


def _write(out: Path, scores: Mapping[str, Any], html: str) -> None:
    write_atomically(out / "bench.json", (json.dumps(scores, indent=1) + "\n").encode())
    write_atomically(out / "bench.html", html.encode())


def read_scores(path: Path) -> Scores:
    """Return the scores of a bench.json."""
    return _read(path, Scores.from_dict)


def read_time_scores(path: Path) -> TimeScores:
    """Return the scores of a bench.json of the suite "time"."""
    return _read(path, TimeScores.from_dict)


def _read(path: Path, make: Callable[[Any], T]) -> T:
    try:
        return make(json.loads(read_file(path)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} does not hold scores of the benchmark ({type(error).__name__}: {error}).",
            hint="name a bench.json, which 'fedcohort bench' writes next to the results",
        ) from error

"""Choose the selectors and seeds of a benchmark, and write its scores; shared by both ways to start one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import write_atomically
from fedcohort.studies.benchmark import timed, timed_scores
from fedcohort.studies.benchmark.frozen import Frozen, check_same
from fedcohort.studies.benchmark.page import page
from fedcohort.studies.benchmark.scores import Scores, score
from fedcohort.studies.benchmark.suite import REPORT_SEEDS, SUITES, TUNING_SEEDS, table
from fedcohort.studies.benchmark.timed_scores import TimeScores, score_time

QUICK_ROUNDS = 20
TIME = "time"  # the suite by the clock
T = TypeVar("T")


def every_selector() -> list[str]:
    """Return the names of all selectors that choose: not one that always takes everybody, nor a wrapper."""
    found = {name: cast(type[Selector[Any]], SELECTORS.get(name)) for name in SELECTORS.names()}
    return [name for name, cls in found.items() if cls.selects and not cls.is_wrapper]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a word or a list stands for.

    >>> parse_seeds("report"), parse_seeds("1,2")
    ([300, 301, 302, 303, 304], [1, 2])
    """
    if text in ("report", "tuning"):
        return list(REPORT_SEEDS if text == "report" else TUNING_SEEDS)
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"Seeds must be 'report', 'tuning', or a list such as 1,2. Got {text!r}.") from None


def tables(
    suite: str | None,
    data: str,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    quick: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the experiments of a benchmark by the folder that each gets below that of the results.

    Parameters
    ----------
    suite : str or None
        "natural": all datasets with real owners; "time": two experiments on ``data`` by the clock; None: the benchmark
        of ``data``, whose folder is that of the results.
    data : str
        As :func:`~fedcohort.studies.benchmark.suite.table` takes it.
    selectors : mapping of str to table
        Entries of ``[selectors]`` by label.
    seeds : sequence of int
    settings : sequence of str
        Only these; of the suite "time", only these kinds of availability.
    quick : bool
        One seed and few rounds, to see that everything runs.
    """
    others = {name: entry for name, entry in selectors.items() if name != "uniform"}
    few, rounds = list(seeds)[: 1 if quick else None], QUICK_ROUNDS if quick else 0
    if suite is None:
        return {"": table(data, others, few, settings=settings, rounds=rounds)}
    if suite == TIME:
        return timed.tables(data, others, few, regimes=settings, rounds=rounds)
    if suite not in SUITES:
        raise UnknownNameError(f"There is no suite {suite!r}. Known: {', '.join((*SUITES, TIME))}.")
    return {name: table(name, others, few, settings=settings, rounds=rounds) for name in SUITES[suite]}


def begin(
    wanted: Mapping[str, Any],
    out: Path,
    *,
    folder: str | None = None,
    device: str | None = None,
    processes: int | None = None,
    command: str = "",
) -> Simulation:
    """Prepare an experiment of :func:`tables` in a new folder, and write down what is going to be run.

    Parameters
    ----------
    wanted : mapping
    out : Path
    folder : str, optional
        Where the datasets are.
    device, processes, command
        As :class:`~fedcohort.simulate.rounds.runner.Simulation` takes them.
    """
    if folder is not None:
        wanted = {**wanted, "data": {**wanted["data"], "folder": folder}}
    simulation = Simulation(Experiment.from_dict(wanted), out, device=device, processes=processes, command=command)
    Frozen.of(simulation.experiment).write(out)
    return simulation


def resume(out: Path, *, device: str | None = None, processes: int | None = None) -> Simulation:
    """Continue a benchmark; one whose selectors have changed since it began is refused."""
    simulation = Simulation.open(out, device=device, processes=processes)
    known = Frozen.read(out)
    if known is not None:
        check_same(known, Frozen.of(simulation.experiment), out)
    return simulation


def write_scores(*folders: Path) -> Scores:
    """Score a benchmark, or pieces of one with different settings; write bench.json and bench.html into the first."""
    scores = score(*(load(folder) for folder in folders))
    write_atomically(folders[0] / "bench.json", (json.dumps(scores.to_dict(), indent=1) + "\n").encode())
    write_atomically(folders[0] / "bench.html", page(scores).encode())
    return scores


def write_time_scores(out: Path) -> TimeScores:
    """Score the suite "time" in a folder; write bench.json and bench.md beside its pieces."""
    scores = score_time(*(load(out / piece) for piece in timed.PIECES))
    write_atomically(out / "bench.json", (json.dumps(scores.to_dict(), indent=1) + "\n").encode())
    write_atomically(out / "bench.md", timed_scores.markdown(scores).encode())
    return scores


def read_scores(path: Path) -> Scores:
    """Return the scores of a bench.json."""
    return _read(path, Scores.from_dict)


def read_time_scores(path: Path) -> TimeScores:
    """Return the scores of a bench.json of the suite "time"."""
    return _read(path, TimeScores.from_dict)


def is_timed(path: Path) -> bool:
    """Whether a bench.json is of the suite "time"."""
    return _read(path, lambda found: bool(found.get("suite") == TIME))


def _read(path: Path, make: Callable[[Any], T]) -> T:
    try:
        return make(json.loads(read_file(path)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} does not hold scores of the benchmark ({type(error).__name__}: {error}).",
            hint="name a bench.json, as 'fedcohort bench' writes it beside the results",
        ) from error

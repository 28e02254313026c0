"""Choose the selectors and seeds of a benchmark, and write its scores; shared by both ways to start one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from fedcohort.core.errors import InputError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import Dataset
from fedcohort.simulate.rounds.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import write_atomically
from fedcohort.studies.benchmark import timed
from fedcohort.studies.benchmark.frozen import Frozen, check_same
from fedcohort.studies.benchmark.own import own_table
from fedcohort.studies.benchmark.scores import Scores, score
from fedcohort.studies.benchmark.suite import DATASETS, REPORT_SEEDS, TUNING_SEEDS, table
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
    ([400, 401, 402, 403, 404], [1, 2])
    """
    if text in ("report", "tuning"):
        return list(REPORT_SEEDS if text == "report" else TUNING_SEEDS)
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"Seeds must be 'report', 'tuning', or a list such as 1,2. Got {text!r}.") from None


def plan(
    data: str | Dataset,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    quick: bool = False,
    folder: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a benchmark as an experiment's configuration, and what was decided for the user, in sentences.

    Parameters
    ----------
    data : str or Dataset
        As :func:`~fedcohort.studies.benchmark.suite.table` takes it, or data of one's own, as
        :func:`~fedcohort.studies.benchmark.own.own_table` takes them.
    selectors : mapping of str to table
        Entries of ``[selectors]`` by label.
    settings : sequence of str
        Only these.
    quick : bool
        One seed and few rounds, to see that everything runs.
    folder : str, optional
        Where the datasets are.
    columns : mapping, optional
        Of a table of one's own: ``label`` and ``client``.
    """
    others = {name: entry for name, entry in selectors.items() if name != "uniform"}  # every suite adds it
    chosen, rounds = _trial(seeds, quick)
    if not isinstance(data, str) or data not in DATASETS:
        return own_table(data, others, chosen, columns=columns, folder=folder, settings=settings, rounds=rounds)
    if columns:
        raise InputError(
            f"{' and '.join(columns)} name columns of a table of your own, but {data!r} is a dataset of the benchmark.",
            hint="name the file: --data people.csv",
        )
    wanted = table(data, others, chosen, settings=settings, rounds=rounds)
    if folder is not None:
        wanted["data"]["folder"] = folder
    return wanted, []


def _trial(seeds: Sequence[int], quick: bool) -> tuple[list[int], int]:
    """Return the seeds and rounds of a run; 0 rounds are the suite's own."""
    return (list(seeds)[:1], QUICK_ROUNDS) if quick else (list(seeds), 0)


def plan_time(
    data: str,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    regimes: Sequence[str] = (),
    quick: bool = False,
    folder: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the experiments of the suite "time" by the folder that each gets below that of the results.

    Parameters are those of :func:`plan`; ``regimes`` are kinds of availability.
    """
    others = {name: entry for name, entry in selectors.items() if name != "uniform"}
    chosen, rounds = _trial(seeds, quick)
    wanted = timed.tables(data, others, chosen, regimes=regimes, rounds=rounds)
    if folder is not None:
        for table_ in wanted.values():
            table_["data"]["folder"] = folder
    return wanted


def begin(
    wanted: Mapping[str, Any],
    out: Path,
    *,
    device: str | None = None,
    processes: int | None = None,
    command: str = "",
) -> Simulation:
    """Prepare a benchmark in a new folder, and write down what is going to be run.

    Parameters
    ----------
    wanted : mapping
        Of :func:`plan`.
    device, processes, command
        As :class:`~fedcohort.simulate.rounds.runner.Simulation` takes them.
    """
    simulation = Simulation(
        Experiment.from_dict(dict(wanted)), out, device=device, processes=processes, command=command
    )
    Frozen.of(simulation.experiment).write(out)
    return simulation


def resume(out: Path, *, device: str | None = None, processes: int | None = None) -> Simulation:
    """Continue a benchmark; one whose selectors have changed since it began is refused."""
    simulation = Simulation.open(out, device=device, processes=processes)
    known = Frozen.read(out)
    if known is not None:
        check_same(known, Frozen.of(simulation.experiment), out)
    return simulation


def begin_or_resume(
    wanted: Mapping[str, Any], out: Path, *, device: str | None = None, processes: int | None = None, command: str = ""
) -> Simulation:
    """Continue the benchmark of a folder, or prepare it there; parameters are those of :func:`begin`."""
    if (out / "meta.json").is_file():
        return resume(out, device=device, processes=processes)
    return begin(wanted, out, device=device, processes=processes, command=command)


def write_scores(*folders: Path) -> Scores:
    """Score a benchmark, or pieces of one with different settings; write bench.json and bench.html into the first."""
    scores = score(*(load(folder) for folder in folders))
    write_atomically(folders[0] / "bench.json", (json.dumps(scores.to_dict(), indent=1) + "\n").encode())
    with contextlib.suppress(ModuleNotFoundError):  # pages need jinja2, scores do not
        from fedcohort.studies.benchmark.page import page

        write_atomically(folders[0] / "bench.html", page(scores).encode())
    return scores


def write_time_scores(out: Path) -> TimeScores:
    """Score the suite "time" in a folder; write bench.json and bench.html beside its pieces."""
    scores = score_time(*(load(out / piece) for piece in timed.PIECES))
    write_atomically(out / "bench.json", (json.dumps(scores.to_dict(), indent=1) + "\n").encode())
    with contextlib.suppress(ModuleNotFoundError):  # as above
        from fedcohort.studies.benchmark.timed_page import page

        write_atomically(out / "bench.html", page(scores).encode())
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

"""Run a paper's studies in pieces that can be stopped and continued."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.core.terminal import err, say
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import write_atomically, write_json
from fedcohort_bench.launch import Launcher
from fedcohort_bench.papers.declare import Exhibit, Study
from fedcohort_bench.papers.page import html_page, markdown
from fedcohort_bench.papers.record import NOT_RUN, StudyRecord, record_of
from fedcohort_bench.papers.verdicts import to_dict

FIRST_SEED = 100  # seeds 0 to 99 are for choosing parameters
QUICK_ROUNDS = 18  # beyond FedCor's warm-up


@dataclass(frozen=True)
class Reproduction:
    """The state of a reproduction when :func:`reproduce` returns."""

    finished: bool  # whether everything requested is done
    records: dict[str, StudyRecord]  # by study
    files: list[Path]  # pages and comparisons


def reproduce(
    exhibits: Sequence[Exhibit],
    out: Path,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    parts: Sequence[str] = (),
    labels: Sequence[str] = (),
    quick: bool = False,
    device: str | None = None,
    processes: int | None = None,
    minutes: float | None = None,
    folder: str | None = None,
    console: Console | None = None,
    command: str = "",
) -> Reproduction:
    """Run the studies of tables and figures, and write their pages.

    Parameters
    ----------
    exhibits : sequence of Exhibit
        Studies that they share are run once.
    out : Path
        Folder for records (records/STUDY.json), comparisons (NAME.json), pages (NAME.md, NAME.html) and runs. Runs
        found there are continued, and a record that was copied there counts as run.
    seeds, rounds : int, optional
        Instead of the study's numbers.
    parts : sequence of str
        Only these parts of the studies.
    labels : sequence of str
        Only these methods and the baseline. If a record already has the others, these are run with the record's seeds
        and rounds.
    quick : bool
        Check that everything runs: one seed, few rounds, and digits instead of the data.
    minutes : float, optional
        Stop cleanly after this many minutes.
    folder : str, optional
        Where the datasets are.
    console : Console, optional
        Where messages and progress go; default: stderr.
    command : str
        The command to record.
    """
    if quick:
        seeds, rounds = 1, rounds or QUICK_ROUNDS
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    console = console or err()
    launcher = Launcher(device=device, processes=processes, command=command, console=console, until=until)
    studies = {exhibit.study.name: exhibit.study for exhibit in exhibits}
    tables = [(study, part, table) for study in studies.values() for part, table in study.parts.items()]
    known_parts = dict.fromkeys(part for _, part, _ in tables)
    known_labels = dict.fromkeys(label for *_, table in tables for label in table["selectors"])
    for kind, names, known in (("part", parts, known_parts), ("method", labels, known_labels)):
        for name in names:
            if name not in known:
                listed = ", ".join(known)
                raise UnknownNameError(f"There is no {kind} {name!r}. Known: {listed}.", hint=suggest(name, known))
    # A trial has its own files, so it can never be taken for a result.
    end = "-quick" if quick else ""
    paths = {name: out / "records" / f"{name}{end}.json" for name in studies}
    records = {name: StudyRecord.read(paths[name], study) for name, study in studies.items()}
    finished = True
    for study, part, table in tables:
        if (parts and part not in parts) or (labels and not table["selectors"].keys() & labels):
            continue
        path, record = paths[study.name], records[study.name]
        piece = _remaining_work(record, study, part, seeds, rounds, labels)
        if not piece.labels:
            say(console, f"{study.name}, {part}: already in {path}")
            continue
        if time.monotonic() >= until:
            finished = False
            break
        some = f"; {', '.join(piece.labels)}" if len(piece.labels) < len(table["selectors"]) else ""
        say(console, f"{study.name}, {part}: {', '.join(study.settings(part))}{some}")
        finished, results = _run_part(study, part, piece, out, launcher, quick=quick, folder=folder)
        record.add(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write(path)  # after each part, so that an interruption loses at most one
        if not finished:
            break
    files = [file for exhibit in exhibits for file in write_pages(exhibit, records[exhibit.study.name], out, end)]
    return Reproduction(finished, records, files)


def write_pages(exhibit: Exhibit, record: StudyRecord, out: Path, end: str = "") -> list[Path]:
    """Write an exhibit's comparison and pages; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{exhibit.name}{end}"
    comparison, text, page = (stem.with_name(stem.name + suffix) for suffix in (".json", ".md", ".html"))
    write_json(comparison, to_dict(exhibit, record))
    write_atomically(text, markdown(exhibit, record).encode())
    write_atomically(page, html_page(exhibit, record).encode())
    return [comparison, text, page]


@dataclass(frozen=True)
class _Piece:
    """The work left in a part: the methods to run (none if all are recorded), and the numbers of seeds and rounds.

    If the methods are added to a record, ``targets`` are its targets, by setting.
    """

    labels: tuple[str, ...]
    seeds: int | None
    rounds: int | None
    targets: Mapping[str, float] = field(default_factory=dict)


def _remaining_work(
    record: StudyRecord, study: Study, part: str, seeds: int | None, rounds: int | None, labels: Sequence[str]
) -> _Piece:
    """Return what a record lacks of a part; seeds and rounds are the requested numbers, None for the study's.

    If the record already has enough seeds and rounds, only the missing methods are run, with the record's numbers, so
    that all methods of a table stay comparable.
    """
    selectors = study.parts[part]["selectors"]
    missing = [label for label in selectors if not labels or label in labels]
    baselines = {study.baseline, study.parts[part]["run"].get("baseline")}
    recorded = {setting: record.settings.get(setting, NOT_RUN) for setting in study.settings(part)}
    size = _common_size(recorded, study, seeds, rounds)
    others = set().union(*(entry["labels"] for entry in recorded.values())) - {*missing, *baselines}
    targets = {}
    if size is not None:
        # If the study sets no target, a run's baseline sets one, which would differ from the record's.
        targets = {setting: entry["target"] for setting, entry in recorded.items() if entry["target"] is not None}
        missing = [label for label in missing if any(label not in entry["labels"] for entry in recorded.values())]
        seeds, rounds = size
    elif labels and others:
        raise InputError(
            f"{', '.join(missing)} cannot be compared with {', '.join(sorted(others))} in the record of {study.name}, "
            f"{part}: those have other seeds, rounds or targets, or are not finished.",
            hint="name another folder with --out, or run all methods, without --labels",
        )
    to_run = tuple(label for label in selectors if missing and label in {*missing, *baselines})
    return _Piece(to_run, seeds, rounds, targets)


def _common_size(
    recorded: Mapping[str, Mapping[str, Any]], study: Study, seeds: int | None, rounds: int | None
) -> tuple[int, int | None] | None:
    """Return the numbers of seeds and rounds that all recorded settings share.

    None if they differ, are fewer than requested, or were run with another target than the study's.
    """
    sizes = set()
    for setting, entry in recorded.items():
        planned = study.rounds[setting]
        enough = len(entry["seeds"]) >= (seeds or study.seeds) and entry["rounds"] >= min(rounds or planned, planned)
        # A trial has its own target.
        same_target = enough and (entry["made"]["trial"] or study.target(setting) in (None, entry["target"]))
        if not entry["finished"] or not same_target:
            return None
        sizes.add((len(entry["seeds"]), None if entry["rounds"] == planned else entry["rounds"]))
    return sizes.pop() if len(sizes) == 1 else None


def table_of(
    study: Study,
    part: str,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    labels: Sequence[str] = (),
    quick: bool = False,
    folder: str | None = None,
) -> dict[str, Any]:
    """Return the experiment of one part, with all methods or only some.

    >>> from fedcohort_bench.papers.catalogue import STUDIES
    >>> table_of(STUDIES["hicsfl-fmnist"], "all", seeds=2)["seeds"]
    [100, 101]
    """
    table = copy.deepcopy(dict(study.parts[part]))
    count = seeds or study.seeds
    if count < 1:
        raise InputError(f"The number of seeds must be 1 or more. Got {count}.")
    table |= {"name": f"{study.name}-{part}", "seeds": list(range(FIRST_SEED, FIRST_SEED + count))}
    if labels:
        table["selectors"] = {label: table["selectors"][label] for label in labels}
    if quick:
        _shrink(table)
    if rounds is not None:
        table["run"]["rounds"] = rounds
        for setting in table["settings"]:
            setting.get("run", {}).pop("rounds", None)
    if folder is not None and not quick:  # a trial's digits come with scikit-learn
        table["data"]["folder"] = folder
    return table


def _shrink(table: dict[str, Any]) -> None:
    """Make an experiment small: digits, a small network, few steps, low targets."""
    table["data"] = {"name": "digits"}
    table["model"] = {"name": "mlp"}
    keep = {key: value for key, value in table["local"].items() if key in ("loss", "momentum", "weight_decay")}
    table["local"] = {**keep, "batch_size": 16, "steps": 5, "lr": 0.1}
    table["run"]["eval_every"] = 1
    table["run"].pop("terminal", None)
    for place in (table, *table["settings"]):
        if "targets" in place.get("run", {}):
            place["run"]["targets"] = [0.3]
        scenario = place.get("scenario", {})
        if scenario.get("partition", {}).get("name") == "natural":
            scenario["partition"] = {"name": "class-heterogeneity", "clients": 60, "alpha": 0.5}
        if "server_validation" in scenario or str(scenario.get("preset", "")).startswith("fedcm"):
            scenario["server_validation"] = 5
        if str(scenario.get("preset", "")).startswith("fedacs"):
            scenario["partition"] = {"samples": 40}
        if "samples" in scenario.get("partition", {}) and place is table:
            scenario["partition"].pop("samples")


def _run_part(
    study: Study,
    part: str,
    piece: _Piece,
    out: Path,
    launcher: Launcher,
    *,
    quick: bool,
    folder: str | None,
) -> tuple[bool, StudyRecord]:
    """Run what is left of a part; return whether it finished, and its record so far."""
    table = table_of(
        study, part, seeds=piece.seeds, rounds=piece.rounds, labels=piece.labels, quick=quick, folder=folder
    )
    for setting in table["settings"]:
        if setting["name"] in piece.targets:
            setting["run"] = {**setting.get("run", {}), "targets": [piece.targets[setting["name"]]]}
    # The folder's name has the rounds, because more seeds extend an experiment but more rounds need a new one.
    place = out / "runs" / ".".join([study.name, part, *(["quick"] if quick else []), f"r{table['run']['rounds']}"])
    began = time.monotonic()
    if not (place / "meta.json").is_file():
        simulation = launcher.begin(table, place)
    else:
        runs = load(place).runs
        missing = sorted({*table["seeds"]} - {run.seed for run in runs})
        new = {label: how for label, how in table["selectors"].items() if label not in {run.label for run in runs}}
        simulation = launcher.extend(place, missing or None, new) if missing or new else launcher.resume(place)
    finished = launcher.run(simulation)
    return finished, record_of(load(place), study, part, seconds=time.monotonic() - began, quick=quick)

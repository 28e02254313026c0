"""Read an experiment's directory.

::

    config.toml, meta.json     the configuration, and what ran it
    status.json, runs.json     the progress of the experiment and of its runs
    federation-KEY.npz         the clients: label counts, sizes and noise of each distinct federation
    journal/RUN.sqlite         what each run decided: cohorts, replies, scores, the selector's state
    rounds/part-*.parquet      what each round measured: accuracy, loss, costs, clock, and each client's time and weight
    checkpoint/                where to resume
    live*.sqlite               while the experiment runs, the rounds since the last checkpoint, for the dashboard

Nothing is stored twice. Only the journal says who was in a cohort; :class:`Results` combines it with the measurements.
Reading does not need torch.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import UnknownNameError, needs_extra
from fedcohort.core.files import read_file
from fedcohort.core.registry import suggest
from fedcohort.core.signals import Signal
from fedcohort.core.text import escape_html
from fedcohort.core.validate import path as check_path
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.decisions import Decisions
from fedcohort.journal.live import live_files, live_of, read_live, read_with_live
from fedcohort.session.coverage import Coverage, Tally, known_counts, sentences
from fedcohort.session.explain import Explanation, explain_round
from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.config.toml import parse_toml
from fedcohort.simulate.leaderboard import (
    Leaderboard,
    Options,
    RunNumbers,
    leaderboard_table,
    leaderboards_of,
    setting_name,
    to_text,
)
from fedcohort.simulate.leaderboard.formats import notebook
from fedcohort.simulate.leaderboard.rows import FAIRNESS
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.metrics import Curve, Metric
from fedcohort.simulate.store.facts import FederationFacts, count_clients, read_facts
from fedcohort.simulate.store.parts import (
    ResultsError,
    part_files,
    read_part,
    read_parts,
    rounds_schema,
    run_codes,
    run_names,
)

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT_VERSION = 2  # fedcohort 0.2 wrote version 1
FOLDERS = ("rounds", "journal", "checkpoint")
LIVE = "live.sqlite"
_CREATED = re.compile(r"(federation-.*|data)\.npz|runs\.json|config\.toml|\..*\.tmp")  # written before meta.json
_COMPARED = ("qcid", "clock", "bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up", *FAIRNESS)
_KEY = re.compile(r"[\w-]*")  # in the name of a federation's file
_MAX_LOST = 5  # reasons for lost runs that warnings name


@dataclass(frozen=True)
class RunInfo:
    """One run of an experiment.

    Attributes
    ----------
    id : str
        Unique, safe as a file name ("fedcor-s1").
    selector, label : str
        Registered name of the selector, and its label in the configuration.
    setting : dict
        The keys in which this run differs from the experiment's base configuration.
    params : dict
        The selector's parameters.
    federation : str
        Key of the file ``federation-KEY.npz``.
    state : str
        running, finished, stopped (by its selector), diverged, or failed (with an error of its own).
    reason : str
        Why it stopped, diverged or failed.
    engines : tuple of (int, str)
        Kinds of engine that trained, each with its first round.
    """

    id: str
    selector: str
    label: str
    seed: int
    setting: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    federation: str = ""
    state: str = "running"
    reason: str = ""
    rounds_done: int = 0
    engines: tuple[tuple[int, str], ...] = ()


def parse_engines(value: Any) -> tuple[tuple[int, str], ...]:
    """Return :attr:`RunInfo.engines` from its JSON value, which may be missing."""
    return tuple((int(since), str(kind)) for since, kind in value or ())


# -- schemas --------------------------------------------------------------------------------------------------------


def _clients_schema() -> pa.Schema:
    """Return the columns of :attr:`Results.clients`, which has one row per run, round and client of the cohort."""
    pa = arrow()
    return pa.schema(
        [
            ("run", pa.dictionary(pa.int32(), pa.string())),
            ("round", pa.int32()),
            ("client", pa.int32()),
            ("status", pa.int8()),
            ("kept", pa.bool_()),
            ("seconds", pa.float32()),
            ("loss", pa.float32()),
            ("weight", pa.float32()),
        ]
    )


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Results:
    """One experiment, finished or still being written. See :func:`load`.

    A notebook displays its leaderboards, and ``print`` writes them to a terminal.
    """

    path: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    status: dict[str, Any]
    runs: list[RunInfo]

    _decisions: dict[str, Decisions] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[tuple[str, int, int], pa.Table] = field(default_factory=dict, repr=False, compare=False)
    _columns: dict[str, AnyArray] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def rounds(self) -> pa.Table:
        """The measurements: one row per run and round so far."""
        # The live rounds come first, because a checkpoint moves them into the parts.
        live = [row for path in live_files(self.path) for row in read_live(path)]
        try:
            table = self._read_parts()
        except FileNotFoundError:  # a compaction has removed a part between listing and reading
            table = self._read_parts()
        pa, schema = arrow(), rounds_schema()
        try:
            values = [json.loads(row) for row in live]
            return pa.concat_tables([table, pa.Table.from_pylist(values, schema)]) if values else table
        except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("the rounds since the last checkpoint cannot be read: %s", error)
            return table

    def _read_parts(self) -> pa.Table:
        """Read the parts that are new or have changed since they were last read; reuse the others."""
        known, now = self._parts, {}

        def read(path: Path) -> pa.Table:
            try:
                file = path.stat()
            except FileNotFoundError:
                raise
            except OSError:  # such as a loop of links, which read_part reports properly
                return read_part(path)
            stamp = (path.name, file.st_mtime_ns, file.st_size)
            now[stamp] = known[stamp] if stamp in known else read_part(path)
            return now[stamp]

        parts = part_files(self.path / "rounds")
        table = read_parts(parts, read) if parts else rounds_schema().empty_table()
        known.clear()
        known.update(now)
        return table

    def decisions(self, run: RunInfo | str) -> Decisions:
        """Return the cohorts of a run and the outcome of every client in them, from its journal."""
        name = _run_id(run)
        if name not in self._decisions:
            self._decisions[name] = Decisions(self.journal(name), self.path)
        return self._decisions[name]

    def cohorts(self, run: RunInfo | str) -> list[IntArray]:
        """Return the cohort of each of a run's rounds, in the order of ``rounds``."""
        rounds = self.column(run, "round").tolist()
        if not rounds:  # a run that failed before its first round has no journal
            return []
        cohorts = self.decisions(run).cohorts
        empty = np.zeros(0, np.int64)  # after a crash the journal may lack a round whose row was written
        return [cohorts.get(round_, empty) for round_ in rounds]

    @cached_property
    def clients(self) -> pa.Table:
        """Decisions and measurements combined: one row per run, round and client of the cohort."""
        pa = arrow()
        schema = _clients_schema()
        tables = [schema.empty_table()]
        for run in self._places:
            members = self.members(run)
            names = pa.DictionaryArray.from_arrays(np.zeros(len(members["client"]), np.int32), [run])
            columns = [pa.array(members[f.name], f.type, from_pandas=True) for f in schema if f.name != "run"]
            tables.append(pa.Table.from_arrays([names, *columns], schema=schema))
        return pa.concat_tables(tables).unify_dictionaries()

    def members(self, run: RunInfo | str) -> dict[str, AnyArray]:
        """Return the columns of :attr:`clients`, except the run's name, for one run; unknown numbers are NaN.

        Rounds are in order, and the clients of a round are in the order in which they were chosen.
        """
        rounds, cohorts = self.column(run, "round").tolist(), self.cohorts(run)
        replies = self.decisions(run).replies if rounds else {}
        # Leave out rounds with missing replies, which a crash or the end of the record can cause.
        complete = {
            i: block
            for i, cohort in enumerate(cohorts)
            if (block := replies.get(rounds[i])) is not None and len(block.clients) == len(cohort)
        }
        if not complete:
            return {f.name: np.zeros(0, f.type.to_pandas_dtype()) for f in _clients_schema() if f.name != "run"}
        places, blocks = list(complete), list(complete.values())
        lengths = [len(block.clients) for block in blocks]
        client = np.concatenate([cohorts[i] for i in places])
        # Cohorts and measurements are in the order of choosing, replies in the order of the journal. Sorted by round
        # and client, both are the same list, which shows where the reply of each client is.
        place = np.repeat(np.arange(len(complete)), lengths)
        reply_of = np.empty(len(client), np.int64)
        reply_of[np.lexsort((client, place))] = np.lexsort((np.concatenate([b.clients for b in blocks]), place))
        durations, weights = self.per_client(run, "durations"), self.per_client(run, "weights")
        answers = self.per_client(run, "answers")
        if any(len(tickets) for tickets in answers):
            # In an asynchronous run, a client counts in the average of a later model than the one it started from.
            of_ticket = dict(zip(np.concatenate(answers).tolist(), np.concatenate(weights).tolist(), strict=True))
            tickets = self.decisions(run).tickets
            weights = [np.array([of_ticket.get(one, np.nan) for one in tickets.get(number, ())]) for number in rounds]
        losses = [block.metrics.get(Signal.LOSS.name) for block in blocks]
        return {
            "round": np.repeat([rounds[i] for i in places], lengths),
            "client": client,
            "status": np.concatenate([block.status for block in blocks])[reply_of],
            "kept": np.concatenate([block.kept for block in blocks])[reply_of],
            "seconds": _concatenate([durations[i] for i in places], lengths),
            "loss": _concatenate(losses, lengths)[reply_of],
            "weight": _concatenate([weights[i] for i in places], lengths),
        }

    def run(self, run_id: str) -> RunInfo:
        """Return the run with this id."""
        for run in self.runs:
            if run.id == run_id:
                return run
        raise UnknownNameError(
            f"There is no run {run_id!r} in {self.path}.", hint=suggest(run_id, [run.id for run in self.runs])
        )

    def _read_federation(self, run: RunInfo | str, read: Callable[[Path], T]) -> T:
        key = (self.run(run) if isinstance(run, str) else run).federation
        if not _KEY.fullmatch(str(key)):
            raise ResultsError(f"{self.path / 'runs.json'} is damaged: a federation cannot be called {key!r}.")
        path = self.path / f"federation-{key}.npz"
        try:
            return read(path)
        except FileNotFoundError:
            raise ResultsError(f"{path} is missing: it has not been written yet, or it was removed.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} is damaged: {error}.") from error

    def federation(self, run: RunInfo | str) -> FederationFacts:
        """Return the facts of a run's federation."""
        return self._read_federation(run, read_facts)

    def client_count(self, run: RunInfo | str) -> int:
        """Return the number of clients in a run's federation, without reading the rest of its file."""
        return self._read_federation(run, count_clients)

    def journal(self, run: RunInfo | str) -> Path:
        """Return the path of a run's journal; :func:`open_journal` opens it."""
        return self.path / "journal" / f"{_run_id(run)}.sqlite"

    def explain(self, run: RunInfo | str, round_: int, client: int | str | None = None) -> Explanation:
        """Explain why ``client`` was or was not picked in a round of a run; without a client, explain the round."""
        info = run if isinstance(run, RunInfo) else self.run(run)
        if info.state == "failed" and not info.rounds_done:
            raise ResultsError(f"Run {info.id} failed before its first round: {info.reason}.")
        with closing(read_journal(self.journal(run))) as journal:
            return explain_round(journal, round_, client)

    @cached_property
    def _places(self) -> dict[str, AnyArray]:
        """The row numbers of each run in ``rounds``, in the order of rounds, each round once."""
        table = self.rounds
        codes, round_of = run_codes(table), table.column("round").to_numpy()
        places = {}
        for code, name in enumerate(run_names(table)):
            rows = np.flatnonzero(codes == code)
            rows = rows[np.argsort(round_of[rows], kind="stable")]
            if len(rows):  # a part may still name a run whose rows were removed
                last = np.append(np.diff(round_of[rows]) != 0, True)  # a resumed run may have written a round twice
                places[name] = rows[last]
        return places

    @property
    def metric(self) -> Metric:
        """The metric that the models are judged by."""
        return Metric.of(self.config.get("task"))

    def score(self, run: RunInfo | str) -> AnyArray:
        """Return a run's accuracy, or the score of its task's metric, over rounds; higher is better."""
        metric = self.metric
        return np.asarray(metric.score(self.column(run, "accuracy" if metric.is_accuracy else "metric")))

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The :meth:`score` of each run over its rounds, by run id; runs without rounds are left out."""
        return {name: Curve(self.column(name, "round"), self.score(name)) for name in self._places}

    def coverage(self, run: RunInfo | str) -> Coverage:
        """Return how many of the federation's clients took part in a run, and how much."""
        rounds = self.column(run, "round").tolist()
        available = known_counts(self.column(run, "available"))
        return Tally.of(self.client_count(run), zip(rounds, self.cohorts(run), available, strict=True)).coverage()

    def column(self, run: RunInfo | str, name: str) -> AnyArray:
        """Return a numeric column of ``rounds`` for one run, in the order of rounds, with NaN for null."""
        places = self._places.get(_run_id(run))
        if places is None:
            return np.zeros(0)
        if name not in self._columns:
            self._columns[name] = self.rounds.column(name).to_numpy()
        return np.asarray(self._columns[name][places])

    def rounds_made(self) -> dict[str, int]:
        """Return the number of rounds of each run so far, by run id."""
        return {name: len(places) for name, places in self._places.items()}

    def per_client(self, run: RunInfo | str, name: str) -> list[AnyArray]:
        """Return a column of ``rounds`` with a number for each client of the cohort, in the order of rounds."""
        places = self._places.get(_run_id(run))
        if places is None:
            return []
        column = self.rounds.column(name).take(places).combine_chunks()
        return np.split(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()[1:-1])

    def leaderboards(
        self, *, targets: Sequence[float] | None = None, baseline: str | None = None
    ) -> tuple[Leaderboard, ...]:
        """Return the leaderboard of each setting, finished or still running.

        Parameters
        ----------
        targets : sequence of float, optional
            Accuracies (or values of the task's metric) to reach. Default: the configuration's, or else where the
            baseline ends, rounded down to a whole percent.
        baseline : str, optional
            Label to compare with. Default: the configuration's, or else uniform.
        """
        options = {setting_name(run.setting): Options.of(self.config, run.setting) for run in self.runs}
        chosen = {name: each.override(targets, baseline) for name, each in options.items()}
        return leaderboards_of(self._numbers(), chosen)

    def _numbers(self) -> dict[str, list[RunNumbers]]:
        """Return what is compared of each run, by setting."""
        settings: dict[str, list[RunNumbers]] = {}
        for run in self.runs:
            rounds = self.column(run, "round")
            # A run that failed before its first round is lost, and must be shown as that.
            if len(rounds) or run.state == "failed":
                values = {column: self.column(run, column) for column in _COMPARED} | {"accuracy": self.score(run)}
                numbers = RunNumbers(run.label or run.selector, run.selector, run.seed, run.state, rounds, values)
                settings.setdefault(setting_name(run.setting), []).append(numbers)
        return settings

    def plot(self, setting: str | None = None, *, baseline: str | None = None) -> Figure:
        """Return a matplotlib figure of one setting: curves, time to the target, the worst group, who takes part.

        Bands are 95% intervals over seeds. ``figure.savefig("figure.pdf")`` writes it.

        Parameters
        ----------
        setting : str, optional
            Default: the first.
        baseline : str, optional
            Label that decides the target. Default: as in :meth:`leaderboards`.
        """
        from fedcohort.simulate.leaderboard.plot import plot

        boards = {board.setting: board for board in self.leaderboards(baseline=baseline)}
        name = next(iter(boards), "") if setting is None else setting
        if name not in boards:
            raise UnknownNameError(
                f"There is no setting {name!r}. Known: {', '.join(boards) or 'none, because no round is recorded'}.",
                hint=suggest(name, boards),
            )
        picks: dict[str, list[IntArray]] = {}
        for run in self.runs:
            if setting_name(run.setting) == name and (cohorts := self.cohorts(run)):
                counts = np.bincount(np.concatenate(cohorts), minlength=self.client_count(run))
                picks.setdefault(run.label or run.selector, []).append(counts)
        return plot(boards[name], self._numbers()[name], picks)

    def to_pandas(self, table: str = "rounds") -> pandas.DataFrame:
        """Return ``rounds`` or ``clients`` as a data frame, with label, selector, seed and setting in every row."""
        if table not in ("rounds", "clients"):
            raise UnknownNameError(f"There is no table {table!r}. Known: rounds, clients.")
        with needs_extra("Data frames need pandas.", "notebook"):
            import pandas
        runs = {run.id: run for run in self.runs}
        frame = (self.rounds if table == "rounds" else self.clients).to_pandas()
        run_of_row = [runs[name] for name in frame["run"]]
        facts = {
            "label": [run.label or run.selector for run in run_of_row],
            "selector": [run.selector for run in run_of_row],
            "seed": [run.seed for run in run_of_row],
            "setting": [setting_name(run.setting) for run in run_of_row],
        }
        return pandas.concat([pandas.DataFrame(facts, index=frame.index), frame], axis=1)

    def warnings(self) -> list[str]:
        """Return warnings for readers of the leaderboard: few clients did all the training, or runs were lost."""
        named = ((" in ".join(filter(None, (run.label, run.setting.get("name")))), run) for run in self.runs)
        covered = sentences((name, self.coverage(run)) for name, run in named)
        lost: dict[tuple[str, str], list[str]] = {}  # runs by how and why: one mistake often ends all of a selector's
        for run in self.runs:
            if run.state in ("diverged", "failed"):
                lost.setdefault((run.state, run.reason), []).append(run.id)
        told = [f"{names(ids, 3)} {state}: {reason}" for (state, reason), ids in lost.items()]
        more = [f"and {len(told) - _MAX_LOST} other reasons"] if len(told) > _MAX_LOST else []
        return [*covered, *told[:_MAX_LOST], *more]

    def _summary(self) -> str:
        done, total = self.status.get("rounds_done"), self.status.get("rounds_total")
        facts = [str(self.path), str(self.status.get("state", "running")), f"{len(self.runs)} runs"]
        facts += [f"{done} of {total} rounds"] if done is not None and total else []
        return ", ".join(facts)

    def __repr__(self) -> str:
        return f"Results({self._summary()})"

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns
        return "\n\n".join(to_text(leaderboard_table(board), width) for board in self.leaderboards()) or repr(self)

    def _repr_html_(self) -> str:
        tables = [leaderboard_table(board) for board in self.leaderboards()]
        return f"<p>{escape_html(self._summary())}</p>" + notebook(tables)


def _run_id(run: RunInfo | str) -> str:
    return run if isinstance(run, str) else run.id


def _concatenate(columns: Sequence[AnyArray | None], lengths: Sequence[int]) -> AnyArray:
    """Concatenate a column's values of several rounds; NaN for rounds in which it is missing or damaged."""
    pairs = zip(columns, lengths, strict=True)
    filled = [np.full(n, np.nan) if column is None or len(column) != n else column for column, n in pairs]
    return np.concatenate(filled).astype(np.float32)


def is_partial_creation(path: Path) -> bool:
    """Whether a directory holds only files of a creation that was interrupted before meta.json."""
    folders, files = [path / name for name in FOLDERS], [file for file in path.iterdir() if file.name not in FOLDERS]
    if not all(_CREATED.fullmatch(file.name) for file in files):
        return False
    if any(folder.is_dir() and any(folder.iterdir()) for folder in folders):
        return False
    # Folders are created before files, so files without them are somebody else's.
    return all(folder.is_dir() for folder in folders) or not any(file.is_file() for file in files)


def read_meta(path: str | Path) -> dict[str, Any]:
    """Read meta.json; raises :class:`ResultsError` if this is not an experiment that can be read."""
    folder = Path(path)
    if not folder.is_dir():
        raise ResultsError(f"There is no experiment at {folder}.", hint="pass the directory that --out named")
    if not any(folder.iterdir()):
        raise ResultsError(f"{folder} is empty.", hint="an experiment's directory holds meta.json, runs.json, rounds/")
    if not (folder / "meta.json").is_file():
        if is_partial_creation(folder):
            raise ResultsError(
                f"The creation of the experiment in {folder} was interrupted, so there is nothing to continue.",
                hint="run it again with the same --out, without --resume",
            )
        raise ResultsError(
            f"{folder} is not a fedcohort experiment: it has no meta.json.", hint="pass the directory that --out named"
        )
    meta: dict[str, Any] = _read_json(folder / "meta.json", dict)
    version = meta.get("format")
    if not isinstance(version, int):
        raise ResultsError(f"{folder / 'meta.json'} names no format, so this is not a fedcohort experiment.")
    if version < FORMAT_VERSION:
        writer = str(meta.get("fedcohort", "0.2"))[:40]
        raise ResultsError(
            f"{folder} was written by fedcohort {writer} (format {version}), which this version cannot read: some "
            "names of selectors and aggregators mean other rules now.",
            hint="read or continue it with that version, or run the experiment again",
        )
    # Not read halfway: a newer format may mean something else by the same name.
    if version > FORMAT_VERSION:
        raise ResultsError(
            f"{folder} was written by a newer fedcohort (format {version}; this one reads up to {FORMAT_VERSION}).",
            hint=f"upgrade fedcohort to {meta.get('fedcohort', 'a newer version')} or later",
        )
    return meta


def read_runs(folder: Path) -> list[RunInfo]:
    """Return the entries of runs.json."""
    path = folder / "runs.json"
    hint = "to write it again, continue the experiment with --resume, even if it is finished"
    if not path.exists():
        raise ResultsError(f"{path} is missing, so the runs of this experiment are not known.", hint=hint)
    known = {f.name for f in fields(RunInfo)}
    try:
        rows = [{key: value for key, value in row.items() if key in known} for row in _read_json(path, list)]
        return [RunInfo(**{**row, "engines": parse_engines(row.get("engines"))}) for row in rows]
    except (TypeError, AttributeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged: {error}.", hint=hint) from error


def open_journal(path: str | Path) -> Journal:
    """Open a journal for reading. For a run of an experiment, rounds since its last checkpoint are included."""
    file = Path(path)
    live = live_of(file.parent.parent, file.stem) if file.parent.name == "journal" else None
    return read_journal(file) if live is None else read_with_live(file, live, file.stem)


def load(path: str | Path, before: Results | None = None) -> Results:
    """Read an experiment's directory, also while it is still being written.

    Parameters
    ----------
    before : Results, optional
        An earlier result for this directory; then only new parts and journal entries are read.

    Raises
    ------
    ResultsError
        If there is no experiment, or it is damaged, or another version wrote it in another format.
    """
    folder = check_path(path, "The directory of an experiment")
    meta = read_meta(folder)
    try:
        config = parse_toml(read_file(folder / "config.toml").decode())
    except FileNotFoundError:
        raise ResultsError(f"{folder} is half-written: config.toml is missing.") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ResultsError(f"{folder / 'config.toml'} is damaged: {error}.") from error
    status = _read_json(folder / "status.json", dict) if (folder / "status.json").exists() else {"state": "running"}
    runs = read_runs(folder)
    if before is None:
        return Results(folder, config, meta, status, runs)
    # Journals only grow, so what was read stays valid.
    for decisions in before._decisions.values():
        decisions.refresh()
    return Results(folder, config, meta, status, runs, before._decisions, before._parts)


def _read_json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, kind):
        raise ResultsError(f"{path} is damaged: expected a JSON {'object' if kind is dict else 'list'}.")
    return value

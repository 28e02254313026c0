"""An experiment's directory: what a run writes, and the reader for it.

::

    config.toml            what was really run
    meta.json              format and library versions, device, command line, dataset
    status.json            where the experiment stands; replaced atomically
    runs.json              one entry per run; replaced atomically
    rounds/part-*.parquet  one row per run and round
    clients/part-*.parquet one row per run, round and client of the cohort
    federation-KEY.npz     label counts, sizes and noise of each distinct federation
    journal/RUN.sqlite     each run's session journal
    live.jsonl             each round as it ends, for the dashboard
    live.sqlite            what the journals do not show before the next checkpoint; only while the experiment runs
    checkpoint/            the last checkpoint

Files appear whole or not at all: each is written beside its place and moved there. Reading needs no torch.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.arrays import AnyArray
from fedcohort.coverage import Coverage, Tally
from fedcohort.errors import FedcohortError, MissingExtraError, UnknownNameError
from fedcohort.guard import guarded
from fedcohort.registry import nearest
from fedcohort.simulate.facts import FederationFacts, count_clients, read_facts
from fedcohort.simulate.metrics import Curve, Metric
from fedcohort.text import in_html

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

    from fedcohort.simulate.leaderboard import Leaderboard

FORMAT_VERSION = 1
RUN_STATES = ("running", "finished", "stopped", "diverged")
_PART = re.compile(r"part-(\d{5,})\.parquet")
_KEY = re.compile(r"[\w-]*")  # of a federation's file
_COVERS = b"fedcohort.parts"


class ResultsError(FedcohortError, OSError):
    """An experiment's directory is missing, empty, half-written, foreign, too new, or cannot be written."""

    __str__ = FedcohortError.__str__


@dataclass(frozen=True)
class RunInfo:
    """One run of an experiment.

    Attributes
    ----------
    id : str
        Unique, safe as a file name ("fedcor-s1").
    selector, label : str
        Registered name, and what the configuration calls it.
    seed : int
    setting : dict
        The keys in which this run differs from the experiment's base configuration.
    params : dict
        The selector's parameters.
    federation : str
        Key of the file ``federation-KEY.npz``.
    state : str
        running, finished, stopped (by its selector) or diverged.
    reason : str
        Why it stopped or diverged.
    rounds_done : int
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


# -- schemas --------------------------------------------------------------------------------------------------------


def arrow() -> Any:
    """Return pyarrow, or say which extra brings it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "Results are Parquet files, which need pyarrow.", hint="pip install 'fedcohort[sim]'"
        ) from error
    return pyarrow


def rounds_schema() -> pa.Schema:
    """Columns of ``rounds/``: one row per run and round."""
    pa = arrow()
    text = pa.dictionary(pa.int32(), pa.string())
    columns = [("run", text), ("round", pa.int32()), ("accuracy", pa.float32()), ("loss", pa.float32())]
    columns += [("metric", pa.float64())]  # of a task that is not judged by accuracy; config.toml names it
    columns += [("qcid", pa.float64()), ("cohort", pa.list_(pa.int32())), ("kept", pa.list_(pa.bool_()))]
    columns += [(name, pa.float64()) for name in ("seconds", "clock")]
    columns += [(name, pa.int64()) for name in ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")]
    columns += [(name, pa.float64()) for name in ("client_seconds", "query_client_seconds", "query_seconds")]
    columns += [("available", pa.int32()), ("wall_seconds", pa.float64())]
    return pa.schema(columns)


def clients_schema() -> pa.Schema:
    """Columns of ``clients/``: one row per run, round and client of the cohort."""
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


# -- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one clear error; what was written before stays."""
    try:
        yield
    except ResultsError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResultsError(
                f"The disk is full: {path} could not be written. Everything written before is intact.",
                hint="free some space, then continue with --resume",
            ) from error
        raise ResultsError(f"{path} could not be written: {error.strerror or error}.") from error


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ResultsError(f"{path} is missing; the experiment has not got that far, or it was removed.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is damaged: {error}.") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and move it there, so that no reader ever sees half a file."""
    beside = path.with_name(f".{path.name}.tmp")
    with _disk_errors(path):
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN has no place in it."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to an experiment's directory; the system lets go when this one dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResultsError(
                f"Another process is working on the experiment in {folder}.", hint="wait for it, or stop it first"
            ) from None
        yield


def _digest(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()


def check_unchanged(path: Path, meta: Mapping[str, Any]) -> None:
    """Refuse an experiment whose configuration somebody changed after its runs were made."""
    known = meta.get("config")
    if known and _digest((path / "config.toml").read_bytes()) not in known:
        raise ResultsError(
            f"{path / 'config.toml'} was changed after the experiment began; its runs would no longer be comparable.",
            hint="put it back as it was; 'fedcohort extend' adds seeds, rounds and selectors, and another experiment "
            "begins with 'fedcohort run'",
        )


class ExperimentWriter:
    """Writes an experiment's directory.

    Parameters
    ----------
    path : Path
        A directory made by :meth:`create`, or one to resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = max(_next_part(self.path / kind) for kind in ("rounds", "clients"))

    @classmethod
    def create(cls, path: Path, config: str, meta: Mapping[str, Any]) -> ExperimentWriter:
        """Make the directory of a new experiment; one that holds anything already is refused."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ResultsError(
                f"{path} exists already and is not empty.",
                hint="choose another --out, or continue that experiment with --resume",
            )
        with _disk_errors(path):
            for folder in ("rounds", "clients", "journal", "checkpoint"):
                (path / folder).mkdir(parents=True, exist_ok=True)
        write_atomically(path / "config.toml", config.encode())
        write_json(path / "meta.json", {"format": FORMAT_VERSION, **meta, "config": [_digest(config.encode())]})
        return cls(path)

    def extend(self, config: str, baseline: str, command: str) -> None:
        """Replace the configuration by one that has more runs or rounds; meta.json is good before and after."""
        meta = json.loads((self.path / "meta.json").read_text())
        old = _digest((self.path / "config.toml").read_bytes())
        meta |= {"config": [old, _digest(config.encode())], "baseline": baseline}
        meta["command"] = " && ".join(text for text in (meta.get("command", ""), command) if text)
        write_json(self.path / "meta.json", meta)
        write_atomically(self.path / "config.toml", config.encode())

    def status(self, **values: Any) -> None:
        """Replace status.json."""
        write_json(self.path / "status.json", values)

    def runs(self, runs: Sequence[RunInfo]) -> None:
        """Replace runs.json."""
        write_json(self.path / "runs.json", [asdict(run) for run in runs])

    def federation(self, key: str, facts: FederationFacts) -> None:
        """Write one federation's facts, unless they are there already."""
        if (self.path / f"federation-{key}.npz").exists():
            return
        arrays: dict[str, AnyArray] = {
            "label_counts": facts.label_counts,
            "true_counts": facts.true_counts,
            "sizes": facts.sizes,
            "noise_rate": facts.noise_rate,
        }
        if facts.names is not None:
            arrays["names"] = np.array(facts.names)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_atomically(self.path / f"federation-{key}.npz", buffer.getvalue())

    def append(self, rounds: pa.Table, clients: pa.Table) -> None:
        """Write one more part of both tables."""
        if not len(rounds):
            return
        self._write("clients", self._next, clients)
        self._write("rounds", self._next, rounds)
        self._next += 1

    def _write(self, kind: str, part: int, table: pa.Table) -> None:
        pa = arrow()
        path = self.path / kind / f"part-{part:05d}.parquet"
        sink = pa.BufferOutputStream()
        pa.parquet.write_table(table, sink, compression="zstd")
        write_atomically(path, sink.getvalue().to_pybytes())

    def forget(self, resume_at: Mapping[str, int]) -> None:
        """Drop rows of rounds that a resumed run is going to make again.

        Parameters
        ----------
        resume_at : mapping of run id to the round it continues with
        """
        pa = arrow()
        for kind in ("rounds", "clients"):
            for part, path in _parts(self.path / kind).items():
                table = pa.parquet.read_table(path)
                first = np.array([resume_at.get(name, np.iinfo(np.int32).max) for name in _run_names(table)], np.int64)
                keep = table.column("round").to_numpy() < first[_run_codes(table)] if len(table) else []
                if len(table) and not np.all(keep):
                    self._write(kind, part, table.filter(pa.array(keep)))

    def compact(self) -> None:
        """Merge all parts of each table into one; safe to be interrupted."""
        for kind in ("rounds", "clients"):
            parts = _parts(self.path / kind)
            if len(parts) < 2:
                continue
            table = _read_parts(parts)
            table = table.replace_schema_metadata({_COVERS: str(max(parts) + 1).encode()})
            self._write(kind, 0, table.unify_dictionaries().combine_chunks())
            for part, path in parts.items():
                if part:
                    path.unlink()


def _parts(folder: Path) -> dict[int, Path]:
    """Return the part files of a table by number, ascending."""
    found = {int(m[1]): p for p in folder.glob("part-*.parquet") if (m := _PART.fullmatch(p.name))}
    return dict(sorted(found.items()))


def _next_part(folder: Path) -> int:
    """Return the first number that no part has, nor had before the parts were merged into the first."""
    parts = _parts(folder)
    covered = 0
    if 0 in parts:
        covered = int((arrow().parquet.read_schema(parts[0]).metadata or {}).get(_COVERS, b"0"))
    return max(covered, 1 + max(parts, default=-1))


def _run_names(table: pa.Table) -> list[str]:
    column = table.column("run").unify_dictionaries()
    return column.chunk(0).dictionary.to_pylist() if column.num_chunks else []


def _run_codes(table: pa.Table) -> AnyArray:
    column = table.column("run").unify_dictionaries()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(codes) if codes else np.zeros(0, np.int64)


def _read_parts(parts: Mapping[int, Path]) -> pa.Table:
    """Read the parts in order; after an interrupted compaction part 0 already holds the later ones."""
    pa = arrow()
    tables, covered = [], 0
    for part, path in parts.items():
        if 0 < part < covered:
            continue
        try:
            table = pa.parquet.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ResultsError(f"{path} cannot be read: {error}.") from error
        if part == 0:
            covered = int((table.schema.metadata or {}).get(_COVERS, b"0"))
        tables.append(table.replace_schema_metadata(None))
    return pa.concat_tables(tables)


def _with_all(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with every column of the schema; one that an older version did not write is null."""
    pa = arrow()
    for column in schema:
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    return table.select(schema.names).cast(schema)


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """One experiment, finished or still being written. See :func:`load`."""

    path: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    status: dict[str, Any]
    runs: list[RunInfo]

    @cached_property
    def rounds(self) -> pa.Table:
        """One row per run and round, as far as written."""
        return self._table("rounds", rounds_schema())

    @cached_property
    def clients(self) -> pa.Table:
        """One row per run, round and client of the cohort, as far as written."""
        return self._table("clients", clients_schema())

    def _table(self, kind: str, schema: pa.Schema) -> pa.Table:
        for attempt in range(3):  # a compaction may remove a part between listing and reading
            parts = _parts(self.path / kind)
            try:
                return _with_all(_read_parts(parts), schema) if parts else schema.empty_table()
            except FileNotFoundError:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def run(self, run_id: str) -> RunInfo:
        """Return the run of that id."""
        for run in self.runs:
            if run.id == run_id:
                return run
        near = nearest(run_id, [run.id for run in self.runs])
        raise UnknownNameError(
            f"There is no run {run_id!r} in {self.path}.", hint=f"did you mean {near!r}?" if near else None
        )

    def _federation_file(self, run: RunInfo | str) -> Path:
        key = (self.run(run) if isinstance(run, str) else run).federation
        if not _KEY.fullmatch(str(key)):
            raise ResultsError(f"{self.path / 'runs.json'} is damaged: a federation cannot be called {key!r}.")
        return self.path / f"federation-{key}.npz"

    def federation(self, run: RunInfo | str) -> FederationFacts:
        """Return the facts of the federation a run was made on."""
        path = self._federation_file(run)
        with _archive_errors(path):
            return read_facts(path)

    def client_count(self, run: RunInfo | str) -> int:
        """Return how many clients the federation of a run has; reads no more than that."""
        path = self._federation_file(run)
        with _archive_errors(path):
            return count_clients(path)

    def journal(self, run: RunInfo | str) -> Path:
        """Return where a run's session journal is."""
        return self.path / "journal" / f"{run if isinstance(run, str) else run.id}.sqlite"

    @cached_property
    def _places(self) -> dict[str, AnyArray]:
        """Rows of ``rounds`` that belong to each run, in the order of rounds, each round once."""
        table = self.rounds
        codes, at = _run_codes(table), table.column("round").to_numpy()
        found = {}
        for code, name in enumerate(_run_names(table)):
            mine = np.flatnonzero(codes == code)
            mine = mine[np.argsort(at[mine], kind="stable")]
            last = np.append(at[mine][1:] != at[mine][:-1], True)  # a resumed run may have written a round twice
            found[name] = mine[last]
        return found

    @property
    def metric(self) -> Metric:
        """What the models are judged by."""
        return Metric.of(self.config.get("task"))

    def score(self, run: RunInfo | str) -> AnyArray:
        """Return a run's accuracy, or the metric of its task, over rounds; negative where less of it is better."""
        metric = self.metric
        return np.asarray(metric.score(self.column(run, "accuracy" if metric.is_accuracy else "metric")))

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Accuracy (or the task's metric, see :meth:`score`) over rounds of every run that has rows, by run id."""
        return {name: Curve(self.column(name, "round"), self.score(name)) for name in self._places}

    def coverage(self, run: RunInfo | str) -> Coverage:
        """Return how many of its federation's clients carried a run."""
        places = self._places.get(run if isinstance(run, str) else run.id, np.zeros(0, np.int64))
        cohorts = self.rounds.column("cohort").take(places).to_pylist()
        rounds = self.column(run, "round").tolist()
        clients = self.client_count(run)
        return Tally.of(clients, zip(rounds, (np.asarray(c, np.int64) for c in cohorts), strict=True)).coverage()

    def column(self, run: RunInfo | str, name: str) -> AnyArray:
        """Return one numeric column of ``rounds`` for one run, in the order of rounds; NaN where it is null."""
        places = self._places.get(run if isinstance(run, str) else run.id)
        if places is None:
            return np.zeros(0)
        return np.asarray(self.rounds.column(name).to_numpy()[places])

    def leaderboards(self, **options: Any) -> tuple[Leaderboard, ...]:
        """Return the leaderboard of each setting; options as in :func:`fedcohort.simulate.leaderboard.leaderboards`."""
        from fedcohort.simulate.leaderboard import leaderboards

        return leaderboards(self, **options)

    def to_pandas(self, table: str = "rounds") -> pandas.DataFrame:
        """Return ``rounds`` or ``clients`` as a data frame, with label, selector, seed and setting in every row."""
        if table not in ("rounds", "clients"):
            raise UnknownNameError(f"There is no table {table!r}. Known: rounds, clients.")
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("Data frames need pandas.", hint="pip install 'fedcohort[notebook]'") from error
        from fedcohort.simulate.leaderboard import setting_name

        runs = {run.id: run for run in self.runs}
        frame = (self.rounds if table == "rounds" else self.clients).to_pandas()
        who = [runs[name] for name in frame["run"]]
        facts = {
            "label": [run.label or run.selector for run in who],
            "selector": [run.selector for run in who],
            "seed": [run.seed for run in who],
            "setting": [setting_name(run.setting) for run in who],
        }
        return pandas.concat([pandas.DataFrame(facts, index=frame.index), frame], axis=1)

    def _repr_html_(self) -> str:
        from fedcohort.simulate.leaderboard import leaderboard_table
        from fedcohort.simulate.leaderboard.formats import notebook

        done, total = self.status.get("rounds_done"), self.status.get("rounds_total")
        facts = [str(self.path), str(self.status.get("state", "running")), f"{len(self.runs)} runs"]
        facts += [f"{done} of {total} rounds"] if done is not None and total else []
        text = in_html(", ".join(facts))
        return f"<p>{text}</p>" + notebook([leaderboard_table(board) for board in self.leaderboards()])


@guarded
def load(path: str | Path) -> Results:
    """Read an experiment's directory, also while it is still being written.

    Raises
    ------
    ResultsError
        When there is nothing, nothing usable, something else, or something newer than this version can read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ResultsError(f"There is no experiment at {folder}.", hint="pass the directory that --out named")
    if not any(folder.iterdir()):
        raise ResultsError(f"{folder} is empty.", hint="an experiment's directory holds meta.json, runs.json, rounds/")
    if not (folder / "meta.json").is_file():
        raise ResultsError(
            f"{folder} is no experiment of fedcohort: it has no meta.json.", hint="pass the directory that --out named"
        )
    meta = _read_json(folder / "meta.json", dict)
    version = meta.get("format")
    if not isinstance(version, int):
        raise ResultsError(f"{folder / 'meta.json'} names no format; this is no experiment of fedcohort.")
    if version > FORMAT_VERSION:
        raise ResultsError(
            f"{folder} was written by a newer fedcohort (format {version}; this one reads up to {FORMAT_VERSION}).",
            hint=f"upgrade fedcohort to {meta.get('fedcohort', 'a newer version')} or later",
        )
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
    except FileNotFoundError:
        raise ResultsError(f"{folder} is half-written: config.toml is missing.") from None
    except tomllib.TOMLDecodeError as error:
        raise ResultsError(f"{folder / 'config.toml'} is damaged: {error}.") from error
    status = _read_json(folder / "status.json", dict) if (folder / "status.json").exists() else {"state": "running"}
    rows = _read_json(folder / "runs.json", list) if (folder / "runs.json").exists() else []
    known = {f.name for f in fields(RunInfo)}
    try:
        runs = [RunInfo(**{key: value for key, value in row.items() if key in known}) for row in rows]
    except (TypeError, AttributeError) as error:
        raise ResultsError(f"{folder / 'runs.json'} is damaged: {error}.") from error
    return Results(folder, config, meta, status, runs)


def _read_json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, kind):
        raise ResultsError(f"{path} is damaged: expected a JSON {'object' if kind is dict else 'list'}.")
    return value

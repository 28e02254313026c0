"""Traces of real devices: when they were on and how fast they are, in a plain format and two published ones.

The plain format is one table of intervals and one of speeds, as Parquet or CSV::

    client, from, to, state              seconds; the state holds between these times
    client, speed, bandwidth             samples a second, bytes a second

A client is on while all needed states hold, by default all states in the file. The trace repeats after its end.

.. [Lai2022] F. Lai et al., "FedScale: Benchmarking Model and System Performance of Federated Learning at Scale",
   ICML 2022. Availability and capacity are two pickled dictionaries.
.. [Yang2021] C. Yang et al., "Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale
   Smartphone Data", WWW 2021 (PKU, FLASH). State traces are JSON with a log of messages for each device.
"""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core import rng
from fedcohort.core.archives import check_parquet
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ScenarioError, needs_extra
from fedcohort.core.files import open_file, read_file, write_file
from fedcohort.core.params import Boolean, Optional, Text, param
from fedcohort.core.params import Sequence as ListOf
from fedcohort.scenario.counter_rng import uniforms
from fedcohort.scenario.devices import DAY, DEVICES, POSITIVE, TICK, Attendance, Devices, DrawnDevices

INTERVALS, SPEEDS = ("client", "from", "to", "state"), ("client", "speed", "bandwidth")
ON = "on"  # the state of a trace that has only one
_DEVICE, _CAPACITY = 10, 11  # positions in the devices stream
_PASSES = 3.0  # FedScale counts a backward pass as two forward passes
_SESSIONS = 3  # fewer do not tell a client's own gap
_KILOBIT = 1024 / 8  # bytes; FedScale measures models in units of 1,024 bits
_MAX_ROWS = 10_000_000  # intervals or speeds; reading so many takes 20 s and 4 GB
_LATEST = 1e10  # seconds, 317 years: later times of 100,000 devices, laid end to end, are no longer exact in 64 bits


@dataclass(frozen=True, eq=False)
class Trace:
    """Intervals and speeds of devices.

    Attributes
    ----------
    names : tuple of str
        The devices that have intervals.
    device, state : (m,) int array
        The device of each interval, and its state, as indices of ``names`` and ``states``.
    begin, end : (m,) float array
        Seconds.
    speed, bandwidth : (s,) float array
        Speeds of the devices in ``measured``; empty if the trace has none.
    """

    names: tuple[str, ...]
    device: IntArray
    state: IntArray
    begin: FloatArray
    end: FloatArray
    states: tuple[str, ...] = (ON,)
    speed: FloatArray = field(default_factory=lambda: np.zeros(0))
    bandwidth: FloatArray = field(default_factory=lambda: np.zeros(0))
    measured: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[str, float, float, str]],
        speeds: Sequence[tuple[str, float, float]] = (),
        source: str = "the trace",
    ) -> Trace:
        """Build a trace from the rows of both tables. Invalid values are an error.

        >>> trace = Trace.of([("anna", 0, 60, "on"), ("ben", 30, 90, "on")], [("anna", 10, 1000)])
        >>> trace.span, trace.names
        (90.0, ('anna', 'ben'))
        """
        if not rows:
            raise ScenarioError(f"{source} has no intervals.", hint=f"its columns are {', '.join(INTERVALS)}")
        clients, starts, ends, held = zip(*rows, strict=True)
        begin, end = np.array(starts, np.float64), np.array(ends, np.float64)
        invalid = np.flatnonzero(~((begin >= 0) & (end > begin) & (end <= _LATEST)))
        if len(invalid):
            row = rows[int(invalid[0])]
            raise ScenarioError(
                f"An interval of {source} must go from 0 or later to a later moment, at most {_LATEST:g}. Got "
                f"{row[1]:g} to {row[2]:g} of client {row[0]!r}.",
                hint="times are seconds, counted from the beginning of the trace",
            )
        for name, speed, bandwidth in speeds:
            if not (np.isfinite([speed, bandwidth]).all() and min(speed, bandwidth) > 0):
                raise ScenarioError(
                    f"The speeds in {source} must be positive. Got {speed:g} and {bandwidth:g} of client {name!r}."
                )
        names, device = _indices(clients)
        states, state = _indices(held)
        measured, computing, sending = zip(*speeds, strict=True) if speeds else ((), (), ())
        return cls(
            names, device, state, begin, end, states,
            np.array(computing, np.float64), np.array(sending, np.float64), tuple(measured),
        )  # fmt: skip

    @property
    def span(self) -> float:
        """Its end, in seconds."""
        return float(self.end.max())

    def sessions(self, needs: Sequence[str] | None = None) -> Trace:
        """Return the intervals in which all states of ``needs`` hold, by default all states, as one state."""
        needs = self.states if needs is None else needs
        for state in needs:
            if state not in self.states:
                raise ScenarioError(f"The trace has no state {state!r}. It has {', '.join(self.states)}.")
        needed = [self.states.index(state) for state in dict.fromkeys(needs)]
        # Intervals of one state may overlap, so they are merged before those of different states are counted.
        merged = []
        for index in needed:
            mask = self.state == index
            merged.append(_overlaps(self.device[mask], self.begin[mask], self.end[mask], 1))
        device, begin, end = (np.concatenate(columns) for columns in zip(*merged, strict=True))
        device, begin, end = _overlaps(device, begin, end, len(needed))
        if not len(device):
            raise ScenarioError(f"In the trace, no client ever has the states {', '.join(needs)} together.")
        one_state = np.zeros(len(device), np.int64)
        return replace(self, device=device, state=one_state, begin=begin, end=end, states=(ON,))


def _indices(texts: Sequence[str]) -> tuple[tuple[str, ...], IntArray]:
    """Return the distinct texts in order of appearance, and for each text which of them it is."""
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return tuple(place), np.array([place[text] for text in texts], np.int64)


def _overlaps(
    device: IntArray, begin: FloatArray, end: FloatArray, times: int
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return the intervals covered by at least ``times`` of a device's intervals, sorted by device and time."""
    device, time = np.concatenate([device, device]), np.concatenate([begin, end])
    step = np.repeat([1, -1], len(begin))
    order = np.lexsort((-step, time, device))  # an interval that begins where another ends continues it
    device, time, step = device[order], time[order], step[order]
    depth = np.cumsum(step)  # number of open intervals; it is 0 after each device, so one sum serves all
    inside = depth >= times
    before = np.concatenate([[False], inside[:-1]])
    opens, closes = np.flatnonzero(inside & ~before), np.flatnonzero(~inside & before)
    lasting = time[closes] > time[opens]
    return device[opens][lasting], time[opens][lasting], time[closes][lasting]


# -- reading and writing --------------------------------------------------------------------------------------------


def read_trace(intervals: str | Path, speeds: str | Path | None = None) -> Trace:
    """Read a trace in the plain format: Parquet if the name ends in ``.parquet``, otherwise CSV."""
    measured = [] if speeds is None else _table(speeds, SPEEDS)
    return Trace.of(_table(intervals, INTERVALS), measured, str(intervals))


def write_trace(trace: Trace, intervals: str | Path, speeds: str | Path | None = None) -> None:
    """Write a trace in the plain format, with its speeds if a second file is named."""
    names, states = np.array(trace.names, object), np.array(trace.states, object)
    _write(intervals, INTERVALS, [names[trace.device], trace.begin, trace.end, states[trace.state]])
    if speeds is not None:
        _write(speeds, SPEEDS, [np.array(trace.measured, object), trace.speed, trace.bandwidth])


def _table(path: str | Path, columns: Sequence[str]) -> list[Any]:
    """Return these columns of a table, row by row; clients and states are texts, all others numbers."""
    path = Path(path)
    try:
        data = read_file(path)
        if path.suffix == ".parquet":
            values = _parquet_columns(path, data, columns)
        else:
            _check_rows(path, data.count(b"\n") - 1)
            lines = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
            values = {name: [line[name] for line in lines] for name in (lines[0] if lines else ())}
    except ScenarioError:
        raise
    except (OSError, ValueError, MemoryError, csv.Error) as error:  # Arrow's errors are among them
        raise ScenarioError(f"The trace {path} cannot be read: {str(error).rstrip('.')}.") from error
    missing = [name for name in columns if name not in values]
    if missing:
        raise ScenarioError(
            f"The trace {path} has no column {missing[0]!r}. It has {', '.join(map(str, values)) or 'none'}.",
            hint=f"its columns must be {', '.join(columns)}",
        )
    try:
        found = [list(map(str if name in ("client", "state") else float, values[name])) for name in columns]
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"{path} must have numbers in its columns of times and speeds: {error}.") from None
    return list(zip(*found, strict=True))


def _check_rows(path: str | Path, rows: int) -> None:
    """Refuse a table that is too long before reading it: a small Parquet file or pickle may claim any number."""
    if rows > _MAX_ROWS:
        raise ScenarioError(
            f"The trace {path} has {rows:,} rows. At most {_MAX_ROWS:,} are read.",
            hint="keep fewer devices or fewer days of it",
        )


def _parquet_columns(path: Path, data: bytes, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return those of the columns that there are; other columns are named, but not read."""
    file = _parquet().ParquetFile(io.BytesIO(data))
    _check_rows(path, file.metadata.num_rows)
    check_parquet(file.metadata)
    names = file.schema_arrow.names
    found = [name for name in columns if name in names]
    # Text is read as a dictionary, because a small file may repeat a long text millions of times.
    table = _parquet().ParquetFile(io.BytesIO(data), read_dictionary=found).read(found, use_threads=False)
    values: dict[str, list[Any]] = {name: [] for name in names}
    for name in found:
        column = table.column(name).unify_dictionaries()
        if column.num_chunks and hasattr(column.chunk(0), "dictionary"):
            words = [*column.chunk(0).dictionary.to_pylist(), None]  # a missing value is -1
            indices = [chunk.indices.fill_null(-1).to_numpy() for chunk in column.chunks]
            values[name] = [words[i] for i in np.concatenate(indices).tolist()]
        else:
            values[name] = column.to_pylist()
    return values


def _write(path: str | Path, columns: Sequence[str], values: Sequence[Any]) -> None:
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow

        sink = io.BytesIO()
        _parquet().write_table(pyarrow.table(dict(zip(columns, map(list, values), strict=True))), sink)
        write_file(path, sink.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(v.tolist() for v in values), strict=True))
    write_file(path, text.getvalue().encode())


def _parquet() -> Any:
    with needs_extra("Traces as Parquet need pyarrow; CSV files do not.", "sim"):
        import pyarrow.parquet
    return pyarrow.parquet


# -- published formats ----------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Reads only dictionaries, lists, texts and numbers. It looks up no names, so a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it holds a {module}.{name}; only dictionaries, lists, texts and numbers are read"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside the file")


# Errors that a truncated or changed pickle may raise; one with a huge length runs out of memory.
_DAMAGE = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
    pickle.UnpicklingError,
)  # fmt: skip


def _read_pickle(path: str | Path) -> Mapping[Any, Any]:
    try:
        with open_file(Path(path)) as stream:
            devices = _PlainUnpickler(stream).load()
    except _DAMAGE as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise ScenarioError(f"The trace {path} cannot be read: {why}.") from error
    if not isinstance(devices, dict):
        raise ScenarioError(f"The trace {path} must be a dictionary of devices. Got {type(devices).__name__}.")
    return devices


def _read_fedscale(availability: str | Path, capacity: str | Path | None = None) -> Trace:
    """Read FedScale's traces ([Lai2022]_): ``client_behave_trace`` and ``client_device_capacity``.

    A device is on from ``active[j]`` to ``inactive[j]``. Its ``computation`` is the milliseconds of a forward pass for
    one sample; training takes three times as long. ``communication`` is in kilobits a second.
    """
    rows: list[tuple[str, float, float, str]] = []
    seen = 0
    for name, entry in _read_pickle(availability).items():
        try:
            pairs = list(zip(entry["active"], entry["inactive"], strict=False))
            rows += [(str(name), float(a), float(b), ON) for a, b in pairs if float(b) > float(a)]
        except (KeyError, TypeError, ValueError) as error:
            raise _invalid_device(availability, name, "'active' and 'inactive' with equally many times") from error
        seen += len(pairs)
        _check_rows(availability, seen)  # a small pickle may name one long list for every device
    speeds = []
    for name, entry in _read_pickle(capacity).items() if capacity is not None else ():
        try:
            speed = 1000.0 / (_PASSES * float(entry["computation"]))
            speeds.append((str(name), speed, float(entry["communication"]) * _KILOBIT))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise _invalid_device(str(capacity), name, "'computation' and 'communication', both positive") from error
    return Trace.of(rows, speeds, str(availability))


def _invalid_device(path: str | Path, name: Any, needed: str) -> ScenarioError:
    return ScenarioError(f"The device {name!r} of the trace {path} must have {needed}.")


_CHANGES: Mapping[str, tuple[str, bool]] = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("2g", "3g", "4g", "5g", "unknown"), ("wifi", False)),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
    "screen_off": ("dark", True),
    "screen_on": ("dark", False),
}


# The states of a trace, and the conditions of which one must be true for the state to hold.
_HOLDS = {"charging": {"charging"}, "wifi": {"wifi"}, "idle": {"locked", "dark"}}


def _read_flash(path: str | Path) -> Trace:
    """Read FLASH's state traces ([Yang2021]_): a JSON object of devices, each with its ``messages``.

    A message is a line with a time, a tab and an event. They give three states: ``charging``, ``wifi``, and ``idle``
    (the screen is dark or locked). Time begins at the midnight before the first message of all devices. Messages about
    the battery's level, and lines that are not messages, are ignored.
    """
    try:
        devices = json.loads(read_file(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ScenarioError(f"The trace {path} cannot be read: {error}.") from error
    if not isinstance(devices, dict):
        raise ScenarioError(f"The trace {path} must be a JSON object of devices. Got {type(devices).__name__}.")
    logs: dict[str, list[tuple[datetime, str]]] = {}
    for name, entry in devices.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("messages"), str):
            raise _invalid_device(path, name, "'messages', lines of text")
        log = logs[str(name)] = []
        for line in entry["messages"].splitlines():
            time, _, event = line.strip().partition("\t")
            if (event := event.strip().lower()) in _CHANGES:
                with suppress(ValueError):  # a line without a time is no message
                    log.append((datetime.fromisoformat(time.strip()), event))
        log.sort(key=lambda item: item[0])  # the published files are not always in order
    starts = [log[0][0] for log in logs.values() if log]
    if not starts:
        raise ScenarioError(f"The trace {path} has no messages that can be read.")
    zero = min(starts).replace(hour=0, minute=0, second=0)
    rows = [
        (name, begin, end, state)
        for name, log in logs.items()
        for state, conditions in _HOLDS.items()
        for begin, end in _intervals(log, zero, conditions)
    ]
    return Trace.of(rows, source=str(path))


def _intervals(log: Sequence[tuple[datetime, str]], zero: datetime, conditions: set[str]) -> list[tuple[float, float]]:
    """Return when one of ``conditions`` was true, in seconds after ``zero``; the last interval ends with the log."""
    true_now: set[str] = set()
    since: datetime | None = None
    intervals: list[tuple[datetime, datetime]] = []
    for time, event in log:
        condition, on = _CHANGES[event]
        (true_now.add if on else true_now.discard)(condition)
        holds = bool(true_now & conditions)
        if holds and since is None:
            since = time
        elif not holds and since is not None:
            intervals.append((since, time))
            since = None
    if since is not None:
        intervals.append((since, log[-1][0]))
    second = timedelta(seconds=1)
    return [((begin - zero) / second, (end - zero) / second) for begin, end in intervals if end > begin]


FORMATS: Mapping[str, Callable[[str | Path, str | Path | None], Trace]] = {
    "plain": read_trace,
    "fedscale": _read_fedscale,
    "flash": lambda path, _: _read_flash(path),
}
"""Readers of traces by format, called with a file of intervals and an optional file of speeds."""


# -- devices of a trace ---------------------------------------------------------------------------------------------


class _Lookup:
    """A trace as lookups need it: all sessions in one sorted array, so that bisection finds any time of any device."""

    def __init__(self, trace: Trace, needs: Sequence[str] | None) -> None:
        self.trace, self.span = trace, trace.span
        on = trace.sessions(needs)
        order = np.lexsort((on.begin, on.device))
        device, self.begin, self.end = on.device[order], on.begin[order], on.end[order]
        self.keys = device * self.span + self.begin
        everybody = np.arange(len(trace.names))
        self.first = np.searchsorted(device, everybody)  # (D,) index of each device's first session
        self.last = np.searchsorted(device, everybody, side="right")  # (D,) index after its last session
        index = {name: i for i, name in enumerate(trace.measured)}
        self.measured = np.array([index.get(name, -1) for name in trace.names], np.int64)  # (D,) row of its speeds

    def at(self, device: IntArray, time: float | FloatArray) -> Attendance:
        # The nearest session that began before this moment is found by one bisection for all clients.
        turn, now = np.divmod(time, self.span)  # the trace repeats
        zero = turn * self.span
        place = np.searchsorted(self.keys, device * self.span + now, side="right")
        ends = self.end[np.maximum(place - 1, 0)]
        on: BoolArray = (place > self.first[device]) & (now < ends)
        first = np.minimum(self.first[device], len(self.keys) - 1)
        has = self.last[device] > self.first[device]
        # A session that lasts to the end of the trace continues if the device is on at the beginning of the trace.
        ends = np.where((ends >= self.span) & has & (self.begin[first] <= 0), self.span + self.end[first], ends)
        following = self.begin[np.minimum(place, len(self.keys) - 1)]
        again = np.where(has, self.span + self.begin[first], np.inf)
        begins = np.where(place < self.last[device], following, again)
        return Attendance(on, zero + np.where(on, ends, np.maximum(begins, now + TICK)))


@lru_cache(maxsize=8)
def _load(path: str, stamp: int, speeds: str | None, needs: tuple[str, ...] | None) -> _Lookup:
    # By the time of its last change, so that a file that was written again is read again.
    return _Lookup(read_trace(path, speeds), needs)


@DEVICES.register("trace")
@dataclass(frozen=True, kw_only=True)
class TraceDevices(Devices):
    """Devices of a trace in the plain format, which repeats after its end.

    Each client gets a random device of the trace, drawn with the seed. Without ``shuffle``, client i gets device i, and
    the devices repeat after the last. A device without measured speeds gets those of a random measured one.
    """

    path: str = param("trace.parquet", Text(), "file of intervals: client, from, to, state")
    speeds_path: str | None = param(None, Optional(Text()), "file of speeds: client, speed, bandwidth")
    needs: tuple[str, ...] | None = param(
        None, Optional(ListOf(Text(), least=1)), "states that must hold; None: all states in the file"
    )
    shuffle: bool = param(True, Boolean(), "draw a device for each client")
    speed: float = param(100.0, POSITIVE, "samples a second, without a file of speeds")
    bandwidth: float = param(1e6, POSITIVE, "bytes a second, without a file of speeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "speeds_path"):  # absolute, because an experiment may be resumed from another folder
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(Path(getattr(self, name)).absolute()))

    @property
    def _lookup(self) -> _Lookup:
        try:
            stamp = Path(self.path).stat().st_mtime_ns
        except OSError as error:
            raise ScenarioError(f"The trace {self.path} cannot be read: {error.strerror or error}.") from error
        return _load(self.path, stamp, self.speeds_path, self.needs)

    def _device(self, clients: IntArray, seed: int) -> IntArray:
        count = len(self._lookup.trace.names)
        if not self.shuffle:
            return clients % count
        return (uniforms(seed, rng.DEVICES, clients, _DEVICE) * count).astype(np.int64)

    def presence(self, clients: IntArray, *, seed: int, time: float | FloatArray) -> Attendance:
        """Look up the clients' devices."""
        return self._lookup.at(self._device(clients, seed), time)

    def speeds(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return the speeds of the clients' devices."""
        return self._measured(clients, seed, self._lookup.trace.speed, self.speed)

    def bandwidths(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return the bandwidths of the clients' devices."""
        return self._measured(clients, seed, self._lookup.trace.bandwidth, self.bandwidth)

    def _measured(self, clients: IntArray, seed: int, values: FloatArray, default: float) -> FloatArray:
        if not len(values):
            return np.full(len(clients), float(default))
        drawn = (uniforms(seed, rng.DEVICES, clients, _CAPACITY) * len(values)).astype(np.int64)
        row = self._lookup.measured[self._device(clients, seed)]
        return values[np.where(row >= 0, row, drawn)]


# -- a generator fitted to a trace ----------------------------------------------------------------------------------


def fit(trace: Trace, needs: Sequence[str] | None = None) -> DrawnDevices:
    r"""Return drawn devices with parameters estimated from a trace, which can be shared without the trace.

    Mean and spread of the session lengths are those of the trace. The first harmonic of the hours at which sessions
    begin gives ``daily`` and ``peak``: if a share 1 - d/2 of the sessions takes place, its amplitude is d / (2 - d).
    The gap is the rest of the time per session. ``variety`` is how much more the clients' own gaps differ than by
    chance. Speeds are log-normal with the medians and spreads of the trace.
    """
    on = trace.sessions(needs)
    length = on.end - on.begin
    session, spread = float(length.mean()), float(np.log(length).std())
    harmonic = np.exp(2j * np.pi * (on.begin % DAY) / DAY).mean()
    # If sessions begin at all hours alike, the harmonic is 0.
    amplitude = min(2 * abs(harmonic), 1.0)
    daily = 2 * amplitude / (1 + amplitude)
    takes_place = 1 - daily / 2
    counts = np.bincount(on.device)
    counts = counts[counts > 0]
    gaps = np.maximum(takes_place * trace.span / counts - session, 0.01 * session)  # of each client
    often = counts >= _SESSIONS  # the others' gaps are mostly chance
    variety = 0.0
    if often.sum() >= _SESSIONS:
        # If each session takes place with probability q, a count n has a variance of (1 - q) / n times its square.
        by_chance = (1 - takes_place) / counts[often] * (1 + session / gaps[often]) ** 2
        variety = float(np.sqrt(max(np.log(gaps[often]).var() - by_chance.mean(), 0.0)))
    state = {"session": session, "gap": float(gaps.mean()), "spread": spread, "variety": variety, "daily": daily}
    state["peak"] = float(np.angle(harmonic) / (2 * np.pi) * 24 % 24)
    rounded = {name: float(f"{value:.4g}") for name, value in state.items()}
    speeds: dict[str, float] = {}
    if len(trace.speed):
        for name in ("speed", "bandwidth"):
            values = getattr(trace, name)
            speeds |= {name: float(np.median(values)), f"{name}_spread": float(np.log(values).std())}
    drawn: dict[str, Any] = {name: float(f"{value:.4g}") for name, value in speeds.items()}
    return DrawnDevices(states={"online": rounded}, **drawn)

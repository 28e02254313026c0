"""Traces: when real devices were on and how fast they are, from plain files and from two published formats.

The plain format is one table of intervals and one of speeds, as Parquet or CSV::

    client, from, to, state              seconds; a state holds from ... to
    client, speed, bandwidth             samples a second, bytes a second

A client is on while all the states hold that are needed, by default all that the file names. Times repeat after the
end of the trace.

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
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import MissingExtraError, ScenarioError
from fedcohort.core.files import open_file, read_file, write_file
from fedcohort.core.params import Boolean, Optional, Text, param
from fedcohort.core.params import Sequence as ListOf
from fedcohort.scenario.counter_rng import uniforms
from fedcohort.scenario.devices import DAY, DEVICES, POSITIVE, TICK, Attendance, Devices, DrawnDevices

INTERVALS, SPEEDS = ("client", "from", "to", "state"), ("client", "speed", "bandwidth")
ON = "on"  # the state of a trace that has only one
_DEVICE, _CAPACITY = 10, 11  # positions in the devices stream
_PASSES = 3.0  # FedScale counts a backward pass as two forward passes
_SESSIONS = 3  # with fewer, a client's own gap cannot be told
_KILOBIT = 1024 / 8  # bytes; FedScale measures models in units of 1,024 bits


@dataclass(frozen=True, eq=False)
class Trace:
    """Intervals and speeds of devices.

    Attributes
    ----------
    names : tuple of str
        The devices that have intervals.
    device, state : (m,) int array
        Whose interval it is, and of which of ``states``.
    begin, end : (m,) float array
        Seconds.
    speed, bandwidth : (s,) float array
        Of the devices ``measured``; empty where the trace has none.
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
        """Build a trace from rows of both tables; what makes no sense is refused.

        >>> trace = Trace.of([("anna", 0, 60, "on"), ("ben", 30, 90, "on")], [("anna", 10, 1000)])
        >>> trace.span, trace.names
        (90.0, ('anna', 'ben'))
        """
        if not rows:
            raise ScenarioError(f"{source} has no intervals.", hint=f"its columns are {', '.join(INTERVALS)}")
        names = tuple(dict.fromkeys(row[0] for row in rows))
        states = tuple(dict.fromkeys(row[3] for row in rows))
        at = {name: i for i, name in enumerate(names)}
        which = {state: i for i, state in enumerate(states)}
        clients, starts, ends, held = zip(*rows, strict=True)
        begin, end = np.array(starts, np.float64), np.array(ends, np.float64)
        wrong = np.flatnonzero(~(np.isfinite(begin) & np.isfinite(end) & (begin >= 0) & (end > begin)))
        if len(wrong):
            row = rows[int(wrong[0])]
            raise ScenarioError(
                f"An interval of {source} must go from 0 or later to a later moment. Got {row[1]:g} to {row[2]:g} of "
                f"client {row[0]!r}."
            )
        _check_speeds(speeds, source)
        measured, speed, bandwidth = zip(*speeds, strict=True) if speeds else ((), (), ())
        return cls(
            names=names,
            device=np.array([at[name] for name in clients], np.int64),
            state=np.array([which[state] for state in held], np.int64),
            begin=begin,
            end=end,
            states=states,
            speed=np.array(speed, np.float64),
            bandwidth=np.array(bandwidth, np.float64),
            measured=tuple(measured),
        )

    @property
    def span(self) -> float:
        """When it ends, in seconds."""
        return float(self.end.max())

    def sessions(self, needs: Sequence[str] | None = None) -> Trace:
        """Return the intervals in which all states of ``needs`` hold, by default all there are, as one state."""
        needs = self.states if needs is None else needs
        for state in needs:
            if state not in self.states:
                raise ScenarioError(f"The trace has no state {state!r}. It has {', '.join(self.states)}.")
        wanted = [self.states.index(state) for state in dict.fromkeys(needs)]
        parts = [_union(*(column[self.state == s] for column in (self.device, self.begin, self.end))) for s in wanted]
        device, begin, end = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        device, begin, end = _covered(device, begin, end, len(wanted))
        if not len(device):
            raise ScenarioError(f"In the trace no client ever has the states {', '.join(needs)} together.")
        return Trace(
            self.names, device, np.zeros(len(device), np.int64), begin, end, (ON,),
            self.speed, self.bandwidth, self.measured,
        )  # fmt: skip


def _check_speeds(speeds: Sequence[tuple[str, float, float]], source: str) -> None:
    for name, speed, bandwidth in speeds:
        if not (np.isfinite([speed, bandwidth]).all() and min(speed, bandwidth) > 0):
            raise ScenarioError(
                f"The speeds in {source} must be positive. Got {speed:g} and {bandwidth:g} of client {name!r}."
            )


def _union(device: IntArray, begin: FloatArray, end: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    return _covered(device, begin, end, 1)


def _covered(
    device: IntArray, begin: FloatArray, end: FloatArray, times: int
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return the stretches that at least so many of a device's intervals cover, by device and time."""
    who, when = np.concatenate([device, device]), np.concatenate([begin, end])
    step = np.repeat([1, -1], len(begin))
    order = np.lexsort((-step, when, who))  # an interval that begins where another ends continues it
    who, when, step = who[order], when[order], step[order]
    depth = np.cumsum(step)  # how many intervals are open; every device ends at 0, so one sum serves all
    inside = depth >= times
    before = np.concatenate([[False], inside[:-1]])
    opens, closes = np.flatnonzero(inside & ~before), np.flatnonzero(~inside & before)
    kept = when[closes] > when[opens]
    return who[opens][kept], when[opens][kept], when[closes][kept]


# -- reading and writing --------------------------------------------------------------------------------------------


def read_trace(intervals: str | Path, speeds: str | Path | None = None) -> Trace:
    """Read a trace in the plain format; a name that ends in ``.parquet`` is Parquet, everything else CSV."""
    rows = [
        (str(c), _number(a, intervals), _number(b, intervals), str(s)) for c, a, b, s in _table(intervals, INTERVALS)
    ]
    fast = []
    if speeds is not None:
        fast = [(str(c), _number(a, speeds), _number(b, speeds)) for c, a, b in _table(speeds, SPEEDS)]
    return Trace.of(rows, fast, str(intervals))


def write_trace(trace: Trace, intervals: str | Path, speeds: str | Path | None = None) -> None:
    """Write a trace in the plain format, its speeds only where a second file is named."""
    names, states = np.array(trace.names, object), np.array(trace.states, object)
    _write(intervals, INTERVALS, [names[trace.device], trace.begin, trace.end, states[trace.state]])
    if speeds is not None:
        _write(speeds, SPEEDS, [np.array(trace.measured, object), trace.speed, trace.bandwidth])


def _number(value: Any, path: str | Path) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ScenarioError(f"{path} must have numbers in its columns of times and speeds. Got {value!r}.") from None


def _table(path: str | Path, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows of a table with these columns, perhaps among others."""
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            table = _parquet().read_table(io.BytesIO(read_file(path)), use_threads=False)
            found = {name: table.column(name).to_pylist() for name in table.column_names}
        else:
            lines = list(csv.DictReader(io.StringIO(read_file(path).decode(), newline="")))
            found = {name: [line[name] for line in lines] for name in (lines[0] if lines else ())}
    except (OSError, ValueError, csv.Error) as error:  # what Arrow raises is a ValueError or an OSError too
        raise ScenarioError(f"The trace {path} cannot be read: {str(error).rstrip('.')}.") from error
    missing = [name for name in columns if name not in found]
    if missing:
        raise ScenarioError(
            f"The trace {path} has no column {missing[0]!r}. It has {', '.join(map(str, found)) or 'none'}.",
            hint=f"its columns must be {', '.join(columns)}",
        )
    return list(zip(*(found[name] for name in columns), strict=True))


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
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "Traces as Parquet need pyarrow.", hint="pip install 'fedcohort[sim]', or use CSV"
        ) from error
    return pyarrow.parquet


# -- published formats ----------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Reads pickled dictionaries, lists, texts and numbers. Nothing is looked up by name, so nothing can be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it holds a {module}.{name}; only dictionaries, lists, texts and numbers are read"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


# What a pickle that was cut off or changed may raise; one that claims to be huge runs out of memory.
_DAMAGE = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
    pickle.UnpicklingError,
)  # fmt: skip


def _unpickled(path: str | Path) -> Mapping[Any, Any]:
    try:
        with open_file(Path(path)) as stream:
            found = _PlainUnpickler(stream).load()
    except _DAMAGE as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise ScenarioError(f"The trace {path} cannot be read: {why}.") from error
    if not isinstance(found, dict):
        raise ScenarioError(f"The trace {path} must be a dictionary of devices. Got {type(found).__name__}.")
    return found


def read_fedscale(availability: str | Path, capacity: str | Path | None = None) -> Trace:
    """Read FedScale's traces ([Lai2022]_): ``client_behave_trace`` and ``client_device_capacity``.

    A device is on from ``active[j]`` to ``inactive[j]``. Its ``computation`` is milliseconds for the forward pass of a
    sample, and training takes three times as long; ``communication`` is kilobits a second.
    """
    rows = []
    for name, entry in _unpickled(availability).items():
        try:
            pairs = list(zip(entry["active"], entry["inactive"], strict=False))
            rows += [(str(name), float(a), float(b), ON) for a, b in pairs if float(b) > float(a)]
        except (KeyError, TypeError, ValueError) as error:
            raise _odd(availability, name, "'active' and 'inactive' with as many moments each") from error
    fast = []
    for name, entry in _unpickled(capacity).items() if capacity is not None else ():
        try:
            speed = 1000.0 / (_PASSES * float(entry["computation"]))
            fast.append((str(name), speed, float(entry["communication"]) * _KILOBIT))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise _odd(str(capacity), name, "'computation' and 'communication', both positive") from error
    return Trace.of(rows, fast, str(availability))


def _odd(path: str | Path, name: Any, needed: str) -> ScenarioError:
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


# The states of a trace, and what a device must say for each of them to hold.
_HOLDS = {"charging": {"charging"}, "wifi": {"wifi"}, "idle": {"locked", "dark"}}


def read_flash(path: str | Path) -> Trace:
    """Read FLASH's state traces ([Yang2021]_): a JSON object of devices, each with its ``messages``.

    A message is a line of a moment, a tabulator and what happened. Three states come out of it: ``charging``, ``wifi``,
    and ``idle``, the screen dark or locked. Time begins at the midnight before the first message of all devices. What
    a device says of its battery's level, and lines that are no messages, are passed over.
    """
    try:
        devices = json.loads(read_file(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ScenarioError(f"The trace {path} cannot be read: {error}.") from error
    if not isinstance(devices, dict):
        raise ScenarioError(f"The trace {path} must be a JSON object of devices. Got {type(devices).__name__}.")
    logs = {str(name): _log(path, name, entry) for name, entry in devices.items()}
    moments = [log[0][0] for log in logs.values() if log]
    if not moments:
        raise ScenarioError(f"The trace {path} has no messages that can be read.")
    zero = min(moments).replace(hour=0, minute=0, second=0)
    rows = [
        (name, begin, end, state)
        for name, log in logs.items()
        for state, causes in _HOLDS.items()
        for begin, end in _stretches(log, zero, lambda now, causes=causes: bool(now & causes))  # type: ignore[misc]
    ]
    return Trace.of(rows, source=str(path))


def _log(path: str | Path, name: Any, entry: Any) -> list[tuple[datetime, str]]:
    """Return a device's messages by time; the published files are not always in order."""
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), str):
        raise _odd(path, name, "'messages', lines of text")
    return sorted(filter(None, map(_message, entry["messages"].splitlines())), key=lambda item: item[0])


def _message(line: str) -> tuple[datetime, str] | None:
    when, _, what = line.strip().partition("\t")
    what = what.strip().lower()
    try:
        return (datetime.fromisoformat(when.strip()), what) if what in _CHANGES else None
    except ValueError:
        return None


def _stretches(
    log: Sequence[tuple[datetime, str]], zero: datetime, holds: Callable[[set[str]], bool]
) -> list[tuple[float, float]]:
    """Return when something held, by the states that messages turn on and off; what is open at the end ends there."""
    now: set[str] = set()
    since: datetime | None = None
    found: list[tuple[datetime, datetime]] = []
    for when, what in log:
        state, on = _CHANGES[what]
        (now.add if on else now.discard)(state)
        if holds(now) and since is None:
            since = when
        elif not holds(now) and since is not None:
            found.append((since, when))
            since = None
    if since is not None:
        found.append((since, log[-1][0]))
    second = timedelta(seconds=1)
    return [((a - zero) / second, (b - zero) / second) for a, b in found if b > a]


FORMATS: Mapping[str, Callable[[str | Path, str | Path | None], Trace]] = {
    "plain": read_trace,
    "fedscale": read_fedscale,
    "flash": lambda path, _: read_flash(path),
}
"""Readers of traces by format: from a file of intervals, and one of speeds where the format has it."""


# -- devices of a trace ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Lines:
    """Sessions of all devices as one sorted array, to find any moment of any device by bisection."""

    span: float
    keys: FloatArray  # (m,) device * span + begin
    begin: FloatArray  # (m,)
    end: FloatArray  # (m,)
    first: IntArray  # (D,) where each device's sessions begin
    last: IntArray  # (D,) where they end

    @classmethod
    def of(cls, trace: Trace, span: float) -> _Lines:
        order = np.lexsort((trace.begin, trace.device))
        device = trace.device[order]
        first = np.searchsorted(device, np.arange(len(trace.names)))
        last = np.searchsorted(device, np.arange(len(trace.names)), side="right")
        begin, end = trace.begin[order], trace.end[order]
        return cls(span, device * span + begin, begin, end, first, last)

    def at(self, device: IntArray, time: float | FloatArray) -> Attendance:
        turn, now = np.divmod(time, self.span)  # the trace repeats
        zero = turn * self.span
        place = np.searchsorted(self.keys, device * self.span + now, side="right")
        ends = self.end[np.maximum(place - 1, 0)]
        on: BoolArray = (place > self.first[device]) & (now < ends)
        first = np.minimum(self.first[device], len(self.keys) - 1)
        has = self.last[device] > self.first[device]
        # A session that lasts to the end of the trace goes on if the device is on at its beginning.
        ends = np.where((ends >= self.span) & has & (self.begin[first] <= 0), self.span + self.end[first], ends)
        following = self.begin[np.minimum(place, len(self.keys) - 1)]
        again = np.where(has, self.span + self.begin[first], np.inf)
        begins = np.where(place < self.last[device], following, again)
        return Attendance(on, zero + np.where(on, ends, np.maximum(begins, now + TICK)))


@lru_cache(maxsize=8)
def _loaded(path: str, stamp: int, speeds: str | None, needs: tuple[str, ...] | None) -> tuple[Trace, _Lines]:
    trace = read_trace(path, speeds)
    return trace, _Lines.of(trace.sessions(needs), trace.span)


@DEVICES.register("trace")
@dataclass(frozen=True, kw_only=True)
class TraceDevices(Devices):
    """Devices of a trace in the plain format, which repeats after its end.

    Every client has a device of the trace, drawn at random by the seed; without ``shuffle`` client i has device i, and
    they begin again after the last. A device without speeds of its own has those of a random one that is measured.
    """

    path: str = param("trace.parquet", Text(), "file of intervals: client, from, to, state")
    speeds_path: str | None = param(None, Optional(Text()), "file of speeds: client, speed, bandwidth")
    needs: tuple[str, ...] | None = param(
        None, Optional(ListOf(Text(), least=1)), "states that must hold; None: all that the file names"
    )
    shuffle: bool = param(True, Boolean(), "draw a device for each client")
    speed: float = param(100.0, POSITIVE, "samples a second, where there is no file of speeds")
    bandwidth: float = param(1e6, POSITIVE, "bytes a second, where there is no file of speeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "speeds_path"):  # an experiment may be continued from another folder
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(Path(getattr(self, name)).absolute()))

    @property
    def _trace(self) -> tuple[Trace, _Lines]:
        try:
            stamp = Path(self.path).stat().st_mtime_ns
        except OSError as error:
            raise ScenarioError(f"The trace {self.path} cannot be read: {error.strerror or error}.") from error
        return _loaded(self.path, stamp, self.speeds_path, self.needs)

    def _device(self, clients: IntArray, seed: int) -> IntArray:
        count = len(self._trace[0].names)
        if not self.shuffle:
            return clients % count
        return (uniforms(seed, rng.DEVICES, clients, _DEVICE) * count).astype(np.int64)

    def presence(self, clients: IntArray, *, seed: int, time: float | FloatArray) -> Attendance:
        """Look the clients' devices up."""
        return self._trace[1].at(self._device(clients, seed), time)

    def speeds(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return the speeds of the clients' devices."""
        return self._measured(clients, seed, self._trace[0].speed, self.speed)

    def bandwidths(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return the bandwidths of the clients' devices."""
        return self._measured(clients, seed, self._trace[0].bandwidth, self.bandwidth)

    def _measured(self, clients: IntArray, seed: int, values: FloatArray, default: float) -> FloatArray:
        if not len(values):
            return np.full(len(clients), float(default))
        drawn = (uniforms(seed, rng.DEVICES, clients, _CAPACITY) * len(values)).astype(np.int64)
        own = _places(self._trace[0])[self._device(clients, seed)]
        return values[np.where(own >= 0, own, drawn)]


@lru_cache(maxsize=8)
def _places(trace: Trace) -> IntArray:
    """(D,) where each device stands among those measured, -1 where it does not."""
    at = {name: i for i, name in enumerate(trace.measured)}
    return np.array([at.get(name, -1) for name in trace.names], np.int64)


# -- a generator fitted to a trace ----------------------------------------------------------------------------------


def fit(trace: Trace, needs: Sequence[str] | None = None) -> DrawnDevices:
    r"""Return drawn devices with the few numbers of a trace, so that it can be shared without the data.

    Mean and spread of the session lengths are the trace's. The first harmonic of the hours at which sessions begin
    gives ``daily`` and ``peak``: where a share 1 - d/2 of the sessions takes place, its amplitude is d / (2 - d). The
    gap is what remains of the time per session, and ``variety`` is how much more the clients' own gaps differ than
    chance makes them. Speeds are log-normal with the medians and spreads of the trace.
    """
    on = trace.sessions(needs)
    length = on.end - on.begin
    session, spread = float(length.mean()), float(np.log(length).std())
    turn = np.exp(2j * np.pi * (on.begin % DAY) / DAY).mean()
    amplitude = min(2 * abs(turn), 1.0)
    daily = 2 * amplitude / (1 + amplitude)
    takes_place = 1 - daily / 2
    counts = np.bincount(on.device)
    counts = counts[counts > 0]
    gaps = np.maximum(takes_place * trace.span / counts - session, 0.01 * session)  # the clients' own
    often = counts >= _SESSIONS
    variety = 0.0
    if often.sum() >= _SESSIONS:
        # A count of n sessions that each take place with probability q varies by (1 - q) / n of its square.
        by_chance = (1 - takes_place) / counts[often] * (1 + session / gaps[often]) ** 2
        variety = float(np.sqrt(max(np.log(gaps[often]).var() - by_chance.mean(), 0.0)))
    state = {"session": session, "gap": float(gaps.mean()), "spread": spread, "variety": variety, "daily": daily}
    state["peak"] = float(np.angle(turn) / (2 * np.pi) * 24 % 24)
    rounded = {name: float(f"{value:.4g}") for name, value in state.items()}
    speeds: dict[str, float] = {}
    if len(trace.speed):
        for name in ("speed", "bandwidth"):
            values = getattr(trace, name)
            speeds |= {name: float(np.median(values)), f"{name}_spread": float(np.log(values).std())}
    return DrawnDevices(states={"online": rounded}, **{k: float(f"{v:.4g}") for k, v in speeds.items()})

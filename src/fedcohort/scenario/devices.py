"""Clients as devices in time: when each is on, how fast it computes, how fast it sends.

Everything is a function of (seed, client, time) and is computed without any earlier time or any other client. A million
clients are a few vector operations, and a resumed run has nothing to restore.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.params import Constraint, Interval, Optional, Parameterized, Sequence, param
from fedcohort.core.protocol import Status
from fedcohort.core.registry import Registry
from fedcohort.scenario.counter_rng import log_normals, normals, uniforms, uniforms_each
from fedcohort.scenario.part import NamedPart

DEVICES: Registry[Devices] = Registry("devices")

HOUR, DAY, WEEK = 3600.0, 86400.0, 604800.0
_AHEAD = 1024  # OnlineDevices computes at least this many changes at once
TICK = 1e-3  # seconds; time must advance even if rounding puts a change at the current moment
# Positions in the devices stream. Never renumber them. Those of states come from the states' names.
_SPEED, _BANDWIDTH, _TIME_ZONE, _WORK = 0, 1, 2, 3
_GAP, _PHASE, _LENGTH, _START, _WHETHER = range(5)  # second position, within a state
POSITIVE = Interval(float, 0, None, "neither")
_SPREAD = Interval(float, 0, None)


class Attendance(NamedTuple):
    """Which clients are on at a moment.

    Attributes
    ----------
    on : (k,) bool array
    until : (k,) float array
        The time up to which this is certain. A client that is on has its session until then. A client that is off may
        be on from then.
    """

    on: BoolArray
    until: FloatArray


@dataclass(frozen=True, kw_only=True)
class Sessions(Parameterized):
    r"""When a state holds: sessions and gaps of random length, more frequent at some hours of the day than at others.

    A client's time is divided into cycles of ``session`` seconds plus the client's own gap, which begin at a random
    moment. A cycle has at most one session. Its length is log-normal with mean ``session``, and its place in the cycle
    is uniform. It takes place with the probability :math:`1 - d (1 - \cos(2 \pi (h - p) / 24)) / 2`, where h is the
    local hour at which it would begin, p is ``peak`` and d is ``daily``. Without ``daily``, the mean lengths of
    sessions and gaps are ``session`` and ``gap``.

    >>> sessions = Sessions(session=600, gap=1800)
    >>> on, until = sessions.at(np.arange(10_000), "online", seed=0, time=5_000.0)
    >>> round(float(on.mean()), 2)
    0.25
    """

    session: float = param(HOUR, POSITIVE, "mean length of a session in seconds")
    gap: float = param(2 * HOUR, POSITIVE, "mean length of a gap in seconds")
    spread: float = param(0.0, _SPREAD, "standard deviation of the log of session lengths")
    variety: float = param(0.0, _SPREAD, "standard deviation of the log of the clients' own mean gaps")
    daily: float = param(0.0, Interval(float, 0, 1), "share of sessions that are skipped at the quietest hour (d)")
    peak: float = param(20.0, Interval(float, 0, 24, "left"), "local hour with the most sessions (p)")
    zones: int | None = param(1, Optional(Interval(int, 1, 24)), "number of time zones; None spreads them over the day")
    own_gaps: tuple[float, ...] | None = param(
        None, Optional(Sequence(POSITIVE, least=1)), "every client's own mean gap"
    )

    def at(self, clients: IntArray, name: str, *, seed: int, time: float | FloatArray) -> Attendance:
        """Return for which clients the state holds.

        Parameters
        ----------
        clients : (k,) int array
        name : str
            Name of the state. Each state has its own random numbers.
        time : float or (k,) float array
            Seconds since the start, which is at midnight in the first time zone.
        """
        # By name, so that a further state does not change the numbers of the others.
        state = zlib.crc32(name.encode())
        gaps = self.gap if self.own_gaps is None else np.asarray(self.own_gaps)[clients]
        if self.variety and self.own_gaps is None:
            gaps = self.gap * log_normals(self.variety, uniforms(seed, rng.DEVICES, clients, state, _GAP))
        cycle = self.session + gaps
        begun = uniforms(seed, rng.DEVICES, clients, state, _PHASE) * cycle
        # Which cycle it is follows from the time alone, so any moment can be asked for without those before it.
        number = np.floor((time + begun) / cycle).astype(np.int64)
        zero = number * cycle - begun  # when this cycle began
        length: FloatArray | float = self.session
        if self.spread:
            draws = uniforms_each(seed, rng.DEVICES, clients, number, state, _LENGTH)
            length = self.session * log_normals(self.spread, draws)
        length = np.minimum(length, cycle)  # the session ends within its cycle
        start: FloatArray = zero + uniforms_each(seed, rng.DEVICES, clients, number, state, _START) * (cycle - length)
        end = start + length
        takes_place = np.ones(len(clients), np.bool_)
        if self.daily:
            hour = start / HOUR
            if self.zones != 1:  # a client's local time is the same for all states
                place = uniforms(seed, rng.DEVICES, clients, _TIME_ZONE)
                hour += 24 * (place if self.zones is None else np.floor(place * self.zones) / self.zones)
            chance = self.activity(hour)
            takes_place = uniforms_each(seed, rng.DEVICES, clients, number, state, _WHETHER) < chance
        on = takes_place & (start <= time) & (time < end)
        # A client that is off may be on when its session begins, or after that (or without one), in the next cycle.
        later = np.maximum(zero + cycle, time + TICK)
        until = np.where(on, end, np.where(takes_place & (time < start), start, later))
        return Attendance(on, until)

    def activity(self, hour: FloatArray) -> FloatArray:
        """Return the probability that a session at this local hour takes place."""
        chance: FloatArray = 1 - self.daily * (1 - np.cos(2 * np.pi * (hour - self.peak) / 24)) / 2
        return chance


class Devices(NamedPart):
    """When clients are on, and their two speeds: time = samples / speed + bytes / bandwidth."""

    def presence(self, clients: IntArray, *, seed: int, time: float | FloatArray) -> Attendance:
        """Return which of ``clients`` are on at ``time`` (one for all, or (k,)), and until when that is certain."""
        raise NotImplementedError(type(self).__name__)

    def speeds(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return how many samples each of ``clients`` trains on in a second (k,)."""
        raise NotImplementedError(type(self).__name__)

    def bandwidths(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Return how many bytes each of ``clients`` receives or sends in a second (k,)."""
        raise NotImplementedError(type(self).__name__)

    @property
    def always_on(self) -> bool:
        """Whether no client is ever off."""
        return False

    def check_clients(self, clients: int) -> None:
        """Raise :class:`ScenarioError` if these devices are listed one by one for another number of clients."""

    def spread_work(self, seconds: FloatArray, clients: IntArray, *, seed: int, ticket: int) -> FloatArray:
        """Return how long each of ``clients`` takes for one cohort's work, given its usual ``seconds`` (k,)."""
        return seconds

    def failure_rates(self, clients: IntArray, others: float) -> FloatArray | float:
        """Return the probability that each of ``clients`` fails at random; ``others`` unless they have their own."""
        return others

    def durations(
        self, clients: IntArray, samples: FloatArray | float, transfer: FloatArray | float, *, seed: int
    ) -> FloatArray:
        """Return the seconds that ``samples`` samples and ``transfer`` bytes take each of ``clients`` (k,)."""
        seconds: FloatArray = samples / self.speeds(clients, seed=seed) + transfer / self.bandwidths(clients, seed=seed)
        return seconds

    def work(self, clients: IntArray, seconds: FloatArray, *, seed: int, time: float) -> tuple[FloatArray, AnyArray]:
        """Return how long each client works from ``time`` on, and whether it fails because its session ends.

        Parameters
        ----------
        clients : (k,) int array
            The clients that begin work; one that is off fails at once.
        seconds : (k,) float array
            How long the work takes if the client stays on.

        Returns
        -------
        seconds : (k,) float64
        status : (k,) int8 of Status
        """
        # The work is lost with the session: a phone that leaves the charger kills the app that trains.
        on, until = self.presence(clients, seed=seed, time=time)
        left = np.where(on, until - time, 0.0)
        failed = ~on | (seconds > left)
        status = np.where(failed, np.int8(Status.FAILED), np.int8(Status.OK))
        return np.where(failed, left, seconds), status


class _States(Constraint):
    """A table of states, each the parameters of :class:`Sessions`."""

    def admits(self, value: object) -> bool:
        """Whether every state is a table of session parameters."""
        if not isinstance(value, Mapping):
            return False
        try:
            return all(isinstance(name, str) and bool(Sessions(**table)) for name, table in value.items())
        except (ParameterError, TypeError):
            return False

    def describe(self) -> str:
        """Name the allowed values."""
        return "a table of states such as {online = {session = 3600, gap = 7200}}, each with parameters of Sessions"

    def bad_values(self) -> list[object]:
        """Return values that are not such a table."""
        return [3, {"online": 3}, {"online": {"session": 0}}, {"online": {"lenght": 3}}]


@DEVICES.register("drawn")
@dataclass(frozen=True, kw_only=True)
class DrawnDevices(Devices):
    """Devices drawn from a few parameters: log-normal speeds, and states that must all hold for a client to be on.

    Without states, all clients are always on. A day-night federation has one state, ``online``. A phone that only
    trains while it is charging on a free network has three.

    >>> half = {"session": 600, "gap": 600}
    >>> devices = DrawnDevices(states={"online": half, "charging": half})
    >>> round(float(devices.presence(np.arange(10_000), seed=0, time=9_000.0).on.mean()), 2)
    0.25
    >>> DrawnDevices(speed=100, bandwidth=1e6).durations(np.arange(2), 600, 4e6, seed=0)
    array([10., 10.])
    """

    states: Mapping[str, Mapping[str, Any]] | None = param(
        None, Optional(_States()), "states that must all hold for a client to be on; None: always on"
    )
    speed: float = param(100.0, POSITIVE, "median of the samples that clients train on in a second")
    speed_spread: float = param(0.0, _SPREAD, "standard deviation of the log of the clients' speeds")
    bandwidth: float = param(1e6, POSITIVE, "median of the bytes that clients receive or send in a second")
    bandwidth_spread: float = param(0.0, _SPREAD, "standard deviation of the log of the clients' bandwidths")
    own_speeds: tuple[float, ...] | None = param(
        None, Optional(Sequence(POSITIVE, least=1)), "every client's own speed"
    )
    own_failures: tuple[float, ...] | None = param(
        None, Optional(Sequence(Interval(float, 0, 1), least=1)), "each client's own probability of failing"
    )
    jitter: float = param(0.0, _SPREAD, "standard deviation of the log of how long one client's work takes each time")

    @cached_property
    def _sessions(self) -> dict[str, Sessions]:
        return {name: Sessions(**table) for name, table in (self.states or {}).items()}

    @property
    def always_on(self) -> bool:
        """Whether there are no states."""
        return not self.states

    def presence(self, clients: IntArray, *, seed: int, time: float | FloatArray) -> Attendance:
        """Return for which clients all states hold."""
        # A client is on until the first state ends, and off until the last of the missing ones may begin.
        on, ends, begins = np.ones(len(clients), np.bool_), np.full(len(clients), np.inf), np.zeros(len(clients))
        for name, sessions in self._sessions.items():
            holds, until = sessions.at(clients, name, seed=seed, time=time)
            on &= holds
            ends = np.where(holds, np.minimum(ends, until), ends)
            begins = np.where(holds, begins, np.maximum(begins, until))  # off until all states may hold
        return Attendance(on, np.where(on, ends, begins))

    def check_clients(self, clients: int) -> None:
        """Compare the lengths of all lists with the number of clients."""
        lists = {"own_speeds": self.own_speeds, "own_failures": self.own_failures}
        lists |= {f"states.{name}.own_gaps": sessions.own_gaps for name, sessions in self._sessions.items()}
        for name, values in lists.items():
            if values is not None and len(values) != clients:
                raise ScenarioError(f"The devices have {len(values):,} {name} for {clients:,} clients.")

    def spread_work(self, seconds: FloatArray, clients: IntArray, *, seed: int, ticket: int) -> FloatArray:
        """Multiply by log-normal factors of median 1, a new one for each cohort."""
        if not self.jitter:
            return seconds
        drawn: FloatArray = seconds * np.exp(self.jitter * normals(uniforms(seed, rng.DEVICES, clients, _WORK, ticket)))
        return drawn

    def failure_rates(self, clients: IntArray, others: float) -> FloatArray | float:
        """Return the clients' own probabilities, if they are listed."""
        return others if self.own_failures is None else np.asarray(self.own_failures)[clients]

    def speeds(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Draw each client's speed by hashing its number, unless they are listed."""
        if self.own_speeds is not None:
            return np.asarray(self.own_speeds)[clients]
        return _log_normal(self.speed, self.speed_spread, clients, seed, _SPEED)

    def bandwidths(self, clients: IntArray, *, seed: int) -> FloatArray:
        """Draw each client's bandwidth by hashing its number."""
        return _log_normal(self.bandwidth, self.bandwidth_spread, clients, seed, _BANDWIDTH)


def _log_normal(median: float, spread: float, clients: IntArray, seed: int, position: int) -> FloatArray:
    if not spread:
        return np.full(len(clients), float(median))
    drawn: FloatArray = median * np.exp(spread * normals(uniforms(seed, rng.DEVICES, clients, position)))
    return drawn


class OnlineDevices:
    """Which clients are on as time advances. Only clients whose state may have changed are looked up.

    Parameters
    ----------
    clients : int
        N, the number of clients.
    time : float
        The starting time.

    Attributes
    ----------
    on : (N,) bool array
        Replaced, never changed in place, when a client comes or goes.

    Examples
    --------
    >>> devices = DrawnDevices(states={"online": {"session": 600, "gap": 1200}})
    >>> roster = OnlineDevices(devices, 1000, seed=3)
    >>> roster.advance(50_000.0)
    >>> bool((roster.on == devices.presence(np.arange(1000), seed=3, time=50_000.0).on).all())
    True
    """

    def __init__(self, devices: Devices, clients: int, *, seed: int, time: float = 0.0) -> None:
        self._devices, self._seed = devices, seed
        self.on, self._until = devices.presence(np.arange(clients), seed=seed, time=time)
        self._horizon: float  # up to where all changes are known
        self._changes: tuple[FloatArray, IntArray, BoolArray]  # times, clients, and whether they are on then; by time
        self._done: int  # changes that have happened
        self._look_ahead()

    @property
    def next(self) -> float:
        """The earliest time at which ``on`` may change."""
        times = self._changes[0]
        return float(times[self._done]) if self._done < len(times) else self._horizon

    def advance(self, time: float) -> None:
        """Advance to ``time``, which must not be earlier than the last one."""
        while time >= self.next:
            times, clients, on = self._changes
            end = int(np.searchsorted(times, time, side="right"))
            if end > self._done:
                self.on = self.on.copy()  # whoever holds the old array must not see it change
                happened = slice(self._done, end)
                self.on[clients[happened]] = on[happened]  # if a client comes and goes, its last change counts
                self._done = end
            if end < len(times):
                return
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Compute the next changes, many at once, because one client takes as long as a thousand."""
        ends = self._until[self._until < np.inf]
        changes = [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.bool_))]
        self._horizon = np.inf
        if len(ends):
            # Look as far as the first thousand clients, or a 64th of all, may change.
            place = min(len(ends) - 1, max(_AHEAD, len(ends) // 64))
            self._horizon = float(np.partition(ends, place)[place])
            due = np.flatnonzero(self._until <= self._horizon)
            while len(due):
                until = self._until[due]
                on, self._until[due] = self._devices.presence(due, seed=self._seed, time=until)
                changes.append((until, due, on))
                due = due[self._until[due] <= self._horizon]
        times, clients, on = (np.concatenate(column) for column in zip(*changes, strict=True))
        order = np.argsort(times, kind="stable")
        self._changes, self._done = (times[order], clients[order], on[order]), 0

    def wait(self, time: float) -> float:
        """Advance from ``time`` until a client is on and return that time; infinity if no client ever is."""
        self.advance(time)
        while not self.on.any() and self.next < np.inf:
            time = self.next
            self.advance(time)
        return time if self.on.any() else np.inf

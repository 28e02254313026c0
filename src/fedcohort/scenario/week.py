"""A federation over a week: when clients are on, how many are available, how fast they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.scenario.devices import DAY, HOUR, WEEK, Devices
from fedcohort.scenario.picture import SHADES, shade_levels, spaced_clients

_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 84  # of the picture: two hours each
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class FederationWeek:
    """The devices of a federation during a week.

    Attributes
    ----------
    clients : int
        Number of clients in the federation.
    times : (T,) float array
        Seconds since the start of the week.
    available : (T,) int array
        How many clients are on at each time.
    shown : (r,) int array
        Clients to show individually, evenly spaced.
    on : (r, T) bool array
        When each of them is on.
    speeds, bandwidths : (N,) float array
    """

    clients: int
    times: FloatArray
    available: IntArray
    shown: IntArray
    on: BoolArray
    speeds: FloatArray
    bandwidths: FloatArray

    @classmethod
    def of(cls, devices: Devices, clients: int, *, seed: int = 0, limit: int = 40) -> FederationWeek:
        """Look up the devices of ``clients`` clients every quarter of an hour."""
        moments = int(WEEK / (HOUR / 4))  # as fine as a picture can show
        everybody = np.arange(clients)
        shown = spaced_clients(clients, limit)
        times: FloatArray = np.linspace(0.0, WEEK, moments, endpoint=False)
        available = np.zeros(moments, np.int64)
        on = np.zeros((len(shown), moments), np.bool_)
        for i, time in enumerate(times.tolist()):
            # One moment for all clients and not the other way round: all clients at all moments would fill the memory.
            now = devices.presence(everybody, seed=seed, time=time).on
            available[i], on[:, i] = now.sum(), now[shown]
        speeds, bandwidths = devices.speeds(everybody, seed=seed), devices.bandwidths(everybody, seed=seed)
        return cls(clients, times, available, shown, on, speeds, bandwidths)

    def quantiles(self) -> dict[str, FloatArray]:
        """Return the 5%, 25%, 50%, 75% and 95% quantiles of both speeds and of the share of time clients are on."""
        columns = {"speed": self.speeds, "bandwidth": self.bandwidths, "share on": self.on.mean(axis=1)}
        return {name: np.quantile(values, _QUANTILES) for name, values in columns.items()}

    def sentences(self) -> list[str]:
        """Return the main facts as sentences."""
        low, high = int(self.available.min()), int(self.available.max())
        hours = self.times % DAY / HOUR
        by_hour = [self.available[(hours >= h) & (hours < h + 1)].mean() for h in range(24)]
        lines = [
            f"{low:,} to {high:,} of {self.clients:,} clients are on, {self.available.mean():,.0f} on average; most at "
            f"{int(np.argmax(by_hour))}:00, fewest at {int(np.argmin(by_hour))}:00"
        ]
        for name, unit in (("speed", "samples"), ("bandwidth", "bytes")):
            low5, _, median, _, high5 = map(_three_digits, self.quantiles()[name].tolist())
            lines.append(
                f"half of the clients have a {name} below {median} {unit} a second, 90% from {low5} to {high5}"
            )
        return lines

    def text(self) -> str:
        """Return a text picture with a line per client and two hours per column, darker the longer the client is on."""
        step = max(1, len(self.times) // _COLUMNS)
        parts = self.on[:, : step * _COLUMNS].reshape(len(self.shown), -1, step).mean(axis=2)
        width = max(6, len(str(self.clients - 1)))
        days = "".join(f"day {d + 1}".ljust(parts.shape[1] // 7) for d in range(7))
        lines = [f"{'client':<{width}}  {days}"]
        for client, row in zip(self.shown.tolist(), shade_levels(parts), strict=True):
            lines.append(f"{client:<{width}} |{''.join(SHADES[level] for level in row)}|")
        counts = self.available[: step * _COLUMNS].reshape(-1, step).mean(axis=1)
        bars = np.ceil(counts / max(self.available.max(), 1) * (len(_BARS) - 1)).astype(int)
        lines.append(f"{'on':<{width}} |{''.join(_BARS[level] for level in bars)}|")
        if len(self.shown) < self.clients:
            lines.append(f"({len(self.shown):,} of {self.clients:,} clients; the last line is all of them)")
        return "\n".join([*lines, "", *self.sentences()])


def _three_digits(value: float) -> str:
    """Return three digits of a number without an exponent.

    >>> _three_digits(1234567.0), _three_digits(0.01234)
    ('1,230,000', '0.0123')
    """
    short = float(f"{value:.3g}")
    return f"{short:,.0f}" if short >= 100 else f"{short:g}"

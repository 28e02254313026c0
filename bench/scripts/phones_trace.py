"""Write the trace of phones that one regime of `fedcohort bench --suite time` is fitted to.

    python bench/scripts/phones_trace.py phones.csv
    fedcohort scenario fit phones.csv

It is not a record of real devices. The published traces (FedScale, FLASH) are not shipped and could not be had where
this was written, so the phones follow habits, not the renewal process of `fedcohort.scenario.devices`. Over 14 days,
each of 1,000 people

- plugs in at night at their own bedtime (22:45 on average, give or take 75 minutes between people and 30 between
  nights) and unplugs 7 hours later (give or take 1), but forgets one night in six,
- tops up by day at random, 0.3 to 3 times a day depending on the person, for a Weibull time (shape 0.7) of 35 minutes
  on average, between 8 and 22 h,
- is on Wi-Fi at home, and at work on weekdays if their work has it (one in two); Wi-Fi drops for 10 minutes on average,
  twice a day.

A phone can train while it is plugged in and on Wi-Fi.
"""

from __future__ import annotations

import sys

import numpy as np

from fedcohort.scenario.traces import Trace, write_trace

PEOPLE, DAYS, HOUR, DAY = 1000, 14, 3600.0, 86400.0


def phone(name: str, generator: np.random.Generator) -> list[tuple[str, float, float, str]]:
    """Return the intervals of one phone."""
    bedtime = generator.normal(22.75, 1.25)
    tops_up = generator.uniform(0.3, 3.0)
    wifi_at_work = generator.random() < 0.5
    rows: list[tuple[str, float, float, str]] = []
    cuts = np.sort(generator.uniform(0, DAYS * DAY, generator.poisson(2 * DAYS)))
    for day in range(DAYS):
        midnight = day * DAY
        if generator.random() > 1 / 6:
            begin = midnight + HOUR * (bedtime + generator.normal(0, 0.5))
            rows.append((name, begin, begin + HOUR * max(generator.normal(7, 1), 1.0), "charging"))
        for hour in generator.uniform(8, 22, generator.poisson(tops_up)):
            begin = midnight + HOUR * hour
            minutes = 35 / 1.266 * generator.weibull(0.7)  # 1.266: the mean at shape 0.7
            rows.append((name, begin, begin + 60 * max(minutes, 1.0), "charging"))
        away = wifi_at_work is False and day % 7 < 5
        homes = [(0.0, 8.5), (18.0, 24.0)] if away else [(0.0, 24.0)]
        rows += [
            (name, *part, "wifi")
            for a, b in homes
            for part in _without(midnight + HOUR * a, midnight + HOUR * b, cuts, generator)
        ]
    return [row for row in rows if row[1] >= 0]


def _without(begin: float, end: float, cuts: np.ndarray, generator: np.random.Generator) -> list[tuple[float, float]]:
    """Return the stretches of an interval between interruptions."""
    parts, at = [], begin
    for cut in cuts[(cuts > begin) & (cuts < end)]:
        if cut > at:
            parts.append((at, float(cut)))
        at = max(at, float(cut + generator.exponential(600.0)))
    return [*parts, (at, end)] if end > at else parts


def main() -> None:
    generator = np.random.default_rng(14)
    rows = [row for person in range(PEOPLE) for row in phone(f"phone-{person}", generator)]
    write_trace(Trace.of(rows), sys.argv[1])


if __name__ == "__main__":
    main()

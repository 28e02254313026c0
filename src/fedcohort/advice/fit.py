r"""Simple distributions fitted to a record, and draws of the clients that may lie behind it.

- Client i takes :math:`\log d \sim N(m_i, \sigma^2)`, :math:`m_i \sim N(\mu, \tau^2)`: pooled variance within
  clients, method of moments between them. A client whose round closed first is censored; its time is imputed (EM).
- It fails with probability :math:`f_i \sim Beta`, by moments (beta-binomial), without the failures that ends of
  sessions explain.
- It is online for a share :math:`s_i \sim Beta` of the time. How long it stays follows from how many of those who are
  there at one cohort are gone at the next, and the rhythm of the day from the first harmonic over the hours.

A draw resamples the clients (bootstrap), fits again, and then draws every client from its posterior. So a client that
was seen often is nearly itself in every draw, and one that was never asked is anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.advice.record import Record
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import SELECTORS, Status
from fedcohort.scenario.devices import DAY, HOUR
from fedcohort.simulate.leaderboard.words import duration, names

_FAST = 5.0  # clients faster than the median by this many robust deviations are not believed
_LEAST_DEVIATION = 0.6  # of the log; so at least 20 times as fast
_EM_STEPS = 5
_PRESENT = 0.995  # who is online for this share is always on
_HOURS = 12  # of the day that a record must cover before a daily rhythm is fitted
_MAX_STRENGTH, _MIN_STRENGTH = 1e4, 0.5  # of Beta distributions, a + b


@dataclass(frozen=True, eq=False)
class Clients:
    """One draw of the clients: N arrays, and what they share.

    Attributes
    ----------
    seconds : (N,) float array or None
        Median time for a round's work; None if the record has no times.
    jitter : float
        Standard deviation of the log of a client's times.
    failures : (N,) float array
    gaps : (N,) float array or None
        Mean time offline; None if all are always on.
    session, daily, peak : float
        As parameters of sessions.
    sizes : (N,) float array
    """

    seconds: FloatArray | None
    jitter: float
    failures: FloatArray
    gaps: FloatArray | None
    session: float
    daily: float
    peak: float
    sizes: FloatArray


@dataclass(frozen=True)
class _Population:
    """What all clients have in common."""

    mean: float
    between: float
    within: float
    failure: tuple[float, float]
    online: tuple[float, float]


class Fit:
    """A fitted record.

    Attributes
    ----------
    fitted, assumed : list of str
        What was fitted, with numbers, and what was assumed because the record does not tell.
    overhead : float
        Seconds of a round in which no client works.
    alpha : float or None
        Dirichlet concentration of labels per class; None if unknown.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.fitted: list[str] = []
        self.assumed: list[str] = []
        n = len(record.names)
        self.asked = np.bincount(record.client, minlength=n)
        self._fit_times(n)
        self._fit_presence(n)
        gone = np.isin(record.status, (int(Status.FAILED), int(Status.MISSING)))
        self.failed = np.bincount(record.client[gone], minlength=n)
        self._lengthen_sessions()
        self.overhead = self._overhead()
        self.alpha = self._alpha()
        self.population = self._estimate(np.arange(n))
        if record.selector not in SELECTORS:
            self.assumed.append(
                f"The selector {record.selector} is not known here; uniform selection stands in for it."
            )
        self._describe()

    # -- times --------------------------------------------------------------------------------------------------------

    def _fit_times(self, n: int) -> None:
        """Compute each client's number of times, their mean logarithm, and the spread within clients."""
        record = self.record
        late = (record.status == Status.LATE) & ~record.answered
        known = (record.answered | late) & np.isfinite(record.seconds)
        usable = known & (record.seconds > 0) & (record.seconds < 1e9)
        if (known & ~usable).any():
            self.assumed.append(f"{int((known & ~usable).sum())} impossible durations on record are left out.")
        client, logs = record.client[usable], np.log(record.seconds[usable])
        censored = late[usable]
        self.timed = np.bincount(client, minlength=n)
        self.means, self.within = np.zeros(n), 0.0
        if not usable.any():
            return
        values = logs.copy()
        for _ in range(_EM_STEPS if censored.any() else 1):
            self.means = np.bincount(client, values, n) / np.maximum(self.timed, 1)
            rest = values - self.means[client]
            freedom = len(rest) - int((self.timed > 0).sum())
            # A wild answer or two must not make everybody unsteady.
            limit = 5 * max(1.4826 * float(np.median(np.abs(rest))), 0.05)
            within = np.sqrt((np.clip(rest, -limit, limit) ** 2).sum() / freedom) if freedom > 0 else 0.3
            self.within = float(within)
            place = (logs[censored] - self.means[client[censored]]) / max(self.within, 1e-6)
            values[censored] = np.maximum(
                self.means[client[censored]] + self.within * _beyond(place), logs[censored] + 0.1 * self.within
            )
        if len(client) == int((self.timed > 0).sum()):
            self.assumed.append("No client was timed twice; its times vary by a factor of 1.35.")
        seen = self.timed > 0
        middle = float(np.median(self.means[seen]))
        deviation = max(1.4826 * float(np.median(np.abs(self.means[seen] - middle))), _LEAST_DEVIATION)
        floor = middle - _FAST * deviation
        liars = np.flatnonzero(seen & (self.means < floor))
        if len(liars):
            who = names([record.names[i] for i in liars], 5)
            self.assumed.append(
                f"Nobody can be as fast as {who} on record, more than {np.exp(middle - floor):.0f} times the median; "
                "the twin takes the fastest believable speed."
            )
            self.means[liars] = floor
        if censored.any():
            self.fitted.append(
                f"{int(censored.sum())} late answers, which count as at least the length of their round."
            )

    # -- presence -----------------------------------------------------------------------------------------------------

    def _fit_presence(self, n: int) -> None:
        """Compute each client's share online, how many independent looks that is, and for how long clients stay."""
        record, online = self.record, self.record.online
        self.share, self.looks = np.ones(n), 1.0
        self.session, self.daily, self.peak, self.always_on = HOUR, 0.0, 12.0, True
        if online is None:
            self.assumed.append("Who was online is not on record (pruned), so all clients are always on.")
            return
        self.share = online.mean(axis=0)
        looks = len(online)
        if float(self.share.mean()) > _PRESENT or looks < 2:
            self.looks = float(looks)
            return
        self.always_on = False
        hours = (record.asked - record.midnight) / HOUR % 24
        level = online.mean(axis=1)
        if record.span >= DAY and len(np.unique(hours.astype(int))) >= _HOURS:
            angle = 2 * np.pi * hours / 24
            design = np.stack([np.ones(looks), np.cos(angle), np.sin(angle)], axis=1)
            (mean, cosine, sine), *_ = np.linalg.lstsq(design, level, rcond=None)
            rest = level - design @ np.array([mean, cosine, sine])
            swing = float(np.hypot(cosine, sine)) / max(float(mean), 1e-9)
            # Neighbouring rounds are alike, so an hour counts once.
            error = float(rest.std()) * np.sqrt(2 / len(np.unique(record.asked // HOUR))) / max(float(mean), 1e-9)
            if swing > 3 * error:
                self.daily = min(2 * swing / (1 + swing), 1.0)
                self.peak = float(np.arctan2(sine, cosine) / (2 * np.pi) * 24 % 24)
        else:
            self.assumed.append("The record covers less than a day, so the twin has no daily rhythm.")
        # Clients that are on leave within a step with the probability (1 - share) (1 - memory).
        step = np.diff(record.asked)
        moved = step > 0
        stayed, left = online[:-1][moved] & online[1:][moved], online[:-1][moved] & ~online[1:][moved]
        share = float(np.clip(self.share.mean(), 0.01, 0.99))
        leaving = (left.sum() + 0.5) / (left.sum() + stayed.sum() + 1)
        memory = float(np.clip(1 - leaving / (1 - share), 0.0, 0.999))
        self.looks = max(2.0, looks * (1 - memory) / (1 + memory))
        usual = float(step[moved].mean()) if moved.any() else HOUR
        if memory < 0.05:
            self.session = usual
            self.assumed.append("Clients come and go faster than rounds; sessions last as long as a round.")
        else:
            self.session = usual / (-np.log(memory) * (1 - share))

    def _lengthen_sessions(self) -> None:
        """Let sessions end in the middle of work no more often than clients failed."""
        asked = int(self.asked.sum())
        if self.always_on or not self.record.timed or not asked:
            return
        work = float(np.exp(self.means[self.timed > 0]).mean())
        failed = min(max((self.failed.sum() + 1) / (asked + 1), 0.02), 0.9)  # a few do no harm
        least = float(-work / np.log(1 - failed))
        if self.session < least:
            self.session = least
            self.assumed.append("So few clients failed that who is asked must stay longer than presence suggests.")

    # -- population and draws -----------------------------------------------------------------------------------------

    def _estimate(self, which: IntArray) -> _Population:
        """Return the population that these clients, some perhaps several times, come from."""
        timed, means = self.timed[which], self.means[which]
        seen = timed > 0
        mean = float(means[seen].mean()) if seen.any() else 0.0
        noise = float((self.within**2 / timed[seen]).mean()) if seen.any() else 0.0
        variance = float(means[seen].var(ddof=1)) if seen.sum() > 1 else 0.25
        failure = _beta_of(self.failed[which], self.asked[which])
        online = _beta_of(self.share[which] * self.looks, np.full(len(which), self.looks))
        return _Population(mean, float(np.sqrt(max(variance - noise, 1e-4))), self.within, failure, online)

    def draw(self, rng: np.random.Generator | None) -> Clients:
        """Return clients that may lie behind the record; without ``rng``, the most likely ones."""
        n = len(self.record.names)
        population = self.population if rng is None else self._estimate(rng.integers(0, n, n))
        seconds = None
        if self.record.timed:
            prior = population.between**2
            weight = prior / (prior + population.within**2 / np.maximum(self.timed, 1)) * (self.timed > 0)
            logs = weight * self.means + (1 - weight) * population.mean
            if rng is not None:
                logs = logs + np.sqrt(prior * (1 - weight)) * rng.standard_normal(n)
            seconds = np.exp(logs)
        failures = _posterior(population.failure, self.failed, self.asked, rng)
        gaps = None
        session = self.session
        if not self.always_on:
            share = _posterior(population.online, self.share * self.looks, np.full(n, self.looks), rng)
            share = np.clip(share, 0.01, 0.995)
            if rng is not None:
                session *= float(np.exp(rng.normal(0.0, 1 / np.sqrt(self.looks))))
            gaps = np.maximum(session * ((1 - self.daily / 2) / share - 1), 0.01 * session)
            # Ends of sessions explain some failures, and the twin has those anyway.
            ended = 1 - np.exp(-(0.0 if seconds is None else seconds) / session)
            failures = np.clip(1 - (1 - failures) / np.maximum(1 - ended, 1e-3), 0.0, 1.0)
        sizes = self.record.sizes
        if sizes is None:
            sizes = np.ones(n) if rng is None else np.exp(rng.uniform(0, 1) * rng.standard_normal(n))
        return Clients(seconds, self.within, failures, gaps, session, self.daily, self.peak, sizes)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _overhead(self) -> float:
        """Return the usual time of a round in which no client works: before messages, after answers, between rounds."""
        record = self.record
        if record.buffer is not None or not record.timed or len(record.asked) < 3:
            return 0.0
        longest = np.array([
            record.seconds[(record.begun == at) & np.isfinite(record.seconds)].max(initial=0.0) for at in record.asked
        ])  # fmt: skip
        spare = record.closed[:-1] - record.asked[:-1] - longest[:-1]
        pause = record.asked[1:] - record.closed[:-1]
        total = np.maximum(spare, 0) + (np.maximum(pause, 0) if self.always_on else 0.0)
        known = total[np.isfinite(total)]
        return float(np.median(known)) if len(known) else 0.0

    def _alpha(self) -> float | None:
        r"""Return the Dirichlet concentration per class with the record's mean :math:`\sum_c q_c^2`, (a+1)/(Ba+1)."""
        record = self.record
        if record.classes is None or record.classes < 2:
            return None
        if record.mixes is not None:
            shares = record.mixes / record.mixes.sum(axis=1, keepdims=True)
            squares = (shares**2).sum(axis=1)
        elif record.squares is not None:
            squares = record.squares
        else:
            return None
        least = 1 / record.classes
        mean = float(np.clip(squares.mean(), least + 1e-3, 1 - 1e-3))
        return float(np.clip((1 - mean) / (record.classes * mean - 1), 0.01, 100.0))

    def _describe(self) -> None:
        record, population = self.record, self.population
        n = len(record.names)
        never = int((self.asked == 0).sum())
        if record.timed:
            text = f"Time for a round's work: median {duration(float(np.exp(population.mean)))}, "
            text += f"a factor of {np.exp(population.between):.2f} between clients (one deviation of the log), "
            text += f"{np.exp(self.within):.2f} from one round of a client to the next; "
            self.fitted.append(
                f"{text}{int(self.timed.sum())} answers of {int((self.timed > 0).sum())} of {n} clients."
            )
        else:
            self.assumed.append("Nobody was timed, so the twin counts rounds and not seconds.")
        if never:
            self.assumed.append(f"{never} of {n} clients were never asked; the twin draws theirs like the others'.")
        a, b = population.failure
        spread = np.sqrt(a * b / (a + b + 1)) / (a + b)
        share = f"{int(self.failed.sum())} of {int(self.asked.sum())} requests"
        self.fitted.append(f"Failures: {share}; between clients a deviation of {100 * spread:.1f} points.")
        if self.always_on:
            self.fitted.append("Presence: all clients are always on.")
        else:
            low, high = self.share.min(), self.share.max()
            text = f"Presence: {self.share.mean():.0%} online on average, {low:.0%} to {high:.0%} by client, for about "
            text += f"{duration(self.session)} at a time"
            if self.daily:
                text += f", {self.daily:.0%} fewer sessions at the quietest hour, most at {self.peak:.0f} h"
            self.fitted.append(f"{text}.")
            self.assumed.append("Lengths of sessions have a log deviation of 0.5.")
        if record.deadline is not None:
            self.fitted.append(
                f"Rounds: a deadline of {duration(record.deadline)}, as rounds with late clients show it."
            )
        if self.overhead > 0.05 * np.exp(population.mean):
            self.fitted.append(f"Rounds: {duration(self.overhead)} of each round pass without any client at work.")
        if record.sizes is None:
            self.assumed.append("Sizes are not on record; they are drawn with a log deviation between 0 and 1.")
        else:
            low, high = record.sizes.min(), record.sizes.max()
            self.fitted.append(f"Sizes: as recorded, {low:,.0f} to {high:,.0f} samples.")
        if self.alpha is not None:
            source = "as recorded" if record.mixes is not None else "by label products"
            self.fitted.append(f"Labels: {source}, like a Dirichlet concentration of {self.alpha:.2g} per class.")


def _beyond(z: FloatArray) -> FloatArray:
    """Return the mean of a standard normal number that is above ``z``."""
    from scipy.special import log_ndtr

    mean: FloatArray = np.exp(-0.5 * z**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-z))
    return mean


def _beta_of(hits: FloatArray | IntArray, tries: FloatArray | IntArray) -> tuple[float, float]:
    """Return a Beta distribution of rates by moments, given hits of tries (n,) each; Jeffreys' half a hit is added."""
    total = float(tries.sum())
    mean = (float(hits.sum()) + 0.5) / (total + 1.0)
    some = tries > 0
    strength = _MAX_STRENGTH
    if some.sum() > 2:
        rates, counts = hits[some] / tries[some], tries[some].astype(np.float64)
        # Rates of clients with the same probability would differ by chance; the rest is between clients.
        chance = float((mean * (1 - mean) / counts).mean())
        excess = float(((rates - mean) ** 2).mean()) - chance
        if excess > 0:
            strength = float(np.clip(mean * (1 - mean) / excess - 1, _MIN_STRENGTH, _MAX_STRENGTH))
    return mean * strength, (1 - mean) * strength


def _posterior(
    prior: tuple[float, float],
    hits: FloatArray | IntArray,
    tries: FloatArray | IntArray,
    rng: np.random.Generator | None,
) -> FloatArray:
    a, b = prior[0] + hits, prior[1] + (tries - hits)
    rates: FloatArray = a / (a + b) if rng is None else rng.beta(a, np.maximum(b, 1e-9))
    return rates

"""Journals of loops of one's own, on a clock that the test moves."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, RoundReport, RoundRequest, Session, Signal, Status


@dataclass
class Loop:
    """A federation that is played by hand; every number of it is given."""

    path: object
    clock: list
    clients: int = 12
    cohort: int = 4
    rounds: int = 20
    labels: bool = True
    timed: bool = True
    seconds: object = lambda client, round, rng: 10.0
    fails: object = lambda client, round, rng: False
    online: object = None  # (time, rng) -> mask
    pause: float = 1.0
    score: object = lambda round: 1 - 0.9 * 0.9**round
    loss: object = None
    selector: object = "uniform"
    seed: int = 0
    signals: tuple = (Signal.DURATION, Signal.LOSS)

    def play(self):
        rng = np.random.default_rng(self.seed)
        counts = rng.integers(1, 40, (self.clients, 10)) if self.labels else None
        table = ClientTable(labels=LabelCounts(counts)) if self.labels else ClientTable(n=self.clients)
        supplied = self.signals if self.timed else ()
        with Session(
            self.selector, table, seed=self.seed, journal=self.path, signals=supplied, commit="manual"
        ) as session:
            for number in range(self.rounds):
                there = np.ones(self.clients, bool) if self.online is None else self.online(self.clock[0], rng)
                while not there.any():
                    self.clock[0] += self.pause
                    there = self.online(self.clock[0], rng)
                available = np.flatnonzero(there)
                cohort = session.ask(RoundRequest(min(self.cohort, len(available)), available))
                took = np.array(
                    [10.0 if self.seconds is None else self.seconds(c, number, rng) for c in cohort.clients]
                )
                failed = np.array([self.fails(c, number, rng) for c in cohort.clients])
                status = np.where(failed, Status.FAILED, Status.OK)
                finite = took[np.isfinite(took) & (took > 0) & (took < 1e6)]
                self.clock[0] += finite.max(initial=0.0)
                metrics = {Signal.DURATION: took} if self.timed else {}
                if self.loss is not None:
                    metrics[Signal.LOSS] = np.full(len(took), self.loss(number))
                session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
                if self.score is not None:
                    session.record(number, {"accuracy": self.score(number)})
                self.clock[0] += self.pause
            session.commit()
        return self.path


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """Return a function that plays a loop and returns its journal."""
    clock = [1.7e9 - 1.7e9 % 86400]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    return lambda name="run.sqlite", **facts: Loop(tmp_path / name, clock, **facts).play()

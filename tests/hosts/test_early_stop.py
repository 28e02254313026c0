"""A live run ends when a metric no longer improves, and after the same model whatever interrupts it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.hosts import EarlyStop, Policy, play
from fedcohort.hosts.early_stop import Watch
from fedcohort.session import Session

from .scripted import TimedHost

CLIENTS = ["anna", "ben", "cem"]


class Measured(TimedHost):
    """After round r, the metric is the r-th number; NaN means that the model was not evaluated."""

    def __init__(self, session: Session, numbers: list[float]) -> None:
        super().__init__(CLIENTS)
        self.session, self.numbers = session, numbers

    def on_closed(self, round_: Any, aggregation: Any) -> None:
        number = self.numbers[min(round_.cohort.round, len(self.numbers) - 1)]
        if not math.isnan(number):
            self.session.record(round_.cohort.round, {"loss": number})


def rounds(numbers: list[float], rule: EarlyStop | None, *, journal: Path | None = None, at_most: int = 30) -> int:
    """Play, in one process or in one for each round, and return after how many rounds the run ended."""
    if journal is None:
        with Session("uniform", ClientTable(names=CLIENTS), seed=1) as session:
            play(Measured(session, numbers), session, Policy(size=2, early_stop=rule), at_most)
            return session.round
    for number in range(1, at_most + 1):
        table = None if journal.exists() else ClientTable(names=CLIENTS)
        opened = Session.open(journal) if table is None else Session("uniform", table, seed=1, journal=journal)
        with opened as session:
            if play(Measured(session, numbers), session, Policy(size=2, early_stop=rule), number) is not None:
                return session.round
    return at_most


@pytest.mark.parametrize(
    ("numbers", "rule", "ended"),
    [
        ([1.0, 0.9, 0.8, 0.85, 0.82, 0.81], EarlyStop("loss", 3, minimise=True), 6),
        ([1.0, 0.9, 0.899, 0.898, 0.897], EarlyStop("loss", 3, 0.01, minimise=True), 5),
        ([0.1, 0.2, 0.3, 0.25], EarlyStop("loss", 1), 4),
        ([1.0, math.nan, math.nan, 1.0], EarlyStop("loss", 2), 4),  # looked at where it was evaluated
        ([math.inf, 1.0, 1.0], EarlyStop("loss", 2), 4),
        ([1.0], EarlyStop("accuracy", 2), 30),  # never recorded
        ([1.0], None, 30),
        (list(np.arange(40.0)), EarlyStop("loss", 1), 30),
    ],
)
def test_a_run_ends_after_the_model_that_the_rule_names(
    numbers: list[float], rule: EarlyStop | None, ended: int, tmp_path: Path
) -> None:
    assert rounds(numbers, rule) == ended
    assert rounds(numbers, rule, journal=tmp_path / "j.sqlite") == ended


def test_a_metric_that_is_not_recorded_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rounds([1.0], EarlyStop("acuracy", 2))
    assert [record for record in caplog.messages if "acuracy" in record and "loss" in record] == caplog.messages[:1]


def test_a_finished_run_says_why() -> None:
    with Session("uniform", ClientTable(names=CLIENTS), seed=1) as session:
        why = play(Measured(session, [0.5]), session, Policy(early_stop=EarlyStop("loss", 4)), 30)
        assert why == "loss has not improved in 4 models; its best was 0.5, after model 0"
        assert Watch(session, EarlyStop("loss", 4)).reason() == why and session.round == 5


def test_what_makes_no_sense_is_refused() -> None:
    for bad in ({"metric": ""}, {"models": 0}, {"min_improvement": -1.0}, {"minimise": 1}):
        with pytest.raises(ParameterError):
            EarlyStop(**{"metric": "loss", "models": 3, **bad})

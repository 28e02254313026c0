"""A simulated round and a live one with the same arrivals tell their sessions the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedcohort.core.protocol import Cohort, Status
from fedcohort.hosts.live import Aggregation, Online, play
from fedcohort.hosts.round import Policy, Round
from fedcohort.journal.events import LATE_COUNTED
from fedcohort.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare

from .scripted import TimedHost, in_time, reports_of

TABLE: Mapping[str, Any] = {
    "seeds": [4],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "client-heterogeneity", "clients": 12, "alpha": 1.0},
        "latency": {"name": "shifted-exponential", "straggling": 20},
        "availability": {"name": "uniform-share", "share": 0.75},
        "failure": 0.3,
        "deadline": 0.6,
    },
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 7, "epochs": 1, "lr": 0.1},
    "run": {"rounds": 25, "cohort": 4},
}


@pytest.mark.parametrize("late", ["discard", "count"])
def test_the_simulator_and_a_live_host_report_alike(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 if late == "discard" else 7  # large enough for a model in every round
    prepared = prepare(Experiment.from_dict({**TABLE, "run": {"rounds": 25, "cohort": size, "late": late}}), "cpu")
    group = prepared.group(0, journals=None, device="cpu", workers=1)
    group.start()
    (run,) = group.runs

    def simulate() -> None:
        while not group.done:
            group.step()

    simulated = reports_of(simulate, monkeypatch)

    scenario, federation, seed = run.plan.scenario, run.federation, run.plan.seed
    table = run.table

    class SameArrivals(TimedHost):
        def online(self) -> Online:
            return Online(np.flatnonzero(scenario.available(federation, seed=seed, round=session.round)))

        def combine(self, round_: Round) -> Aggregation:
            found = super().combine(round_)
            assert found.kept.any() or late == "discard"  # otherwise the simulator keeps late models for the next round
            return dataclasses.replace(found, late=round_.late)

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        client = np.array([table.index(name)])
        events = scenario.events(federation, client, seed=seed, round=cohort.round)
        return float(events.durations[0]), Status(int(events.status[0]))

    policy = Policy(size=size, deadline=scenario.deadline, min_replies=0, late=late)
    with Session(run.selector, table, seed=seed) as session:
        live = reports_of(lambda: play(SameArrivals((), script), session, policy, rounds=25), monkeypatch)
        counted = session.journal.events(LATE_COUNTED)
    statuses = {status for report in simulated for status in report[2]}
    assert statuses == {Status.OK, Status.FAILED, Status.LATE}
    assert [report for report in live if report[3] is not None] == [in_time(report) for report in simulated]
    assert counted == run.session.journal.events(LATE_COUNTED)
    assert (len(counted) > 3) == (late == "count")
    group.close()

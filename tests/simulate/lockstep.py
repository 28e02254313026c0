"""A lock-step group of a small experiment, and a selector that does what a test says."""

import dataclasses

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.protocol import Cohort, Selector, per_client
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare

BASE = {
    "seeds": [1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "client-heterogeneity", "clients": 8, "alpha": 1.0},
        "validation": 0.2,
        "server_validation": 5,
    },
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 7, "epochs": 1, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01},
    "run": {"rounds": 3, "cohort": 3},
}


def group(change=None, selector=None, **sections):
    """Build a group of one experiment; ``selector`` replaces the configured one."""
    table = {**BASE, **sections}
    for key, value in (change or {}).items():
        table[key] = {**table.get(key, {}), **value}
    prepared = prepare(Experiment.from_dict(table), "cpu")
    if selector is not None:
        plans = tuple(dataclasses.replace(plan, selector=selector) for plan in prepared.experiment.plans)
        prepared = dataclasses.replace(prepared, experiment=dataclasses.replace(prepared.experiment, plans=plans))
    assert len(prepared.groups) == 1
    made = prepared.group(0, journals=None, device="cpu", workers=1)
    made.start()
    return made, prepared


def rows(made):
    """Return the rounds since the last time, each with its cohort, and a row for each client of these cohorts."""
    rounds, clients = made.drain().to_pylist(), []
    for row in rounds:
        journal = next(run for run in made.runs if run.plan.id == row["run"]).session.journal
        (chosen,) = journal.cohorts(round_=row["round"])
        row["cohort"] = chosen.clients.tolist()
        replies = {reply.client: reply for reply in journal.replies(chosen.ticket)}
        for client, seconds, weight in zip(row["cohort"], row["durations"], row["weights"], strict=True):
            reply = replies[client]
            clients.append(
                {
                    "run": row["run"],
                    "round": row["round"],
                    "client": client,
                    "status": reply.status,
                    "kept": reply.kept,
                    "seconds": seconds,
                    "loss": reply.metrics.get("loss"),
                    "weight": weight,
                }
            )
    return rounds, clients


@dataclasses.dataclass(frozen=True)
class ProbeState:
    seen: FloatArray = per_client()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(Selector[ProbeState]):
    """Picks the first clients; asks and requires what the test says."""

    wants: frozenset = frozenset()
    asks: object = None
    work: tuple | None = None
    weights: tuple | None = None
    stop_at: int | None = None
    name = "probe"

    @property
    def requires(self):
        return self.wants

    def init(self, clients, rng):
        return ProbeState(np.zeros(clients.n))

    def query(self, state, slate, rng):
        return self.asks

    def select(self, state, slate, answer, rng):
        if self.stop_at is not None and slate.round >= self.stop_at:
            return Cohort(np.zeros(0, np.int64), stop="enough"), state
        clients = slate.candidates[: slate.size]
        work = None if self.work is None else np.array(self.work[: len(clients)])
        weights = None if self.weights is None else np.array(self.weights[: len(clients)])
        return Cohort(clients, work=work, weights=weights), state

    def update(self, state, outcome):
        return state

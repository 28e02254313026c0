"""Synthetic experiments in the layout of result directories, made with real sessions and real selectors.

The learning is a toy: the model knows each class to a degree that grows with the class's share in the cohort. It takes
milliseconds a run, yet cohorts, journals, scores and shadows are the genuine article.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.protocol import SELECTORS, Answer, Losses, RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.session import Session
from fedcohort.simulate.metrics import imbalance
from fedcohort.simulate.store.live import LiveFeed
from fedcohort.simulate.store.parts import rounds_schema
from fedcohort.simulate.store.results import FORMAT_VERSION, FederationFacts, RunInfo
from fedcohort.simulate.store.writer import ExperimentWriter

CLASSES = 10
MODEL_BYTES = 210_000


@dataclass(frozen=True)
class Choice:
    """A selector to run: its registered name, a label, its parameters."""

    selector: str
    label: str = ""
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def make_federation(clients: int, seed: int) -> FederationFacts:
    """Two classes per client, sizes within a factor of three, some noisy."""
    rng = np.random.default_rng([seed, 1])
    counts = np.zeros((clients, CLASSES))
    sizes = rng.integers(100, 300, clients)
    for k in range(clients):
        first, second = rng.choice(CLASSES, 2, replace=False)
        share = rng.uniform(0.5, 0.95)
        counts[k, first] = round(sizes[k] * share)
        counts[k, second] = sizes[k] - counts[k, first]
    noise = np.where(rng.random(clients) < 0.2, rng.uniform(0.2, 0.6, clients), 0.0)
    return FederationFacts(counts, counts.copy(), counts.sum(axis=1), noise, None)


class ToyRun:
    """One run, round by round."""

    def __init__(
        self,
        choice: Choice,
        seed: int,
        facts: FederationFacts,
        size: int,
        journal: Path | None,
        shadows: Sequence[str] = (),
        failure: float = 0.03,
    ) -> None:
        self.choice, self.seed, self.facts, self.size, self.failure = choice, seed, facts, size, failure
        self.id = f"{choice.label or choice.selector}-s{seed}".replace(" ", "-").replace("=", "")
        table = ClientTable(sizes=facts.sizes, labels=LabelCounts(facts.label_counts))
        self.session = Session(
            SELECTORS.create(choice.selector, **choice.params),
            table,
            seed=seed,
            journal=journal,
            shadows={name: SELECTORS.create(name) for name in shadows if name != choice.selector},
            commit="manual",
        )
        self.known = np.full(CLASSES, 0.1)  # how well the toy model knows each class
        self.speed = np.random.default_rng([seed, 2]).uniform(0.5, 3.0, len(facts.sizes))
        self.clock = 0.0
        self.round = 0

    def losses(self, clients: np.ndarray) -> np.ndarray:
        share = self.facts.label_counts[clients] / self.facts.sizes[clients, None]
        return -np.log(np.clip(share @ self.known, 1e-3, 1.0)) + self.facts.noise_rate[clients]

    def answer(self, query: Any, rng: np.random.Generator) -> Answer:
        if isinstance(query, Losses):
            base = self.losses(query.clients)
            return Answer(query, {s: base * rng.uniform(0.95, 1.05, len(base)) for s in query.signals})
        everyone = np.arange(len(self.facts.sizes))
        before = self.losses(everyone)
        rows = []
        for cohort in query.cohorts:
            kept, self.known = self.known, self.learned(cohort)
            rows.append(self.losses(everyone) - before + rng.normal(0, 0.005, len(everyone)))
            self.known = kept
        return Answer(query, {Signal.LOSS_CHANGE: np.array(rows)})

    def learned(self, cohort: np.ndarray) -> np.ndarray:
        clean = self.facts.label_counts[cohort] * (1 - self.facts.noise_rate[cohort, None])
        share = clean.sum(axis=0) / max(1.0, self.facts.label_counts[cohort].sum())
        gain = 0.6 * share * (0.97 - self.known)
        return np.clip(self.known + gain - 0.006 * (share < 0.02), 0.05, 0.97)

    def step(self) -> dict[str, Any]:
        """Play one round; return its row of ``rounds``."""
        rng = np.random.default_rng([self.seed, 3, self.round])
        request = RoundRequest(size=self.size)
        query = self.session.query(request)
        answer = None if query is None else self.answer(query, rng)
        asked = 0 if query is None else len(query.clients) if isinstance(query, Losses) else len(self.facts.sizes)
        cohort = self.session.ask(request, answer)
        who = cohort.clients
        seconds = self.speed[who] * rng.exponential(0.6, len(who)) + 0.4
        status = np.where(rng.random(len(who)) < self.failure, int(Status.FAILED), int(Status.OK))
        status[(seconds > 6.0) & (status == Status.OK)] = int(Status.LATE)
        ok = status == Status.OK
        before = self.losses(who)
        self.known = self.learned(who[ok]) if ok.any() else self.known
        after = self.losses(who)
        kept = ok & (self.facts.noise_rate[who] + rng.uniform(0, 0.5, len(who)) < 0.6)
        numbers = {
            signal: value
            for signal, value in {
                Signal.DURATION: seconds,
                Signal.LOSS: before,
                Signal.LOSS_AFTER: after * 0.8,
                Signal.VALIDATION_LOSS: before * 1.05,
                Signal.ROBUST_LOSS: before * 0.9,
                Signal.ROBUST_LOSS_AFTER: after * 0.7,
                Signal.PSEUDO_LOSS: before * 0.8,
                Signal.PSEUDO_LOSS_AFTER: after * 0.6,
                Signal.UPDATE_NORM: before,
                Signal.UPDATE_DISTANCE: before * 0.5,
                Signal.GRADIENT_NORM: before,
                Signal.GRADIENT_DISTANCE: (self.facts.label_counts[who] / self.facts.sizes[who, None]).max(axis=1),
            }.items()
            if signal in self.session.requires or signal is Signal.DURATION
        }
        evaluated = self.round % 2 == 0
        accuracy = float(np.clip(self.known.mean() + rng.normal(0, 0.004), 0, 1))
        self.session.tell(RoundReport(cohort.ticket, who, status, numbers, kept))
        self.session.record(self.round, {"accuracy": accuracy, "loss": float(self.losses(who).mean())})
        query_seconds = 0.0 if query is None else 0.3
        self.clock += float(seconds.max(initial=0.0)) + query_seconds
        row = {
            "run": self.id,
            "round": self.round,
            "accuracy": accuracy if evaluated else None,
            "metric": None,
            "loss": float(-np.log(accuracy + 1e-3)) if evaluated else None,
            "qcid": imbalance(self.facts.true_counts[who].sum(axis=0)),
            "seconds": float(seconds.max(initial=0.0)) + query_seconds,
            "clock": self.clock,
            "bytes_down": MODEL_BYTES * len(who),
            "bytes_up": MODEL_BYTES * int(ok.sum()),
            "query_bytes_down": MODEL_BYTES * asked,
            "query_bytes_up": 8 * asked,
            "client_seconds": float(seconds.sum()),
            "query_client_seconds": 0.1 * asked,
            "query_seconds": query_seconds,
            "asked": asked,
            "groups": [],
            **dict.fromkeys(("worst_group", "worst_tenth", "client_spread", "jain", "longest_absence")),
            **dict.fromkeys(("macro_f1", "worst_recall")),
            "available": len(self.facts.sizes),
            "selection_seconds": 0.002,
            "durations": seconds,
            "weights": np.full(len(who), 1.0 / len(who)),
            "answers": [],
        }
        self.round += 1
        return row

    def info(self, state: str = "finished") -> RunInfo:
        return RunInfo(
            id=self.id,
            selector=self.choice.selector,
            label=self.choice.label or self.choice.selector,
            seed=self.seed,
            params=dict(self.choice.params),
            federation=f"s{self.seed}",
            state=state,
            rounds_done=self.round,
        )


DEFAULT = (Choice("uniform"), Choice("fedcm-ts"), Choice("power-of-choice"))


@dataclass
class Experiment:
    """An experiment that can be continued like a running simulation."""

    path: Path
    writer: ExperimentWriter
    runs: list[ToyRun]
    rounds: int
    settings: Mapping[str, Mapping[str, Any]]

    def play(self, rounds: int) -> None:
        """Play so many rounds of every run and write them as one part."""
        rows = [run.step() for _ in range(rounds) for run in self.runs]
        for run in self.runs:
            run.session.commit()
        self.writer.append(pa.Table.from_pylist(rows, rounds_schema()))
        self.note("running")

    def feed(self) -> LiveFeed:
        """Return what shows rounds that no part has yet."""
        return LiveFeed(self.path, {run.id: run.session.journal for run in self.runs})

    def note(self, state: str, message: str = "", run_state: str | None = None) -> None:
        import os
        import time

        done = sum(run.round for run in self.runs)
        total = self.rounds * len(self.runs)
        self.writer.status(
            state=state,
            pid=os.getpid(),
            started=time.time() - 60,
            updated=time.time(),
            rounds_done=done,
            rounds_total=total,
            rounds_per_second=12.5,
            seconds_left=(total - done) / 12.5,
            message=message,
        )
        states = run_state or ("finished" if state == "finished" else "running")
        self.writer.runs(
            [dataclasses.replace(run.info(states), setting=dict(self.settings.get(run.id, {}))) for run in self.runs]
        )

    def finish(self) -> Path:
        self.writer.compact()
        self.note("finished")
        for run in self.runs:
            run.session.close()
        return self.path


def start_experiment(
    path: Path,
    choices: Sequence[Choice] = DEFAULT,
    *,
    seeds: int = 3,
    rounds: int = 40,
    clients: int = 30,
    size: int = 6,
    settings: Sequence[Mapping[str, Any]] = ({},),
    shadows: Sequence[str] = (),
    journal: bool = True,
    extra_config: str = "",
) -> Experiment:
    """Begin an experiment: every choice x seed x setting is a run; no round is played yet."""
    writer = ExperimentWriter.create(path)
    writer.runs([])
    writer.begin(
        f'name = "{path.name}"\nrounds = {rounds}\n{extra_config}',
        {"fedcohort": "0.1.0", "torch": "none", "python": "3.11", "device": "cpu", "created": "2026-01-01T12:00:00",
         "command": "fedcohort compare", "dataset": {"name": "toy", "classes": CLASSES}},
    )  # fmt: skip
    federations = {seed: make_federation(clients, seed) for seed in range(1, seeds + 1)}
    for seed, facts in federations.items():
        writer.federation(f"s{seed}", facts)
    runs, names = [], {}
    for number, setting in enumerate(settings):
        for choice in choices:
            for seed, facts in federations.items():
                run_id = f"{(choice.label or choice.selector).replace(' ', '-')}-s{seed}" + (
                    f"-{number}" if number else ""
                )
                file = path / "journal" / f"{run_id}.sqlite" if journal else None
                run = ToyRun(choice, seed, facts, size + 3 * number, file, shadows)
                run.id = run_id
                names[run_id] = setting
                runs.append(run)
    experiment = Experiment(path, writer, runs, rounds, names)
    experiment.note("running")
    return experiment


def make_experiment(path: Path, choices: Sequence[Choice] = DEFAULT, **options: Any) -> Path:
    """Make a finished experiment; options as in :func:`start_experiment`."""
    experiment = start_experiment(path, choices, **options)
    experiment.play(experiment.rounds)
    return experiment.finish()


def every_round(experiment: Experiment) -> Iterator[int]:
    """Play the rest of an experiment one round at a time."""
    while experiment.runs[0].round < experiment.rounds:
        experiment.play(1)
        yield experiment.runs[0].round


__all__ = ["FORMAT_VERSION", "Choice", "Experiment", "ToyRun", "every_round", "make_experiment", "start_experiment"]

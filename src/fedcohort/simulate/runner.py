"""From a configuration to results: prepare the data, form lock-step groups, drive them, keep checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcohort
from fedcohort.errors import FedcohortError
from fedcohort.journal import read_journal
from fedcohort.scenario import Federation
from fedcohort.simulate import checkpoint as checkpoints
from fedcohort.simulate.cluster import HandOver, drive, write_journals
from fedcohort.simulate.config import DataOptions, Experiment, RunPlan, values_of
from fedcohort.simulate.data import Dataset
from fedcohort.simulate.engine import choose_device
from fedcohort.simulate.engine.store import sample_shape
from fedcohort.simulate.group import Group
from fedcohort.simulate.listener import Listener
from fedcohort.simulate.live import LiveFeed
from fedcohort.simulate.models import build_model
from fedcohort.simulate.results import ExperimentWriter, FederationFacts, RunInfo, load, locked
from fedcohort.simulate.run import check_plan
from fedcohort.simulate.tables import override, read_table, to_toml

_STATUS_SECONDS = 1.0
_CHECKPOINT_SHARE = 0.05  # of the time, unless every round is asked for; large models are written less often


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment with its data: everything that was checked before the first round.

    Attributes
    ----------
    datasets : dict of str to Dataset
    federations : dict of str to Federation
    data_keys, federation_keys : tuple of str
        For each plan.
    groups : tuple of tuple of int
        Lock-step groups as places of plans.
    """

    experiment: Experiment
    datasets: dict[str, Dataset]
    federations: dict[str, Federation]
    data_keys: tuple[str, ...]
    federation_keys: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    def group(self, number: int, *, journals: Path | None, device: str, workers: int | None) -> Group:
        """Build a lock-step group, engine and all."""
        places = self.groups[number]
        keys = [self.federation_keys[i] for i in places]
        return Group(
            [self.experiment.plans[i] for i in places],
            keys,
            self.datasets[self.data_keys[places[0]]],
            {key: self.federations[key] for key in keys},
            journals=journals,
            device=device,
            workers=workers,
        )


def _identity(thing: Any) -> str:
    return json.dumps(thing, sort_keys=True, default=str)


def _data_key(data: DataOptions) -> str:
    return _identity({**values_of(data), **values_of(data.source)})


def _group_key(plan: RunPlan) -> str:
    """Runs of one key can share a batch: same data, model, local training and rule added to it."""
    aggregator = plan.aggregator
    parts = [_data_key(plan.data), plan.model.name, values_of(plan.local), aggregator.prox, aggregator.corrects]
    return _identity(parts)


def prepare(experiment: Experiment, device: str | None = None) -> Prepared:
    """Load data, divide it, form groups, and check that every run can be made."""
    if experiment.options.engine == "local":  # with Ray it is the workers' devices that count
        choose_device(device or experiment.options.device)
    datasets: dict[str, Dataset] = {}
    federations: dict[str, Federation] = {}
    names: dict[str, str] = {}
    data_keys, federation_keys = [], []
    built: set[tuple[str, str]] = set()
    for plan in experiment.plans:
        data_key = _data_key(plan.data)
        if data_key not in datasets:
            datasets[data_key] = plan.data.source.load(plan.data.folder, plan.data.download)
        dataset = datasets[data_key]
        if (data_key, plan.model.name) not in built:
            _check_model(plan.model.name, dataset)
            built.add((data_key, plan.model.name))
        # Latency, availability and failures do not change who owns what.
        scenario = plan.scenario.to_dict()
        owns = {key: scenario.get(key) for key in ("partition", "noise", "validation", "server_validation")}
        identity = _identity([data_key, owns, plan.seed])
        if identity not in names:
            names[identity] = f"{len(names)}-s{plan.seed}"
            federations[names[identity]] = plan.scenario.build(
                dataset.y_train, dataset.classes, plan.seed, dataset.writers, dataset.writer_names
            )
        check_plan(plan, federations[names[identity]])
        data_keys.append(data_key)
        federation_keys.append(names[identity])
    by_key: dict[str, list[int]] = {}
    for i, plan in enumerate(experiment.plans):
        by_key.setdefault(_group_key(plan), []).append(i)
    groups: list[tuple[int, ...]] = []
    for places in by_key.values():
        turns = -(-len(places) // experiment.options.lockstep)
        groups += [tuple(part.tolist()) for part in np.array_split(np.array(places), turns)]
    return Prepared(experiment, datasets, federations, tuple(data_keys), tuple(federation_keys), tuple(groups))


def _check_model(name: str, dataset: Dataset) -> None:
    build_model(name, sample_shape(dataset.x_train), dataset.classes)


class Simulation:
    """Runs an experiment and writes its results.

    Parameters
    ----------
    experiment : Experiment
    out : Path
        A new or empty directory, or one to continue with ``resume``.
    resume : bool
    listeners : sequence of Listener
    device : str, optional
        Instead of the configuration's.
    address : str, optional
        Of the Ray cluster, with ``run.engine = "ray"``; None starts a local one.
    command : str
        The command line, for the record.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        *,
        resume: bool = False,
        listeners: Sequence[Listener] = (),
        device: str | None = None,
        address: str | None = None,
        command: str = "",
    ) -> None:
        self.experiment = experiment
        self.out = out
        self._feed = LiveFeed(out)
        self.listeners = [self._feed, *listeners]
        self.device = device or experiment.options.device
        self.address = address
        self._resume = resume
        self._command = command
        self._stop = False
        self._started = time.time()
        self._done_before = 0
        self._status_due = 0.0
        self._infos: dict[str, RunInfo] = {}
        self.prepared = prepare(experiment, self.device)
        self.writer = self._writer()

    @classmethod
    def open(
        cls,
        out: Path,
        *,
        listeners: Sequence[Listener] = (),
        device: str | None = None,
        engine: str | None = None,
        address: str | None = None,
    ) -> Simulation:
        """Continue an experiment from its directory, perhaps on another device or engine."""
        load(out)  # says clearly what is wrong with the directory
        changes = [] if engine is None else [f"run.engine={engine}"]
        experiment = Experiment.from_dict(override(read_table(out / "config.toml"), changes))
        return cls(experiment, out, resume=True, listeners=listeners, device=device, address=address)

    @property
    def total(self) -> int:
        """Rounds of all runs together."""
        return sum(plan.options.rounds for plan in self.experiment.plans)

    def stop(self) -> None:
        """Ask to stop after the round that is going on; may be called from a signal handler."""
        self._stop = True

    # -- the directory -----------------------------------------------------------------------------------------

    def _writer(self) -> ExperimentWriter:
        if self._resume:
            self._infos = {info.id: info for info in load(self.out).runs}
            for number, places in enumerate(self.prepared.groups):
                if not self.ended(number):
                    for plan in (self.experiment.plans[i] for i in places):
                        self._infos[plan.id] = replace(self._infos[plan.id], state="running", reason="")
            return ExperimentWriter(self.out)
        writer = ExperimentWriter.create(self.out, to_toml(self.experiment.table), self._meta())
        for key, federation in self.prepared.federations.items():
            writer.federation(
                key,
                FederationFacts(
                    label_counts=federation.label_counts(part="train").astype(np.float64),
                    true_counts=federation.label_counts(part="train", true=True).astype(np.float64),
                    sizes=federation.train_sizes.astype(np.float64),
                    noise_rate=federation.noise_rate,
                    names=federation.client_names,
                ),
            )
        for plan, key in zip(self.experiment.plans, self.prepared.federation_keys, strict=True):
            self._infos[plan.id] = RunInfo(
                id=plan.id,
                selector=plan.selector.name,
                label=plan.label,
                seed=plan.seed,
                setting={**({"name": plan.setting_name} if plan.setting_name else {}), **plan.setting},
                params=values_of(plan.selector),
                federation=key,
            )
        writer.runs(list(self._infos.values()))
        return writer

    def _meta(self) -> dict[str, Any]:
        datasets = [
            {
                "name": dataset.name,
                "source": dataset.source,
                "train": len(dataset.y_train),
                "test": len(dataset.y_test),
                "classes": dataset.classes,
                "shape": list(dataset.shape),
            }
            for dataset in self.prepared.datasets.values()
        ]
        return {
            "fedcohort": fedcohort.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "device": self.device if self.experiment.options.engine == "ray" else str(choose_device(self.device)),
            "machine": platform.platform(),
            "command": self._command,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "datasets": datasets,
            "baseline": self.experiment.baseline,
        }

    def _report(self, state: str, message: str = "", force: bool = True) -> None:
        """Replace status.json and runs.json, at most once a second unless forced."""
        now = time.monotonic()
        if not force and now < self._status_due:
            return
        self._status_due = now + _STATUS_SECONDS
        done = sum(info.rounds_done for info in self._infos.values())
        left = sum(
            plan.options.rounds - self._infos[plan.id].rounds_done
            for plan in self.experiment.plans
            if self._infos[plan.id].state == "running"
        )
        spent = max(time.time() - self._started, 1e-9)
        pace = (done - self._done_before) / spent
        self.writer.runs(list(self._infos.values()))
        self.writer.status(
            state=state,
            pid=os.getpid(),
            host=platform.node(),
            started=self._started,
            updated=time.time(),
            rounds_done=done,
            rounds_total=self.total,
            rounds_per_second=round(pace, 3),
            seconds_left=round(left / pace, 1) if pace > 0 and state == "running" else None,
            message=message,
        )

    # -- driving -----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Make all rounds; return "finished", or "interrupted" after :meth:`stop`."""
        with locked(self.out):
            return self._run()

    def _run(self) -> str:
        self._done_before = sum(info.rounds_done for info in self._infos.values())
        for listener in self.listeners:
            listener.on_start(list(self._infos.values()), self._done_before, self.total)
        state = "failed"
        try:
            self._report("running")
            state = self._drive()
            if state == "finished":
                self.writer.compact()
            self._report(state)
        except KeyboardInterrupt:
            state = "interrupted"
            self._report_quietly("interrupted")
            raise
        except BaseException as error:
            self._report_quietly("failed", str(error))
            raise
        finally:
            for listener in self.listeners:
                listener.on_end(state)
        return state

    def _report_quietly(self, state: str, message: str = "") -> None:
        """Say how it ended where that is still possible: the disk may be the very thing that failed."""
        with contextlib.suppress(FedcohortError, OSError):
            self._report(state, message)

    def _drive(self) -> str:
        if self.experiment.options.engine == "ray":
            return drive(self)
        for number in range(len(self.prepared.groups)):
            if self.ended(number):
                continue
            if self._one_group(number) == "interrupted":
                return "interrupted"
        return "finished"

    def ended(self, number: int) -> bool:
        """Whether all runs of a group have ended and are on disk; runs.json may be ahead of the last checkpoint."""
        return checkpoints.ended(self.out / "checkpoint", number)

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop

    def _one_group(self, number: int) -> str:
        options = self.experiment.options
        group = self.prepared.group(number, journals=self.out / "journal", device=self.device, workers=options.workers)
        try:
            self.begin(number, group)
            self._feed.follow({run.plan.id: run.session.journal for run in group.runs})
            due = time.monotonic() + options.checkpoint_seconds
            while not group.done and not self._stop:
                group.step(self.on_round)
                self._report("running", force=False)
                if time.monotonic() >= due:
                    took = self._checkpoint(number, group)
                    pause = options.checkpoint_seconds
                    due = time.monotonic() + (max(pause, took / _CHECKPOINT_SHARE) if pause else 0.0)
            self._checkpoint(number, group)
            return "finished" if group.done else "interrupted"
        finally:
            group.close()

    def begin(self, number: int, group: Group) -> None:
        """Start a group, or continue it from its checkpoints."""
        saved = self.saved(number)
        if saved:
            group.resume([checkpoints.Checkpoint.from_bytes(data) for data in saved])
            self.writer.forget({info.id: info.rounds_done for info in group.infos()})
        else:
            group.start()
        for info in group.infos():
            self._infos[info.id] = info
        self._done_before = sum(info.rounds_done for info in self._infos.values())
        self._started = time.time()

    def saved(self, number: int) -> list[bytes]:
        """Return the group's checkpoints, oldest first; without any, remove what an attempt left before its first."""
        found = checkpoints.found(self.out / "checkpoint", number)
        if not found and self._resume:
            for path in self.journal_files(number):
                for file in path.parent.glob(f"{path.name}*"):
                    file.unlink()
            self.writer.forget({self.experiment.plans[i].id: 0 for i in self.prepared.groups[number]})
        return [path.read_bytes() for path in found.values()]

    def journal_files(self, number: int) -> list[Path]:
        """Return the journals of a group's runs, as far as they exist."""
        names = [f"{self.experiment.plans[i].id}.sqlite" for i in self.prepared.groups[number]]
        return [path for name in names if (path := self.out / "journal" / name).exists()]

    def journal_rounds(self, number: int) -> dict[str, int]:
        """Return the round each run of a group continues with, by its journal."""
        rounds = {}
        for path in self.journal_files(number):
            with contextlib.closing(read_journal(path)) as journal:
                rounds[path.stem] = journal.last()[0] + 1
        return rounds

    def take_over(self, number: int, result: HandOver) -> None:
        """Write what another process made of a group: rows and checkpoint first, then the journals."""
        self.writer.append(result.rounds, result.clients)
        folder = self.out / "checkpoint"
        checkpoints.save(folder, number, result.checkpoint, result.round)
        write_journals(self.out / "journal", result.journals)
        checkpoints.prune(folder, number, result.round)
        for info in result.infos:
            self._infos[info.id] = info
        if self.listeners:
            for row in result.rounds.to_pylist():
                for listener in self.listeners:
                    listener.on_round(self._infos[row["run"]], row)
        self._report("running")

    def _checkpoint(self, number: int, group: Group) -> float:
        """Write rows and a checkpoint, commit the journals; return the seconds it took."""
        began = time.monotonic()
        point = group.checkpoint()
        self.writer.append(*group.drain())
        checkpoints.save(self.out / "checkpoint", number, point.to_bytes(), point.round)
        group.commit()
        self._feed.durable()
        checkpoints.prune(self.out / "checkpoint", number, point.round)
        self._report("running")
        return time.monotonic() - began

    def on_round(self, info: RunInfo, row: Mapping[str, Any]) -> None:
        """Take note of a run's round and pass it on."""
        self._infos[info.id] = info
        for listener in self.listeners:
            listener.on_round(info, row)


def default_out(name: str, root: Path | None = None) -> Path:
    """Return ``runs/<name>-<timestamp>``, made unique."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name) or "experiment"
    base = (root or Path("runs")) / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


def run_experiment(
    table: Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    device: str | None = None,
    listeners: Sequence[Listener] = (),
) -> str:
    """Run a configuration given as plain values or as a file; see :mod:`fedcohort.simulate.config` for its keys.

    Returns
    -------
    str
        "finished" or "interrupted". Read the results with :func:`fedcohort.simulate.results.load`.
    """
    experiment = Experiment.from_dict(table if isinstance(table, Mapping) else read_table(table))
    simulation = Simulation(experiment, Path(out), device=device, listeners=listeners, command=" ".join(sys.argv))
    return simulation.run()

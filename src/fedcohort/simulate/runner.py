"""Run the lock-step groups of an experiment, and write results and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from fedcohort.core.errors import FedcohortError, InputError, SignalError
from fedcohort.core.validate import instance
from fedcohort.core.validate import path as check_path
from fedcohort.core.version import __version__
from fedcohort.journal.live import live_files, remove_live
from fedcohort.journal.lock import remove
from fedcohort.journal.opening import snapshot
from fedcohort.simulate.config.experiment import MEMORY_FILE, Experiment
from fedcohort.simulate.config.toml import read_table, to_toml, with_keys
from fedcohort.simulate.data import InMemory, to_npz
from fedcohort.simulate.engine import choose_device
from fedcohort.simulate.extend import larger_experiment
from fedcohort.simulate.memory_check import memory_errors
from fedcohort.simulate.processes.cluster import drive, write_journals
from fedcohort.simulate.processes.handover import HandOver
from fedcohort.simulate.processes.local import LocalDriver
from fedcohort.simulate.rounds.group import Group, other_engine_error
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.rounds.prepare import group_key, prepare
from fedcohort.simulate.rounds.run import run_info
from fedcohort.simulate.rounds.trial import try_selectors
from fedcohort.simulate.store import checkpoint as checkpoints
from fedcohort.simulate.store.facts import FederationFacts
from fedcohort.simulate.store.live import LiveFeed
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.results import RunInfo, parse_engines, read_meta, read_runs
from fedcohort.simulate.store.writer import ExperimentWriter, check_continuable, lock_folder, write_atomically

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0  # between two reports
_STATUS_REST = 20.0  # or so many times as long as writing one takes: many runs with long settings, on a busy machine


class Machine(TypedDict, total=False):
    """Where and how an experiment runs, which does not change what it computes.

    Attributes
    ----------
    device : str, optional
        Default: what the configuration says.
    processes : int, optional
        Default: what the configuration says.
    address : str, optional
        Address of the Ray cluster for ``run.engine = "ray"``; None starts a local one.
    command : str
        The command line, to be recorded.
    allow_other_engine : bool
        Continue with another kind of engine than before, such as another device, or the plain loop if there is no C
        compiler any more. It rounds numbers differently. :attr:`RunInfo.engines` says which engine ran which rounds.
    """

    device: str | None
    processes: int | None
    address: str | None
    command: str
    allow_other_engine: bool


class Simulation:
    """Runs an experiment and writes its results.

    Parameters
    ----------
    out : Path
        A new or empty directory, or one to continue with ``resume``.
    resume : bool
        Continue the directory. It may have fewer runs and rounds than ``experiment``; see
        :mod:`fedcohort.simulate.extend`.
    **options
        See :class:`Machine`.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        *,
        resume: bool = False,
        listeners: Sequence[Listener] = (),
        **options: Unpack[Machine],
    ) -> None:
        processes = options.get("processes")
        self.experiment = instance(experiment, Experiment, "'experiment'")
        self.out = out = check_path(out, "'out'")
        self.listeners = list(listeners)
        self.device = options.get("device") or experiment.options.device
        self.address = options.get("address")
        self.resumed = resume
        self._extension: str | None = None  # replaces the configuration in the directory
        self._command = options.get("command", "")
        self._stop = False
        self._asked = (processes or experiment.options.processes) is not None
        self._started = time.time()
        self._done_before = 0
        self._status_due = 0.0
        self._infos: dict[str, RunInfo] = {}
        # runs.json is a summary for readers. What counts are the configuration and the checkpoints.
        before: dict[str, RunInfo] = {}
        if resume:
            try:
                before = {info.id: info for info in read_runs(out)}
            except ResultsError as error:
                log.warning("%s It will be rebuilt from the configuration and the checkpoints.", error.message)
        started_groups = checkpoints.all_newest(out / "checkpoint") if resume else {}
        saved = {name: facts for group in started_groups.values() for name, facts in group["runs"].items()}
        with memory_errors():
            self.prepared = prepare(
                experiment,
                self.device,
                processes=processes,
                known_federations={name: facts["federation"] for name, facts in saved.items()}
                | {name: info.federation for name, info in before.items()},
                started_groups={number: list(group["runs"]) for number, group in started_groups.items()},
            )
        try_selectors(self.prepared, before)
        if options.get("allow_other_engine"):
            self.prepared = replace(self.prepared, allow_other_engine=True)
        elif experiment.options.engine == "local":  # on Ray, the workers' machines decide
            self._check_engines(saved)
        self.writer = self._writer(before, saved)

    def _check_engines(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse to continue groups, or to add similar ones, with another kind of engine."""
        known: dict[str, dict[str, str]] = {}  # by group key: each engine, with the last run that it trained
        for plan in self.experiment.plans:
            engines = parse_engines(saved.get(plan.id, {}).get("engines"))
            if engines:
                known.setdefault(group_key(plan), {})[engines[-1][1]] = plan.id
        # Groups with the same key train the same way, so their rounds are compared.
        for number, places in self.prepared.groups.items():
            alike = known.get(group_key(self.experiment.plans[places[0]]), {})
            if alike and not self.has_ended(number):
                kind = self.prepared.engine_choice(number, self.device)[0]
                if kind not in alike:
                    before, run = next(iter(alike.items()))
                    raise other_engine_error(run, before, kind)

    @classmethod
    def open(cls, out: Path, *, engine: str | None = None, **options: Unpack[Machine]) -> Simulation:
        """Continue an experiment from its directory. It may move to Ray or back."""
        check_continuable(out, read_meta(out))
        changes = {} if engine is None else {"run.engine": engine}
        return cls(
            Experiment.from_dict(with_keys(read_table(out / "config.toml"), changes)), out, resume=True, **options
        )

    @classmethod
    def extend(
        cls,
        out: Path,
        *,
        seeds: Sequence[int] | int | None = None,
        rounds: int | None = None,
        selectors: Mapping[str, Any] | None = None,
        **options: Unpack[Machine],
    ) -> Simulation:
        """Give an experiment more seeds, rounds or selectors. Nothing changes on disk before :meth:`run`.

        Existing runs are kept, and continue if rounds are added. New runs are the same as in a new experiment with the
        larger configuration.

        Parameters
        ----------
        seeds : sequence of int or int, optional
            Seeds to add, or the new number of seeds.
        rounds : int, optional
            The new number of rounds of each run.
        selectors : mapping of str to table, optional
            Entries of [selectors] to add, by label.
        """
        experiment = larger_experiment(out, seeds=seeds, rounds=rounds, selectors=selectors or {})
        try:
            simulation = cls(experiment, out, resume=True, **options)
        except (InputError, SignalError) as error:
            raise type(error)(
                error.message, hint=f"{out} keeps its federation; run a new experiment for this"
            ) from error
        # Written by run() and not here, so that whoever only builds the larger experiment changes nothing.
        simulation._extension = to_toml(experiment.table)
        return simulation

    @property
    def total(self) -> int:
        """The number of rounds of all runs together."""
        return sum(plan.options.rounds for plan in self.experiment.plans)

    def stop(self) -> None:
        """Stop after the current round; may be called from a signal handler."""
        self._stop = True

    # -- the directory -----------------------------------------------------------------------------------------

    def _writer(self, before: Mapping[str, RunInfo], saved: Mapping[str, Mapping[str, Any]]) -> ExperimentWriter:
        groups = self.prepared.groups.items()
        ended = {place for number, places in groups if self.resumed and self.has_ended(number) for place in places}
        for place, (plan, key) in enumerate(zip(self.experiment.plans, self.prepared.federation_keys, strict=True)):
            facts = saved.get(plan.id, {})
            self._infos[plan.id] = replace(  # as in the checkpoint; runs.json may be ahead of it
                before.get(plan.id) or run_info(plan, key),
                state=facts["state"] if place in ended else "running",
                reason=facts["reason"] if place in ended else "",
                rounds_done=facts.get("round", 0),
                engines=parse_engines(facts.get("engines")),
            )
        if self.resumed:
            return ExperimentWriter(self.out)
        writer = ExperimentWriter.create(self.out)
        # All settings share the dataset in memory, so there is at most one.
        kept = next((p.data.source for p in self.experiment.plans if isinstance(p.data.source, InMemory)), None)
        if kept is not None:  # otherwise nobody could continue it
            write_atomically(self.out / MEMORY_FILE, to_npz(kept.dataset))
        self._write_facts(writer)
        writer.begin(to_toml(self.experiment.table), self._meta())
        return writer

    def _write_facts(self, writer: ExperimentWriter) -> None:
        """Write the federations and runs that the directory does not have yet."""
        classes = None if self.experiment.plans[0].task.has_classes else 0
        for key, federation in self.prepared.federations.items():
            if writer.has_federation(key):
                continue
            writer.federation(
                key,
                FederationFacts(
                    label_counts=federation.label_counts(part="train").astype(np.float64)[:, :classes],
                    true_counts=federation.label_counts(part="train", true=True).astype(np.float64)[:, :classes],
                    sizes=federation.train_sizes.astype(np.float64),
                    noise_rate=federation.noise_rate,
                    names=federation.client_names,
                    groups=None if federation.groups is None else federation.groups.of,
                    group_names=() if federation.groups is None else federation.groups.names,
                ),
            )
        writer.runs(list(self._infos.values()))

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
            "fedcohort": __version__,
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
        """Replace status.json and runs.json, at most once a second unless forced, and more rarely if that takes long.

        Between checkpoints it does not wait for the disk, because both are written again when an experiment continues.
        """
        now = time.monotonic()
        if not force and now < self._status_due:
            return
        # The remaining rounds of a run that ended early are not left to do.
        done = sum(info.rounds_done for info in self._infos.values())
        left = sum(
            plan.options.rounds - self._infos[plan.id].rounds_done
            for plan in self.experiment.plans
            if self._infos[plan.id].state == "running"
        )
        spent = max(time.time() - self._started, 1e-9)
        pace = (done - self._done_before) / spent
        self.writer.runs(list(self._infos.values()), durable=force)
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
            durable=force,
        )
        ended = time.monotonic()
        self._status_due = ended + max(_STATUS_SECONDS, _STATUS_REST * (ended - now))

    # -- driving -----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Run all rounds; return "finished", or "interrupted" after :meth:`stop`."""
        with lock_folder(self.out), memory_errors():
            self._prepare_folder()
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
            except BaseException as error:
                state, message = ("interrupted", "") if isinstance(error, KeyboardInterrupt) else ("failed", str(error))
                with contextlib.suppress(FedcohortError, OSError):  # it may be the disk that failed
                    self._report(state, message)
                raise
            finally:
                for listener in self.listeners:
                    listener.on_end(state)
            return state

    def _prepare_folder(self) -> None:
        """Remove what dead processes left, and write what the directory lacks."""
        self.writer.tidy()
        for path in live_files(self.out):  # left by processes that died
            remove_live(path)
        for number in self.prepared.groups:  # or a group that has ended would keep an old checkpoint forever
            checkpoints.prune(self.out / "checkpoint", number)
        self._write_facts(self.writer)
        if self._extension is not None:
            self.writer.extend(self._extension, self.experiment.baseline, self._command)

    def _drive(self) -> str:
        if self.experiment.options.engine == "ray":
            return drive(self)
        # A driver that cannot start its processes says no, and this process runs the groups itself.
        if self.prepared.processes > 1 and LocalDriver(self, self.prepared.processes, self._asked).drive():
            ended = all(self.has_ended(number) for number in self.prepared.groups)
            return "finished" if ended else "interrupted"
        for number in self.prepared.groups:
            if self.has_ended(number):
                continue
            if self._one_group(number) == "interrupted":
                return "interrupted"
        return "finished"

    def has_ended(self, number: int) -> bool:
        """Whether all runs of a group have ended and are on disk. runs.json may be ahead of the last checkpoint."""
        rounds = {plan.id: plan.options.rounds for plan in self.experiment.plans}
        return checkpoints.has_ended(self.out / "checkpoint", number, rounds)

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop

    def _one_group(self, number: int) -> str:
        options = self.experiment.options
        group = self.prepared.group(number, journals=self.out / "journal", device=self.device, workers=options.workers)
        try:
            self.begin(number, group)
            journals = {run.plan.id: run.session.journal for run in group.runs if run.has_session}
            with LiveFeed(self.out, journals) as feed:

                def on_round(info: RunInfo, row: Mapping[str, Any]) -> None:
                    feed.add(row)
                    self.on_round(info, row)

                due = time.monotonic() + options.checkpoint_seconds
                while not group.done and not self._stop:
                    group.step(on_round)
                    self._report("running", force=False)
                    if time.monotonic() >= due:
                        took = self._checkpoint(number, group)
                        feed.clear()
                        due = time.monotonic() + checkpoints.pause_after(took, options.checkpoint_seconds)
                self._checkpoint(number, group)
            return "finished" if group.done else "interrupted"
        finally:
            # Also after an error: a group holds threads and open journals.
            group.close()

    def begin(self, number: int, group: Group) -> None:
        """Start a group, or continue it from its checkpoint."""
        group.begin(self.last_checkpoint(number))
        for info in group.infos():
            self._infos[info.id] = info
        self._done_before = sum(info.rounds_done for info in self._infos.values())
        self._started = time.time()

    def last_checkpoint(self, number: int) -> bytes | None:
        """Return the group's last checkpoint and drop the rows after it. Without one, remove all files of its runs."""
        # Rows may be ahead of the checkpoint if there was a crash after they were written.
        path = checkpoints.newest(self.out / "checkpoint", number)
        if path is not None:
            runs = checkpoints.read_facts(path)["runs"]
            self.writer.forget({name: facts["round"] for name, facts in runs.items()})
            return path.read_bytes()  # the group decodes it, once, wherever it runs
        names = [self.experiment.plans[i].id for i in self.prepared.groups[number]]
        journals = [self.out / "journal" / f"{name}.sqlite" for name in names]
        if self.resumed or any(path.exists() for path in journals):  # or a process has died
            for path in journals:
                remove(path)
            self.writer.forget(dict.fromkeys(names, 0))
        return None

    def journals(self, number: int) -> dict[str, bytes]:
        """Return complete copies of the journals of a group's runs, by file name."""
        names = [f"{self.experiment.plans[i].id}.sqlite" for i in self.prepared.groups[number]]
        return {name: snapshot(path) for name in names if (path := self.out / "journal" / name).exists()}

    def take_over(self, number: int, result: HandOver) -> None:
        """Write another process's results of a group: rows and journals first, then their checkpoint."""
        # As in _checkpoint: what may be dropped when resuming comes first, the checkpoint that makes it count last.
        self.writer.append(result.rounds)
        write_journals(self.out / "journal", result.journals)
        checkpoints.save(self.out / "checkpoint", number, result.checkpoint, result.round)
        for info in result.infos:
            self._infos[info.id] = info
        if self.listeners:
            for row in result.rounds.to_pylist():
                for listener in self.listeners:
                    listener.on_round(self._infos[row["run"]], row)
        self._report("running", force=False)

    def _checkpoint(self, number: int, group: Group) -> float:
        """Write rows, commit the journals, then write their checkpoint; return the seconds it took."""
        began = time.monotonic()
        for info in group.infos():  # including runs that failed
            self._infos[info.id] = info
        # In this order a crash loses nothing: rows and journals may be ahead of the checkpoint, and resuming drops the
        # excess. If the checkpoint were ahead of them, rounds would be lost.
        point = group.checkpoint()
        self.writer.append(group.drain())
        group.commit()
        checkpoints.save(self.out / "checkpoint", number, point.to_bytes(), point.round)
        self._report("running")
        return time.monotonic() - began

    def on_round(self, info: RunInfo, row: Mapping[str, Any]) -> None:
        """Note that a run has finished a round, and tell the listeners."""
        self._infos[info.id] = info
        for listener in self.listeners:
            listener.on_round(info, row)


def default_out(name: str) -> Path:
    """Return ``runs/<name>-<timestamp>``, made unique."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:100] or "experiment"
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path

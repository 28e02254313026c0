"""Send the numbers of a simulation or a live run to TensorBoard, MLflow or Weights & Biases.

A tracker is a listener of the simulator. After every round, it writes accuracy, loss, class imbalance, simulated time
and bytes of each run under the run's name. A live run is read from its journal, so its host knows nothing of
trackers, and one that fails cannot hurt it. Nothing leaves the machine unless you say so: trackers write into a folder
next to the results. Weights & Biases runs in its offline mode, and MLflow uses a server only if MLFLOW_TRACKING_URI
names one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, MissingExtraError, UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.journal import read_journal
from fedcohort.journal.events import ENDED
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo

_COLUMNS = ("accuracy", "metric", "loss", "qcid", "seconds", "clock", "query_seconds", "available", "selection_seconds")
_BYTES = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")


class TrackerError(FedcohortError, RuntimeError):
    """A tracker's own library failed."""


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    """Turn any exception of a tracker's library into one error that names the library."""
    try:
        yield
    except FedcohortError:
        raise
    except Exception as error:
        raise TrackerError(
            f"{name} failed: {error}", hint="leave out --track; the results do not depend on it"
        ) from error


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"Tracking needs the package {package!r}, which is not installed.",
            hint=f"pip install {package}, or pip install 'fedcohort[trackers]' for all of them",
        ) from error


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round to track: those that are known, those of a live run, and the sum of all bytes.

    >>> numbers({"accuracy": 0.5, "loss": None, "bytes_up": 10, "bytes_down": 20, "weights": [0.5, 0.5]})
    {'accuracy': 0.5, 'bytes': 30.0, 'cohort_size': 2.0}
    """
    values = {}
    for name in (*_COLUMNS, *(name for name in row if "/" in name)):  # as in "evaluate/accuracy"
        value = row.get(name)
        if value is not None and math.isfinite(float(value)):
            values[name] = float(value)
    # A live run does not count bytes; a sum of nothing would look like none.
    if any(row.get(name) is not None for name in _BYTES):
        values["bytes"] = float(sum(row.get(name) or 0 for name in _BYTES))
    if row.get("weights") is not None:
        values["cohort_size"] = float(len(row["weights"]))
    return values


class _TensorBoard(Listener):
    """Event files in ``folder``, one sub-folder per run; view them with ``tensorboard --logdir folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        with _library("TensorBoard"):
            self._files = _module("tensorboard.summary.writer.event_file_writer", "tensorboard")
            self._events = _module("tensorboard.compat.proto.event_pb2", "tensorboard")
            self._summaries = _module("tensorboard.compat.proto.summary_pb2", "tensorboard")

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Write one scalar per number."""
        with _library("TensorBoard"):
            if run.id not in self._writers:
                self._writers[run.id] = self._files.EventFileWriter(str(self._folder / run.id))
            summary = self._summaries.Summary(
                value=[
                    self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()
                ]
            )
            event = self._events.Event(wall_time=time.time(), step=int(row["round"]), summary=summary)
            self._writers[run.id].add_event(event)

    def on_end(self, state: str) -> None:
        """Flush and close every file."""
        with _library("TensorBoard"):
            for writer in self._writers.values():
                writer.close()


class _MLflow(Listener):
    """One MLflow run per run, in a store in ``folder`` or at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path) -> None:
        self._runs: dict[str, str] = {}
        with _library("MLflow"):
            # Without this, newer versions need a database for a local store, which mlflow-skinny cannot open.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow = _module("mlflow", "mlflow-skinny")
            self._metric = _module("mlflow.entities", "mlflow-skinny").Metric
            folder.mkdir(parents=True, exist_ok=True)
            uri = os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri()
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            name = folder.absolute().parent.name or "fedcohort"
            existing = self._client.get_experiment_by_name(name)
            self._experiment = existing.experiment_id if existing else self._client.create_experiment(name)

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Open a run for each, with its parameters."""
        with _library("MLflow"):
            for run in runs:
                run_id = self._client.create_run(self._experiment, run_name=run.id).info.run_id
                self._runs[run.id] = run_id
                for key, value in _facts(run).items():
                    self._client.log_param(run_id, key, value)

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Log one metric per number."""
        with _library("MLflow"):
            now, step = int(time.time() * 1000), int(row["round"])
            metrics = [self._metric(name, value, now, step) for name, value in numbers(row).items()]
            self._client.log_batch(self._runs[run.id], metrics=metrics)

    def on_end(self, state: str) -> None:
        """Close every run."""
        with _library("MLflow"):
            for run_id in self._runs.values():
                self._client.set_terminated(run_id, "FINISHED" if state == "finished" else "KILLED")


class _WeightsAndBiases(Listener):
    """One offline W&B run for the experiment in ``folder``; ``wandb sync`` uploads it."""

    def __init__(self, folder: Path) -> None:
        with _library("Weights & Biases"):
            wandb = _module("wandb", "wandb")
            folder.mkdir(parents=True, exist_ok=True)
            name = folder.absolute().parent.name or "fedcohort"
            quiet = wandb.Settings(silent=True)
            self._run = wandb.init(project="fedcohort", name=name, dir=str(folder), mode="offline", settings=quiet)

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Record every run's parameters, and make rounds the x axis."""
        with _library("Weights & Biases"):
            self._run.config.update({run.id: _facts(run) for run in runs})
            for run in runs:
                self._run.define_metric(f"{run.id}/round")
                self._run.define_metric(f"{run.id}/*", step_metric=f"{run.id}/round")

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Log the numbers under the run's name."""
        values = {f"{run.id}/{name}": value for name, value in numbers(row).items()}
        with _library("Weights & Biases"):
            self._run.log({f"{run.id}/round": int(row["round"]), **values})

    def on_end(self, state: str) -> None:
        """Close the run."""
        with _library("Weights & Biases"):
            self._run.finish(exit_code=0 if state == "finished" else 1)


def _facts(run: RunInfo) -> dict[str, str]:
    facts: dict[str, Any] = {"selector": run.selector, "label": run.label, "seed": run.seed}
    facts |= {f"param.{key}": value for key, value in run.params.items()}
    facts |= {f"setting.{key}": value for key, value in run.setting.items()}
    return {key: str(value) for key, value in facts.items()}


_TRACKERS: dict[str, Callable[[Path], Listener]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WeightsAndBiases,
}


def track_journal(path: Path, listeners: Sequence[Listener], pause: Callable[[], bool]) -> None:
    """Send the closed rounds of a live run to trackers, from its journal.

    Parameters
    ----------
    pause : callable
        Called when there is no new round; it waits and returns whether to look again. A run that has ended is not
        waited for.
    """
    run, sent = None, -1
    while True:
        with closing(read_journal(path)) as record:
            metrics = record.metrics(max(sent, 0))
            rows = [row for row in record.cohorts() if row.told_at is not None and row.round > sent]
            ended = [body for body in record.events(ENDED) if body["ticket"] == record.last()[1]]
            if run is None:
                meta = record.meta()
                name = str(meta["selector"].get("name") or meta["selector"]["class"])
                run = RunInfo(path.stem, name, name, int(meta["seed"]), params=dict(meta["selector"]["params"]))
                for listener in listeners:
                    listener.on_start([run], 0, 0)
        # The last round is sent when the next one is closed or the run ends: its evaluation is recorded after it.
        for row in rows if ended else rows[:-1]:
            assert row.told_at is not None
            known = {"round": row.round, "seconds": row.told_at - row.asked_at, "available": row.n_candidates}
            for listener in listeners:
                listener.on_round(run, {**known, "weights": row.clients, **metrics.get(row.round, {})})
            sent = row.round
        if ended or not pause():
            for listener in listeners:
                listener.on_end(ended[-1]["state"] if ended else "stopped")
            return


def tracker(name: str, out: str | Path) -> Listener:
    """Return the tracker ``name``, which writes into a folder of that name in the experiment's directory.

    Parameters
    ----------
    name : "tensorboard", "mlflow" or "wandb"
    out : the experiment's directory
    """
    if name not in _TRACKERS:
        raise UnknownNameError(
            f"There is no tracker {name!r}. Known: {', '.join(_TRACKERS)}.",
            hint=suggest(name, _TRACKERS),
        )
    return _TRACKERS[name](Path(out) / name)

"""Trackers: TensorBoard with its own reader if it is installed, the others with fake libraries."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

import fedcohort as fc
from fedcohort.cli.app import app
from fedcohort.core.errors import MissingExtraError, UnknownNameError
from fedcohort.hosts.live_run import record_end
from fedcohort.report.trackers import TrackerError, numbers, track_journal, tracker
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo

RUNS = [
    RunInfo(id="fedcor-s1", selector="fedcor", label="fedcor", seed=1, params={"dimension": 15}),
    RunInfo(id="uniform-s1", selector="uniform", label="uniform", seed=1, setting={"name": "2SPC"}),
]


def play(listener, state="finished"):
    listener.on_start(RUNS, 0, 8)
    for r in range(4):
        for run in RUNS:
            accuracy = 0.1 * r if r % 2 == 0 else None
            listener.on_round(run, {"round": r, "accuracy": accuracy, "qcid": 0.2, "cohort": [1, 2, 3], "bytes_up": 7})
    listener.on_end(state)


def fake(monkeypatch, name, **parts):
    module = ModuleType(name)
    for key, value in parts.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_only_known_numbers_are_sent():
    assert numbers({"round": 3, "accuracy": None, "loss": float("nan"), "qcid": 0.5}) == {"qcid": 0.5}


def test_unknown_and_missing(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        tracker("tensorbord", tmp_path)
    for name in ("tensorboard", "mlflow", "wandb"):
        for module in list(sys.modules):
            if module.split(".")[0] == name:
                monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=r"fedcohort\[trackers\]"):
            tracker(name, tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(tracker("tensorboard", tmp_path))
    for run in RUNS:
        events = EventAccumulator(str(tmp_path / "tensorboard" / run.id))
        events.Reload()
        assert [(e.step, round(e.value, 6)) for e in events.Scalars("accuracy")] == [(0, 0.0), (2, 0.2)]
        assert [e.value for e in events.Scalars("bytes")] == [7.0] * 4


def test_mlflow_gets_one_run_each(tmp_path, monkeypatch):
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("open", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            calls.append(("experiment", name))
            return "7"

        def create_run(self, experiment, run_name):
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

        def log_param(self, run_id, key, value):
            calls.append(("param", run_id, key, value))

        def log_batch(self, run_id, metrics):
            calls.append(("metrics", run_id, metrics))

        def set_terminated(self, run_id, status):
            calls.append(("end", run_id, status))

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fake(monkeypatch, "mlflow", MlflowClient=Client)
    fake(monkeypatch, "mlflow.entities", Metric=lambda key, value, timestamp, step: (key, value, step))
    play(tracker("mlflow", tmp_path / "exp"), "interrupted")
    assert calls[0] == ("open", (tmp_path / "exp" / "mlflow").as_uri()) and ("experiment", "exp") in calls
    assert ("param", "7/fedcor-s1", "param.dimension", "15") in calls
    assert ("param", "7/uniform-s1", "setting.name", "2SPC") in calls
    sent = [c[2] for c in calls if c[0] == "metrics" and c[1] == "7/fedcor-s1"]
    assert len(sent) == 4 and ("accuracy", 0.2, 2) in sent[2] and not any(m[0] == "accuracy" for m in sent[1])
    assert ("end", "7/fedcor-s1", "KILLED") in calls


def test_wandb_stays_offline(tmp_path, monkeypatch):
    calls = []

    class Run:
        config = SimpleNamespace(update=lambda facts: calls.append(("config", facts)))

        def define_metric(self, name, step_metric=None):
            calls.append(("axis", name, step_metric))

        def log(self, values):
            calls.append(("log", values))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**options):
        calls.append(("init", options))
        return Run()

    fake(monkeypatch, "wandb", init=init, Settings=lambda silent: silent)
    play(tracker("wandb", tmp_path))
    assert calls[0][1]["mode"] == "offline" and calls[0][1]["dir"] == str(tmp_path / "wandb")
    logged = [c[1] for c in calls if c[0] == "log"]
    assert logged[4]["fedcor-s1/round"] == 2 and logged[4]["fedcor-s1/accuracy"] == pytest.approx(0.2)
    assert calls[-1] == ("finish", 0)


def test_a_failing_library_is_named(tmp_path, monkeypatch):
    def init(**_):
        raise ValueError("no space")

    fake(monkeypatch, "wandb", init=init, Settings=lambda silent: silent)
    with pytest.raises(TrackerError, match="no space"):
        tracker("wandb", tmp_path)


class Kept(Listener):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def on_start(self, runs, rounds_done, rounds_total):
        self.told.append(("start", runs[0].id, runs[0].selector, runs[0].seed))

    def on_round(self, run, row):
        self.told.append((row["round"], numbers(row)))

    def on_end(self, state):
        self.told.append(("end", state))


def test_a_live_run_is_followed_from_its_journal_to_its_end(tmp_path):
    journal = tmp_path / "live.sqlite"
    session = fc.Session("oort", clients=8, seed=4, journal=journal)
    kept, looks = Kept(), iter(range(3))

    def play(rounds):
        for _ in range(rounds):
            cohort = session.ask(2)
            session.tell(cohort, loss_rms=[1.0] * 2, duration=[3.0] * 2)
            session.record(cohort.round, {"accuracy": 0.1 * (1 + cohort.round), "evaluate/loss": 0.5})

    def pause():
        play(2)
        if next(looks) == 1:
            record_end(session, "finished")
            session.close()
        return True

    play(2)
    track_journal(journal, [kept], pause)
    first, *rounds, last = kept.told
    assert first == ("start", "live", "oort", 4) and last == ("end", "finished")
    assert [number for number, _ in rounds] == list(range(6))
    for number, values in rounds:
        assert values["accuracy"] == pytest.approx(0.1 * (1 + number)) and values["evaluate/loss"] == 0.5
        assert values["cohort_size"] == 2 and values["seconds"] >= 0 and values["available"] == 8


def test_the_command_tracks_what_there_is(tmp_path, monkeypatch):
    journal = tmp_path / "live.sqlite"
    with fc.Session("uniform", clients=4, journal=journal) as session:
        for _ in range(2):
            session.tell(session.ask(2))
    kept = Kept()
    monkeypatch.setattr("fedcohort.report.trackers.tracker", lambda name, out: kept)
    done = CliRunner().invoke(app, ["journal", "track", str(journal), "--to", "mlflow"])
    assert done.exit_code == 0, done.output
    assert [told[0] for told in kept.told] == ["start", 0, "end"]  # the open end is not sent: it may be evaluated yet

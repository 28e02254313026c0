"""Several processes compared with one, on the CPU: the same results, whatever happens to them."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort.core.protocol import SELECTORS
from fedcohort.journal import read_journal
from fedcohort.selectors.baselines.uniform import Uniform
from fedcohort.simulate import runner
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError
from fedcohort.simulate.processes import local as processes
from fedcohort.simulate.processes.cuda_sharing import shared_device
from fedcohort.simulate.processes.worker import WorkerSetup, pack_error
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import ResultsError, lock_folder, share_lock

from . import outcomes as clusters
from .outcomes import rows, with_options

TABLE = {
    **clusters.TABLE,
    "scenario": {**clusters.TABLE["scenario"], "failure": 0.2},
    "run": {"rounds": 30, "cohort": 3, "device": "cpu", "checkpoint_seconds": 0.0, "workers": 1, "processes": 1},
}
OWN = """
from fedcohort.selectors.baselines.uniform import Uniform

class Mine(Uniform):
    pass
"""


def table(**options):
    return with_options(TABLE, **options)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return {**TABLE["selectors"], "mine": {"name": f"{file}:Mine"}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, own):
    out = tmp_path_factory.mktemp("alone") / "x"
    watch = Watch()
    assert Simulation(Experiment.from_dict({**table(), "selectors": own}), out, listeners=[watch]).run() == "finished"
    return out, watch


class Watch(Listener):
    """Records some columns of every round."""

    def __init__(self):
        self.seen = {}

    def on_round(self, run, row):
        self.seen[run.id, row["round"]] = (row["clock"], row["bytes_up"], np.float32(row["weights"]).tolist())


def test_a_setup_is_read_from_the_file_as_it_was_written(tmp_path):
    """Every worker maps the file: its arrays are views of it, which can be changed without changing it."""
    generator = np.random.default_rng(0)
    arrays = {
        "images": generator.integers(0, 256, (50, 7, 7), dtype=np.uint8),
        "labels": generator.integers(0, 10, 50),
        "nothing": np.zeros(0),
        "columns": np.asfortranarray(generator.normal(size=(5, 3))),
    }
    setup = WorkerSetup(tmp_path, "cpu", 2, 5.0, {"datasets": arrays, "name": "x"})
    with open(tmp_path / "setup", "w+b") as file:
        ends = setup.write(file)
        first, second = (WorkerSetup.read(file.fileno(), ends) for _ in range(2))
    assert (first.out, first.device, first.threads, first.seconds) == (tmp_path, "cpu", 2, 5.0)
    for name, array in arrays.items():
        np.testing.assert_array_equal(first.prepared["datasets"][name], array)
    first.prepared["datasets"]["images"][:] = 0
    np.testing.assert_array_equal(second.prepared["datasets"]["images"], arrays["images"])


def test_a_full_disk_for_temporary_files_is_named(tmp_path, monkeypatch):
    def write(self, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WorkerSetup, "write", write)
    with pytest.raises(ResultsError, match=tempfile.gettempdir()):
        Simulation(Experiment.from_dict(table(processes=2)), tmp_path / "x").run()


def same(out, other):
    assert rows(out, "rounds") == rows(other, "rounds")
    assert repr(rows(out, "clients")) == repr(rows(other, "clients"))


def test_processes_give_the_same_results_as_one(alone, own, tmp_path):
    watch, out = Watch(), tmp_path / "x"
    experiment = Experiment.from_dict({**table(processes=2), "selectors": own})
    simulation = Simulation(experiment, out, listeners=[watch])
    assert len(simulation.prepared.groups) > 1
    assert simulation.run() == "finished"
    same(out, alone[0])
    assert watch.seen.keys() == alone[1].seen.keys()
    for key, (cohort, statuses, durations) in alone[1].seen.items():
        assert watch.seen[key][:2] == (cohort, statuses)
        assert watch.seen[key][2] == pytest.approx(durations, rel=1e-6)  # single precision in the table
    for info in load(out).runs:
        assert info.state == "finished"
        with closing(read_journal(load(out).journal(info))) as journal:
            assert len(list(journal.cohorts())) == TABLE["run"]["rounds"]


def test_a_dead_process_is_replaced_and_a_stopped_experiment_can_be_continued(alone, own, tmp_path, monkeypatch):
    killed = []
    real = Simulation.take_over

    def take_over(self, number, result):
        real(self, number, result)
        if not killed:
            killed.append(number)
            worker = next(worker for worker in drivers[0].workers if worker.group == number)
            worker.process.send_signal(signal.SIGKILL)
        elif result.round > 10:
            self.stop()

    drivers = []

    class Kept(processes.LocalDriver):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            drivers.append(self)

    monkeypatch.setattr(runner, "LocalDriver", Kept)
    monkeypatch.setattr(Simulation, "take_over", take_over)
    out = tmp_path / "x"
    experiment = Experiment.from_dict({**table(processes=2), "selectors": own})
    assert Simulation(experiment, out).run() == "interrupted"
    assert killed
    assert 0 < load(out).rounds.num_rows < len(rows(alone[0], "rounds"))
    monkeypatch.undo()
    assert Simulation.open(out).run() == "finished"
    same(out, alone[0])


@pytest.mark.slow
def test_without_enough_memory_fewer_processes_continue(alone, own, tmp_path, monkeypatch, caplog):
    """A process that runs out of memory gives its group back; if the last one does, the experiment fails."""
    short = []
    real = processes.Worker.receive

    def receive(self):
        kind, value = real(self)
        if kind == "results" and len(short) < most:
            short.append(self.group)
            self.process.kill()
            self.process.wait()
            return "failed", pack_error(MemoryError("none is left"))
        return kind, value

    monkeypatch.setattr(processes.Worker, "receive", receive)
    experiment = Experiment.from_dict({**table(processes=2), "selectors": own})
    most = 1
    assert Simulation(experiment, tmp_path / "x").run() == "finished"
    assert "ran out of memory" in caplog.text
    same(tmp_path / "x", alone[0])
    short.clear()
    most = 2
    with pytest.raises(InputError, match="not enough memory"):
        Simulation(experiment, tmp_path / "y").run()


def test_a_stop_before_anything_is_ready(own, tmp_path, capfd):
    simulation = Simulation(Experiment.from_dict({**table(processes=2), "selectors": own}), tmp_path / "x")
    simulation.stop()
    assert simulation.run() == "interrupted"
    assert load(tmp_path / "x").rounds.num_rows == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_an_experiment_that_workers_cannot_open_runs_here_or_is_refused(tmp_path, monkeypatch, caplog):
    @SELECTORS.register("known-here-only")
    class Here(Uniform):
        pass

    config = {**table(), "selectors": {"uniform": {}, "known-here-only": {}}}
    with pytest.raises(ConfigError, match="known-here-only"):
        Simulation(Experiment.from_dict(with_options(config, processes=2)), tmp_path / "x").run()
    monkeypatch.setattr("fedcohort.simulate.rounds.prepare.choose_process_count", lambda *arguments: 2)
    config["run"] = {key: value for key, value in config["run"].items() if key != "processes"}
    assert Simulation(Experiment.from_dict(config), tmp_path / "y").run() == "finished"
    assert "another one cannot open the experiment" in caplog.text


@pytest.mark.slow
def test_workers_of_a_killed_process_end_before_another_continues(alone, own, tmp_path):
    out = tmp_path / "x"
    code = (
        "import sys, json, pathlib\n"
        "from fedcohort.simulate.config.experiment import Experiment\n"
        "from fedcohort.simulate.runner import Simulation\n"
        "Simulation(Experiment.from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])).run()\n"
    )
    config = {**table(processes=2), "selectors": own}
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(config), str(out)])
    until = time.monotonic() + 120
    while not list(out.glob("checkpoint/*.npz")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Simulation.open(out).run() == "finished"
    same(out, alone[0])


def test_a_directory_with_running_workers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcohort.simulate.store.writer.WORKERS_SECONDS", 0)
    with share_lock(tmp_path), pytest.raises(ResultsError, match="still working"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass


def test_groups_for_processes_mix_runs_of_similar_cost():
    prepared = prepare(Experiment.from_dict(table()), processes=2)
    labels = [{prepared.experiment.plans[i].label for i in places} for places in prepared.groups.values()]
    assert labels == [{"uniform", "flash"}, {"uniform", "flash"}, {"scaffolded"}]
    assert sorted(place for places in prepared.groups.values() for place in places) == list(range(6))


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"processes": 3}, 3, 3),
        ({"processes": 50}, 3, 6),
        ({}, 3, 1),  # too short
        ({"rounds": 1000}, 3, 1),  # two runs a process would be too few
        ({"rounds": 1000, "many": True}, 3, 2),
        ({"rounds": 1000, "many": True, "engine": "ray"}, 3, 1),
        ({"rounds": 1000, "many": True}, 100_000, 1),  # training has both cores already
    ],
)
def test_the_number_of_processes(options, steps, expected, monkeypatch):
    monkeypatch.setattr("fedcohort.simulate.rounds.process_count.free_cores", lambda: 2)
    seeds = list(range(4 if "many" in options else 2))
    given = {**table(**options), "local": {**TABLE["local"], "steps": steps}, "seeds": seeds}
    given["run"].pop("many", None)
    if "processes" not in options:
        del given["run"]["processes"]
    assert prepare(Experiment.from_dict(given), "cpu", processes=None).processes == expected


def test_classes_defined_in_a_script_stay_in_its_process(monkeypatch):
    monkeypatch.setattr("fedcohort.simulate.rounds.process_count.free_cores", lambda: 2)
    given = {**table(rounds=1000), "seeds": [0, 1, 2, 3]}
    del given["run"]["processes"]
    experiment = Experiment.from_dict(given)
    assert prepare(experiment, "cpu", processes=None).processes == 2
    monkeypatch.setattr(Uniform, "__module__", "__main__")
    assert prepare(experiment, "cpu", processes=None).processes == 1


def test_a_shared_device_is_left_as_it_was(tmp_path, monkeypatch):
    """The service is started and stopped, and leaves nothing behind; without it there are no variables."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$1 $(test "$1" || cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/log\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with shared_device("cpu") as nothing:
        assert nothing == {}
    with shared_device("cuda:0") as places:
        folder = Path(places["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
    assert not folder.exists()
    assert (tmp_path / "log").read_text().split() == ["-d", str(folder), "quit", str(folder)]
    control.write_text("#!/bin/sh\nexit 1\n")
    with shared_device("cuda:0") as nothing:
        assert nothing == {}

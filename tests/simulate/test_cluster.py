"""The Ray engine compared with the local one, on a local Ray."""

import pytest

from fedcohort.core.errors import JournalError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.processes.cluster import ClusterDriver, ClusterError, HandOver
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

from .outcomes import TABLE, rows, with_options

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(1500)  # workers start slowly on a machine that is busy


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def table(**options):
    return with_options(TABLE, **options)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "x"
    assert Simulation(Experiment.from_dict(table()), out).run() == "finished"
    return out


def test_ray_gives_the_same_results_as_local(cluster, local, tmp_path):
    seen = []

    class Watch(Listener):
        def on_round(self, run, row):
            seen.append((run.id, row["round"]))

    out = tmp_path / "x"
    simulation = Simulation(Experiment.from_dict(table(engine="ray")), out, listeners=[Watch()])
    assert len(simulation.prepared.groups) == 3
    assert simulation.run() == "finished"
    assert rows(out, "rounds") == rows(local, "rounds")
    assert repr(rows(out, "clients")) == repr(rows(local, "clients"))
    assert sorted(seen) == sorted((row["run"], row["round"]) for row in rows(local, "rounds"))
    assert {info.state for info in load(out).runs} == {"finished"}
    for info in load(out).runs:
        assert load(out).journal(info).exists()


class Interrupt(Listener):
    """Stops the simulation after the first hand-over."""

    simulation: Simulation

    def on_round(self, run, row):
        self.simulation.stop()


@pytest.mark.slow
def test_started_on_ray_and_continued_locally(cluster, local, tmp_path):
    out = tmp_path / "x"
    listener = Interrupt()
    simulation = Simulation(Experiment.from_dict(table(engine="ray")), out, listeners=[listener])
    listener.simulation = simulation
    assert simulation.run() == "interrupted"
    assert 0 < load(out).rounds.num_rows < len(rows(local, "rounds"))
    assert Simulation.open(out, engine="local").run() == "finished"
    assert rows(out, "rounds") == rows(local, "rounds")


@pytest.mark.slow
def test_started_locally_and_continued_on_ray(cluster, local, tmp_path):
    out = tmp_path / "x"
    listener = Interrupt()
    simulation = Simulation(Experiment.from_dict(table()), out, listeners=[listener])
    listener.simulation = simulation
    assert simulation.run() == "interrupted"
    assert Simulation.open(out, engine="ray").run() == "finished"
    assert rows(out, "rounds") == rows(local, "rounds")


@pytest.mark.slow
def test_a_lost_actor_continues_from_its_last_checkpoint(cluster, local, tmp_path, monkeypatch):
    from fedcohort.simulate.processes import cluster as module

    killed = []
    real = module.ClusterDriver.collect

    def collect(self, future):
        number, _ = self.pending[future]
        real(self, future)
        again = [f for f, (n, a) in self.pending.items() if n == number]
        if not killed and again:
            killed.append(number)
            ray.kill(self.pending[again[0]][1])

    monkeypatch.setattr(module.ClusterDriver, "collect", collect)
    out = tmp_path / "x"
    assert Simulation(Experiment.from_dict(table(engine="ray")), out).run() == "finished"
    assert killed
    assert rows(out, "rounds") == rows(local, "rounds")


class Lossy:
    """A fake Ray that loses the hand-overs that a list marks; actors do nothing."""

    exceptions = ray.exceptions

    def __init__(self, outcomes):
        self.outcomes = outcomes

    def get(self, future):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Taken:
    """A driver that only counts launches and hand-overs."""

    def __init__(self, outcomes):
        self.driver = ClusterDriver.__new__(ClusterDriver)
        self.driver.ray, self.driver.attempts, self.driver.pending = Lossy(outcomes), {}, {}
        self.driver.seconds, self.driver.simulation = 0.0, self
        self.driver.launch = self.launch
        self.stopping, self.launched, self.taken = False, 0, 0
        self.advance = self

    def remote(self, seconds):
        return object()

    def launch(self, number):
        self.launched += 1
        self.driver.pending[object()] = (number, self)

    def take_over(self, number, result):
        self.taken += 1

    def collect_all(self):
        self.launch(7)
        while self.driver.ray.outcomes:
            self.driver.collect(next(iter(self.driver.pending)))


def test_lost_hand_overs_are_repeated_and_only_consecutive_losses_count():
    lost = ray.exceptions.ObjectLostError("00" * 28, None, "")
    died = ray.exceptions.RayActorError()
    good = HandOver(None, 1, b"", [], done=False)
    found = Taken([lost, died, good, died, lost, good, lost])
    found.collect_all()
    assert (found.launched, found.taken) == (6, 2)
    with pytest.raises(ClusterError, match="group 7 was lost 3 times in a row"):
        Taken([good, died, lost, died]).collect_all()


@pytest.mark.slow
def test_an_error_in_an_actor_is_the_error_of_the_experiment(cluster, tmp_path):
    out = tmp_path / "x"
    listener = Interrupt()
    simulation = Simulation(Experiment.from_dict(table()), out, listeners=[listener])
    listener.simulation = simulation
    assert simulation.run() == "interrupted"
    load(out).journal("uniform-s0").unlink()
    with pytest.raises(JournalError, match="uniform-s0"):
        Simulation.open(out, engine="ray").run()
    assert load(out).status["state"] == "failed"


@pytest.mark.parametrize(
    ("options", "message"), [({"device": "cuda"}, "no machine of the Ray cluster"), ({"workers": 64}, "64 workers")]
)
def test_resources_that_no_machine_has_are_refused(cluster, tmp_path, options, message):
    simulation = Simulation(Experiment.from_dict(table(engine="ray", **options)), tmp_path / "x")
    with pytest.raises(ClusterError, match=message):
        simulation.run()

"""Several machines: a Ray cluster of raylets, each a process with its own CPUs, resources and folder."""

import time
from pathlib import Path

import pytest

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.processes import cluster as module
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

from .outcomes import rows, with_options

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(1500)  # raylets and workers start slowly on a machine that is busy

TABLE = {
    "seeds": [0, 1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 80, "classes": 4, "shape": [6]},
    "scenario": {"partition": {"name": "shards", "clients": 10, "per_client": 2}, "validation": 0.1},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1},
    "run": {"rounds": 12, "cohort": 3, "lockstep": 2, "device": "cpu", "checkpoint_seconds": 0.0, "workers": 1},
    "selectors": {"uniform": {}, "flash": {}, "fedcor": {"warmup": 3}, "oort": {}},
}


def table(**options):
    return with_options(TABLE, **options)


def hosted(folder: Path) -> list[Path]:
    """Return the working folders of the groups that run on a machine."""
    return sorted(folder.glob("fedcohort-*"))


class Killer(Listener):
    """Kills the machine of a group once, after some rounds."""

    def __init__(self, cluster, machines):
        self.cluster, self.machines = cluster, machines
        self.killed: Path | None = None
        self.rounds_before = 0

    def on_round(self, run, row):
        self.rounds_before += self.killed is None
        if self.killed is None and row["round"] >= 4:
            folder, node = next((folder, node) for folder, node in self.machines.items() if hosted(folder))
            self.cluster.remove_node(node, allow_graceful=False)
            self.killed = folder


@pytest.fixture
def machines(tmp_path):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    found = {}
    for number in range(3):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        try:
            found[folder] = cluster.add_node(
                num_cpus=1, resources={f"machine-{number}": 1}, env_vars={"TMPDIR": str(folder)}
            )
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            cluster.shutdown()
            pytest.skip("too busy: a raylet did not start in the 30 s that Ray waits for it")
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, found
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_before_its_hand_over_is_read_changes_nothing(machines, tmp_path, monkeypatch):
    """A hand-over stays on its machine until the driver reads it."""
    small = with_options({**TABLE, "seeds": [0], "selectors": {"uniform": {}, "flash": {}}}, rounds=4, lockstep=1)
    alone = tmp_path / "alone"
    assert Simulation(Experiment.from_dict(small), alone).run() == "finished"
    cluster, folders = machines
    nodes = {node.node_id: node for node in folders.values()}
    killed = []
    real = module.ClusterDriver.collect

    def collect(self, future):
        number, actor = self.pending[future]
        real(self, future)
        again = [f for f, (n, _) in self.pending.items() if n == number]
        if again and not killed:
            home = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            ray.wait(again, fetch_local=False)
            killed.append(number)
            cluster.remove_node(nodes[home], allow_graceful=False)

    monkeypatch.setattr(module.ClusterDriver, "collect", collect)
    out = tmp_path / "out"
    assert Simulation(Experiment.from_dict(with_options(small, engine="ray")), out).run() == "finished"
    assert killed
    assert rows(out, "rounds") == rows(alone, "rounds")


@pytest.mark.slow
def test_a_machine_that_dies_during_a_run_changes_nothing(machines, tmp_path):
    alone = tmp_path / "alone"
    assert Simulation(Experiment.from_dict(table()), alone).run() == "finished"
    cluster, folders = machines
    pids = {info.process.pid for node in folders.values() for info in node.all_processes["raylet"]}
    assert len(pids) == 3
    killer = Killer(cluster, folders)
    out = tmp_path / "out"
    simulation = Simulation(Experiment.from_dict(table(engine="ray")), out, listeners=[killer])
    assert len(simulation.prepared.groups) == 4
    assert simulation.run() == "finished"
    assert killer.killed is not None
    assert hosted(killer.killed)  # it had no time to tidy up
    assert killer.rounds_before < len(rows(alone, "rounds"))
    for _ in range(60):  # Ray notices some seconds later that a machine is gone; a short run may have ended by then
        if sum(node["Alive"] for node in ray.nodes()) == 3:  # the head and two of three
            break
        time.sleep(1)
    else:
        raise AssertionError(ray.nodes())
    assert rows(out, "rounds") == rows(alone, "rounds")
    assert repr(rows(out, "clients")) == repr(rows(alone, "clients"))
    assert {info.state for info in load(out).runs} == {"finished"}

"""The dashboard's feed follows a real simulation: a round is there within two seconds of its end."""

import threading
import time

from fedcohort.report.dashboard.feed import ExperimentItem
from fedcohort.simulate.config import Experiment
from fedcohort.simulate.listener import Listener
from fedcohort.simulate.runner import Simulation

TABLE = {
    "seeds": [0],
    "scenario": {"partition": {"name": "shards", "clients": 12, "per_client": 2}},
    "local": {"batch_size": 8, "steps": 2, "lr": 0.05},
    "run": {"rounds": 25, "cohort": 3, "workers": 1, "checkpoint_seconds": 1000.0},
    "selectors": {"uniform": {}},
}


class Paced(Listener):
    """Notes when each round ended, and takes its time, as rounds of a larger model would."""

    def __init__(self):
        self.ended = {}

    def on_round(self, run, row):
        self.ended[row["round"]] = time.monotonic()
        time.sleep(0.2)


def test_rounds_appear_within_two_seconds(tmp_path):
    paced = Paced()
    simulation = Simulation(Experiment.from_dict(TABLE), tmp_path / "out", device="cpu", listeners=[paced])
    worker = threading.Thread(target=simulation.run)
    worker.start()
    item, seen = ExperimentItem(tmp_path / "out", "out"), {}
    while worker.is_alive():
        item.poll()
        now = time.monotonic()
        for run in item._live.values():
            for round_ in run.rows:
                seen.setdefault(round_, now)
        time.sleep(0.1)
    worker.join()
    before_the_end = [r for r in range(20) if r in seen]  # long before any checkpoint
    assert before_the_end == list(range(20))
    assert max(seen[r] - paced.ended[r] for r in before_the_end) < 2.0

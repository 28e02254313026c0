"""Compare selectors from Python: configure, run, read the results.

python examples/compare.py
"""

import tempfile
from pathlib import Path

from fedcohort.simulate.leaderboard import leaderboards
from fedcohort.simulate.rounds.runner import run_experiment
from fedcohort.simulate.store.results import load

if __name__ == "__main__":
    experiment = {
        "name": "skewed",
        "seeds": [0, 1],
        "data": {"name": "digits"},
        "scenario": {"partition": {"name": "shards", "clients": 30, "per_client": 2}},
        "local": {"batch_size": 16, "steps": 10, "lr": 0.05},
        "run": {"rounds": 30, "cohort": 5, "targets": [0.7], "terminal": 5},
        "selectors": {"uniform": {}, "fedcbs": {}, "fedcor": {"warmup": 8}},
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "skewed"
        run_experiment(experiment, out)
        (board,) = leaderboards(load(out))
        print(board)  # a table; in a notebook, leave out print
        for row in board.rows:
            print(f"{row.label:10} terminal accuracy {row.terminal.mean:.3f}, mean QCID {row.qcid.mean:.3f}")

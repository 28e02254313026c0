"""A server that is killed again and again goes on with the cohorts and the model it would have had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedcohort.hosts.flare import CohortController
from fedcohort.journal import read_journal

from .federation import Federation, Pull, cohorts

ROOT = Path(__file__).parents[3]
ROUNDS, KILLS = 120, 40
_CHILD = """
import sys
from tests.hosts.flare.test_kills import run
from pathlib import Path
print("go", flush=True)
run(Path(sys.argv[1]))
"""


def run(journal: Path) -> Federation:
    federation = Federation({f"site-{k}": Pull(0.02) for k in range(1, 7)})
    federation.run(
        CohortController(
            "active-fl",
            num_rounds=ROUNDS,
            journal=str(journal),
            policy={"size": 3, "wait_for": 6, "tries": 60, "deadline": 60.0},
        )
    )
    return federation


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_kills_at_random_moments(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.sqlite")
    assert not whole.panics
    journal, rng = tmp_path / "killed.sqlite", np.random.default_rng(0)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    kills = 0
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(journal)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            cwd=ROOT,
        )
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        if kills == KILLS:
            assert child.wait(600) == 0
            break
        time.sleep(float(rng.uniform(0.2, 1.2)))
        assert child.poll() is None, "the run was over before it could be killed often enough"
        child.send_signal(signal.SIGKILL)
        child.wait()
        kills += 1
    assert cohorts(journal) == cohorts(tmp_path / "whole.sqlite")
    record = read_journal(journal)
    assert record.events("ended")[-1]["state"] == "finished"
    record.close()
    (newest,) = sorted((tmp_path / "killed.sqlite.checkpoints").glob("*.safetensors"))[-1:]
    ours, theirs = load_file(newest), load_file(tmp_path / "whole.sqlite.checkpoints" / newest.name)
    assert ours.keys() == theirs.keys() and newest.name == f"after-{ROUNDS:06d}.safetensors"
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)

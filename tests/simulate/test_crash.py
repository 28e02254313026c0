"""Experiments that are killed or meet a full disk continue to the results of an undisturbed one, bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "scripts" / "crash_simulator.py"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to kill a process many times quickly")


def crash(tmp_path, kills, disks, seed):
    written = tmp_path / "found.json"
    arguments = ["--kills", str(kills), "--disks", str(disks), "--seed", str(seed), "--write", str(written)]
    command = [sys.executable, str(BENCH), *arguments, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert written.exists(), done.stderr
    found = json.loads(written.read_text())
    assert done.returncode == 0, f"{found}\n{done.stderr}"
    return found


def identical(found):
    return sum(counts.get("identical", 0) for counts in found.values())


def test_experiments_that_are_killed_around_checkpoints(tmp_path):
    assert identical(crash(tmp_path, 8, 0, seed=1)["kills"]) == 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
def test_three_hundred_kills_and_a_hundred_full_disks(tmp_path):
    found = crash(tmp_path, 300, 100, seed=0)
    assert identical(found["kills"]) == 300 and identical(found["full_disks"]) == 100
    assert found["full_disks_ended_with"] == {"a sentence": 100}

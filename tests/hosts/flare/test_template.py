"""The job of ``fedcohort flare new`` in FLARE's own simulator, as a new user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.cli.flare import job_files
from tests.experiments import run_experiment

from .test_parity import chosen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_job_runs_and_continues_as_it_is(tmp_path: Path) -> None:
    """Ten sites with the Client API, stopped after two rounds and continued: the cohorts of our own simulator."""
    folder = tmp_path / "my-job"
    folder.mkdir()
    for path, text in job_files("my-job", "power-of-choice").items():
        (folder / path).write_text(text)
    journal = tmp_path / "journal.sqlite"
    for rounds in ("2", "4"):
        done = subprocess.run(
            [sys.executable, "job.py", "--rounds", rounds, "--journal", str(journal)],
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(tmp_path / "workspace")},
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run_experiment(folder / "experiment.toml", tmp_path / "out")
    assert chosen(journal, 4) == chosen(tmp_path / "out" / "journal" / "power-of-choice-s1.sqlite", 4)
    subprocess.run([sys.executable, "job.py", "--write", "fl_job"], cwd=folder, check=True)
    assert (folder / "fl_job" / "my-job" / "meta.json").is_file()

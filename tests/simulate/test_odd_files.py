"""Things that lie in the place of an experiment's files: they are refused or not needed, and never waited for."""

import os
import shutil

import pytest

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 200, "test_samples": 60, "classes": 3, "shape": [5]},
    "scenario": {"partition": {"name": "shards", "clients": 8, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"steps": 2, "batch_size": 8},
    "run": {"rounds": 3, "cohort": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
KINDS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "folder": lambda path: path.mkdir(),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "x"
    assert run_experiment(TABLE, out) == "finished"
    return out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes in the file system")
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_a_files_place_is_refused_or_not_needed(whole, tmp_path, kind):
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    refused = {}
    for i, file in enumerate(files):
        for name, act in (
            ("read", lambda out: load(out).leaderboards()),
            ("resumed", lambda out: Simulation.open(out).run()),
        ):
            out = tmp_path / f"{i}-{name}"
            shutil.copytree(whole, out)
            (out / file).unlink()
            KINDS[kind](out / file)
            try:
                act(out)
            except FedcohortError as error:
                refused[str(file), name] = str(error)
    assert {(name, way) for name in ("config.toml", "meta.json", "runs.json") for way in ("read", "resumed")} - {
        ("runs.json", "resumed")  # written again
    } <= set(refused)
    assert ("rounds/part-00000.parquet", "read") in refused
    assert all(len(said) > 20 for said in refused.values())

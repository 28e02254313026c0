"""The same seed, selector and data in the simulator and on FLARE give the same cohorts and the same models."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcohort.cli.flare import job_files
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.signals import Signal
from fedcohort.hosts.flare import CohortController
from fedcohort.journal import read_journal
from fedcohort.selectors.baselines.greedyfed import SHAPLEY_VALUE
from fedcohort.simulate.config.toml import read_table, to_toml
from tests.experiments import run_experiment

from .federation import Federation

HERE = Path(__file__).parent
SITES, ROUNDS = 10, 5
# How long a site takes is not the same in both worlds, and a FLARE server has no data of its own.
NOT_HERE = frozenset({Signal.DURATION, Signal.KEPT, SHAPLEY_VALUE})
SETTINGS: dict[str, dict[str, Any]] = {
    "balanced-unlabelled": {"name": "balanced", "balance": "nothing"},
    "fedcor": {"warmup": 1, "interval": 3},
}
LABELS = [name for name in SELECTORS if not SELECTORS.create(name).requires & NOT_HERE] + ["balanced-unlabelled"]


def selector_of(label: str) -> Selector[Any]:
    settings = dict(SETTINGS.get(label, {}))
    return SELECTORS.create(settings.pop("name", label), **settings)


def table() -> dict[str, Any]:
    found = read_table(HERE.parent / "flower" / "parity.toml")
    scenario = {"partition": {"name": "dirichlet", "clients": SITES, "alpha": 0.5}}
    return {**found, "scenario": scenario, "selectors": {label: SETTINGS.get(label, {}) for label in LABELS}}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All selectors in the simulator; returns the folder of journals."""
    out = tmp_path_factory.mktemp("simulated") / "out"
    run_experiment(table(), out)
    return out / "journal"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of ``fedcohort flare new`` with an experiment of our own, and sites that are Executors."""
    folder = tmp_path_factory.mktemp("job")
    for path, text in {**job_files("parity-job", "uniform"), "experiment.toml": to_toml(table())}.items():
        (folder / path).write_text(text)
    shutil.copy(HERE / "student.py", folder)
    return folder


@contextlib.contextmanager
def imported(folder: Path) -> Iterator[dict[str, Any]]:
    """The job's modules."""
    sys.path.insert(0, str(folder))
    threads = torch.get_num_threads()
    try:
        yield {name: importlib.import_module(name) for name in ("task", "student")}
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(folder))
        for name in ("task", "student"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def modules(job: Path) -> Iterator[dict[str, Any]]:
    with imported(job) as found:
        yield found


def chosen(journal: Path, rounds: int) -> list[list[int]]:
    record = read_journal(journal)
    try:
        return [row.clients.tolist() for row in record.cohorts()][:rounds]
    finally:
        record.close()


def accuracies(journal: Path) -> list[float]:
    record = read_journal(journal)
    try:
        metrics = record.metrics()
        return [metrics[row.round]["accuracy"] for row in record.cohorts()]
    finally:
        record.close()


def controller(task: Any, label: str, journal: Path, rounds: int = ROUNDS) -> CohortController:
    selector = selector_of(label)
    return CohortController(
        selector.name,
        task.parameters(selector),
        num_rounds=rounds,
        seed=7,
        journal=str(journal),
        policy={"size": 3, "wait_for": SITES, "deadline": 120.0},
    )


@pytest.mark.parametrize("label", LABELS)
def test_in_one_process(label: str, modules: dict[str, Any], simulated: Path, tmp_path: Path) -> None:
    task, journal = modules["task"], tmp_path / "journal.sqlite"
    federation = Federation(
        {f"site-{k}": modules["student"].Student() for k in range(1, SITES + 1)}, task.first_model()
    )
    federation.run(controller(task, label, journal))
    assert not federation.panics
    theirs = simulated / f"{label}-s7.sqlite"
    assert chosen(journal, ROUNDS) == chosen(theirs, ROUNDS)
    test = task.test_data()
    found = [task.evaluate(task.load_model(saved), *test)[1] for saved in federation.persistor.saved]
    np.testing.assert_allclose(found, accuracies(theirs), atol=1e-6)


_JOB = """
import json
import sys
from nvflare.job_config.api import FedJob
from nvflare.recipe.sim_env import SimEnv
from fedcohort.hosts.flare import CohortController, CohortExecutor
import task
from server_model import ServerModel
from student import Student

if __name__ == "__main__":
    folder, rounds, labels = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
    job = FedJob("parity", min_clients=1)
    job.set_app_packages(["fedcohort"])
    for label in labels:  # one workflow after the other, so that sites start once
        params = json.loads(sys.argv[4]).get(label, {})
        name = params.pop("name", label)
        controller = CohortController(
            name, params, num_rounds=rounds, seed=7, policy={"size": 3, "wait_for": 10, "deadline": 120.0},
            journal=f"{folder}/{label}.sqlite",
        )
        job.to_server(controller, id=label)
    job.to_server(ServerModel(), id="persistor")
    job.to_server({"task_request_interval": 0.2})
    job.to_clients(CohortExecutor(Student()), tasks=["*"])
    for file in ("task.py", "experiment.toml"):
        job.add_file_to_server(file)
        job.add_file_to_clients(file)
    SimEnv(num_clients=10, workspace_root=f"{folder}/workspace").deploy(job)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_the_simulator_of_flare(job: Path, simulated: Path, tmp_path: Path) -> None:
    """A server, ten sites in processes of their own, every selector whose signals they can supply."""
    (job / "parity.py").write_text(_JOB)
    source = os.pathsep.join(path for path in sys.path if path.endswith("src"))
    done = subprocess.run(
        [sys.executable, "parity.py", str(tmp_path), "3", ",".join(LABELS), json.dumps(SETTINGS)],
        cwd=job,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", source)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for label in LABELS:
        assert chosen(tmp_path / f"{label}.sqlite", 3) == chosen(simulated / f"{label}-s7.sqlite", 3), label

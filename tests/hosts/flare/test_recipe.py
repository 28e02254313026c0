"""A recipe writes the job that the controller, the model and the script make, and FLARE's simulator runs it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.recipe.sim_env import SimEnv

from fedcohort.core.errors import FedcohortError
from fedcohort.hosts.flare import CohortRecipe
from fedcohort.journal import read_journal

SCRIPT = """
import sys
import nvflare.client as flare
from fedcohort.hosts.flare import Answers, CohortClient, Facts

flare.init()
for model in (client := CohortClient(Answers(facts=lambda: Facts(size=10)))):
    params = {key: value + float(sys.argv[1]) for key, value in model.params.items()}
    client.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 10}))
"""


def recipe(folder: Path, journal: str | None = None, **policy: object) -> CohortRecipe:
    (folder / "train.py").write_text(SCRIPT)
    return CohortRecipe(
        name="mine",
        train_script=str(folder / "train.py"),
        train_args="0.5",
        model=NPModelPersistor(model=[[1.0, 2.0]]),
        selector="uniform",
        num_rounds=3,
        policy={"size": 2, **policy},
        journal=journal,
    )


def test_it_writes_a_job(tmp_path: Path) -> None:
    recipe(tmp_path).export(str(tmp_path / "job"))
    server = json.loads((tmp_path / "job/mine/app/config/config_fed_server.json").read_text())
    (workflow,) = server["workflows"]
    assert workflow["path"].endswith("CohortController")
    assert workflow["args"] == {"num_rounds": 3, "policy": {"size": 2}}  # "uniform" is the default
    assert (tmp_path / "job/mine/app/custom/train.py").is_file()


def test_a_wrong_setting_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises((FedcohortError, TypeError)):
        recipe(tmp_path, spares=-1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_in_the_simulator(tmp_path: Path) -> None:
    journal = tmp_path / "run.sqlite"
    made = recipe(tmp_path, journal=str(journal), wait_for=3)
    made.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path / "sim")))
    with closing(read_journal(journal)) as record:
        assert [row.clients.size for row in record.cohorts()] == [2, 2, 2]
        assert np.all([row.told_at is not None for row in record.cohorts()])

"""A site whose process is killed during a round, in FLARE's own simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.core.protocol import Status
from fedcohort.hosts.flare import failures

from .federation import cohorts

_PARTS = """
import os
import signal

import numpy as np
from nvflare.apis.executor import Executor
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.utils.fl_model_utils import FLModelUtils


class Site(Executor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        if fl_ctx.get_identity_name() == "site-3":
            os.kill(os.getpid(), signal.SIGKILL)
        model = FLModelUtils.from_shareable(shareable)
        return FLModelUtils.to_shareable(FLModel(params={"w": model.params["w"] + 1}))


class Zeros(ModelPersistor):
    def load_model(self, fl_ctx):
        return make_model_learnable(weights={"w": np.zeros(3, np.float32)}, meta_props={})

    def save_model(self, model, fl_ctx):
        pass
"""
_JOB = """
import sys
from nvflare.job_config.api import FedJob
from nvflare.recipe.sim_env import SimEnv
from fedcohort.hosts.flare import CohortController, CohortExecutor
from parts import Site, Zeros

if __name__ == "__main__":
    job = FedJob("killed", min_clients=1)
    job.set_app_packages(["fedcohort"])
    policy = {"wait_for": 3, "deadline": 15.0}
    job.to_server(CohortController("uniform", num_rounds=3, policy=policy, journal=sys.argv[1]))
    job.to_server(Zeros(), id="persistor")
    job.to_clients(CohortExecutor(Site()), tasks=["*"])
    SimEnv(num_clients=4, workspace_root=sys.argv[2]).deploy(job)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_round_goes_on_without_it(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(_PARTS)
    (tmp_path / "job.py").write_text(_JOB)
    journal = tmp_path / "journal.sqlite"
    done = subprocess.run(
        [sys.executable, "job.py", str(journal), str(tmp_path / "workspace")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    first, *rest = cohorts(journal)
    assert "site-3" in first and len(rest) == 2 and not any("site-3" in cohort for cohort in rest)
    (lost,) = failures(journal)
    assert (lost.client, lost.round, lost.status) == ("site-3", 0, Status.MISSING)

"""A recipe of FLARE: one object for a job with client selection, to run anywhere."""

from __future__ import annotations

from typing import Any

from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe

from fedcohort.hosts.flare.controller import CohortController


class CohortRecipe(Recipe):  # type: ignore[misc]  # nvflare has no types
    """A FLARE job whose sites are chosen by a selector, to be run with ``recipe.execute(env)`` or exported.

    Parameters
    ----------
    name : str
        Name of the job.
    train_script : str
        The sites' script, which uses :class:`~fedcohort.hosts.flare.CohortClient`.
    model : object
        What FLARE saves and starts with: a persistor, or one of FLARE's model wrappers, such as ``PTModel(Net())``.
    selector : str
        A registered selector or ``module:Class``.
    train_args : str
        Arguments of the script.
    **settings
        Those of :class:`~fedcohort.hosts.flare.CohortController`: ``num_rounds``, ``policy``, ``journal``...
    """

    def __init__(
        self, *, name: str, train_script: str, model: Any, selector: str, train_args: str = "", **settings: Any
    ) -> None:
        self.train_args = train_args  # FLARE looks for secrets in it
        job = FedJob(name, min_clients=1)
        job.set_app_packages(["fedcohort"])  # installed at the server and at every site, so it is not part of the job
        job.to_server(CohortController(selector, **settings), id="cohorts")
        job.to_server(model, id="persistor")
        job.to_clients(ScriptRunner(train_script, script_args=train_args), tasks=["*"])
        super().__init__(job)

"""The server's side: a FLARE workflow in which a fedcohort selector chooses the cohorts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from nvflare.app_common.workflows.model_controller import ModelController

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.signals import OnServer, Signal
from fedcohort.core.text import shorten
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.hosts.flare.replies import arrays_of
from fedcohort.hosts.flare.run import Aborted, FlareRun, TaskMessage
from fedcohort.hosts.flare.wire import TICKET
from fedcohort.hosts.live_run import RunSettings
from fedcohort.hosts.round import Policy
from fedcohort.journal.lock import check_journal_path
from fedcohort.session.rules import Rules
from fedcohort.training.filters import FILTERS, KeepAll
from fedcohort.training.filters.base import Filter, Need


class CohortController(ModelController):  # type: ignore[misc]  # nvflare has no types
    """A FLARE workflow with a selector, deadlines, spares, rules, and a journal from which it can be restarted.

    All arguments are plain values, because FLARE writes them into the job's configuration.

    Parameters
    ----------
    selector : str
        A registered selector or ``module:Class``.
    selector_params : dict, optional
        The selector's parameters.
    num_rounds : int
        Number of rounds, including those of earlier jobs with the same journal.
    journal : str, optional
        An absolute path at the server for the record of the run. An existing journal is continued. Default: in memory
        only.
    seed : int
        Seed of the selection.
    policy : dict, optional
        How rounds run: fields of :class:`~fedcohort.hosts.Policy`, such as ``{"size": 4, "deadline": 60.0}``.
    classes : int, optional
        Number of classes. Default: as many as at least two sites, and more than a fifth of all, name.
    filter : str, optional
        Name of the filter that decides which models enter the average. Default: all valid ones.
    rules : dict, optional
        Rules for every cohort, as in ``[rules]`` of an experiment.
    shadows : dict of str to str, optional
        By label, selectors whose choices are recorded next to the real ones.
    leases : str, optional
        A file at the server that several runs of one federation share: a site that works for one run is not a candidate
        in another.
    audit : bool
        Whether the journal is a chain of digests, for ``fedcohort journal audit``.
    aggregator_id : str, optional
        The component that aggregates, with ``accept_model``, ``aggregate_model`` and ``reset_stats``. Default:
        FLARE's weighted average.
    task_name : str
        Name of the sites' training task.
    persistor_id : str
        The component that loads the first model and saves each new one.
    keep_checkpoints : int
        How many of the newest checkpoints to keep.
    """

    def __init__(
        self,
        selector: str = "uniform",
        selector_params: dict[str, Any] | None = None,
        *,
        num_rounds: int = 5,
        journal: str | None = None,
        seed: int = 0,
        policy: dict[str, Any] | None = None,
        classes: int | None = None,
        filter: str | None = None,
        rules: dict[str, Any] | None = None,
        shadows: dict[str, str] | None = None,
        leases: str | None = None,
        audit: bool = False,
        aggregator_id: str = "",
        task_name: str = AppConstants.TASK_TRAIN,
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
        keep_checkpoints: int = 2,
    ) -> None:
        super().__init__(persistor_id=persistor_id, ignore_result_error=True)
        self.selector = selector
        self.selector_params = selector_params
        self.num_rounds = num_rounds
        self.journal = journal
        self.seed = seed
        self.policy = policy
        self.classes = classes
        self.filter = filter
        self.rules = rules
        self.shadows = shadows
        self.leases = leases
        self.audit = audit
        self.aggregator_id = aggregator_id
        self.task_name = task_name
        self.persistor_id = persistor_id
        self.keep_checkpoints = keep_checkpoints
        # Created here, so that mistakes are found when the job is written and not when it runs.
        chosen: Selector[Any] = SELECTORS.create(selector, **(selector_params or {}))
        if any(isinstance(signal.how, OnServer) for signal in chosen.requires):
            raise ParameterError(
                f"The selector {selector!r} needs data at the server, which a FLARE job does not have."
            )
        if filter is None and Signal.KEPT in chosen.requires:
            filter = chosen.default_filter
        self.filter_: Filter = KeepAll() if filter is None else FILTERS.create(filter)
        if Need.LOGITS in self.filter_.needs:
            raise ParameterError(
                f"The filter {self.filter_.name!r} judges models on data at the server, which a FLARE job lacks."
            )
        rounds = Policy(**(policy or {}))
        if rounds.late == "count" and not isinstance(self.filter_, KeepAll):
            raise ParameterError(
                f"The 'late' parameter must be 'discard' with the filter {self.filter_.name!r}, which compares the "
                "models of a round. Got 'count'."
            )
        path = None if journal is None else check_journal_path(journal)
        self.settings = RunSettings(
            selector=chosen,
            seed=seed,
            policy=rounds,
            journal=path,
            shadows={label: SELECTORS.create(name) for label, name in (shadows or {}).items()},
            rules=None if rules is None else Rules(**rules),
            leases=None if leases is None else Path(leases),
            audit=audit,
        )
        folder = None if path is None else path.with_name(f"{path.name}.checkpoints")
        self.checkpoints = None if folder is None else CheckpointFiles(folder, keep_checkpoints)
        self._run: FlareRun | None = None
        self._outgoing: TaskMessage | None = None

    def run(self) -> None:
        """Run until ``num_rounds`` rounds are recorded; an existing journal is continued."""
        # In FLARE, some return codes of one site end the whole job. Here they are only this site's failure.
        runner = self.fl_ctx.get_prop(FLContextKey.RUNNER)
        if runner is not None:
            runner.ABORT_RETURN_CODES = []
        self._run = FlareRun(self, arrays_of(self.load_model().params))
        try:
            with contextlib.suppress(Aborted):
                self._run.play()
        finally:
            self._run = None

    # -- for the run --------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise :class:`Aborted` if FLARE ends the job."""
        if self.abort_signal.triggered:
            raise Aborted("the job was aborted")

    def connected(self) -> list[str]:
        """Return the sites that are registered and not known to be disconnected."""
        disconnected = self.communicator.get_client_disconnect_time
        return [client.name for client in self.engine.get_clients() if not disconnected(client.name)]

    def dispatch(self, task_name: str, data: FLModel, targets: Sequence[str], task_message: TaskMessage) -> None:
        """Send a task; FLARE's threads pass the results to ``task_message``."""
        self._outgoing = task_message
        self.send_model(task_name=task_name, data=data, targets=list(targets), callback=task_message)

    def aggregate(
        self, results: Sequence[FLModel], before: Mapping[str, AnyArray]
    ) -> tuple[dict[str, AnyArray], FLModel]:
        """Return the next model, and the result of FLARE's aggregation."""
        self.event(AppEventType.BEFORE_AGGREGATION)
        if self.aggregator_id:
            aggregator = self.get_component(self.aggregator_id)
            if aggregator is None:
                raise InputError(f"The job has no component {self.aggregator_id!r} to aggregate with.")
            # An earlier attempt may have failed half-way, and its models must not count again.
            aggregator.reset_stats()
            for model in results:
                aggregator.accept_model(model)
            result = aggregator.aggregate_model()
        else:
            result = BaseFedAvg.aggregate_fn(list(results))
        self.fire_event_with_data(AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, result)
        model = FLModel(params_type=ParamsType.FULL, params=dict(before))
        updated = arrays_of(FLModelUtils.update_model(model, result).params)
        return {k: a.astype(before[k].dtype) if k in before else a for k, a in updated.items()}, result

    def round_begins(self, number: int, resumed: bool) -> None:
        """Log that a round begins, and tell FLARE."""
        self.info(f"round {number}, {number + 1} of {self.num_rounds}{' again: it was interrupted' if resumed else ''}")
        self._set_ctx_prop_preserving_attrs(self.fl_ctx, AppConstants.CURRENT_ROUND, number)
        self.event(AppEventType.ROUND_STARTED)

    def round_ends(self, model: Mapping[str, AnyArray], result: FLModel, saved: str | None) -> None:
        """Let the persistor save the new model, delete old checkpoints, and tell FLARE that the round is done."""
        if self.persistor is not None:
            self.save_model(FLModel(params_type=ParamsType.FULL, params=dict(model), metrics=result.metrics))
        if saved is not None and self.checkpoints is not None:
            self.checkpoints.prune(saved)
        self.event(AppEventType.ROUND_DONE)

    # -- for FLARE ----------------------------------------------------------------------------------------------------

    # Methods of FLARE's own controller, which has no public way to follow one task of one site.

    def _build_shareable(self, data: FLModel = None) -> Shareable:
        shareable = super()._build_shareable(data)
        if self._outgoing is not None and self._outgoing.ticket is not None:
            # FLARE forgets a task at its timeout; the cookie says to which cohort a later result belongs.
            shareable.add_cookie(TICKET, self._outgoing.ticket)
        return shareable

    def _prepare_task(self, **about: Any) -> Task:
        task = super()._prepare_task(**about)
        about["callback"].task = task
        return task

    def _prepare_task_data(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        # Called when a site fetches its task; until then it is free, however long the task is open.
        client_task.task.get_prop(AppConstants.TASK_PROP_CALLBACK).fetched.add(client_task.client.name)
        super()._prepare_task_data(client_task, fl_ctx)

    def _process_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Pass on what a site sent: a model, a return code, or something that is neither."""
        task_message: TaskMessage = client_task.task.get_prop(AppConstants.TASK_PROP_CALLBACK)
        site, result = client_task.client.name, client_task.result
        code = result.get_return_code() or ReturnCode.OK
        if code != ReturnCode.OK:
            task_message.arrive(site, None, f"return code {shorten(str(code), 80)}")
        elif task_message.kind == self.task_name:
            super()._process_result(client_task, fl_ctx)  # FLARE's events, then the task_message
        else:
            with contextlib.suppress(Exception):  # a site may send anything; failures are reported below
                model = FLModelUtils.from_shareable(result)
                task_message.arrive(site, model, "")
        # Only a site's first answer counts, so this has no effect if something was passed on above.
        task_message.arrive(site, None, "the result is not a model")
        client_task.result = None

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Accept a late result, whose task FLARE has already forgotten."""
        run, ticket = self._run, result.get_cookie(TICKET)
        for task_message in () if run is None else run.task_messages:
            if (
                task_message.ticket is not None
                and task_message.ticket == ticket
                and client.name in task_message.fetched
            ):
                task_message.arrive(client.name, FLModel(params={}), "")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Mark a site that asks for work as free."""
        super().handle_event(event_type, fl_ctx)
        run, peer = self._run, fl_ctx.get_peer_context()
        if event_type == EventType.BEFORE_PROCESS_TASK_REQUEST and run is not None and peer is not None:
            run.set_free(peer.get_identity_name())

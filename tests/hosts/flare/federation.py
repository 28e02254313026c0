"""FLARE's own server-side machinery in one process: a real communicator, and a thread for each site.

A site asks for a task, works, checks that the task still stands, and submits, as FLARE's client runner does. What
travels goes through FLARE's serialisation, so that nothing is shared by accident.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal as AbortSignal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.decomposers import common_decomposers, numpy_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.decomposers import private_decomposers

from fedcohort.hosts.flare import Answers, CohortController, CohortExecutor, Facts
from fedcohort.journal import read_journal

common_decomposers.register()
numpy_decomposers.register() if hasattr(numpy_decomposers, "register") else None
private_decomposers.register() if hasattr(private_decomposers, "register") else None


# NumPy parses the header of an array as Python, and CPython 3.11 sometimes fails if two threads parse at the same time
# ("AST constructor recursion depth mismatch"). Real sites are processes.
_PARSING = threading.Lock()


def carried(thing: Shareable) -> Shareable:
    """Return what arrives of something that is sent."""
    with _PARSING:
        return fobs.loads(fobs.dumps(thing))


class FirstModel(ModelPersistor):  # type: ignore[misc]
    """Hands out a model and remembers what is saved."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = dict(model)
        self.saved: list[dict[str, Any]] = []

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        return make_model_learnable(weights=self.model, meta_props={})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        self.saved.append({key: np.array(value) for key, value in model["weights"].items()})


class Pull(Executor):  # type: ignore[misc]
    """Moves the model half-way towards the number in the site's name."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    @staticmethod
    def number(fl_ctx: FLContext) -> float:
        return float(fl_ctx.get_identity_name().split("-")[1])

    def answers(self, fl_ctx: FLContext) -> Answers:
        number = self.number(fl_ctx)

        def losses(params: Mapping[str, Any], received: Mapping[str, Any]) -> dict[str, float]:
            return {"loss": float(np.mean((params["w"] - number) ** 2))}

        return Answers(lambda: Facts(int(10 * number), attributes={"even": number % 2 == 0}), losses)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: AbortSignal) -> Shareable:
        time.sleep(self.seconds)
        model = FLModelUtils.from_shareable(shareable)
        return FLModelUtils.to_shareable(self.trained(model, fl_ctx))

    def trained(self, model: FLModel, fl_ctx: FLContext) -> FLModel:
        params = {"w": ((model.params["w"] + self.number(fl_ctx)) / 2).astype(np.float32)}
        return FLModel(params=params, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 3})


class Runner:
    """Ends the job when a site sends one of these codes, as FLARE's does."""

    def __init__(self) -> None:
        self.ABORT_RETURN_CODES = [ReturnCode.RUN_MISMATCH, ReturnCode.TASK_UNKNOWN, ReturnCode.UNSAFE_JOB]


class Engine:
    """What a workflow needs of FLARE's server engine."""

    def __init__(self, sites: Mapping[str, Executor], components: Mapping[str, Any]) -> None:
        self.clients = {name: Client(name, f"token-{name}") for name in sites}
        self.hidden: set[str] = set()  # not registered yet
        self.components = dict(components)
        self.handlers: list[Any] = []
        self.runner = Runner()
        self._contexts = FLContextManager(
            engine=self,
            identity_name="server",
            job_id="job",
            public_stickers={},
            private_stickers={FLContextKey.RUNNER: self.runner, ReservedKey.RUN_NUM: "job"},
        )

    def new_context(self) -> FLContext:
        return self._contexts.new_context()

    def get_clients(self) -> list[Client]:
        return [client for name, client in self.clients.items() if name not in self.hidden]

    def get_component(self, name: str) -> Any:
        return self.components.get(name)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        for handler in self.handlers:
            handler.handle_event(event_type, fl_ctx)


class Federation:
    """A server and its sites; :meth:`run` plays a controller on them."""

    def __init__(
        self, sites: Mapping[str, Executor], first: Mapping[str, Any] | None = None, **components: Any
    ) -> None:
        self.sites = {name: CohortExecutor(executor) for name, executor in sites.items()}
        self.persistor = FirstModel({"w": np.zeros(3, np.float32)} if first is None else first)
        self.engine = Engine(sites, {"persistor": self.persistor, **components})
        self.abort = AbortSignal()
        self.panics: list[str] = []
        self.alive = dict.fromkeys(sites, True)
        self.before_submission: Callable[[str, str], None] = lambda site, task: None

    def run(self, controller: CohortController) -> None:
        """Run a workflow to its end."""
        communicator = WFCommServer(task_check_period=0.05)
        controller.set_communicator(communicator)
        self.engine.handlers = [controller, self]
        over = threading.Event()
        with self.engine.new_context() as fl_ctx:
            communicator.initialize_run(fl_ctx)
            controller.initialize(fl_ctx)
            threads = [
                threading.Thread(target=self._site, args=(name, communicator, over), daemon=True) for name in self.sites
            ]
            for thread in threads:
                thread.start()
            try:
                controller.control_flow(self.abort, fl_ctx)
            finally:
                over.set()
                controller.stop_controller(fl_ctx)
                communicator.finalize_run(fl_ctx)
                for thread in threads:
                    thread.join(5.0)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(str(fl_ctx.get_prop(FLContextKey.EVENT_DATA)))

    def _context(self, name: str) -> FLContext:
        peer = FLContextManager(None, name, "job", {}, {}).new_context()
        fl_ctx = self.engine.new_context()
        fl_ctx.set_peer_context(peer)
        return fl_ctx

    def _site(self, name: str, communicator: WFCommServer, over: threading.Event) -> None:
        client, executor = self.engine.clients[name], self.sites[name]
        own = FLContextManager(None, name, "job", {}, {}).new_context()
        while not over.is_set():
            if not self.alive[name]:
                over.wait(0.01)
                continue
            fl_ctx = self._context(name)
            self.engine.fire_event(EventType.BEFORE_PROCESS_TASK_REQUEST, fl_ctx)
            task, number, data = communicator.process_task_request(client, fl_ctx)
            if not task:
                over.wait(0.005)
                continue
            data = carried(data)
            try:
                result = executor.execute(task, data, own, AbortSignal())
            except Exception:
                result = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            result = carried(result)
            if not isinstance(result, Shareable):
                result = make_reply(ReturnCode.EXECUTION_RESULT_ERROR)
            result.set_cookie_jar(data.get_cookie_jar())
            if result.get_return_code() in self.engine.runner.ABORT_RETURN_CODES:
                self.panics.append(f"fatal return code from {name}")
            self.before_submission(name, task)
            if communicator.process_task_check(number, fl_ctx) is not None and not over.is_set():
                communicator.process_submission(client, task, number, result, self._context(name))


def cohorts(journal: Path) -> list[list[str]]:
    """Return who was chosen, round by round."""
    record = read_journal(journal)
    try:
        table, _ = record.table()
        return [list(table.names_of(row.clients)) for row in record.cohorts()]
    finally:
        record.close()

"""What selection costs a round on Flower and on NVIDIA FLARE, compared with each host's own sampling.

    PYTHONPATH=. python bench/scripts/hosts_overhead.py [--clients 20 200] [--rounds 30] [--repeats 5]

Both hosts run their server side in this process, with clients that answer at once with a prepared model, so a round
only handles messages. The measure is the processor time of a round: the host's FedAvg, which draws a tenth of the
clients, against the same with a selector, a journal on disk and a checkpoint in every round. The two take turns, and
the table shows medians over all rounds. On FLARE nothing is serialised, so its own share is larger in practice.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from flower_overhead import AnsweringGrid
from flower_overhead import model as flower_model
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal as AbortSignal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg as FlareFedAvg

from fedcohort.core.signals import Signal
from fedcohort.hosts import Policy
from fedcohort.hosts.flare import CohortController
from fedcohort.hosts.flare.wire import DESCRIBE
from fedcohort.hosts.flower import CohortStrategy
from fedcohort.hosts.wire import RECORD, Description
from tests.hosts.flare.federation import Engine, FirstModel

PARAMETERS = 52_500  # the MLP of the papers
_SIGNALS = frozenset({Signal.LOSS, Signal.LOSS_QUERY})


class Ends(FirstModel):
    """Notes the time whenever a round's model is saved."""

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__(first)
        self.ends: list[float] = []

    def save_model(self, model: Any, fl_ctx: FLContext) -> None:
        self.ends.append(time.process_time())


class AnsweringSites(WFCommServer):
    """FLARE's communicator with sites that answer as soon as a task is scheduled."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(task_check_period=0.05)
        self.engine = engine
        self.trained = {"weight": np.zeros(PARAMETERS, np.float32)}

    def broadcast(self, task: Any, fl_ctx: FLContext, targets: Any = None, *rest: Any, **more: Any) -> None:
        super().broadcast(task, fl_ctx, targets, *rest, **more)
        for name in targets:
            client = self.engine.clients[name]
            kind, number, data = self.process_task_request(client, self.engine.new_context())
            result = FLModelUtils.to_shareable(self.answer(name, kind, data))
            result.set_cookie_jar(data.get_cookie_jar())
            self.process_submission(client, kind, number, result, self.engine.new_context())
        self.check_tasks()

    def answer(self, name: str, kind: str, data: Shareable) -> FLModel:
        record: dict[str, Any] = {"version": 1, "name": name, "loss": 1.0 + len(name) / 1000}
        if kind == DESCRIBE:
            record = Description("", 100, signals=_SIGNALS).to_record()
            return FLModel(metrics={"answered": 1.0}, meta={RECORD: record})
        return FLModel(params=self.trained, meta={"NUM_STEPS_CURRENT_ROUND": 100, RECORD: record})


def on_flare(clients: int, controller: Any) -> list[float]:
    """Return the processor time of each round of a workflow."""
    persistor = Ends({"weight": np.zeros(PARAMETERS, np.float32)})
    engine = Engine({f"site-{k}": None for k in range(clients)}, {"persistor": persistor})  # type: ignore[dict-item]
    communicator = AnsweringSites(engine)
    controller.set_communicator(communicator)
    engine.handlers = [controller]
    with engine.new_context() as fl_ctx:
        communicator.initialize_run(fl_ctx)
        controller.initialize(fl_ctx)
        controller.control_flow(AbortSignal(), fl_ctx)
        controller.stop_controller(fl_ctx)
        communicator.finalize_run(fl_ctx)
    return [after - before for before, after in itertools.pairwise(persistor.ends[1:])]


def on_flower(grid: AnsweringGrid, strategy: Any, rounds: int) -> list[float]:
    """Return the processor time of each round of a strategy."""
    ends: list[float] = []
    strategy.start(
        grid, flower_model(PARAMETERS), num_rounds=rounds, evaluate_fn=lambda *_: ends.append(time.process_time())
    )
    return [after - before for before, after in itertools.pairwise(ends[2:])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--selector", default="active-fl")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    print("| host | clients | cohort | own sampling | with a selector | difference |\n|---|---|---|---|---|---|")
    for clients in options.clients:
        cohort = max(clients // 10, 2)
        grid = AnsweringGrid(clients, PARAMETERS)
        plain: dict[str, list[float]] = {"Flower": [], "FLARE": []}
        ours: dict[str, list[float]] = {"Flower": [], "FLARE": []}
        size: dict[str, Any] = {"min_train_nodes": cohort, "fraction_train": 1e-9, "fraction_evaluate": 0.0}
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                journal = Path(folder) / "journal.sqlite"
                plain["Flower"] += on_flower(grid, FlowerFedAvg(**size), options.rounds)
                strategy = CohortStrategy(
                    options.selector, FlowerFedAvg(**size), journal=journal, policy=Policy(wait_for=1)
                )
                ours["Flower"] += on_flower(grid, strategy, options.rounds)
            with tempfile.TemporaryDirectory() as folder:
                journal = Path(folder) / "journal.sqlite"
                plain["FLARE"] += on_flare(clients, FlareFedAvg(num_clients=cohort, num_rounds=options.rounds))
                controller = CohortController(
                    options.selector,
                    num_rounds=options.rounds,
                    journal=str(journal),
                    policy={"size": cohort, "wait_for": clients},
                )
                ours["FLARE"] += on_flare(clients, controller)
        for host in plain:
            before, after = (1000 * statistics.median(times[host]) for times in (plain, ours))
            difference = f"{after - before:+.2f} ms, {after / before - 1:+.0%}"
            print(f"| {host} | {clients} | {cohort} | {before:.2f} ms | {after:.2f} ms | {difference} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

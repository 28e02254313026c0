"""What selection costs on a live federation of 1,000 nodes, on an in-process grid.

    python bench/scripts/flower_overhead.py [--nodes 1000] [--cohort 100] [--rounds 20] [--repeats 3]

The grid is Flower's InMemoryGrid and LinkState with nodes that answer at once with a prepared model, so a round only
handles its messages. Three settings: the journal in memory, the journal on disk (one durable commit a round), and the
journal on disk with a checkpoint of model and strategy in every round.

First, a round with selection is compared with a round of Flower's FedAvg, which draws equally many nodes: this is what
a user pays. The strategies take short turns, and each is compared with Flower's turn before it. The median of these
ratios is shown with the quartiles, because the machine's speed drifts by more than the difference.

Then the time of a single run is split. Time inside Flower's calls (node ids, configure_train, push, storing and handing
out, replies, pull, aggregate_train) is Flower's. Everything else counts as selection: who is online, the choice, the
checks of every reply, what the selector learns, the journal, and also freeing Flower's messages. The ratio of the two
depends little on how busy the machine is. Three kinds of rounds: a cohort trains; a cohort trains and every node
evaluates; every node trains, which is Flower's default.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import HEARTBEAT_INTERVAL_INF, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from fedcohort.core.protocol import SELECTORS
from fedcohort.core.signals import Signal
from fedcohort.hosts import Policy
from fedcohort.hosts.flower import CohortStrategy
from fedcohort.hosts.flower.wire import DESCRIBE
from fedcohort.hosts.wire import RECORD, Description


def model(parameters: int) -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.zeros(parameters, np.float32))})


class AnsweringGrid(InMemoryGrid):
    """Flower's in-memory grid with nodes that answer as soon as a message is stored for them."""

    def __init__(self, nodes: int, parameters: int) -> None:
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        super().__init__(factory, pull_interval=0.001)
        run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (run,) = self.state.get_run_info(run_ids=[run_id])
        self.set_run(run)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
        self.numbers: dict[int, int] = {}
        for number in range(nodes):
            key = secrets.token_bytes(32)
            node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_INTERVAL_INF)
            self.state.acknowledge_node_heartbeat(node_id=node, heartbeat_interval=HEARTBEAT_INTERVAL_INF)
            self.numbers[node] = number
        self._trained = model(parameters)
        self.counts = np.random.default_rng(0).integers(0, 50, (nodes, 10))

    def _answer(self, message: Message) -> RecordDict:
        number = self.numbers[message.metadata.dst_node_id]
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            counts = tuple(int(c) for c in self.counts[number])
            signals = frozenset({Signal.LOSS, Signal.LOSS_QUERY})
            record = Description(f"client-{number}", sum(counts), counts, signals=signals).to_record()
            return RecordDict({RECORD: ConfigRecord(record)})
        record = ConfigRecord({"version": 1, "name": f"client-{number}", "loss": 1.0 + number / 1000})
        if kind == "evaluate":
            return RecordDict({"metrics": MetricRecord({"num-examples": 100, "loss": 0.5})})
        if kind != "train":
            return RecordDict({RECORD: record})
        metrics = MetricRecord({"num-examples": 100, "train-loss": 0.5})
        content = RecordDict({"arrays": self._trained, "metrics": metrics})
        if RECORD in message.content:
            content[RECORD] = record
        return content

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        ids = list(super().push_messages(outgoing))
        for node in {message.metadata.dst_node_id for message in outgoing}:
            for instruction in self.state.get_message_ins(node_id=node, limit=None):
                reply = Message(self._answer(instruction), reply_to=instruction)
                reply.metadata.__dict__["_message_id"] = secrets.token_hex(16)
                self.state.store_message_res(reply)
        return ids


class Stopwatch:
    """Splits the time of every round into Flower's time and the rest."""

    def __init__(self) -> None:
        self.flower = 0.0
        self._depth = 0
        self._last: tuple[float, float] | None = None
        self.rounds: list[tuple[float, float]] = []  # (Flower's, the rest) in seconds

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # a call inside a call is counted once
                    self.flower += time.perf_counter() - begun

        return timed

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        """End a round; both strategies evaluate once a round."""
        now = (time.perf_counter(), self.flower)
        if self._last is not None:
            spent = now[1] - self._last[1]
            self.rounds.append((spent, now[0] - self._last[0] - spent))
        self._last = (time.perf_counter(), self.flower)


def timed(grid: AnsweringGrid, strategy: CohortStrategy, rounds: int, parameters: int) -> list[tuple[float, float]]:
    watch = Stopwatch()
    watch.watch(strategy.strategy, "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
    watch.watch(grid, "get_node_ids", "get_nodes", "push_messages", "pull_messages")
    strategy.start(grid, model(parameters), num_rounds=rounds + 2, evaluate_fn=watch)
    for name in ("get_node_ids", "get_nodes", "push_messages", "pull_messages"):
        delattr(grid, name)
    return watch.rounds[2:]  # the first ones warm up


SETTINGS = ("memory", "journal", "checkpoint")
TURN = 7  # rounds


def strategy_of(selector: str, setting: str, folder: str, size: dict[str, Any]) -> CohortStrategy:
    journal = None if setting == "memory" else Path(folder) / "journal"
    strategy = CohortStrategy(SELECTORS.create(selector), FedAvg(**size), journal=journal, policy=Policy(wait_for=1))
    if setting == "journal":
        strategy.checkpoints = None
    return strategy


def lengths(grid: AnsweringGrid, strategy: FedAvg | CohortStrategy, rounds: int, parameters: int) -> list[float]:
    ends: list[float] = []
    strategy.start(
        grid, model(parameters), num_rounds=rounds + 2, evaluate_fn=lambda *_: ends.append(time.perf_counter())
    )
    return [end - begin for begin, end in itertools.pairwise(ends[2:])]  # the first ones warm up


def against_plain(grid: AnsweringGrid, selector: str, size: dict[str, Any], options: argparse.Namespace) -> str:
    plain: list[float] = []
    ratios: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(4 * options.repeats):
        for setting in SETTINGS:
            plain.append(statistics.median(lengths(grid, FedAvg(**size), TURN, options.parameters)))
            with tempfile.TemporaryDirectory() as folder:
                strategy = strategy_of(selector, setting, folder, size)
                ratios[setting].append(statistics.median(lengths(grid, strategy, TURN, options.parameters)) / plain[-1])
    cells = []
    for setting in SETTINGS:
        low, middle, high = statistics.quantiles(ratios[setting], n=4)
        cells.append(f"{middle - 1:+.1%} ({low - 1:+.0%} {high - 1:+.0%})".rjust(18))
    return f"{selector:16} {1000 * statistics.median(plain):9.2f} ms {' '.join(cells)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=52_500, help="size of the model (the MLP of the papers)")
    selectors = ["uniform", "size-weighted", "active-fl", "fedcm-ts", "fedcbs"]
    parser.add_argument("--selectors", nargs="+", default=selectors)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    grid = AnsweringGrid(arguments.nodes, arguments.parameters)
    size: dict[str, Any] = {"min_train_nodes": arguments.cohort, "fraction_train": 1e-9, "fraction_evaluate": 0.0}
    what = f"{arguments.nodes} nodes, {arguments.parameters} parameters"
    heads = f"{'Flower':>12} {'in memory':>18} {'journal':>18} {'and checkpoint':>18}"
    print(f"\n{what}: whole rounds, {arguments.cohort} train\n{'selector':16} {heads}")
    for name in arguments.selectors:
        print(against_plain(grid, name, size, arguments), flush=True)
    everybody = {"min_train_nodes": arguments.nodes, "fraction_train": 1.0, "fraction_evaluate": 0.0}
    kinds = {
        f"{arguments.cohort} train": size,
        f"{arguments.cohort} train, all evaluate": {**size, "fraction_evaluate": 1.0},
        "all train": everybody,
    }
    for kind, chosen in kinds.items():
        # Flower's in-memory state searches all messages for every node, so rounds of a thousand nodes take seconds.
        rounds, repeats = (arguments.rounds, arguments.repeats) if chosen is size else (3, 1)
        print(f"\n{what}: time inside Flower and beside it, {kind}\n{'selector':16} {heads}")
        for name in arguments.selectors if chosen is size else arguments.selectors[:1]:
            cells, flower = [], []
            for setting in SETTINGS:
                times: list[tuple[float, float]] = []
                for _ in range(repeats):
                    with tempfile.TemporaryDirectory() as folder:
                        times += timed(grid, strategy_of(name, setting, folder, chosen), rounds, arguments.parameters)
                own = statistics.median(rest for _, rest in times)
                share = statistics.median(rest / theirs for theirs, rest in times)
                flower += [theirs for theirs, _ in times]
                cells.append(f"{1000 * own:6.2f} ms {share:7.1%}")
            print(f"{name:16} {1000 * statistics.median(flower):9.2f} ms " + " ".join(f"{cell:>18}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What selection costs on a live federation: CohortStrategy against plain FedAvg, 1,000 nodes on an in-process grid.

    python bench/flower_overhead.py [--nodes 1000] [--cohort 100] [--rounds 12] [--repeats 5]

Both run on Flower's own InMemoryGrid and LinkState, whose nodes answer at once with a prepared model, so a round is
nothing but Flower's handling of its messages (writing, storing, handing out, taking replies, averaging). What the first
takes longer is what selection adds: who is online, the choice, the checks of every reply, the journal on disk and the
checkpoint. Rounds of the two are timed in turns and compared as a ratio; the machine's noise hits both.
"""

from __future__ import annotations

import argparse
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

import fedcohort.selectors  # noqa: F401  # registers them
from fedcohort.flower import CohortStrategy
from fedcohort.flower.wire import DESCRIBE, RECORD, Description
from fedcohort.protocol import SELECTORS
from fedcohort.signals import Signal


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
            return RecordDict({RECORD: record})
        record = ConfigRecord({"version": 1, "name": f"client-{number}", "loss": 1.0 + number / 1000})
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
    """Times between evaluations, which both strategies do once a round."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        self.at.append(time.perf_counter())

    @property
    def rounds(self) -> list[float]:
        return [b - a for a, b in zip(self.at[:-1], self.at[1:], strict=True)][2:]  # the first ones warm up


def timed(grid: AnsweringGrid, strategy: Any, rounds: int, parameters: int) -> list[float]:
    watch = Stopwatch()
    strategy.start(grid, model(parameters), num_rounds=rounds + 2, evaluate_fn=watch)
    return watch.rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=52_500, help="size of the model (the MLP of the papers)")
    parser.add_argument("--selectors", nargs="+", default=["uniform", "size-weighted", "active-fl", "fedcbs"])
    parser.add_argument("--limit", type=float, default=None, help="fail when an overhead is above this share")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    size = {"min_train_nodes": arguments.cohort, "fraction_train": 1e-9, "fraction_evaluate": 0.0}
    grid = AnsweringGrid(arguments.nodes, arguments.parameters)
    plain: list[float] = []
    chosen: dict[str, list[float]] = {name: [] for name in arguments.selectors}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            plain += timed(grid, FedAvg(**size), arguments.rounds, arguments.parameters)
            for name, times in chosen.items():
                strategy = CohortStrategy(
                    SELECTORS.create(name), FedAvg(**size), journal=Path(folder) / f"{name}-{repeat}", wait_for=1
                )
                times.extend(timed(grid, strategy, arguments.rounds, arguments.parameters))
    base = statistics.median(plain)
    print(f"{arguments.nodes} nodes, {arguments.cohort} a round, {arguments.parameters} parameters, "
          f"median of {len(plain)} rounds (best in brackets)")  # fmt: skip
    print(f"{'FedAvg alone':16} {1000 * base:8.2f} ms ({1000 * min(plain):.2f})")
    worst = 0.0
    for name, times in chosen.items():
        share, best = statistics.median(times) / base - 1, min(times) / min(plain) - 1
        worst = max(worst, min(share, best))
        print(f"{name:16} {1000 * statistics.median(times):8.2f} ms ({1000 * min(times):.2f})  "
              f"overhead {share:+.1%} (best {best:+.1%})")  # fmt: skip
    return int(arguments.limit is not None and worst > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())

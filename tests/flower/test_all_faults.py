"""One federation in which everything goes wrong at once, and the run completes.

Hostile replies of every kind, a stolen name, shadows that break or lack their signals, a client that hangs in
questions, one that is always late, one that fails, evaluation weights of 0, a node that dies and one that comes back,
facts that change, a server that is killed in the middle of a round, a strategy with a schedule.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcohort.flower import Answers, Facts, cohort_client, failures
from fedcohort.flower.wire import LOSSES
from fedcohort.journal import read_journal
from fedcohort.participation import verify
from fedcohort.protocol import Status
from fedcohort.report.account import read_account
from fedcohort.rules import Rules
from fedcohort.selectors import PowerOfChoice, Uniform
from fedcohort.session import Session

ROUNDS = 12


class PowerCutError(Exception):
    """The server is gone."""


class Halving(FedAvg):
    """Flower's documented schedule: the strategy halves the rate it finds in the config."""

    def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
        config["lr"] = float(config["lr"]) / 2  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Uniform):
    """A shadow that raises when it learns from round 4."""

    def update(self, state: Any, outcome: Any) -> Any:
        if outcome.round == 4:
            raise ValueError("broken in update")
        return super().update(state, outcome)


def hostile(kit: Any) -> Any:
    """Another reply of those that once ended runs, in every round."""
    bad = [
        lambda: Array(np.array(["a", "b", "c"])),
        lambda: Array(np.zeros(3, "M8[s]")),
        lambda: Array(np.zeros(3, [("a", "f4")])),
        lambda: Array(np.zeros(3, np.complex64)),
        lambda: Array(np.array([np.nan, 0, 0], np.float32)),
        lambda: Array("float32", (3,), "numpy.ndarray", b"PK\x03\x04 no archive"),
        lambda: Array("float32", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x90\x01" + b"(" * 400),
        lambda: Array(np.zeros((3, 3), np.float32)),
    ]

    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        turn = int(message.content["config"]["server-round"]) - 1
        if turn < len(bad):
            content["arrays"]["bias"] = bad[turn]()
        else:
            content["metrics"]["train-loss"] = [1.0]
        return content

    return train


def failing(message: Any, context: Any) -> RecordDict:
    raise ValueError("out of memory")


def weightless(kit: Any) -> Any:
    """Trains well and evaluates with a weight of 0."""
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Any) -> Message:
        return Message(kit.step(message, context), reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Any) -> Message:
        return Message(RecordDict({"m": MetricRecord({"num-examples": 0, "value": 1.0})}), reply_to=message)

    return app


def federation(kit: Any, sizes: dict[int, int]) -> Any:
    """Ten clients: 0 to 4 honest, then hostile, failing, late, hanging, weightless; and a thief of a name."""
    fleet = kit.Fleet()

    def facts(context: Any) -> Facts:
        number = int(context.node_config["partition-id"])
        return Facts(size=sizes.get(number, 10), attributes={"battery": 20 if number == 4 else 80})

    answers = dataclasses.replace(kit.ANSWERS, facts=facts)
    apps = {5: kit.client_app(hostile(kit)), 6: kit.client_app(failing), 9: weightless(kit)}
    for number in range(10):
        app = cohort_client(apps.get(number, kit.client_app()), answers)
        node = fleet.node(number, app, registered=f"client-{number}" if number == 0 else "")
        if number == 7:
            node.latency = 100.0
        fleet.grid.add(node)
    hanging = fleet.grid.node_of("client-8")

    def hang(message: Message) -> None:
        if message.metadata.message_type == LOSSES and message.metadata.dst_node_id == hanging:
            fleet.grid.nodes[hanging].busy_until = 1e6

    fleet.grid.hooks.append(hang)
    thief = kit.Node(cohort_client(kit.client_app(), Answers()), {"client-name": "client-0", "partition-id": 77})
    fleet.grid.add(thief, node_id=66)
    return fleet


def test_everything_goes_wrong_and_the_run_completes(kit: Any, tmp_path: Path, caplog: Any) -> None:
    sizes: dict[int, int] = {}
    journal = tmp_path / "run.sqlite"
    seen_lr: list[float] = []

    def start(fleet: Any, evaluate: Any = None) -> Any:
        fleet.grid.hooks.append(
            lambda m: seen_lr.append(float(m.content["config"]["lr"])) if m.metadata.message_type == "train" else None
        )
        strategy = fleet.strategy(
            PowerOfChoice(), Halving(fraction_evaluate=0.5), cohort_size=4, spares=2, deadline=20.0, query_deadline=5.0,
            journal=journal, seed=3, wait_for=4, tries=4, describe_every=30.0, json_log=tmp_path / "run.jsonl",
            shadows={"breaks": Breaking(), "blind": PowerOfChoice(d=9), "other": Uniform()},
            rules=Rules(eligible="battery >= 30", max_participations=30, failures=2, cool_off=2),
        )  # fmt: skip
        config = ConfigRecord({"lr": 1024.0})
        return strategy.start(fleet.grid, kit.model(counter=False), ROUNDS, train_config=config, evaluate_fn=evaluate)

    def cut(server_round: int, arrays: Any) -> MetricRecord:
        if server_round == 5:
            raise PowerCutError
        return MetricRecord({"accuracy": server_round / 100})

    fleet = federation(kit, sizes)
    gone = fleet.grid.node_of("client-3")
    fleet.clock.at.append((30.0, lambda: fleet.grid.remove(gone)))
    with pytest.raises(PowerCutError):
        start(fleet, cut)
    with Session.open(journal) as session:  # the operator gives up what is pending, if anything is
        for cohort in session.pending:
            session.abandon(cohort.ticket, "by the operator")
    sizes[1] = 77  # facts change while the server is away
    fleet = federation(kit, sizes)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        result = start(fleet, lambda r, a: MetricRecord({"accuracy": r / 100}))
        assert start(fleet).arrays["bias"].numpy()[0] == result.arrays["bias"].numpy()[0]
    assert "the run is finished" in caplog.text  # the third start said so at once

    # A1: the model is sound and of its own type; whoever sent rubbish is INVALID with a reason.
    for key, array in result.arrays.items():
        values = array.numpy()
        assert values.dtype == kit.model(counter=False)[key].numpy().dtype and np.isfinite(values).all()
    found = failures(journal)
    by_client = {name: [f for f in found if f.client == name] for name in {f.client for f in found}}
    assert {f.status for f in by_client["client-5"]} == {Status.INVALID} and all(f.reason for f in found)
    assert all("out of memory" in f.reason for f in by_client["client-6"])
    # A2: nobody trained under a name that is registered to another.
    assert 66 not in {node for node, _ in fleet.trained()}
    assert "it calls itself 'client-0', the name of a registered node" in caplog.text
    # A3: the broken shadow was dropped, the others went on; what lacked its signals said so.
    account = read_account(journal)
    shadows = {shadow.name: shadow for shadow in account.shadows}
    assert "broken in update" in str(shadows["breaks"].dropped) and shadows["other"].rounds >= ROUNDS
    # A4 and A6: every round counted once, and each brought a model.
    assert account.done == ROUNDS and account.state == "finished"
    counted = [r for r in account.rounds if r.abandoned is None]
    assert [r.round for r in counted] == list(range(ROUNDS)) and all(r.sound for r in counted)
    record = read_journal(journal)
    assert sorted(record.metrics()) == list(range(ROUNDS))
    assert all("accuracy" in numbers for numbers in record.metrics().values())
    # A5: the schedule went on over rounds, tries and the restart: one halving for each round that counted.
    assert min(seen_lr) == 1024.0 / 2**ROUNDS
    # A6: new facts reached the table.
    table, _ = record.table()
    assert table.sizes[table.index("client-1")] == 77 if "sizes" in table.signals else True
    record.close()
    # B: who does not meet the rules is never in a cohort; participation is proved.
    assert "client-4" not in {name for r in account.rounds for name in r.clients} and "client-4" in account.never
    assert verify(journal).holds
    # The one that hangs in a question is not asked again until its message has expired; nobody waits for it.
    asked = [m for m in fleet.grid.log if m.metadata.dst_node_id == fleet.grid.node_of("client-8")]
    assert len([m for m in asked if m.metadata.message_type == LOSSES]) <= ROUNDS // 3

"""Federations in which everything goes wrong at once, and the runs complete.

Hostile replies of every kind, a stolen name, shadows that break or lack their signals, a client that hangs in
questions, one that is always late, one that fails, evaluation weights of 0, a node that dies and one that comes back,
facts that change, a server that is killed in the middle of a round and in an evaluation, a strategy with a schedule;
and under a privacy wrapper gradients that are too long, errors among the replies, clients with noise of their own.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Private
from flwr.serverapp.strategy import FedAvg

from fedcohort.audit.participation import prove_participation
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower import Answers, Facts, cohort_client, failures
from fedcohort.hosts.flower.wire import LOSSES
from fedcohort.journal import read_journal
from fedcohort.report.account import read_account
from fedcohort.selectors import PowerOfChoice, Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules

ROUNDS = 12


class PowerCutError(Exception):
    """The server was killed."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(PowerOfChoice):
    """A shadow that needs losses, which nobody requests."""

    def query(self, state: Any, slate: Any, rng: Any) -> Any:
        asked = super().query(state, slate, rng)
        return dataclasses.replace(asked, signals=frozenset({Signal.VALIDATION_LOSS}))


def npy(shape: str) -> bytes:
    """The bytes of three numbers under a header that claims another shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, bias=np.zeros(3, np.float32))
    return file.getvalue()


def raw(data: bytes) -> Array:
    return Array("float32", (3,), "numpy.ndarray", data)


HOSTILE: list[Callable[[], Array]] = [
    lambda: Array(np.array(["a", "b", "c"])),
    lambda: Array(np.array([b"a", b"b", b"c"])),
    lambda: Array(np.zeros(3, "M8[s]")),
    lambda: Array(np.zeros(3, [("a", "f4")])),
    lambda: Array(np.zeros(3, np.complex64)),
    lambda: Array(np.zeros(3, np.longdouble)),
    lambda: Array(np.array([np.nan, 0, 0], np.float32)),
    lambda: raw(archive()),
    lambda: raw(npy("(2000000000000,)")),  # 8 TB
    lambda: raw(b"\x93NUMPY\x01\x00\x90\x01" + b"(" * 400),
    lambda: Array(np.zeros((3, 3), np.float32)),
]


class Hostile:
    """Sends a different one of the replies that once ended runs, each time it trains."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.sent = 0

    def __call__(self, message: Any, context: Any) -> RecordDict:
        content = self.kit.step(message, context)
        turn = self.sent % (len(HOSTILE) + 1)
        self.sent += 1
        if turn < len(HOSTILE):
            content["arrays"]["bias"] = HOSTILE[turn]()
        else:
            content["metrics"]["train-loss"] = [1.0]
        return content


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


def federation(kit: Any, sizes: dict[int, int], spoiler: Hostile) -> Any:
    """Twelve clients: 0 to 4 honest, hostile, failing, late, hanging, weightless, hostile; and a thief of a name."""
    fleet = kit.Fleet()

    def facts(context: Any) -> Facts:
        number = int(context.node_config["partition-id"])
        return Facts(size=sizes.get(number, 10), attributes={"battery": 20 if number == 4 else 80})

    answers = dataclasses.replace(kit.ANSWERS, facts=facts)
    bad = kit.client_app(spoiler)
    apps = {5: bad, 10: bad, 11: bad, 6: kit.client_app(failing), 9: weightless(kit)}
    for number in range(12):
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
    spoiler = Hostile(kit)
    journal = tmp_path / "run.sqlite"
    seen_lr: list[float] = []
    shadowing = {"breaks": Breaking(), "blind": Asking(), "other": Uniform()}

    def start(fleet: Any, evaluate: Any = None) -> Any:
        fleet.grid.hooks.append(
            lambda m: seen_lr.append(float(m.content["config"]["lr"])) if m.metadata.message_type == "train" else None
        )
        strategy = fleet.strategy(
            PowerOfChoice(), Halving(fraction_evaluate=0.5), cohort_size=4, spares=2, deadline=20.0, query_deadline=5.0,
            journal=journal, seed=3, wait_for=4, tries=4, describe_every=30.0, json_log=tmp_path / "run.jsonl",
            shadows=shadowing,
            rules=Rules(eligible="battery >= 30", max_participations=30, failures=2, cool_off=2),
        )  # fmt: skip
        config = ConfigRecord({"lr": 4096.0})
        return strategy.start(fleet.grid, kit.model(counter=False), ROUNDS, train_config=config, evaluate_fn=evaluate)

    def accuracy(server_round: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"accuracy": server_round / 100})

    def cut_in_evaluation(server_round: int, arrays: Any) -> MetricRecord:
        if server_round == 5:
            raise PowerCutError
        return accuracy(server_round, arrays)

    def cut_in_training(message: Message) -> None:
        if message.metadata.message_type == "train" and message.content["config"]["server-round"] == 8:
            raise PowerCutError

    fleet = federation(kit, sizes, spoiler)
    gone = fleet.grid.node_of("client-3")
    fleet.clock.at.append((30.0, lambda: fleet.grid.remove(gone)))
    with pytest.raises(PowerCutError):
        start(fleet, cut_in_evaluation)
    record = read_journal(journal)
    table, _ = record.table()
    assert table.sizes[table.index("client-1")] == 10
    record.close()
    sizes[1] = 77  # facts change while the server is away
    fleet = federation(kit, sizes, spoiler)
    fleet.grid.hooks.append(cut_in_training)
    with pytest.raises(PowerCutError):
        start(fleet, accuracy)
    with Session.open(journal, shadows=shadowing) as session:  # the operator abandons pending cohorts
        (stuck,) = session.pending
        assert stuck.round == 7
        session.abandon(stuck.ticket, "by the operator")
        assert not session.pending
    fleet = federation(kit, sizes, spoiler)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        result = start(fleet, accuracy)
        assert start(fleet).arrays["bias"].numpy()[0] == result.arrays["bias"].numpy()[0]
    assert "the run is finished" in caplog.text  # the fourth start said so at once

    # A1: the model is valid and of its own type; whoever sent rubbish is INVALID with a reason; all of it was sent.
    for key, array in result.arrays.items():
        values = array.numpy()
        assert values.dtype == kit.model(counter=False)[key].numpy().dtype and np.isfinite(values).all()
    found = failures(journal)
    by_client = {name: [f for f in found if f.client == name] for name in {f.client for f in found}}
    assert spoiler.sent > len(HOSTILE)
    told = {n: [f for f in by_client[n] if f.status not in (Status.MISSING, Status.LATE)] for n in by_client}
    for name in ("client-5", "client-10", "client-11"):
        assert {f.status for f in told[name]} == {Status.INVALID}
    assert all(f.reason for f in found)
    assert told["client-6"] and all("out of memory" in f.reason for f in told["client-6"])
    # A2: nobody trained under a name that is registered to another.
    assert 66 not in {node for node, _ in fleet.trained()}
    assert "it calls itself 'client-0', the name of a registered node" in caplog.text
    # A3: the broken shadow was dropped, the others went on; what lacked its signals said so and named nobody.
    account = read_account(journal)
    shadows = {shadow.name: shadow for shadow in account.shadows}
    assert "broken in update" in str(shadows["breaks"].dropped) and shadows["other"].rounds >= ROUNDS
    blind = shadows["blind"]
    assert blind.rounds == 0 and blind.silent >= ROUNDS and blind.dropped is None
    assert blind.note.startswith("lacked its signals") and "validation-loss" in blind.note
    # A4 and A6: every round counted once, and each brought a model; what was given up was drawn anew.
    assert account.done == ROUNDS and account.state == "finished"
    counted = [r for r in account.rounds if r.abandoned is None]
    assert [r.round for r in counted] == list(range(ROUNDS)) and all(r.valid for r in counted)
    assert [r.round for r in account.rounds if r.abandoned == "by the operator"] == [7]
    assert stuck.ticket not in {r.ticket for r in counted}
    record = read_journal(journal)
    assert sorted(record.metrics()) == list(range(ROUNDS))
    assert all("accuracy" in numbers for numbers in record.metrics().values())
    # A5: the schedule went on over rounds, tries and restarts: one halving for each round that counted.
    assert min(seen_lr) == 4096.0 / 2**ROUNDS
    # A6: new facts reached the table the selector chooses by.
    table, _ = record.table()
    assert Signal.SIZES in table.signals and table.sizes[table.index("client-1")] == 77
    assert [table.index("client-1")] in [body["clients"] for body in record.events("facts")]
    record.close()
    # B: who does not meet the rules is never in a cohort; participation is proved.
    assert "client-4" not in {name for r in account.rounds for name in r.clients} and "client-4" in account.never
    assert prove_participation(journal).holds
    # The one that hangs in a question is not asked again until its message has expired; nobody waits for it.
    asked = [m for m in fleet.grid.log if m.metadata.dst_node_id == fleet.grid.node_of("client-8")]
    assert len([m for m in asked if m.metadata.message_type == LOSSES]) <= ROUNDS // 3


def test_under_privacy_no_release_is_short_of_a_client(kit: Any, tmp_path: Path, caplog: Any) -> None:
    """Gradients one entry too long, errors and noise of a client's own, under FedACS and a privacy wrapper."""
    journal = tmp_path / "run.sqlite"
    fleet = kit.Fleet()
    longer = dataclasses.replace(kit.ANSWERS, gradient=lambda arrays, context: np.zeros(10))
    noised = kit.client_app(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])
    with pytest.raises(ParameterError, match="LocalDpMod"):
        cohort_client(noised, kit.ANSWERS)  # exact losses and gradients never leave beside a noised model
    secretive = cohort_client(noised, Answers(facts=lambda context: Facts(size=3, label_counts=[1, 2])))
    apps = {
        0: cohort_client(kit.client_app(), longer),
        1: cohort_client(kit.client_app(failing), kit.ANSWERS),
        2: secretive,
    }
    for number in range(8):
        fleet.grid.add(fleet.node(number, apps.get(number)))

    inner = Private(FedAvg(fraction_evaluate=0.0), 0.1, 10.0, 3)
    rules = Rules(failures=1, cool_off=3)  # who fails lets the others finish the round
    strategy = fleet.strategy("fedacs", inner, cohort_size=3, journal=journal, seed=2, wait_for=5, rules=rules)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=ROUNDS)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    account = read_account(journal)
    assert account.done == ROUNDS and account.state == "finished"
    counted = [r for r in account.rounds if r.abandoned is None]
    # Noise was made for three: what counted is a mean of three, what was short of one was tried again.
    assert all(r.valid == 3 and not r.failures for r in counted)
    reasons = {f.client: f.reason for f in failures(journal)}
    assert set(reasons) == {"client-0", "client-1"} and "out of memory" in reasons["client-1"]
    assert reasons["client-0"] == "its gradient has 10 entries, more than the model's 9"
    assert any(r.abandoned for r in account.rounds)
    # The one whose exact labels would leave beside its noised model said nothing and took no part.
    assert "client-2" not in {client.name for client in account.clients}
    assert "is left out for now" in caplog.text and "exact label counts" in caplog.text

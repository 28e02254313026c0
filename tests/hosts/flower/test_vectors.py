"""Signals that are vectors, and the loss that Oort needs, over an in-process federation into the journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import SignalError
from fedcohort.core.protocol import Cohort, Outcome, Selector, Slate, Status, per_client
from fedcohort.core.signals import Signal, VectorOf
from fedcohort.core.vectors import vector_signal
from fedcohort.hosts.flower import cohort_client
from fedcohort.hosts.flower.client import torch_answers
from fedcohort.journal import read_journal
from fedcohort.selectors import Uniform
from fedcohort.session import Session

BROKEN = 2


@dataclass(frozen=True)
class Heard:
    bias: FloatArray = per_client()
    sketch: FloatArray = per_client()
    rms: FloatArray = per_client()


@dataclass(frozen=True, kw_only=True)
class Listening(Selector[Heard]):
    """Picks everybody and remembers its reports."""

    name = "listening"

    @property
    def requires(self) -> frozenset[Signal]:
        return frozenset({Signal.OUTPUT_BIAS_UPDATE, Signal.UPDATE_SKETCH, Signal.LOSS_RMS})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Heard:
        return Heard(np.zeros((clients.n, 3)), np.zeros((clients.n, 64)), np.zeros(clients.n))

    def select(self, state: Heard, slate: Slate, answer: Any, rng: Any) -> tuple[Cohort, Heard]:
        return Cohort(slate.candidates), state

    def update(self, state: Heard, outcome: Outcome) -> Heard:
        order = np.argsort(outcome.clients)
        return Heard(
            outcome[Signal.OUTPUT_BIAS_UPDATE][order],
            outcome[Signal.UPDATE_SKETCH][order],
            outcome[Signal.LOSS_RMS][order],
        )


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    return torch.randn(9, 4, generator=draw), torch.randint(0, 3, (9,), generator=draw)


def move(message: Message, context: Context) -> RecordDict:
    """Add c to the weights and c (1, 2, 3) to the bias, c = 1 + the client's number; one client breaks."""
    c = 1.0 + int(context.node_config["partition-id"])
    arrays = {key: array.numpy() for key, array in message.content["arrays"].items()}
    moved = {"weight": arrays["weight"] + np.float32(c)}
    if "bias" in arrays:
        moved["bias"] = arrays["bias"] + np.float32(c if c != 1 + BROKEN else np.nan) * np.arange(
            1, 4, dtype=np.float32
        )
    metrics = MetricRecord({"num-examples": 9})
    return RecordDict({"arrays": ArrayRecord({k: Array(v) for k, v in moved.items()}), "metrics": metrics})


def populate(fleet: Any, kit: Any, bias: bool = True) -> ArrayRecord:
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 3, bias=bias)
    answers = torch_answers(lambda c: torch.nn.Linear(4, 3, bias=bias), data)
    for number in range(4):
        fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(move), answers)))
    return ArrayRecord(net.state_dict())


def test_vectors_reach_the_selector_and_the_journal(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    model = populate(empty_fleet, kit)
    strategy = empty_fleet.strategy(Listening(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    strategy.start(empty_fleet.grid, model, num_rounds=1)
    with Session.open(tmp_path / "j", Listening()) as session:
        heard = session.state
    c = np.arange(1.0, 5.0)
    c[BROKEN] = np.nan
    np.testing.assert_allclose(heard.bias, np.outer(c, [1, 2, 3]), rtol=1e-6)
    updates = np.hstack([np.repeat(c[:, None], 12, axis=1), np.outer(c, [1, 2, 3])])
    expected = vector_signal(VectorOf("update", "sketch"), updates, np.ones(4, np.bool_), None)
    np.testing.assert_allclose(heard.sketch, expected, rtol=1e-5, atol=1e-5)
    net = torch.nn.Linear(4, 3)
    net.load_state_dict(model.to_torch_state_dict())
    for number in (0, 1, 3):
        x, y = data(Context(1, 1, {"partition-id": number}, RecordDict(), {}, 1))
        losses = cross_entropy(net(x), y, reduction="none").detach().double()
        assert heard.rms[number] == pytest.approx(float((losses**2).mean()) ** 0.5, rel=1e-5)
    rows = {row.client: row for row in read_journal(tmp_path / "j").replies(0)}
    assert rows[BROKEN].status == Status.INVALID and rows[BROKEN].metrics.keys() <= {"duration", "loss-rms"}
    assert rows[3].metrics["output-bias-update"] == pytest.approx((4.0, 8.0, 12.0), rel=1e-6)
    assert len(rows[0].metrics["update-sketch"]) == 64
    # Clients are asked for and send only the loss.
    asked = [m.content["fedcohort"]["signals"] for m in empty_fleet.grid.log if m.metadata.message_type == "train"]
    assert asked == [["loss-rms", "output-bias-update", "update-sketch"]] * 4


def test_a_model_without_a_bias_is_refused_before_anybody_trains(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    model = populate(empty_fleet, kit, bias=False)
    strategy = empty_fleet.strategy(Listening(), FedAvg(fraction_evaluate=0.0))
    with pytest.raises(SignalError, match="output-bias-update"):
        strategy.start(empty_fleet.grid, model, num_rounds=1)
    assert not empty_fleet.trained()
    # A shadow that needs it does without, and costs nothing.
    shadowed = empty_fleet.strategy(
        Uniform(), FedAvg(fraction_evaluate=0.0), shadows={"listening": Listening()}, journal=tmp_path / "j"
    )
    shadowed.start(empty_fleet.grid, model, num_rounds=1)
    with Session.open(tmp_path / "j", Uniform(), shadows={"listening": Listening()}) as session:
        reply = session.journal.replies(0)[0]
    assert "update-sketch" in reply.metrics and "output-bias-update" not in reply.metrics

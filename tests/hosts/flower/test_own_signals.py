"""Signals that a user's file declares, over an in-process federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy

from fedcohort.cli.flower import app_files
from fedcohort.core.errors import InputError, ParameterError, SignalError
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower import Answers, cohort_client, torch_answers
from fedcohort.journal import read_journal
from fedcohort.session import Session
from tests.hosts import own_signals as own


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    return torch.randn(9, 4, generator=draw), torch.randint(0, 3, (9,), generator=draw)


def move(message: Message, context: Context) -> RecordDict:
    """Add 1 + the client's number to all entries."""
    step = np.float32(1 + int(context.node_config["partition-id"]))
    moved = {key: Array(array.numpy() + step) for key, array in message.content["arrays"].items()}
    return RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 9})})


def rms(model: ArrayRecord, number: int, added: float = 0.0) -> float:
    net = torch.nn.Linear(4, 3)
    net.load_state_dict({key: value + added for key, value in model.to_torch_state_dict().items()})
    x, y = data(Context(1, 1, {"partition-id": number}, RecordDict(), {}, 1))
    return float((cross_entropy(net(x), y, reduction="none").detach().double() ** 2).mean() ** 0.5)


def test_signals_beside_a_selector_are_measured_by_torch_clients_and_the_server(
    empty_fleet: Any, kit: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = ArrayRecord(torch.nn.Linear(4, 3).state_dict())
    answers = torch_answers(lambda context: torch.nn.Linear(4, 3), data)
    for number in range(4):
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(move), answers)))
    strategy = empty_fleet.strategy(
        own.Curious(), FedAvg(fraction_train=0.5, fraction_evaluate=0.0), journal=tmp_path / "j"
    )
    strategy.start(empty_fleet.grid, model, num_rounds=1)
    journal = read_journal(tmp_path / "j")
    replies = {reply.client: reply.metrics for reply in journal.replies(0)}
    journal.close()
    before = {number: rms(model, number) for number in range(4)}
    assert sorted(replies) == sorted(sorted(before, key=before.__getitem__)[2:]), "the largest answers"
    for number, values in replies.items():
        assert values["large-loss"] == pytest.approx(before[number], rel=1e-5)
        assert values["large-loss-after"] == pytest.approx(rms(model, number, 1.0 + number), rel=1e-5)
        assert values["step"] == pytest.approx((1 + number) * 15**0.5, rel=1e-5)
        assert values["slope"] > 0


def gentle_answers(context: Any = None, **kwargs: Any) -> Answers:
    def used(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> float:
        return float(arrays["bias"].numpy()[0] - received["bias"].numpy()[0])

    def sensors(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> list[float]:
        return [20.0, float(context.node_config["partition-id"])]

    return Answers(reports={"battery-used": used, own.SENSORS: sensors}, **kwargs)


def test_a_client_reports_by_name_what_only_it_knows(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(3):
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(), gentle_answers())))
    strategy = empty_fleet.strategy(own.Gentle(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    strategy.start(empty_fleet.grid, kit.model(), num_rounds=1)
    with Session.open(tmp_path / "j", own.Gentle()) as session:
        np.testing.assert_allclose(session.state.last, [[1, 20, 0], [2, 20, 1], [3, 20, 2]])


def test_clients_that_cannot_report_it_are_named_with_the_signal(empty_fleet: Any, kit: Any) -> None:
    empty_fleet.fill(2)
    strategy = empty_fleet.strategy(own.Gentle(), FedAvg(fraction_evaluate=0.0), patience=5.0)
    with pytest.raises(SignalError, match="battery-used") as caught:
        strategy.start(empty_fleet.grid, kit.model(), num_rounds=1)
    assert "fc.flower.cohort_client" in caught.value.hint and not empty_fleet.trained()


def test_a_report_of_a_signal_that_is_measured_elsewhere_is_refused() -> None:
    for signal in (Signal.LOSS, own.STEP, Signal.DURATION, Signal.SIZES):
        with pytest.raises(InputError, match=f"reports.*'{signal}'"):
            Answers(reports={signal: lambda *arguments: 1.0})
    with pytest.raises(InputError, match="'battery-usde'"):
        Answers(reports={"battery-usde": lambda *arguments: 1.0})
    with pytest.raises(InputError, match="function"):
        Answers(reports={"battery-used": 3.0})


def test_a_new_app_tells_its_clients_about_the_signals_of_the_selectors_file() -> None:
    client = app_files("my-app", f"{own.__file__}:Curious")["my_app/client_app.py"]
    assert "\nimport my_app.own_signals_selector  # noqa" in client
    assert client.index("own_signals_selector") < client.index("torch_answers")
    compile(client, "client_app.py", "exec")
    assert "noqa" not in app_files("my-app", "fedcor")["my_app/client_app.py"]


def test_an_exact_report_is_refused_beside_local_noise(kit: Any) -> None:
    from flwr.clientapp.mod import LocalDpMod

    with pytest.raises(ParameterError, match="private"):
        torch_answers(lambda context: None, data, private=object(), reports={"battery-used": lambda *arguments: 1.0})
    with pytest.raises(ParameterError, match="exact reports"):
        cohort_client(kit.client_app(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)]), gentle_answers())
    assert cohort_client(kit.client_app(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)]), gentle_answers(noised=True))

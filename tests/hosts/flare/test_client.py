"""The site's side: questions are answered, models are trained, and numbers travel beside them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch.nn.functional import cross_entropy

from fedcohort.core.errors import InputError
from fedcohort.core.signals import LossMeasure, LossOf, Signal
from fedcohort.hosts.flare import Answers, CohortClient, Facts, client, seed_of, torch_answers, work_of
from fedcohort.hosts.flare.wire import DESCRIBE, LOSSES
from fedcohort.hosts.wire import RECORD, SEED, WORK, Description, question, read_gradient, read_report


class Api:
    """FLARE's Client API with tasks of a test's own."""

    def __init__(self, *tasks: tuple[str, FLModel]) -> None:
        self.tasks, self.sent, self.task = deque(tasks), [], ""

    def receive(self, timeout: float | None = None) -> FLModel | None:
        if not self.tasks:
            return None
        self.task, model = self.tasks.popleft()
        return model

    def send(self, model: FLModel) -> None:
        self.sent.append(model)

    def get_task_name(self) -> str:
        return self.task

    def is_running(self) -> bool:
        return bool(self.tasks)


def asked(*signals: Signal, **more: Any) -> FLModel:
    return FLModel(params={"w": np.array([2.0, 4.0])}, meta={RECORD: {**question(signals), **more}})


def losses(params: Any, received: Any) -> dict[str, float]:
    return {"loss": float(np.mean(params["w"]))}


def play(monkeypatch: pytest.MonkeyPatch, answers: Answers | None, *tasks: tuple[str, FLModel]) -> Api:
    api = Api(*tasks)
    monkeypatch.setattr(client, "flare", api)
    site = CohortClient(answers)
    for model in site:
        model.params["w"] -= 1.0  # training in place
        site.send(FLModel(params=model.params, meta={"NUM_STEPS_CURRENT_ROUND": 5}))
    return api


def test_questions_in_between_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(lambda: Facts(7, [3, 4], attributes={"region": "north"}), losses)
    api = play(
        monkeypatch,
        answers,
        (DESCRIBE, FLModel(params={})),
        (LOSSES, asked(Signal.LOSS)),
        ("train", asked(Signal.LOSS, Signal.LOSS_AFTER)),
        (LOSSES, asked(Signal.LOSS)),
    )
    described, before, trained, last = api.sent
    found = Description.from_record(described.meta[RECORD])
    assert (found.size, found.label_counts, found.attributes) == (7, (3, 4), {"region": "north"})
    assert {Signal.LOSS, Signal.LOSS_AFTER, Signal.LOSS_QUERY} <= found.signals
    assert read_report(before.meta[RECORD])[Signal.LOSS] == read_report(last.meta[RECORD])[Signal.LOSS] == 3.0
    values = read_report(trained.meta[RECORD])
    assert (values[Signal.LOSS], values[Signal.LOSS_AFTER]) == (3.0, 2.0), "of the received and of the trained model"
    assert trained.meta["NUM_STEPS_CURRENT_ROUND"] == 5


def test_a_difference_is_added_to_what_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(("train", asked(Signal.LOSS_AFTER)))
    monkeypatch.setattr(client, "flare", api)
    site = CohortClient(Answers(losses=losses))
    assert site.receive() is not None
    site.send(FLModel(params_type=ParamsType.DIFF, params={"w": np.array([-1.0, -1.0])}))
    assert read_report(api.sent[0].meta[RECORD])[Signal.LOSS_AFTER] == 2.0


def test_without_answers_a_site_trains_and_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    api = play(monkeypatch, None, (DESCRIBE, FLModel(params={})), ("train", asked()))
    assert Description.from_record(api.sent[0].meta[RECORD]).size is None
    assert len(api.sent) == 2 and not read_report(api.sent[1].meta[RECORD])


def test_what_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="validation-loss"):
        play(monkeypatch, Answers(losses=losses), (LOSSES, asked(Signal.VALIDATION_LOSS)))
    with pytest.raises(InputError, match="lacks 'loss'"):
        play(monkeypatch, Answers(losses=lambda params, received: {}), (LOSSES, asked(Signal.LOSS)))


def test_seed_and_work_of_a_round() -> None:
    model = asked(**{SEED: 11, WORK: {"site-1": 0.5}})
    assert (seed_of(model), work_of(model, "site-1"), work_of(model, "site-2")) == (11, 0.5, None)
    assert (seed_of(FLModel(params={})), work_of(FLModel(params={}), "site-1")) == (0, None)


def test_torch_answers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    net = torch.nn.Linear(4, 3)
    state = {key: value.detach().numpy().copy() for key, value in net.state_dict().items()}
    answers = torch_answers(lambda: torch.nn.Linear(4, 3), lambda: (x, y), classes=3)
    gradient = next(signal for signal in answers.supplied if signal.name == "gradient-norm")
    model = FLModel(params=state, meta={RECORD: question([Signal.LOSS, gradient])})
    api = Api((DESCRIBE, FLModel(params={})), ("train", model))
    monkeypatch.setattr(client, "flare", api)
    site = CohortClient(answers)
    for received in site:
        site.send(FLModel(params=received.params))
    facts, trained = api.sent
    assert Description.from_record(facts.meta[RECORD]).label_counts == tuple(torch.bincount(y, minlength=3).tolist())
    loss = cross_entropy(net(x), y)
    loss.backward()
    expected = np.concatenate([parameter.grad.numpy().ravel() for parameter in net.parameters()])
    found = read_gradient(trained.meta[RECORD])
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert read_report(trained.meta[RECORD])[Signal.LOSS] == pytest.approx(loss.item(), rel=1e-5)


def test_a_site_reports_signals_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = LossMeasure(loss="pseudo", mean="root-mean-square")
    squares = Signal("site-squares", meaning="a loss of its own", how=LossOf(measure))
    after = Signal("site-squares-after", meaning="the same after training", how=LossOf(measure, "own"))
    heat = Signal("site-heat", meaning="degrees, which only the site knows")
    answers = Answers(
        losses=lambda params, received: {"site-squares": float(np.sum(params["w"] ** 2))},
        signals=frozenset({squares}),
        reports={"site-heat": lambda params, received: float(received["w"][0] - params["w"][0])},
    )
    assert {squares, after, heat, Signal.LOSS_QUERY} <= answers.supplied and Signal.LOSS not in answers.supplied
    train = ("train", asked(squares, after, heat))
    api = play(monkeypatch, answers, (DESCRIBE, FLModel(params={})), (LOSSES, asked(squares)), train)
    described, before, trained = api.sent
    assert {squares, after, heat} <= Description.from_record(described.meta[RECORD]).signals
    assert read_report(before.meta[RECORD]) == {squares: 20.0}
    assert read_report(trained.meta[RECORD]) == {squares: 20.0, after: 10.0, heat: 1.0}

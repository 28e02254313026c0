"""The client's side: its answers, and that nothing changes for servers that do not ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedcohort.core.errors import InputError
from fedcohort.core.signals import SIGNALS, Signal
from fedcohort.hosts.flower.client import Answers, Facts, client_name, cohort_client, torch_answers
from fedcohort.hosts.flower.wire import DESCRIBE, LOSSES
from fedcohort.hosts.wire import RECORD, Description, question, read_gradient, read_report, report
from fedcohort.training.local import LocalTraining


def context(**config: Any) -> Context:
    return Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={}, series_id=1)


@pytest.fixture(autouse=True)
def _identity(empty_fleet: Any) -> None:
    """Messages can be written outside Flower's processes."""


def ask(kind: str, *signals: Signal, arrays: ArrayRecord | None = None) -> Message:
    content = RecordDict({RECORD: ConfigRecord(question(signals))})
    if arrays is not None:
        content["arrays"] = arrays
        content["config"] = ConfigRecord({"server-round": 1})
    return Message(content, dst_node_id=5, message_type=kind)


def test_names() -> None:
    assert client_name(context(**{"client-name": "north", "partition-id": 3})) == "north"
    assert client_name(context(**{"client-name": 12})) == "12"
    assert client_name(context(**{"partition-id": 3})) == "partition-3"
    assert client_name(context()) == ""


def test_describe(kit: Any) -> None:
    reply = cohort_client(kit.client_app(), kit.ANSWERS)(ask(DESCRIBE), context(**{"partition-id": 3}))
    description = Description.from_record(reply.content[RECORD])
    # Other tests declare signals that come from gradients too.
    assert replace(description, signals=description.signals & frozenset(SIGNALS)) == Description(
        name="partition-3",
        size=40,
        label_counts=(3, 10),
        signals=frozenset(
            {
                Signal.LOSS,
                Signal.LOSS_AFTER,
                Signal.LOSS_QUERY,
                Signal.TRIAL_QUERY,
                Signal.GRADIENT_NORM,
                Signal.GRADIENT_DISTANCE,
                Signal.WEIGHTED_GRADIENT_DISTANCE,
            }
        ),
    )


def test_describe_with_sealed_labels(kit: Any) -> None:
    answers = Answers(facts=lambda c: Facts(size=3, sealed_labels=b"\x00cipher"))
    reply = cohort_client(kit.client_app(), answers)(ask(DESCRIBE), context())
    description = Description.from_record(reply.content[RECORD])
    assert description.sealed_labels == b"\x00cipher" and description.label_counts is None
    assert description.signals == frozenset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"name": 3}, "lacks 'name'"),
        ({"size": -1}, "'size'"),
        ({"label-counts": [1, -1]}, "'label-counts'"),
        ({"sealed-labels": "text"}, "'sealed-labels'"),
    ],
)
def test_a_malformed_description_is_refused(change: dict[str, Any], message: str) -> None:
    record = {**Description("a", 1).to_record(), **change}
    with pytest.raises(ValueError, match=message):
        Description.from_record(record)


def test_losses_and_reports(kit: Any) -> None:
    app = cohort_client(kit.client_app(), kit.ANSWERS)
    reply = app(ask(LOSSES, Signal.LOSS, arrays=kit.model(1.0)), context(**{"partition-id": 3}))
    assert read_report(reply.content[RECORD]) == {Signal.LOSS: 2.5}
    wanted = (Signal.LOSS, Signal.LOSS_AFTER, Signal.GRADIENT_DISTANCE, Signal.DURATION)
    reply = app(ask("train", *wanted, arrays=kit.model(1.0)), context(**{"partition-id": 3}))
    assert read_report(reply.content[RECORD]) == {Signal.LOSS: 2.5, Signal.LOSS_AFTER: 2.5}  # 1 and 5 are both 2 from 3
    np.testing.assert_array_equal(read_gradient(reply.content[RECORD]), np.full(9, 3.0))
    assert reply.content[RECORD]["train-seconds"] >= 0
    assert len(reply.content.array_records) == len(reply.content.metric_records) == 1


def test_nothing_changes_for_a_server_that_does_not_ask(kit: Any) -> None:
    plain = kit.client_app()
    content = RecordDict({"arrays": kit.model(), "config": ConfigRecord({"server-round": 1})})
    replies = [
        app(Message(content, dst_node_id=5, message_type="train"), context(**{"partition-id": 1})).content
        for app in (plain, cohort_client(plain, kit.ANSWERS))
    ]
    assert set(replies[0]) == set(replies[1]) == {"arrays", "metrics"}
    with pytest.raises(ValueError, match="No query function registered"):
        plain(ask(DESCRIBE), context())


def test_what_a_client_cannot_measure_is_an_error(kit: Any) -> None:
    app = cohort_client(kit.client_app(), kit.ANSWERS)
    with pytest.raises(InputError, match="validation-loss"):
        app(ask(LOSSES, Signal.VALIDATION_LOSS, arrays=kit.model()), context(**{"partition-id": 1}))
    with pytest.raises(InputError, match="exactly one model"):
        app(ask(LOSSES, Signal.LOSS), context(**{"partition-id": 1}))
    broken = cohort_client(kit.client_app(), Answers(losses=lambda a, c, r: {"lost": 1.0}))
    with pytest.raises(InputError, match="lacks 'loss'"):
        broken(ask(LOSSES, Signal.LOSS, arrays=kit.model()), context())
    with pytest.raises(InputError, match="DURATION"):
        Answers(signals=frozenset({Signal.DURATION}))


def test_torch_answers() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randint(0, 3, (30,))
    held = torch.randn(7, 4), torch.randint(0, 3, (7,))
    local = LocalTraining(steps=1)
    answers = torch_answers(
        model=lambda c: torch.nn.Linear(4, 3),
        data=lambda c: (x, y),
        classes=4,
        validation=lambda c: held,
        robust=local,
        batch_size=8,
    )
    assert answers.facts is not None and answers.losses is not None and answers.gradient is not None
    assert answers.facts(context()).size == 30
    assert list(answers.facts(context()).label_counts) == [*np.bincount(y, minlength=3), 0]
    net, received = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    arrays, before = ArrayRecord(net.state_dict()), ArrayRecord(received.state_dict())
    values = answers.losses(arrays, context(), before)
    pseudo = received(x).argmax(1)
    by_label, by_pseudo = (cross_entropy(net(x), z, reduction="none").detach() for z in (y, pseudo))
    expected = {
        "loss": by_label.mean(),
        "loss-rms": by_label.square().mean().sqrt(),
        "validation-loss": cross_entropy(net(held[0]), held[1]),
        "pseudo-loss": by_pseudo.mean(),
        "robust-loss": (by_label + by_pseudo + 4 * (1 - torch.exp(-by_label))).mean(),
    }
    assert set(values) >= set(expected)
    for key, value in expected.items():
        assert values[key] == pytest.approx(float(value), rel=1e-5)
    cross_entropy(net(x), y).backward()
    flat = torch.cat([p.grad.ravel() for p in net.parameters()]).numpy()
    np.testing.assert_allclose(answers.gradient(arrays, context()), flat, rtol=1e-4, atol=1e-6)
    private = torch_answers(lambda c: net, lambda c: (x, y), classes=3, share_labels=False)
    assert private.facts is not None and private.facts(context()).label_counts is None


def test_legacy_client_functions_are_left_alone(kit: Any) -> None:
    """An app built on client_fn cannot answer; for the roster, it is a client without fedcohort."""
    from flwr.client import NumPyClient

    class Legacy(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [p + 1 for p in parameters], 1, {}

    app = ClientApp(client_fn=lambda context: Legacy().to_client())
    with pytest.raises(ValueError, match="Invalid message type"):
        app(ask(DESCRIBE), context())
    reply = cohort_client(app)(ask(DESCRIBE), context(**{"client-name": "old"}))
    assert Description.from_record(reply.content[RECORD]).name == "old"


def test_vectors_travel_as_lists() -> None:
    row = np.arange(64) / 3
    record = ConfigRecord(report("a", {Signal.UPDATE_SKETCH: row, Signal.LOSS: 0.5}))
    assert record["update-sketch"] == row.tolist() and record["loss"] == 0.5
    assert read_report(record) == {Signal.LOSS: 0.5}  # a client cannot report what the server measures
    wide = Signal("own-vector", meaning="64 numbers that only the client knows", width=64)
    by_class = Signal("own-shares", meaning="one number per class", width="classes")
    record = ConfigRecord(report("a", {wide: row, by_class: np.array([1.0, 2.0])}))
    found = read_report(record)
    np.testing.assert_array_equal(found[wide], row)
    np.testing.assert_array_equal(found[by_class], [1.0, 2.0])
    for wrong in ([1.0] * 63, [float("nan")] * 64, 3.0, b"64", []):
        assert wide not in read_report({**record, "own-vector": wrong})


def test_reports_skip_what_is_no_finite_number() -> None:
    record = ConfigRecord({"loss": float("nan"), "loss-after": 1.0, "name": "x", "odd": 2.0, "gradient": b"abc"})
    assert read_report(record) == {Signal.LOSS_AFTER: 1.0}
    assert read_gradient(record) is None
    assert read_report(None) == {}
    assert MetricRecord({"a": 1.0})  # a metric record stays what it is: averaged by the strategy


def test_data_may_come_as_dataloaders(kit: Any) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from fedcohort.hosts.flower import torch_answers

    x, y = torch.randn(10, 4), torch.arange(10) % 3
    net = torch.nn.Linear(4, 3)
    pairs = DataLoader(TensorDataset(x, y), batch_size=4)
    tables = DataLoader([{"img": a, "label": b} for a, b in zip(x, y, strict=True)], batch_size=3)
    arrays = kit.model().__class__(net.state_dict())
    found = []
    for data in ((x, y), pairs, (pairs, "test set"), (tables, tables), tables):
        answers = torch_answers(lambda context: torch.nn.Linear(4, 3), lambda context, data=data: data, classes=3)
        assert answers.facts is not None and answers.losses is not None and answers.gradient is not None
        facts = answers.facts(None)  # type: ignore[arg-type]
        assert facts.size == 10 and list(facts.label_counts) == [4, 3, 3]
        gradient = answers.gradient(arrays, None)  # type: ignore[arg-type]
        found.append((answers.losses(arrays, None, arrays)["loss"], gradient))  # type: ignore[arg-type]
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        np.testing.assert_allclose(gradient, found[0][1], rtol=1e-5, atol=1e-7)


def test_tensors_of_a_graph_are_taken_out_of_it(kit: Any) -> None:
    """Data, gradients and a server's logits may be tensors that require gradients, as a GPU app's are."""
    x = torch.randn(20, 4, requires_grad=True)
    y = torch.randint(0, 3, (20,))
    answers = torch_answers(lambda c: torch.nn.Linear(4, 3), lambda c: (x, y), classes=3, robust=LocalTraining(steps=1))
    assert answers.losses is not None and answers.facts is not None and answers.gradient is not None
    arrays = ArrayRecord(torch.nn.Linear(4, 3).state_dict())
    assert all(np.isfinite(v) for v in answers.losses(arrays, context(), arrays).values())
    assert answers.facts(context()).size == 20 and answers.gradient(arrays, context()).shape == (15,)
    app = cohort_client(kit.client_app(), Answers(gradient=lambda a, c: 2 * torch.ones(9, requires_grad=True)))
    reply = app(ask("train", Signal.GRADIENT_DISTANCE, arrays=kit.model()), context(**{"partition-id": 1}))
    np.testing.assert_array_equal(read_gradient(reply.content[RECORD]), np.full(9, 2.0))


@pytest.mark.gpu
def test_models_and_data_on_a_gpu() -> None:
    x, y = torch.randn(50, 4), torch.randint(0, 3, (50,))
    nets = {device: torch.nn.Linear(4, 3).to(device) for device in ("cpu", "cuda")}
    nets["cuda"].load_state_dict(nets["cpu"].state_dict())
    arrays = ArrayRecord(nets["cpu"].state_dict())
    told = {}
    for device in ("cpu", "cuda"):
        answers = torch_answers(
            lambda c, device=device: torch.nn.Linear(4, 3).to(device),  # type: ignore[misc]
            lambda c, device=device: (x.to(device), y.to(device)),  # type: ignore[misc]
            classes=3, robust=LocalTraining(steps=1), batch_size=16,
        )  # fmt: skip
        assert answers.losses is not None and answers.facts is not None and answers.gradient is not None
        told[device] = answers.losses(arrays, context(), arrays)
        np.testing.assert_allclose(answers.gradient(arrays, context()), np.zeros(15), atol=10)
        assert list(answers.facts(context()).label_counts) == np.bincount(y, minlength=3).tolist()
    assert told["cuda"] == pytest.approx(told["cpu"], rel=1e-4)

"""Running statistics of normalisation layers under Flower's strategies: averaged by weight and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedMedian, FedYogi, Krum

from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower import AsyncCohortStrategy, cohort_client
from fedcohort.hosts.flower.replies import CheckedMessage, measures_of
from fedcohort.hosts.measures import flat
from fedcohort.selectors import All

STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
CLIENTS = 4


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


class Training:
    """Clients whose samples are the more spread the higher their number; remembers what each one sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, dict[str, np.ndarray]]] = []  # weight and arrays

    def __call__(self, message: Any, context: Any) -> RecordDict:
        number = int(context.node_config["partition-id"])
        net = module()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        draw = torch.Generator().manual_seed(int(message.content["config"]["fedcohort.seed"]) % 2**31 + number)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(1 + 4 * number):
            optimizer.zero_grad()
            net((1 + 3 * number) * torch.randn(8, 3, generator=draw)).square().mean().backward()
            optimizer.step()
        weight = 10 * (1 + number)
        self.sent.append((weight, {key: value.numpy().copy() for key, value in net.state_dict().items()}))
        arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": weight})
        return RecordDict({"arrays": arrays, "metrics": metrics})


def fleet_of(kit: Any, training: Training) -> Any:
    fleet = kit.Fleet()
    for number in range(CLIENTS):
        node = fleet.node(number, cohort_client(kit.client_app(training), kit.ANSWERS))
        node.latency = 1.0 + 3.0 * (number % 2)  # in a flow, half of the answers are stale
        fleet.grid.add(node)
    return fleet


def played(kit: Any, strategy: Any, rounds: int, fleet: Any) -> list[dict[str, np.ndarray]]:
    """Return the models before the first round and after each one."""
    models: list[dict[str, np.ndarray]] = []

    def keep(_: int, arrays: ArrayRecord) -> MetricRecord:
        models.append({key: array.numpy().copy() for key, array in arrays.items()})
        return MetricRecord({"loss": 0.0})

    strategy.start(fleet.grid, ArrayRecord(module().state_dict()), rounds, evaluate_fn=keep)
    return models


@pytest.mark.parametrize("make", [FedAdam, FedYogi, FedAdagrad, FedAvgM])
def test_an_optimiser_moves_parameters_and_averages_statistics(make: Any, kit: Any) -> None:
    training = Training()
    fleet = fleet_of(kit, training)
    options = {"server_learning_rate": 1.0, "server_momentum": 0.9} if make is FedAvgM else {}
    models = played(kit, fleet.strategy(All(), make(fraction_evaluate=0.0, **options)), 6, fleet)
    assert len(training.sent) == 6 * CLIENTS and len(models) == 7
    for number, model in enumerate(models[1:]):
        replies = training.sent[number * CLIENTS : (number + 1) * CLIENTS]
        total = sum(weight for weight, _ in replies)
        for key in STATISTICS:
            mean = sum(weight * arrays[key].astype(np.float64) for weight, arrays in replies) / total
            expected = np.rint(mean) if model[key].dtype.kind == "i" else mean
            np.testing.assert_allclose(model[key], expected, rtol=1e-5, err_msg=key)
        mean = sum(weight * arrays["0.weight"].astype(np.float64) for weight, arrays in replies) / total
        assert number == 0 or not np.allclose(model["0.weight"], mean, rtol=1e-3)


@pytest.mark.parametrize("make", [FedMedian, Krum])
def test_robust_strategies_decide_about_statistics_too(make: Any, kit: Any) -> None:
    training = Training()

    def lying(message: Any, context: Any) -> RecordDict:
        reply = training(message, context)
        if int(context.node_config["partition-id"]) == 1:
            arrays = reply["arrays"]
            reply["arrays"] = ArrayRecord({**arrays, "1.running_var": Array(np.full(4, 1e20, np.float32))})
        return reply

    fleet = fleet_of(kit, lying)  # type: ignore[arg-type]
    options = {"num_malicious_nodes": 1} if make is Krum else {}
    models = played(kit, fleet.strategy(All(), make(fraction_evaluate=0.0, **options)), 2, fleet)
    assert models[-1]["1.running_var"].max() < 1e6


@pytest.mark.parametrize("aggregator", ["fedbuff", "fedasync", "fedavg-stale"])
@pytest.mark.parametrize("make", [FedAvg, FedAdam])
def test_a_stale_answer_brings_its_own_statistics(make: Any, aggregator: str, kit: Any) -> None:
    training = Training()
    fleet = fleet_of(kit, training)
    strategy = AsyncCohortStrategy(
        "uniform", make(fraction_evaluate=0.0), busy=4, buffer=2, aggregator=aggregator, seed=3
    )
    strategy.clock, strategy.sleep = fleet.clock, fleet.clock.sleep
    models = played(kit, strategy, 12, fleet)
    for before, after in itertools.pairwise(models):
        for key in STATISTICS[:2]:
            known = np.array([before[key], *(arrays[key] for _, arrays in training.sent)])
            assert (after[key] >= known.min(0) - 1e-5).all() and (after[key] <= known.max(0) * (1 + 1e-5)).all()
        assert (after["1.running_var"] >= 0).all()


def test_a_moved_update_mixes_statistics_and_adds_the_rest() -> None:
    def model(weight: float, mean: float, count: int) -> ArrayRecord:
        arrays = {"w": np.array([weight]), "norm.running_mean": np.array([mean]), "norm.num_batches_tracked": count}
        return ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})

    def reply() -> CheckedMessage:
        arrays, metrics = model(3.0, 4.0, 7), MetricRecord({"num-examples": 1})
        message = type("Message", (), {"content": RecordDict({"arrays": arrays, "metrics": metrics})})()
        return CheckedMessage("anna", Status.OK, "", message, arrays, metrics, ("arrays", "metrics"))

    sent, onto = model(1.0, 0.0, 2), model(10.0, 2.0, 5)
    for factor, mean in ((1.0, 4.0), (0.5, 3.0), (2.0, 4.0)):
        moved = reply().moved(sent, onto, factor).arrays
        assert moved["w"].numpy().tolist() == [10.0 + factor * 2.0]
        assert moved["norm.running_mean"].numpy().tolist() == [mean]
        assert int(moved["norm.num_batches_tracked"].numpy()) == 7


def test_updates_are_compared_without_statistics() -> None:
    state = {key: value.numpy() for key, value in module().state_dict().items()}
    parameters = sum(value.numel() for value in module().parameters())
    assert len(flat(state)) == parameters

    def reply(shift: float) -> CheckedMessage:
        moved = {
            key: np.asarray(value + np.asarray(shift if key in STATISTICS else 0.5, value.dtype))
            for key, value in state.items()
        }
        arrays, metrics = ArrayRecord({k: Array(v) for k, v in moved.items()}), MetricRecord({"num-examples": 1})
        return CheckedMessage("anna", Status.OK, "", None, arrays, metrics, ("arrays", "metrics"), weight=1.0)

    measures = measures_of(ArrayRecord({k: Array(v) for k, v in state.items()}), [reply(0.0), reply(100.0)])
    np.testing.assert_allclose(measures.column(Signal.UPDATE_NORM), 0.5 * np.sqrt(parameters), rtol=1e-6)

"""No reply ends a run: whatever one client sends, the round closes with the others and the model keeps its type."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    Krum,
    QFedAvg,
)

from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import RoundError, cohort_client, failures


def npy(descr: str, shape: str, body: bytes = b"", *, version: bytes = b"\x01\x00") -> bytes:
    """A .npy file whose header says what it is told to say."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode("latin1")
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + body


def raw(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float32", (3,), stype, data)


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, bias=np.zeros(3, np.float32))
    return file.getvalue()


FLOATS = np.zeros(3, np.float32)
ARRAYS: dict[str, Callable[[], Array]] = {
    "strings": lambda: Array(np.array(["a", "b", "c"])),
    "bytes": lambda: Array(np.array([b"a", b"b", b"c"])),
    "dates": lambda: Array(np.zeros(3, "M8[s]")),
    "structured": lambda: Array(np.zeros(3, [("a", "f4")])),
    "complex": lambda: Array(np.zeros(3, np.complex64)),
    "longdouble": lambda: Array(np.zeros(3, np.longdouble)),
    "archive": lambda: raw(archive()),
    "8 TB": lambda: raw(npy("'<f4'", "(2000000000000,)", b"\x00" * 12)),
    "negative": lambda: raw(npy("'<f4'", "(-3,)", b"\x00" * 12)),
    "nested": lambda: raw(npy("(" * 400, "(3,)", b"\x00" * 12)),
    "nested shape": lambda: raw(npy("'<f4'", "(" * 400, b"\x00" * 12)),
    "no zip": lambda: raw(b"PK\x03\x04 no archive"),
    "pickle": lambda: raw(npy("'|O'", "(3,)", b"\x80\x04N.")),
    "another version": lambda: raw(npy("'<f4'", "(3,)", b"\x00" * 12, version=b"\x09\x09")),
    "empty": lambda: raw(b""),
    "torch": lambda: raw(b"\x80\x02", "torch"),
    "a header with other spaces": lambda: raw(npy("'<f4'", "(3,)", b"\x00" * 12).replace(b"}\n", b"}\xa0")),
    "out of range": lambda: Array(np.array([1e300, 0, 0])),
    "too many dimensions": lambda: raw(npy("'<f4'", "(" + "1, " * 300 + ")", b"\x00" * 4)),
}


def spoilt(kit: Any, change: Callable[[RecordDict], None]) -> Any:
    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        change(content)
        return content

    return cohort_client(kit.client_app(train), kit.ANSWERS)


def set_bias(make: Callable[[], Array]) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["arrays"]["bias"] = make()

    return change


def set_metric(key: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["metrics"][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [*map(set_bias, ARRAYS.values()), set_metric("num-examples", [1.0]), set_metric("num-examples", 1e300),
     set_metric("num-examples", -5)],
    ids=[*ARRAYS, "a list of weights", "a weight beyond counting", "a negative weight"],
)  # fmt: skip
def test_a_hostile_reply_is_invalid_and_the_round_ends(change: Any, fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = spoilt(kit, change)
    strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    numbers = np.arange(2.0, 7.0)
    assert result.arrays["bias"].numpy()[0] == pytest.approx((numbers * numbers).sum() / numbers.sum())
    (failure,) = failures(tmp_path / "j")
    assert (failure.client, failure.status) == ("client-0", Status.INVALID) and failure.reason


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.bool_, ">f4"])
def test_no_reply_changes_the_models_type(dtype: Any, fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Numbers of another precision are converted: they count, in the type that was sent."""

    def change(content: RecordDict) -> None:
        for key in ("weight", "bias"):
            content["arrays"][key] = Array(content["arrays"][key].numpy().astype(dtype))

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = spoilt(kit, change)
    result = fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(), num_rounds=2)
    assert {str(result.arrays[k].numpy().dtype) for k in ("weight", "bias")} == {"float32"}
    assert not failures(tmp_path / "j")


def test_a_gradient_of_another_length_spoils_nothing(fleet: Any, kit: Any, tmp_path: Path) -> None:
    import dataclasses

    longer = dataclasses.replace(kit.ANSWERS, gradient=lambda a, c: np.zeros(10))
    shorter = dataclasses.replace(kit.ANSWERS, gradient=lambda a, c: np.zeros(8))
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(), longer)
    fleet.grid.nodes[fleet.grid.node_of("client-1")].app = cohort_client(kit.client_app(), shorter)
    strategy = fleet.strategy("fedacs", FedAvg(), cohort_size=6, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(counter=False), num_rounds=2)
    reasons = {f.client: f.reason for f in failures(tmp_path / "j")}
    assert reasons["client-0"] == "its gradient has 10 entries, more than the model's 9"
    assert "the gradient it reported" in reasons["client-1"] and len(reasons) == 2


@pytest.mark.parametrize("weights", [[0, 0], [-1, 1], [1e300, 1e300]])
def test_weights_of_an_evaluation_end_nothing(weights: list[float], empty_fleet: Any, kit: Any) -> None:
    def app(weight: float) -> Any:
        return cohort_client(kit.client_app(weight=weight), kit.ANSWERS)

    for number, weight in enumerate(weights):
        empty_fleet.grid.add(empty_fleet.node(number, app(weight)))
    result = empty_fleet.strategy("all", FedAvg()).start(empty_fleet.grid, kit.model(), num_rounds=2)
    assert result.arrays["bias"].numpy()[0] > 0
    assert set(result.evaluate_metrics_clientapp) == ({1, 2} if weights == [-1, 1] else set())


def test_what_aggregation_raises_is_contained(fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Trees that are no JSON pass every check of arrays and break Flower's own aggregation."""
    tree = b'{"learner": {"gradient_booster": {"model": {"gbtree_model_param": {"num_trees": "1", '
    tree += b'"num_parallel_tree": "1"}, "trees": [{"id": 0}], "tree_info": [0], "iteration_indptr": [0, 1]}}}}'

    def trees(data: bytes) -> Any:
        def train(message: Any, context: Any) -> RecordDict:
            arrays = ArrayRecord([np.frombuffer(data, np.uint8)])
            return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})

        return cohort_client(kit.client_app(train), kit.ANSWERS)

    for number in range(6):
        bad = number in (0, 4)
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = trees(b"no json" if bad else tree)
    strategy = fleet.strategy("all", FedXgbBagging(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, ArrayRecord([np.frombuffer(b"", np.uint8)]), num_rounds=2)
    assert bytes(result.arrays["0"].numpy()).count(b'"id"') == 8
    found = failures(tmp_path / "j")
    assert {(f.client, f.status) for f in found} == {("client-0", Status.INVALID), ("client-4", Status.INVALID)}
    assert "cannot aggregate it: JSONDecodeError" in found[-1].reason


# Flower's strategies that take arrays out of replies, or empty a record of their own, while they aggregate.
TAKING: dict[str, Callable[..., Any]] = {
    "median": FedMedian,
    "trimmed mean": partial(FedTrimmedAvg, beta=0.2),
    "bulyan": partial(Bulyan, num_malicious_nodes=0),
    "q-fedavg": partial(QFedAvg, client_learning_rate=0.1),
}


def with_loss(kit: Any, loss: float) -> Any:
    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        content["metrics"]["train_loss"] = loss
        return content

    return cohort_client(kit.client_app(train), kit.ANSWERS)


@pytest.mark.parametrize("name", TAKING)
def test_a_reply_that_cannot_be_aggregated_does_not_empty_the_model(name: str, kit: Any, tmp_path: Path) -> None:
    def no_negative(records: Any, key: str) -> MetricRecord:
        if any(record["metrics"]["train_loss"] < 0 for record in records):
            raise ValueError("a negative loss")
        return MetricRecord({})

    fleet = kit.Fleet()
    for number in range(4):
        fleet.grid.add(fleet.node(number, with_loss(kit, -5.0 if number == 2 else 1.0)))
    inner = TAKING[name](fraction_evaluate=0.0, train_metrics_aggr_fn=no_negative)
    strategy = fleet.strategy("all", inner, journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=1)
    assert {key: array.numpy().shape for key, array in result.arrays.items()} == {"weight": (2, 3), "bias": (3,)}
    assert result.arrays["bias"].numpy()[0] > 0
    assert {(f.client, f.status) for f in failures(tmp_path / "j")} == {("client-2", Status.INVALID)}


@pytest.mark.parametrize("name", TAKING)
def test_updates_are_measured_although_the_strategy_takes_them_apart(name: str, kit: Any) -> None:
    fleet = kit.Fleet()
    for number in range(4):
        fleet.grid.add(fleet.node(number, with_loss(kit, 1.0 + number)))
    strategy = fleet.strategy("hics-fl", TAKING[name](fraction_evaluate=0.0), cohort_size=3)
    result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=2)
    assert result.arrays["bias"].numpy()[0] > 0


def test_a_model_without_its_arrays_is_no_model(fleet: Any, kit: Any) -> None:
    class Losing(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            del arrays["bias"]
            return arrays, metrics

    with pytest.raises(RoundError, match="lacks the array 'bias'"):
        fleet.strategy("all", Losing()).start(fleet.grid, kit.model(), num_rounds=1)


# -- ten thousand of them ---------------------------------------------------------------------------------------------


class Hostile:
    """Replies drawn at random: valid ones bent in one or two places."""

    def __init__(self, kit: Any, seed: int) -> None:
        self.kit = kit
        self.rng = np.random.default_rng(seed)
        self.sent = 0

    def number(self) -> Any:
        odd = [0, -1, 1, 0.0, -0.0, 5e-324, 1e308, -1e308, np.nan, np.inf, -np.inf, 2**62, -(2**62), True]
        return odd[int(self.rng.integers(len(odd)))]

    def metric(self) -> Any:
        pick = int(self.rng.integers(3))
        return self.number() if pick else [float(self.rng.normal())] * int(self.rng.integers(4))

    def bytes_of(self, array: Array) -> Array:
        data = bytearray(array.data)
        for _ in range(int(self.rng.integers(1, 6))):
            match int(self.rng.integers(4)):
                case 0 if data:
                    data[int(self.rng.integers(len(data)))] = int(self.rng.integers(256))
                case 1:
                    data = data[: int(self.rng.integers(len(data) + 1))]
                case 2:
                    data += bytes(int(self.rng.integers(40)))
                case _:
                    at = int(self.rng.integers(len(data) + 1))
                    data[at:at] = self.rng.bytes(3)
        return Array(array.dtype, array.shape, array.stype, bytes(data))

    def array(self, array: Array) -> Array:
        makers = list(ARRAYS.values())
        kinds = [np.float16, np.float64, np.int8, np.uint64, np.complex128, np.longdouble, "U3", "S2", "M8[D]", "m8[s]"]
        match int(self.rng.integers(5)):
            case 0:
                return makers[int(self.rng.integers(len(makers)))]()
            case 1:
                return self.bytes_of(array)
            case 2:
                with np.errstate(all="ignore"):
                    return Array(np.zeros(array.shape).astype(kinds[int(self.rng.integers(len(kinds)))]))
            case 3:
                values = array.numpy().copy()
                with np.errstate(all="ignore"):
                    values.reshape(-1)[0] = np.float64(self.number()).astype(values.dtype)
                return Array(values)
            case _:
                shapes = [(0,), (1,), (3, 2), (2, 3, 1), (), (9,)]
                return Array(np.zeros(shapes[int(self.rng.integers(len(shapes)))], np.float32))

    def spoil(self, content: RecordDict) -> None:
        arrays, metrics = content.get("arrays"), content.get("metrics")
        match int(self.rng.integers(9)):
            case 0 | 1 | 2 if isinstance(arrays, ArrayRecord) and arrays:
                key = list(arrays)[int(self.rng.integers(len(arrays)))]
                arrays[key] = self.array(arrays[key])
            case 3 | 4 if isinstance(metrics, MetricRecord):
                metrics[str(self.rng.choice(["num-examples", "train-loss", "other", ""]))] = self.metric()
            case 5 if content:
                del content[list(content)[int(self.rng.integers(len(content)))]]
            case 6:
                more = [MetricRecord({"x": 1}), ArrayRecord([FLOATS]), ConfigRecord({"a": b"b"}), ArrayRecord()]
                content[str(self.rng.choice(["arrays", "metrics", "m", "fedcohort", "x"]))] = more[
                    int(self.rng.integers(4))
                ]
            case 7 if isinstance(arrays, ArrayRecord) and arrays:
                del arrays[list(arrays)[int(self.rng.integers(len(arrays)))]]
            case _:
                record = ConfigRecord({"version": int(self.rng.integers(3)), "name": "x" * int(self.rng.integers(9))})
                for key in ("loss", "gradient", "duration", "train-seconds", "signals"):
                    odd = [b"abc", b"\x00" * 36, b"\xff" * 36, b"\x00" * 40, "text", [1, 2], self.number()]
                    record[key] = odd[int(self.rng.integers(len(odd)))]
                content["fedcohort"] = record

    def __call__(self, message: Any, context: Any) -> Any:
        """A ClientApp of which only the description is honest."""
        honest = cohort_client(self.kit.client_app(), self.kit.ANSWERS)
        reply = honest(message, context)
        if message.metadata.message_type == "query.fedcohort_describe" or self.rng.random() < 0.02:
            return reply
        self.sent += 1
        for _ in range(int(self.rng.integers(1, 4))):
            self.spoil(reply.content)
        return reply


STRATEGIES: list[tuple[str, Callable[[], Any]]] = [
    ("fedacs", FedAvg),
    ("uniform", lambda: FedAdam(fraction_evaluate=0.2)),
    ("power-of-choice", lambda: FedMedian(fraction_evaluate=0.0)),
    ("active-fl", lambda: Krum(num_malicious_nodes=1, fraction_evaluate=0.0)),
    ("fedcor", lambda: FedAvg(fraction_evaluate=0.0)),
    ("fedcbs", lambda: FedAvg(fraction_evaluate=0.0)),
    ("divfl", lambda: FedTrimmedAvg(beta=0.2, fraction_evaluate=0.0)),
    ("all", lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e6, 12)),
]


def bombarded(kit: Any, selector: str, inner: Any, seed: int, rounds: int) -> int:
    fleet = kit.Fleet()
    fleet.fill(4)
    hostile = Hostile(kit, seed)
    for number in range(4, 12):
        fleet.grid.add(fleet.node(number, hostile))
    # A wrapper for privacy releases nothing as long as there are errors; it is to say so, round after round.
    private = isinstance(inner, DifferentialPrivacyServerSideFixedClipping)
    strategy = fleet.strategy(selector, inner, cohort_size=12, tries=rounds if private else 3, seed=seed)
    model = kit.model(counter=False)
    if private:
        with pytest.raises(RuntimeError, match="no model in"):
            strategy.start(fleet.grid, model, num_rounds=rounds)
        return hostile.sent
    result = strategy.start(fleet.grid, model, num_rounds=rounds)
    assert result.arrays.keys() == model.keys()
    for key, array in result.arrays.items():
        values = array.numpy()
        # FedAdam itself makes doubles of its steps, whatever the replies are.
        assert (
            values.dtype == (np.float64 if isinstance(inner, FedAdam) else np.float32)
            and values.shape == model[key].numpy().shape
            and np.isfinite(values).all()
        )
    return hostile.sent


@pytest.mark.parametrize(("selector", "make"), STRATEGIES[:4], ids=[name for name, _ in STRATEGIES[:4]])
def test_hundreds_of_hostile_replies(selector: str, make: Any, kit: Any) -> None:
    assert bombarded(kit, selector, make(), 1, 12) > 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_hostile_replies(kit: Any) -> None:
    sent = sum(bombarded(kit, selector, make(), seed, 60) for seed in (2, 3, 4) for selector, make in STRATEGIES)
    assert sent >= 10_000

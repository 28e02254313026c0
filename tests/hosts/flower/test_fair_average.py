"""No client has more of an average than its share, and none is left out for what another one sends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedXgbBagging
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from hypothesis import given

from fedcohort.core.errors import ParameterError
from fedcohort.core.signals import SIGNALS
from fedcohort.hosts.flower import Answers, Facts, cohort_client, corrections, failures
from fedcohort.hosts.flower.metrics import common_metrics
from fedcohort.hosts.weights import bounded_weights
from fedcohort.journal import read_journal
from fedcohort.session import Session


def app(kit: Any, change: Callable[[RecordDict], None], answers: Answers | None = None) -> ClientApp:
    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        change(content)
        return content

    return cohort_client(kit.client_app(train), answers or kit.ANSWERS)


def metric(**values: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        for key, value in values.items():
            content["metrics"][key.replace("_", "-")] = value

    return change


def without(key: str) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        del content["metrics"][key]

    return change


def renamed(old: str, new: str) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content[new] = content.pop(old)

    return change


def fleet_of(kit: Any, count: int, odd: ClientApp) -> Any:
    """A federation whose client 0 is odd; client i adds 1 + i and weighs 10 times as much."""
    fleet = kit.Fleet()
    for number in range(count):
        fleet.grid.add(fleet.node(number, odd if number == 0 else None))
    return fleet


def said(journal: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for correction in corrections(journal):
        found.setdefault(correction.client, []).append(correction.reason)
    return found


def value(result: Any) -> float:
    return float(result.arrays["bias"].numpy()[0])


ODD_METRICS = {
    "another name": (metric(accuracy=0.5), "it sent no metric 'x'"),
    "one more": (metric(more=1.0), ""),
    "one less": (without("train-loss"), "it sent no metric 'train-loss'"),
    "nan": (metric(train_loss=math.nan), "its metric 'train-loss' is nan and is left out"),
    "infinite": (metric(train_loss=math.inf), "its metric 'train-loss' is inf and is left out"),
    "huge": (metric(train_loss=1e308), "its metric 'train-loss' is 1e+308 and is left out"),
    "a list": (metric(train_loss=[1.0]), "it is a list of 1, those of others are a number"),
    "a list with nan": (metric(train_loss=[math.nan]), "its metric 'train-loss' is [nan] and is left out"),
    "a record of another name": (renamed("metrics", "numbers"), ""),
    "a model of another name": (renamed("arrays", "weights"), ""),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", list(ODD_METRICS))
def test_odd_metrics_touch_nobody_elses(kind: str, count: int, kit: Any, tmp_path: Path) -> None:
    change, text = ODD_METRICS[kind]
    if kind == "another name":
        other = change
        change = lambda content: (other(content), without("train-loss")(content))  # noqa: E731
        text = "it sent no metric 'train-loss'"
    fleet = fleet_of(kit, count, app(kit, change))
    strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert not failures(tmp_path / "j")
    numbers = np.arange(1.0, count + 1)
    assert value(result) == pytest.approx((numbers * numbers).sum() / numbers.sum())
    found = said(tmp_path / "j")
    assert any(text in line for line in found.get("client-0", [])) or not text
    valid = [
        n for n in range(count) if n or kind in ("one more", "a record of another name", "a model of another name")
    ]
    mean = sum(n * 10 * (1 + n) for n in valid) / sum(10 * (1 + n) for n in valid)
    assert read_journal(tmp_path / "j").metrics()[0]["train/train-loss"] == pytest.approx(mean)


def test_two_clients_of_differing_metrics_train_together_for_rounds(kit: Any, tmp_path: Path, caplog: Any) -> None:
    for seed in range(8):
        fleet = fleet_of(kit, 2, app(kit, metric(mine=1.0)))
        strategy = fleet.strategy("uniform", FedAvg(), seed=seed, cohort_size=2, journal=tmp_path / f"j{seed}")
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
        assert not failures(tmp_path / f"j{seed}")
    assert "client-1: it sent no metric 'mine'; the average is that of the others" in caplog.text


def test_a_metric_few_have_is_named_and_left_out(kit: Any, tmp_path: Path, caplog: Any) -> None:
    fleet = fleet_of(kit, 6, app(kit, metric(mine=1.0)))
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(), 1)
    assert said(tmp_path / "j") == {"client-0": ["its metric 'mine' is left out: most replies have none"]}
    assert "client-0: its metric 'mine' is left out" in caplog.text
    assert set(read_journal(tmp_path / "j").metrics()[0]) == {"train/train-loss", "evaluate/value"}


def test_thousands_of_odd_metrics_are_named_in_a_few_lines(kit: Any, tmp_path: Path) -> None:
    fleet = fleet_of(kit, 6, app(kit, metric(**{f"m{i}": 1.0 for i in range(2000)})))
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(), 1)
    assert len(said(tmp_path / "j")["client-0"]) == 4 and "and 1997 more" in said(tmp_path / "j")["client-0"][-1]


def test_a_vector_nobody_asked_for_ends_nothing(kit: Any, tmp_path: Path) -> None:
    """Beside numbers the selector needs, a client may report what it likes."""
    vectors = [s for s in SIGNALS if s.width is not None]
    for turn, odd in enumerate(([1.0], [1.0, 2.0, 3.0])):
        fleet = kit.Fleet()
        for number in range(3):
            honest = cohort_client(kit.client_app(), kit.ANSWERS)

            def call(message: Any, context: Any, honest: Any = honest, number: int = number, odd: Any = odd) -> Any:
                reply = honest(message, context)
                if message.metadata.message_type == "train":
                    for signal in vectors:
                        reply.content["fedcohort"][signal.name] = odd if number == 0 else [1.0, 2.0]
                return reply

            fleet.grid.add(fleet.node(number, call))
        fleet.strategy("all", FedAvg(), journal=tmp_path / f"j{turn}").start(fleet.grid, kit.model(), 2)
        assert not failures(tmp_path / f"j{turn}")


@given(st.data())
def test_the_average_is_that_of_those_who_have_a_value(data: Any) -> None:
    odd = st.sampled_from([None, math.nan, math.inf, 1e300, [1.0], [], [math.nan]])
    number = st.floats(-1e6, 1e6)
    clients = [f"c{i}" for i in range(data.draw(st.integers(1, 6)))]
    records: dict[str, MetricRecord] = {}
    for client in clients:
        values = {"n": data.draw(st.floats(0.1, 100)), "x": data.draw(st.one_of(number, odd))}
        records[client] = MetricRecord({k: v for k, v in values.items() if v is not None})
    found, notes = common_metrics(records, "n")
    assert list(found) == clients and len({frozenset(record) for record in found.values()}) == 1
    usable = {c: r["x"] for c, r in records.items() if isinstance(r.get("x"), float) and abs(r["x"]) <= 1e30}
    scalars = [c for c in clients if c in usable]
    if "x" in found[clients[0]] and all(isinstance(r["x"], float) for r in found.values()) and scalars:
        total = sum(float(r["n"]) for r in found.values())
        mean = sum(float(r["n"]) * float(r["x"]) for r in found.values()) / total
        known = sum(float(records[c]["n"]) for c in scalars)
        assert mean == pytest.approx(sum(float(records[c]["n"]) * usable[c] for c in scalars) / known, abs=1e-6)
        assert not any(c in notes for c in scalars)


# -- weights -----------------------------------------------------------------------------------------------------------


UNDECLARED = Answers(losses=None)


@pytest.mark.parametrize("weight", [2**53, 1e15, 11])
def test_a_weight_is_capped_by_the_declared_size(weight: float, kit: Any, tmp_path: Path, caplog: Any) -> None:
    """Client 0 declared 10 samples and adds 1; unbounded it would be the whole average."""
    fleet = fleet_of(kit, 4, app(kit, metric(num_examples=weight)))
    strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=2)
    numbers = np.arange(1.0, 5)
    assert value(result) == pytest.approx(2 * (numbers * numbers).sum() / numbers.sum())
    text = f"its weight of {weight:g} was lowered to 10: it declared 10 samples"
    assert said(tmp_path / "j") == {"client-0": [text, text]} and f"client-0: {text}" in caplog.text
    assert read_journal(tmp_path / "j").metrics()[0]["train/train-loss"] == pytest.approx(2.0)


def test_corrections_of_a_forgotten_client_go_with_it(kit: Any, tmp_path: Path) -> None:
    fleet = fleet_of(kit, 4, app(kit, metric(num_examples=2**53, train_loss=math.nan)))
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(), num_rounds=2)
    assert set(said(tmp_path / "j")) == {"client-0"}
    with Session.open(tmp_path / "j") as session:
        session.forget("client-0")
    assert not corrections(tmp_path / "j")


def test_a_weight_without_a_declared_size_is_held_against_the_others(kit: Any, tmp_path: Path) -> None:
    fleet = fleet_of(kit, 4, app(kit, metric(num_examples=2**53), UNDECLARED))
    strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result) == pytest.approx((300 * 1 + 20 * 2 + 30 * 3 + 40 * 4) / 390)
    assert "it declared no size" in said(tmp_path / "j")["client-0"][0]


def test_honest_weights_are_left_alone() -> None:
    for weights, sizes in [
        ({"a": 10, "b": 2000, "c": 7}, {"a": 10, "b": 2000, "c": 7}),  # sizes lie far apart
        ({"a": 50, "b": 100, "c": 500}, {"a": 10, "b": 20, "c": 100}),  # counted over five epochs
        ({"a": 900, "b": 2500, "c": 8000}, {"a": 10, "b": 20, "c": 100}),  # tokens
        ({"a": 9, "b": 20, "c": 96}, {"a": 10, "b": 20, "c": 100}),  # the last batch is left out
        ({"a": 1000, "b": 1000, "c": 1000}, {"a": 1, "b": 20, "c": 100}),  # everybody weighs the same
        ({"a": 500, "b": 500, "c": 1000}, {"a": 100, "b": 100, "c": 200}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 20, "c": 100}),
        ({"a": 5, "b": 50, "c": 500}, {"a": None, "b": None, "c": None}),
        ({"a": 10, "b": 0, "c": 0}, {"a": None, "b": None, "c": 3}),
        ({"a": 1e6}, {"a": None}),
    ]:
        assert bounded_weights(weights, sizes) == (weights, {})


def test_an_honest_client_is_not_lowered_for_the_weights_of_another() -> None:
    for lie in (0, 1e-9, 1, 2.0**53):
        for size in (1, 10, 2**53):
            found, reasons = bounded_weights({"liar": lie, "anna": 100.0}, {"liar": size, "anna": 100})
            assert found["anna"] == 100 and "anna" not in reasons
    sizes = {"liar": 30, "b": 1, "c": 20, "d": 100}
    found, reasons = bounded_weights({"liar": 2.0**53, "b": 1000.0, "c": 1000.0, "d": 1000.0}, sizes)
    assert set(found.values()) == {1000.0} and set(reasons) == {"liar"}
    found, _ = bounded_weights({"liar": 2.0**53, "b": 100.0, "c": 300.0}, {"liar": 100, "b": 20, "c": 60})
    assert found == {"liar": 1000.0, "b": 100.0, "c": 300.0}


@pytest.mark.parametrize("declared", [None, 0, 1, 10, 60])
@pytest.mark.parametrize("others_declare", [True, False])
@pytest.mark.parametrize("epochs", [1, 5])
def test_no_declaration_lets_one_client_weigh_what_it_likes(
    declared: int | None, others_declare: bool, epochs: int
) -> None:
    """Of one that declares up to 60 samples, beside clients of 50: at most twice its samples, or ten times a client."""
    for others in range(1, 6):
        honest = {f"c{i}": 50.0 * epochs for i in range(others)} | {"small": 40.0 * epochs}
        sizes = {name: int(weight) // epochs if others_declare else None for name, weight in honest.items()}
        for lie in (2.0**53, 1e9, 1e4):
            found, reasons = bounded_weights({"liar": lie, **honest}, {"liar": declared, **sizes})
            most = 10 * 50 * epochs if declared is None or not others_declare else 2 * max(declared, 50) * epochs
            assert found["liar"] <= most and "liar" in reasons
            assert {name: found[name] for name in honest} == honest


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9))
def test_who_declared_nothing_is_held_against_the_median_of_the_others(weights: list[int]) -> None:
    given_ = {f"c{i}": float(weight) for i, weight in enumerate(weights)}
    found, _ = bounded_weights(given_, {})
    for name, weight in given_.items():
        others = sorted(w for other, w in given_.items() if other != name and w > 0)
        assert found[name] == (min(weight, 10 * others[len(others) // 2]) if others else weight)


def test_weights_of_many_clients_are_bounded_at_once() -> None:
    weights = {f"c{i}": float(1 + i % 97) for i in range(200_000)}
    begun = time.process_time()
    assert bounded_weights(weights, {}, 0.5) == (weights, {})
    assert time.process_time() - begun < 5


# Shares of subnormal numbers cannot be divided finer than in halves or thirds.
@given(st.lists(st.floats(0, 1e15, allow_subnormal=False), min_size=1, max_size=8), st.floats(0.05, 1))
def test_nobody_has_more_than_the_largest_share(weights: list[float], share: float) -> None:
    given_ = {f"c{i}": weight for i, weight in enumerate(weights)}
    found, reasons = bounded_weights(given_, dict.fromkeys(given_, 2**53), share)
    total, positive = sum(found.values()), [w for w in found.values() if w > 0]
    assert all(found[c] <= given_[c] for c in given_)
    assert set(reasons) == {c for c in given_ if found[c] < given_[c]}
    if total > 0:
        assert max(positive) / total <= max(share, 1 / len(positive)) + 1e-9


def test_a_share_holds_against_a_lie_about_the_size_too(kit: Any, tmp_path: Path) -> None:
    big = Answers(facts=lambda context: Facts(size=2**53))
    values = []
    for share in (None, 0.25):
        fleet = fleet_of(kit, 4, app(kit, metric(num_examples=2**53), big))
        journal = tmp_path / f"j{share}"
        strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), journal=journal, max_share=share)
        values.append(value(strategy.start(fleet.grid, kit.model(), num_rounds=1)))
    assert values[0] == pytest.approx(1.0)  # it declared what it weighs: only the operator can know better
    assert values[1] == pytest.approx(np.mean([1, 2, 3, 4]))
    assert "no client may have more than 0.25" in said(tmp_path / "j0.25")["client-0"][0]


def test_an_evaluations_weights_and_metrics_are_bounded_too(kit: Any, tmp_path: Path) -> None:
    """Client 0 has an accuracy of 1, of its own saying, for the most samples in the world; client 1 says NaN."""

    def evaluating(weight: float, accuracy: float) -> Any:
        client = ClientApp()

        @client.train()
        def _train(message: Message, context: Any) -> Message:
            return Message(kit.step(message, context), reply_to=message)

        @client.evaluate()
        def _evaluate(message: Message, context: Any) -> Message:
            record = MetricRecord({"num-examples": weight, "accuracy": accuracy})
            name = "m" if weight == 10 else "numbers"
            return Message(RecordDict({name: record, "more": ConfigRecord({"seen": True})}), reply_to=message)

        return cohort_client(client, Answers(facts=lambda context: Facts(size=10)))

    def mean(contents: list[RecordDict], key: str) -> MetricRecord:
        assert all(content["more"]["seen"] for content in contents)
        return aggregate_metricrecords(contents, key)

    fleet = kit.Fleet()
    for number, (weight, accuracy) in enumerate([(2**53, 1.0), (10, math.nan), (10, 0.5), (10, 0.3)]):
        fleet.grid.add(fleet.node(number, evaluating(weight, accuracy)))
    inner = FedAvg(evaluate_metrics_aggr_fn=mean)
    fleet.strategy("all", inner, journal=tmp_path / "j").start(fleet.grid, kit.model(), num_rounds=1)
    assert read_journal(tmp_path / "j").metrics()[0]["evaluate/accuracy"] == pytest.approx(0.6)
    found = said(tmp_path / "j")
    assert any("lowered to 10" in text for text in found["client-0"])
    assert "its metric 'accuracy' is nan and is left out" in found["client-1"]


# -- updates -----------------------------------------------------------------------------------------------------------


def far(factor: float) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["arrays"] = ArrayRecord(
            {
                k: Array(a.numpy() * a.numpy().dtype.type(factor)) if k != "seen" else a
                for k, a in content["arrays"].items()
            }
        )

    return change


@pytest.mark.parametrize("factor", [1e6, -1e6])
def test_long_updates_are_shortened_and_named(factor: float, kit: Any, tmp_path: Path) -> None:
    fleet = fleet_of(kit, 3, app(kit, far(factor)))
    strategy = fleet.strategy(
        "all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", max_update_norm=9.0, shadows={"d": "divfl"}
    )
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    # Nine entries of one size: with the norm 9 each is 3. Clients 1 and 2 add 2 and 3.
    assert value(result) == pytest.approx((10 * math.copysign(3, factor) + 20 * 2 + 30 * 3) / 60, rel=1e-5)
    assert said(tmp_path / "j") == {"client-0": ["its update of norm 3e+06 was shortened to 9"]}
    assert {str(a.numpy().dtype) for k, a in result.arrays.items() if k != "seen"} == {"float32"}


def test_a_bound_on_updates_holds_under_any_strategy_and_only_where_it_makes_sense(kit: Any) -> None:
    fleet = fleet_of(kit, 3, app(kit, far(1e6)))
    result = fleet.strategy("all", FedAdam(fraction_evaluate=0.0), max_update_norm=1.0).start(
        fleet.grid, kit.model(), num_rounds=2
    )
    assert abs(value(result)) < 2
    with pytest.raises(ParameterError, match="trees"):
        fleet.strategy("all", FedXgbBagging(), max_update_norm=1.0)
    for bad in (0, -1.0, math.nan, math.inf, "1"):
        with pytest.raises(ParameterError, match="'max_update_norm'"):
            fleet.strategy("all", FedAvg(), max_update_norm=bad)
        with pytest.raises(ParameterError, match="'max_share'"):
            fleet.strategy("all", FedAvg(), max_share=bad)

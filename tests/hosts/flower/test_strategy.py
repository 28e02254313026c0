"""CohortStrategy on an in-process grid: who trains, what is averaged, what is recorded."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedYogi,
    Krum,
    QFedAvg,
)

from fedcohort import create
from fedcohort.audit.choices import audit_journal
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError, ParameterError, SignalError
from fedcohort.core.protocol import (
    Cohort,
    Outcome,
    RoundReport,
    RoundRequest,
    Selector,
    Slate,
    Status,
)
from fedcohort.core.signals import Signal
from fedcohort.hosts import Policy
from fedcohort.hosts.flower import (
    CohortStrategy,
    FederationTimeoutError,
    RoundError,
    ServerValidation,
    cohort_client,
    failures,
)
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError
from fedcohort.journal import read_journal
from fedcohort.journal.events import PROPOSED
from fedcohort.selectors import All, PowerOfChoice, Uniform
from fedcohort.session import Session
from fedcohort.training.filters import CMFL, FedCA


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True, kw_only=True)
class Fixed(Selector[Empty]):
    """Picks the first clients that are online, with weights and work."""

    weights: Any = None
    work: Any = None

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Empty:
        return Empty()

    def select(self, state: Empty, slate: Slate, answer: Any, rng: Any) -> tuple[Cohort, Empty]:
        picked = slate.candidates[: slate.size]
        cut = [None if v is None else np.array(v[: len(picked)]) for v in (self.weights, self.work)]
        return Cohort(picked, weights=cut[0], work=cut[1]), state

    def update(self, state: Empty, outcome: Outcome) -> Empty:
        return state


def value(arrays: ArrayRecord | None) -> float:
    assert arrays is not None
    return float(arrays["bias"].numpy()[0])


def test_five_lines_turn_a_server_app_into_one_with_selection(fleet: Any, kit: Any, tmp_path: Path) -> None:
    strategy = fleet.strategy(Uniform(), strategy=FedAvg(fraction_train=0.5), journal=tmp_path / "j", seed=3)
    result = strategy.start(grid=fleet.grid, initial_arrays=kit.model(), num_rounds=4)
    # The cohorts are those of a session of the same seed, and each round moved by the weighted mean of its cohort.
    session = Session(Uniform(), ClientTable(n=6), seed=3)
    expected = 0.0
    for server_round in range(1, 5):
        cohort = session.ask(RoundRequest(3))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        assert fleet.names(server_round) == [f"client-{c}" for c in cohort.clients]
        steps = cohort.clients + 1.0
        expected += float((steps * steps).sum() / steps.sum())
    assert value(result.arrays) == pytest.approx(expected, rel=1e-6)
    assert set(result.train_metrics_clientapp) == set(result.evaluate_metrics_clientapp) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "inner",
    [
        FedAvg(fraction_train=0.5),
        FedProx(fraction_train=0.5, proximal_mu=0.1),
        FedAdam(fraction_train=0.5, beta_1=0.9, beta_2=0.99),
        FedYogi(fraction_train=0.5),
        FedAvgM(fraction_train=0.5, server_momentum=0.9),
        FedMedian(fraction_train=0.5),
        Krum(fraction_train=0.5, num_malicious_nodes=0),
        QFedAvg(fraction_train=0.5, client_learning_rate=0.1, train_loss_key="train-loss"),
        DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_train=0.5), 0.0, 100.0, 3),
        DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(fraction_train=0.5), 0.0, 3),
        DifferentialPrivacyServerSideFixedClipping(
            DifferentialPrivacyServerSideFixedClipping(FedProx(fraction_train=0.5, proximal_mu=1.0), 0.0, 9.0, 3),
            0.0, 9.0, 3,
        ),
    ],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_any_strategy_can_be_wrapped(inner: Any, fleet: Any, kit: Any) -> None:
    strategy = fleet.strategy(Uniform(), strategy=inner, seed=1)
    # Flower's DP wrappers cannot clip integers.
    result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=3)
    session = Session(Uniform(), ClientTable(n=6), seed=1)
    for server_round in (1, 2, 3):
        cohort = session.ask(RoundRequest(3))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        assert fleet.names(server_round) == [f"client-{c}" for c in cohort.clients]
    assert value(result.arrays) != 0.0
    lowest = inner
    while hasattr(lowest, "strategy"):
        lowest = lowest.strategy
    assert (lowest.fraction_train, lowest.min_train_nodes, lowest.min_available_nodes) == (0.5, 2, 2)
    if isinstance(lowest, FedProx):
        sent = [m for m in fleet.grid.log if m.metadata.message_type == "train"]
        assert all(m.content["config"]["proximal-mu"] == lowest.proximal_mu for m in sent)


def test_flowers_client_side_mods_see_the_message_they_expect(empty_fleet: Any, kit: Any) -> None:
    for number in range(3):
        app = cohort_client(kit.client_app(mods=[fixedclipping_mod]), kit.ANSWERS)
        empty_fleet.grid.add(empty_fleet.node(number, app))
    inner = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.0, 1.0, 3)
    result = empty_fleet.strategy("uniform", inner).start(empty_fleet.grid, kit.model(), num_rounds=1)
    assert 0 < value(result.arrays) < 1  # clipped to a norm of 1 over nine entries


def test_names_survive_a_new_node_id(fleet: Any, kit: Any, tmp_path: Path) -> None:
    strategy = fleet.strategy(All(), strategy=FedAvg(), journal=tmp_path / "j")

    def restart() -> None:
        old = fleet.grid.node_of("client-2")
        fleet.grid.cut(old)  # stays listed as online, as a killed SuperNode does
        fleet.grid.add(fleet.node(2))

    fleet.clock.at.append((5.0, restart))
    strategy.policy = dataclasses.replace(strategy.policy, deadline=10.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    with Session.open(tmp_path / "j") as session:
        assert session.table.names == tuple(f"client-{i}" for i in range(6))
        last = session.journal.replies(session.journal.cohorts()[-1].ticket)
    assert {r.client for r in last if r.status == Status.OK} == set(range(6))
    assert len({node for node, _ in fleet.trained()}) == 7


def test_a_registered_name_outranks_what_a_client_says(empty_fleet: Any, kit: Any) -> None:
    for number in range(2):
        empty_fleet.grid.add(empty_fleet.node(number, registered=f"clinic-{number}"))
    strategy = empty_fleet.strategy(Fixed(), FedAvg())
    seen: list[str] = []
    strategy.start(
        empty_fleet.grid, kit.model(), 1, evaluate_fn=lambda r, a: seen.append("x") or MetricRecord({"accuracy": 0.5})
    )
    run = empty_fleet.strategy(Fixed(), FedAvg())
    from fedcohort.hosts.flower.population import Population

    federation = Population(empty_fleet.grid, (), patience=5, clock=empty_fleet.clock, sleep=empty_fleet.clock.sleep)
    federation.assemble(2)
    assert list(federation.online) == ["clinic-0", "clinic-1"]
    assert run.strategy is not None and seen == ["x", "x"]


def test_clients_without_fedcohort_take_part(empty_fleet: Any, kit: Any) -> None:
    for number in range(3):
        empty_fleet.grid.add(empty_fleet.node(number, kit.client_app()), node_id=50 + number)
    result = empty_fleet.strategy("uniform", FedAvg()).start(empty_fleet.grid, kit.model(), num_rounds=2)
    assert value(result.arrays) > 0
    train = [m for m in empty_fleet.grid.log if m.metadata.message_type == "train"]
    assert all("fedcohort" not in m.content for m in train)


def test_a_selector_that_needs_more_is_refused_with_a_reason(empty_fleet: Any, kit: Any) -> None:
    for number in range(3):
        empty_fleet.grid.add(empty_fleet.node(number, kit.client_app()), node_id=50 + number)
    with pytest.raises(SignalError, match=r"'loss-query', 'sizes': node-50, node-51"):
        empty_fleet.strategy(PowerOfChoice(), FedAvg(), patience=30.0).start(empty_fleet.grid, kit.model())
    assert 30 < empty_fleet.clock.now < 60  # other clients might have come that can


def test_one_client_that_cannot_answer_is_left_out(fleet: Any, kit: Any, caplog: Any) -> None:
    fleet.grid.add(fleet.node(6, kit.client_app()))
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        fleet.strategy(PowerOfChoice(), FedAvg()).start(fleet.grid, kit.model(), num_rounds=2)
    assert "cannot supply 'loss-query', 'sizes'" in caplog.text
    assert all(name != "client-6" for r in (1, 2) for name in fleet.names(r))


def test_a_late_client_is_missing_then_late_and_not_asked_while_it_works(fleet: Any, kit: Any, tmp_path: Path) -> None:
    slow = fleet.grid.node_of("client-3")
    fleet.grid.nodes[slow].latency = 25.0
    strategy = fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline=10.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=20)
    asked = [r for node, r in fleet.trained() if node == slow]
    # The first round closes after 10 s; then rounds of a second each pass until it answers at 25 s.
    assert asked[0] == 1 and asked[1] > 10
    found = [f for f in failures(tmp_path / "j") if f.client == "client-3"]
    assert found[0].status == Status.LATE and "answered after 25" in found[0].reason
    assert {f.client for f in failures(tmp_path / "j")} == {"client-3"}


def test_an_automatic_deadline_leaves_a_slow_client_behind(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-3")].latency = 60.0
    strategy = fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline="auto")
    strategy.start(fleet.grid, kit.model(), num_rounds=4)
    assert fleet.clock.now < 20
    fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline="auto").start(
        fleet.grid, kit.model(), num_rounds=8
    )
    assert fleet.clock.now < 40
    with Session.open(tmp_path / "j") as session:
        assert session.round == 8
        deadlines = [body["deadline"] for body in session.journal.events(PROPOSED)]
    assert deadlines[0] is None and all(0.5 < deadline < 3 for deadline in deadlines[1:])


@dataclass(frozen=True, kw_only=True)
class Weighing(All):
    """Takes everybody and counts client n 2n + 1 times."""

    name = "weighing"

    def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> Any:
        return Cohort(slate.candidates, weights=2.0 * slate.candidates + 1.0), state


@pytest.mark.parametrize("selector", [All(), Weighing()], ids=["all", "weighing"])
@pytest.mark.parametrize("late", ["discard", "count"])
def test_a_late_model_is_an_update_of_the_next_round_if_it_is_to_count(
    late: Any, selector: Any, fleet: Any, kit: Any, tmp_path: Path
) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-5")].latency = 10.5
    strategy = fleet.strategy(
        selector, FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline=10.0, late=late, audit=True
    )
    result = strategy.start(fleet.grid, kit.model(), num_rounds=2)
    # Client n adds n + 1 and weighs as much; the sixth one's answer comes in the second round, one model later.
    numbers = np.arange(1.0, 6.0)
    times = 2 * np.arange(6) + 1 if isinstance(selector, Weighing) else np.ones(6)
    weights = numbers * times[:5]
    first = (weights * numbers).sum() / weights.sum()
    weight = 6 * times[5] / np.sqrt(2) if late == "count" else 0.0
    second = ((weights * numbers).sum() + weight * 6) / (weights.sum() + weight)
    assert value(result.arrays) == pytest.approx(first + second, rel=1e-5)
    record = read_journal(tmp_path / "j")
    notes = record.events("late-counted")
    record.close()
    assert notes == (
        [{"round": 1, "ticket": 1, "clients": {"client-5": {"ticket": 0, "staleness": 1}}}] if late == "count" else []
    )
    assert audit_journal(tmp_path / "j", selector).problem is None


def test_late_models_cannot_count_where_a_round_is_judged_as_a_whole() -> None:
    with pytest.raises(ParameterError, match=r"'late'.*a filter compares"):
        CohortStrategy("uniform", filter="cmfl", policy=Policy(late="count"))


def test_a_dead_node_never_stops_a_round(fleet: Any, kit: Any, tmp_path: Path) -> None:
    victim = fleet.grid.node_of("client-1")
    fleet.clock.at.append((1.2, lambda: fleet.grid.cut(victim)))
    strategy = fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline=10.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=3)
    assert fleet.clock.now < 30
    (failure,) = failures(tmp_path / "j")
    assert failure == type(failure)(failure.round, "client-1", Status.MISSING, "no answer within 10 s")


def test_a_vanished_node_is_a_failure(fleet: Any, kit: Any, tmp_path: Path) -> None:
    victim = fleet.grid.node_of("client-1")
    fleet.clock.at.append((1.2, lambda: fleet.grid.remove(victim)))
    strategy = fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline=100.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=3)
    assert fleet.clock.now < 30
    assert [(f.client, f.status) for f in failures(tmp_path / "j")] == [("client-1", Status.FAILED)]


def test_the_round_closes_with_the_first_k(fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].latency = 1.0 + 3 * number
    strategy = fleet.strategy(Fixed(), FedAvg(fraction_evaluate=0.0), cohort_size=3, spares=2, journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert len(fleet.names(1)) == 5
    assert value(result.arrays) == pytest.approx((1 + 4 + 9) / 6)
    assert {f.client: f.reason for f in failures(tmp_path / "j")} == {
        "client-3": "the round was closed with enough others",
        "client-4": "the round was closed with enough others",
    }


def test_spares_stand_in_for_invalid_models(fleet: Any, kit: Any) -> None:
    def broken(message: Any, context: Any) -> RecordDict:
        raise ValueError("out of memory")

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(broken), kit.ANSWERS)
    strategy = fleet.strategy(Fixed(), FedAvg(), cohort_size=3, spares=1)
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx((4 + 9 + 16) / 9)


def spoil(kit: Any, how: str) -> Any:
    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        arrays, metrics = content["arrays"], content["metrics"]
        match how:
            case "raises":
                raise RuntimeError("no data today")
            case "nan":
                arrays["bias"] = Array(np.array([0, np.nan, 0], np.float32))
            case "inf":
                arrays["weight"] = Array(np.full((2, 3), np.inf, np.float32))
            case "shape":
                arrays["weight"] = Array(np.zeros((3, 2), np.float32))
            case "names":
                arrays["other"] = arrays["bias"]
            case "no weight":
                del metrics["num-examples"]
            case "nan weight":
                metrics["num-examples"] = float("nan")
            case "two records":
                content["again"] = arrays
            case "no metrics":
                del content["metrics"]
        return content

    return train


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("raises", Status.FAILED, "no data today"),
        ("nan", Status.INVALID, "'bias' has NaN"),
        ("inf", Status.INVALID, "'weight' has NaN or infinite"),
        ("shape", Status.INVALID, "shape (3, 2) instead of (2, 3)"),
        ("names", Status.INVALID, "'other'"),
        ("no weight", Status.INVALID, "'num-examples'"),
        ("nan weight", Status.INVALID, "'num-examples'"),
        ("two records", Status.INVALID, "exactly one ArrayRecord, not 2"),
        ("no metrics", Status.INVALID, "exactly one MetricRecord, not 0"),
    ],
)
def test_one_bad_client_spoils_nothing(
    how: str, status: Status, reason: str, fleet: Any, kit: Any, tmp_path: Path
) -> None:
    app = cohort_client(kit.client_app(spoil(kit, how)), kit.ANSWERS)
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = app
    strategy = fleet.strategy(All(), FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=2)
    numbers = np.arange(2.0, 7.0)
    assert value(result.arrays) == pytest.approx(2 * (numbers * numbers).sum() / numbers.sum())
    found = failures(tmp_path / "j")
    assert [(f.round, f.client, f.status) for f in found] == [(0, "client-0", status), (1, "client-0", status)]
    assert reason in found[0].reason


def test_nobody_valid_leaves_the_model_alone(fleet: Any, kit: Any, tmp_path: Path) -> None:
    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(spoil(kit, "nan")), kit.ANSWERS)
    with pytest.raises(RoundError, match=r"Round 0.* 3 tries.*client-0.*'bias'.*NaN"):
        fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(7), num_rounds=2)
    assert len(failures(tmp_path / "j")) == 18
    with Session.open(tmp_path / "j") as session:
        assert session.round == 0 and not session.pending
    for number in range(6):  # the clients are repaired, and the run continues with its model
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = fleet.node(number).app
    again = fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(0), num_rounds=2)
    assert value(again.arrays) == pytest.approx(7 + 2 * 91 / 21) and fleet.names(2)


def test_too_few_models_leave_the_model_alone(fleet: Any, kit: Any, tmp_path: Path) -> None:
    strategy = fleet.strategy(Fixed(), Krum(), cohort_size=2, min_replies=3, journal=tmp_path / "j")
    with pytest.raises(RoundError, match="too few valid models"):
        strategy.start(fleet.grid, kit.model(7), num_rounds=1)
    with Session.open(tmp_path / "j", Fixed()) as session:
        assert [r.kept for r in session.journal.replies()] == [False, False] * 3


def test_it_waits_for_nodes_and_not_for_ever(empty_fleet: Any, kit: Any) -> None:
    empty_fleet.grid.add(empty_fleet.node(0))
    strategy = empty_fleet.strategy("uniform", FedAvg(min_available_nodes=3), patience=30.0)
    with pytest.raises(FederationTimeoutError, match=r"30 s for 3 clients.* 1 .*client-0"):
        strategy.start(empty_fleet.grid, kit.model())
    assert 30 <= empty_fleet.clock.now < 40
    empty_fleet.clock.at.append((empty_fleet.clock.now + 20, lambda: empty_fleet.fill(3)))
    empty_fleet.grid.remove(empty_fleet.grid.node_of("client-0"))
    assert value(strategy.start(empty_fleet.grid, kit.model(), num_rounds=1).arrays) > 0


def test_it_does_not_wait_for_ever_when_everybody_is_gone(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.clock.at.append((4.0, lambda: [fleet.grid.remove(n) for n in list(fleet.grid.nodes)]))
    strategy = fleet.strategy("uniform", FedAvg(), patience=50.0, deadline=5.0, journal=tmp_path / "j")
    with pytest.raises(FederationTimeoutError, match=r"50 s in round"):
        strategy.start(fleet.grid, kit.model(), num_rounds=50)
    assert fleet.clock.now < 80


def test_newcomers_join_and_can_be_chosen(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.clock.at.append((6.0, lambda: fleet.grid.add(fleet.node(6))))
    strategy = fleet.strategy(PowerOfChoice(), FedAvg(fraction_evaluate=0.0), cohort_size=7, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    assert "client-6" in fleet.names(8) and "client-6" not in fleet.names(1)
    with Session.open(tmp_path / "j") as session:
        assert session.table.names[-1] == "client-6" and session.table.sizes[-1] == 70


def test_work_travels_in_the_train_config(fleet: Any, kit: Any) -> None:
    heard: dict[str, Any] = {}

    def train(message: Any, context: Any) -> RecordDict:
        heard[str(context.node_config["client-name"])] = dict(message.content["config"])
        return kit.step(message, context)

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(train), kit.ANSWERS)
    strategy = fleet.strategy(Fixed(work=(0.5, 1.0, 2.0)), FedAvg(), cohort_size=3)
    strategy.start(fleet.grid, kit.model(), 1, train_config=ConfigRecord({"lr": 0.1}))
    assert {n: c["fedcohort.work"] for n, c in heard.items()} == {"client-0": 0.5, "client-1": 1.0, "client-2": 2.0}
    assert all(c["lr"] == 0.1 and c["server-round"] == 1 for c in heard.values())


def test_weights_multiply_in_the_average(fleet: Any, kit: Any) -> None:
    strategy = fleet.strategy(Fixed(weights=(3.0, 1.0)), FedAvg(), cohort_size=2)
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx((3 * 10 * 1 + 20 * 2) / (3 * 10 + 20))


def test_cmfl_works_live(fleet: Any, kit: Any, tmp_path: Path) -> None:
    def against(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        down = {
            k: Array((a.numpy() - 100).astype(a.dtype)) for k, a in message.content["arrays"].items() if k != "seen"
        }
        content["arrays"] = ArrayRecord({**down, "seen": content["arrays"]["seen"]})
        return content

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(against), kit.ANSWERS)
    for number in range(1, 6):
        up = lambda m, c: kit.step(m, type(c)(1, 1, {"partition-id": 59}, RecordDict(), {}, 1))  # noqa: E731
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = cohort_client(kit.client_app(up), kit.ANSWERS)
    strategy = fleet.strategy("fedcm-ts", FedAvg(), cohort_size=6, filter=CMFL(), journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx(60)
    with Session.open(tmp_path / "j") as session:
        assert {r.client: r.kept for r in session.journal.replies()} == {0: False, **dict.fromkeys(range(1, 6), True)}


def test_fedca_works_live(fleet: Any, kit: Any) -> None:
    """Only models whose bias stays below 3 classify the validation set."""

    def logits(arrays: ArrayRecord) -> Any:
        right = float(arrays["bias"].numpy()[0]) < 3
        return np.array([[5.0, 0], [0, 5]]) if right else np.array([[0, 9.0], [9, 0]])

    validation = ServerValidation(logits=logits, labels=np.array([0, 1]))
    strategy = fleet.strategy("all", FedAvg(), filter=FedCA(), validation=validation)
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx((10 * 1 + 20 * 2) / 30)


def test_losses_are_held_against_the_servers_own_live(fleet: Any, kit: Any, tmp_path: Path) -> None:
    audited = create("bounded", of="active-fl", audit=2.0)
    with pytest.raises(ParameterError, match="'validation' is missing"):
        fleet.strategy(audited, FedAvg())
    logits = np.array([[2.0, 0.0], [0.0, 2.0]])
    validation = ServerValidation(logits=lambda arrays: logits, labels=np.array([0, 1]))
    strategy = fleet.strategy(audited, FedAvg(), cohort_size=6, validation=validation, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(), num_rounds=1)
    own = float(np.log1p(np.exp(-2.0)))
    with Session.open(tmp_path / "j") as session:
        assert session.state.bounded_server == pytest.approx(own)
        said = {r.client: r.metrics["loss"] for r in session.journal.replies()}
        counted = session.state.valuation / np.sqrt(np.clip(session.table.sizes, 20, 50))  # of 10 to 60
        assert said[5] == pytest.approx(5.5) and counted == pytest.approx([2 * own] * 6)


def test_signals_reach_the_selector(fleet: Any, kit: Any, tmp_path: Path) -> None:
    mean = sum(10 * (1 + n) * n for n in range(6)) / sum(10 * (1 + n) for n in range(6))  # weighted by num-examples
    wanted = {
        Signal.DURATION: lambda n: 1.0,
        Signal.LOSS: lambda n: abs(0 - n) + 0.5,
        Signal.LOSS_AFTER: lambda n: abs(1 + n - n) + 0.5,
        Signal.UPDATE_NORM: lambda n: (1 + n) * 3.0,
        Signal.UPDATE_DISTANCE: lambda n: abs(n - 2.5) * 3.0,
        Signal.WEIGHTED_UPDATE_DISTANCE: lambda n: abs(n - mean) * 3.0,
        Signal.GRADIENT_NORM: lambda n: n * 3.0,
        Signal.GRADIENT_DISTANCE: lambda n: abs(n - 2.5) * 3.0,
        Signal.WEIGHTED_GRADIENT_DISTANCE: lambda n: abs(n - mean) * 3.0,
    }

    @dataclass(frozen=True, kw_only=True)
    class Curious(Fixed):
        @property
        def requires(self) -> frozenset[Signal]:
            return frozenset(wanted)

        def update(self, state: Any, outcome: Outcome) -> Any:
            for signal, expected in wanted.items():
                np.testing.assert_allclose(
                    outcome[signal], [expected(float(c)) for c in outcome.clients], rtol=1e-6, atol=0.1
                )
            return state

    strategy = fleet.strategy(Curious(), FedAvg(), cohort_size=6, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(), num_rounds=1)
    with Session.open(tmp_path / "j", Curious()) as session:
        assert not session.pending


def test_a_client_that_withholds_a_required_number_is_invalid(fleet: Any, kit: Any, tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy(Fixed):
        @property
        def requires(self) -> frozenset[Signal]:
            return frozenset({Signal.LOSS})

    import dataclasses

    mute = dataclasses.replace(kit.ANSWERS, losses=lambda a, c, r: {"loss": float("nan")})
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(), mute)
    strategy = fleet.strategy(Needy(), FedAvg(), cohort_size=2, journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == 2
    (failure,) = failures(tmp_path / "j")
    assert failure.status == Status.INVALID and "no finite 'loss'" in failure.reason


def test_evaluation_follows_the_seed_and_is_recorded(kit: Any, tmp_path: Path) -> None:
    def run(name: str, seed: int) -> list[int]:
        fleet = kit.Fleet()
        fleet.fill(6)
        strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.34), journal=tmp_path / name, seed=seed)
        strategy.start(fleet.grid, kit.model(), 3, evaluate_fn=lambda r, a: MetricRecord({"accuracy": r / 10}))
        return [m.metadata.dst_node_id for m in fleet.grid.log if m.metadata.message_type == "evaluate"]

    assert run("a", 1) == run("b", 1) != run("c", 2)
    assert len(run("d", 1)) == 6
    metrics = read_journal(tmp_path / "a").metrics()
    assert metrics[2]["accuracy"] == 0.3 and set(metrics[0]) == {"accuracy", "evaluate/value", "train/train-loss"}


def test_evaluation_never_waits_for_nodes_that_are_gone(fleet: Any, kit: Any) -> None:
    inner = FedAvg(fraction_train=0.3, min_train_nodes=1, min_evaluate_nodes=6, min_available_nodes=6)
    fleet.clock.at.append((1.5, lambda: fleet.grid.remove(fleet.grid.node_of("client-5"))))
    strategy = fleet.strategy(Fixed(), inner, wait_for=5)
    result = strategy.start(fleet.grid, kit.model(), num_rounds=3)
    assert fleet.clock.now < 30 and set(result.evaluate_metrics_clientapp) == {1, 2, 3}


def test_a_selector_can_end_the_run(fleet: Any, kit: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Done(Fixed):
        def select(self, state: Any, slate: Slate, answer: Any, rng: Any) -> tuple[Cohort, Any]:
            if slate.round == 2:
                return Cohort(np.empty(0, np.int64), stop="everybody was dropped"), state
            return super().select(state, slate, answer, rng)

    fleet.strategy(Done(), FedAvg()).start(fleet.grid, kit.model(), num_rounds=9)
    assert max(r for _, r in fleet.trained()) == 2


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ParameterError, match="'size'"):
        CohortStrategy("uniform", policy=Policy(size=0))
    with pytest.raises(ParameterError, match="deadline"):
        CohortStrategy("uniform", policy=Policy(deadline=0.0))
    with pytest.raises(ParameterError, match="fraction_train=0"):
        CohortStrategy("uniform", FedAvg(fraction_train=0.0))
    with pytest.raises(ParameterError, match="'validation' is missing"):
        CohortStrategy("uniform", filter=FedCA())
    with pytest.raises(InnerStrategyError, match="cannot be wrapped"):
        CohortStrategy("uniform").configure_train(1, ArrayRecord(), ConfigRecord(), None)  # type: ignore[arg-type]


def test_a_strategy_that_picks_by_itself_is_refused(fleet: Any, kit: Any) -> None:
    class Own(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return list(super().configure_train(server_round, arrays, config, grid))[:1]

    with pytest.raises(InnerStrategyError, match="wrote to 1 of them"):
        fleet.strategy("all", Own()).start(fleet.grid, kit.model())


def test_another_seed_or_selector_cannot_continue_a_journal(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.strategy("uniform", FedAvg(), journal=tmp_path / "j", seed=1).start(fleet.grid, kit.model(), 1)
    with pytest.raises(ValueError, match="written with seed 1"):
        fleet.strategy("uniform", FedAvg(), journal=tmp_path / "j", seed=2).start(fleet.grid, kit.model(), 2)
    with pytest.raises(JournalError, match="written with selector 'uniform'"):
        fleet.strategy("all", FedAvg(), journal=tmp_path / "j", seed=1).start(fleet.grid, kit.model(), 2)


def test_shadows_see_the_round_and_change_nothing(kit: Any, tmp_path: Path) -> None:
    from fedcohort.selectors import ActiveFL

    def run(name: str, shadows: Any) -> Any:
        fleet = kit.Fleet()
        fleet.fill(6)
        strategy = fleet.strategy("uniform", FedAvg(fraction_train=0.5), journal=tmp_path / name, shadows=shadows)
        return strategy.start(fleet.grid, kit.model(), num_rounds=3)

    plain, watched = run("plain", {}), run("watched", {"afl": ActiveFL()})
    np.testing.assert_array_equal(plain.arrays["bias"].numpy(), watched.arrays["bias"].numpy())
    record = read_journal(tmp_path / "watched")
    rows = record.cohorts()
    assert all(set(record.scores(row.ticket)) == {"", "afl"} for row in rows)
    assert all("loss" in reply.metrics for reply in record.replies())


def test_when_all_are_slow_the_slow_ones_are_asked(fleet: Any, kit: Any, tmp_path: Path) -> None:
    for node in fleet.grid.nodes.values():
        node.latency = 500.0
    strategy = fleet.strategy(
        "all", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", deadline=400.0, patience=30.0
    )
    with pytest.raises(RoundError, match="no answer within 400 s"):
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
    assert len(fleet.trained()) == 18  # three tries of six, though they still worked on the one before

"""What an operator relies on: names, shadows, rounds that get stuck, strategies that keep their meaning, restarts."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

from fedcohort.errors import ParameterError
from fedcohort.flower import (
    Answers,
    CohortStrategy,
    Facts,
    FederationTimeoutError,
    RoundError,
    cohort_client,
    failures,
)
from fedcohort.flower.inner import InnerStrategyError
from fedcohort.flower.population import Population
from fedcohort.journal import read_journal
from fedcohort.participation import verify
from fedcohort.rules import Rules
from fedcohort.selectors import PowerOfChoice, Uniform
from fedcohort.session import Session


def value(arrays: Any) -> float:
    return float(arrays["bias"].numpy()[0])


def settle(fleet: Any, federation: Population, rounds: int = 30) -> dict[str, int]:
    for _ in range(rounds):
        federation.refresh()
        fleet.clock.sleep(0.1)
    return {name: card.node for name, card in federation.online.items()}


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["rightful", "thief"])
def test_a_registered_name_cannot_be_stolen(first: str, empty_fleet: Any, kit: Any, caplog: Any) -> None:
    grid = empty_fleet.grid
    federation = Population(grid, (), patience=5, clock=empty_fleet.clock, sleep=empty_fleet.clock.sleep)
    rightful = kit.Node(kit.client_app(), {}, registered="clinic-north")
    thief = kit.Node(cohort_client(kit.client_app()), {"client-name": "clinic-north"})
    order = [(1, rightful), (2, thief)] if first == "rightful" else [(2, thief), (1, rightful)]
    for node_id, node in order:
        grid.add(node, node_id=node_id)
        settle(empty_fleet, federation)
    assert settle(empty_fleet, federation) == {"clinic-north": 1}
    assert "node 2 takes no part: it calls itself 'clinic-north'" in caplog.text


def test_a_registered_name_is_kept_for_its_owner_over_restarts(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    grid = empty_fleet.grid
    for number in range(3):
        grid.add(empty_fleet.node(number, registered=f"clinic-{number}"), node_id=10 + number)
    empty_fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(grid, kit.model(), 1)
    fleet = kit.Fleet()
    for number in range(2):
        fleet.grid.add(fleet.node(number, registered=f"clinic-{number}"), node_id=20 + number)
    thief = kit.Node(cohort_client(kit.client_app()), {"client-name": "clinic-2"})
    fleet.grid.add(thief, node_id=22)  # its owner is offline
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j").start(fleet.grid, kit.model(), 2)
    assert {node for node, _ in fleet.trained()} == {20, 21}


# -- shadows ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Uniform):
    """Breaks in one of its functions, in round 1."""

    where: str = "update"

    def update(self, state: Any, outcome: Any) -> Any:
        if self.where == "update" and outcome.round == 1:
            raise ValueError("broken in update")
        return super().update(state, outcome)

    def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> Any:
        cohort, after = super().select(state, slate, answer, rng)
        if self.where == "scores" and slate.round == 1:
            odd = np.array([object()] * len(slate.candidates))
            return dataclasses.replace(cohort, candidates=slate.candidates, score=odd), after
        return cohort, after


@pytest.mark.parametrize("where", ["update", "scores"])
def test_a_shadow_that_fails_is_dropped_and_the_run_goes_on(where: str, fleet: Any, kit: Any, tmp_path: Path) -> None:
    shadows = {"bad": Breaking(where=where), "good": Uniform()}
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
    strategy.start(fleet.grid, kit.model(), num_rounds=4)
    record = read_journal(tmp_path / "j")
    (body,) = record.events("shadow")
    assert (body["name"], body["what"]) == ("bad", "failed") and body["round"] in (1, 2)
    assert set(record.scores(record.cohorts()[-1].ticket)) == {"", "good"}
    with Session.open(tmp_path / "j") as session:
        assert session.round == 4 and set(session.shadows) == {"good"}


def test_shadows_come_and_go_in_a_running_journal(kit: Any, tmp_path: Path) -> None:
    def run(rounds: int, shadows: Any) -> None:
        fleet = kit.Fleet()
        fleet.fill(6)
        strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)

    run(2, {"old": "uniform"})
    run(4, {"new": "fedcm-ts"})
    record = read_journal(tmp_path / "j")
    per_round = [set(record.scores(row.ticket)) - {""} for row in record.cohorts()]
    assert per_round == [{"old"}, {"old"}, {"new"}, {"new"}]
    assert [(b["name"], b["what"]) for b in record.events("shadow")] == [("old", "removed"), ("new", "added")]


def test_a_shadow_without_its_signals_says_so(fleet: Any, kit: Any, tmp_path: Path) -> None:
    shadows = {"poc": PowerOfChoice()}
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", shadows=shadows)
    strategy.start(fleet.grid, kit.model(), num_rounds=2)
    with Session.open(tmp_path / "j") as session:
        said = session.explain(1).shadows["poc"]
    assert isinstance(said, str) and said.startswith("lacked its signals: it asks") and "loss" in said


# -- rounds that get stuck --------------------------------------------------------------------------------------------


def test_a_round_is_abandoned_after_some_tries(kit: Any, tmp_path: Path) -> None:
    """Two of its clients never come back: three starts are cut off in it, the fourth chooses anew."""

    class PowerCut(BaseException):
        pass

    def start(present: range, cut: bool) -> Any:
        fleet = kit.Fleet()
        for number in present:
            fleet.grid.add(fleet.node(number))
        if cut:
            fleet.grid.hooks.append(lambda m: stop() if m.metadata.message_type == "train" else None)
        strategy = fleet.strategy("all", FedAvg(), journal=tmp_path / "j", cohort_size=4)
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
        return fleet

    def stop() -> None:
        raise PowerCut

    for _ in range(3):
        with pytest.raises(PowerCut):
            start(range(4), cut=True)
    fleet = start(range(2, 6), cut=False)
    assert sorted(fleet.names(1)) == ["client-2", "client-3", "client-4", "client-5"]
    (body,) = read_journal(tmp_path / "j").events("abandoned")
    assert body == {"ticket": 0, "round": 0, "reason": "not finished in 3 tries"}
    with Session.open(tmp_path / "j") as session:
        assert session.round == 2 and not session.pending


def test_an_abandoned_round_is_drawn_anew_and_its_clients_are_free(kit: Any, tmp_path: Path) -> None:
    from fedcohort.clients import ClientTable
    from fedcohort.protocol import RoundReport, RoundRequest, Status

    table = ClientTable(n=100)
    with Session(Uniform(), table, seed=1, journal=tmp_path / "j") as session:
        first = session.ask(RoundRequest(5))
        session.abandon(first.ticket, "the nodes are gone")
        assert session.round == 0 and not session.pending
    with Session.open(tmp_path / "j") as session:
        second = session.ask(RoundRequest(5))
        assert second.round == 0 and second.ticket == 1 and set(second.clients) != set(first.clients)
        session.tell(RoundReport(second.ticket, second.clients))
        assert session.round == 1
        replies = session.journal.replies(first.ticket)
        assert {r.status for r in replies} == {Status.MISSING}
    with Session.open(tmp_path / "j") as session:
        assert session.round == 1 and session.ask(RoundRequest(5)).round == 1


def test_spares_never_close_a_round_below_its_size(empty_fleet: Any, kit: Any) -> None:
    for number in range(4):
        empty_fleet.grid.add(empty_fleet.node(number, latency=1.0 + number))
    strategy = empty_fleet.strategy("all", FedAvg(fraction_evaluate=0.0), cohort_size=4, spares=3)
    result = strategy.start(empty_fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx((1 + 4 + 9 + 16) / 10)


def test_adaptive_clipping_sees_no_round_without_a_model(fleet: Any, kit: Any) -> None:
    """Its norm moves by what the clients say; nobody said anything."""

    def fail(message: Any, context: Any) -> RecordDict:
        raise ValueError("no data")

    inner = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(fraction_evaluate=0.0), 0.0, 6)
    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(fail), kit.ANSWERS)
    norm = inner.clipping_norm
    with pytest.raises(RoundError):
        fleet.strategy("all", inner).start(fleet.grid, kit.model(counter=False), num_rounds=1)
    assert inner.clipping_norm == norm


def test_a_client_that_hangs_in_a_query_is_not_asked_again(fleet: Any, kit: Any) -> None:
    slow = fleet.grid.node_of("client-5")

    def hang(message: Any) -> None:
        if message.metadata.message_type == "query.fedcohort_losses" and message.metadata.dst_node_id == slow:
            fleet.grid.nodes[slow].busy_until = max(fleet.grid.nodes[slow].busy_until, 15.0)

    fleet.grid.hooks.append(hang)
    strategy = fleet.strategy(
        PowerOfChoice(d=6), FedAvg(fraction_evaluate=0.0), cohort_size=2, query_deadline=10.0, deadline=60.0
    )
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    asked = [m for m in fleet.grid.log if m.metadata.message_type == "query.fedcohort_losses"]
    times = [i for i, m in enumerate(asked) if m.metadata.dst_node_id == slow]
    assert len(times) < 8 and times[1] - times[0] > 6  # rounds passed without it


# -- strategies keep their meaning ------------------------------------------------------------------------------------


class Halving(FedAvg):
    """Flower's documented schedule: the strategy writes into the config and finds it there next time."""

    def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
        config["lr"] = config["lr"] * 0.5
        return super().configure_train(server_round, arrays, config, grid)


def test_a_schedule_in_the_config_goes_on_over_rounds_and_restarts(kit: Any, tmp_path: Path) -> None:
    heard: list[float] = []

    def train(message: Any, context: Any) -> RecordDict:
        heard.append(message.content["config"]["lr"])
        return kit.step(message, context)

    for rounds in (2, 4):
        fleet = kit.Fleet()
        for number in range(2):
            fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
        strategy = fleet.strategy("all", Halving(), journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), rounds, train_config=ConfigRecord({"lr": 1.0}))
    assert heard == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625]


def test_a_round_that_is_tried_again_is_configured_once(empty_fleet: Any, kit: Any) -> None:
    heard: list[float] = []

    def train(message: Any, context: Any) -> RecordDict:
        heard.append(message.content["config"]["lr"])
        if len(heard) <= 2:
            raise ValueError("not yet")
        return kit.step(message, context)

    for number in range(2):
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
    strategy = empty_fleet.strategy("all", Halving())
    strategy.start(empty_fleet.grid, kit.model(), 2, train_config=ConfigRecord({"lr": 1.0}))
    assert heard == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_what_cannot_be_wrapped_is_refused_by_name() -> None:
    class Own(FedAvg):
        def start(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(InnerStrategyError, match=r"Own has a start\(\) of its own"):
        CohortStrategy("uniform", Own())
    with pytest.raises(ParameterError, match=r"flwr.serverapp.strategy. Got FedAvg(?s:.*)legacy API"):
        CohortStrategy("uniform", LegacyFedAvg())  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"Got FedAvg, a class"):
        CohortStrategy("uniform", FedAvg)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"Got the class Uniform.(?s:.*)Uniform\(\)"):
        CohortStrategy(Uniform)  # type: ignore[arg-type]
    assert type(CohortStrategy("uniform", filter="cmfl").filter).__name__ == "CMFL"


def test_privacy_wrappers_judge_errors_themselves(fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Flower's wrapper releases nothing when a client failed: noise made for six does not hide a mean of five."""
    tries = 0

    def train(message: Any, context: Any) -> RecordDict:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("out of memory")
        return kit.step(message, context)

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = cohort_client(kit.client_app(train), kit.ANSWERS)
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e9, 6)
    strategy = fleet.strategy("all", inner, journal=tmp_path / "j")
    result = strategy.start(fleet.grid, kit.model(counter=False), num_rounds=1)
    assert value(result.arrays) == pytest.approx(91 / 21)  # of all six, in the second try
    assert [(f.client, f.round) for f in failures(tmp_path / "j")] == [("client-0", 0)]


def test_exact_losses_beside_a_noised_model_are_refused(kit: Any) -> None:
    app = kit.client_app(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])
    with pytest.raises(ParameterError, match=r"LocalDpMod.*loss.*gradient"):
        cohort_client(app, kit.ANSWERS)
    cohort_client(app, Answers(facts=lambda context: Facts(size=3)))


def test_a_fraction_of_one_is_warned_about(fleet: Any, kit: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        fleet.strategy("uniform", FedAvg()).start(fleet.grid, kit.model(), 1)
        assert "fraction_train=1.0 asks for every client" in caplog.text
        caplog.clear()
        fleet.strategy("uniform", FedAvg(), cohort_size=3).start(fleet.grid, kit.model(), 1)
        fleet.strategy("all", FedAvg()).start(fleet.grid, kit.model(), 1)
        assert "fraction_train=1.0" not in caplog.text


# -- restart and waiting ----------------------------------------------------------------------------------------------


def test_the_minimum_online_holds_in_every_round(fleet: Any, kit: Any) -> None:
    fleet.clock.at.append((3.0, lambda: [fleet.grid.remove(fleet.grid.node_of(f"client-{i}")) for i in range(4)]))
    fleet.clock.at.append((40.0, lambda: [fleet.grid.add(fleet.node(i)) for i in range(4)]))
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, wait_for=5)
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    assert fleet.clock.now > 40
    fleet.clock.at.append((fleet.clock.now + 1, lambda: fleet.grid.remove(fleet.grid.node_of("client-5"))))
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, wait_for=6, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"5 of 6 clients have been online for 20 s in round \d"):
        strategy.start(fleet.grid, kit.model(), num_rounds=8)


def test_a_finished_run_says_so_at_once(kit: Any, tmp_path: Path, caplog: Any) -> None:
    fleet = kit.Fleet()
    fleet.fill(3)
    evaluate = lambda r, a: MetricRecord({"accuracy": 0.1 * r})  # noqa: E731
    done = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
        fleet.grid, kit.model(), 2, evaluate_fn=evaluate
    )
    empty = kit.Fleet()  # nobody is online, and nobody is needed
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        again = empty.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
            empty.grid, kit.model(), 2, evaluate_fn=evaluate
        )
    assert empty.clock.now == 0 and "the run is finished" in caplog.text
    assert value(again.arrays) == value(done.arrays)
    assert again.evaluate_metrics_serverapp[2]["accuracy"] == pytest.approx(0.2)
    assert again.train_metrics_clientapp[1]["train-loss"] == done.train_metrics_clientapp[1]["train-loss"]


def test_metrics_of_the_last_round_survive_a_kill(kit: Any, tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    def run(cut: int | None) -> None:
        def evaluate(server_round: int, arrays: Any) -> MetricRecord:
            if server_round == cut:
                raise PowerCut
            return MetricRecord({"accuracy": server_round / 10})

        fleet = kit.Fleet()
        fleet.fill(3)
        strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), 3, evaluate_fn=evaluate)

    with pytest.raises(PowerCut):
        run(cut=2)  # round 2 is closed, its evaluation is not on record
    assert read_journal(tmp_path / "j").metrics()[0]["accuracy"] == 0.1
    run(cut=None)
    assert [m["accuracy"] for m in read_journal(tmp_path / "j").metrics().values()] == [0.1, 0.2, 0.3]


def test_new_facts_reach_the_table(fleet: Any, kit: Any, tmp_path: Path) -> None:
    samples = {"client-0": 10}

    def facts(context: Any) -> Facts:
        return Facts(size=samples.get(str(context.node_config["client-name"]), 1))

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=facts))
    fleet.clock.at.append((10.0, lambda: samples.update({"client-0": 500})))
    strategy = fleet.strategy("size-weighted", FedAvg(), cohort_size=2, journal=tmp_path / "j", describe_every=5.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=30)
    with Session.open(tmp_path / "j") as session:
        assert session.table.sizes[0] == 500
    assert read_journal(tmp_path / "j").events("facts") == [{"clients": [0]}]


def test_other_settings_are_recorded(kit: Any, tmp_path: Path, caplog: Any) -> None:
    for size in (2, 3):
        fleet = kit.Fleet()
        fleet.fill(4)
        with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
            fleet.strategy("uniform", FedAvg(), cohort_size=size, journal=tmp_path / "j").start(
                fleet.grid, kit.model(), size
            )
    assert "cohort-size was 2, is 3" in caplog.text
    assert [body["cohort-size"] for body in read_journal(tmp_path / "j").events("settings")] == [2, 3]


def test_the_log_names_clients(fleet: Any, kit: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        fleet.strategy("all", FedAvg()).start(fleet.grid, kit.model(), 1)
    assert "selected client-0, client-1, client-2, client-3, client-4, client-5 (6 of 6" in caplog.text


# -- rules ------------------------------------------------------------------------------------------------------------


def test_rules_hold_on_a_live_federation(fleet: Any, kit: Any, tmp_path: Path) -> None:
    battery = {f"client-{i}": 20 * i for i in range(6)}

    def facts(context: Any) -> Facts:
        name = str(context.node_config["client-name"])
        return Facts(size=1, attributes={"battery": battery[name], "region": "north" if name < "client-3" else "south"})

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=facts))
    rules = Rules(eligible="battery >= 30", min_separation=2, quotas={"region": 1})
    strategy = fleet.strategy(
        "uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j", rules=rules, describe_every=2.0
    )
    fleet.clock.at.append((10.0, lambda: battery.update({"client-0": 100, "client-1": 100})))
    strategy.start(fleet.grid, kit.model(), num_rounds=16)
    early = {name for r in (1, 2, 3) for name in fleet.names(r)}
    assert early <= {"client-2", "client-3", "client-4", "client-5"}
    assert any("client-0" in fleet.names(r) for r in range(10, 17))
    with Session.open(tmp_path / "j") as session:
        assert "it does not meet battery >= 30" in str(session.explain(0, "client-1"))
    proof = verify(tmp_path / "j")
    assert proof.holds and proof.least_separation is not None and proof.least_separation >= 2


def test_rules_that_admit_nobody_end_the_wait_with_their_reason(fleet: Any, kit: Any) -> None:
    rules = Rules(eligible="battery >= 30")
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, rules=rules, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"The rules have admitted nobody \(it has not said its battery\)"):
        strategy.start(fleet.grid, kit.model(), num_rounds=1)


def test_a_stuck_round_is_abandoned_by_command(kit: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedcohort.cli.app import app
    from fedcohort.clients import ClientTable
    from fedcohort.protocol import RoundRequest

    with Session(Uniform(), ClientTable(names=["a", "b"]), journal=tmp_path / "j", rules=Rules()) as session:
        session.ask(RoundRequest(2))
    done = CliRunner().invoke(app, ["journal", "abandon", str(tmp_path / "j"), "--reason", "gone"])
    assert done.exit_code == 0 and "Ticket 0 is abandoned; free again: " in done.output, done.output
    with Session.open(tmp_path / "j") as session:
        assert session.round == 0 and not session.pending
    again = CliRunner().invoke(app, ["rules", "verify", str(tmp_path / "j")])
    assert again.exit_code == 0 and "The rules held in every round." in again.output, again.output


# -- seeing it --------------------------------------------------------------------------------------------------------


def test_explain_says_why_a_client_failed_and_its_history(fleet: Any, kit: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedcohort.cli.app import app

    def fail(message: Any, context: Any) -> RecordDict:
        raise ValueError("out of memory")

    fleet.grid.nodes[fleet.grid.node_of("client-1")].app = cohort_client(kit.client_app(fail), kit.ANSWERS)
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j.sqlite").start(fleet.grid, kit.model(), num_rounds=2)
    ask = lambda *options: CliRunner().invoke(app, ["explain", str(tmp_path / "j.sqlite"), *options])  # noqa: E731
    assert "client-1: FAILED: " in ask("--round", "1").output and "out of memory" in ask("--round", "1").output
    one = ask("--round", "0", "--client", "client-1").output
    assert "Its reply: FAILED:" in one and "out of memory" in one
    history = ask("--client", "client-1").output
    assert "was picked in 2 of 2 rounds" in history and history.count("FAILED") == 2


def test_data_may_come_as_dataloaders(kit: Any) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from fedcohort.flower import torch_answers

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


# -- privacy accountants ----------------------------------------------------------------------------------------------


class Accountant:
    """Counts releases, with the interface of Flower's own."""

    def __init__(self, population: int) -> None:
        self.config = PrivacyConfig(
            target_delta=1e-5,
            population_size=population,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        self.releases = 0

    def would_exceed(self, event: Any) -> bool:
        return False

    def compose(self, event: Any, count: int = 1) -> None:
        self.releases += count

    def get_privacy_spent(self) -> PrivacySpent:
        return PrivacySpent(float(self.releases), 1e-5, self.releases, "count")

    def state_dict(self) -> dict[str, int]:
        return {"releases": self.releases}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.releases = state["releases"]


def equal(kit: Any) -> Any:
    """Trains as all others do, with the weight of all others, as an accountant demands."""

    def train(message: Any, context: Any) -> RecordDict:
        content = kit.step(message, context)
        content["metrics"]["num-examples"] = 1
        return content

    return train


def accounted(accountant: Accountant) -> Any:
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 1e-9, 100.0, 4, accountant=accountant
    )


def test_with_an_accountant_a_cohort_that_lacks_a_node_is_chosen_anew(kit: Any, tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    def stop(message: Any) -> None:
        if message.metadata.message_type == "train":
            raise PowerCut

    def start(present: range, accountant: Accountant, cut: bool) -> Any:
        fleet = kit.Fleet()
        for number in present:
            fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(equal(kit)), kit.ANSWERS)))
        fleet.grid.hooks += [stop] if cut else []
        strategy = fleet.strategy("all", accounted(accountant), cohort_size=4, journal=tmp_path / "j", patience=20.0)
        strategy.start(fleet.grid, kit.model(counter=False), num_rounds=2)
        return fleet

    with pytest.raises(PowerCut):
        start(range(4), Accountant(6), cut=True)
    with pytest.raises(FederationTimeoutError):  # three are too few: it waits, and says so
        start(range(1, 4), Accountant(6), cut=False)
    accountant = Accountant(6)
    fleet = start(range(1, 5), accountant, cut=False)
    assert sorted(fleet.names(1)) == ["client-1", "client-2", "client-3", "client-4"]
    assert accountant.releases == 2
    (body,) = read_journal(tmp_path / "j").events("abandoned")
    assert "client-0 not online" in body["reason"]


def test_with_an_accountant_a_round_with_a_failure_is_tried_again(empty_fleet: Any, kit: Any) -> None:
    failed = []

    def train(message: Any, context: Any) -> RecordDict:
        if not failed:
            failed.append(1)
            raise ValueError("out of memory")
        return equal(kit)(message, context)

    for number in range(4):
        app = cohort_client(kit.client_app(train if number == 0 else equal(kit)), kit.ANSWERS)
        empty_fleet.grid.add(empty_fleet.node(number, app))
    accountant = Accountant(4)
    strategy = empty_fleet.strategy("all", accounted(accountant), cohort_size=4)
    result = strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=2)
    assert accountant.releases == 2 and value(result.arrays) == pytest.approx(5.0, abs=1e-3)

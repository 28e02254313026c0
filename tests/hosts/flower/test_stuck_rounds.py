"""Rounds that get stuck: abandoned after some tries or by command, with spares, privacy wrappers and accountants."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import (
    Facts,
    FederationTimeoutError,
    RoundError,
    cohort_client,
)
from fedcohort.journal import read_journal
from fedcohort.selectors import PowerOfChoice, Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules


def value(arrays: Any) -> float:
    return float(arrays["bias"].numpy()[0])


def test_a_round_is_abandoned_after_some_tries(kit: Any, tmp_path: Path) -> None:
    """Two of its clients never come back: three starts are interrupted in it, the fourth chooses another cohort."""

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
    assert body | {"ticket": 0, "round": 0, "reason": "not finished in 3 tries"} == body
    with Session.open(tmp_path / "j") as session:
        assert session.round == 2 and not session.pending


def test_an_abandoned_round_is_drawn_anew_and_its_clients_are_free(kit: Any, tmp_path: Path) -> None:
    from fedcohort.core.clients import ClientTable
    from fedcohort.core.protocol import RoundReport, RoundRequest, Status

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


@pytest.mark.parametrize("size", [1, 2])
def test_one_client_that_fails_on_purpose_does_not_end_the_run(size: int, fleet: Any, kit: Any, tmp_path: Path) -> None:
    """The selector's favourite client makes the round fail, and is left out of the next try, even after a restart."""

    def fails(message: Any, context: Any) -> Any:
        raise RuntimeError("not me")

    answers = dataclasses.replace(kit.ANSWERS, facts=lambda _: Facts(size=10**9), losses=lambda *_: {"loss": 1e6})
    fleet.grid.add(fleet.node(6, cohort_client(kit.client_app(fails), answers)))
    journal = tmp_path / "run"
    for rounds in (2, 4):
        strategy = fleet.strategy(
            "power-of-choice", journal=journal, cohort_size=size, min_replies=size, wait_for=7, tries=2
        )
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)
    with closing(read_journal(journal)) as record:
        drawn = [list(record.table()[0].names_of(row.clients)) for row in record.cohorts()]
        replies = [reply.status for reply in record.replies()]
    assert ["client-6" in names for names in drawn] == [True, False] * 4
    assert all(len(names) == size for names in drawn)
    assert replies.count(Status.FAILED) == 4


def test_spares_never_close_a_round_below_its_size(empty_fleet: Any, kit: Any) -> None:
    for number in range(4):
        empty_fleet.grid.add(empty_fleet.node(number, latency=1.0 + number))
    strategy = empty_fleet.strategy("all", FedAvg(fraction_evaluate=0.0), cohort_size=4, spares=3)
    result = strategy.start(empty_fleet.grid, kit.model(), num_rounds=1)
    assert value(result.arrays) == pytest.approx((1 + 4 + 9 + 16) / 10)


def test_adaptive_clipping_sees_no_round_without_a_model(fleet: Any, kit: Any) -> None:
    """Its norm depends on the clients' reports, and there are none."""

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


def test_a_stuck_round_is_abandoned_by_command(kit: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedcohort.cli.app import app
    from fedcohort.core.clients import ClientTable
    from fedcohort.core.protocol import RoundRequest

    with Session(
        Uniform(), ClientTable(names=["a", "b"]), journal=tmp_path / "j", rules=Rules(max_participations=5)
    ) as session:
        session.ask(RoundRequest(2))
    done = CliRunner().invoke(app, ["journal", "abandon", str(tmp_path / "j"), "--reason", "gone"])
    assert done.exit_code == 0 and "Ticket 0 is abandoned; free again: " in done.output, done.output
    with Session.open(tmp_path / "j") as session:
        assert session.round == 0 and not session.pending
    copied = CliRunner().invoke(app, ["journal", "copy", str(tmp_path / "j"), str(tmp_path / "copy")])
    assert copied.exit_code == 0 and "has 0 rounds." in copied.output, copied.output
    checked = CliRunner().invoke(app, ["journal", "verify", str(tmp_path / "j")])
    assert "1 cohorts of 0 rounds, 2 clients" in checked.output, checked.output
    again = CliRunner().invoke(app, ["journal", "rules", "prove", str(tmp_path / "j")])
    assert again.exit_code == 0 and "The rules held in every round." in again.output, again.output


class Accountant:
    """Counts releases, with the interface of Flower's accountant."""

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
    """Trains like all others, with the same weight, as an accountant demands."""

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
    with pytest.raises(FederationTimeoutError):  # three are too few, so the run waits and gives up
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

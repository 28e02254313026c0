"""Names and node ids."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp

from fedcohort.core.clients import LabelFactor
from fedcohort.core.errors import SignalError
from fedcohort.core.signals import Signal
from fedcohort.core.text import natural
from fedcohort.hosts.flower import Answers, Facts, cohort_client
from fedcohort.hosts.flower.exchange import Outbox
from fedcohort.hosts.flower.population import Population
from fedcohort.hosts.flower.roster import Roster


def settle(fleet: Any, roster: Roster, seconds: float = 3.0) -> None:
    end = fleet.clock.now + seconds
    while fleet.clock.now < end:
        roster.refresh()
        fleet.clock.sleep(0.1)


def test_everybody_is_asked_once(fleet: Any) -> None:
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    settle(fleet, roster, 300)
    assert list(roster.online) == [f"client-{i}" for i in range(6)]
    assert len(fleet.grid.log) == 6 and roster.unanswered == 0 and roster.nodes == 6


def test_natural_order_of_names() -> None:
    names = ["client-10", "client-2", "b7", "b", "7", "a-1-10", "a-1-9"]
    assert sorted(names, key=natural) == ["7", "a-1-9", "a-1-10", "b", "b7", "client-2", "client-10"]


def test_the_newest_node_of_a_name_counts(fleet: Any, caplog: Any) -> None:
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    settle(fleet, roster)
    old = fleet.grid.node_of("client-2")
    new = fleet.grid.add(fleet.node(2))
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        settle(fleet, roster)
    assert roster.online["client-2"].node == new and len(roster.online) == 6
    assert f"node {new} answers to the name 'client-2'" in caplog.text
    # Nothing changes when the old node finally goes offline.
    fleet.grid.remove(old)
    settle(fleet, roster)
    assert roster.online["client-2"].node == new


def test_a_client_whose_facts_fail_is_asked_again_later(empty_fleet: Any, kit: Any, caplog: Any) -> None:
    state = {"broken": True}

    def facts(context: Context) -> Facts:
        if state["broken"]:
            raise FileNotFoundError("the data volume is not mounted")
        return Facts(size=1)

    empty_fleet.grid.add(empty_fleet.node(0, cohort_client(kit.client_app(), Answers(facts=facts))))
    roster = Roster(empty_fleet.grid, empty_fleet.clock, empty_fleet.clock.sleep)
    settle(empty_fleet, roster, 60)
    assert not roster.online and "the data volume is not mounted" in caplog.text
    assert len(empty_fleet.grid.log) == 1
    state["broken"] = False
    settle(empty_fleet, roster, 100)
    assert list(roster.online) == ["client-0"]


def test_a_node_that_never_says_who_it_is_is_asked_again(fleet: Any) -> None:
    silent = fleet.grid.node_of("client-0")
    fleet.grid.cut(silent)
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    settle(fleet, roster, 10)
    assert len(roster.online) == 5 and roster.unanswered == 1
    fleet.grid.dead.clear()
    settle(fleet, roster, 10)
    assert len(roster.online) == 6


def test_a_description_that_cannot_be_read_is_no_client(empty_fleet: Any, kit: Any, caplog: Any) -> None:
    app = ClientApp()

    @app.query("fedcohort_describe")
    def other_version(message: Any, context: Any) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        return Message(RecordDict({"fedcohort": ConfigRecord({"version": 99})}), reply_to=message)

    empty_fleet.grid.add(empty_fleet.node(0, app))
    roster = Roster(empty_fleet.grid, empty_fleet.clock, empty_fleet.clock.sleep)
    settle(empty_fleet, roster, 10)
    assert not roster.online and "version 99" in caplog.text


def test_sealed_labels_reach_whoever_can_open_them(empty_fleet: Any, kit: Any) -> None:
    for number in range(3):
        answers = Answers(facts=lambda c: Facts(size=5, sealed_labels=bytes([int(c.node_config["partition-id"]), 2])))
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(), answers)))
    required = {Signal.SIZES, Signal.LABEL_PRODUCTS}
    seen: dict[str, bytes] = {}

    class Opener:
        def check(self, client: str, sealed: bytes) -> None:
            pass

        def open(self, sealed: Any, sizes: Any, before: Any) -> LabelFactor:
            assert sizes == dict.fromkeys(sealed, 5) and not before
            seen.update(sealed)
            return LabelFactor([[float(b) for b in data] for data in sealed.values()], classes=2)

    clock = empty_fleet.clock
    closed = Population(empty_fleet.grid, required, patience=10, clock=clock, sleep=clock.sleep)
    with pytest.raises(SignalError, match="label-products"):
        closed.assemble(3)
    federation = Population(empty_fleet.grid, required, patience=10, labels=Opener(), clock=clock, sleep=clock.sleep)
    federation.assemble(3)
    table = federation.table(list(federation.online.values()))
    assert table.signals == {Signal.SIZES, Signal.LABEL_PRODUCTS}
    assert seen == {f"client-{i}": bytes([i, 2]) for i in range(3)}


def test_label_counts_of_different_lengths_are_filled_up(empty_fleet: Any, kit: Any) -> None:
    for number in range(3):
        answers = Answers(facts=lambda c: Facts(label_counts=[1] * min(2 + int(c.node_config["partition-id"]), 3)))
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(), answers)))
    clock = empty_fleet.clock
    federation = Population(empty_fleet.grid, {Signal.LABEL_COUNTS}, patience=10, clock=clock, sleep=clock.sleep)
    federation.assemble(3)
    assert federation.table(list(federation.online.values())).label_counts.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]


def test_messages_the_superlink_refuses_are_named(fleet: Any, kit: Any) -> None:
    from flwr.app import Message, RecordDict

    class Refusing:
        def push_messages(self, messages: Any) -> list[str]:
            for i, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = f"m{i}"
            return ["m0"]  # an in-memory grid leaves out messages that it refuses

    outbox = Outbox(Refusing(), fleet.clock, fleet.clock.sleep)  # type: ignore[arg-type]
    message = [Message(RecordDict(), dst_node_id=i, message_type="query") for i in (1, 2)]
    assert outbox.send({"a": message[0], "b": message[1]}) == ["b"]
    assert outbox.unanswered() == {"a"}
    assert outbox.send({}) == []

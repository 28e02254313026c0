"""A node has one name as long as it is connected, so it cannot escape rules by renaming itself."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from fedcohort.audit.participation import prove_participation
from fedcohort.core.errors import ParameterError
from fedcohort.hosts.flower import FederationTimeoutError
from fedcohort.hosts.flower.roster import Roster
from fedcohort.session.rules import Rules


def renaming(fleet: Any, node: int) -> None:
    """Let a node give itself another name whenever it is asked."""
    fresh = (f"alias-{i}" for i in itertools.count())

    def rename(message: Message) -> None:
        if message.metadata.dst_node_id == node and message.metadata.message_type.startswith("query"):
            fleet.grid.nodes[node].config["client-name"] = next(fresh)

    fleet.grid.hooks.append(rename)


def settle(fleet: Any, roster: Roster, seconds: float = 3.0) -> None:
    end = fleet.clock.now + seconds
    while fleet.clock.now < end:
        roster.refresh()
        fleet.clock.sleep(0.1)


def test_a_node_that_renames_itself_takes_part_once_a_round_and_within_its_limit(
    empty_fleet: Any, kit: Any, tmp_path: Path, caplog: Any
) -> None:
    empty_fleet.fill(5)
    rogue = empty_fleet.grid.node_of("client-0")
    renaming(empty_fleet, rogue)
    strategy = empty_fleet.strategy(
        "uniform", FedAvg(fraction_evaluate=0.0), cohort_size=3, journal=tmp_path / "j", describe_every=1.0,
        rules=Rules(max_participations=3), seed=4,
    )  # fmt: skip
    strategy.start(empty_fleet.grid, kit.model(), num_rounds=5)
    trained = empty_fleet.trained()
    assert max(Counter(trained).values()) == 1  # nobody twice in one cohort
    assert Counter(node for node, _ in trained)[rogue] == 3
    proof = prove_participation(tmp_path / "j")
    assert proof.holds and proof.clients == 5
    assert f"node {rogue} now calls itself 'alias-1'; it stays 'alias-0'" in caplog.text


def test_a_blocked_node_does_not_come_back_under_another_name(fleet: Any, kit: Any, tmp_path: Path) -> None:
    rogue = fleet.grid.node_of("client-2")

    def rename() -> None:
        fleet.grid.nodes[rogue].config["client-name"] = "somebody-new"

    fleet.clock.at.append((4.0, rename))
    strategy = fleet.strategy(
        "uniform", FedAvg(fraction_evaluate=0.0), cohort_size=3, journal=tmp_path / "j", describe_every=1.0,
        rules=Rules(blocked=("client-2",)),
    )  # fmt: skip
    strategy.start(fleet.grid, kit.model(), num_rounds=12)
    assert rogue not in {node for node, _ in fleet.trained()}


def test_what_a_renamed_node_says_about_its_data_is_taken_over(fleet: Any) -> None:
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    roster.describe_every = 1.0
    settle(fleet, roster)
    node = fleet.grid.node_of("client-1")
    fleet.grid.nodes[node].config.update({"client-name": "client-5", "partition-id": 3})
    settle(fleet, roster)
    assert roster.online["client-1"].node == node and roster.online["client-1"].description.size == 40
    assert roster.online["client-5"].node != node and len(roster.online) == 6


def test_a_name_does_not_wander_between_two_nodes_that_give_it(fleet: Any, caplog: Any) -> None:
    """The later node counts, however often the older one is asked again."""
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    roster.describe_every = 1.0
    settle(fleet, roster)
    later = fleet.grid.add(fleet.node(2))
    settle(fleet, roster, 1.0)
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        caplog.clear()
        for _ in range(10):
            settle(fleet, roster, 1.0)
            assert roster.online["client-2"].node == later
    assert not caplog.records


def test_a_node_keeps_its_name_while_its_connection_is_lost(fleet: Any) -> None:
    roster = Roster(fleet.grid, fleet.clock, fleet.clock.sleep)
    settle(fleet, roster)
    node_id = fleet.grid.node_of("client-4")
    node = fleet.grid.nodes[node_id]
    fleet.grid.remove(node_id)
    settle(fleet, roster)
    assert "client-4" not in roster.online
    node.config["client-name"] = "client-x"
    fleet.grid.add(node, node_id=node_id)  # the same key: Flower gives it the same id
    settle(fleet, roster)
    assert roster.online["client-4"].node == node_id and "client-x" not in roster.online


def test_registered_nodes_only(empty_fleet: Any, kit: Any, tmp_path: Path, caplog: Any) -> None:
    grid = empty_fleet.grid
    for number in range(5):
        registered = f"clinic-{number}" if number < 3 else ""
        grid.add(empty_fleet.node(number, registered=registered), node_id=10 + number)
    strategy = empty_fleet.strategy("all", FedAvg(), journal=tmp_path / "j", registered_only=True)
    strategy.start(grid, kit.model(), num_rounds=2)
    assert {node for node, _ in empty_fleet.trained()} == {10, 11, 12}
    assert "node 13 is left out: 'client-3' is not a registered name" in caplog.text


def test_registered_nodes_only_and_nobody_is(fleet: Any, kit: Any) -> None:
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, registered_only=True, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"6 nodes.*: client-0, client-1"):
        strategy.start(fleet.grid, kit.model(), num_rounds=1)
    with pytest.raises(ParameterError, match="registered_only"):
        fleet.strategy("uniform", registered_only="yes")


def test_a_proof_says_whose_names_were_bound_to_a_key(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """A name counts as registered only from its registration on; earlier participation under it proves nothing."""
    grid = empty_fleet.grid
    grid.add(empty_fleet.node(0, registered="clinic-0"), node_id=10)
    grid.add(empty_fleet.node(1), node_id=11)
    empty_fleet.strategy("all", FedAvg(), journal=tmp_path / "j", rules=Rules(max_participations=9)).start(
        grid, kit.model(), num_rounds=3
    )
    proof = prove_participation(tmp_path / "j")
    assert (proof.registered, proof.unregistered) == (3, 3)
    later = kit.Fleet()
    for number, name in enumerate(("clinic-0", "client-1")):
        later.grid.add(later.node(number, registered=name), node_id=20 + number)
    later.strategy("all", FedAvg(), journal=tmp_path / "j").start(later.grid, kit.model(), num_rounds=5)
    proof = prove_participation(tmp_path / "j")
    assert (proof.registered, proof.unregistered) == (7, 3)


@pytest.mark.parametrize("named", [{"blocked": ("cafe\u0301",)}, {"paused": {"cafe\u0301": 9}}])
def test_rules_name_a_client_in_either_form_of_unicode(named: dict[str, Any], fleet: Any, kit: Any) -> None:
    """Names that look the same are the same client, also in the rules."""
    node = fleet.grid.node_of("client-3")
    fleet.grid.nodes[node].config["client-name"] = "caf\u00e9"
    rules = Rules(**named)
    fleet.strategy("uniform", FedAvg(), cohort_size=5, rules=rules).start(fleet.grid, kit.model(), num_rounds=3)
    assert node not in {trained for trained, _ in fleet.trained()}

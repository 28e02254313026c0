"""Names: whoever is registered keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import (
    FedAvg,
)

from fedcohort.flower import (
    cohort_client,
)
from fedcohort.flower.population import Population


def settle(fleet: Any, federation: Population, rounds: int = 30) -> dict[str, int]:
    for _ in range(rounds):
        federation.refresh()
        fleet.clock.sleep(0.1)
    return {name: card.node for name, card in federation.online.items()}


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


def test_the_older_node_of_a_name_comes_back_when_the_newer_one_goes(fleet: Any, kit: Any, tmp_path: Path) -> None:
    federation = Population(fleet.grid, (), patience=5, clock=fleet.clock, sleep=fleet.clock.sleep)
    federation.assemble(6)
    old = fleet.grid.node_of("client-3")
    new = fleet.grid.add(fleet.node(3))

    assert settle(fleet, federation)["client-3"] == new
    fleet.grid.remove(new)
    assert settle(fleet, federation)["client-3"] == old

"""Which names are allowed, and that registered names cannot be taken by others."""

from __future__ import annotations

import random
import sys
import unicodedata
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from flwr.serverapp.strategy import (
    FedAvg,
)
from hypothesis import given

from fedcohort.core.clients import ClientTable
from fedcohort.core.text import natural
from fedcohort.hosts.flower import (
    cohort_client,
)
from fedcohort.hosts.flower.population import Population
from fedcohort.hosts.wire import Description
from fedcohort.journal import read_journal
from fedcohort.session.explain import history

# isdigit() is true for all of these, but int() accepts none.
DIGITS = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isdigit() and not c.isdecimal()]


@given(st.lists(st.text(st.sampled_from(["0", "1", "9", "²", "①", "٣", "a", "-", "\ud800"]), max_size=6), unique=True),
       st.randoms(use_true_random=False))  # fmt: skip
def test_any_names_have_one_order(names: list[str], shuffle: random.Random) -> None:
    names += ["9" * 5000, "client-9", "client-10", *DIGITS]
    names = list(dict.fromkeys(names))
    order = sorted(names, key=natural)
    assert order.index("client-9") < order.index("client-10")
    shuffle.shuffle(names)
    assert sorted(names, key=natural) == order


@pytest.mark.parametrize("odd", ["²", "1²", "①", "".join(DIGITS[:100]), "e\u0301", "[/x]", "9" * 200])
def test_no_name_ends_a_run_or_its_restart(odd: str, empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for fleet, rounds in ((empty_fleet, 1), (kit.Fleet(), 2)):
        for number, name in enumerate(["client-10", "client-9", odd, "client-09"]):
            app = cohort_client(kit.client_app(), kit.ANSWERS)
            fleet.grid.add(kit.Node(app, {"client-name": name, "partition-id": number}), node_id=100 * rounds + number)
        fleet.strategy("size-weighted", FedAvg(), cohort_size=4, journal=tmp_path / "j").start(
            fleet.grid, kit.model(), rounds
        )
    record = read_journal(tmp_path / "j")
    name = unicodedata.normalize("NFC", odd)
    assert set(record.table()[0].names) == {"client-10", "client-9", "client-09", name}
    assert [part.picked for part in history(record, name)] == [True, True]


@pytest.mark.parametrize("name", [" a", "a ", "a\nb", "a\u200b", "\ud800", "x" * 201, "\u00a0"])
def test_a_name_is_printable_short_and_without_spaces_around_it(
    name: str, empty_fleet: Any, kit: Any, caplog: Any
) -> None:
    with pytest.raises(ValueError, match="'name' must"):
        Description.from_record({"version": 1, "name": name, "signals": []})
    if name == "\ud800":
        return  # no message can carry it
    empty_fleet.fill(2)
    app = cohort_client(kit.client_app(), kit.ANSWERS)
    empty_fleet.grid.add(kit.Node(app, {"client-name": name, "partition-id": 7}))
    result = empty_fleet.strategy("all", FedAvg()).start(empty_fleet.grid, kit.model(), 1)
    assert "'name' must" in caplog.text and result.arrays["bias"].numpy()[0] == pytest.approx(5 / 3)


def test_the_same_text_is_the_same_client_however_it_is_encoded(empty_fleet: Any, kit: Any, caplog: Any) -> None:
    grid = empty_fleet.grid
    federation = Population(grid, (), patience=5, clock=empty_fleet.clock, sleep=empty_fleet.clock.sleep)
    grid.add(kit.Node(kit.client_app(), {}, registered="Orl\u00e9ans"), node_id=1)
    grid.add(kit.Node(cohort_client(kit.client_app()), {"client-name": "Orle\u0301ans"}), node_id=2)
    assert settle(empty_fleet, federation) == {"Orl\u00e9ans": 1}
    assert "the name of a registered node" in caplog.text


@pytest.mark.parametrize("text", ["9" * 5000, "²", "-1", "--1", "٣", "03", "3"])
def test_a_table_without_names_knows_none_but_its_numbers(text: str) -> None:
    assert text not in ClientTable(n=3)


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
    assert "node 2 is left out: it calls itself 'clinic-north'" in caplog.text


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

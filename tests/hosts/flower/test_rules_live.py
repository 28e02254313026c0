"""An operator's rules on a live federation."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import (
    FedAvg,
)

from fedcohort.audit.participation import prove_participation
from fedcohort.core.errors import ParameterError
from fedcohort.hosts import EarlyStop
from fedcohort.hosts.flower import (
    Facts,
    FederationTimeoutError,
    cohort_client,
)
from fedcohort.session import Session
from fedcohort.session.rules import Rules


def test_rules_hold_on_a_live_federation(fleet: Any, kit: Any, tmp_path: Path) -> None:
    battery = {f"client-{i}": 20 * i for i in range(6)}

    def facts(context: Any) -> Facts:
        name = str(context.node_config["client-name"])
        return Facts(size=1, attributes={"battery": battery[name], "region": "north" if name < "client-3" else "south"})

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=facts))
    rules = Rules(eligible="battery >= 30", min_separation=2, quotas={"region": {"north": 1, "south": 1}})
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
    proof = prove_participation(tmp_path / "j")
    assert proof.holds and proof.least_separation is not None and proof.least_separation >= 2


def test_rules_that_name_nobody_are_noticed(fleet: Any, kit: Any, caplog: Any) -> None:
    """A mistyped name blocks nobody; there is only a warning, because the client may still come."""
    rules = Rules(blocked=("client-1", "klient-2"), pinned=("client-3",), budgets={"client-9": {"rounds": 2}})
    fleet.strategy("uniform", FedAvg(), cohort_size=2, rules=rules).start(fleet.grid, kit.model(), num_rounds=1)
    assert "no client is called 'klient-2', 'client-9' so far, which the rules name" in caplog.text


def test_rules_that_admit_nobody_end_the_wait_with_their_reason(fleet: Any, kit: Any) -> None:
    rules = Rules(eligible="battery >= 30")
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, rules=rules, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"rules.*battery"):
        strategy.start(fleet.grid, kit.model(), num_rounds=1)


@pytest.mark.parametrize("early_stop", [None, EarlyStop("value", models=50)])
def test_rules_that_cannot_be_kept_are_refused_before_anything_is_recorded(
    early_stop: EarlyStop | None, empty_fleet: Any, kit: Any, tmp_path: Path
) -> None:
    empty_fleet.fill(8)
    settings = {"cohort_size": 3, "journal": tmp_path / "j", "early_stop": early_stop}
    impossible = r"any 5 rounds in a row need 3 x 5 = 15 different clients.* 8 clients"
    with pytest.raises(ParameterError, match=impossible):
        empty_fleet.strategy("uniform", FedAvg(), rules=Rules(min_separation=5), **settings).start(
            empty_fleet.grid, kit.model(), num_rounds=20
        )
    assert not (tmp_path / "j").exists() and not empty_fleet.trained()
    empty_fleet.strategy("uniform", FedAvg(), rules=Rules(min_separation=2), **settings).start(
        empty_fleet.grid, kit.model(), num_rounds=2
    )
    with pytest.raises(ParameterError, match=impossible):
        empty_fleet.strategy("uniform", FedAvg(), rules=Rules(min_separation=5), **settings).start(
            empty_fleet.grid, kit.model(), num_rounds=20
        )
    proof = prove_participation(tmp_path / "j")
    assert proof.rules == Rules(min_separation=2) and len(proof.changes) == 1


def test_rules_that_do_not_last_are_warned_of(fleet: Any, kit: Any, tmp_path: Path, caplog: Any) -> None:
    strategy = fleet.strategy(
        "uniform", FedAvg(), cohort_size=3, journal=tmp_path / "j", rules=Rules(max_participations=2), patience=5.0
    )
    strategy.start(fleet.grid, kit.model(), num_rounds=4)
    assert "unless other clients join" not in caplog.text
    with pytest.raises(FederationTimeoutError, match=r"2 times"):
        strategy.start(fleet.grid, kit.model(), num_rounds=5)
    assert "unless other clients join: 1 rounds of 3 need 3 participations" in caplog.text


def test_a_run_that_is_continued_says_which_rules_hold(fleet: Any, kit: Any, tmp_path: Path, caplog: Any) -> None:
    def start(rounds: int, rules: Rules | None) -> None:
        caplog.clear()
        with caplog.at_level(logging.INFO, "flwr.fedcohort"):
            strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", rules=rules)
            strategy.start(fleet.grid, kit.model(), num_rounds=rounds)

    start(1, Rules(max_participations=4))
    assert "the rules go by names, and 6 of 6 clients are not registered (client-0, client-1, " in caplog.text
    start(2, None)
    assert "the rules of the journal stay in force: Rules(max_participations=4); rules=Rules() drops" in caplog.text
    start(3, Rules(max_participations=3))
    assert "the rules change from round 2 on: max_participations was 4, is now 3" in caplog.text
    start(4, Rules())
    assert "max_participations was 3, is now unset" in caplog.text and "go by names" not in caplog.text
    start(5, None)
    assert "stay in force" not in caplog.text
    assert [change.round for change in prove_participation(tmp_path / "j").changes] == [0, 2, 3]

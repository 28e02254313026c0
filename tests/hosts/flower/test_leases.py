"""Two Flower runs that share a federation's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import FedAvg

from fedcohort.hosts.leases import Leases
from fedcohort.journal import read_journal


def test_a_client_that_works_for_another_run_is_no_candidate(kit: Any, tmp_path: Path) -> None:
    fleet = kit.Fleet()
    fleet.fill(6)
    plain = fleet.strategy("uniform", FedAvg(), cohort_size=3, journal=tmp_path / "before")
    plain.start(fleet.grid, kit.model(), num_rounds=1)
    record = read_journal(tmp_path / "before")
    names = record.table()[0].names
    record.close()
    other = Leases(tmp_path / "leases.sqlite", "another run")
    other.take(names[:3])
    strategy = fleet.strategy(
        "uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j", leases=tmp_path / "leases.sqlite", wait_for=2
    )
    strategy.start(fleet.grid, kit.model(), num_rounds=4)
    record = read_journal(tmp_path / "j")
    table, _ = record.table()
    chosen = {name for row in record.cohorts() for name in table.names_of(row.clients)}
    record.close()
    assert len(table.names) == 6 and chosen and not chosen & set(names[:3])
    assert other.elsewhere() == {}

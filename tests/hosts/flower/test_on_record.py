"""What clients of a live run can compare with its journal, and clients that were removed from it."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.serverapp.strategy import FedAvg
from typer.testing import CliRunner

from fedcohort.audit.choices import audit_journal, read_receipts
from fedcohort.cli.app import app
from fedcohort.core.errors import InputError
from fedcohort.hosts.flower import CohortStrategy, cohort_client
from fedcohort.journal import read_journal
from fedcohort.journal.signing import generate, read_public


def test_clients_keep_what_the_server_is_committed_to_also_of_draws_it_abandons(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "operator.key"
    public = read_public(generate(key))

    def play(journal: Path, failing: int) -> list[str]:
        """Return what the clients logged; the first so many train messages fail."""
        left = [failing]

        def train(message: Any, context: Any) -> RecordDict:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("out of memory")
            return kit.step(message, context)

        fleet = kit.Fleet()
        for number in range(6):
            fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=journal, audit=True, sign=key, seed=1)
            strategy.start(fleet.grid, kit.model(), num_rounds=4)
        return re.findall(r"the server is committed to (.*)", caplog.text)

    kept = tmp_path / "kept.txt"
    kept.write_text("\n".join(dict.fromkeys(play(tmp_path / "a.sqlite", failing=2))))
    receipts = read_receipts(kept)
    assert len(receipts) == 5 and all("signed " in source for source in receipts.values())
    assert [source.split(",")[0] for source in receipts.values()] == [
        "draw 1 for round 0", "draw 2 for round 0", "draw 3 for round 1", "draw 4 for round 2", "draw 5 for round 3",
    ]  # fmt: skip
    found = audit_journal(tmp_path / "a.sqlite", seed=1, receipts=receipts, public=public)
    assert found.confirmed and (found.draws, found.abandoned, found.unexplained) == (5, 1, 0), found.problem
    # The journal that the server would rather have written: without the draw it did not like.
    play(tmp_path / "b.sqlite", failing=0)
    assert audit_journal(tmp_path / "b.sqlite", seed=1, public=public).confirmed
    other = audit_journal(tmp_path / "b.sqlite", seed=1, receipts=receipts, public=public)
    assert not other.confirmed and "draw 1 for round 0" in str(other.problem)


def test_a_signature_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        CohortStrategy("uniform", FedAvg(), sign=tmp_path / "k")


@pytest.mark.parametrize("audit", [False, True])
def test_a_client_that_was_forgotten_and_blocked_stays_away(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, audit: bool
) -> None:
    journal = tmp_path / "j"

    def start(rounds: int) -> Any:
        fleet = kit.Fleet()
        fleet.fill(5)
        strategy = fleet.strategy("all", FedAvg(), journal=journal, audit=audit)
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)
        return fleet

    start(2)
    done = CliRunner().invoke(app, ["journal", "forget", str(journal), "client-3", "--block"])
    assert done.exit_code == 0, done.output
    with caplog.at_level(logging.WARNING):
        fleet = start(4)
    assert sorted(fleet.names(3)) == ["client-0", "client-1", "client-2", "client-4"]
    assert "was forgotten and is blocked" in caplog.text
    with closing(read_journal(journal)) as record:
        assert record.table()[0].names == ("client-0", "client-1", "client-2", "forgotten-3", "client-4")
        everything = [record.database.fetch(f"SELECT * FROM {table}") for table in ("meta", "events", "metrics")]
    assert "client-3" not in str(everything)

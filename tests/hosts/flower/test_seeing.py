"""What people can see of a live run: its log, its failures, the history of a client."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import RoundError, cohort_client, failures
from fedcohort.journal import read_journal


def test_the_log_names_clients(fleet: Any, kit: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        fleet.strategy("all", FedAvg()).start(fleet.grid, kit.model(), 1)
    assert "selected client-0, client-1, client-2, client-3, client-4, client-5 (6 of 6" in caplog.text


def broken(message: Any, context: Any) -> RecordDict:
    raise ValueError("out of memory")


def test_the_log_counts_rounds_as_the_journal_does(fleet: Any, kit: Any, tmp_path: Path, caplog: Any) -> None:
    """Every line that names a round counts from 0; the app's train function sees Flower's own count."""
    for number in range(6):
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].latency = 40.0 if number == 1 else 12.0
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        strategy = fleet.strategy("all", FedAvg(), cohort_size=6, deadline=30.0, journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), 3)
    assert [line for line in caplog.messages if line.startswith("[ROUND")] == [
        "[ROUND 0, 1 of 3]", "[ROUND 1, 2 of 3]", "[ROUND 2, 3 of 3]",
    ]  # fmt: skip
    late = {f.round for f in failures(tmp_path / "j") if f.status is Status.LATE}
    assert late and {f"client 'client-1' answered round {r} after" for r in late} == {
        line[: line.index(" after") + 6] for line in caplog.messages if "answered round" in line
    }
    assert {r for _, r in fleet.trained()} == {1, 2, 3}


def test_the_log_as_json_lines(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-1")].app = cohort_client(kit.client_app(broken), kit.ANSWERS)
    logging.getLogger("flwr").setLevel(logging.INFO)
    for rounds in (2, 3):
        strategy = fleet.strategy(
            "all", FedAvg(), journal=tmp_path / "j.sqlite", json_log=tmp_path / "logs" / "run.jsonl"
        )
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    assert all({"time", "level", "event", "message"} <= set(line) for line in lines)
    by_event: dict[str, list[Any]] = {}
    for line in lines:
        by_event.setdefault(line["event"], []).append(line)
    assert [(e["round"], e["clients"]) for e in by_event["selected"]] == [
        (r, [f"client-{i}" for i in range(6)]) for r in range(3)
    ]
    assert {(e["client"], e["round"]) for e in by_event["client-failed"]} == {("client-1", r) for r in range(3)}
    assert "out of memory" in by_event["client-failed"][0]["reason"]
    assert [e["models"] for e in by_event["round"]] == [5, 5, 5] and by_event["continued"][0]["rounds"] == 2
    assert [e["rounds"] for e in by_event["finished"]] == [2, 3]
    record = read_journal(tmp_path / "j.sqlite")
    assert record.events("planned") == [{"rounds": 2}, {"rounds": 3}]
    assert [body["state"] for body in record.events("ended")] == ["finished", "finished"]


def test_the_end_of_a_run_that_failed_is_on_record(fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = cohort_client(kit.client_app(broken))
    strategy = fleet.strategy("all", FedAvg(), journal=tmp_path / "j", json_log=tmp_path / "run.jsonl")
    with pytest.raises(RoundError, match=r"Round 0.* 3 tries"):
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
    (ended,) = read_journal(tmp_path / "j").events("ended")
    assert ended["state"] == "failed" and ended["reason"].startswith("Round 0 ")
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["event"] == "failed"


def test_explain_says_why_a_client_failed_and_its_history(fleet: Any, kit: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedcohort.cli.app import app

    fleet.grid.nodes[fleet.grid.node_of("client-1")].app = cohort_client(kit.client_app(broken), kit.ANSWERS)
    fleet.strategy("all", FedAvg(), journal=tmp_path / "j.sqlite").start(fleet.grid, kit.model(), num_rounds=2)
    ask = lambda *options: CliRunner().invoke(app, ["explain", str(tmp_path / "j.sqlite"), *options])  # noqa: E731
    assert "client-1: FAILED: ValueError: out of memory" in ask("--round", "1").output
    one = ask("--round", "0", "--client", "client-1").output
    assert "Its reply: FAILED:" in one and "out of memory" in one
    history = ask("--client", "client-1").output
    assert "was picked in 2 of 2 rounds" in history and history.count("FAILED") == 2


@pytest.mark.parametrize("level", [logging.WARNING, logging.CRITICAL])
def test_the_json_log_is_whole_whatever_the_logger_shows(
    level: int, fleet: Any, kit: Any, tmp_path: Path, caplog: Any
) -> None:
    """An operator who wants a quiet console still gets every event in the file, and the console stays quiet."""
    fleet.grid.nodes[fleet.grid.node_of("client-1")].app = cohort_client(kit.client_app(broken), kit.ANSWERS)
    before = logging.getLogger("flwr.fedcohort").propagate
    with caplog.at_level(level, "flwr"), caplog.at_level(level, "fedcohort"):
        fleet.strategy("all", FedAvg(), json_log=tmp_path / "run.jsonl").start(fleet.grid, kit.model(), num_rounds=2)
        assert not logging.getLogger("flwr.fedcohort").isEnabledFor(logging.INFO)  # as it was before
    events = [json.loads(line)["event"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {event: events.count(event) for event in ("selected", "client-failed", "round", "finished")} == {
        "selected": 2, "client-failed": 2, "round": 2, "finished": 1,
    }  # fmt: skip
    assert all(record.levelno >= level for record in caplog.records)
    assert logging.getLogger("flwr.fedcohort").propagate is before

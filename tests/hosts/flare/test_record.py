"""A FLARE run's journal is like any other: explain, audit, report and dashboard read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.hosts.flare import CohortController, failures
from fedcohort.report.dashboard.app import create_app

from .federation import Federation, Pull
from .test_hostile import KINDS


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "run.sqlite"
    sites = {**{f"site-{k}": Pull() for k in range(1, 5)}, "site-5": KINDS["nan"]}
    federation = Federation(sites)
    federation.run(
        CohortController(
            "active-fl",
            num_rounds=4,
            journal=str(path),
            audit=True,
            shadows={"uniform": "uniform"},
            rules={"min_separation": 1},
            policy={"size": 3, "wait_for": 5, "deadline": 20.0},
        )
    )
    assert not federation.panics
    return path


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_explain(journal: Path) -> None:
    assert "4 of 4 rounds, finished" in command("explain", str(journal))
    assert "picked" in command("explain", str(journal), "--round", "2")
    assert "site-1" in command("explain", str(journal), "--client", "site-1")
    assert {found.client for found in failures(journal)} <= {"site-5"}


def test_audit(journal: Path) -> None:
    assert "CONFIRMED" in command("journal", "audit", str(journal)).upper()


def test_report(journal: Path, tmp_path: Path) -> None:
    command("report", str(journal), "-o", str(tmp_path / "report.html"))
    assert "site-1" in (tmp_path / "report.html").read_text()


def test_dashboard(journal: Path) -> None:
    with TestClient(create_app(journal), base_url="http://127.0.0.1") as client:
        assert client.get("/").status_code == 200
        assert "fedcohort" in client.get("/metrics").text

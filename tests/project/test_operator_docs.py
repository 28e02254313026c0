"""The operators' pages, line by line: every command they show runs as printed, in order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest, Status
from fedcohort.core.signals import SIGNALS, Signal
from fedcohort.selectors import PowerOfChoice
from fedcohort.session import Session
from fedcohort.session.rules import Rules

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("rules.md", "operators.md"))
COMMANDS = [line.split("  #")[0].strip() for line in re.findall(r"^    \$ (fedcohort .*)$", PAGES, re.MULTILINE)]
NAMES = [f"clinic-{letter}" for letter in "abcdefgh"]


def run_of_an_operator(path: Path) -> None:
    """Make the run that the page describes: rules, failures, more than twelve rounds, and a stuck cohort."""
    rng = np.random.default_rng(0)
    table = ClientTable(names=NAMES, sizes=[10] * len(NAMES))
    rules = Rules(eligible="battery >= 30", min_separation=2, max_participations=50)
    with Session(PowerOfChoice(), table, seed=1, journal=path, rules=rules, signals=SIGNALS) as session:
        for round_ in range(15):
            session.set_attributes({n: {"battery": 20 if n == "clinic-b" and round_ == 12 else 80} for n in NAMES})
            request = RoundRequest(2)
            query = session.query(request)
            assert query is not None
            cohort = session.ask(request, Answer(query, {Signal.LOSS: rng.random(len(query.clients))}))
            if round_ == 14:
                break
            status = np.where(cohort.clients == round_ % 8, Status.FAILED, Status.OK)
            session.tell(RoundReport(cohort.ticket, cohort.clients, status))
            session.record(round_, {"accuracy": 0.05 * round_})


def test_the_pages_show_commands_to_follow() -> None:
    assert len(COMMANDS) >= 12 and any("rules prove" in c for c in COMMANDS)


def test_every_command_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of_an_operator(tmp_path / "run.sqlite")
    monkeypatch.chdir(tmp_path)
    said: dict[str, str] = {}
    served: list[Any] = []
    monkeypatch.setattr("fedcohort.report.dashboard.server.serve", lambda *a, **k: served.append(a))
    for command in COMMANDS:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
        said[command] = done.output
        if "rules show" in command:
            (tmp_path / "rules.toml").write_text(done.stdout)
    why = said["fedcohort explain run.sqlite --round 12 --client clinic-b"]
    assert "was not a candidate in round 12: it does not meet battery >= 30" in " ".join(why.split())
    assert any("The rules held in every round" in text for text in said.values())
    assert (tmp_path / "report.html").is_file() and (tmp_path / "tables" / "picks.parquet").is_file()

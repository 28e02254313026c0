"""Another selector by an operator's order, at once or after a trial, on a running federation."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from typer.testing import CliRunner

from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.errors import FedcohortError
from fedcohort.hosts import orders
from fedcohort.hosts.orders import Order
from fedcohort.journal import read_journal
from fedcohort.session import Session

from .conftest import Fleet, model
from .test_async import PowerCut, asynchronous, cut_before_and_after_events
from .test_orders import at_round, cohorts


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["journal", "selector", *map(str, arguments)])
    assert done.exit_code == 0, done.exception or done.output
    return " ".join(done.output.split())


def changes(path: Path) -> list[tuple[int, str]]:
    with closing(read_journal(path)) as record:
        return [(body["round"], body["to"]["name"]) for body in record.events("selector")]


def run(path: Path, rounds: int, *, fleet: Fleet | None = None, **settings: Any) -> Fleet:
    if fleet is None:
        fleet = Fleet()
        fleet.fill(6)
    strategy = fleet.strategy("size-weighted", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=path, **settings)
    strategy.start(fleet.grid, model(), num_rounds=rounds)
    return fleet


def test_a_trial_in_a_running_federation_ends_with_the_new_selector(fleet: Any, tmp_path: Path, caplog: Any) -> None:
    path, said = tmp_path / "run.sqlite", []
    at_round(fleet, 4, lambda: said.append(command(path, "active-fl", "--shadow", 3)))
    run(path, 12, fleet=fleet, audit=True)
    assert "running server" in said[0] and "from round 7 on, active-fl chooses" in caplog.text
    assert changes(path) == [(7, "active-fl")]
    with closing(read_journal(path)) as record:
        seen = [row.round for row in record.cohorts() if "active-fl on trial" in record.scores(row.ticket)]
        # Clients were asked for its losses, so it was never blind.
        notes = [record.scores(row.ticket)["active-fl on trial"][2] for row in record.cohorts()[5:7]]
    assert seen == [4, 5, 6] and notes == [None, None]
    assert all(finding.valid is not False for finding in examine(path).findings)
    # The app still names the first selector, and the order stays.
    run(path, 15)
    assert len(cohorts(path)) == 15 and changes(path) == [(7, "active-fl")]
    with Session.open(path) as session:
        assert session.selector.name == "active-fl"


def test_a_trial_outlasts_restarts_of_the_app(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    run(path, 2)
    assert "From round 2 on" in command(path, "active-fl", "--shadow", 4)  # nothing runs
    for rounds in (3, 4, 5):
        run(path, rounds, shadows={"other": "uniform"})
    with closing(read_journal(path)) as record:
        assert set(record.meta()["shadows"]) == {"active-fl on trial", "other"} and not changes(path)
    run(path, 8)
    assert changes(path) == [(6, "active-fl")]


def test_at_once_and_back(fleet: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    at_round(fleet, 2, lambda: command(path, "active-fl", "--shadow", 5))
    at_round(fleet, 4, lambda: command(path, "uniform"))
    at_round(fleet, 8, lambda: command(path, "size-weighted"))
    run(path, 10, fleet=fleet)
    assert changes(path) == [(4, "uniform"), (8, "size-weighted")]
    with closing(read_journal(path)) as record:
        assert record.meta()["shadows"] == {}


def test_what_the_run_cannot_have_is_said_at_once(fleet: Any, tmp_path: Path) -> None:
    path, errors = tmp_path / "run.sqlite", []

    def order(*arguments: str) -> None:
        done = CliRunner().invoke(app, ["journal", "selector", str(path), *arguments])
        assert isinstance(done.exception, FedcohortError | SystemExit) and done.exit_code
        errors.append(str(done.exception) + done.output)

    at_round(fleet, 2, lambda: [order("fedcbs"), order("no-such"), order("active-fl", "--watch")])
    run(path, 4, fleet=fleet)
    assert "label" in errors[0] and "no-such" in errors[1] and "--shadow" in errors[2]
    assert not changes(path) and not orders.waiting(path)


def test_without_rounds_a_trial_counts_models(tmp_path: Path) -> None:
    path, fleet = tmp_path / "run.sqlite", Fleet()
    fleet.fill(6)
    done: list[int] = []

    def hook(message: Any) -> None:
        if message.metadata.message_type == "train" and message.content["config"]["server-round"] == 3 and not done:
            done.append(1)
            command(path, "active-fl", "--shadow", 4)

    fleet.grid.hooks.append(hook)
    for models in (12, 14):
        strategy = asynchronous(
            fleet, "size-weighted", FedAvg(fraction_evaluate=0.0), busy=3, buffer=2, journal=path, audit=True
        )
        strategy.start(fleet.grid, model(), num_rounds=models)
    ((at, name),) = changes(path)
    assert done and name == "active-fl" and at in (6, 7)
    assert all(finding.valid is not False for finding in examine(path).findings)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_kill_anywhere_changes_no_cohort(one_by_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10**9]

    def step_on(event: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            left[0] = 10**9
            raise PowerCut

    cut_before_and_after_events(monkeypatch, step_on)
    name = "active-fl"

    def play(path: Path) -> None:
        fleet = Fleet()
        fleet.fill(6)
        if one_by_one:  # one at work, so that the order of answers is that of the questions
            strategy: Any = asynchronous(
                fleet, "size-weighted", FedAvg(fraction_evaluate=0.0), busy=1, buffer=1, journal=path, wait_for=6
            )
        else:
            strategy = fleet.strategy(
                "size-weighted", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=path, wait_for=6
            )
        strategy.start(fleet.grid, model(), num_rounds=1)
        orders.give(path, Order(selector=name, trial=4, id="only-one"))
        strategy.start(fleet.grid, model(), num_rounds=12)

    play(tmp_path / "whole")
    draw, kills, finished = np.random.default_rng(2), 0, False
    while not finished:
        left[0] = int(draw.integers(1, 40))
        try:
            play(tmp_path / "cut")
            finished = True
        except PowerCut:
            kills += 1
    print(f"cut off {kills} times")
    assert kills > 5
    assert cohorts(tmp_path / "cut") == cohorts(tmp_path / "whole")
    assert changes(tmp_path / "cut") == changes(tmp_path / "whole") == [(5, name)]

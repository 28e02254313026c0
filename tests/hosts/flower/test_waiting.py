"""Waiting for clients, starting again, and what has changed since."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import (
    FedAvg,
    FedMedian,
)
from typer.testing import CliRunner

from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.errors import SignalError
from fedcohort.hosts.flower import (
    Answers,
    Facts,
    FederationTimeoutError,
    cohort_client,
)
from fedcohort.journal import read_journal
from fedcohort.report.account import read_account
from fedcohort.session import Session


def value(arrays: Any) -> float:
    return float(arrays["bias"].numpy()[0])


def test_the_minimum_online_holds_in_every_round(fleet: Any, kit: Any) -> None:
    fleet.clock.at.append((3.0, lambda: [fleet.grid.remove(fleet.grid.node_of(f"client-{i}")) for i in range(4)]))
    fleet.clock.at.append((40.0, lambda: [fleet.grid.add(fleet.node(i)) for i in range(4)]))
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, wait_for=5)
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    assert fleet.clock.now > 40
    fleet.clock.at.append((fleet.clock.now + 1, lambda: fleet.grid.remove(fleet.grid.node_of("client-5"))))
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, wait_for=6, patience=20.0)
    with pytest.raises(FederationTimeoutError, match=r"5 of 6 clients.* 20 s in round \d"):
        strategy.start(fleet.grid, kit.model(), num_rounds=8)


def waits(caplog: Any) -> list[str]:
    return [line for line in caplog.messages if line.startswith("waiting")]


def test_who_waits_says_for_what(kit: Any, caplog: Any) -> None:
    """Six clients are online and four are needed, but the run still waits for a node that has not described itself."""
    fleet = kit.Fleet()
    fleet.fill(7)
    silent = fleet.grid.node_of("client-6")
    fleet.grid.cut(silent)
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, wait_for=4)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert waits(caplog) == [
        "waiting: 6 clients can take part, 4 are needed; at most 15 s for nodes that have not identified themselves: "
        f"node {silent}"
    ]


@pytest.mark.parametrize("patience", [0.5, 3.0, 10.0, 14.9, 15.1, 60.0])
@pytest.mark.parametrize("silent", [1, 3])
def test_a_silent_node_holds_nobody_back_for_longer_than_patience(silent: int, patience: float, kit: Any) -> None:
    fleet = kit.Fleet()
    fleet.fill(10)
    for number in range(silent):
        fleet.grid.cut(fleet.grid.node_of(f"client-{number}"))
    begun: list[float] = []
    fleet.grid.hooks.append(
        lambda message: begun.append(fleet.clock.now) if message.metadata.message_type == "train" else None
    )
    strategy = fleet.strategy("all", FedAvg(fraction_evaluate=0.0), wait_for=10 - silent, patience=patience)
    strategy.start(fleet.grid, kit.model(), num_rounds=2)
    assert len(begun) == 2 * (10 - silent)
    assert begun[0] <= min(patience, 15) + 1.0


def test_who_cannot_take_part_is_named_while_others_are_waited_for(kit: Any, caplog: Any) -> None:
    fleet = kit.Fleet()
    for number in range(6):
        mute = number in (1, 4)
        fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(), Answers(facts=kit.facts)) if mute else None))
    fleet.clock.at.append((3.0, lambda: [fleet.grid.remove(fleet.grid.node_of(f"client-{i}")) for i in (2, 3)]))
    fleet.clock.at.append((40.0, lambda: [fleet.grid.add(fleet.node(i)) for i in (2, 3)]))
    strategy = fleet.strategy("power-of-choice", FedAvg(), cohort_size=2, wait_for=4, patience=100.0)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        strategy.start(fleet.grid, kit.model(), num_rounds=8)
    assert "2 of 4 clients have been online for" in waits(caplog)[0]
    assert all("cannot supply 'loss-query': client-1, client-4" in line for line in waits(caplog)), waits(caplog)


def test_who_is_busy_is_named(kit: Any, caplog: Any) -> None:
    """Everybody missed the deadline and is still at work, so the run waits until the first client is free."""
    fleet = kit.Fleet()
    for number in range(2):
        fleet.grid.add(fleet.node(number, latency=60.0))
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, deadline=20.0, patience=120.0)
    with caplog.at_level(logging.INFO, "flwr.fedcohort"), pytest.raises(Exception, match="no model in"):
        strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert waits(caplog)
    assert waits(caplog)[0].startswith("waiting: all clients online have been busy with something else for 10 s")
    assert waits(caplog)[0].endswith(": client-0, client-1")


def test_a_finished_run_says_so_at_once(kit: Any, tmp_path: Path, caplog: Any) -> None:
    fleet = kit.Fleet()
    fleet.fill(3)
    evaluate = lambda r, a: MetricRecord({"accuracy": 0.1 * r})  # noqa: E731
    done = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
        fleet.grid, kit.model(), 2, evaluate_fn=evaluate
    )
    empty = kit.Fleet()  # nobody is online, and nobody is needed
    with caplog.at_level(logging.INFO, "flwr.fedcohort"):
        again = empty.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j").start(
            empty.grid, kit.model(), 2, evaluate_fn=evaluate
        )
    assert empty.clock.now == 0 and "the run is finished" in caplog.text
    assert value(again.arrays) == value(done.arrays)
    assert again.evaluate_metrics_serverapp[2]["accuracy"] == pytest.approx(0.2)
    assert again.train_metrics_clientapp[1]["train-loss"] == done.train_metrics_clientapp[1]["train-loss"]


def test_metrics_of_the_last_round_survive_a_kill(kit: Any, tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    def run(cut: int | None) -> None:
        def evaluate(server_round: int, arrays: Any) -> MetricRecord:
            if server_round == cut:
                raise PowerCut
            return MetricRecord({"accuracy": server_round / 10})

        fleet = kit.Fleet()
        fleet.fill(3)
        strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=tmp_path / "j")
        strategy.start(fleet.grid, kit.model(), 3, evaluate_fn=evaluate)

    with pytest.raises(PowerCut):
        run(cut=2)  # round 2 is closed, its evaluation is not recorded
    assert read_journal(tmp_path / "j").metrics()[0]["accuracy"] == 0.1
    run(cut=None)
    assert [m["accuracy"] for m in read_journal(tmp_path / "j").metrics().values()] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("selector", ["size-weighted", "fedcbs"])
def test_new_facts_reach_the_table(selector: str, fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Sizes, and labels if the selector uses them."""
    samples = {"client-0": 10}

    def facts(context: Any) -> Facts:
        size = samples.get(str(context.node_config["client-name"]), 1)
        return Facts(size=size, label_counts=[size - 1, 1])

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=facts))
    fleet.clock.at.append((10.0, lambda: samples.update({"client-0": 500})))
    strategy = fleet.strategy(selector, FedAvg(), cohort_size=2, journal=tmp_path / "j", describe_every=5.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=30)
    with Session.open(tmp_path / "j") as session:
        assert session.table.sizes.tolist() == [500, 1, 1, 1, 1, 1]
        if selector == "fedcbs":
            assert session.table.label_counts.tolist() == [[499, 1]] + [[0, 1]] * 5
    assert read_journal(tmp_path / "j").events("facts") == [{"clients": [0]}]


@pytest.mark.parametrize(
    ("what", "changed", "said"),
    [
        ("cohort-size", {"cohort_size": 3}, "cohort-size was 2, is 3"),
        ("strategy", {"strategy": FedMedian()}, "strategy was ['FedAvg'], is ['FedMedian']"),
        ("filter", {"filter": "cmfl"}, "filter was KeepAll(), is CMFL("),
        ("signals", {}, "signals was ["),
    ],
)
def test_other_settings_are_recorded(
    what: str, changed: dict[str, Any], said: str, kit: Any, tmp_path: Path, caplog: Any
) -> None:
    for rounds, more in ((2, {}), (3, changed), (3, changed), (4, changed)):
        fleet = kit.Fleet()
        for number in range(4):  # at first the clients can measure nothing
            mute = what == "signals" and rounds == 2
            answers = Answers(facts=kit.facts) if mute else kit.ANSWERS
            fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(), answers)))
        settings = {"strategy": FedAvg(), "cohort_size": 2, **more}
        with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
            fleet.strategy("uniform", journal=tmp_path / "j", **settings).start(fleet.grid, kit.model(), rounds)
    assert caplog.text.count("other settings than when the journal was last written") == 1 and said in caplog.text
    first, second = read_journal(tmp_path / "j").events("settings")  # later starts changed nothing
    assert [key for key in first if first[key] != second[key]] == [what]


class PowerCut(BaseException):
    """Ends the process, as far as the strategy can tell."""


def restarted(kit: Any, journal: Path, selector: str, rounds: int, *, cut: int = 0, skip: int = 0, **more: Any) -> Any:
    """Continue a run of six clients, without the first ``skip``, until server round ``cut`` trains."""

    def stop(message: Any) -> None:
        if message.metadata.message_type == "train" and message.content["config"]["server-round"] == cut:
            raise PowerCut

    fleet = kit.Fleet()
    for number in range(skip, 6):
        fleet.grid.add(fleet.node(number))
    fleet.grid.hooks.append(stop)
    strategy = fleet.strategy(selector, FedAvg(), cohort_size=2, journal=journal, **more)
    strategy.start(fleet.grid, kit.model(), rounds)
    return fleet


def test_another_selector_goes_on_in_the_middle_of_a_run(kit: Any, tmp_path: Path) -> None:
    """By command, even while a round is pending; the app that names the old selector goes on with the new one."""
    journal = tmp_path / "j"
    with pytest.raises(PowerCut):
        restarted(kit, journal, "uniform", 8, cut=4)
    done = CliRunner().invoke(app, ["journal", "selector", str(journal), "fedcm-ts"])
    assert all(word in done.output for word in ("round 4", "'fedcm-ts'", "'uniform'")), done.output
    fleet = restarted(kit, journal, "uniform", 8)
    assert [len(fleet.names(r)) for r in range(1, 9)] == [0, 0, 0, 2, 2, 2, 2, 2]
    record = read_journal(journal)
    assert [row.round for row in record.cohorts()] == list(range(8))
    (body,) = record.events("selector")
    assert (body["round"], body["from"]["name"], body["to"]["name"]) == (4, "uniform", "fedcm-ts")
    record.close()


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("selector", ["active-fl", "fedcbs"])
def test_what_a_selector_needs_to_know_is_asked_while_it_is_a_shadow(
    selector: str, audit: bool, kit: Any, tmp_path: Path
) -> None:
    """The table of 'uniform' has no sizes or labels. A shadow adds them and can then replace the selector."""
    journal = tmp_path / "j"

    def change() -> Any:
        return CliRunner().invoke(app, ["journal", "selector", str(journal), selector])

    restarted(kit, journal, "uniform", 3, audit=audit)
    refused = change()
    assert isinstance(refused.exception, SignalError) and f"{selector!r} as a shadow" in str(refused.exception.hint)
    restarted(kit, journal, "uniform", 3, shadows={"next": selector})  # finished, so no client is asked anything
    with closing(read_journal(journal)) as record:
        assert not record.table()[0].signals
    restarted(kit, journal, "uniform", 5, shadows={"next": selector}, skip=1)
    with closing(read_journal(journal)) as record:
        table, _ = record.table()
        assert table.sizes.tolist() == [0, 20, 30, 40, 50, 60]  # one was offline
        assert [set(record.scores(row.ticket)) for row in record.cohorts()] == [{""}] * 3 + [{"", "next"}] * 2
    assert change().exit_code == 0
    fleet = restarted(kit, journal, selector, 12)
    assert "client-0" in {name for r in range(6, 13) for name in fleet.names(r)}
    with closing(read_journal(journal)) as record:
        table, _ = record.table()
        assert table.sizes.tolist() == [10, 20, 30, 40, 50, 60]
        if selector == "fedcbs":
            assert table.label_counts.tolist() == [[i, 10] for i in range(6)]
    assert read_account(journal).done == 12
    found = {f.check: f for f in examine(journal).findings}
    assert all(f.valid is not False for f in found.values()), found
    assert found["replay"].valid is (True if audit else None)

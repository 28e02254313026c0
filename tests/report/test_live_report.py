"""Reports, explanations and dashboard of live runs: every number checked against the session."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.journal import read_journal
from fedcohort.report.account import JournalHistory, account, read_account
from fedcohort.report.dashboard.sessions import JournalItem
from fedcohort.selectors import FedCBS, PowerOfChoice, Uniform
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.session import Session
from fedcohort.session.rules import Rules

NAMES = [f"clinic-{name}" for name in ("north", "south", "east", "west", "hill", "lake", "<b>moor</b>", "shore")]
COUNTS = np.array([[9, 1, 0], [0, 8, 2], [1, 1, 8], [5, 5, 0], [0, 4, 6], [3, 3, 4], [10, 0, 0], [0, 0, 10]])
SECONDS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
ROUNDS = 12


def played(path: Path, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A run of uniform with the shadows Fed-CBS and Power-of-Choice; south always fails, shore is blocked."""
    table = ClientTable(names=NAMES, sizes=COUNTS.sum(axis=1), labels=LabelCounts(COUNTS))
    shadows = {"cbs": FedCBS(), "poc": PowerOfChoice()}
    past = []
    with Session(
        Uniform(),
        table,
        seed=5,
        journal=path,
        shadows=shadows,
        rules=Rules(blocked=(NAMES[7],)),
        signals=[Signal.DURATION],
    ) as session:
        session.note("planned", {"rounds": rounds})
        for round_ in range(rounds):
            cohort = session.ask(RoundRequest(3))
            status = np.where(cohort.clients == 1, Status.FAILED, Status.OK)
            report = RoundReport(cohort.ticket, cohort.clients, status, {Signal.DURATION: SECONDS[cohort.clients]})
            session.tell(report)
            if 1 in cohort.clients:
                why = {NAMES[1]: "out of memory <script>"}
                session.note("flower", {"round": round_, "ticket": cohort.ticket, "failures": why})
            session.record(round_, {"accuracy": round_ / rounds})
            past.append({"clients": cohort.clients, "shadow": session.journal.scores(cohort.ticket)["cbs"][0]})
        session.note(
            "ended", {"state": "finished", "rounds": rounds, "ticket": session.journal.last()[1], "reason": ""}
        )
    return past


@pytest.fixture
def live(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    return tmp_path / "run.sqlite", played(tmp_path / "run.sqlite")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_clients_that_have_not_replied_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "half.sqlite"
    with Session(Uniform(), ClientTable(names=NAMES), seed=5, journal=path) as session:
        cohort = session.ask(RoundRequest(4))
        status = [Status.OK, Status.FAILED]
        session.tell(RoundReport(cohort.ticket, cohort.clients[:2], status, complete=False))
        assert "Asked, but no reply yet: 2 clients." in read_account(path).sentences()


def test_the_account_matches_the_session(live: Any) -> None:
    path, past = live
    found = read_account(path)
    assert (found.done, found.planned, found.state, found.selector) == (ROUNDS, ROUNDS, "finished", "uniform")
    counts = Counter(int(c) for p in past for c in p["clients"])
    assert {c.name: c.picked for c in found.clients} == {name: counts[i] for i, name in enumerate(NAMES)}
    assert found.never == tuple(name for i, name in enumerate(NAMES) if not counts[i]) and NAMES[7] in found.never
    assert found.failures() == {"FAILED": counts[1]}
    south = found.clients[1]
    assert south.reason.endswith("FAILED: out of memory <script>") and south.seconds is None
    assert [c.seconds for c in found.clients if c.picked and c.name != NAMES[1]] == [
        SECONDS[i] for i in range(8) if counts[i] and i != 1
    ]
    assert all(r.excluded == {"it is blocked": 1} for r in found.rounds)


def test_shadows_are_summarised_over_all_rounds(live: Any) -> None:
    path, past = live
    cbs, poc = sorted(read_account(path).shadows, key=lambda s: s.name)
    assert (cbs.rounds, cbs.silent, poc.rounds, poc.silent) == (ROUNDS, 0, 0, ROUNDS)
    assert "lacked its signals" in poc.note
    assert cbs.same == pytest.approx(np.mean([np.isin(p["shadow"], p["clients"]).mean() for p in past]))
    assert cbs.chance == pytest.approx(3 / 7)
    labels = LabelCounts(COUNTS)
    ours, theirs = ([qcid(labels, p[key]) for p in past] for key in ("clients", "shadow"))
    assert cbs.qcid == pytest.approx({"as_it_was": np.mean(ours), "with_it": np.mean(theirs)})
    assert np.mean(theirs) < np.mean(ours)
    known = {int(c) for p in past for c in p["clients"]} - {1}
    usual = np.where(np.isin(np.arange(8), list(known)), SECONDS, np.median(SECONDS[sorted(known)]))
    expected = [np.mean([usual[p[key]].max() for p in past]) for key in ("clients", "shadow")]
    assert [cbs.seconds["as_it_was"], cbs.seconds["with_it"]] == pytest.approx(expected)
    assert f"{cbs.same:.0%} of its picks were actually picked" in cbs.sentence() and "QCID" in cbs.sentence()


def test_only_what_may_change_is_read_again(tmp_path: Path) -> None:
    """Reading step by step during the run gives the same as reading everything at its end."""
    path = tmp_path / "run.sqlite"
    table = ClientTable(names=NAMES)
    past = JournalHistory()
    with Session(Uniform(), table, journal=path, shadows={"other": Uniform()}) as session:
        for round_ in range(40):
            cohort = session.ask(RoundRequest(3))
            account(session.journal, "run", past)
            session.tell(RoundReport(cohort.ticket, cohort.clients[1:]))
            if round_ > 3:
                early = session.journal.cohorts(round_=round_ - 3)[0]
                session.tell(RoundReport(early.ticket, early.clients[:1]))  # late
            if round_ == 30:
                session.abandon(session.ask(RoundRequest(2)).ticket, "gone")
        by_steps, at_once = account(session.journal, "run", past), account(session.journal, "run")
    assert by_steps.to_dict() == at_once.to_dict()
    assert at_once.failures()["LATE"] == 36 and sum(r.abandoned is not None for r in at_once.rounds) == 1


def test_explain_summarises_the_whole_run(live: Any) -> None:
    path, _ = live
    text = " ".join(run("explain", str(path)).split())
    assert f"{ROUNDS} of {ROUNDS} rounds, finished" in text and "Never picked" in text and NAMES[7] in text
    assert "out of memory <script>" in text and "by chance" in text
    told = json.loads(run("explain", str(path), "--format", "json"))
    assert told["done"] == ROUNDS and NAMES[7] in told["never_picked"] and len(told["clients"]) == 8
    one = " ".join(run("explain", str(path), "--round", "3").split())
    assert "Over all rounds:" in one and "by chance" in one


def test_a_report_on_a_live_journal(live: Any, tmp_path: Path) -> None:
    path, _ = live
    run("report", str(path), "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    for title in ("What shadow selectors would have done", "Every client", "Every round", "How long rounds took",
                  "What came back", "Who was picked, round by round", "Why these clients?", "Rules"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page, title
    assert "&lt;b&gt;moor&lt;/b&gt;" in page and "<b>moor</b>" not in page and '<script>"' not in page
    assert (
        "out of memory &lt;script&gt;" in page and "held in every round" in page and "it is blocked: 12 times" in page
    )
    told = json.loads(run("report", str(path), "-o", str(tmp_path / "r.html"), "--format", "json"))
    assert told["runs"][0]["rules_held"] is True
    refused = CliRunner().invoke(app, ["report", str(path), "--target", "0.5"])
    assert refused.exit_code != 0 and "journal of a live run" in str(refused.exception)


def test_several_journals_are_separate_tabs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        played(tmp_path / f"{name}.sqlite", 4)
    run("report", str(tmp_path / "first.sqlite"), str(tmp_path / "second.sqlite"), "-o", str(tmp_path / "both.html"))
    page = (tmp_path / "both.html").read_text()
    assert page.count('data-setting="') == 2 and "<h1>first, second</h1>" in page


def test_the_dashboard_shows_progress_end_reasons_and_history(live: Any) -> None:
    path, past = live
    item = JournalItem(path, "run")
    item.poll()
    seen = item.overview()
    assert (seen["state"], seen["done"], seen["total"]) == ("finished", ROUNDS, ROUNDS)
    detail = item.detail()
    assert [block["name"] for block in detail["blocks"]] == ["account", "shadows", "clients", "rounds"]
    assert "Never picked" in detail["blocks"][0]["html"] and "<b>moor</b>" not in str(detail["blocks"])
    at = next(i for i, p in enumerate(past) if 1 in p["clients"])
    members = {m["client"]: m for m in item.cohort("run", at)}
    assert members[NAMES[1]]["reason"] == "out of memory <script>" and members[NAMES[1]]["status"] == "failed"
    history = item.history_of(NAMES[1])
    assert [h["picked"] for h in history] == [1 in p["clients"] for p in past]
    assert history[at]["what"] == "FAILED: out of memory <script>"
    with Session.open(path) as session:
        session.ask(RoundRequest(3))
        item.poll()
        assert item.overview()["state"] == "running"
    item.poll()
    assert item.overview()["state"] == "stopped"
    record = read_journal(path)
    assert record.last()[0] == ROUNDS
    record.close()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_axe_finds_nothing_in_the_report_of_a_live_run(
    live: Any, page: Any, violations: Any, width: int, scheme: str
) -> None:
    path, _ = live
    page.size(width)
    page.scheme(scheme)
    run("report", str(path), "-o", str(path.with_suffix(".html")), "--quiet")
    page.driver.get(path.with_suffix(".html").as_uri())
    page.js("FC.drawAll()")
    page.wait("document.querySelectorAll('.chart[data-state=drawn]').length >= 2")
    assert violations(page) == [] and page.overflow() == [] and page.errors() == []

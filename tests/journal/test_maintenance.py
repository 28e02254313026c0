"""Prometheus, Parquet, pruning, and forgetting clients."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fedcohort import create
from fedcohort.audit.choices import audit_journal
from fedcohort.audit.participation import prove_participation
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest, Status, is_per_client
from fedcohort.core.signals import Signal
from fedcohort.journal import read_journal
from fedcohort.journal.forgetting import EVENTS, META, TextKind
from fedcohort.journal.maintenance import tables
from fedcohort.journal.presence import STATES, Presence
from fedcohort.journal.schema import TABLES
from fedcohort.report.exposition import METRICS, exposition
from fedcohort.selectors import ActiveFL
from fedcohort.session import Session
from fedcohort.session.explain import explain_round
from fedcohort.session.rules import Rules
from fedcohort.testing import ScriptedHost
from tests.snapshot import differences, session_state

NAMES = ["anna", "benjamin", "cem", "dora", "emil"]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "run.sqlite"
    table = ClientTable(names=NAMES, sizes=[10, 20, 30, 40, 50])
    rules = Rules(blocked=("emil",), max_participations=6)
    with Session(ActiveFL(), table, seed=1, journal=path, rules=rules) as session:
        session.set_attributes({"benjamin": {"city": "Ulm on the Danube"}})
        for round_ in range(6):
            cohort = session.ask(RoundRequest(2))
            loss = 1.0 + cohort.clients
            status = [Status.OK, Status.FAILED if round_ == 2 else Status.OK]
            session.tell(RoundReport(cohort.ticket, cohort.clients, status, {Signal.LOSS: loss}))
            session.note(
                "flower",
                {
                    "round": round_,
                    "ticket": cohort.ticket,
                    "failures": {"benjamin": "out of memory in Ulm on the Danube"},
                },
            )
            session.record(round_, {"accuracy": 0.1 * round_})
    return path


def test_numbers_for_prometheus(journal: Path) -> None:
    text = exposition({'a "b"': journal})
    line = re.compile(r'^[a-z_]+(_total)?\{journal="a \\"b\\""(,[a-z]+="[^"]*")*\} [-0-9.e]+$')
    lines = [entry for entry in text.splitlines() if not entry.startswith("#")]
    assert lines and all(line.match(entry) for entry in lines)
    pairs = [entry.replace('journal="a \\"b\\""', "").replace("{,", "{").rsplit(" ", 1) for entry in lines]
    numbers = {name: float(value) for name, value in pairs}
    assert numbers["fedcohort_rounds_total{}"] == 6 and numbers["fedcohort_clients{}"] == 5
    assert numbers['fedcohort_replies_total{status="ok"}'] == 11
    assert numbers['fedcohort_replies_total{status="failed"}'] == 1
    assert numbers['fedcohort_excluded{reason="it is blocked"}'] == 1
    assert numbers['fedcohort_model{metric="accuracy"}'] == 0.5
    assert {m.split("{")[0] for m in numbers} <= set(METRICS)


def test_a_counter_never_falls(journal: Path) -> None:
    """A late client was missing before. Prometheus takes a falling counter for a restart and would count it twice."""

    def counters() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in exposition({"run": journal}).splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines if METRICS[name.split("{")[0]][0] == "counter"}

    with Session.open(journal) as session:
        cohort = session.ask(RoundRequest(2))
        before = counters()
        session.tell(RoundReport(cohort.ticket, cohort.clients[:1], None, {Signal.LOSS: [1.0]}))
        closed = counters()
        session.tell(RoundReport(cohort.ticket, cohort.clients[1:]))  # late
        late = counters()
        session.abandon(session.ask(RoundRequest(2)).ticket, "gone")
        given_up = counters()
    steps = [before, closed, late, given_up]
    assert all(after[name] >= value for first, after in pairwise(steps) for name, value in first.items())
    said = [[c[f'fedcohort_replies_total{{journal="run",status="{s}"}}'] for s in ("missing", "late")] for c in steps]
    assert said == [[0, 0], [1, 0], [1, 1], [3, 1]]


@pytest.fixture
def shown(journal: Path) -> set[str]:
    """The metrics of a waiting run with an offline client; every metric has a value."""
    with Session.open(journal) as session:
        session.note("planned", {"rounds": 9})
        said = Presence("waiting", 1.0, at=2.0, generation=2, online=4, offline={"benjamin": 1.0}, offline_count=1)
        said.write(journal)
        text = exposition({"run": journal})
    found = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert found == set(METRICS)
    return found


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_alerts_ask_for_metrics_and_states_that_are_there(shown: set[str]) -> None:
    """`promtool check rules` and `promtool test rules` check the file itself; see its first lines."""
    (group,) = yaml.safe_load((EXAMPLES / "prometheus" / "fedcohort.rules.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        asked = set(re.findall(r"fedcohort_[a-z_]+", rule["expr"]))
        assert asked and asked <= shown, rule["alert"]
        assert set(re.findall(r'state="(\w+)"', rule["expr"])) <= set(STATES)
        assert rule["labels"]["severity"] in ("page", "ticket")
    tested = yaml.safe_load((EXAMPLES / "prometheus" / "fedcohort.test.yml").read_text())
    alerts = {test["alertname"] for case in tested["tests"] for test in case["alert_rule_test"]}
    assert alerts == {rule["alert"] for rule in group["rules"]}


def test_the_grafana_dashboard_asks_for_metrics_that_are_there(shown: set[str]) -> None:
    board = json.loads((EXAMPLES / "grafana" / "fedcohort.json").read_text())
    variables = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = [set(re.findall(r"fedcohort_[a-z_]+", query)) for query in (*queries, *variables)]
    assert set().union(*asked) == shown
    # Two metrics of one journal have the same labels: joined in one query, the second would never be seen.
    assert all(len(names) == 1 for names in asked) and all('{journal=~"$journal"}' in query for query in queries)
    for panel in board["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) and all(target["legendFormat"] for target in panel["targets"])


def test_parquet(journal: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    done = CliRunner().invoke(app, ["journal", "export", str(journal), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    picks = pq.read_table(tmp_path / "out" / "picks.parquet").to_pylist()
    assert len(picks) == 12 and {p["client"] for p in picks} <= set(NAMES)
    replies = pq.read_table(tmp_path / "out" / "replies.parquet").to_pylist()
    assert [r["status"] for r in replies].count("FAILED") == 1 and replies[0]["loss"] > 0
    assert pq.read_table(tmp_path / "out" / "metrics.parquet").num_rows == 6


def test_pruning_keeps_what_resuming_and_proofs_need(journal: Path) -> None:
    with Session.open(journal) as session:
        state = session.state
    done = CliRunner().invoke(app, ["journal", "prune", str(journal), "--keep", "2"])
    assert "4 cohorts" in done.output
    with closing(read_journal(journal)) as record:
        assert [bool(record.scores(t)[""][1]) for t in range(6)] == [False] * 4 + [True] * 2
    with Session.open(journal) as session:
        assert session.round == 6 and str(session.state) == str(state)
    assert prove_participation(journal).holds


def test_a_client_is_forgotten_and_its_participation_stays_provable(journal: Path) -> None:
    before = prove_participation(journal)
    done = CliRunner().invoke(app, ["journal", "forget", str(journal), "benjamin"])
    assert done.exit_code == 0 and "forgotten-1" in done.output, done.output
    with closing(read_journal(journal)) as record:
        text = json.dumps(tables(record), default=str) + json.dumps(record.meta()) + json.dumps(record.attributes())
        assert "benjamin" not in text and "Ulm on the Danube" not in text and "forgotten-1" in text
        table, active = record.table()
        assert table.names[1] == "forgotten-1" and not active[1] and table.sizes[1] == 0
        assert all(r.metrics == {} for r in record.replies() if r.client == 1)
    assert b"Ulm on the Danube" not in journal.read_bytes()
    after = prove_participation(journal)
    assert after.holds and (after.most, after.rounds) == (before.most, before.rounds)
    with Session.open(journal) as session:
        fresh = ActiveFL().init(session.table, np.random.default_rng(0))
        for f in dataclasses.fields(fresh):
            if is_per_client(f):
                np.testing.assert_array_equal(getattr(session.state, f.name)[1], getattr(fresh, f.name)[1])
        cohort = session.ask(RoundRequest(2))
        assert "forgotten-1" not in cohort.names


def everything(path: Path) -> str:
    """Everything that can be read in a journal: texts, unpacked names and attributes, and the raw file."""
    with closing(read_journal(path)) as record:
        rows = [record.database.fetch(f"SELECT * FROM {table}") for table in TABLES]
        facts = [record.table()[0].names, record.attributes(), record.facts()]
    return str(rows) + str(facts) + path.read_bytes().decode("latin1")


@pytest.mark.parametrize("audit", [False, True])
def test_a_name_goes_from_every_text(tmp_path: Path, audit: bool) -> None:
    path = tmp_path / "run.sqlite"
    names = ["clinic-b", "clinic-b-2", "benjamin", "reubenjamin"]
    rules = Rules(blocked=("clinic-b-2",))
    with Session(
        create("uniform"),
        ClientTable(names=names),
        seed=1,
        journal=path,
        rules=rules,
        audit=audit,
        shadows={"for clinic-b": create("uniform")},
    ) as session:
        session.set_attributes({"clinic-b": {"city": "Ulm on the Danube"}, "benjamin": {"partner": "clinic-b"}})
        cohort = session.ask(RoundRequest(2, available=["clinic-b", "benjamin"]))
        session.tell(RoundReport(cohort.ticket, [], complete=False), host={"said": "Clinic-B was slow"})
        session.note(
            "flower", {"ticket": 0, "failures": {"clinic-b": "out of memory", "benjamin": "waited for clinic-b's data"}}
        )
        session.abandon(cohort.ticket, "clinic-b is gone; reubenjamin and clinic-b-2 are there")
        session.note("about clinic-b", {"clinic-b's nurse": "called"})
        cohort = session.ask(RoundRequest(2))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        session.record(0, {"accuracy": 0.5, "loss/clinic-b": 0.7, "loss/reubenjamin": 0.2})
    (tmp_path / "run.log").write_text("clinic-b failed")
    (tmp_path / "other.log").write_text("clinic-b-2 failed")
    (tmp_path / "loud.log").write_text("CLINIC-B failed, and Clinic-B-2 did")
    done = CliRunner().invoke(app, ["journal", "copy", str(path), str(tmp_path / "backup.sqlite")])
    done = CliRunner().invoke(app, ["journal", "forget", str(path), "clinic-b"])
    assert done.exit_code == 0, done.output
    text = everything(path)
    kept = text.replace("clinic-b-2", "").lower()
    assert kept.count("clinic-b") == 0 and "Ulm on the Danube" not in text
    assert (
        "reubenjamin and clinic-b-2 are there" in text and "loss/reubenjamin" in text and "loss/forgotten" not in text
    )
    said = " ".join(done.output.split())
    assert (
        "run.log" in said
        and "loud.log" in said
        and "backup.sqlite" in said
        and "other.log" not in said
        and "run.sqlite." not in said
    )
    with closing(read_journal(path)) as record:
        assert "clinic-b " not in str(explain_round(record, 0)) and record.meta()["host"] == {
            "said": "forgotten-0 was slow"
        }
    if audit:
        found = audit_journal(path)
        assert not found.wrong and "The chain itself holds" in str(found.problem)


@pytest.mark.parametrize(
    "word",
    [
        "ticket", "seed", "uniform", "Uniform", "round", "reason", "rules", "blocked", "kind", "loss", "name",
        "clients", "city", "eligible", "quotas", "checkpoint", "round-3", "accuracy", "train", "shadow", "failures",
    ],
)  # fmt: skip
def test_a_name_that_is_a_word_of_the_journals_own_is_forgotten_where_it_names_the_client(
    tmp_path: Path, word: str
) -> None:
    """A client chooses its name. Forgetting it must not damage the rest of the record."""
    path = tmp_path / "run.sqlite"
    with Session(
        create("uniform"),
        ClientTable(names=[word, "benjamin", "cem"]),
        seed=1,
        journal=path,
        rules=Rules(blocked=(word,), eligible="city != 'Rome'", quotas={"city": {"Bonn": 1}}),
    ) as session:
        cities = {word: "Ulm on the Danube", "benjamin": "Bonn", "cem": "Ulm"}
        session.set_attributes({name: {"city": city} for name, city in cities.items()})
        session.add_shadow("shadow", create("uniform"))
        cohort = session.ask(RoundRequest(1))
        session.note(
            "flower", {"ticket": cohort.ticket, "failures": {word: "out of memory", "benjamin": f"waits for {word}"}}
        )
        session.abandon(cohort.ticket, f"{word} is gone")
        cohort = session.ask(RoundRequest(2))
        session.tell(RoundReport(cohort.ticket, cohort.clients), host={"checkpoint": "round-3.npz"})
        session.record(0, {"loss": 0.5, "train/loss": 0.4, f"gain/{word}'s": 1.0})
    done = CliRunner().invoke(app, ["journal", "forget", str(path), word, "--block"])
    assert done.exit_code == 0, done.output
    assert examine(path).valid
    with Session.open(path, create("uniform")) as session:
        assert session.rules is not None and session.rules.blocked == ("forgotten-0",)
        assert (session.rules.eligible, session.rules.quotas) == ("city != 'Rome'", {"city": {"Bonn": 1}})
        assert session.host_state == {"checkpoint": "round-3.npz"}
        assert session.round == 1 and session.journal.metrics()[0]["loss"] == 0.5
        assert set(session.journal.metrics()[0]) == {"loss", *(() if word == "train" else ("train/loss",))}
        assert session.journal.attributes()["benjamin"] == {"city": "Bonn"}
        assert "forgotten-0" in session.table.names and word not in session.table.names
        assert session.ask(RoundRequest(2)).size == 2
    text = everything(path)
    assert "Ulm on the Danube" not in text and "out of memory" not in text and f"{word} is gone" not in text
    assert "waits for forgotten-0" in text and "forgotten-0 is gone" in text
    assert CliRunner().invoke(app, ["explain", str(path), "--round", "0"]).exit_code == 0


def test_a_name_goes_from_conditions_and_lists_of_rules(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    rules = Rules(
        eligible="partner != 'benjamin' and benjamin < 3",
        quotas={"partner": {"benjamin": 1}},
        paused={"benjamin": 3, "cem": 4},
        budgets={"benjamin": {"rounds": 2.0}},
        budget={"rounds": 9.0},
    )
    attributes = {name: {"partner": "benjamin", "benjamin": 1} for name in NAMES}
    with Session(create("uniform"), ClientTable(names=NAMES), journal=path, rules=rules) as session:
        session.set_attributes(attributes)
        session.ask(RoundRequest(1))
        stand_in = session.forget("benjamin")
        kept = session.rules
        assert kept is not None and kept.eligible == f"partner != '{stand_in}' and benjamin < 3"
        assert kept.quotas == {"partner": {stand_in: 1}}
        assert kept.paused == {"cem": 4} and not kept.budgets
    with closing(read_journal(path)) as record:
        assert record.attributes()["cem"] == {"partner": stand_in, "benjamin": 1}


def test_a_name_goes_from_texts_that_are_older_than_the_client(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session("uniform", ["anna", "ben"], journal=path, rules=Rules(blocked=("zoe",))) as session:
        session.abandon(session.ask(1).ticket, "we wait for Zoe")
        session.join(ClientTable(names=["zoe"], sizes=[1]))
        session.forget("zoe")
        assert session.rules is not None and session.rules.blocked == ("forgotten-2",)
    assert "zoe" not in everything(path).lower() and "we wait for forgotten-2" in everything(path)


def test_every_event_and_key_of_a_journal_says_what_it_holds(tmp_path: Path) -> None:
    """An undeclared event counts as another program's, so one of our words in it could be taken for a name."""
    path = tmp_path / "run.sqlite"
    table = ClientTable(names=NAMES, sizes=[10] * len(NAMES))
    with Session(
        create("uniform"), table, journal=path, rules=Rules(window=2), audit=True, shadows={"mine": create("uniform")}
    ) as session:
        session.set_attributes({"cem": {"city": "Bonn"}})
        session.join(ClientTable(names=["frida"], sizes=[3]))
        session.leave(["frida"])
        session.rejoin(["frida"])
        session.set_rules(Rules(max_participations=3, blocked=("emil",)))
        session.add_shadow("other", create("uniform"))
        session.remove_shadow("other")
        session.change_selector(create("uniform"))
        session.abandon(session.ask(RoundRequest(2)).ticket, "too late")
        session.forget("benjamin", block=True)
    with closing(read_journal(path)) as record:
        assert record.meta().keys() <= META.keys()
        bodies = [(kind, json.loads(body)) for kind, body in record.database.fetch("SELECT kind, body FROM events")]
    assert len({kind for kind, _ in bodies}) >= 8
    for kind, body in bodies:
        declared = EVENTS[kind]
        assert declared is TextKind.OWN or (isinstance(declared, dict) and body.keys() <= declared.keys()), kind


def test_who_is_offline_is_for_the_owner_of_the_journal_alone(tmp_path: Path) -> None:
    Presence("waiting", 0.0, offline={"benjamin": 1.0}).write(tmp_path / "run.sqlite")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("audit", [False, True])
def test_a_forgotten_client_that_is_blocked_does_not_return(tmp_path: Path, audit: bool) -> None:
    path = tmp_path / "run.sqlite"
    with Session(
        create("uniform"), ClientTable(names=NAMES), journal=path, rules=Rules(window=2), audit=audit
    ) as session:
        session.forget("benjamin", block=True)
        session.forget("cem")
    with Session.open(path) as session:
        with pytest.raises(InputError, match=r"'benjamin' .*blocked"):
            session.join(ClientTable(names=["benjamin"]))
        session.set_attributes({"benjamin": {"city": "Ulm on the Danube"}, "anna": {"city": "Bonn"}})
        session.join(ClientTable(names=["cem"]))
        assert session.table.names[-1] == "cem"
        session.set_rules(
            Rules(blocked=("benjamin",), max_participations=3)
        )  # as they still are in the operator's file
        assert session.rules is not None and session.rules.blocked == ("forgotten-1",)
    text = everything(path)
    assert "benjamin" not in text.replace("forgotten-1", "") and "Ulm on the Danube" not in text
    command = CliRunner().invoke(app, ["journal", "forget", str(path), "cem", "--block"])
    assert command.exit_code == 0
    with Session.open(path) as session, pytest.raises(InputError, match="'cem'"):
        session.join(ClientTable(names=["cem"]))


def test_a_session_that_goes_on_knows_no_forgotten_name(tmp_path: Path) -> None:
    """The running session also forgets what the journal forgets: it equals a session that is opened again."""
    table = ClientTable(names=NAMES, sizes=[10, 20, 30, 40, 50])
    rules = Rules(blocked=("emil",), pinned=("benjamin",))
    with Session(ActiveFL(), table, seed=1, journal=tmp_path / "run.sqlite", rules=rules) as session:
        session.set_attributes({"benjamin": {"city": "Ulm on the Danube"}})
        cohort = session.ask(RoundRequest(2))
        assert "benjamin" in cohort.names
        session.tell(RoundReport(cohort.ticket, [], complete=False), host={"best": "benjamin"})
        stand_in = session.forget("benjamin")
        session.forget("emil")
        assert session.rules is not None and session.rules.pinned == (stand_in,)
        assert stand_in in session.pending[0].names and session.host_state == {"best": stand_in}
        before = session_state(session)
        assert "benjamin" not in str(before) and "emil" not in str(before)
    with Session.open(tmp_path / "run.sqlite") as again:
        assert not differences(before, session_state(again))


@pytest.mark.parametrize("name", ["fed-cucb", "fedcbs-blind", "fedcor", "divfl", "hics-fl", "balanced", "e3cs"])
def test_any_selector_can_forget(name: str) -> None:
    """Also a selector that learns only during the rounds how many numbers it stores for a client."""
    host = ScriptedHost(n=6)
    table = ClientTable(names=list("abcdef"), sizes=host.table.sizes, labels=host.table.labels)
    session = Session(SELECTORS.create(name), table, signals=host.signals)
    host.play(session, 3, size=2)
    session.forget("c")
    assert not host.play(session, 2, size=5).count(2)

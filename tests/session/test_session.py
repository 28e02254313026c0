"""Sessions: rounds, tickets, membership, shadows, explanations, and every kind of bad input."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Losses, Session, Signal, Status, create
from fedcohort.audit.choices import audit_journal
from fedcohort.core.clients import LabelGram
from fedcohort.core.errors import (
    DuplicateReportError,
    InputError,
    JournalError,
    SignalError,
    TicketError,
    UnknownNameError,
)
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest
from fedcohort.core.signals import SIGNALS
from fedcohort.journal import read_journal
from fedcohort.journal.codec import state_fields
from fedcohort.session.rules import Rules
from fedcohort.testing import ScriptedHost
from tests.snapshot import differences, full_disk, journal_content, session_state

NAMES = ["anna", "ben", "cem", "dora", "emil", "fay"]


def named(selector="uniform", **kwargs):
    return Session(create(selector), ClientTable(names=NAMES, sizes=[1, 2, 3, 4, 5, 6]), **kwargs)


def snapshot(session):
    """Return everything that could change."""
    return session_state(session), journal_content(session)


def test_names_go_in_and_out():
    session = named(seed=3)
    cohort = session.ask(RoundRequest(size=2, available=["ben", "dora", "fay"]))
    assert set(cohort.names) <= {"ben", "dora", "fay"}
    assert cohort.names == tuple(NAMES[c] for c in cohort.clients)
    session.tell(RoundReport(cohort.ticket, list(cohort.names)))
    assert session.round == 1
    assert not session.pending


def test_clients_in_training_are_not_candidates():
    session = named()
    first = session.ask(RoundRequest(size=3))
    second = session.ask(RoundRequest(size=3))
    assert not set(first.names) & set(second.names)
    assert session.ask(RoundRequest(size=2)).size == 0
    session.tell(RoundReport(second.ticket, second.clients))
    third = session.ask(RoundRequest(size=3))
    assert set(third.names) == set(second.names)
    assert [c.ticket for c in session.pending] == [first.ticket, third.ticket]


def test_fewer_candidates_than_asked_for_is_noted():
    cohort = named().ask(RoundRequest(size=5, available=["anna", "ben"]))
    assert set(cohort.names) == {"anna", "ben"}
    assert cohort.notes["reason"] == "5 asked for, 2 available"


def test_partial_reports_are_collected():
    session = Session(create("active-fl"), ClientTable(sizes=[4, 4, 4]), seed=1)
    cohort = session.ask(RoundRequest(size=3))
    a, b, c = cohort.clients.tolist()
    session.tell(RoundReport(cohort.ticket, [a], metrics={Signal.LOSS: [1.0]}, complete=False))
    assert np.isnan(session.state.valuation).all()
    with pytest.raises(DuplicateReportError, match="ticket 0"):
        session.tell(RoundReport(cohort.ticket, [a], metrics={Signal.LOSS: [7.0]}, complete=False))
    session.tell(RoundReport(cohort.ticket, [b], metrics={Signal.LOSS: [2.0]}))
    assert session.state.valuation[a] == 2.0
    assert session.state.valuation[b] == 4.0
    assert np.isnan(session.state.valuation[c])
    status = {r.client: Status(r.status) for r in session.journal.replies(cohort.ticket)}
    assert status == {a: Status.OK, b: Status.OK, c: Status.MISSING}


def test_late_reports_are_recorded_and_change_nothing():
    session = named()
    cohort = session.ask(RoundRequest(size=2))
    late = cohort.names[1]
    session.tell(RoundReport(cohort.ticket, [cohort.names[0]]))
    before = session.state
    session.tell(RoundReport(cohort.ticket, [late]))
    assert session.state is before
    (reply,) = [r for r in session.journal.replies(cohort.ticket) if r.late]
    assert Status(reply.status) is Status.LATE
    with pytest.raises(DuplicateReportError):
        session.tell(RoundReport(cohort.ticket, [late]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_client_with_nan_loss_does_not_stop_the_round(bad):
    session = Session(create("active-fl"), ClientTable(sizes=[1, 1]), seed=1)
    cohort = session.ask(RoundRequest(size=2))
    session.tell(RoundReport(cohort.ticket, [0, 1], metrics={Signal.LOSS: [bad, 2.0]}))
    assert [Status(r.status) for r in session.journal.replies(cohort.ticket)] == [Status.INVALID, Status.OK]
    assert np.isnan(session.state.valuation[0]) and session.state.valuation[1] == 2.0


class Listening(type(create("uniform"))):
    """Uniform selection that requires the update of the output layer's bias."""

    requires = frozenset({Signal.OUTPUT_BIAS_UPDATE})

    def update(self, state, outcome):
        HEARD.append(outcome[Signal.OUTPUT_BIAS_UPDATE])
        return state


HEARD = []


@pytest.mark.parametrize("bad", [[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [1.0, 2.0], [], 5.0])
def test_a_client_with_a_bad_vector_does_not_stop_the_round(bad):
    HEARD.clear()
    session = Session(Listening(), ClientTable(n=4), seed=1, shadows={"the same": Listening()})
    cohort = session.ask(RoundRequest(size=3))
    rows = [[1.0, 2.0, 3.0], bad, [4.0, 5.0, 6.0]]
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.OUTPUT_BIAS_UPDATE: rows}))
    replies = {r.client: r for r in session.journal.replies(cohort.ticket)}
    assert [Status(replies[c].status) for c in cohort.clients] == [Status.OK, Status.INVALID, Status.OK]
    assert replies[cohort.clients[2]].metrics == {"output-bias-update": (4.0, 5.0, 6.0)}
    for seen in HEARD:
        np.testing.assert_array_equal(seen, [[1, 2, 3], [np.nan] * 3, [4, 5, 6]])
    assert len(HEARD) == 2


def test_vectors_of_partial_reports_are_in_the_cohorts_order():
    HEARD.clear()
    session = Session(Listening(), ClientTable(n=4), seed=1)
    cohort = session.ask(RoundRequest(size=4))
    first, second, third, fourth = cohort.clients

    def part(clients, rows, complete=False):
        metrics = {Signal.OUTPUT_BIAS_UPDATE: rows}
        session.tell(RoundReport(cohort.ticket, clients, metrics=metrics, complete=complete))

    part([third], np.array([[3.0, 3.5]]))
    part([second, fourth], [[2.0, 2.5], [1.0, 1.0, 1.0]])  # rows of another length than before are invalid
    part([first], [[1.0, 1.5]], complete=True)
    np.testing.assert_array_equal(HEARD, [[[1, 1.5], [2, 2.5], [3, 3.5], [np.nan, np.nan]]])


@pytest.mark.parametrize(
    ("report", "error", "message"),
    [
        (lambda c: RoundReport(99, []), TicketError, "no ticket 99"),
        (lambda c: RoundReport(-1, []), TicketError, "no ticket -1"),
        (lambda c: RoundReport(c.ticket, ["nobody"]), UnknownNameError, "no client 'nobody'"),
        (lambda c: RoundReport(c.ticket, [17]), UnknownNameError, "no client 17"),
        (
            lambda c: RoundReport(c.ticket, [next(n for n in NAMES if n not in c.names)]),
            InputError,
            "was not asked to train",
        ),
        (lambda c: RoundReport(c.ticket, [c.names[0], c.names[0]]), DuplicateReportError, "ticket 0"),
        (lambda c: RoundReport(c.ticket, c.names, status=[0]), InputError, "'status' must be one of"),
        (lambda c: RoundReport(c.ticket, c.names, status=[0, 9]), InputError, "'status' must be one of"),
        (lambda c: RoundReport(c.ticket, c.names, status=[0.5, 0.5]), InputError, "'status' must be one of"),
        (lambda c: RoundReport(c.ticket, c.names, status=[1j, 1j]), InputError, "'status' must be one of"),
        (lambda c: RoundReport(c.ticket, c.names, status=[True, True]), InputError, "'status' must be one of"),
        (lambda c: RoundReport(c.ticket, c.names, kept=[True]), InputError, "'kept' must be one bool"),
        (lambda c: RoundReport(c.ticket, c.names, metrics={"los": [1, 2]}), InputError, "no signal 'los'"),
        (lambda c: RoundReport(c.ticket, c.names, metrics={Signal.LOSS: [1.0]}), InputError, "one number per"),
        (
            lambda c: RoundReport(c.ticket, c.names, metrics={Signal.LOSS: np.ones((2, 3))}),
            InputError,
            "one number per",
        ),
        (
            lambda c: RoundReport(c.ticket, c.names, metrics={Signal.UPDATE_SKETCH: np.ones((2, 3))}),
            InputError,
            "rows of 64 numbers. Got rows of 3",
        ),
        (
            lambda c: RoundReport(c.ticket, c.names, metrics={Signal.UPDATE_SKETCH: np.ones((3, 64))}),
            InputError,
            "one row of numbers per reported client, 2",
        ),
    ],
)
def test_a_bad_report_is_an_error_and_changes_nothing(report, error, message):
    session = named()
    cohort = session.ask(RoundRequest(size=2))
    before = snapshot(session)
    with pytest.raises(error, match=message):
        session.tell(report(cohort))
    assert snapshot(session) == before
    session.tell(RoundReport(cohort.ticket, cohort.names))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (RoundRequest(size=0), "size .* integer"),
        (RoundRequest(size=True), "size .* integer"),
        (RoundRequest(size=7), "6 clients.* 7"),
        (RoundRequest(size=1, available=["anna", "bem"]), "'bem'"),
        (RoundRequest(size=1, available=[0, 6]), "client 6"),
        (RoundRequest(size=1, available=np.ones(4, bool)), r"shape \(6,\)"),
        (RoundRequest(size=1, available=np.array([0.5])), "whole-number"),
    ],
)
def test_a_bad_request_is_an_error_and_changes_nothing(request_, message):
    session = named()
    before = snapshot(session)
    with pytest.raises((InputError, UnknownNameError), match=message):
        session.ask(request_)
    assert snapshot(session) == before


def test_the_answer_must_fit_the_question():
    session = named("power-of-choice", seed=1)
    request = RoundRequest(size=2)
    with pytest.raises(InputError) as caught:
        session.ask(request)
    assert "session.ask(request, loss=" in caught.value.hint
    query = session.query(request)
    other = Losses(np.array([0]))
    with pytest.raises(InputError):
        session.ask(request, Answer(other, {Signal.LOSS: [1.0]}))
    with pytest.raises(InputError):
        Answer(query, {Signal.LOSS: [1.0]})
    with pytest.raises(InputError, match="lacks 'loss'"):
        Answer(query, {})
    losses = np.arange(len(query.clients), dtype=float)
    assert session.ask(request, Answer(query, {Signal.LOSS: losses})).clients[0] == query.clients[-1]
    uniform = named()
    with pytest.raises(InputError):
        uniform.ask(request, Answer(query, {Signal.LOSS: losses}))


def test_power_of_choice_prefers_clients_that_answer():
    session = named("power-of-choice", seed=1)
    request = RoundRequest(size=2)
    query = session.query(request)
    losses = np.full(len(query.clients), np.nan)
    losses[1] = 0.1
    assert session.ask(request, Answer(query, {Signal.LOSS: losses})).clients[0] == query.clients[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [1, -2]}, r"sizes .*-2.0.* client 1"),
        ({"sizes": [[1]]}, "one number per client"),
        ({"names": ["a", "a"]}, "'a' more than once"),
        ({"names": ["a"], "sizes": [1, 2]}, "1 from names, 2 from sizes"),
        ({}, "how many clients"),
        ({"n": -1}, "must be an integer in"),
    ],
)
def test_bad_tables(arguments, message):
    with pytest.raises(InputError, match=message):
        ClientTable(**arguments)


def test_label_counts_of_different_lengths():
    with pytest.raises(InputError):
        LabelCounts([[1, 2], [3]])
    with pytest.raises(InputError):
        LabelGram([[1.0, 2.0]], classes=2)


def test_a_host_that_cannot_supply_a_signal_is_refused_at_the_start():
    with pytest.raises(SignalError, match=r"'sizes'.*table") as caught:
        Session(create("active-fl"), ClientTable(n=3))
    assert "ClientTable" in caught.value.hint
    with pytest.raises(SignalError, match=r"'loss'.*host"):
        Session(create("active-fl"), ClientTable(sizes=[1, 1]), signals={Signal.DURATION})
    session = Session(create("active-fl"), ClientTable(sizes=[1, 1]))
    cohort = session.ask(RoundRequest(size=1))
    with pytest.raises(SignalError, match="'loss'"):
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert session.pending


def test_join_leave_return_with_names():
    session = named("active-fl")
    session.join(ClientTable(names=["gus"], sizes=[9]))
    assert session.table.n == 7 and len(session.state.valuation) == 7
    with pytest.raises(InputError, match="'gus'"):
        session.join(ClientTable(names=["gus"], sizes=[9]))
    with pytest.raises(InputError):
        session.join(ClientTable(names=["hal"]))
    session.leave(["anna"])
    with pytest.raises(UnknownNameError, match="no client 'zoe'"):
        session.leave(["zoe"])
    assert "anna" not in session.ask(RoundRequest(size=None)).names
    session.rejoin(["anna"])
    assert session.ask(RoundRequest(size=None)).names == ("anna",)


def test_shadows_see_everything_and_disturb_nothing():
    host = ScriptedHost()
    alone = host.play(host.session(create("active-fl"), seed=4), 10)
    shadows = {"poc": create("power-of-choice"), "uni": create("uniform")}
    session = Session(create("active-fl"), host.table, seed=4, signals=host.signals, shadows=shadows)
    assert host.play(session, 10) == alone
    picks = session.explain(5).shadows
    assert set(picks) == {"poc", "uni"} and len(picks["uni"]) == 3


def test_a_failing_shadow_is_noted():
    class Bad(type(create("uniform"))):
        def select(self, state, slate, answer, rng):
            raise RuntimeError("boom")

    host = ScriptedHost()
    session = Session(create("uniform"), host.table, shadows={"bad": Bad()})
    host.play(session, 2)
    assert session.explain(0).shadows["bad"] == "failed: boom"
    assert "bad" not in session.explain(1).shadows and not session.shadows


def test_explanations_say_why():
    session = named("power-of-choice", seed=2)
    request = RoundRequest(size=1, available=NAMES[:4])
    query = session.query(request)
    losses = np.arange(len(query.clients), dtype=float)
    cohort = session.ask(request, Answer(query, {Signal.LOSS: losses}))
    picked = session.explain(0, cohort.names[0])
    assert picked.picked and picked.rows[0].rank == 1 and picked.rows[0].parts["loss"] == losses[-1]
    assert "was picked in round 0; it scored" in str(picked)
    beaten = session.explain(0, int(query.clients[0]))
    assert not beaten.picked and "lowest score picked" in str(beaten)
    assert "not a candidate" in str(session.explain(0, "fay"))
    assert "1 of 4 candidates" in str(session.explain(0))
    with pytest.raises(InputError, match="no round 7"):
        session.explain(7)
    with pytest.raises(UnknownNameError):
        session.explain(0, "zoe")
    session.tell(RoundReport(cohort.ticket, cohort.names, status=[Status.FAILED]))
    assert session.explain(0, cohort.names[0]).status == "FAILED"


def test_large_federations_record_only_the_best_scores():
    n = 3000
    host = ScriptedHost(n=n)
    session = host.session(create("active-fl", alpha1=0.0, alpha2=0.0, alpha3=1.0))
    host.play(session, 1, size=10)
    rows = session.explain(0).rows
    assert sum(row.picked for row in rows) == 10 and 64 <= len(rows) <= 84


def test_record_keeps_numbers_about_the_model():
    session = named()
    with pytest.raises(InputError, match="no round 0"):
        session.record(0, {"accuracy": 0.5})
    session.ask(RoundRequest(size=1))
    session.record(0, {"accuracy": 0.5})
    assert session.journal.metrics() == {0: {"accuracy": 0.5}}


def test_size_weighted_draws_with_replacement_by_size():
    table = ClientTable(sizes=[1, 3, 0, 6])
    counts = np.zeros(4)
    for seed in range(400):
        cohort = Session(create("size-weighted"), table, seed=seed).ask(RoundRequest(size=4))
        counts[cohort.clients] += cohort.weights
    expected = np.array([0.1, 0.3, 0.0, 0.6]) * 1600
    assert counts[2] == 0
    assert ((counts - expected)[[0, 1, 3]] ** 2 / expected[[0, 1, 3]]).sum() < 16.3  # chi-square, 3 classes, p = 3e-4


def test_active_fl_against_the_papers_algorithm():
    """Algorithm 1 by enumeration: drop alpha1 N, softmax over the rest, without replacement."""
    values = np.array([1.0, 2.0, 3.0, 4.0])
    counts = np.zeros(4)
    for seed in range(600):
        session = Session(
            create("active-fl", alpha1=0.5, alpha2=1.0, alpha3=0.0), ClientTable(sizes=[1] * 4), seed=seed
        )
        everybody = session.ask(RoundRequest(size=None))
        session.tell(RoundReport(everybody.ticket, range(4), metrics={Signal.LOSS: values}))
        counts[session.ask(RoundRequest(size=1)).clients] += 1
    share = np.exp(values) * [0, 0, 1, 1]
    expected = 600 * share / share.sum()
    assert counts[0] == counts[1] == 0
    assert ((counts - expected)[2:] ** 2 / expected[2:]).sum() < 10.8


def test_two_processes_two_hash_seeds_one_trace():
    script = (
        "import fedcohort; from fedcohort.testing import ScriptedHost\n"
        "host = ScriptedHost(n=30)\n"
        "for name in ('uniform', 'size-weighted', 'power-of-choice', 'active-fl'):\n"
        "    print(host.play(host.session(fedcohort.create(name), seed=11), 20, 5, some=True))\n"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1] and traces[0].count("\n") == 4


def test_the_core_is_light():
    script = (
        "import sys, fedcohort, fedcohort.selectors\n"
        "print([m for m in ('torch', 'flwr', 'cryptography', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_new_selector_learns_from_the_journal(tmp_path):
    """Its state is the one it would have had from the start."""
    host = ScriptedHost()
    with Session(create("uniform"), host.table, seed=2, signals=host.signals, journal=tmp_path / "j") as session:
        host.play(session, 6)
        session.add_shadow("watching", create("fedcm-ts"))
        session.change_selector(create("fedcm-ts"))
        watched = session.journal.state("watching")
        for field in dataclasses.fields(session.state):
            np.testing.assert_array_equal(getattr(session.state, field.name), watched[field.name])
        fresh = create("fedcm-ts").init(host.table, np.random.default_rng(0))
        assert any(not np.array_equal(getattr(fresh, f.name), watched[f.name]) for f in dataclasses.fields(fresh))
        host.play(session, 2)
    with Session.open(tmp_path / "j") as session:
        assert session.selector == create("fedcm-ts") and session.round == 8
        (body,) = session.journal.events("selector")
        assert (body["round"], body["from"]["name"], body["to"]["name"]) == (6, "uniform", "fedcm-ts")
    with pytest.raises(SignalError):
        Session(create("uniform"), ClientTable(n=3)).change_selector(create("fedcbs"))


def test_facts_may_be_added_but_not_removed(tmp_path):
    names = ["a", "b", "c"]
    with Session(create("uniform"), ClientTable(names=names), journal=tmp_path / "j") as session:
        with pytest.raises(SignalError):
            session.change_selector(create("size-weighted"))
        session.update_facts(ClientTable(names=names, sizes=[1, 2, 0]))
        assert session.journal.events("facts") == [{"clients": [0, 1, 2]}]
        session.change_selector(create("size-weighted"))
        with pytest.raises(InputError):
            session.update_facts(ClientTable(names=names))
    with Session.open(tmp_path / "j") as session:
        assert session.table.sizes.tolist() == [1, 2, 0] and 2 not in session.ask(RoundRequest(2)).clients


@pytest.mark.parametrize("kind", ["abandoned", "rules", "selector", "shadow", "join", "excluded"])
def test_notes_cannot_imitate_events_of_the_session(kind):
    session = named()
    with pytest.raises(InputError, match="session's own"):
        session.note(kind, {"round": 0})
    session.note("flower", {"anything": 1})
    session.ask(RoundRequest(1))
    assert session.explain(0).round == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.add_shadow("more", create("fedacs")),
        lambda s: s.remove_shadow("watcher"),
        lambda s: s.set_attributes({name: {"region": "x" * 3000} for name in NAMES}),
        lambda s: s.set_rules(Rules(blocked=tuple("x" * 3000 + str(i) for i in range(5)))),
        lambda s: s.leave(["ben"]),
        lambda s: s.join(ClientTable(names=["gil" + "x" * 9000], sizes=[7])),
        lambda s: s.change_selector(create("size-weighted")),
    ],
)
def test_on_a_full_disk_nothing_changes(change, tmp_path):
    path = tmp_path / "journal.sqlite"
    rules = Rules(eligible="region != 'x'")
    session = named("active-fl", journal=path, shadows={"watcher": create("uniform")}, rules=rules)
    with full_disk(session):
        for i in range(1000):  # until the existing pages are full
            try:
                session.note("filling", {"with": "x" * 300, "number": i})
            except JournalError:
                break
        before, record = session_state(session), journal_content(session)
        try:
            change(session)
            worked = True  # it fitted into the rest of a page
        except JournalError:
            worked = False
        changed = differences(before, session_state(session)) + differences(record, journal_content(session))
        assert bool(changed) == worked
    now = session_state(session)
    session.close()
    with Session.open(path) as again:
        assert not differences(now, session_state(again))


def test_a_new_selector_learns_nothing_from_forgotten_clients():
    session = Session(create("uniform"), ClientTable(names=list("abcd")), signals=SIGNALS)
    cohort = session.ask(RoundRequest(4))
    metrics = {s: np.full(4, 2.0) for s in SIGNALS if s.is_metric and s.width is None}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    session.forget("b")
    session.change_selector(create("rbcs-f"))
    for name, values in state_fields(session.state):
        assert np.isfinite(values).all(), name
    session.rejoin([1])
    assert np.isfinite(session.ask(RoundRequest(4)).notes["bound of the slowest"])


def test_rules_set_after_a_client_was_forgotten_leave_a_valid_journal(tmp_path):
    """Forgetting a client rewrites the rules that name it; the next rules replace what was rewritten."""
    path = tmp_path / "j.sqlite"
    with Session("uniform", list("abcd"), journal=path, rules=Rules(blocked=("a",))) as session:
        session.set_rules(Rules(blocked=("a",), min_separation=2))
        session.forget("a")
        session.set_rules(Rules())
        read_journal(path).close()  # refuses a journal whose rows are not those that were written


def test_labels_in_another_form_leave_nothing_of_the_former_one(tmp_path):
    path = tmp_path / "j.sqlite"
    table = ClientTable(names=["a", "b"], sizes=[2, 2], labels=LabelGram([[4, 0], [0, 4]], classes=2))
    with Session("uniform", table, journal=path, audit=True) as session:
        session.tell(session.ask(1))
        session.update_facts(ClientTable(names=["a", "b"], sizes=[2, 2], labels=LabelCounts([[2, 0], [0, 2]])))
        session.tell(session.ask(1))
        assert "classes" not in session.journal.facts()
    assert not audit_journal(path).wrong


def test_a_report_without_clients_is_refused_where_staleness_is_added():
    session = Session("uniform", 4, asynchronous=True)
    cohort = session.ask(RoundRequest(1))
    with pytest.raises(InputError):
        session.tell(RoundReport(cohort.ticket, None))
    session.tell(RoundReport(cohort.ticket, cohort.clients))


def test_a_note_of_half_a_character_is_refused():
    session = named()
    with pytest.raises(InputError):
        session.note("\ud800", {})

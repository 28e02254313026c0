"""Wrong arguments of public calls are named and change nothing; so do errors of selectors, and bugs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fedcohort
from fedcohort import Cohort, LabelCounts, Losses, Session, Trial
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import InputError, SelectorError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.selectors.numerics.class_balance import qcid
from tests.snapshot import differences, journal_content, session_state


@pytest.mark.parametrize("clients", [[0.5], [True], ["a"], [[0]], 3, np.array([1.0])])
def test_clients_are_whole_numbers(clients):
    with pytest.raises(InputError):
        Cohort(clients)


@pytest.mark.parametrize("make", [Losses, lambda clients: Trial((clients,))])
def test_clients_to_ask_are_whole_numbers(make):
    with pytest.raises(InputError):
        make([0.5])


def test_an_empty_cohort_is_valid():
    assert Cohort([]).size == 0 and Cohort([]).clients.dtype == np.int64


@pytest.mark.parametrize("large", [2.0**54, 1e300, float("inf"), float("nan")])
def test_sizes_that_no_client_can_have_are_refused(large):
    for make in (
        lambda: fedcohort.ClientTable(sizes=[1, large]),
        lambda: LabelFactor([[1, 2], [large * 2**10, 0]], 2),
    ):
        with pytest.raises(InputError):
            make()


@pytest.mark.parametrize("make", [LabelCounts, lambda labels: LabelGram(labels, 2)])
def test_label_counts_that_no_client_can_have_are_refused(make):
    with pytest.raises(InputError):
        make([[1, 2], [float("inf"), 0]])


@pytest.mark.filterwarnings("error")
def test_class_balance_of_the_largest_counts_is_that_of_small_ones():
    counts = np.array([[8, 0, 1], [9, 0, 0], [0, 8, 8], [0, 9, 0], [5, 5, 5], [1, 2, 30]], float)
    for group in ([0, 2], [1, 3, 5], [0, 1, 2, 3, 4, 5]):
        assert qcid(LabelCounts(counts * 2.0**47), group) == qcid(LabelCounts(counts), group)


# -- what is checked, and what is not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        (lambda s: s.ask("ten"), "request", "'ten'"),
        (lambda s: s.ask(2.5), "request", "2.5"),
        (lambda s: s.tell(RoundReport([], [0])), "ticket", "[]"),
        (lambda s: s.abandon("x", "why"), "ticket", "'x'"),
        (lambda s: s.abandon(0, None), "reason", "None"),
        (lambda s: s.record("first", {}), "round_", "'first'"),
        (lambda s: s.note(3, {}), "kind", "3"),
        (lambda s: s.join(["new"]), "clients", "['new']"),
        (lambda s: s.forget(3), "client", "3"),
        (lambda s: s.set_rules({"blocked": []}), "rules", "{'blocked': []}"),
        (lambda s: s.set_attributes([1]), "attributes", "[1]"),
        (lambda s: s.change_selector(3), "selector", "3"),
        (lambda s: s.add_shadow("x", 3), "'x'", "3"),
        (lambda _: Session(3, 3), "selector", "3"),
        (lambda _: Session("uniform", "three"), "clients", "'three'"),
        (lambda _: Session("uniform", 3, seed=-1), "seed", "-1"),
        (lambda _: Session("uniform", 3, commit="sometimes"), "commit", "'sometimes'"),
        (lambda _: Session("uniform", 3, journal=3), "journal", "3"),
        (lambda _: Session("uniform", 3, signals=["losss"]), "loss", "'losss'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(call, argument, value):
    session = Session("uniform", 3)
    before = session_state(session)
    with pytest.raises(InputError) as caught:
        call(session)
    assert argument in str(caught.value) and value in str(caught.value)
    assert not differences(before, session_state(session))


@pytest.mark.parametrize("method", ["init", "size", "query", "select", "update", "grow"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), InputError("mine", hint="help"), SystemExit("mine")])
def test_what_a_selector_raises_is_named_as_its_error_and_changes_nothing(method, error):
    def broken(*_: object) -> None:
        raise error

    kind = type(fedcohort.create("uniform"))
    selector = type("Broken", (kind,), {method: broken})()
    last: list[tuple[Session, object]] = []  # the session before the step that fails

    def play() -> None:
        session = Session(selector, ["anna", "ben", "cem"])
        last.append((session, session_state(session)))
        cohort = session.ask(RoundRequest(2))
        last.append((session, session_state(session)))
        session.tell(cohort)
        last.append((session, session_state(session)))
        session.join(fedcohort.ClientTable(names=["new"], sizes=[1]))

    with pytest.raises(SelectorError, match=r"'uniform' raised an error.*mine") as caught:
        play()
    assert caught.value.__cause__ is error and caught.value.hint == getattr(error, "hint", None)
    assert ("in round 0" in str(caught.value)) == (method not in ("init", "grow"))
    for session, before in last[-1:]:
        assert not differences(before, session_state(session))


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("method", ["init", "size", "query", "select", "update", "grow"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), SystemExit("mine"), Wordless()])
def test_whatever_a_shadow_raises_it_is_dropped_and_the_session_goes_on(method, error):
    def broken(*_: object) -> None:
        raise error

    kind = type(fedcohort.create("uniform"))
    shadows = {"bad": type("Broken", (kind,), {method: broken})(), "good": "uniform"}
    session = Session("uniform", ["anna", "ben", "cem"], shadows=shadows)
    session.tell(session.ask(2))
    session.join(fedcohort.ClientTable(names=["new"], sizes=[1]))
    session.tell(session.ask(2))
    assert set(session.shadows) == set(session.journal.meta()["shadows"]) == {"good"} and session.round == 2
    (dropped,) = session.journal.events("shadow")
    words = "Wordless" if isinstance(error, Wordless) else "mine"
    assert (dropped["name"], dropped["what"], dropped["reason"]) == ("bad", "failed", f"failed: {words}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "\ud800"),
        ("stop", 3),
        ("notes", {"a": object()}),
        ("notes", {object(): "a"}),
        ("score", 3.0),
        ("score", ["a", "b", "c"]),
        ("parts", {"a": [[1.0], [2.0, 3.0], []]}),
        ("parts", {"a": object()}),
        ("parts", {3: [1.0, 2.0, 3.0]}),
        ("candidates", [0, 1, 2]),
        ("candidates", np.array([0.5, 1.0, 2.0])),
    ],
)
def test_a_cohort_that_cannot_be_recorded_is_the_selectors_error(field, value):
    class Odd(type(fedcohort.create("uniform"))):
        def select(self, state, slate, answer, rng):
            cohort = Cohort(slate.candidates[:1], candidates=slate.candidates, score=np.zeros(3), parts={})
            return dataclasses.replace(cohort, **{field: value}), state

    session = Session(Odd(), 3)
    before = session_state(session)
    with pytest.raises(SelectorError, match="'uniform'"):
        session.ask(1)
    assert not differences(before, session_state(session))


BUGS = {
    "coverage": ("fedcohort.session.coverage.Tally.coverage", lambda s, c: s.coverage()),
    "ask": ("fedcohort.session.session.recorded_scores", lambda s, c: s.ask(RoundRequest(1))),
    "tell": ("fedcohort.session.session.in_cohort_order", lambda s, c: s.tell(RoundReport(c.ticket, c.clients))),
    "ask, while it is recorded": ("fedcohort.journal.Journal.add_cohort", lambda s, c: s.ask(RoundRequest(1))),
    "tell, while it is recorded": (
        "fedcohort.journal.Journal.close_cohort",
        lambda s, c: s.tell(RoundReport(c.ticket, c.clients)),
    ),
    "join": (
        "fedcohort.session.session.StatefulSelector.grow",
        lambda s, c: s.join(fedcohort.ClientTable(names=["new"], sizes=[1])),
    ),
    "forget": ("fedcohort.session.session.erase", lambda s, c: s.forget("ben")),
    "change_selector": ("fedcohort.session.validation.fitting", lambda s, c: s.change_selector("all")),
}


@pytest.mark.parametrize("where", BUGS)
def test_a_bug_looks_like_a_bug_and_changes_nothing(where, monkeypatch, tmp_path):
    """A KeyError in the middle of our own code is that KeyError, not a complaint about arguments."""
    target, call = BUGS[where]
    session = Session("uniform", ["anna", "ben", "cem", "dora"], journal=tmp_path / "j", shadows={"s": "uniform"})
    cohort = session.ask(RoundRequest(2))
    before, rows = session_state(session), journal_content(session)

    def bug(*_: object, **__: object) -> None:
        raise KeyError("a bug of ours")

    with monkeypatch.context() as patched:
        patched.setattr(target, bug)
        with pytest.raises(KeyError, match="a bug of ours"):
            call(session, cohort)
    assert not differences(before, session_state(session))
    assert not differences(rows, journal_content(session))
    call(session, cohort)  # and works once the bug is gone

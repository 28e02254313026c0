"""The short form of a session: names and numbers instead of the protocol's objects."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort import ClientTable, Session, Signal, Status, create
from fedcohort.core.errors import InputError, SignalError, UnknownNameError
from fedcohort.core.protocol import Answer, Losses, RoundReport, RoundRequest
from tests.snapshot import differences, session_state


def test_three_lines_choose_and_learn():
    session = Session("oort", clients=100)
    cohort = session.ask(10)
    session.tell(cohort, loss_rms=np.linspace(0, 1, 10), duration=[3.0] * 10)
    assert session.round == 1 and len(cohort) == 10 and session.table.n == 100


def test_names_and_numbers_stand_for_objects():
    table = ClientTable(names=["a", "b", "c", "d"], sizes=[1, 1, 1, 1])
    long = Session(create("oort"), table, seed=3, signals=[Signal.LOSS_RMS, Signal.DURATION])
    short = Session("oort", ["a", "b", "c", "d"], seed=3, signals=["loss-rms", "duration"])
    for _ in range(3):
        one, other = long.ask(RoundRequest(2)), short.ask(2)
        assert one.names == other.names
        metrics = {Signal.LOSS_RMS: [1.0, 2.0], Signal.DURATION: [5.0, 6.0]}
        status = [Status.OK, Status.FAILED]
        long.tell(RoundReport(one.ticket, one.clients, status=status, metrics=metrics))
        short.tell(other, loss_rms=[1.0, 2.0], duration=[5.0, 6.0], status=status)
    assert not differences(session_state(long), session_state(short))


def test_none_asks_for_all_clients():
    assert sorted(Session("uniform", 5).ask(None).names) == list("01234")


def test_numbers_by_client_need_no_order():
    by_array, by_name = Session("oort", 20, seed=1), Session("oort", 20, seed=1)
    cohort = by_array.ask(4)
    assert by_name.ask(4).names == cohort.names
    losses, seconds = [1.0, 2.0, 3.0, 4.0], [9.0, 8.0, 7.0, 6.0]
    by_array.tell(cohort, loss_rms=losses, duration=seconds, kept=[True, True, False, True])
    mixed = dict(reversed(list(zip(cohort.names, losses, strict=True))))
    by_name.tell(
        cohort, loss_rms=mixed, duration=dict(zip(cohort.names, seconds, strict=True)), kept={cohort.names[2]: False}
    )
    assert not differences(session_state(by_array), session_state(by_name))


def test_a_client_that_no_mapping_names_is_missing():
    session = Session("oort", 20)
    cohort = session.ask(3)
    first, second, third = cohort.names
    session.tell(
        cohort, loss_rms={first: 1.0, third: 2.0}, duration={first: 1.0, third: 1.0}, status={third: Status.LATE}
    )
    found = {session.table.name(reply.client): Status(reply.status) for reply in session.journal.replies(cohort.ticket)}
    assert found == {first: Status.OK, second: Status.MISSING, third: Status.LATE}


def test_a_status_may_name_only_failed_clients():
    session = Session("uniform", 20)
    cohort = session.ask(3)
    session.tell(cohort, status={cohort.names[1]: Status.FAILED})
    found = [reply.status for reply in session.journal.replies(cohort.ticket)]
    assert sorted(found) == [Status.OK, Status.OK, Status.FAILED]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"los": [1, 2]}, ("'los'", "did you mean 'loss'?")),
        ({"durations": [1, 2]}, ("'durations'", "did you mean 'duration'?")),
        ({"sizes": [1, 2]}, ("'sizes'",)),
        ({"loss": [1, 2, 3]}, ("'loss'", "2")),
        ({"loss": {"nobody": 1.0}}, ("'nobody'",)),
        ({"loss": "high"}, ("'loss'", "'high'")),
        ({"status": [0, 9]}, ("'status'", "9")),
        ({"status": {"nobody": 1}}, ("'nobody'",)),
        ({"kept": [1, 2]}, ("'kept'",)),
    ],
)
def test_a_wrong_keyword_is_refused_by_name_and_changes_nothing(outcome, words):
    session = Session("uniform", 6)
    cohort = session.ask(2)
    before = session_state(session)
    with pytest.raises(InputError) as caught:
        session.tell(cohort, **outcome)
    assert all(word in str(caught.value) for word in words)
    assert not differences(before, session_state(session))


def test_a_report_takes_no_keywords():
    session = Session("uniform", 6)
    cohort = session.ask(2)
    with pytest.raises(InputError, match="'loss'"):
        session.tell(RoundReport(cohort.ticket, cohort.clients), loss=[1, 2])


def test_keywords_answer_a_query():
    losses = np.random.default_rng(0).random(50)
    ways = {
        "function": lambda names: [losses[int(name)] for name in names],
        "array": losses,
        "mapping": {str(i): loss for i, loss in enumerate(losses)},
    }
    long = Session("power-of-choice", 50, seed=1)
    query = long.query(RoundRequest(5))
    expected = long.ask(RoundRequest(5), Answer(query, {Signal.LOSS: losses[query.clients]}))
    for way in ways.values():
        assert Session("power-of-choice", 50, seed=1).ask(5, loss=way).names == expected.names
        assert len(Session("uniform", 50).ask(5, loss=way)) == 5  # uniform asks nothing


def test_a_question_without_an_answer_says_how_to_answer():
    session = Session("power-of-choice", clients=100)
    with pytest.raises(InputError) as caught:
        session.ask(10)
    query = session.query(10)
    assert f"of {len(query.names)}: {', '.join(query.names[:5])} and {len(query.names) - 5} more" in str(caught.value)
    assert "query = session.query(10); session.ask(10, loss={name: ... for name in query.names})" in caught.value.hint
    with pytest.raises(InputError, match="'loss'"):
        session.ask(10, loss=[1.0, 2.0])
    with pytest.raises(InputError, match=r"asks for 'loss'.*Got duration") as caught:
        session.ask(10, duration=np.ones(100))
    assert "loss=..." in caught.value.hint
    with pytest.raises(InputError, match="did you mean 'loss'"):
        session.ask(10, losss=np.ones(100))
    assert session.round == 0


def test_a_question_names_its_clients_and_takes_answers_by_name():
    session = Session("power-of-choice", clients=["anna", "ben", "cem", "dora"], seed=1)
    query = session.query(1)
    assert query.names == session.table.names_of(query.clients) and len(query.names) >= 1
    losses = {name: float(i) for i, name in enumerate(query.names)}
    assert session.ask(1, loss=losses).names == (query.names[-1],), "the largest loss"


def test_a_question_for_another_loss_names_its_keyword():
    class AsksRms(type(create("power-of-choice"))):
        def query(self, state, slate, rng):
            return Losses(slate.candidates, frozenset({Signal.LOSS_RMS}))

    session = Session(AsksRms(), clients=["anna", "ben", "cem"])
    with pytest.raises(InputError, match="'loss-rms'") as caught:
        session.ask(2)
    assert "loss_rms={name: ..." in caught.value.hint


@pytest.mark.parametrize(("told", "lacking"), [("loss_rms", "duration"), ("duration", "loss_rms")])
def test_a_missing_signal_is_named_as_the_caller_would_write_it(told, lacking):
    session = Session("oort", clients=["anna", "ben", "cem"])
    cohort = session.ask(2)
    with pytest.raises(SignalError) as caught:
        session.tell(cohort, **{told: [1.0, 2.0]})
    assert f"session.tell(cohort, {lacking}=...)" in caught.value.hint and "RoundReport" not in str(caught.value)
    with pytest.raises(SignalError) as caught:
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={told.replace("_", "-"): [1.0, 2.0]}))
    assert "RoundReport.metrics" in caught.value.hint


def test_a_session_shows_what_it_is(tmp_path):
    session = Session("oort", clients=["anna", "ben", "cem"])
    assert repr(session) == "<Session 'oort': 3 clients, round 0, journal in memory>"
    cohort = session.ask(2)
    session.tell(cohort, loss_rms=[0.7, 0.9], duration=[12.0, 30.0])
    assert "round 1" in repr(session)
    with Session("uniform", clients=1, journal=tmp_path / "run.sqlite") as kept:
        assert "'uniform': 1 client, round 0" in repr(kept) and "run.sqlite" in repr(kept)


def test_an_unknown_selector_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean 'power-of-choice'"):
        Session("power-of-choise", 10)


def test_shadows_and_a_new_selector_can_be_names():
    session = Session("uniform", 10, shadows={"other": "uniform"})
    session.add_shadow("third", "uniform")
    session.change_selector("all")
    assert len(session.ask(None)) == 10 and set(session.shadows) == {"other", "third"}


@pytest.mark.parametrize("unknown", [{0: 1.0}, {"zoe": 1.0}, {"anna": 1.0, "zoe": 2.0}, {("anna",): 1.0}])
def test_an_answer_about_unknown_clients_is_refused_before_anything_changes(unknown):
    session = Session("power-of-choice", ["anna", "ben", "cem", "dora"])
    before = session_state(session)
    with pytest.raises(InputError) as caught:
        session.ask(2, loss=unknown)
    strange = next(key for key in unknown if key != "anna")
    assert repr(strange) in str(caught.value) and "'anna'" in str(caught.value) and caught.value.hint
    assert not differences(before, session_state(session))
    assert len(session.ask(2, loss={"anna": 3.0, "ben": 1.0})) == 2  # a client without a loss gave no answer

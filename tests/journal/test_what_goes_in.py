"""What can be written to a journal, and what a host needs to continue one."""

from contextlib import closing

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Session, Signal, create
from fedcohort.audit.verification import examine
from fedcohort.core.clients import LabelFactor, LabelGram, LabelGramRows
from fedcohort.core.errors import InputError, JournalError
from fedcohort.core.protocol import RoundRequest
from fedcohort.journal import read_journal
from fedcohort.session.rules import Rules
from fedcohort.testing import ScriptedHost
from tests.snapshot import differences, session_state

HOST = ScriptedHost()


def test_numbers_of_numpy_are_numbers(tmp_path):
    path = tmp_path / "j.sqlite"
    numbers = {
        "f4": np.float32(0.5),
        "i8": np.int64(3),
        "bool": np.bool_(True),
        "0-d": np.array(2.5),
        "nan": float("nan"),
        "none": None,
        "big": 10**30,
        "zero": -0.0,
    }
    with HOST.session(create("active-fl"), journal=path) as session:
        HOST.play(session, 1)
        session.record(np.int64(0), numbers)
        session.note("mine", {"loss": np.float32(0.5), "where": [np.int16(4)]})
        cohort = session.ask(RoundRequest(size=2))
        session.tell(HOST.report(cohort), host={"at": np.int64(7)})
    with closing(read_journal(path)) as journal:
        expected = {"f4": 0.5, "i8": 3.0, "bool": 1.0, "0-d": 2.5, "nan": None, "none": None, "big": 1e30, "zero": 0.0}
        assert journal.metrics() == {0: expected}
        assert all(type(value) in (float, type(None)) for value in journal.metrics()[0].values())
        assert journal.events("mine") == [{"loss": 0.5, "where": [4]}]
        assert journal.meta()["host"] == {"at": 7}
    assert examine(path).valid


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "0.5"}, r"'loss'.* one number .*'0.5' \(str\)"),
        ({"loss": np.ones(2)}, "one number .*ndarray"),
        ({"loss": [1.0]}, "one number"),
        ({"loss": 1j}, "one number"),
        ({"loss": 10**400}, "float can hold"),
        ({3: 1.0}, "printable"),
        ({"a\ud800": 1.0}, "printable"),
    ],
)
def test_what_is_no_number_is_refused(metrics, message):
    session = HOST.session(create("uniform"))
    HOST.play(session, 1)
    with pytest.raises(InputError, match=message):
        session.record(0, {"accuracy": 0.5, **metrics})
    assert session.journal.metrics() == {}
    with pytest.raises(InputError, match=r"0\.5"):
        session.record(0.5, {"accuracy": 0.5})
    for value in (np.ones(2), {1, 2}, object(), b"x"):
        with pytest.raises(InputError, match=r"The event 'mine'(.|\n)*tolist"):
            session.note("mine", {"value": value})
    assert session.journal.events("mine") == []


# -- continue or start ------------------------------------------------------------------------------------------------

TABLE = ClientTable(names=["a", "b", "c"], sizes=[1, 2, 3])
GIVEN = {"selector": create("active-fl"), "clients": TABLE, "seed": 4, "signals": {Signal.LOSS, Signal.DURATION}}


def continued(path, **changes):
    return Session.open_or_create(path, **(GIVEN | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "seed is 4.* 5 "),
        ({"signals": {Signal.LOSS}}, "supplies duration, loss,.* loss"),
        ({"signals": None}, r"duration, loss,.*signals=None"),
        ({"audit": True}, "cannot be audited"),
        ({"clients": ClientTable(names=["a", "b"], sizes=[1, 2])}, "3 clients, .*2"),
        ({"clients": ClientTable(names=["a", "x", "c"], sizes=[1, 2, 3])}, "client 1 .*'b'.*'x'"),
        ({"clients": ClientTable(names=["a", "b", "c"], sizes=[1, 2, 9])}, "sizes or labels of its client 'c'"),
        (
            {"clients": ClientTable(names=["a", "b", "c"], sizes=[1, 2, 3], labels=LabelCounts([[1], [2], [3]]))},
            "have sizes,.* label-counts, label-products, sizes",
        ),
    ],
)
def test_another_session_is_not_continued(tmp_path, changes, message):
    path = tmp_path / "j.sqlite"
    continued(path).close()
    before = read_journal(path).meta()
    with pytest.raises(JournalError, match=f"another session: .*{message}"):
        continued(path, shadows={"new": create("uniform")}, **changes)
    assert read_journal(path).meta() == before  # the attempt changed nothing and added no shadow
    with continued(path) as session:
        assert session.round == 0


def test_a_federation_that_changed_is_continued_with_its_first_or_its_present_table(tmp_path):
    path = tmp_path / "j.sqlite"
    with continued(path) as session:
        session.join(ClientTable(names=["d"], sizes=[4]))
        session.update_facts(ClientTable(names=["a", "b", "c", "d"], sizes=[1, 2, 3, 5]))
    continued(path).close()
    continued(path, clients=ClientTable(names=["a", "b", "c", "d"], sizes=[1, 2, 3, 5])).close()
    with pytest.raises(JournalError, match="'d'"):
        continued(path, clients=ClientTable(names=["a", "b", "c", "d"], sizes=[1, 2, 3, 4]))
    with continued(path) as session:
        session.forget("b")
    continued(path).close()  # with or without it
    continued(path, clients=ClientTable(names=["a", "c", "d"], sizes=[1, 3, 5])).close()
    with pytest.raises(JournalError, match="'c'"):
        continued(path, clients=ClientTable(names=["a", "d"], sizes=[1, 5]))
    with pytest.raises(JournalError, match=r" 2 "):
        continued(path, clients=ClientTable(names=["a", "c", "d", "x", "y"], sizes=[1] * 5))


@pytest.mark.parametrize("audit", [False, True])
def test_labels_that_become_known_in_another_form_replace_the_first(tmp_path, audit):
    counts = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]])
    forms = {"f": LabelFactor(counts, 2), "g": LabelGram(counts @ counts.T, 2)}
    for old, new in ("fg", "gf"):
        path = tmp_path / f"{old}{new}.sqlite"
        first = ClientTable(labels=forms[old])
        with Session(create("uniform"), first, journal=path, audit=audit, rules=Rules(window=3)) as session:
            session.set_attributes({session.table.name(0): {"battery": 3}})  # which are stored next to the labels
            session.update_facts(ClientTable(labels=forms[new]))
            assert session.journal.attributes()
            expected = session_state(session)
        with Session.open(path) as session:
            assert not differences(expected, session_state(session))
            assert type(session.table.labels) is type(forms[new])
            grown = np.append(counts, counts[:1], axis=0)
            more = LabelFactor(grown[3:], 2) if new == "f" else LabelGramRows(grown[3:] @ grown.T, 2)
            session.join(ClientTable(n=1, labels=more))
        with Session.open(path) as session:
            assert session.table.n == 4

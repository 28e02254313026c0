"""The candidates of a cohort, stored whole or as a difference, are read back as they were."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedcohort.audit.replay import replay_journal
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import read_journal
from fedcohort.journal.candidates import base_of, decode
from fedcohort.journal.maintenance import prune
from fedcohort.session import Session

N = 2000


def stored(journal):
    return dict(journal.database.fetch("SELECT ticket, data FROM candidates"))


def flow(path: Path, *, rounds: int = 60, reopen: int = 0, grow: int = 0, **more: object) -> dict[int, set[int]]:
    """Play an asynchronous session in which usually few clients come and go, sometimes many; return the candidates."""
    generator = np.random.default_rng(4)
    on = generator.random(N) < 0.4
    expected: dict[int, set[int]] = {}
    working: list = []
    session = Session("uniform", N, seed=2, journal=path, asynchronous=True, **more)
    for step in range(rounds):
        on = on.copy()
        few = generator.integers(0, len(on), 150 if step % 20 == 19 else 2)
        on[few] = ~on[few]
        busy = {int(cohort.clients[0]) for cohort in working}
        cohort = session.ask(RoundRequest(1, available=on))
        expected[cohort.ticket] = set(np.flatnonzero(on).tolist()) - busy
        working.append(cohort)
        if len(working) > 4:
            done = working.pop(0)
            session.tell(RoundReport(done.ticket, done.clients))
            session.advance([done.ticket])
        if reopen and step % reopen == reopen - 1:
            session.close()
            session = Session.open(path)
        if grow and step == grow:
            session.join(ClientTable(sizes=[1] * 60))
            on = np.concatenate([on, np.ones(60, bool)])
    session.close()
    return expected


@pytest.mark.parametrize("more", [{}, {"reopen": 7}, {"grow": 30}], ids=["as it goes", "reopened", "clients join"])
def test_what_is_read_is_who_could_be_picked(tmp_path, more):
    expected = flow(tmp_path / "j.sqlite", **more)
    with closing(read_journal(tmp_path / "j.sqlite")) as journal:
        for ticket, who in expected.items():
            assert set(journal.candidates(ticket, N + 60).tolist()) == who
        bases = {ticket: base_of(data) for ticket, data in stored(journal).items()}
        differences = [ticket for ticket, base in bases.items() if base is not None]
        assert len(differences) > len(bases) / 2
        assert all(bases[bases[ticket]] is None and bases[ticket] < ticket for ticket in differences)
        found = replay_journal(journal)
        assert found.problem is None and found.rounds == len(expected)


@pytest.mark.parametrize("keep", [1, 5, 13, 40])
def test_pruning_leaves_the_candidates_of_the_other_rounds(tmp_path, keep):
    path = tmp_path / "j.sqlite"
    expected = flow(path)
    with Session.open(path) as session:
        journal = session.journal
        rounds = {row.ticket: row.round for row in journal.cohorts()}
        prune(journal, keep)
        for ticket, who in expected.items():
            found = journal.candidates(ticket, N)
            if rounds[ticket] <= max(rounds.values()) - keep:
                assert found is None
            else:
                assert set(found.tolist()) == who
        before = max(rounds)
        cohort = session.ask(RoundRequest(1, available=np.arange(300)))
        assert cohort.ticket == before + 1
        assert set(journal.candidates(cohort.ticket, N).tolist()) <= set(range(300))


def test_an_event_that_fails_leaves_no_difference_to_what_is_gone(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session("uniform", N, seed=2, journal=path, asynchronous=True) as session:
        journal = session.journal
        row = session.ask(RoundRequest(1, available=np.arange(500)))
        add = journal.add_cohort

        def broken(*arguments):
            add(*arguments)
            raise OSError("no room")

        journal.add_cohort = broken
        with pytest.raises(OSError, match="no room"):
            session.ask(RoundRequest(1, available=np.arange(40)))
        journal.add_cohort = add
        again = session.ask(RoundRequest(1, available=np.arange(41)))
        assert set(journal.candidates(again.ticket, N).tolist()) == set(range(41)) - set(row.clients.tolist())


@pytest.mark.parametrize(
    ("data", "base", "words"),
    [
        (b"\0" + bytes(8), None, "not on record"),
        (b"\0" + bytes(8), b"", "not on record"),
        (b"\0" + bytes(8), b"\0" + bytes(8), "not on record"),
        (b"\0" + bytes(9), "whole", "cut off"),
        (b"\0\0", "whole", "cut off"),
        (b"\0" + bytes(8) + b"\xff\xff\xff\xff", "whole", "does not exist"),
        (b"\0" + bytes(8) + b"\xff\xff\xff\x7f", "whole", "does not exist"),
    ],
)
def test_a_forged_difference_is_refused(data, base, words):
    from fedcohort.journal.candidates import whole

    with pytest.raises(JournalError, match=words):
        decode(data, whole(np.ones(16, bool)) if base == "whole" else base, 16, "The list")
